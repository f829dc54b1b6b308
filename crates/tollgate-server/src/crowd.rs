//! Who has a place when there are more connections than places: whoever asks goes before whoever is silent.
//!
//! Opening connections and sending nothing, or half a request, costs next to nothing. It must not keep others out.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use tokio::{
    sync::{Notify, OwnedSemaphorePermit, Semaphore},
    time::{Instant, timeout},
};

/// How long a connection must have been silent to lose its place to a new one.
pub(crate) const MIN_SILENCE: Duration = Duration::from_secs(1);

/// How long a new connection waits before it is looked again for somebody who has become silent.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// A number of places, and those who have one.
#[derive(Clone)]
pub(crate) struct Crowd(Arc<Places>);

struct Places {
    free: Arc<Semaphore>,
    opened: Instant,
    next: AtomicU64,
    /// As many as there are places at most; of those that are equally silent, the first has come first.
    taken: Mutex<BTreeMap<u64, Arc<Mind>>>,
}

/// One who has a place, until this is dropped.
pub(crate) struct Guest {
    places: Arc<Places>,
    id: u64,
    mind: Arc<Mind>,
    _place: OwnedSemaphorePermit,
}

/// What a guest is doing.
struct Mind {
    /// Since when it is silent, in milliseconds after the opening, or [`ASKING`].
    silent_since: AtomicU64,
    leave: Notify,
}

/// While a request is answered, its connection is not silent.
const ASKING: u64 = u64::MAX;

impl Crowd {
    pub(crate) fn new(places: usize) -> Self {
        Self(Arc::new(Places {
            free: Arc::new(Semaphore::new(places)),
            opened: Instant::now(),
            next: AtomicU64::new(0),
            taken: Mutex::default(),
        }))
    }

    /// Waits for a place; when there is none, the one who has been silent the longest has to leave.
    pub(crate) async fn enter(&self) -> Guest {
        loop {
            if let Ok(place) = Arc::clone(&self.0.free).try_acquire_owned() {
                return self.seat(place);
            }
            self.send_the_most_silent_away();
            let freed = timeout(LOOK_AGAIN, Arc::clone(&self.0.free).acquire_owned()).await;
            if let Ok(place) = freed {
                return self.seat(place.expect("the semaphore is never closed"));
            }
        }
    }

    fn seat(&self, place: OwnedSemaphorePermit) -> Guest {
        let places = Arc::clone(&self.0);
        let id = places.next.fetch_add(1, Ordering::Relaxed);
        let mind = Arc::new(Mind { silent_since: AtomicU64::new(places.now()), leave: Notify::new() });
        places.taken.lock().insert(id, Arc::clone(&mind));
        Guest { places, id, mind, _place: place }
    }

    fn send_the_most_silent_away(&self) {
        let taken = self.0.taken.lock();
        let silent = taken.values().map(|mind| (mind.silent_since.load(Ordering::Relaxed), mind));
        let most_silent = silent.filter(|(since, _)| *since != ASKING).min_by_key(|(since, _)| *since);
        let patience = u64::try_from(MIN_SILENCE.as_millis()).expect("a second has few milliseconds");
        if let Some((since, mind)) = most_silent
            && since + patience <= self.0.now()
        {
            mind.leave.notify_one();
        }
    }
}

impl Places {
    fn now(&self) -> u64 {
        u64::try_from(self.opened.elapsed().as_millis()).expect("a process does not live that long")
    }
}

impl Guest {
    /// Ready when the place is needed for somebody else.
    pub(crate) async fn told_to_leave(&self) {
        self.mind.leave.notified().await;
    }

    /// To tell when it asks.
    pub(crate) fn voice(&self) -> Voice {
        Voice { places: Arc::clone(&self.places), mind: Arc::clone(&self.mind) }
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.places.taken.lock().remove(&self.id);
    }
}

/// Tells when a guest asks and when it has its answer.
#[derive(Clone)]
pub(crate) struct Voice {
    places: Arc<Places>,
    mind: Arc<Mind>,
}

impl Voice {
    /// The guest asks, and is silent again once the result is dropped.
    pub(crate) fn asks(&self) -> Asking {
        self.mind.silent_since.store(ASKING, Ordering::Relaxed);
        Asking(self.clone())
    }
}

/// A guest that waits for its answer.
pub(crate) struct Asking(Voice);

impl Drop for Asking {
    fn drop(&mut self) {
        self.0.mind.silent_since.store(self.0.places.now(), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_most_silent_leaves_and_nobody_who_asks() {
        let crowd = Crowd::new(3);
        let (first, second, third) = (crowd.enter().await, crowd.enter().await, crowd.enter().await);
        let asking = first.voice().asks();
        tokio::time::advance(MIN_SILENCE).await;
        drop(third.voice().asks());
        let begin = Instant::now();
        let (fourth, ()) = tokio::join!(crowd.enter(), async {
            second.told_to_leave().await;
            drop(second);
        });
        assert_eq!(begin.elapsed(), Duration::ZERO);
        let (fifth, ()) = tokio::join!(crowd.enter(), async {
            third.told_to_leave().await;
            drop(third);
        });
        assert!(begin.elapsed() >= MIN_SILENCE && begin.elapsed() <= MIN_SILENCE + LOOK_AGAIN * 2);
        drop((asking, fourth, fifth));
        drop(first);
        assert!(crowd.0.taken.lock().is_empty());
    }
}
