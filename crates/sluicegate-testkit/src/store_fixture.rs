//! A store under test with a manual clock. Every answer is checked for consistency.

use std::time::Duration;

use sluicegate::{
    Algorithm, Cost, Limit, ManualClock, Retry, StoreError, Timestamp,
    limiter::Operation,
    store::{
        Answer, Check, CheckAnswer, CounterSnapshot, Deadline, HoldId, HoldOperation, Key, RemoteStore,
        Store, Terms, Tier,
    },
};
use sluicegate_core::step::Share;

use crate::server::Server;

/// A time with all digits in use, 21.799839 s into a minute.
pub const START: Timestamp = Timestamp::from_micros(1_794_765_441_799_839);

/// A store under test and its clock.
pub struct StoreFixture {
    /// The store, on `clock`.
    pub store: Store,
    /// The clock of the store.
    pub clock: ManualClock,
    /// The server behind the store, which ends when the fixture is dropped.
    pub server: Option<Server>,
}

impl StoreFixture {
    /// Decides one check on several counters.
    pub async fn decide(&self, operation: Operation, tiers: &[(&str, Terms)], count: u32) -> Vec<Answer> {
        let tier = |(key, terms): &(&str, Terms)| Tier {
            key: Key::without_rule(key).expect("a short key"),
            terms: *terms,
        };
        let check =
            Check::new(operation, tiers.iter().map(tier).collect()).expect("a valid check").times(count);
        let decided = decide(&self.store, &[check], None).await.expect("the store answers");
        let CheckAnswer { at, answers } = decided.into_iter().next().expect("one check has one answer");
        assert_eq!(at, self.clock.now());
        answers
    }

    /// Decides a check that is an operation on a hold.
    pub(crate) async fn decide_held(
        &self,
        tiers: &[(&str, Terms)],
        id: &str,
        operation: HoldOperation,
    ) -> Vec<Answer> {
        let decided =
            decide(&self.store, &[held(tiers, id, operation)], None).await.expect("the store answers");
        let CheckAnswer { at, answers } = decided.into_iter().next().expect("one check has one answer");
        assert_eq!(at, self.clock.now());
        answers
    }

    async fn decide_one(&self, operation: Operation, key: &str, limit: &Limit, cost: u64) -> Share {
        let terms = Terms::new(*limit, Cost::new(cost).expect("a valid cost"));
        let share = self.decide(operation, &[(key, terms)], 1).await[0].share(&terms, 0, 1);
        assert_is_one_snapshot(&share, limit);
        share
    }

    pub(crate) async fn check(&self, key: &str, limit: &Limit, cost: u64) -> Share {
        self.decide_one(Operation::Check, key, limit, cost).await
    }

    pub(crate) async fn peek(&self, key: &str, limit: &Limit, cost: u64) -> Share {
        self.decide_one(Operation::Peek, key, limit, cost).await
    }

    pub(crate) async fn charge(&self, key: &str, limit: &Limit, cost: u64) -> Share {
        self.decide_one(Operation::Charge, key, limit, cost).await
    }

    pub(crate) async fn refund(&self, key: &str, limit: &Limit, cost: u64, at: Option<Timestamp>) -> Share {
        self.decide_one(Operation::Refund { at }, key, limit, cost).await
    }

    /// Returns how many requests of one unit pass now.
    pub(crate) async fn admitted_now(&self, key: &str, limit: &Limit) -> u64 {
        let terms = Terms::new(*limit, Cost::ONE);
        self.decide(Operation::Check, &[(key, terms)], u32::MAX).await[0].charged.into()
    }

    pub(crate) async fn reset(&self, key: &str, limit: &Limit) -> u64 {
        reset(&self.store, &Key::without_rule(key).expect("a short key"), limit.algorithm()).await
    }

    /// Returns the state of one counter.
    pub(crate) async fn inspect(&self, key: &str, limit: &Limit) -> CounterSnapshot {
        let counters = [(Key::without_rule(key).expect("a short key"), *limit)];
        let mut snapshots = match &self.store {
            Store::Memory(store) => store.inspect(&counters),
            Store::Remote(store) => {
                let snapshots = store.inspect(&counters).await.expect("the store answers");
                snapshots.into_iter().map(|snapshot| snapshot.expect("the state is valid")).collect()
            }
        };
        snapshots.remove(0)
    }

    pub(crate) fn reset_clock(&self) {
        self.clock.set(START);
    }
}

/// Returns an operation on the hold with this id.
pub(crate) fn held(tiers: &[(&str, Terms)], id: &str, operation: HoldOperation) -> Check {
    let tier = |(key, terms): &(&str, Terms)| Tier {
        key: Key::without_rule(key).expect("a short key"),
        terms: *terms,
    };
    let check = Check::new(Operation::Charge, tiers.iter().map(tier).collect()).expect("a valid check");
    check.with_hold(HoldId::new(id).expect("a short id"), operation)
}

/// Decides a batch as a whole.
pub trait DecideAll: RemoteStore {
    /// Decides a batch. A store may fail for some checks only, which is an error of the whole batch here.
    ///
    /// # Errors
    /// When a check was not decided.
    fn decide_all(
        &self,
        checks: &[Check],
        deadline: Option<Deadline>,
    ) -> impl Future<Output = Result<Vec<CheckAnswer>, StoreError>> + Send {
        async move { self.decide(checks, deadline).await.into_iter().collect() }
    }
}

impl<R: RemoteStore + ?Sized> DecideAll for R {}

/// Decides a batch on any store. The memory store has no deadline.
///
/// # Errors
/// When a check was not decided.
pub async fn decide(
    store: &Store,
    checks: &[Check],
    deadline: Option<Deadline>,
) -> Result<Vec<CheckAnswer>, StoreError> {
    match store {
        Store::Memory(store) => Ok(store.decide_all(checks)),
        Store::Remote(store) => store.decide_all(checks, deadline).await,
    }
}

/// Deletes a counter and returns how many existed.
pub(crate) async fn reset(store: &Store, key: &Key, algorithm: Algorithm) -> u64 {
    let counters = [(key.clone(), algorithm)];
    match store {
        Store::Memory(store) => store.forget(&counters),
        Store::Remote(store) => store.reset(&counters).await.expect("the store answers"),
    }
}

/// Asserts that the fields of one answer are consistent.
fn assert_is_one_snapshot(share: &Share, limit: &Limit) {
    assert!(share.remaining <= limit.capacity(), "{share:?}");
    assert_eq!(share.passes, share.retry.is_none(), "{share:?}");
    assert_ne!(share.retry, Some(Retry::After(Duration::ZERO)), "retry_after is never zero: {share:?}");
    if share.remaining < limit.capacity() {
        assert!(share.reset_after > Duration::ZERO, "usage without reset_after: {share:?}");
    } else {
        assert_eq!(share.reset_after, Duration::ZERO, "reset_after without usage: {share:?}");
    }
}
