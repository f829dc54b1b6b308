//! Reloading: files that are rewritten, replaced, relinked, broken and repaired.

#![expect(clippy::unwrap_used, reason = "a failing helper fails the test")]

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    time::Duration,
};

use sluicegate_server::config::{
    Config, Digest, Environment, Flags, Source,
    watch::{Reload, Watcher},
};
use tempfile::TempDir;
use tokio::time::timeout;

/// Maximum time until a change is detected, on a machine that is busy with other tests.
const TIMEOUT: Duration = Duration::from_secs(20);

fn rule(amount: u64) -> String {
    format!("[[rule]]\nname = \"r\"\namount = {amount}\nwindow = \"1m\"\n")
}

fn source(config: &Path) -> Source {
    let flags = Flags { config: Some(config.to_owned()), ..Flags::default() };
    Source { flags, environment: Environment::of([]), directory: PathBuf::new() }
}

fn amount(config: &Config) -> u64 {
    config.rules[0].limit.amount()
}

async fn next(watcher: &mut Watcher) -> Reload {
    timeout(TIMEOUT, watcher.next()).await.expect("the change is detected")
}

async fn changed(watcher: &mut Watcher) -> (Config, Vec<String>) {
    match next(watcher).await {
        Reload::Changed { config, needs_restart } => (*config, needs_restart),
        Reload::Rejected(error) => panic!("{error}"),
    }
}

async fn rejected(watcher: &mut Watcher) -> String {
    match next(watcher).await {
        Reload::Changed { .. } => panic!("an invalid file was accepted"),
        Reload::Rejected(error) => error.to_string(),
    }
}

/// Replaces a file atomically, as editors and deployments do.
fn replace(path: &Path, text: &str) {
    let other = path.with_extension("new");
    fs::write(&other, text).unwrap();
    fs::rename(other, path).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn written_and_replaced_files_are_reloaded() {
    let directory = TempDir::new().unwrap();
    let path = directory.path().join("t.toml");
    fs::write(&path, rule(1)).unwrap();
    let (config, mut watcher) = Watcher::start(source(&path)).await.unwrap();
    assert_eq!(amount(&config), 1);
    fs::write(&path, rule(2)).unwrap();
    assert_eq!(amount(&changed(&mut watcher).await.0), 2);
    for expected in 3..6 {
        replace(&path, &rule(expected));
        let (config, needs_restart) = changed(&mut watcher).await;
        assert_eq!((amount(&config), needs_restart), (expected, vec![]));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_swapped_link_is_reloaded_as_kubernetes_mounts_config_maps() {
    let directory = TempDir::new().unwrap();
    let version = |number: u64| {
        let name = format!("..2026_{number}");
        let version = directory.path().join(&name);
        fs::create_dir(&version).unwrap();
        fs::write(version.join("sluicegate.toml"), rule(number)).unwrap();
        symlink(&name, directory.path().join("..data_tmp")).unwrap();
        fs::rename(directory.path().join("..data_tmp"), directory.path().join("..data")).unwrap();
        version
    };
    let mut old = version(1);
    let path = directory.path().join("sluicegate.toml");
    symlink("..data/sluicegate.toml", &path).unwrap();
    let (config, mut watcher) = Watcher::start(source(&path)).await.unwrap();
    assert_eq!(amount(&config), 1);
    for number in 2..5 {
        let new = version(number);
        fs::remove_dir_all(&old).unwrap();
        old = new;
        assert_eq!(amount(&changed(&mut watcher).await.0), number);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_relinked_directory_is_reloaded_and_watched() {
    let directory = TempDir::new().unwrap();
    let releases = [1, 2].map(|number| {
        let release = directory.path().join(format!("release-{number}/etc"));
        fs::create_dir_all(&release).unwrap();
        fs::write(release.join("t.toml"), rule(number)).unwrap();
        release.parent().unwrap().to_owned()
    });
    let current = directory.path().join("current");
    symlink(&releases[0], &current).unwrap();
    let (_, mut watcher) = Watcher::start(source(&current.join("etc/t.toml"))).await.unwrap();
    let other = directory.path().join("other");
    symlink(&releases[1], &other).unwrap();
    fs::rename(&other, &current).unwrap();
    assert_eq!(amount(&changed(&mut watcher).await.0), 2);
    // The new directory is watched as well.
    fs::write(releases[1].join("etc/t.toml"), rule(3)).unwrap();
    assert_eq!(amount(&changed(&mut watcher).await.0), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_invalid_file_is_rejected_and_the_next_valid_one_accepted() {
    let directory = TempDir::new().unwrap();
    let path = directory.path().join("t.toml");
    fs::write(&path, rule(1)).unwrap();
    let (_, mut watcher) = Watcher::start(source(&path)).await.unwrap();
    replace(&path, &rule(0));
    assert!(rejected(&mut watcher).await.contains("t.toml:3:10: rule \"r\": amount 0"));
    replace(&path, "[[rule");
    assert!(rejected(&mut watcher).await.contains("invalid TOML"));
    fs::remove_file(&path).unwrap();
    assert!(rejected(&mut watcher).await.contains("No such file"));
    replace(&path, &rule(2));
    assert_eq!(amount(&changed(&mut watcher).await.0), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_file_replaces_the_demo_and_a_deleted_file_does_not_restore_it() {
    let directory = TempDir::new().unwrap();
    let source = Source {
        flags: Flags::default(),
        environment: Environment::of([]),
        directory: directory.path().to_owned(),
    };
    let (config, mut watcher) = Watcher::start(source).await.unwrap();
    assert_eq!(config.rules.len(), 2);
    let path = directory.path().join("sluicegate.toml");
    replace(&path, &rule(7));
    assert_eq!(amount(&changed(&mut watcher).await.0), 7);
    fs::remove_file(&path).unwrap();
    assert!(rejected(&mut watcher).await.contains("sluicegate.toml no longer exists"));
}

#[tokio::test(flavor = "multi_thread")]
async fn every_referenced_file_is_watched() {
    const CERTIFICATE: &str = "-----BEGIN CERTIFICATE-----\nMA==\n-----END CERTIFICATE-----\n";
    let directory = TempDir::new().unwrap();
    let path = |name: &str| directory.path().join(name);
    fs::create_dir(path("secrets")).unwrap();
    fs::write(path("secrets/deploy"), "one").unwrap();
    fs::write(path("tenants.csv"), "tenant,amount\nacme,5\n").unwrap();
    for name in ["cert.pem", "key.pem"] {
        fs::write(path(name), CERTIFICATE).unwrap();
    }
    let text = "[server.tls]\ncert = \"cert.pem\"\nkey = \"key.pem\"\n\
                [[server.token]]\nname = \"deploy\"\nfile = \"secrets/deploy\"\n"
        .to_owned()
        + &rule(1)
        + "per = [\"tenant\"]\noverrides_file = \"tenants.csv\"\n";
    fs::write(path("t.toml"), text).unwrap();
    let (_, mut watcher) = Watcher::start(source(&path("t.toml"))).await.unwrap();

    replace(&path("secrets/deploy"), "two");
    let (config, needs_restart) = changed(&mut watcher).await;
    assert!(config.server.tokens[0].accepts(&Digest::of(b"two")) && needs_restart.is_empty());

    replace(&path("tenants.csv"), "tenant,amount\nacme,6\nother,7\n");
    assert_eq!(changed(&mut watcher).await.0.rules[0].overrides.len(), 2);

    replace(&path("cert.pem"), &CERTIFICATE.replace("MA", "MQ"));
    let (config, needs_restart) = changed(&mut watcher).await;
    assert!(config.server.tls.unwrap().cert.windows(2).any(|window| window == b"MQ"));
    assert!(needs_restart.is_empty());

    fs::remove_file(path("secrets/deploy")).unwrap();
    assert!(rejected(&mut watcher).await.contains("secrets/deploy"));
}

#[tokio::test(flavor = "multi_thread")]
async fn settings_that_need_a_restart_are_listed_while_they_differ_from_the_start() {
    let directory = TempDir::new().unwrap();
    let path = directory.path().join("t.toml");
    fs::write(&path, "[server]\nhttp = \"127.0.0.1:1\"\n").unwrap();
    let (_, mut watcher) = Watcher::start(source(&path)).await.unwrap();
    replace(&path, "[server]\nhttp = \"127.0.0.1:2\"\ninsecure = true\n[store]\ndeadline = \"5ms\"");
    assert_eq!(changed(&mut watcher).await.1, ["server.http", "store.deadline"]);
    // The comparison is with the start, not with the previous reload.
    replace(&path, "[server]\nhttp = \"127.0.0.1:2\"\n");
    assert_eq!(changed(&mut watcher).await.1, ["server.http"]);
    replace(
        &path,
        "[server]\nhttp = \"127.0.0.1:1\"\n[store]\nurl = \"redis://h\"\nkey_scan_interval = \"1h\"\n",
    );
    assert_eq!(changed(&mut watcher).await.1, ["store.url", "store.key_scan_interval"]);
    replace(&path, "[server]\nhttp = \"127.0.0.1:1\"\nheaders = \"none\"\n");
    assert!(changed(&mut watcher).await.1.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_requested_reload_reports_even_without_a_change() {
    let directory = TempDir::new().unwrap();
    let path = directory.path().join("t.toml");
    fs::write(&path, rule(1)).unwrap();
    let (config, mut watcher) = Watcher::start(source(&path)).await.unwrap();
    watcher.reloader().reload_now();
    assert_eq!(changed(&mut watcher).await.0, config);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_reloads_each_return_the_current_file() {
    let directory = TempDir::new().unwrap();
    let path = directory.path().join("t.toml");
    fs::write(&path, rule(1)).unwrap();
    let (_, mut watcher) = Watcher::start(source(&path)).await.unwrap();
    let reloader = watcher.reloader();
    let files_before = open_files(directory.path());
    for number in 2..1_002 {
        replace(&path, &rule(number));
        reloader.reload_now();
        // An event of the previous change may cause one more reload of the same content.
        while amount(&changed(&mut watcher).await.0) != number {}
    }
    // a separate thread closes the watches of replaced files
    let closed = async {
        while open_files(directory.path()) > files_before + 8 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let outcome = timeout(TIMEOUT, closed).await;
    assert!(outcome.is_ok(), "{files_before} files were open, now {}", open_files(directory.path()));
}

#[tokio::test(flavor = "multi_thread")]
async fn other_files_in_the_directory_are_ignored() {
    let directory = TempDir::new().unwrap();
    let path = directory.path().join("t.toml");
    fs::write(&path, rule(1)).unwrap();
    let (_, mut watcher) = Watcher::start(source(&path)).await.unwrap();
    for number in 0..50 {
        fs::write(directory.path().join(format!("log.{number}")), "x").unwrap();
    }
    // A file that is replaced with the same content causes no reload.
    replace(&path, &rule(1));
    assert!(timeout(Duration::from_millis(500), watcher.next()).await.is_err());
    replace(&path, &rule(2));
    assert_eq!(amount(&changed(&mut watcher).await.0), 2);
}

#[tokio::test]
async fn a_pipe_is_read_once_and_cannot_be_reloaded() {
    let directory = TempDir::new().unwrap();
    let path = directory.path().join("pipe");
    let made = std::process::Command::new("mkfifo").arg(&path).status().unwrap();
    assert!(made.success());
    let writer = path.clone();
    let written = tokio::task::spawn_blocking(move || fs::write(writer, rule(1)).unwrap());
    let (config, mut watcher) = Watcher::start(source(&path)).await.unwrap();
    written.await.unwrap();
    assert_eq!(amount(&config), 1);
    watcher.reloader().reload_now();
    assert!(rejected(&mut watcher).await.contains("not a regular file"));
}

/// Open files below this directory, and open inotify instances. Other tests of the same process open other files.
fn open_files(directory: &Path) -> usize {
    let entries = fs::read_dir("/proc/self/fd").unwrap();
    let targets = entries.filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
    targets.filter(|path| path.starts_with(directory) || path == Path::new("anon_inode:inotify")).count()
}
