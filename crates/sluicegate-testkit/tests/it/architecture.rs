//! The structural claims of `ARCHITECTURE.md` that the compiler does not check.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// The Rust sources below a folder of the repository, with their paths in it and without their unit tests.
fn sources(folder: &str) -> Vec<(PathBuf, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let (mut folders, mut sources) = (vec![root.join(folder)], Vec::new());
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).expect("the folder exists") {
            let path = entry.expect("the folder can be read").path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs")
                && !path.ends_with("tests.rs")
            {
                let text = fs::read_to_string(&path).expect("sources are UTF-8");
                let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
                let path = path.strip_prefix(&root).expect("it is below the root").to_owned();
                sources.push((path, code.to_owned()));
            }
        }
    }
    assert!(sources.len() > 5, "{folder} has sources");
    sources
}

#[test]
fn the_backend_is_matched_in_one_file() {
    for (path, code) in sources("crates/sluicegate/src") {
        let names_a_variant = ["Backend::Local", "Backend::Remote"].iter().any(|name| code.contains(name));
        assert!(!names_a_variant, "{} matches on the backend: only backend.rs may", path.display());
    }
}

#[test]
fn front_ends_do_not_import_each_other() {
    const FRONT_ENDS: [&str; 3] = ["http", "grpc", "resp"];
    for front_end in FRONT_ENDS {
        for (path, code) in sources(&format!("crates/sluicegate-server/src/{front_end}")) {
            for other in FRONT_ENDS.iter().filter(|other| **other != front_end) {
                let import = format!("crate::{other}");
                assert!(!code.contains(&import), "{} imports {other}", path.display());
                let nested = code.split("use crate::{").skip(1).any(|list| {
                    let list = list.split("};").next().unwrap_or_default();
                    list.lines().any(|line| line.trim_start().starts_with(&format!("{other}::")))
                });
                assert!(!nested, "{} imports {other}", path.display());
            }
        }
    }
}

#[test]
fn only_the_configuration_reads_files_and_the_environment() {
    const READS: [&str; 5] = ["fs::read", "File::open", "env::var", "fs::File", "fs::metadata"];
    for (path, code) in [sources("crates/sluicegate-server/src"), sources("crates/sluicegate/src")].concat() {
        let is_configuration = path.iter().any(|directory| directory == "config");
        let reads = READS.iter().find(|call| code.contains(**call));
        assert!(is_configuration || reads.is_none(), "{} calls {reads:?}", path.display());
    }
}

/// The name under which the product was developed. Built from parts, so that this file does not contain it.
#[test]
fn the_former_name_is_in_the_changelog_only() {
    let former = ["toll", "gate"].concat();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let files = Command::new("git").arg("ls-files").current_dir(&root).output().expect("git lists the files");
    let files = String::from_utf8(files.stdout).expect("paths are UTF-8");
    assert!(files.lines().count() > 100, "the repository has files");
    for path in files.lines().filter(|path| *path != "CHANGELOG.md") {
        assert!(!path.to_lowercase().contains(&former), "{path} has the former name");
        let Ok(bytes) = fs::read(root.join(path)) else { continue };
        let text = String::from_utf8_lossy(&bytes).to_lowercase();
        assert!(!text.contains(&former), "{path} contains the former name");
    }
}
