//! The memory store's bound, measured from outside: the resident memory of the process. A separate binary, because other tests of
//! the same process would change the figure.
#![expect(clippy::unwrap_used, reason = "a test that cannot continue fails")]

use std::{fs, time::Duration};

use sluicegate::{
    Cost, Limit, ManualClock, MemoryStore, Timestamp,
    limiter::Operation,
    store::{Check, HoldId, HoldOperation, Key, Terms, Tier},
};

const MIB: usize = 1 << 20;

/// Returns the resident memory of this process.
fn resident_bytes() -> usize {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() * 1024
}

#[test]
fn a_million_keys_stay_within_the_configured_memory_under_eviction() {
    let max = 48 * MIB;
    let clock = ManualClock::new(Timestamp::from_micros(1_794_765_441_799_839));
    let store = MemoryStore::new().with_max_memory(max).unwrap().with_clock(clock.clone());
    let before = resident_bytes();
    let assert_within = |bound: usize, when: &str| {
        let grown = resident_bytes().saturating_sub(before);
        assert!(store.memory_bytes() <= max, "{when}");
        assert!(grown <= bound, "{when}: {} KiB for {} counters", grown / 1024, store.len());
    };
    let seconds = Duration::from_secs(10);
    for (limit, name) in [
        (Limit::token_bucket(5, seconds).unwrap(), "bucket"),
        (Limit::sliding_log(5, seconds).unwrap(), "log"),
    ] {
        let terms = Terms::new(limit, Cost::ONE);
        for user in 0..500_000 {
            let key = Key::without_rule(format!("{name}:some-user-{user}@example.org")).unwrap();
            store.decide_one(&key, &terms, Operation::Check, 1);
            if user % 50_000 == 0 {
                assert_within(max + 2 * MIB, name);
            }
        }
        assert!(store.len() > 80_000, "{} counters", store.len());
    }
    clock.advance(Duration::from_secs(3600));
    let long = Terms::new(Limit::sliding_log(200_000, Duration::from_secs(86_400)).unwrap(), Cost::ONE);
    let names: Vec<Key> = (0..40).map(|log| Key::without_rule(format!("long:{log}")).unwrap()).collect();
    for charge in 0..2_500_000 {
        clock.advance(Duration::from_micros(1));
        store.decide_one(&names[charge % names.len()], &long, Operation::Check, 1);
        if charge % 250_000 == 0 {
            // the allocator keeps some freed memory
            assert_within(max + max / 4, "logs replace the keys");
        }
    }
}

/// A hold of one unit that lasts a minute.
fn hold(store: &MemoryStore, counter: &str, id: u64, limit: Limit) {
    let tier = Tier { key: Key::without_rule(counter).unwrap(), terms: Terms::new(limit, Cost::ONE) };
    let check = Check::new(Operation::Check, vec![tier]).unwrap();
    let ttl = Duration::from_secs(60);
    let id = HoldId::new(format!("request-{id:08}")).unwrap();
    store.decide_all(&[check.with_hold(id, HoldOperation::Hold { ttl })]);
}

#[test]
fn holds_of_many_counters_and_of_few_stay_within_the_configured_memory() {
    let max = 48 * MIB;
    let before = resident_bytes();
    let limit = Limit::concurrency(1_000_000).unwrap();
    // few counters in turn, whose earlier holds are forgotten, and then many
    for (holds_of_one, holds, expected) in [(6_000, 150_000, 1), (1, 150_000, 20_000)] {
        let clock = ManualClock::new(Timestamp::from_micros(1_794_765_441_799_839));
        let store = MemoryStore::new().with_max_memory(max).unwrap().with_clock(clock.clone());
        for id in 0..holds {
            let counter = format!("some-user-{}@example.org", id / holds_of_one);
            hold(&store, &counter, id, limit);
            if holds_of_one > 1 && id % holds_of_one == holds_of_one - 1 {
                clock.advance(Duration::from_secs(121));
                hold(&store, &counter, holds + id, limit);
            }
            if id % 10_000 == 0 {
                let grown = resident_bytes().saturating_sub(before);
                assert!(store.memory_bytes() <= max);
                assert!(grown <= max + 2 * MIB, "{} KiB for {} counters", grown / 1024, store.len());
            }
        }
        assert!(store.len() >= expected, "{} counters", store.len());
    }
}
