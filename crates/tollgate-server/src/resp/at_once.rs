//! Throttles of one pipeline that are decided at once, where the store is in this process: it then waits for the memory of
//! several counters at the same time.
//!
//! They wait for each other only while the commands that have arrived are read, and are answered before whatever comes next.

use tollgate::{Key, Store, Terms, Tier};

use super::{CALLER, question::Throttle, reply::Replies};
use crate::desk::Desk;

/// How many throttles of one client are decided at once.
pub const MAX_AT_ONCE: usize = 16;

/// How much room a quiet connection keeps for keys, in bytes.
const KEY_ROOM: usize = 4 << 10;

/// Throttles that are to be decided.
#[derive(Debug, Default)]
pub(super) struct AtOnce {
    tiers: Vec<Tier>,
    /// Their keys as they were sent, one after the other.
    keys: Vec<u8>,
    /// Where each of these ends.
    ends: Vec<usize>,
}

impl AtOnce {
    /// Adds a throttle. Whether its key can be one; else nothing was added.
    pub(super) fn add(&mut self, throttle: &Throttle<'_>) -> bool {
        let Ok(key) = Key::without_rule(throttle.key) else { return false };
        self.tiers.push(Tier { key, terms: Terms::new(*throttle.limit, throttle.cost) });
        self.keys.extend_from_slice(throttle.key);
        self.ends.push(self.keys.len());
        true
    }

    /// Whether they have to be answered before another one is added.
    pub(super) fn is_full(&self) -> bool {
        self.tiers.len() == MAX_AT_ONCE
    }

    /// Has them decided, and writes the answers in their order.
    #[inline]
    pub(super) fn answer<S: Store>(&mut self, desk: &Desk<S>, replies: &mut Replies) {
        if !self.tiers.is_empty() {
            self.answer_some(desk, replies);
        }
    }

    fn answer_some<S: Store>(&mut self, desk: &Desk<S>, replies: &mut Replies) {
        let Self { tiers, keys, ends } = self;
        let key = |place: usize| {
            let start = place.checked_sub(1).map_or(0, |before| ends[before]);
            &keys[start..ends[place]]
        };
        desk.check_keys_here(CALLER.transport, key, tiers, |place, share| {
            Throttle::answer(&tiers[place].terms.limit, share, replies);
        });
        tiers.clear();
        keys.clear();
        keys.shrink_to(KEY_ROOM);
        ends.clear();
    }
}
