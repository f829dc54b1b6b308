//! Throttles of one pipeline that are decided at once, where the store is in this process: it then waits for the memory of
//! several counters at the same time.
//!
//! They wait for each other only while the commands that have arrived are read, and are answered before whatever comes next.

use std::ops::Range;

use smallvec::SmallVec;
use tollgate::{Key, Store, Terms, Tier};

use super::{
    CALLER,
    codec::Command,
    question::{LastLimit, Throttle},
    reply::Replies,
};
use crate::desk::Desk;

/// How many commands of one client are answered before others may have their turn, and so how many throttles are decided at once.
pub const MAX_AT_ONCE: usize = 32;

/// Throttles that are to be decided.
#[derive(Debug, Default)]
pub(super) struct AtOnce {
    tiers: SmallVec<[Tier; MAX_AT_ONCE]>,
    /// Where in the input their keys lie.
    keys: SmallVec<[Range<usize>; MAX_AT_ONCE]>,
}

impl AtOnce {
    /// Adds a command that begins at `start` of the input. Whether it is a throttle like nearly all; else nothing was added.
    #[inline]
    pub(super) fn add(&mut self, command: &Command<'_>, start: usize, last: &mut LastLimit) -> bool {
        let Some(place) = command.place(1) else { return false };
        let Ok(Throttle { key, limit, cost }) = Throttle::read(command, last) else { return false };
        let Ok(key) = Key::without_rule(key) else { return false };
        self.tiers.push(Tier { key, terms: Terms::new(*limit, cost) });
        self.keys.push(start + place.start..start + place.end);
        true
    }

    /// Has them decided, and writes the answers in their order.
    pub(super) fn answer<S: Store>(&mut self, input: &[u8], desk: &Desk<S>, replies: &mut Replies) {
        let Self { tiers, keys } = self;
        if tiers.is_empty() {
            return;
        }
        let key = |place: usize| &input[keys[place].clone()];
        desk.check_keys_here(CALLER.transport, key, tiers, |place, share| {
            Throttle::answer(&tiers[place].terms.limit, share, replies);
        });
        tiers.clear();
        keys.clear();
    }
}
