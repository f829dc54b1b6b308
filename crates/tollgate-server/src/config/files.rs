//! The files that a configuration consists of: read within bounds, relative to the first of them, and remembered.

use std::{
    fs,
    io::{self, Read},
    path::{Path, PathBuf},
};

use sha2::{Digest, Sha256};

use super::{
    error::{Place, Problem},
    reader::Field,
};

/// The largest configuration file, in bytes.
pub const MAX_CONFIG_BYTES: u64 = 16 << 20;
/// The largest file of overrides, in bytes.
pub const MAX_OVERRIDES_BYTES: u64 = 256 << 20;
/// The largest file of a secret or of certificates, in bytes.
pub const MAX_SMALL_BYTES: u64 = 1 << 20;

/// Where the standard input is a file.
pub const STANDARD_INPUT: &str = "/dev/stdin";

/// Reads files and remembers which, and what was in them.
pub(super) struct Files {
    /// What relative paths are relative to.
    base: PathBuf,
    read: Vec<PathBuf>,
    digest: Sha256,
}

impl Files {
    /// Files beside this one; of the standard input, those in the current directory.
    pub(super) fn beside(path: &Path) -> Self {
        let beside = path.parent().filter(|_| path != Path::new(STANDARD_INPUT));
        let base = beside.map(Path::to_path_buf).unwrap_or_default();
        Self { base, read: Vec::new(), digest: Sha256::new() }
    }

    /// The files asked for, and a hash of what was found: two equal ones mean that nothing has changed.
    pub(super) fn into_parts(self) -> (Vec<PathBuf>, [u8; 32]) {
        (self.read, self.digest.finalize().into())
    }

    /// The content of a file.
    pub(super) fn bytes(&mut self, path: &Path, most: u64) -> io::Result<Vec<u8>> {
        let content = contents(path, most);
        if !self.read.iter().any(|other| other == path) {
            self.read.push(path.to_owned());
            if !is_stream(path) {
                note(&mut self.digest, &content);
            }
        }
        content
    }

    /// The path that a setting names.
    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.base.join(name)
    }

    /// The content of the file that a setting names, of certificates or the like.
    pub(super) fn small(&mut self, field: &Field<String>, problems: &mut Vec<Problem>) -> Option<Vec<u8>> {
        self.named(field, MAX_SMALL_BYTES, problems)
    }

    /// The secret in the file that a setting names: everything but the end of its line.
    pub(super) fn secret(&mut self, field: &Field<String>, problems: &mut Vec<Problem>) -> Option<Vec<u8>> {
        let mut secret = self.small(field, problems)?;
        while secret.last().is_some_and(|byte| matches!(byte, b'\n' | b'\r')) {
            secret.pop();
        }
        Some(secret)
    }

    /// The content of the file that a setting names.
    pub(super) fn named(
        &mut self,
        field: &Field<String>,
        most: u64,
        problems: &mut Vec<Problem>,
    ) -> Option<Vec<u8>> {
        let path = self.path(field.get()?);
        let content = self.bytes(&path, most);
        content.map_err(|error| problems.push(unreadable(&path, &error, &field.place()))).ok()
    }
}

/// Says that a file cannot be read, and what to do.
pub(super) fn unreadable(path: &Path, error: &io::Error, place: &Place) -> Problem {
    let remedy = match error.kind() {
        io::ErrorKind::NotFound => ": correct its path",
        io::ErrorKind::IsADirectory => ": name a file in it",
        io::ErrorKind::PermissionDenied => ": let this user read it",
        _ => "",
    };
    Problem::new(place, format!("cannot read {}: {error}{remedy}", path.display()))
}

/// The hash of what is in these files now: that of [`Files::into_parts`] unless something has changed.
pub(super) fn digest(paths: &[PathBuf]) -> [u8; 32] {
    let mut digest = Sha256::new();
    for path in paths {
        if !is_stream(path) {
            note(&mut digest, &contents(path, MAX_OVERRIDES_BYTES));
        }
    }
    digest.finalize().into()
}

/// Whether this is a pipe or the like, which can be read only once.
pub(super) fn is_stream(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|data| !data.is_file())
}

fn note(digest: &mut Sha256, content: &io::Result<Vec<u8>>) {
    match content {
        Ok(bytes) => {
            digest.update([1]);
            digest.update(bytes.len().to_le_bytes());
            digest.update(bytes);
        }
        Err(error) => digest.update(error.kind().to_string()),
    }
}

fn contents(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    fs::File::open(path)?.take(most + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > most {
        return Err(io::Error::other(format!("it has more than {} KiB", most >> 10)));
    }
    Ok(bytes)
}
