//! Who has a place when there are more connections than places: whoever asks goes before whoever is silent, and whoever has asked before
//! whoever never has.
//!
//! Opening connections and sending nothing, or half a request, costs next to nothing. It must not keep others out.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    task::AbortHandle,
    time::{Instant, timeout},
};

/// How long a connection must have been silent to lose its place to a new one.
pub(crate) const MIN_SILENCE: Duration = Duration::from_secs(1);

/// For how long somebody who has come or asked is reckoned with, where threads are chosen.
const LATELY: Duration = Duration::from_secs(5);

/// How long a new connection waits before it is looked again for somebody who has become silent.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// A number of places, and those who have one.
pub(crate) struct Crowd {
    free: Arc<Semaphore>,
    opened: Instant,
    seated: u64,
    /// As many as there are places at most; of those that are equally silent, the first has come first.
    taken: Arc<Mutex<BTreeMap<u64, Voice>>>,
}

/// One who has a place, until this is dropped.
pub(crate) struct Guest {
    taken: Arc<Mutex<BTreeMap<u64, Voice>>>,
    id: u64,
    voice: Voice,
    _place: OwnedSemaphorePermit,
}

/// Tells when a guest asks and when it has its answer. Cheap to clone; all clones are the same guest's.
#[derive(Clone)]
pub(crate) struct Voice(Arc<Heard>);

struct Heard {
    opened: Instant,
    /// How many of its requests are being answered: while there is one, it is not silent.
    asking: AtomicU32,
    /// Since when it is silent otherwise, in milliseconds after the opening.
    silent_since: AtomicU64,
    has_asked: AtomicBool,
    connection: OnceLock<AbortHandle>,
    /// Which thread serves it, where each keeps to its connections.
    thread: OnceLock<usize>,
}

impl Crowd {
    pub(crate) fn new(places: usize) -> Self {
        let free = Arc::new(Semaphore::new(places));
        Self { free, opened: Instant::now(), seated: 0, taken: Arc::default() }
    }

    /// Waits for a place; when there is none, the one who has been silent the longest has to leave.
    pub(crate) async fn enter(&mut self) -> Guest {
        loop {
            if let Ok(place) = Arc::clone(&self.free).try_acquire_owned() {
                return self.seat(place);
            }
            self.send_the_most_silent_away();
            let freed = timeout(LOOK_AGAIN, Arc::clone(&self.free).acquire_owned()).await;
            if let Ok(place) = freed {
                return self.seat(place.expect("the semaphore is never closed"));
            }
        }
    }

    fn seat(&mut self, place: OwnedSemaphorePermit) -> Guest {
        let (id, voice) = (self.seated, Voice::new(self.opened));
        self.seated += 1;
        self.taken.lock().insert(id, voice.clone());
        Guest { taken: Arc::clone(&self.taken), id, voice, _place: place }
    }

    /// How many of those that each thread serves have come or asked lately.
    pub(crate) fn lively(&self, threads: usize) -> Vec<usize> {
        let (mut lively, now) = (vec![0; threads], Instant::now());
        for voice in self.taken.lock().values().filter(|voice| voice.silence_at(now) < LATELY) {
            if let Some(count) = voice.0.thread.get().and_then(|&thread| lively.get_mut(thread)) {
                *count += 1;
            }
        }
        lively
    }

    fn send_the_most_silent_away(&self) {
        let taken = self.taken.lock();
        let silent = taken.values().filter(|voice| voice.silence() >= MIN_SILENCE);
        let most_silent = silent.min_by_key(|voice| (voice.has_asked(), voice.silent_since()));
        if let Some(connection) = most_silent.and_then(|voice| voice.0.connection.get()) {
            connection.abort();
        }
    }
}

impl Guest {
    /// To tell when it asks.
    pub(crate) fn voice(&self) -> Voice {
        self.voice.clone()
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.taken.lock().remove(&self.id);
    }
}

impl Voice {
    fn new(opened: Instant) -> Self {
        let voice = Self(Arc::new(Heard {
            opened,
            asking: AtomicU32::new(0),
            silent_since: AtomicU64::new(0),
            has_asked: AtomicBool::new(false),
            connection: OnceLock::new(),
            thread: OnceLock::new(),
        }));
        voice.falls_silent();
        voice
    }

    /// Of somebody who has no place to lose.
    pub(crate) fn of_nobody() -> Self {
        Self::new(Instant::now())
    }

    /// To leave, the guest's connection is ended so.
    pub(crate) fn ends_with(&self, connection: AbortHandle) {
        let _only_once = self.0.connection.set(connection);
    }

    /// This thread serves the guest.
    pub(crate) fn is_served_by(&self, thread: usize) {
        let _only_once = self.0.thread.set(thread);
    }

    /// The guest asks, perhaps several things at a time, and is silent again once all that this returns is dropped.
    pub(crate) fn asks(&self) -> Asking {
        self.0.has_asked.store(true, Ordering::Relaxed);
        self.0.asking.fetch_add(1, Ordering::Relaxed);
        Asking(self.clone())
    }

    /// Whether it has ever asked, answered or not.
    pub(crate) fn has_asked(&self) -> bool {
        self.0.has_asked.load(Ordering::Relaxed)
    }

    /// For how long it has been silent.
    pub(crate) fn silence(&self) -> Duration {
        self.silence_at(Instant::now())
    }

    fn silence_at(&self, now: Instant) -> Duration {
        if self.is_asking() {
            return Duration::ZERO;
        }
        let since = Duration::from_millis(self.silent_since());
        now.duration_since(self.0.opened).saturating_sub(since)
    }

    fn is_asking(&self) -> bool {
        self.0.asking.load(Ordering::Acquire) > 0
    }

    fn falls_silent(&self) {
        let since = self.0.opened.elapsed().as_millis();
        let since = u64::try_from(since).expect("a process does not live that long");
        self.0.silent_since.store(since, Ordering::Relaxed);
    }

    fn silent_since(&self) -> u64 {
        self.0.silent_since.load(Ordering::Relaxed)
    }
}

/// A guest that waits for its answer.
pub(crate) struct Asking(Voice);

impl Drop for Asking {
    fn drop(&mut self) {
        self.0.falls_silent();
        // after that: who sees that it is silent sees since when
        self.0.0.asking.fetch_sub(1, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use tokio::task::JoinHandle;

    use super::*;

    struct Seated {
        voice: Voice,
        connection: JoinHandle<()>,
    }

    impl Seated {
        async fn in_(crowd: &mut Crowd) -> Self {
            let guest = timeout(2 * MIN_SILENCE, crowd.enter()).await.expect("somebody leaves");
            let voice = guest.voice();
            let connection = tokio::spawn(async move {
                let _seated = guest;
                pending().await
            });
            voice.ends_with(connection.abort_handle());
            Self { voice, connection }
        }

        async fn has_left(self) {
            assert!(self.connection.await.unwrap_err().is_cancelled());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_most_silent_leaves_and_nobody_who_asks() {
        let mut crowd = Crowd::new(3);
        let first = Seated::in_(&mut crowd).await;
        let second = Seated::in_(&mut crowd).await;
        let third = Seated::in_(&mut crowd).await;
        let asking = first.voice.asks();
        drop((first.voice.asks(), second.voice.asks()));
        tokio::time::advance(MIN_SILENCE).await;
        let begin = Instant::now();
        let fourth = Seated::in_(&mut crowd).await;
        third.has_left().await;
        assert_eq!(begin.elapsed(), Duration::ZERO, "it had never asked");
        let fifth = Seated::in_(&mut crowd).await;
        second.has_left().await;
        assert_eq!(begin.elapsed(), Duration::ZERO, "the fourth has just come");
        drop(fifth.voice.asks());
        let sixth = Seated::in_(&mut crowd).await;
        fourth.has_left().await;
        assert!(begin.elapsed() >= MIN_SILENCE && begin.elapsed() <= MIN_SILENCE + LOOK_AGAIN * 2);
        for left in [first, fifth, sixth] {
            assert!(!left.connection.is_finished());
            left.connection.abort();
            left.has_left().await;
        }
        drop(asking);
        assert!(crowd.taken.lock().is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn threads_are_reckoned_by_whoever_came_or_asked_lately() {
        let mut crowd = Crowd::new(10);
        let mut seated = Vec::new();
        for thread in [0, 0, 0, 1, 7] {
            let guest = Seated::in_(&mut crowd).await;
            guest.voice.is_served_by(thread);
            seated.push(guest);
        }
        assert_eq!(crowd.lively(2), [3, 1]);
        tokio::time::advance(LATELY).await;
        assert_eq!(crowd.lively(2), [0, 0]);
        drop(seated[3].voice.asks());
        let _asking = seated[0].voice.asks();
        assert_eq!(crowd.lively(2), [1, 1]);
        tokio::time::advance(LATELY).await;
        assert_eq!(crowd.lively(2), [1, 0]);
    }
}
