//! Values in numbered places: what is removed leaves a place for the next, and nothing ever moves.
//!
//! The places come in chunks of a fixed size. A vector would have to be copied, and would stand half empty,
//! whenever it has just doubled.

use std::{array, iter};

use super::budget::allocated;

/// Values in places, `CHUNK` places to an allocation.
pub(super) struct Slab<T, const CHUNK: usize> {
    chunks: Vec<Box<[Place<T>; CHUNK]>>,
    /// The first of the free places, each of which names the next.
    free: Option<u32>,
    len: usize,
}

enum Place<T> {
    Taken(T),
    Free { next: Option<u32> },
}

impl<T, const CHUNK: usize> Default for Slab<T, CHUNK> {
    fn default() -> Self {
        Self { chunks: Vec::new(), free: None, len: 0 }
    }
}

impl<T, const CHUNK: usize> Slab<T, CHUNK> {
    const CHUNK_BYTES: usize = allocated(size_of::<[Place<T>; CHUNK]>());
    /// How many chunks are named when the first is made.
    const FIRST_CHUNKS: usize = 4;

    /// How many values there are.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// How many places there are, taken or free.
    pub(super) fn places(&self) -> usize {
        self.chunks.len() * CHUNK
    }

    /// The value in a place that is taken.
    pub(super) fn get(&self, id: u32) -> &T {
        match &self.chunks[id as usize / CHUNK][id as usize % CHUNK] {
            Place::Taken(value) => value,
            Place::Free { .. } => unreachable!("only places that are taken are named"),
        }
    }

    /// The value in a place that is taken.
    pub(super) fn get_mut(&mut self, id: u32) -> &mut T {
        match &mut self.chunks[id as usize / CHUNK][id as usize % CHUNK] {
            Place::Taken(value) => value,
            Place::Free { .. } => unreachable!("only places that are taken are named"),
        }
    }

    /// Puts a value into a free place.
    pub(super) fn insert(&mut self, value: T) -> u32 {
        let id = self.free.unwrap_or_else(|| self.add_chunk());
        let place = &mut self.chunks[id as usize / CHUNK][id as usize % CHUNK];
        let Place::Free { next } = *place else { unreachable!("free places are free") };
        self.free = next;
        *place = Place::Taken(value);
        self.len += 1;
        id
    }

    /// Takes a value out.
    pub(super) fn remove(&mut self, id: u32) -> T {
        let place = &mut self.chunks[id as usize / CHUNK][id as usize % CHUNK];
        match std::mem::replace(place, Place::Free { next: self.free }) {
            Place::Taken(value) => {
                self.free = Some(id);
                self.len -= 1;
                value
            }
            Place::Free { .. } => unreachable!("only places that are taken are named"),
        }
    }

    /// The places of all values that `choose` picks.
    pub(super) fn find_all(&self, choose: impl Fn(&T) -> bool) -> Vec<u32> {
        let places = self.chunks.iter().flat_map(|chunk| chunk.iter());
        let taken = iter::zip(0.., places).filter(|(_, place)| match place {
            Place::Taken(value) => choose(value),
            Place::Free { .. } => false,
        });
        taken.map(|(id, _)| id).collect()
    }

    /// All values; each chunk is gone once its values are.
    pub(super) fn into_values(self) -> impl Iterator<Item = T> {
        let places = self.chunks.into_iter().flat_map(|chunk| *chunk);
        places.filter_map(|place| match place {
            Place::Taken(value) => Some(value),
            Place::Free { .. } => None,
        })
    }

    /// What it takes.
    pub(super) fn bytes(&self) -> usize {
        self.chunks.len() * Self::CHUNK_BYTES + self.chunks.capacity() * size_of::<usize>()
    }

    /// What the next value may add to that.
    pub(super) fn growth_bytes(&self) -> usize {
        if self.free.is_some() {
            return 0;
        }
        let full = self.chunks.len() == self.chunks.capacity();
        let names = if full { self.chunks.capacity().max(Self::FIRST_CHUNKS) } else { 0 };
        Self::CHUNK_BYTES + names * size_of::<usize>()
    }

    /// Adds a chunk of free places and gives the first of them.
    #[cold]
    fn add_chunk(&mut self) -> u32 {
        let id = |place: usize| u32::try_from(place).expect("memory ends long before 2^32 places");
        let first = self.places();
        let next = |index: usize| (index + 1 < CHUNK).then(|| id(first + index + 1));
        self.chunks.push(Box::new(array::from_fn(|index| Place::Free { next: next(index) })));
        id(first)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_taken_again_before_another_chunk_is_made() {
        let mut slab = Slab::<String, 4>::default();
        let ids: Vec<u32> = (0..6).map(|value| slab.insert(value.to_string())).collect();
        assert_eq!((ids, slab.places()), ((0..6).collect(), 8));
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
    fn it_never_grows_by_more_than_it_said() {
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
