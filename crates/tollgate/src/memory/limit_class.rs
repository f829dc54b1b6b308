//! What many counters of a shard have in common, kept once: their rule, and the window or rate they were
//! written under.
//!
//! A class lives as long as a counter is of it, so there are never more classes than counters.

use std::sync::Arc;

use super::{entry::Scale, hashing::Hashing, index::Index, slab::Slab};

/// How many classes an allocation holds: most shards see few.
const CHUNK: usize = 4;

/// The classes of the counters in one shard.
#[derive(Default)]
pub(super) struct LimitClasses {
    classes: Slab<LimitClass, CHUNK>,
    index: Index,
}

/// What counters have in common.
pub(super) struct LimitClass {
    /// Absent where counters have none.
    pub(super) rule: Option<Arc<str>>,
    /// How their numbers are to be read.
    pub(super) scale: Scale,
    counters: usize,
}

impl LimitClass {
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

impl LimitClasses {
    pub(super) fn get(&self, id: u32) -> &LimitClass {
        self.classes.get(id)
    }

    /// The class for one more counter.
    pub(super) fn join(&mut self, rule: Option<&Arc<str>>, scale: Scale, hashing: &Hashing) -> u32 {
        let hash = hash_of(rule, scale, hashing);
        let known = self.index.find(hash, |id| self.classes.get(id).is(rule, scale));
        let id = known.unwrap_or_else(|| {
            if self.index.is_full() {
                self.index.grow(|id| self.classes.get(id).hash(hashing));
            }
            let id = self.classes.insert(LimitClass { rule: rule.cloned(), scale, counters: 0 });
            self.index.insert(hash, id);
            id
        });
        self.classes.get_mut(id).counters += 1;
        id
    }

    /// One counter less is of this class.
    pub(super) fn leave(&mut self, id: u32, hashing: &Hashing) {
        let class = self.classes.get_mut(id);
        class.counters -= 1;
        if class.counters == 0 {
            self.index
                .remove(self.classes.get(id).hash(hashing), id, |id| self.classes.get(id).hash(hashing));
            self.classes.remove(id);
        }
    }

    /// What they take.
    pub(super) fn bytes(&self) -> usize {
        self.classes.bytes() + self.index.bytes()
    }

    /// What another class may add to that.
    pub(super) fn growth_bytes(&self) -> usize {
        self.classes.growth_bytes() + self.index.growth_bytes()
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
        let (mut classes, hashing) = (LimitClasses::default(), Hashing::new());
        let scale = |window_us| Scale::FixedWindow { window_us };
        let (rule, same): (Arc<str>, Arc<str>) = ("rule".into(), "rule".into());
        let one = classes.join(Some(&rule), scale(1), &hashing);
        assert_eq!(classes.join(Some(&same), scale(1), &hashing), one);
        let others = [
            classes.join(Some(&rule), scale(2), &hashing),
            classes.join(None, scale(1), &hashing),
            classes.join(Some(&rule), Scale::SlidingCounter { window_us: 1 }, &hashing),
        ];
        assert_eq!(classes.classes.len(), 4);
        others.into_iter().chain([one, one]).for_each(|id| classes.leave(id, &hashing));
        assert_eq!(classes.classes.len(), 0);
    }

    #[test]
    fn kinds_that_come_and_go_take_no_more_memory_than_those_that_are_there() {
        let (mut classes, hashing) = (LimitClasses::default(), Hashing::new());
        for window_us in 0..10_000 {
            let allowed = classes.bytes() + classes.growth_bytes();
            let id = classes.join(None, Scale::FixedWindow { window_us }, &hashing);
            assert!(classes.bytes() <= allowed);
            if window_us >= 10 {
                classes.leave(id, &hashing);
            }
        }
        assert_eq!(classes.classes.len(), 10);
        assert!(classes.bytes() < 2_000, "{}", classes.bytes());
    }
}
