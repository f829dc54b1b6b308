//! The two stages of a graceful shutdown: draining, then stopping.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio_util::sync::CancellationToken;

/// How long requests in flight may take to finish once the server stops.
pub const SHUTDOWN_GRACE: Duration = Duration::from_secs(10);

/// The same for connections that have not sent a request yet.
pub(crate) const QUIET_GRACE: Duration = Duration::from_secs(1);

/// The state of a server's shutdown. Cheap to clone; all clones share the state.
#[derive(Clone, Debug, Default)]
pub struct Shutdown(Arc<Stages>);

#[derive(Debug, Default)]
struct Stages {
    /// Set before `draining` is cancelled. Every HTTP response reads it, and `CancellationToken::is_cancelled` takes a lock.
    is_draining: AtomicBool,
    draining: CancellationToken,
    stopping: CancellationToken,
}

impl Shutdown {
    /// Starts draining: the server reports that it is not ready and closes HTTP connections after their response, but answers requests on old and
    /// new connections.
    pub fn drain(&self) {
        self.0.is_draining.store(true, Ordering::Release);
        self.0.draining.cancel();
    }

    /// Starts stopping: listeners close, and connections have [`SHUTDOWN_GRACE`] to finish. Implies [`drain`](Self::drain).
    pub fn stop(&self) {
        self.drain();
        self.0.stopping.cancel();
    }

    /// Whether draining has started.
    pub fn is_draining(&self) -> bool {
        self.0.is_draining.load(Ordering::Acquire)
    }

    /// Waits until draining starts.
    pub async fn draining(&self) {
        self.0.draining.cancelled().await;
    }

    /// Waits until stopping starts.
    pub async fn stopping(&self) {
        self.0.stopping.cancelled().await;
    }
}
