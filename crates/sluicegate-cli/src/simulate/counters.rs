//! The counters in use. Counters that equal fresh ones are dropped before the table grows.

use foldhash::fast::RandomState;
use hashbrown::HashTable;
use std::hash::BuildHasher;

use sluicegate_core::{State, Timestamp};

/// The number of counters below which unused ones are not dropped.
const FEW: usize = 1 << 12;

/// The counters of all rules of a rule file.
pub(super) struct Counters<S> {
    list: Vec<Counter<S>>,
    index: HashTable<u32>,
    hasher: RandomState,
    /// The number of counters at which unused ones are dropped.
    sweep_at: usize,
    /// The highest number of counters so far.
    pub(super) peak: usize,
}

/// One counter.
pub(super) struct Counter<S> {
    hash: u64,
    key: Box<[u8]>,
    /// The index of the rule in its file.
    pub(super) rule: usize,
    pub(super) state: S,
    /// The current lockout, if any.
    pub(super) lockout: Option<Lockout>,
}

/// A period in which a counter denied every request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lockout {
    pub(super) since_us: u64,
    pub(super) last_us: u64,
}

/// The state of a counter.
pub(super) trait Kept {
    /// The time at which it becomes equal to a fresh one.
    fn expires_at(&self) -> Timestamp;
}

impl Kept for State {
    fn expires_at(&self) -> Timestamp {
        Self::expires_at(self)
    }
}

impl<S: Kept> Counters<S> {
    pub(super) fn new() -> Self {
        Self {
            list: Vec::new(),
            index: HashTable::new(),
            hasher: RandomState::default(),
            sweep_at: FEW,
            peak: 0,
        }
    }

    #[inline]
    pub(super) fn hash(&self, key: &[u8]) -> u64 {
        self.hasher.hash_one(key)
    }

    /// Removes unused counters if `more` would exceed the threshold. Positions are valid until the next call.
    /// `windows` has the window of each rule.
    #[inline]
    pub(super) fn sweep_if_full(&mut self, more: usize, now: Timestamp, windows: &[u64]) {
        if self.list.len() + more > self.sweep_at {
            self.retain(|counter| counter.is_in_use(now, windows[counter.rule]));
            self.sweep_at = FEW.max(2 * self.list.len()) + more;
        }
    }

    /// Returns the position of this key's counter, which is created if missing.
    #[inline]
    pub(super) fn find(&mut self, hash: u64, key: &[u8], rule: usize, fresh: impl FnOnce() -> S) -> usize {
        let list = &self.list;
        let same = |&at: &u32| {
            let counter = &list[at as usize];
            counter.hash == hash && *counter.key == *key
        };
        if let Some(&at) = self.index.find(hash, same) {
            return at as usize;
        }
        let at = self.list.len();
        self.list.push(Counter { hash, key: key.into(), rule, state: fresh(), lockout: None });
        let list = &self.list;
        let place = u32::try_from(at).expect("2^32 counters do not fit into memory");
        self.index.insert_unique(hash, place, |&at| list[at as usize].hash);
        self.peak = self.peak.max(self.list.len());
        at
    }

    #[inline]
    pub(super) fn at(&mut self, position: usize) -> &mut Counter<S> {
        &mut self.list[position]
    }

    pub(super) fn len(&self) -> usize {
        self.list.len()
    }

    /// Drops all counters that `keep` rejects.
    #[cold]
    pub(super) fn retain(&mut self, keep: impl FnMut(&Counter<S>) -> bool) {
        self.list.retain(keep);
        self.index.clear();
        let list = &self.list;
        for (at, counter) in (0_u32..).zip(list) {
            self.index.insert_unique(counter.hash, at, |&at| list[at as usize].hash);
        }
    }
}

impl<S: Kept> Counter<S> {
    /// Whether it differs from a fresh counter.
    pub(super) fn is_in_use(&self, now: Timestamp, window_us: u64) -> bool {
        let locked = self.lockout.is_some_and(|lockout| lockout.goes_on(now, window_us));
        locked || self.state.expires_at() > now
    }
}

impl<S> Counter<S> {
    pub(super) fn key(&self) -> &[u8] {
        &self.key
    }

    /// Records a denial; returns its lockout. A lockout ends with an allowed request, or after a window without requests.
    pub(super) fn denied(&mut self, now: Timestamp, window_us: u64) -> Lockout {
        let last_us = now.as_micros();
        let before = self.lockout.filter(|lockout| lockout.goes_on(now, window_us));
        let lockout = Lockout { since_us: before.map_or(last_us, |lockout| lockout.since_us), last_us };
        self.lockout = Some(lockout);
        lockout
    }

    /// Records an allowed request.
    #[inline]
    pub(super) fn allowed(&mut self) {
        self.lockout = None;
    }
}

impl Lockout {
    fn goes_on(&self, now: Timestamp, window_us: u64) -> bool {
        now.as_micros() - self.last_us <= window_us
    }
}
