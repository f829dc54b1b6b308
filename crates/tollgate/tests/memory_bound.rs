//! The memory store's bound, measured from outside: what the operating system says this process holds.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::{fs, time::Duration};

use tollgate::{Cost, Key, Limit, MemoryStore, Operation, Terms};

const MIB: usize = 1 << 20;

/// The resident memory of this process. This file has a single test, so that nothing else moves it.
fn resident_bytes() -> usize {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() * 1024
}

#[test]
fn a_million_keys_stay_within_the_memory_that_was_set() {
    let max = 48 * MIB;
    let store = MemoryStore::new().with_max_memory(max).unwrap();
    let before = resident_bytes();
    for (limit, name) in [
        (Limit::token_bucket(5, Duration::from_secs(3600)).unwrap(), "bucket"),
        (Limit::sliding_log(5, Duration::from_secs(3600)).unwrap(), "log"),
    ] {
        let terms = Terms::new(limit, Cost::ONE);
        for user in 0..500_000 {
            let key = Key::without_rule(format!("{name}:some-user-{user}@example.org")).unwrap();
            store.decide_one(&key, &terms, Operation::Check, 1);
        }
    }
    let grown = resident_bytes().saturating_sub(before);
    assert!(store.memory_bytes() <= max);
    assert!(store.len() > 100_000, "{} counters", store.len());
    assert!(grown <= max + 4 * MIB, "{} MiB for {} counters", grown / MIB, store.len());
}
