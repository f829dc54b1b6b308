//! Where values lie, by their hash: four bytes a value, found in one line of memory.
//!
//! A slot is a byte of the hash and a place. Slots are tried one after the other from where the hash points to, so a
//! lookup waits for memory once, then once more for the value itself; a table that keeps its tags apart, as
//! hashbrown's does, waits three times. Removing moves what follows up, so that nothing marks where something was.

use super::budget::allocated;

/// The most values that can be named.
pub(super) const MAX_IDS: usize = ID_MASK as usize;

const ID_MASK: u32 = (1 << 24) - 1;
/// How many slots there are at first. A power of two, as all sizes are.
const MIN_SLOTS: usize = 8;
/// A slot that nothing is in: places count from one within a slot.
const EMPTY: u32 = 0;

pub(super) struct Index {
    slots: Box<[u32]>,
    len: usize,
}

impl Default for Index {
    fn default() -> Self {
        Self::with_room_for(0)
    }
}

impl Index {
    /// An empty index that takes `len` values before it is full.
    pub(super) fn with_room_for(len: usize) -> Self {
        let slots = (2 * len + 1).next_power_of_two().max(MIN_SLOTS);
        Self { slots: vec![EMPTY; slots].into(), len: 0 }
    }

    /// Whether it has to [`Index::grow`] before another value. Half of the slots stay empty: most lookups end at their
    /// first slot, and the processor foresees it.
    pub(super) fn is_full(&self) -> bool {
        self.len >= self.slots.len() / 2
    }

    /// Whether less than an eighth more is all that it takes before it is full.
    pub(super) fn is_nearly_full(&self) -> bool {
        self.len >= self.slots.len() / 16 * 7
    }

    /// The value of this hash that `is_it`.
    #[inline(always)]
    pub(super) fn find(&self, hash: u64, is_it: impl Fn(u32) -> bool) -> Option<u32> {
        let mut at = self.home(hash);
        loop {
            let slot = self.slots[at];
            if slot == EMPTY {
                return None;
            }
            if slot & !ID_MASK == tag(hash) && is_it(id_in(slot)) {
                return Some(id_in(slot));
            }
            at = self.after(at);
        }
    }

    /// Adds a value to an index that is not full.
    pub(super) fn insert(&mut self, hash: u64, id: u32) {
        debug_assert!(!self.is_full() && id < ID_MASK);
        let mut at = self.home(hash);
        while self.slots[at] != EMPTY {
            at = self.after(at);
        }
        self.slots[at] = tag(hash) | (id + 1);
        self.len += 1;
    }

    /// Removes a value that is there.
    pub(super) fn remove(&mut self, hash: u64, id: u32, hash_of: impl Fn(u32) -> u64) {
        let mut hole = self.home(hash);
        while self.slots[hole] != tag(hash) | (id + 1) {
            hole = self.after(hole);
        }
        let mut at = self.after(hole);
        while self.slots[at] != EMPTY {
            // what is as far from its home as the hole is, or farther, may move there and is still found
            let distance = |from: usize| at.wrapping_sub(from) & (self.slots.len() - 1);
            if distance(self.home(hash_of(id_in(self.slots[at])))) >= distance(hole) {
                self.slots[hole] = self.slots[at];
                hole = at;
            }
            at = self.after(at);
        }
        self.slots[hole] = EMPTY;
        self.len -= 1;
    }

    /// Doubles the number of slots.
    pub(super) fn grow(&mut self, hash_of: impl Fn(u32) -> u64) {
        let doubled = vec![EMPTY; 2 * self.slots.len()].into();
        let old = std::mem::replace(self, Self { slots: doubled, len: 0 });
        for &slot in old.slots.iter().filter(|slot| **slot != EMPTY) {
            self.insert(hash_of(id_in(slot)), id_in(slot));
        }
    }

    /// What it takes.
    pub(super) fn bytes(&self) -> usize {
        allocated(size_of_val(&*self.slots))
    }

    /// What the next value may add to that.
    pub(super) fn growth_bytes(&self) -> usize {
        if self.is_full() { self.bytes() } else { 0 }
    }

    /// Where a hash points to, by its low bits.
    #[inline]
    fn home(&self, hash: u64) -> usize {
        hash as usize & (self.slots.len() - 1)
    }

    #[inline]
    fn after(&self, at: usize) -> usize {
        (at + 1) & (self.slots.len() - 1)
    }
}

/// The highest byte of a hash, where it stands in a slot.
#[inline]
fn tag(hash: u64) -> u32 {
    (hash >> 32) as u32 & !ID_MASK
}

#[inline]
fn id_in(slot: u32) -> u32 {
    (slot & ID_MASK) - 1
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    /// Hashes that meet: few homes, few tags.
    fn hash_of(id: u32) -> u64 {
        (u64::from(id % 7) * 5) | (u64::from(id % 3) << 56)
    }

    proptest! {
        /// Against a map, with hashes that collide wherever they can.
        #[test]
        fn what_is_there_is_found_and_nothing_else(ids in prop::collection::vec(0_u32..60, 1..300)) {
            let (mut index, mut model) = (Index::default(), HashMap::new());
            for id in ids {
                if model.remove(&id).is_some() {
                    index.remove(hash_of(id), id, hash_of);
                } else {
                    if index.is_full() {
                        let allowed = index.bytes() + index.growth_bytes();
                        index.grow(hash_of);
                        prop_assert!(index.bytes() <= allowed && !index.is_full());
                    }
                    index.insert(hash_of(id), id);
                    model.insert(id, ());
                }
                for id in 0..60 {
                    let found = index.find(hash_of(id), |found| found == id);
                    prop_assert_eq!(found, model.contains_key(&id).then_some(id));
                }
            }
        }
    }

    #[test]
    fn room_that_was_asked_for_is_there() {
        for len in 0..2_000 {
            let mut index = Index::with_room_for(len);
            for id in (0..).take(len) {
                assert!(!index.is_full(), "{id} of {len}");
                index.insert(u64::from(id), id);
            }
        }
    }

    #[test]
    fn the_largest_place_fits() {
        let mut index = Index::default();
        let last = ID_MASK - 1;
        index.insert(u64::MAX, last);
        assert_eq!(index.find(u64::MAX, |id| id == last), Some(last));
    }
}
