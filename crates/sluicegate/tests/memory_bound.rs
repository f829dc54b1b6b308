//! The memory store's bound, measured from outside: the resident memory of the process. A separate binary, because other tests of
//! the same process would change the figure.
#![expect(clippy::unwrap_used, reason = "a test that cannot continue fails")]

use std::{fs, time::Duration};

use sluicegate::{
    Cost, Limit, ManualClock, MemoryStore, Timestamp,
    limiter::Operation,
    store::{Key, Terms},
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
