//! A slab: values in numbered slots that are reused after a removal. Values never move.
//!
//! Slots are allocated in chunks of a fixed size. A vector would be copied, and left half empty, whenever it doubles.

use std::{array, iter};

use super::budget::allocated;

/// Values in slots, `CHUNK` slots per allocation.
pub(super) struct Slab<T, const CHUNK: usize> {
    chunks: Vec<Box<[Slot<T>; CHUNK]>>,
    /// Head of the list of free slots.
    free: Option<u32>,
    len: usize,
}

enum Slot<T> {
    Occupied(T),
    Free { next: Option<u32> },
}

impl<T, const CHUNK: usize> Default for Slab<T, CHUNK> {
    fn default() -> Self {
        Self { chunks: Vec::new(), free: None, len: 0 }
    }
}

impl<T, const CHUNK: usize> Slab<T, CHUNK> {
    const CHUNK_BYTES: usize = allocated(size_of::<[Slot<T>; CHUNK]>());
    /// Capacity of the list of chunks after the first insert.
    const FIRST_CHUNKS: usize = 4;

    /// Returns the number of values.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Returns the number of slots, occupied or free.
    pub(super) fn slots(&self) -> usize {
        self.chunks.len() * CHUNK
    }

    /// Returns the value of an occupied slot.
    pub(super) fn get(&self, id: u32) -> &T {
        match &self.chunks[id as usize / CHUNK][id as usize % CHUNK] {
            Slot::Occupied(value) => value,
            Slot::Free { .. } => unreachable!("ids refer to occupied slots"),
        }
    }

    /// Returns the value of an occupied slot.
    pub(super) fn get_mut(&mut self, id: u32) -> &mut T {
        match &mut self.chunks[id as usize / CHUNK][id as usize % CHUNK] {
            Slot::Occupied(value) => value,
            Slot::Free { .. } => unreachable!("ids refer to occupied slots"),
        }
    }

    /// Inserts a value and returns its id.
    pub(super) fn insert(&mut self, value: T) -> u32 {
        let id = self.free.unwrap_or_else(|| self.add_chunk());
        let slot = &mut self.chunks[id as usize / CHUNK][id as usize % CHUNK];
        let Slot::Free { next } = *slot else { unreachable!("the free list contains free slots") };
        self.free = next;
        *slot = Slot::Occupied(value);
        self.len += 1;
        id
    }

    /// Removes a value.
    pub(super) fn remove(&mut self, id: u32) -> T {
        let slot = &mut self.chunks[id as usize / CHUNK][id as usize % CHUNK];
        match std::mem::replace(slot, Slot::Free { next: self.free }) {
            Slot::Occupied(value) => {
                self.free = Some(id);
                self.len -= 1;
                value
            }
            Slot::Free { .. } => unreachable!("ids refer to occupied slots"),
        }
    }

    /// Returns the ids of all values for which `is_match` is true.
    pub(super) fn find_all(&self, is_match: impl Fn(&T) -> bool) -> Vec<u32> {
        let slots = self.chunks.iter().flat_map(|chunk| chunk.iter());
        let occupied = iter::zip(0.., slots).filter(|(_, slot)| match slot {
            Slot::Occupied(value) => is_match(value),
            Slot::Free { .. } => false,
        });
        occupied.map(|(id, _)| id).collect()
    }

    /// Returns all values. Each chunk is freed once its values are consumed.
    pub(super) fn into_values(self) -> impl Iterator<Item = T> {
        let slots = self.chunks.into_iter().flat_map(|chunk| *chunk);
        slots.filter_map(|slot| match slot {
            Slot::Occupied(value) => Some(value),
            Slot::Free { .. } => None,
        })
    }

    /// Returns the bytes in use.
    pub(super) fn bytes(&self) -> usize {
        self.chunks.len() * Self::CHUNK_BYTES + self.chunks.capacity() * size_of::<usize>()
    }

    /// Returns the bytes that the next value may add.
    pub(super) fn growth_bytes(&self) -> usize {
        if self.free.is_some() {
            return 0;
        }
        let is_full = self.chunks.len() == self.chunks.capacity();
        let pointers = if is_full { self.chunks.capacity().max(Self::FIRST_CHUNKS) } else { 0 };
        Self::CHUNK_BYTES + pointers * size_of::<usize>()
    }

    /// Adds a chunk of free slots and returns the first id.
    #[cold]
    fn add_chunk(&mut self) -> u32 {
        let id = |slot: usize| u32::try_from(slot).expect("memory ends long before 2^32 slots");
        let first = self.slots();
        let next = |index: usize| (index + 1 < CHUNK).then(|| id(first + index + 1));
        self.chunks.push(Box::new(array::from_fn(|index| Slot::Free { next: next(index) })));
        id(first)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn free_slots_are_reused_before_another_chunk_is_allocated() {
        let mut slab = Slab::<String, 4>::default();
        let ids: Vec<u32> = (0..6).map(|value| slab.insert(value.to_string())).collect();
        assert_eq!((ids, slab.slots()), ((0..6).collect(), 8));
        assert_eq!([slab.remove(1), slab.remove(4)], ["1", "4"]);
        assert_eq!((slab.len(), slab.growth_bytes()), (4, 0));
        let before = slab.bytes();
        let mut again: Vec<u32> = (0..4).map(|_| slab.insert("again".to_owned())).collect();
        again.sort_unstable();
        assert_eq!((again, slab.bytes()), (vec![1, 4, 6, 7], before));
        assert!(slab.growth_bytes() > 0);
        assert_eq!(slab.insert("more".to_owned()), 8);
        assert_eq!((slab.get(0).as_str(), slab.get(4).as_str()), ("0", "again"));
    }

    #[test]
    fn it_never_grows_by_more_than_announced() {
        let mut slab = Slab::<u64, 8>::default();
        for value in 0..1_000 {
            let allowed = slab.bytes() + slab.growth_bytes();
            slab.insert(value);
            assert!(slab.bytes() <= allowed, "{value}: {} > {allowed}", slab.bytes());
        }
        assert_eq!(slab.find_all(|value| value % 500 == 7), [7, 507]);
        slab.remove(7);
        assert_eq!(slab.into_values().filter(|value| value % 500 == 7).collect::<Vec<_>>(), [507]);
    }
}
