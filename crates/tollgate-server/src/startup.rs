//! Start-up: a server is ready once its store has answered, or has had a second to.
//!
//! The first decisions would otherwise pay for the connection and the script within their deadline, and be made without a store
//! that is up.

use std::{future::Future, sync::Arc, time::Duration};

use tokio::{
    sync::watch,
    time::{sleep, timeout},
};

/// How long a server waits for the first answer of its store before it is ready without it.
pub const STORE_PATIENCE: Duration = Duration::from_secs(1);

/// The pause between two attempts to reach a store that has not answered yet.
const RETRY_PAUSE: Duration = Duration::from_millis(250);

/// How far the start-up of a server has come. Cheap to clone; all clones change together.
#[derive(Clone, Debug)]
pub struct Startup(Arc<watch::Sender<Progress>>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Progress {
    /// The store has not answered yet.
    Waiting,
    /// It has not answered in time: rules decide without it.
    ReadyWithoutStore,
    /// It has answered, or is in this process.
    Complete,
}

impl Default for Startup {
    /// A start-up that is complete, as with a store in this process.
    fn default() -> Self {
        Self::at(Progress::Complete)
    }
}

impl Startup {
    /// A start-up that waits for the store.
    pub fn waiting() -> Self {
        Self::at(Progress::Waiting)
    }

    fn at(progress: Progress) -> Self {
        Self(Arc::new(watch::Sender::new(progress)))
    }

    /// Whether the server should be sent requests.
    pub fn is_ready(&self) -> bool {
        *self.0.borrow() != Progress::Waiting
    }

    /// Whether the store has answered at least once.
    pub fn has_store(&self) -> bool {
        *self.0.borrow() == Progress::Complete
    }

    /// Tries to reach the store until it answers.
    pub async fn reach_store<F, E>(&self, warm_up: impl Fn() -> F)
    where
        F: Future<Output = Result<(), E>>,
    {
        while warm_up().await.is_err() {
            sleep(RETRY_PAUSE).await;
        }
        self.0.send_replace(Progress::Complete);
    }

    /// Waits until the server is ready: until the store has answered, or [`STORE_PATIENCE`] is over.
    pub async fn ready(&self) {
        let mut progress = self.0.subscribe();
        let answered = progress.wait_for(|progress| *progress == Progress::Complete);
        if timeout(STORE_PATIENCE, answered).await.is_err() {
            self.0.send_if_modified(|progress| {
                let is_waiting = *progress == Progress::Waiting;
                if is_waiting {
                    *progress = Progress::ReadyWithoutStore;
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
    async fn it_is_ready_at_the_first_answer_of_the_store() {
        let (startup, attempts, begun) = (Startup::waiting(), AtomicUsize::new(0), Instant::now());
        let warm_up =
            || async { if attempts.fetch_add(1, Ordering::Relaxed) == 0 { Err(()) } else { Ok(()) } };
        tokio::join!(startup.reach_store(warm_up), startup.ready());
        assert_eq!((startup.is_ready(), startup.has_store()), (true, true));
        assert_eq!((attempts.into_inner(), begun.elapsed()), (2, RETRY_PAUSE));
    }

    #[tokio::test(start_paused = true)]
    async fn without_an_answer_it_is_ready_after_a_second_and_complete_once_there_is_one() {
        let (startup, begun) = (Startup::waiting(), Instant::now());
        let warm_up = || async {
            sleep(3 * STORE_PATIENCE).await;
            Ok::<_, ()>(())
        };
        let reached = startup.reach_store(warm_up);
        let ready = async {
            assert!(!startup.is_ready());
            startup.ready().await;
            assert_eq!(begun.elapsed(), STORE_PATIENCE);
            assert_eq!((startup.is_ready(), startup.has_store()), (true, false));
        };
        tokio::join!(reached, ready);
        assert_eq!((startup.is_ready(), startup.has_store()), (true, true));
    }

    #[tokio::test]
    async fn a_store_in_this_process_is_there_from_the_start() {
        let startup = Startup::default();
        startup.ready().await;
        assert!(startup.is_ready() && startup.has_store());
    }
}
