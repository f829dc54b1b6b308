//! The files in `deploy/` and the workflows. `scripts/package manifests` also validates them against the schemas of Kubernetes, Compose and
//! the forge, which needs downloads.

#![expect(clippy::unwrap_used, reason = "a failing helper fails the test")]

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use serde_json::Value;

use crate::command::{run, sluicegate};

fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

fn yaml(path: impl AsRef<Path>) -> Value {
    let path = root().join(path);
    let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_saphyr::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Returns the files below a directory.
fn files(directory: PathBuf) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    entries.flat_map(|path| if path.is_dir() { files(path) } else { vec![path] }).collect()
}

fn assert_has_no_findings(path: &Path) {
    let output = run(&mut sluicegate(&["rules", "check", path.to_str().unwrap()]));
    assert_eq!(output.code, Some(0), "{output:?}");
    assert!(!format!("{output:?}").contains("warning"), "{output:?}");
}

#[test]
fn the_configurations_in_deploy_have_no_findings() {
    let all = files(root().join("deploy"));
    let configurations: Vec<_> = all.iter().filter(|path| path.ends_with("sluicegate.toml")).collect();
    assert!(configurations.len() >= 3, "{configurations:?}");
    configurations.into_iter().for_each(|path| assert_has_no_findings(path));
}

/// A directory that is mounted over the configuration of the image removes its `insecure`.
#[test]
fn in_a_container_a_configuration_without_tokens_has_to_set_insecure() {
    let text = fs::read_to_string(root().join("deploy/container/sluicegate.toml")).unwrap();
    let (kept, removed): (Vec<_>, Vec<_>) =
        text.lines().partition(|line| !line.starts_with("insecure = true"));
    assert_eq!(removed.len(), 1, "{text}");
    let home = tempfile::tempdir().unwrap();
    let path = home.path().join("sluicegate.toml");
    fs::write(&path, kept.join("\n")).unwrap();
    let output = run(&mut sluicegate(&["rules", "check", path.to_str().unwrap()]));
    assert_ne!(output.code, Some(0), "{output:?}");
    assert!(format!("{output:?}").contains("0.0.0.0:8080 is reachable from other machines"), "{output:?}");
}

#[test]
fn the_configuration_for_kubernetes_has_no_findings() {
    let home = tempfile::tempdir().unwrap();
    fs::write(home.path().join("app"), "a-token-of-at-least-sixteen-bytes").unwrap();
    let map = yaml("deploy/kubernetes/configmap.yaml");
    let text = map["data"]["sluicegate.toml"].as_str().unwrap();
    assert!(text.contains("\"/etc/sluicegate-tokens/app\""), "{text}");
    let path = home.path().join("sluicegate.toml");
    fs::write(&path, text.replace("/etc/sluicegate-tokens", home.path().to_str().unwrap())).unwrap();
    assert_has_no_findings(&path);
}

#[test]
fn the_deployment_mounts_what_its_command_reads() {
    let deployment = yaml("deploy/kubernetes/deployment.yaml");
    let pod = &deployment["spec"]["template"]["spec"];
    let container = &pod["containers"][0];
    let mounts = container["volumeMounts"].as_array().unwrap();
    let paths: Vec<_> = mounts.iter().map(|mount| mount["mountPath"].as_str().unwrap()).collect();
    assert_eq!(paths, ["/etc/sluicegate", "/etc/sluicegate-tokens"]);
    assert!(
        mounts.iter().all(|mount| mount["subPath"].is_null()),
        "a file mounted with subPath is never updated"
    );
    assert_eq!(container["args"][2], "/etc/sluicegate/sluicegate.toml");
    assert_eq!(
        pod["volumes"][0]["configMap"]["name"],
        yaml("deploy/kubernetes/configmap.yaml")["metadata"]["name"]
    );
}

#[test]
fn the_kustomization_lists_every_manifest() {
    let kustomization = yaml("deploy/kubernetes/kustomization.yaml");
    let listed = kustomization["resources"].as_array().unwrap();
    let mut listed: Vec<_> = listed.iter().map(|name| name.as_str().unwrap().to_owned()).collect();
    let existing = files(root().join("deploy/kubernetes")).into_iter();
    let mut existing: Vec<_> =
        existing.map(|path| path.file_name().unwrap().to_str().unwrap().to_owned()).collect();
    existing.retain(|name| name != "kustomization.yaml");
    listed.sort();
    existing.sort();
    assert_eq!(listed, existing);
}

#[test]
fn compose_mounts_files_that_exist() {
    let compose = yaml("deploy/compose/compose.yaml");
    for (name, service) in compose["services"].as_object().unwrap() {
        for volume in service["volumes"].as_array().into_iter().flatten() {
            let source = volume.as_str().unwrap().split(':').next().unwrap();
            assert!(root().join("deploy/compose").join(source).exists(), "{name} mounts {source}");
        }
        for port in service["ports"].as_array().into_iter().flatten() {
            assert!(
                port.as_str().unwrap().starts_with("127.0.0.1:"),
                "{name} publishes {port} to other machines"
            );
        }
    }
}

#[test]
fn every_yaml_file_can_be_parsed() {
    let mut all = files(root().join("deploy"));
    all.extend(files(root().join(".github")));
    all.retain(|path| path.extension().is_some_and(|extension| extension == "yml" || extension == "yaml"));
    assert!(all.len() > 10, "{all:?}");
    all.into_iter().for_each(|path| assert!(!yaml(path).is_null()));
}

#[test]
fn every_place_of_the_version_agrees_with_the_workspace() {
    let output = Command::new(root().join("scripts/package")).arg("versions").output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let out = String::from_utf8(output.stdout).unwrap();
    assert!(out.contains(&format!("places have version {}", env!("CARGO_PKG_VERSION"))), "{out}");
}
