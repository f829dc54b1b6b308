//! A hash index of slab ids: four bytes per value, found within one cache line.
//!
//! A slot holds one byte of the hash and an id, with linear probing. A lookup has one cache miss, and another one for the value itself;
//! a table with separate tags, such as hashbrown's, has three. A removal shifts the following slots back, so that no tombstones remain.

use super::budget::allocated;

/// The largest number of values.
pub(super) const MAX_IDS: usize = ID_MASK as usize;

const ID_MASK: u32 = (1 << 24) - 1;
/// Initial number of slots. All sizes are powers of two.
const MIN_SLOTS: usize = 8;
/// An empty slot. Ids are stored plus one.
const EMPTY: u32 = 0;

pub(super) struct Index {
    slots: Box<[u32]>,
    len: usize,
}

impl Default for Index {
    fn default() -> Self {
        Self::with_capacity(0)
    }
}

impl Index {
    /// Creates an empty index that holds `len` values before it is full.
    pub(super) fn with_capacity(len: usize) -> Self {
        let slots = (2 * len + 1).next_power_of_two().max(MIN_SLOTS);
        Self { slots: vec![EMPTY; slots].into(), len: 0 }
    }

    /// Returns whether it must [`Index::grow`] before the next insert. Half of the slots stay empty, so that most lookups end at
    /// their first slot and the branch is predicted.
    pub(super) fn is_full(&self) -> bool {
        self.len >= self.slots.len() / 2
    }

    /// Returns whether it holds at least 7/8 of the values that fill it.
    pub(super) fn is_nearly_full(&self) -> bool {
        self.len >= self.slots.len() / 16 * 7
    }

    /// Returns the value of this hash for which `is_match` is true.
    #[inline(always)]
    pub(super) fn find(&self, hash: u64, is_match: impl Fn(u32) -> bool) -> Option<u32> {
        let mut at = self.home(hash);
        loop {
            let slot = self.slots[at];
            if slot == EMPTY {
                return None;
            }
            if slot & !ID_MASK == tag(hash) && is_match(id_in(slot)) {
                return Some(id_in(slot));
            }
            at = self.after(at);
        }
    }

    /// Inserts a value. The index must not be full.
    pub(super) fn insert(&mut self, hash: u64, id: u32) {
        debug_assert!(!self.is_full() && id < ID_MASK);
        let mut at = self.home(hash);
        while self.slots[at] != EMPTY {
            at = self.after(at);
        }
        self.slots[at] = tag(hash) | (id + 1);
        self.len += 1;
    }

    /// Removes a value. It must be present.
    pub(super) fn remove(&mut self, hash: u64, id: u32, hash_of: impl Fn(u32) -> u64) {
        let mut hole = self.home(hash);
        while self.slots[hole] != tag(hash) | (id + 1) {
            hole = self.after(hole);
        }
        let mut at = self.after(hole);
        while self.slots[at] != EMPTY {
            // a value that is at least as far from its home slot as from the hole can move into the hole and is still
            // found
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

    /// Returns the bytes in use.
    pub(super) fn bytes(&self) -> usize {
        allocated(size_of_val(&*self.slots))
    }

    /// Returns the bytes that the next value may add.
    pub(super) fn growth_bytes(&self) -> usize {
        if self.is_full() { self.bytes() } else { 0 }
    }

    /// Returns the home slot of a hash: its low bits.
    #[inline]
    fn home(&self, hash: u64) -> usize {
        hash as usize & (self.slots.len() - 1)
    }

    #[inline]
    fn after(&self, at: usize) -> usize {
        (at + 1) & (self.slots.len() - 1)
    }
}

/// Returns the highest byte of a hash at its position in a slot.
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

    /// Hashes with many collisions: few home slots, few tags.
    fn hash_of(id: u32) -> u64 {
        (u64::from(id % 7) * 5) | (u64::from(id % 3) << 56)
    }

    proptest! {
        /// Compares the index with a map, with colliding hashes.
        #[test]
        fn exactly_the_inserted_values_are_found(ids in prop::collection::vec(0_u32..60, 1..300)) {
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
    fn the_requested_capacity_is_available() {
        for len in 0..2_000 {
            let mut index = Index::with_capacity(len);
            for id in (0..).take(len) {
                assert!(!index.is_full(), "{id} of {len}");
                index.insert(u64::from(id), id);
            }
        }
    }

    #[test]
    fn the_largest_id_fits() {
        let mut index = Index::default();
        let last = ID_MASK - 1;
        index.insert(u64::MAX, last);
        assert_eq!(index.find(u64::MAX, |id| id == last), Some(last));
    }
}
