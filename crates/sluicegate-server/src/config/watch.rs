//! Reloads the configuration when one of its files changes or on request.
//!
//! Watches the directories of all files and of every symbolic link that leads to them, because Kubernetes updates a file
//! by replacing a link to its directory. File system events only trigger a comparison; a reload happens if the contents
//! have changed. Polling covers systems without events (network file systems, exhausted watches), with a delay.

use std::{
    collections::BTreeSet,
    fs,
    future::pending,
    io::ErrorKind,
    panic::resume_unwind,
    path::{Component, Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime},
};

use notify::{
    Event, EventKind, RecommendedWatcher, RecursiveMode, Watcher as _,
    event::{AccessKind, AccessMode},
};
use sluicegate::config::{error::Location, files};
use tokio::{
    sync::{Notify, mpsc},
    task::{JoinHandle, spawn_blocking},
    time::{Instant, MissedTickBehavior, interval, timeout},
};

use super::{
    Config, ConfigError, LoadAttempt, Origin, Problem, ServerSettings, Source, StoreSettings, try_load,
    validate::needs_restart,
};

/// Quiet time before files are read, so that several files can be written together.
const QUIET: Duration = Duration::from_millis(100);
/// Maximum wait while files keep changing.
const MAX_WAIT: Duration = Duration::from_secs(1);
/// Polling interval.
const POLL_INTERVAL: Duration = Duration::from_secs(5);
/// Maximum number of symbolic links that lead to a file.
const MAX_LINKS: usize = 40;

/// Watches the configuration and reloads it.
pub struct Watcher {
    reloads: mpsc::Receiver<Reload>,
    reloader: Reloader,
    task: JoinHandle<()>,
}

/// Requests a reload, for example on a signal.
#[derive(Clone)]
pub struct Reloader(Arc<Notify>);

/// The result of a reload.
#[derive(Clone, Debug, PartialEq)]
pub enum Reload {
    /// The configuration is valid.
    Changed {
        /// The new configuration.
        config: Box<Config>,
        /// Settings that differ from those at startup and take effect only after a restart.
        needs_restart: Vec<String>,
    },
    /// The configuration is invalid; the previous one stays active.
    Rejected(ConfigError),
}

impl Watcher {
    /// Loads the configuration and starts watching it. Needs a tokio runtime.
    ///
    /// # Errors
    /// As [`load`](super::load).
    pub async fn start(source: Source) -> Result<(Config, Self), ConfigError> {
        let (source, first) = read(source).await;
        let config = first.outcome?;
        let (found, reloads) = mpsc::channel(1);
        let reloader = Reloader(Arc::new(Notify::new()));
        let mut watch = Watch {
            source,
            started: (config.server.clone(), config.store.clone()),
            origin: config.origin.clone(),
            files: first.files,
            digest: first.digest,
            stamps: Vec::new(),
            events: FileEvents::default(),
            requests: reloader.clone(),
            found,
        };
        watch.watch_files().await;
        let task = tokio::spawn(watch.run());
        Ok((config, Self { reloads, reloader, task }))
    }

    /// Waits for the next reload. Cancel safe.
    pub async fn next(&mut self) -> Reload {
        match self.reloads.recv().await {
            Some(reload) => reload,
            // The task ends only when this value is dropped or the runtime stops.
            None => std::future::pending().await,
        }
    }

    /// Returns a handle that requests a reload. [`Watcher::next`] returns the result, even if nothing has changed.
    pub fn reloader(&self) -> Reloader {
        self.reloader.clone()
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Reloader {
    /// Requests a reload, whether or not a file has changed.
    pub fn reload_now(&self) {
        self.0.notify_one();
    }
}

struct Watch {
    source: Source,
    started: (ServerSettings, StoreSettings),
    /// The source of the active configuration.
    origin: Origin,
    /// The files of the last load, and a hash of their contents.
    files: Vec<PathBuf>,
    digest: [u8; 32],
    /// Their metadata at the last poll.
    stamps: Vec<Stamp>,
    events: FileEvents,
    requests: Reloader,
    found: mpsc::Sender<Reload>,
}

impl Watch {
    async fn run(mut self) {
        let mut polls = interval(POLL_INTERVAL);
        polls.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let is_due = tokio::select! {
                () = self.requests.0.notified() => true,
                () = self.events.wait() => self.is_changed_after_event().await,
                _ = polls.tick() => self.is_metadata_changed().await && self.is_content_changed().await,
            };
            if is_due {
                let reload = self.reload().await;
                if self.found.send(reload).await.is_err() {
                    return;
                }
            }
        }
    }

    /// Waits until the files stop changing. A reload request ends the wait.
    async fn is_changed_after_event(&mut self) -> bool {
        tokio::select! {
            () = self.requests.0.notified() => true,
            () = self.events.settle() => self.is_content_changed().await,
        }
    }

    /// Whether the metadata of the files has changed since the last poll.
    async fn is_metadata_changed(&mut self) -> bool {
        let files = self.files.clone();
        let now = blocking(move || stamps(&files)).await;
        let is_changed = now != self.stamps;
        self.stamps = now;
        is_changed
    }

    /// Whether the contents of the files have changed since the last load.
    async fn is_content_changed(&self) -> bool {
        let files = self.files.clone();
        blocking(move || files::digest(&files)).await != self.digest
    }

    async fn reload(&mut self) -> Reload {
        if let Some(path) = self.files.iter().find(|path| files::is_stream(path)) {
            let message = format!("{} cannot be reloaded: it is not a regular file", path.display());
            return Reload::Rejected(Problem::new(&Location::Default, message).into());
        }
        let source = self.source.clone();
        let Ok(LoadAttempt { outcome, files, digest }) = spawn_blocking(move || try_load(&source)).await
        else {
            // A panic is a bug. The active configuration stays, and the next change is read again.
            let message = "internal error while reading the configuration: please report this file";
            return Reload::Rejected(Problem::new(&Location::Default, message).into());
        };
        (self.files, self.digest) = (files, digest);
        self.watch_files().await;
        match outcome {
            Err(error) => Reload::Rejected(error),
            // A deleted file does not activate the demo rules.
            Ok(Config { origin: Origin::Demo, .. }) if self.origin != Origin::Demo => {
                let message = format!("{} no longer exists", self.files[0].display());
                Reload::Rejected(Problem::new(&Location::Default, message).into())
            }
            Ok(config) => {
                self.origin = config.origin.clone();
                let (server, store) = (&self.started.0, &self.started.1);
                let needs_restart = needs_restart((server, store), (&config.server, &config.store));
                Reload::Changed { config: Box::new(config), needs_restart }
            }
        }
    }

    /// Watches the files of the last load. A change between the load and this call counts as an event.
    async fn watch_files(&mut self) {
        let (files, changed) = (self.files.clone(), Arc::clone(&self.events.changed));
        let start = move || (stamps(&files), watched(&files, changed));
        (self.stamps, self.events.watcher) = blocking(start).await;
        if self.is_content_changed().await {
            self.events.changed.notify_one();
        }
    }
}

/// File system events. Polling continues where there are none.
#[derive(Default)]
struct FileEvents {
    changed: Arc<Notify>,
    watcher: Option<RecommendedWatcher>,
}

/// Notifies `changed` when one of these files or a link to it changes, until the watcher is dropped.
fn watched(files: &[PathBuf], changed: Arc<Notify>) -> Option<RecommendedWatcher> {
    let paths: BTreeSet<PathBuf> = files.iter().flat_map(|path| link_chain(path)).collect();
    let directories: BTreeSet<PathBuf> =
        paths.iter().filter_map(|path| path.parent().map(Path::to_path_buf)).collect();
    let on_event = move |event: notify::Result<Event>| {
        let is_relevant = event.map_or(true, |event| {
            event.need_rescan()
                || is_change(&event.kind) && event.paths.iter().any(|path| paths.contains(path))
        });
        if is_relevant {
            changed.notify_one();
        }
    };
    let mut watcher = notify::recommended_watcher(on_event).ok()?;
    for directory in directories {
        // Polling covers directories that are missing or cannot be watched.
        let _watched = watcher.watch(&directory, RecursiveMode::NonRecursive);
    }
    Some(watcher)
}

impl FileEvents {
    async fn wait(&self) {
        self.changed.notified().await;
    }

    /// Waits until nothing has changed for [`QUIET`], at most [`MAX_WAIT`].
    async fn settle(&self) {
        let until = Instant::now() + MAX_WAIT;
        while Instant::now() < until && timeout(QUIET, self.wait()).await.is_ok() {}
    }
}

/// Whether an event can change a file's content; reading does not.
fn is_change(kind: &EventKind) -> bool {
    !kind.is_access() || *kind == EventKind::Access(AccessKind::Close(AccessMode::Write))
}

async fn read(source: Source) -> (Source, LoadAttempt) {
    blocking(move || {
        let attempt = try_load(&source);
        (source, attempt)
    })
    .await
}

/// Runs blocking file operations on a thread for them.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    match spawn_blocking(work).await {
        Ok(done) => done,
        Err(error) if error.is_panic() => resume_unwind(error.into_panic()),
        // the runtime shuts down, and this task with it
        Err(_cancelled) => pending().await,
    }
}

/// Metadata of a file that changes with its content.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Stamp {
    Missing(ErrorKind),
    Present { length: u64, modified: Option<SystemTime>, location: PathBuf },
}

fn stamps(files: &[PathBuf]) -> Vec<Stamp> {
    files
        .iter()
        .map(|path| match fs::metadata(path) {
            Err(error) => Stamp::Missing(error.kind()),
            Ok(data) => {
                let location = fs::canonicalize(path).unwrap_or_default();
                Stamp::Present { length: data.len(), modified: data.modified().ok(), location }
            }
        })
        .collect()
}

/// Returns the file that a path resolves to and every symbolic link on the way: any of them can change the content.
fn link_chain(path: &Path) -> Vec<PathBuf> {
    let mut chain = Vec::new();
    let mut rest = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    'links: for _ in 0..=MAX_LINKS {
        let mut prefix = PathBuf::new();
        let mut components = rest.components();
        while let Some(component) = components.next() {
            match component {
                Component::ParentDir => drop(prefix.pop()),
                other => prefix.push(other),
            }
            if let Ok(target) = fs::read_link(&prefix) {
                chain.push(prefix.clone());
                prefix.pop();
                rest = prefix.join(target).join(components.as_path());
                continue 'links;
            }
        }
        chain.push(prefix);
        break;
    }
    chain
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn the_link_chain_has_every_link_that_leads_to_a_file() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path().canonicalize().unwrap();
        fs::create_dir_all(root.join("v1/deep")).unwrap();
        fs::write(root.join("v1/deep/a.toml"), "").unwrap();
        symlink("v1", root.join("..data")).unwrap();
        symlink("..data/deep/a.toml", root.join("a.toml")).unwrap();
        symlink(&root, root.join("v1/home")).unwrap();
        let expected = ["a.toml", "..data", "v1/deep/a.toml"].map(|name| root.join(name));
        assert_eq!(link_chain(&root.join("a.toml")), expected);
        let indirect = link_chain(&root.join("v1/home/v1/../a.toml"));
        assert_eq!(indirect[0], root.join("v1/home"));
        assert_eq!(indirect[1..], expected);
        assert_eq!(link_chain(&root.join("missing/b")), [root.join("missing/b")]);
    }

    fn watching(path: &Path) -> FileEvents {
        let changed = Arc::<Notify>::default();
        let watcher = watched(&[path.to_owned()], Arc::clone(&changed));
        FileEvents { changed, watcher }
    }

    /// Whether a change causes an event, rather than being found by polling.
    async fn causes_event(path: &Path, change: impl FnOnce()) -> bool {
        const TIMEOUT: Duration = Duration::from_secs(20);
        let events = watching(path);
        change();
        timeout(TIMEOUT, events.wait()).await.is_ok()
    }

    #[tokio::test]
    async fn every_kind_of_change_causes_an_event() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path();
        let path = root.join("t.toml");
        let other = root.join("other");
        assert!(causes_event(&path, || fs::write(&path, "1").unwrap()).await);
        assert!(causes_event(&path, || fs::write(&path, "2").unwrap()).await);
        fs::write(&other, "3").unwrap();
        assert!(causes_event(&path, || fs::rename(&other, &path).unwrap()).await);
        assert!(causes_event(&path, || fs::remove_file(&path).unwrap()).await);
        for version in ["v1", "v2"] {
            fs::create_dir(root.join(version)).unwrap();
            fs::write(root.join(version).join("t.toml"), version).unwrap();
        }
        symlink("v1", root.join("..data")).unwrap();
        symlink("..data/t.toml", &path).unwrap();
        symlink("v2", &other).unwrap();
        assert!(causes_event(&path, || fs::rename(&other, root.join("..data")).unwrap()).await);
        assert!(causes_event(&path, || fs::write(root.join("v2/t.toml"), "4").unwrap()).await);
    }

    #[tokio::test]
    async fn reading_a_file_or_changing_another_file_causes_no_event() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("t.toml");
        fs::write(&path, "1").unwrap();
        let events = watching(&path);
        fs::read(&path).unwrap();
        fs::write(directory.path().join("other"), "1").unwrap();
        // Events arrive in order: an event for the file would arrive before this one.
        let later = watching(&directory.path().join("mark"));
        fs::write(directory.path().join("mark"), "1").unwrap();
        later.wait().await;
        assert!(timeout(Duration::from_millis(50), events.wait()).await.is_err());
    }

    #[test]
    fn a_link_cycle_ends() {
        let directory = tempfile::tempdir().unwrap();
        symlink("b", directory.path().join("a")).unwrap();
        symlink("a", directory.path().join("b")).unwrap();
        assert_eq!(link_chain(&directory.path().join("a")).len(), MAX_LINKS + 1);
    }
}
