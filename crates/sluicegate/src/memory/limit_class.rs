//! Limit classes: the rule and the window or rate that many counters of a shard share, stored once.
//!
//! A class exists as long as a counter refers to it, so there are never more classes than counters.

use std::sync::Arc;

use sluicegate_core::Scale;

use super::{hashing::Hashing, index::Index, slab::Slab};

/// Number of classes per allocation; most shards have few.
const CHUNK: usize = 4;

/// The limit classes of one shard.
#[derive(Default)]
pub(super) struct LimitClasses {
    classes: Slab<LimitClass, CHUNK>,
    index: Index,
}

/// The parameters that several counters share.
pub(super) struct LimitClass {
    /// Absent for counters without a rule.
    pub(super) rule: Option<Arc<str>>,
    /// The scale of their numbers.
    pub(super) scale: Scale,
    counters: usize,
}

impl LimitClass {
    fn is(&self, rule: Option<&Arc<str>>, scale: Scale) -> bool {
        self.scale == scale && is_same_rule(self.rule.as_ref(), rule)
    }

    fn hash(&self, hashing: &Hashing) -> u64 {
        hash_of(self.rule.as_ref(), self.scale, hashing)
    }
}

/// Returns whether two rule names are equal, usually by comparing pointers only.
pub(super) fn is_same_rule(one: Option<&Arc<str>>, other: Option<&Arc<str>>) -> bool {
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

    /// Returns the class of a new counter and counts the reference.
    pub(super) fn acquire(&mut self, rule: Option<&Arc<str>>, scale: Scale, hashing: &Hashing) -> u32 {
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

    /// Releases the reference of one counter.
    pub(super) fn release(&mut self, id: u32, hashing: &Hashing) {
        let class = self.classes.get_mut(id);
        class.counters -= 1;
        if class.counters == 0 {
            self.index
                .remove(self.classes.get(id).hash(hashing), id, |id| self.classes.get(id).hash(hashing));
            self.classes.remove(id);
        }
    }

    /// Returns the bytes in use.
    pub(super) fn bytes(&self) -> usize {
        self.classes.bytes() + self.index.bytes()
    }

    /// Returns the bytes that another class may add.
    pub(super) fn growth_bytes(&self) -> usize {
        self.classes.growth_bytes() + self.index.growth_bytes()
    }
}

fn hash_of(rule: Option<&Arc<str>>, scale: Scale, hashing: &Hashing) -> u64 {
    hashing.of(rule.map(|rule| &**rule), &scale.to_bytes(), scale.algorithm())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use sluicegate_core::{Algorithm, Limit};

    use super::*;

    fn scale(algorithm: Algorithm, window_ms: u64) -> Scale {
        Scale::of(&Limit::new(algorithm, 1, Duration::from_millis(window_ms)).unwrap()).unwrap()
    }

    #[test]
    fn a_class_is_stored_once_and_as_long_as_a_counter_refers_to_it() {
        let (mut classes, hashing) = (LimitClasses::default(), Hashing::new());
        let fixed = |window_ms| scale(Algorithm::FixedWindow, window_ms);
        let (rule, same): (Arc<str>, Arc<str>) = ("rule".into(), "rule".into());
        let one = classes.acquire(Some(&rule), fixed(1), &hashing);
        assert_eq!(classes.acquire(Some(&same), fixed(1), &hashing), one);
        let others = [
            classes.acquire(Some(&rule), fixed(2), &hashing),
            classes.acquire(None, fixed(1), &hashing),
            classes.acquire(Some(&rule), scale(Algorithm::SlidingCounter, 1), &hashing),
        ];
        assert_eq!(classes.classes.len(), 4);
        others.into_iter().chain([one, one]).for_each(|id| classes.release(id, &hashing));
        assert_eq!(classes.classes.len(), 0);
    }

    #[test]
    fn released_classes_use_no_memory() {
        let (mut classes, hashing) = (LimitClasses::default(), Hashing::new());
        for window_ms in 1..=10_000 {
            let allowed = classes.bytes() + classes.growth_bytes();
            let id = classes.acquire(None, scale(Algorithm::FixedWindow, window_ms), &hashing);
            assert!(classes.bytes() <= allowed);
            if window_ms > 10 {
                classes.release(id, &hashing);
            }
        }
        assert_eq!(classes.classes.len(), 10);
        assert!(classes.bytes() < 2_000, "{}", classes.bytes());
    }
}
