//! The direction of dependencies between the crates of the workspace, and the lints of each crate.

use std::{collections::HashSet, fs, path::Path};

use cargo_metadata::{DependencyKind, Metadata, MetadataCommand, NodeDep, Package};

/// The published crates. Each may depend only on earlier ones.
const LAYERS: [&str; 5] =
    ["sluicegate-core", "sluicegate", "sluicegate-tower", "sluicegate-server", "sluicegate-cli"];

const TESTKIT: &str = "sluicegate-testkit";

#[test]
fn every_crate_belongs_to_a_layer() {
    for package in &workspace().packages {
        let name = package.name.as_str();
        assert!(
            LAYERS.contains(&name) || name == TESTKIT,
            "{name} is in no layer: add it to LAYERS in {}",
            file!()
        );
    }
}

#[test]
fn dependencies_point_to_earlier_layers_only() {
    for package in &workspace().packages {
        let Some(place) = layer(&package.name) else { continue };
        for dependency in shipped_dependencies(package) {
            if let Some(other) = layer(dependency) {
                assert!(other < place, "{} must not depend on {dependency}", package.name);
            }
        }
    }
}

#[test]
fn the_testkit_is_unpublished_and_only_ever_a_dev_dependency() {
    for package in &workspace().packages {
        if package.name.as_str() == TESTKIT {
            assert_eq!(package.publish.as_deref(), Some(&[][..]), "{TESTKIT} must set publish = false");
        }
        assert!(
            !shipped_dependencies(package).any(|dependency| dependency == TESTKIT),
            "{} may depend on {TESTKIT} only under [dev-dependencies]",
            package.name
        );
    }
}

#[test]
fn only_the_library_depends_on_the_redis_client() {
    for package in &workspace().packages {
        if ["sluicegate", TESTKIT].contains(&package.name.as_str()) {
            continue;
        }
        assert!(
            !shipped_dependencies(package).any(|dependency| dependency == "redis"),
            "{} must reach Redis through the crate sluicegate",
            package.name
        );
    }
}

#[test]
fn every_crate_uses_the_workspace_lints_which_forbid_unsafe_code() {
    let workspace = workspace();
    let root = manifest(workspace.workspace_root.join("Cargo.toml").as_str());
    assert!(section(&root, "[workspace.lints.rust]").any(|line| line == "unsafe_code = \"forbid\""));

    for package in &workspace.packages {
        let manifest = manifest(package.manifest_path.as_str());
        assert!(
            section(&manifest, "[lints]").any(|line| line == "workspace = true"),
            "{} needs [lints] with workspace = true",
            package.name
        );
    }
}

#[test]
fn every_dependency_compiles_with_the_rust_version_of_the_crates_that_need_it() {
    let metadata = metadata().exec().expect("cargo metadata resolves the dependencies");
    let resolve = metadata.resolve.as_ref().expect("the dependencies are resolved");
    for name in LAYERS {
        let package = metadata.packages.iter().find(|package| package.name.as_str() == name);
        let package = package.expect("every layer is a crate");
        let minimum = package.rust_version.as_ref().expect("every crate has a rust-version");
        let (mut pending, mut seen) = (vec![&package.id], HashSet::new());
        while let Some(id) = pending.pop() {
            if !seen.insert(id) {
                continue;
            }
            let needed = &metadata[id];
            assert!(
                needed.rust_version.as_ref().is_none_or(|version| version <= minimum),
                "{name} has rust-version {minimum}, and its dependency {} needs {:?}",
                needed.name,
                needed.rust_version
            );
            let node = resolve.nodes.iter().find(|node| node.id == *id).expect("every package is a node");
            let is_shipped = |dependency: &&NodeDep| {
                dependency.dep_kinds.iter().any(|kind| kind.kind != DependencyKind::Development)
            };
            pending.extend(node.deps.iter().filter(is_shipped).map(|dependency| &dependency.pkg));
        }
    }
}

#[test]
fn every_dependency_is_used() {
    for package in &workspace().packages {
        let folder = package.manifest_path.parent().expect("a manifest is in a folder");
        let code = sources(folder.as_std_path());
        for dependency in &package.dependencies {
            let name = dependency.rename.as_ref().unwrap_or(&dependency.name).replace('-', "_");
            assert!(
                [format!("{name}::"), format!("use {name};"), format!("{name}!")]
                    .iter()
                    .any(|usage| code.contains(usage)),
                "{} does not use {}: remove it",
                package.name,
                dependency.name
            );
        }
    }
}

/// Returns all Rust code below a folder.
fn sources(folder: &Path) -> String {
    let mut code = String::new();
    for entry in fs::read_dir(folder).expect("the folder can be read") {
        let path = entry.expect("the folder can be read").path();
        if path.is_dir() {
            code += &sources(&path);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            code += &fs::read_to_string(&path).expect("sources are UTF-8");
        }
    }
    code
}

fn workspace() -> Metadata {
    metadata().no_deps().exec().expect("cargo metadata reads the manifests")
}

fn metadata() -> MetadataCommand {
    let mut command = MetadataCommand::new();
    command
        .manifest_path(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"))
        .other_options(["--locked".to_owned()]);
    command
}

fn layer(name: &str) -> Option<usize> {
    LAYERS.iter().position(|layer| *layer == name)
}

/// Returns the names of the normal and build dependencies, without renames.
fn shipped_dependencies(package: &Package) -> impl Iterator<Item = &str> {
    let shipped =
        package.dependencies.iter().filter(|dependency| dependency.kind != DependencyKind::Development);
    shipped.map(|dependency| dependency.name.as_str())
}

fn manifest(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Returns the lines between a header and the next one.
fn section<'a>(manifest: &'a str, header: &str) -> impl Iterator<Item = &'a str> {
    let mut lines = manifest.lines().map(str::trim);
    lines.by_ref().find(|line| *line == header);
    lines.take_while(|line| !line.starts_with('['))
}
