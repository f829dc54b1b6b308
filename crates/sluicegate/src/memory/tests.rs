//! The memory bound, and the locks under many thread schedules.

use std::{sync::Arc, time::Duration};

use sluicegate_core::{Algorithm, Answer, Cost, HoldOutcome, Limit, OnExpiry, Operation, Terms, Timestamp};

use super::{
    MIN_MAX_MEMORY, MemoryBoundError, MemoryStore,
    shard::Shard,
    table::{Lock, Table},
};
use crate::{
    check::{Check, HoldOperation, Tier},
    clock::ManualClock,
    key::{HoldId, Key, encoded_rule},
};

pub(super) const HOUR: Duration = Duration::from_secs(3600);
const START: Timestamp = Timestamp::from_micros(1_794_765_441_799_839);

pub(super) fn small_store() -> (MemoryStore, ManualClock) {
    let clock = ManualClock::new(START);
    let store = MemoryStore::new().with_max_memory(MIN_MAX_MEMORY).unwrap().with_clock(clock.clone());
    (store, clock)
}

pub(super) fn check(store: &MemoryStore, key: &str, limit: &Limit) -> Answer {
    let key = Key::without_rule(key).unwrap();
    store.decide_one(&key, &Terms::new(*limit, Cost::ONE), Operation::Check, 1).0
}

pub(super) fn limits(amount: u64, window: Duration) -> [Limit; 4] {
    Algorithm::WINDOWED.map(|algorithm| Limit::new(algorithm, amount, window).unwrap())
}

const HOLD: HoldOperation = HoldOperation::Hold { ttl: Duration::from_secs(60) };
const SETTLE: HoldOperation = HoldOperation::Settle { kept: 0, max_excess: None };

/// Applies a hold operation to a counter.
fn on_hold(
    store: &MemoryStore,
    key: &str,
    limit: &Limit,
    cost: u32,
    id: &str,
    operation: HoldOperation,
) -> Answer {
    let tier = Tier { key: Key::without_rule(key).unwrap(), terms: Terms::new(*limit, Cost::from(cost)) };
    let check = Check::new(Operation::Check, vec![tier]).unwrap();
    store.decide_all(&[check.with_hold(HoldId::new(id).unwrap(), operation)])[0].answers[0]
}

#[test]
fn a_flood_of_keys_stays_under_the_bound_and_resets_no_limit() {
    for limit in limits(3, HOUR) {
        let (store, _) = small_store();
        for _ in 0..3 {
            assert_eq!(check(&store, "exhausted", &limit).charged, 1);
        }
        for flood in 0..50_000 {
            check(&store, &format!("flood:{flood}"), &limit);
            if flood % 1_000 == 0 {
                assert!(store.memory_bytes() <= MIN_MAX_MEMORY, "{limit:?}");
                assert_eq!(check(&store, "exhausted", &limit).charged, 0, "{limit:?}");
            }
        }
        assert!(store.memory_bytes() <= MIN_MAX_MEMORY);
        assert!(store.len() > 1_000 && store.len() < 20_000, "{} counters", store.len());
    }
}

#[test]
fn keys_beyond_the_bound_share_a_counter_and_never_exceed_their_own_limit() {
    for limit in limits(3, HOUR) {
        let (store, _) = small_store();
        (0..30_000).for_each(|flood| {
            check(&store, &format!("flood:{flood}"), &limit);
        });
        let admitted = (0..1_000).filter(|_| check(&store, "late", &limit).charged == 1).count();
        assert_eq!(admitted, 0, "{limit:?}: the flood has exhausted the shared counter");
    }
}

#[test]
fn freed_memory_admits_no_additional_requests() {
    for limit in limits(3, HOUR) {
        let (store, _) = small_store();
        let mut kept = Vec::new();
        for flood in 0..30_000 {
            let name = format!("flood:{flood}");
            let before = store.len();
            check(&store, &name, &limit);
            if store.len() > before {
                kept.push((Key::without_rule(name).unwrap(), limit.algorithm()));
            }
        }
        let late: Vec<String> = (0..100).map(|key| format!("late:{key}")).collect();
        late.iter().for_each(|key| {
            check(&store, key, &limit);
        });
        assert_eq!(store.forget(&kept), kept.len() as u64);
        let admitted: u32 = late.iter().map(|key| check(&store, key, &limit).charged).sum();
        assert_eq!(admitted, 0, "{limit:?}: units in an overflow counter stay counted");
    }
}

#[test]
fn expired_counters_are_removed_for_new_ones() {
    for limit in limits(3, Duration::from_secs(1)) {
        let (store, clock) = small_store();
        for flood in 0..40_000 {
            assert_eq!(check(&store, &format!("flood:{flood}"), &limit).charged, 1, "{limit:?}");
            clock.advance(Duration::from_millis(2));
        }
        assert!(store.memory_bytes() <= MIN_MAX_MEMORY);
        clock.advance(HOUR);
        // half of what fits if none expires, as some shards are full earlier than others
        let (full, _) = small_store();
        let lasting = Limit::new(limit.algorithm(), 3, HOUR).unwrap();
        (0..30_000).for_each(|flood| {
            check(&full, &format!("full:{flood}"), &lasting);
        });
        for flood in 0..full.len() / 2 {
            assert_eq!(check(&store, &format!("after:{flood}"), &limit).charged, 1, "{limit:?}");
        }
        assert!(store.len() <= full.len(), "{limit:?}: {} counters, {} fit", store.len(), full.len());
    }
}

#[test]
fn logs_without_memory_merge_entries_and_never_count_less() {
    let (store, clock) = small_store();
    let limit = Limit::sliding_log(200_000, HOUR).unwrap();
    let small = Limit::sliding_log(50, HOUR).unwrap();
    assert_eq!(check(&store, "small", &small).charged, 1);
    for charge in 0..400_000 {
        check(&store, &format!("log:{}", charge % 20), &limit);
        clock.advance(Duration::from_micros(10));
    }
    assert!(store.memory_bytes() <= MIN_MAX_MEMORY, "{}", store.memory_bytes());
    for key in 0..20 {
        assert_eq!(check(&store, &format!("log:{key}"), &limit).available, 200_000 - 20_001);
    }
    let admitted: u32 = (0..100)
        .map(|_| {
            clock.advance(Duration::from_micros(10));
            check(&store, "small", &small).charged
        })
        .sum();
    assert_eq!(admitted, 49);
}

/// Fills the store with keys of one rule until no shard accepts another one.
pub(super) fn fill(store: &MemoryStore, limit: &Limit) {
    let mut without_insert = 0;
    for flood in 0.. {
        let before = store.len();
        check(store, &format!("flood:{flood}"), limit);
        without_insert = if store.len() > before { 0 } else { without_insert + 1 };
        if without_insert == 5_000 {
            return;
        }
    }
}

/// Fills a store, then checks new keys of many rules.
fn admitted_by_rule(max_memory: usize, rules: usize) -> Vec<u32> {
    let clock = ManualClock::new(START);
    let store = MemoryStore::new().with_max_memory(max_memory).unwrap().with_clock(clock);
    let terms = Terms::new(Limit::fixed_window(1, 1000 * HOUR).unwrap(), Cost::ONE);
    fill(&store, &terms.limit);
    let admitted = (0..rules)
        .map(|rule| {
            let rule = encoded_rule(&format!("rule-{rule}"));
            let keys =
                (0..2_000_u32).map(|identity| Key::of_rule(&rule, &[Some(&identity.to_le_bytes())], None));
            keys.map(|key| store.decide_one(&key, &terms, Operation::Check, 1).0.charged).sum()
        })
        .collect();
    assert!(store.memory_bytes() <= max_memory);
    admitted
}

#[test]
fn each_rule_has_its_own_overflow_counters_up_to_the_reserved_number() {
    assert_eq!(admitted_by_rule(8 << 20, 5), [64; 5], "one in each of 64 shards, for each rule");
    let admitted = admitted_by_rule(MIN_MAX_MEMORY, 12);
    assert_eq!(
        admitted,
        [64, 64, 64, 64, 64, 64, 64, 0, 0, 0, 0, 0],
        "eight in each shard, one of them for the flood"
    );
}

#[test]
fn a_short_window_does_not_expire_overflow_counters_of_a_long_window() {
    for (long, short) in limits(3, HOUR).into_iter().zip(limits(1_000, Duration::from_millis(1))) {
        let (store, clock) = small_store();
        fill(&store, &long);
        let mut admitted = 0;
        for round in 0..200 {
            (0..200).for_each(|key| {
                check(&store, &format!("short:{round}:{key}"), &short);
            });
            admitted += check(&store, "victim", &long).charged;
            clock.advance(Duration::from_millis(2));
        }
        assert!(admitted <= 3, "{long:?}: {admitted}");
    }
}

#[test]
fn a_refund_of_a_key_in_an_overflow_counter_does_not_affect_other_keys() {
    for limit in limits(3, HOUR) {
        let (store, _) = small_store();
        fill(&store, &limit);
        let refund = |name: String| {
            let key = Key::without_rule(name).unwrap();
            store.decide_one(&key, &Terms::new(limit, Cost::ONE), Operation::Refund { at: None }, 1);
        };
        (0..500).for_each(|key| refund(format!("never-charged:{key}")));
        let admitted: u32 = (0..500).map(|key| check(&store, &format!("late:{key}"), &limit).charged).sum();
        assert_eq!(admitted, 0, "{limit:?}");
    }
}

#[test]
fn two_tiers_on_one_overflow_counter_do_not_panic() {
    for limit in limits(3, HOUR) {
        let (store, _) = small_store();
        fill(&store, &limit);
        for round in 0..200 {
            let tier = |name: &str, cost: u32| Tier {
                key: Key::without_rule(format!("{name}:{round}")).unwrap(),
                terms: Terms::new(limit, Cost::from(cost)),
            };
            let mut shadow = tier("shadow", 3);
            shadow.terms.mode = sluicegate_core::step::Mode::Shadow;
            store.decide_all(&[Check::new(Operation::Check, vec![tier("a", 1), shadow]).unwrap()]);
        }
    }
}

#[test]
fn reads_and_denials_on_a_full_store_insert_no_counter() {
    for limit in limits(3, HOUR) {
        let (store, _) = small_store();
        let names: Vec<Key> =
            (0..30_000).map(|key| Key::without_rule(format!("flood:{key}")).unwrap()).collect();
        let apply =
            |key: &Key, operation| store.decide_one(key, &Terms::new(limit, Cost::ONE), operation, 1).0;
        names.iter().for_each(|key| {
            apply(key, Operation::Check);
        });
        store.forget(&names.iter().map(|key| (key.clone(), limit.algorithm())).collect::<Vec<_>>());
        assert!(store.is_empty());
        for late in 0..2_000 {
            let key = Key::without_rule(format!("late:{late}")).unwrap();
            apply(&key, Operation::Peek);
            assert_eq!(apply(&key, Operation::Check).charged, 0, "{limit:?}");
        }
        assert!(store.is_empty(), "{limit:?}: {} counters", store.len());
    }
}

#[test]
fn expired_counters_in_any_shard_are_removed_for_growing_logs() {
    let (store, clock) = small_store();
    let log = Limit::sliding_log(100, Duration::from_secs(10)).unwrap();
    let names: Vec<String> = (0..20).map(|key| format!("log:{key}")).collect();
    names.iter().for_each(|key| {
        check(&store, key, &log);
    });
    fill(&store, &Limit::token_bucket(5, Duration::from_secs(10)).unwrap());
    clock.advance(24 * HOUR);
    for _ in 0..600 {
        clock.advance(Duration::from_millis(125)); // 80 % of what the limit allows
        for key in &names {
            assert_eq!(check(&store, key, &log).charged, 1);
        }
    }
}

#[test]
fn a_different_limit_for_every_key_stays_under_the_bound_and_exceeds_no_limit() {
    for limit in limits(3, HOUR) {
        let (store, _) = small_store();
        fill(&store, &limit);
        let mut admitted = 0;
        for key in 0..20_000_u32 {
            let window = HOUR + Duration::from_micros(1 + u64::from(key));
            let own = Limit::new(limit.algorithm(), 3, window).unwrap();
            admitted += (0..4).map(|_| check(&store, &format!("flood:{key}"), &own).charged).sum::<u32>();
            assert!(store.memory_bytes() <= MIN_MAX_MEMORY, "{limit:?}");
        }
        let before = store.len();
        let exhausted = (0..before).filter(|key| check(&store, &format!("flood:{key}"), &limit).charged == 0);
        assert!(exhausted.count() > 0 && admitted > 0, "{limit:?}: {admitted} admitted");
        assert_eq!(store.len(), before);
    }
}

#[test]
fn a_changed_limit_uses_the_same_counter() {
    for (minute, hour) in limits(3, HOUR / 60).into_iter().zip(limits(3, HOUR)) {
        let (store, _) = small_store();
        let available: Vec<i64> =
            [minute, hour, minute].iter().map(|limit| check(&store, "k", limit).available).collect();
        assert_eq!((available, store.len()), (vec![2, 1, 0], 1));
        assert_eq!(check(&store, "k", &hour).charged, 0);
    }
}

#[test]
fn slots_of_removed_counters_are_reused() {
    for limit in limits(3, HOUR) {
        let (store, _) = small_store();
        let keys: Vec<Key> = (0..2_000).map(|key| Key::without_rule(format!("k:{key}")).unwrap()).collect();
        let counters: Vec<_> = keys.iter().map(|key| (key.clone(), limit.algorithm())).collect();
        let charge = || {
            keys.iter().for_each(|key| {
                store.decide_one(key, &Terms::new(limit, Cost::ONE), Operation::Check, 1);
            });
            assert_eq!(store.len(), keys.len());
            store.memory_bytes()
        };
        let bytes = charge();
        for _ in 0..3 {
            assert_eq!(store.forget(&counters), 2_000);
            assert_eq!(charge(), bytes, "{limit:?}");
        }
    }
}

#[test]
fn a_bound_that_is_too_small_is_rejected() {
    let error = MemoryStore::new().with_max_memory(MIN_MAX_MEMORY - 1).err();
    assert_eq!(error, Some(MemoryBoundError(MIN_MAX_MEMORY - 1)));
}

#[test]
fn reads_and_denials_insert_no_counter() {
    let (store, _) = small_store();
    for limit in limits(3, HOUR) {
        let terms = Terms::new(limit, Cost::from(4));
        let key = Key::without_rule("k").unwrap();
        for operation in [Operation::Check, Operation::Peek, Operation::Refund { at: None }] {
            store.decide_one(&key, &terms, operation, 1);
        }
    }
    assert!(store.is_empty());
}

impl<T> Lock<T> for shuttle::sync::Mutex<T> {
    type Guard<'a>
        = shuttle::sync::MutexGuard<'a, T>
    where
        T: 'a;

    fn new(value: T) -> Self {
        Self::new(value)
    }

    fn lock(&self) -> Self::Guard<'_> {
        self.lock().unwrap()
    }

    fn try_lock(&self) -> Option<Self::Guard<'_>> {
        self.try_lock().ok()
    }
}

/// The clock advances with every reading, two readings per window. A thread that reads it before it waits for a lock
/// would decide with an outdated time, at which a newer state is too far ahead to count.
#[test]
fn no_thread_schedule_decides_in_the_past() {
    shuttle::check_random(
        || {
            let table: Arc<Table<shuttle::sync::Mutex<Shard>>> = Arc::new(Table::new(MIN_MAX_MEMORY));
            let clock = Arc::new(shuttle::sync::atomic::AtomicU64::new(START.as_micros()));
            let threads: Vec<_> = (0..3)
                .map(|_| {
                    let (table, clock) = (Arc::clone(&table), Arc::clone(&clock));
                    shuttle::thread::spawn(move || {
                        let terms =
                            Terms::new(Limit::sliding_log(1, Duration::from_millis(1)).unwrap(), Cost::ONE);
                        let key = Key::without_rule("k").unwrap();
                        let read_clock = || {
                            shuttle::thread::yield_now();
                            Timestamp::from_micros(clock.fetch_add(600, std::sync::atomic::Ordering::SeqCst))
                        };
                        let decide = || table.decide_one(&key, &terms, Operation::Check, 1, read_clock);
                        let decided: Vec<_> = (0..4).map(|_| decide()).collect();
                        decided
                            .into_iter()
                            .filter(|(answer, _)| answer.charged == 1)
                            .map(|(_, at)| at.as_micros())
                    })
                })
                .collect();
            let mut admitted: Vec<u64> =
                threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect();
            admitted.sort_unstable();
            assert!(admitted.windows(2).all(|pair| pair[1] - pair[0] >= 1_000), "{admitted:?}");
        },
        1_000,
    );
}

/// Three threads check the same tiers in different orders. No deadlock occurs, no limit is exceeded, and all tiers are charged
/// equally.
#[test]
fn no_thread_schedule_deadlocks_or_splits_a_check() {
    const THREADS: usize = 3;
    const CALLS: usize = 3;
    let amount = (THREADS * CALLS) as u64 - 2;
    let scenario = move || {
        let table: Arc<Table<shuttle::sync::Mutex<Shard>>> = Arc::new(Table::new(MIN_MAX_MEMORY));
        let tiers = |order: [usize; 3]| -> Check {
            let limits = [
                Limit::token_bucket(amount, HOUR).unwrap(),
                Limit::sliding_log(amount + 1, HOUR).unwrap(),
                Limit::fixed_window(amount + 2, HOUR).unwrap(),
            ];
            let tier = |index: usize| Tier {
                key: Key::without_rule(index.to_string()).unwrap(),
                terms: Terms::new(limits[index], Cost::ONE),
            };
            Check::new(Operation::Check, order.map(tier).into()).unwrap()
        };
        let orders = [[0, 1, 2], [2, 1, 0], [1, 2, 0]];
        let threads: Vec<_> = orders
            .into_iter()
            .map(|order| {
                let (table, check) = (Arc::clone(&table), tiers(order));
                shuttle::thread::spawn(move || {
                    (0..CALLS)
                        .map(|_| {
                            u64::from(table.decide(std::slice::from_ref(&check), || START).0[0][0].charged)
                        })
                        .sum::<u64>()
                })
            })
            .collect();
        let admitted: u64 = threads.into_iter().map(|thread| thread.join().unwrap()).sum();
        assert_eq!(admitted, amount);
        let check = tiers([0, 1, 2]);
        let left: Vec<i64> = (check.tiers().iter())
            .map(|tier| table.decide_one(&tier.key, &tier.terms, Operation::Peek, 1, || START).0.available)
            .collect();
        assert_eq!(left, [0, 1, 2]);
    };
    shuttle::check_random(scenario, 2_000);
    shuttle::check_pct(scenario, 1_000, 3);
}

#[test]
fn ended_holds_are_forgotten_oldest_first_before_another_request_lacks_memory() {
    let (store, clock) = small_store();
    let limit = Limit::concurrency(5).unwrap();
    let tokens = Limit::token_bucket(100, HOUR).unwrap();
    let outcome = |key: &str, limit: &Limit, id: &str, operation| {
        on_hold(&store, key, limit, 1, id, operation).hold.outcome
    };
    assert_eq!(outcome("other", &tokens, "live", HOLD), HoldOutcome::Held);
    assert_eq!(outcome("other", &tokens, "settled", HOLD), HoldOutcome::Held);
    assert_eq!(outcome("other", &tokens, "settled", SETTLE), HoldOutcome::Settled);
    for request in 0..5_000 {
        clock.advance(Duration::from_micros(200));
        let id = format!("request-{request}");
        assert_eq!(outcome("busy", &limit, &id, HOLD), HoldOutcome::Held, "{id}");
        assert_eq!(outcome("busy", &limit, &id, SETTLE), HoldOutcome::Settled, "{id}");
        assert!(store.memory_bytes() <= MIN_MAX_MEMORY);
    }
    assert_eq!(outcome("busy", &limit, "request-4999", SETTLE), HoldOutcome::Already);
    assert_eq!(outcome("busy", &limit, "request-0", SETTLE), HoldOutcome::Unknown);
    assert_eq!(outcome("other", &tokens, "settled", SETTLE), HoldOutcome::Unknown, "it ended first");
    for key in 0..1_000 {
        assert_eq!(check(&store, &format!("plain-{key}"), &tokens).available, 99);
    }
    assert_eq!(store.usage().overflow_decisions, 0);
    for tenant in 0..200 {
        assert_eq!(outcome(&format!("tenant-{tenant}"), &limit, "id", HOLD), HoldOutcome::Held, "{tenant}");
    }
    assert_eq!(
        outcome("other", &tokens, "live", SETTLE),
        HoldOutcome::Settled,
        "a live hold is not forgotten"
    );
}

#[test]
fn only_live_holds_and_counters_fill_the_memory() {
    let limit = Limit::concurrency(100_000).unwrap();
    for counters in [1, 50, 1_000_000] {
        let (store, clock) = small_store();
        let made = |round: &str| {
            let counter = |request: usize| format!("counter-{}", request % counters);
            let made = (0..)
                .take_while(|request| {
                    let id = format!("{round}-{request}");
                    on_hold(&store, &counter(*request), &limit, 1, &id, HOLD).hold.outcome
                        == HoldOutcome::Held
                })
                .count();
            (0..made).for_each(|request| {
                let id = format!("{round}-{request}");
                let settled = on_hold(&store, &counter(request), &limit, 0, &id, SETTLE);
                assert_eq!(
                    settled.hold.outcome,
                    HoldOutcome::Settled,
                    "{counters}: live holds are not forgotten"
                );
            });
            assert!(store.memory_bytes() <= MIN_MAX_MEMORY);
            made
        };
        let first = made("first");
        for round in ["second", "third"] {
            clock.advance(Duration::from_millis(1));
            let again = made(round);
            assert!(again >= first / 10 * 9, "{counters} counters: {first} holds, then {again}");
        }
    }
}

#[test]
fn expired_holds_are_forgotten_when_memory_is_short() {
    for on_expiry in [OnExpiry::Charge, OnExpiry::Release] {
        let (store, clock) = small_store();
        let limit = Limit::token_bucket(100_000, HOUR).unwrap().with_on_expiry(on_expiry).unwrap();
        let ttl = Duration::from_millis(1);
        for request in 0..5_000 {
            clock.advance(ttl);
            let id = format!("request-{request}");
            let made = on_hold(&store, "abandoned", &limit, 1, &id, HoldOperation::Hold { ttl });
            assert_eq!(made.hold.outcome, HoldOutcome::Held, "{id}");
        }
        let late = on_hold(&store, "abandoned", &limit, 3, "request-0", SETTLE);
        assert_eq!(late.hold.outcome, HoldOutcome::Unknown, "{on_expiry:?}");
        assert!(store.memory_bytes() <= MIN_MAX_MEMORY);
    }
}

#[test]
fn expired_holds_are_refunded_without_memory_for_a_changed_window() {
    let (store, clock) = small_store();
    let limit = |window| Limit::token_bucket(10, window).unwrap().with_on_expiry(OnExpiry::Release).unwrap();
    let (before, after) = (limit(HOUR), limit(2 * HOUR));
    assert_eq!(on_hold(&store, "known", &before, 9, "id", HOLD).available, 1);
    fill(&store, &before);
    // a separate window for each key needs a separate limit class
    let is_denied = |own: u64| {
        let window = HOUR + Duration::from_micros(own + 1);
        check(&store, &format!("flood:{own}"), &Limit::token_bucket(3, window).unwrap()).charged == 0
    };
    assert!((0..20_000).any(is_denied));
    clock.advance(Duration::from_secs(60));
    let tier = Tier { key: Key::without_rule("known").unwrap(), terms: Terms::new(after, Cost::from(5)) };
    let answer = store.decide_all(&[Check::new(Operation::Check, vec![tier]).unwrap()])[0].answers[0];
    assert_eq!((answer.hold.released, answer.charged, answer.available), (1, 1, 5));
}
