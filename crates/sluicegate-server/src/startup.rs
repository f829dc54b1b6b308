//! Start-up: the server is ready once its store has answered, or after [`STORE_PATIENCE`].
//!
//! Without this wait, the first checks would have to connect and load the script within their deadline, and would be degraded although the
//! store is available.

use std::{future::Future, sync::Arc, time::Duration};

use tokio::{
    sync::watch,
    time::{sleep, timeout},
};

/// How long the server waits for the first reply of its store before it is ready without it.
pub const STORE_PATIENCE: Duration = Duration::from_secs(1);

/// The pause between two attempts to reach the store.
const RETRY_PAUSE: Duration = Duration::from_millis(250);

/// The progress of a server's start-up. Cheap to clone; all clones share the state.
#[derive(Clone, Debug)]
pub struct Startup(Arc<watch::Sender<StartupStage>>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StartupStage {
    /// The store has not replied yet.
    Waiting,
    /// The store has not replied in time: failure policies decide.
    ReadyWithoutStore,
    /// The store has replied, or is local.
    Complete,
}

impl Default for Startup {
    /// A complete start-up, as with a local store.
    fn default() -> Self {
        Self::at(StartupStage::Complete)
    }
}

impl Startup {
    /// A start-up that waits for the store.
    pub fn waiting() -> Self {
        Self::at(StartupStage::Waiting)
    }

    fn at(stage: StartupStage) -> Self {
        Self(Arc::new(watch::Sender::new(stage)))
    }

    /// Whether the server is ready for requests.
    pub fn is_ready(&self) -> bool {
        *self.0.borrow() != StartupStage::Waiting
    }

    /// Whether the store has replied at least once.
    pub fn has_store(&self) -> bool {
        *self.0.borrow() == StartupStage::Complete
    }

    /// Tries to reach the store until it replies.
    pub async fn reach_store<F, E>(&self, warm_up: impl Fn() -> F)
    where
        F: Future<Output = Result<(), E>>,
    {
        while warm_up().await.is_err() {
            sleep(RETRY_PAUSE).await;
        }
        self.0.send_replace(StartupStage::Complete);
    }

    /// Waits until the store has replied, or for [`STORE_PATIENCE`]. Then the server is ready.
    pub async fn ready(&self) {
        let mut stage = self.0.subscribe();
        let replied = stage.wait_for(|stage| *stage == StartupStage::Complete);
        if timeout(STORE_PATIENCE, replied).await.is_err() {
            self.0.send_if_modified(|stage| {
                let is_waiting = *stage == StartupStage::Waiting;
                if is_waiting {
                    *stage = StartupStage::ReadyWithoutStore;
                }
                is_waiting
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tokio::time::Instant;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_server_is_ready_at_the_first_reply_of_the_store() {
        let (startup, attempts, started) = (Startup::waiting(), AtomicUsize::new(0), Instant::now());
        let warm_up =
            || async { if attempts.fetch_add(1, Ordering::Relaxed) == 0 { Err(()) } else { Ok(()) } };
        tokio::join!(startup.reach_store(warm_up), startup.ready());
        assert_eq!((startup.is_ready(), startup.has_store()), (true, true));
        assert_eq!((attempts.into_inner(), started.elapsed()), (2, RETRY_PAUSE));
    }

    #[tokio::test(start_paused = true)]
    async fn without_a_reply_the_server_is_ready_after_a_second() {
        let (startup, started) = (Startup::waiting(), Instant::now());
        let warm_up = || async {
            sleep(3 * STORE_PATIENCE).await;
            Ok::<_, ()>(())
        };
        let reached = startup.reach_store(warm_up);
        let ready = async {
            assert!(!startup.is_ready());
            startup.ready().await;
            assert_eq!(started.elapsed(), STORE_PATIENCE);
            assert_eq!((startup.is_ready(), startup.has_store()), (true, false));
        };
        tokio::join!(reached, ready);
        assert_eq!((startup.is_ready(), startup.has_store()), (true, true));
    }

    #[tokio::test]
    async fn with_a_local_store_the_server_is_ready_at_once() {
        let startup = Startup::default();
        startup.ready().await;
        assert!(startup.is_ready() && startup.has_store());
    }
}
