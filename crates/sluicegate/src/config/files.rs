//! Reads the files of a configuration, with size limits and relative to the configuration file.

use std::{
    fs,
    io::{self, Read},
    path::{Path, PathBuf},
};

use sha2::{Digest, Sha256};

use super::{
    error::{Location, Problem},
    toml_reader::Field,
};

/// Maximum size of a configuration file, in bytes.
pub const MAX_CONFIG_BYTES: u64 = 16 << 20;
/// Maximum size of a CSV file of overrides, in bytes.
pub const MAX_OVERRIDES_BYTES: u64 = 256 << 20;
/// Maximum size of a file with a secret or certificates, in bytes.
pub const MAX_SMALL_BYTES: u64 = 1 << 20;

/// The path of the standard input.
pub const STANDARD_INPUT: &str = "/dev/stdin";

/// Reads files and records their paths and a hash of their contents.
pub struct Files {
    /// The directory that relative paths refer to.
    base: PathBuf,
    read: Vec<PathBuf>,
    digest: Sha256,
}

impl Files {
    /// Resolves relative paths against the directory of this file, or the working directory for the standard input.
    pub fn beside(path: &Path) -> Self {
        let beside = path.parent().filter(|_| path != Path::new(STANDARD_INPUT));
        let base = beside.map(Path::to_path_buf).unwrap_or_default();
        Self { base, read: Vec::new(), digest: Sha256::new() }
    }

    /// Returns the paths of all files and a hash of their contents; an equal hash means that nothing has changed.
    pub fn into_parts(self) -> (Vec<PathBuf>, [u8; 32]) {
        (self.read, self.digest.finalize().into())
    }

    /// Reads a file of at max_bytes `max_bytes`.
    pub fn bytes(&mut self, path: &Path, max_bytes: u64) -> io::Result<Vec<u8>> {
        let content = contents(path, max_bytes);
        if !self.read.iter().any(|other| other == path) {
            self.read.push(path.to_owned());
            if !is_stream(path) {
                update(&mut self.digest, &content);
            }
        }
        content
    }

    /// Resolves a path from a setting.
    pub fn path(&self, name: &str) -> PathBuf {
        self.base.join(name)
    }

    /// Reads the file named by a setting, of at max_bytes [`MAX_SMALL_BYTES`].
    pub fn small(&mut self, field: &Field<String>, problems: &mut Vec<Problem>) -> Option<Vec<u8>> {
        self.named(field, MAX_SMALL_BYTES, problems)
    }

    /// Reads a secret from the file named by a setting, without line endings at its end.
    pub fn secret(&mut self, field: &Field<String>, problems: &mut Vec<Problem>) -> Option<Vec<u8>> {
        let mut secret = self.small(field, problems)?;
        while secret.last().is_some_and(|byte| matches!(byte, b'\n' | b'\r')) {
            secret.pop();
        }
        Some(secret)
    }

    /// Reads the file named by a setting.
    pub fn named(
        &mut self,
        field: &Field<String>,
        max_bytes: u64,
        problems: &mut Vec<Problem>,
    ) -> Option<Vec<u8>> {
        let path = self.path(field.get()?);
        let content = self.bytes(&path, max_bytes);
        content.map_err(|error| problems.push(unreadable(&path, &error, &field.location()))).ok()
    }
}

/// Describes a file that cannot be read, with a fix.
pub fn unreadable(path: &Path, error: &io::Error, location: &Location) -> Problem {
    let remedy = match error.kind() {
        io::ErrorKind::NotFound => ": correct its path",
        io::ErrorKind::IsADirectory => ": name a file in it",
        io::ErrorKind::PermissionDenied => ": let this user read it",
        _ => "",
    };
    Problem::new(location, format!("cannot read {}: {error}{remedy}", path.display()))
}

/// Hashes the current contents of these files, as [`Files::into_parts`] does.
pub fn digest(paths: &[PathBuf]) -> [u8; 32] {
    let mut digest = Sha256::new();
    for path in paths {
        if !is_stream(path) {
            update(&mut digest, &contents(path, MAX_OVERRIDES_BYTES));
        }
    }
    digest.finalize().into()
}

/// Whether this is a pipe or another special file, which can be read only once.
pub fn is_stream(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|data| !data.is_file())
}

fn update(digest: &mut Sha256, content: &io::Result<Vec<u8>>) {
    match content {
        Ok(bytes) => {
            digest.update([1]);
            digest.update(bytes.len().to_le_bytes());
            digest.update(bytes);
        }
        Err(error) => digest.update(error.kind().to_string()),
    }
}

fn contents(path: &Path, max_bytes: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    fs::File::open(path)?.take(max_bytes + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > max_bytes {
        return Err(io::Error::other(format!("it is larger than {} KiB", max_bytes >> 10)));
    }
    Ok(bytes)
}
