//! What many counters of a shard have in common, kept once: their rule, and the window or rate they were
//! written under.
//!
//! A kind lives as long as a counter is of it, so there are never more kinds than counters.

use std::sync::Arc;

use super::{entry::Scale, hashing::Hashing, index::Index, slab::Slab};

/// How many kinds an allocation holds: most shards see few.
const CHUNK: usize = 4;

/// The kinds of the counters in one shard.
#[derive(Default)]
pub(super) struct Kinds {
    kinds: Slab<Kind, CHUNK>,
    index: Index,
}

/// What counters have in common.
pub(super) struct Kind {
    /// Absent where counters have none.
    pub(super) rule: Option<Arc<str>>,
    /// How their numbers are to be read.
    pub(super) scale: Scale,
    counters: usize,
}

impl Kind {
    fn is(&self, rule: Option<&Arc<str>>, scale: Scale) -> bool {
        self.scale == scale && is_same(self.rule.as_ref(), rule)
    }

    fn hash(&self, hashing: &Hashing) -> u64 {
        hash_of(self.rule.as_ref(), self.scale, hashing)
    }
}

/// Whether two names of rules are the same, mostly without reading them.
pub(super) fn is_same(one: Option<&Arc<str>>, other: Option<&Arc<str>>) -> bool {
    match (one, other) {
        (Some(one), Some(other)) => Arc::ptr_eq(one, other) || one == other,
        (None, None) => true,
        _ => false,
    }
}

impl Kinds {
    pub(super) fn get(&self, id: u32) -> &Kind {
        self.kinds.get(id)
    }

    /// The kind for one more counter.
    pub(super) fn join(&mut self, rule: Option<&Arc<str>>, scale: Scale, hashing: &Hashing) -> u32 {
        let hash = hash_of(rule, scale, hashing);
        let known = self.index.find(hash, |id| self.kinds.get(id).is(rule, scale));
        let id = known.unwrap_or_else(|| {
            if self.index.is_full() {
                self.index.grow(|id| self.kinds.get(id).hash(hashing));
            }
            let id = self.kinds.insert(Kind { rule: rule.cloned(), scale, counters: 0 });
            self.index.insert(hash, id);
            id
        });
        self.kinds.get_mut(id).counters += 1;
        id
    }

    /// One counter less is of this kind.
    pub(super) fn leave(&mut self, id: u32, hashing: &Hashing) {
        let kind = self.kinds.get_mut(id);
        kind.counters -= 1;
        if kind.counters == 0 {
            self.index.remove(self.kinds.get(id).hash(hashing), id, |id| self.kinds.get(id).hash(hashing));
            self.kinds.remove(id);
        }
    }

    /// What they take.
    pub(super) fn bytes(&self) -> usize {
        self.kinds.bytes() + self.index.bytes()
    }

    /// What another kind may add to that.
    pub(super) fn growth_bytes(&self) -> usize {
        self.kinds.growth_bytes() + self.index.growth_bytes()
    }
}

fn hash_of(rule: Option<&Arc<str>>, scale: Scale, hashing: &Hashing) -> u64 {
    hashing.of(rule.map(|rule| &**rule), &scale.to_bytes(), scale.algorithm())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kind_is_kept_once_and_as_long_as_a_counter_is_of_it() {
        let (mut kinds, hashing) = (Kinds::default(), Hashing::new());
        let scale = |window_us| Scale::FixedWindow { window_us };
        let (rule, same): (Arc<str>, Arc<str>) = ("rule".into(), "rule".into());
        let one = kinds.join(Some(&rule), scale(1), &hashing);
        assert_eq!(kinds.join(Some(&same), scale(1), &hashing), one);
        let others = [
            kinds.join(Some(&rule), scale(2), &hashing),
            kinds.join(None, scale(1), &hashing),
            kinds.join(Some(&rule), Scale::SlidingCounter { window_us: 1 }, &hashing),
        ];
        assert_eq!(kinds.kinds.len(), 4);
        others.into_iter().chain([one, one]).for_each(|id| kinds.leave(id, &hashing));
        assert_eq!(kinds.kinds.len(), 0);
    }

    #[test]
    fn kinds_that_come_and_go_take_no_more_memory_than_those_that_are_there() {
        let (mut kinds, hashing) = (Kinds::default(), Hashing::new());
        for window_us in 0..10_000 {
            let allowed = kinds.bytes() + kinds.growth_bytes();
            let id = kinds.join(None, Scale::FixedWindow { window_us }, &hashing);
            assert!(kinds.bytes() <= allowed);
            if window_us >= 10 {
                kinds.leave(id, &hashing);
            }
        }
        assert_eq!(kinds.kinds.len(), 10);
        assert!(kinds.bytes() < 2_000, "{}", kinds.bytes());
    }
}
