//! The configuration again, when one of its files changes or somebody asks.
//!
//! The directories of all files are watched, and of every symbolic link on the way to them: Kubernetes changes a file
//! by putting another link in the place of a directory. The system's notices only say when to look; whether
//! anything has changed is decided by what is in the files. Where there are no notices (network file systems, a system
//! that is out of watches), a look now and then finds the same a little later.

use std::{
    collections::BTreeSet,
    fs,
    io::ErrorKind,
    path::{Component, Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime},
};

use notify::{
    Event, EventKind, RecommendedWatcher, RecursiveMode, Watcher as _,
    event::{AccessKind, AccessMode},
};
use tokio::{
    sync::{Notify, mpsc},
    task::{JoinHandle, spawn_blocking},
    time::{Instant, MissedTickBehavior, interval, timeout},
};

use super::{
    Attempt, Config, ConfigError, Origin, Problem, ServerSettings, Source, StoreSettings, attempt,
    error::Place, files, settings::needs_restart,
};

/// How long nothing must change before files are read: whoever writes several of them is not done after the first.
const QUIET: Duration = Duration::from_millis(100);
/// How long files are waited for that keep changing.
const MAX_UNREST: Duration = Duration::from_secs(1);
/// How often files are looked at without notice.
const LOOK_EVERY: Duration = Duration::from_secs(5);
/// The most symbolic links on the way to a file.
const MAX_LINKS: usize = 40;

/// Reads the configuration again whenever that may make a difference.
pub struct Watcher {
    reloads: mpsc::Receiver<Reload>,
    reloader: Reloader,
    task: JoinHandle<()>,
}

/// Has the configuration read again: for a signal, or a call.
#[derive(Clone)]
pub struct Reloader(Arc<Notify>);

/// What came of reading the configuration again.
#[derive(Clone, Debug, PartialEq)]
pub enum Reload {
    /// This is the configuration now.
    Changed {
        /// All of it.
        config: Box<Config>,
        /// The settings that differ from those the process started with, and take effect only when it is started again.
        needs_restart: Vec<String>,
    },
    /// It cannot be used: what was in force stays in force.
    Rejected(ConfigError),
}

impl Watcher {
    /// Reads the configuration, and watches from then on. Needs a tokio runtime.
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
            notices: Notices::default(),
            asked: reloader.clone(),
            found,
        };
        watch.look_at_files().await;
        let task = tokio::spawn(watch.run());
        Ok((config, Self { reloads, reloader, task }))
    }

    /// Waits for the next change. May be given up on and called again: nothing is lost.
    pub async fn next(&mut self) -> Reload {
        match self.reloads.recv().await {
            Some(reload) => reload,
            // The task ends with this value, or with the runtime.
            None => std::future::pending().await,
        }
    }

    /// To have the configuration read now; the result comes by [`Watcher::next`], also when nothing has changed.
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
    /// Reads the configuration again, whether or not a file has changed.
    pub fn reload_now(&self) {
        self.0.notify_one();
    }
}

struct Watch {
    source: Source,
    started: (ServerSettings, StoreSettings),
    /// Of the configuration in force.
    origin: Origin,
    /// The files of the last reading, and what was in them.
    files: Vec<PathBuf>,
    digest: [u8; 32],
    /// What the system said about them when they were last looked at.
    stamps: Vec<Stamp>,
    notices: Notices,
    asked: Reloader,
    found: mpsc::Sender<Reload>,
}

impl Watch {
    async fn run(mut self) {
        let mut looks = interval(LOOK_EVERY);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let is_due = tokio::select! {
                () = self.asked.0.notified() => true,
                () = self.notices.wait() => self.is_due_after_a_sign().await,
                _ = looks.tick() => self.looks_otherwise().await && self.has_changed().await,
            };
            if is_due {
                let reload = self.reload().await;
                if self.found.send(reload).await.is_err() {
                    return;
                }
            }
        }
    }

    /// Waits until whoever writes is done. Who asks meanwhile does not wait.
    async fn is_due_after_a_sign(&mut self) -> bool {
        tokio::select! {
            () = self.asked.0.notified() => true,
            () = self.notices.settle() => self.has_changed().await,
        }
    }

    /// Whether the system says something else about the files than before.
    async fn looks_otherwise(&mut self) -> bool {
        let files = self.files.clone();
        let now = blocking(move || stamps(&files)).await;
        let is_other = now != self.stamps;
        self.stamps = now;
        is_other
    }

    /// Whether there is something else in the files than before.
    async fn has_changed(&self) -> bool {
        let files = self.files.clone();
        blocking(move || files::digest(&files)).await != self.digest
    }

    async fn reload(&mut self) -> Reload {
        if let Some(path) = self.files.iter().find(|path| files::is_stream(path)) {
            let message = format!("{} cannot be read again: it is not a regular file", path.display());
            return Reload::Rejected(Problem::new(&Place::Nowhere, message).into());
        }
        let source = self.source.clone();
        let Ok(Attempt { outcome, files, digest }) = spawn_blocking(move || attempt(&source)).await else {
            // a mistake of ours: what was in force stays, and the next file is read all the same
            let message = "reading it failed as it never should: please report this file";
            return Reload::Rejected(Problem::new(&Place::Nowhere, message).into());
        };
        (self.files, self.digest) = (files, digest);
        self.look_at_files().await;
        match outcome {
            Err(error) => Reload::Rejected(error),
            // A file that has gone is not a wish for the demo.
            Ok(Config { origin: Origin::Demo, .. }) if self.origin != Origin::Demo => {
                let message = format!("{} has gone", self.files[0].display());
                Reload::Rejected(Problem::new(&Place::Nowhere, message).into())
            }
            Ok(config) => {
                self.origin = config.origin.clone();
                let (server, store) = (&self.started.0, &self.started.1);
                let needs_restart = needs_restart((server, store), (&config.server, &config.store));
                Reload::Changed { config: Box::new(config), needs_restart }
            }
        }
    }

    /// Watches the files of the last reading. What has changed since it, before they were watched, counts as a sign.
    async fn look_at_files(&mut self) {
        let (files, signs) = (self.files.clone(), Arc::clone(&self.notices.signs));
        let look = move || (stamps(&files), watched(&files, signs));
        (self.stamps, self.notices.watcher) = blocking(look).await;
        if self.has_changed().await {
            self.notices.signs.notify_one();
        }
    }
}

/// The system's notices of changes. Without them, the looks now and then remain.
#[derive(Default)]
struct Notices {
    signs: Arc<Notify>,
    watcher: Option<RecommendedWatcher>,
}

/// Signs when anything changes on the way to these files, until it is dropped.
fn watched(files: &[PathBuf], signs: Arc<Notify>) -> Option<RecommendedWatcher> {
    let paths: BTreeSet<PathBuf> = files.iter().flat_map(|path| hops(path)).collect();
    let directories: BTreeSet<PathBuf> =
        paths.iter().filter_map(|path| path.parent().map(Path::to_path_buf)).collect();
    let notice = move |event: notify::Result<Event>| {
        let is_sign = event.map_or(true, |event| {
            event.need_rescan()
                || is_change(&event.kind) && event.paths.iter().any(|path| paths.contains(path))
        });
        if is_sign {
            signs.notify_one();
        }
    };
    let mut watcher = notify::recommended_watcher(notice).ok()?;
    for directory in directories {
        // One that is not there, or cannot be watched, is looked at now and then.
        let _watched = watcher.watch(&directory, RecursiveMode::NonRecursive);
    }
    Some(watcher)
}

impl Notices {
    async fn wait(&self) {
        self.signs.notified().await;
    }

    /// Waits until nothing has changed for a while, but not for ever.
    async fn settle(&self) {
        let until = Instant::now() + MAX_UNREST;
        while Instant::now() < until && timeout(QUIET, self.wait()).await.is_ok() {}
    }
}

/// Whether a file may be another after this; reading one is no change.
fn is_change(kind: &EventKind) -> bool {
    !kind.is_access() || *kind == EventKind::Access(AccessKind::Close(AccessMode::Write))
}

async fn read(source: Source) -> (Source, Attempt) {
    blocking(move || {
        let attempt = attempt(&source);
        (source, attempt)
    })
    .await
}

/// Does what may wait for a disk where it keeps nobody waiting.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    spawn_blocking(work).await.expect("looking at files does not panic")
}

/// What the system says about a file, as far as a change shows in it.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Stamp {
    Missing(ErrorKind),
    Present { length: u64, modified: Option<SystemTime>, place: PathBuf },
}

fn stamps(files: &[PathBuf]) -> Vec<Stamp> {
    files
        .iter()
        .map(|path| match fs::metadata(path) {
            Err(error) => Stamp::Missing(error.kind()),
            Ok(data) => {
                let place = fs::canonicalize(path).unwrap_or_default();
                Stamp::Present { length: data.len(), modified: data.modified().ok(), place }
            }
        })
        .collect()
}

/// The file that a path leads to, and every symbolic link on the way: whatever can change what is read there.
fn hops(path: &Path) -> Vec<PathBuf> {
    let mut hops = Vec::new();
    let mut rest = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    'links: for _ in 0..=MAX_LINKS {
        let mut so_far = PathBuf::new();
        let mut components = rest.components();
        while let Some(component) = components.next() {
            match component {
                Component::ParentDir => drop(so_far.pop()),
                other => so_far.push(other),
            }
            if let Ok(target) = fs::read_link(&so_far) {
                hops.push(so_far.clone());
                so_far.pop();
                rest = so_far.join(target).join(components.as_path());
                continue 'links;
            }
        }
        hops.push(so_far);
        break;
    }
    hops
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn every_link_on_the_way_to_a_file_is_known() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path().canonicalize().unwrap();
        fs::create_dir_all(root.join("v1/deep")).unwrap();
        fs::write(root.join("v1/deep/a.toml"), "").unwrap();
        symlink("v1", root.join("..data")).unwrap();
        symlink("..data/deep/a.toml", root.join("a.toml")).unwrap();
        symlink(&root, root.join("v1/home")).unwrap();
        let expected = ["a.toml", "..data", "v1/deep/a.toml"].map(|name| root.join(name));
        assert_eq!(hops(&root.join("a.toml")), expected);
        let round_about = hops(&root.join("v1/home/v1/../a.toml"));
        assert_eq!(round_about[0], root.join("v1/home"));
        assert_eq!(round_about[1..], expected);
        assert_eq!(hops(&root.join("missing/b")), [root.join("missing/b")]);
    }

    fn noticed(path: &Path) -> Notices {
        let signs = Arc::<Notify>::default();
        let watcher = watched(&[path.to_owned()], Arc::clone(&signs));
        Notices { signs, watcher }
    }

    /// Whether a change is noticed, not only found when looking.
    async fn is_noticed(path: &Path, change: impl FnOnce()) -> bool {
        const SOON: Duration = Duration::from_secs(20);
        let notices = noticed(path);
        change();
        timeout(SOON, notices.wait()).await.is_ok()
    }

    #[tokio::test]
    async fn changes_are_noticed_however_they_are_made() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path();
        let path = root.join("t.toml");
        let other = root.join("other");
        assert!(is_noticed(&path, || fs::write(&path, "1").unwrap()).await);
        assert!(is_noticed(&path, || fs::write(&path, "2").unwrap()).await);
        fs::write(&other, "3").unwrap();
        assert!(is_noticed(&path, || fs::rename(&other, &path).unwrap()).await);
        assert!(is_noticed(&path, || fs::remove_file(&path).unwrap()).await);
        for version in ["v1", "v2"] {
            fs::create_dir(root.join(version)).unwrap();
            fs::write(root.join(version).join("t.toml"), version).unwrap();
        }
        symlink("v1", root.join("..data")).unwrap();
        symlink("..data/t.toml", &path).unwrap();
        symlink("v2", &other).unwrap();
        assert!(is_noticed(&path, || fs::rename(&other, root.join("..data")).unwrap()).await);
        assert!(is_noticed(&path, || fs::write(root.join("v2/t.toml"), "4").unwrap()).await);
    }

    #[tokio::test]
    async fn reading_a_file_is_no_change_and_neither_is_another_file() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("t.toml");
        fs::write(&path, "1").unwrap();
        let notices = noticed(&path);
        fs::read(&path).unwrap();
        fs::write(directory.path().join("other"), "1").unwrap();
        // The system tells things in their order: what was told before this would be here by then.
        let later = noticed(&directory.path().join("mark"));
        fs::write(directory.path().join("mark"), "1").unwrap();
        later.wait().await;
        assert!(timeout(Duration::from_millis(50), notices.wait()).await.is_err());
    }

    #[test]
    fn links_that_lead_in_a_circle_end() {
        let directory = tempfile::tempdir().unwrap();
        symlink("b", directory.path().join("a")).unwrap();
        symlink("a", directory.path().join("b")).unwrap();
        assert_eq!(hops(&directory.path().join("a")).len(), MAX_LINKS + 1);
    }
}
