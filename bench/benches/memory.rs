//! Measures a decision of the memory store on a cached key, which takes about as long as reading the clock.
//!
//! Not measured: threads, a million keys and memory (`scripts/bench --only memory` compares these with other limiters),
//! and the limiter that uses the store.

use std::{hint::black_box, time::Duration};

use criterion::{Criterion, criterion_group, criterion_main};
use sluicegate::{
    Cost, Limit, MemoryStore,
    limiter::Operation,
    store::{Key, Terms},
};

/// Never exhausted: one unit is refilled every 100 us.
const AMOUNT: u64 = 1_000_000_000;
const WINDOW: Duration = Duration::from_secs(100_000);

fn decide(criterion: &mut Criterion) {
    let terms = Terms::new(Limit::token_bucket(AMOUNT, WINDOW).expect("the limit is valid"), Cost::ONE);
    for count in [1, 1_000] {
        let store = MemoryStore::new();
        let keys: Vec<_> = (0..count).map(|number| key(&format!("user:{number}"))).collect();
        let mut random = fastrand::Rng::with_seed(1);
        criterion.bench_function(&format!("memory/decide, {count} warm"), |bencher| {
            bencher.iter(|| {
                let key = &keys[random.usize(..keys.len())];
                black_box(store.decide_one(key, &terms, Operation::Check, 1))
            });
        });
    }
}

fn key(text: &str) -> Key {
    Key::without_rule(text).expect("the key is short and not empty")
}

criterion_group! {
    name = benches;
    config = Criterion::default().warm_up_time(Duration::from_millis(500)).measurement_time(Duration::from_secs(2));
    targets = decide
}
criterion_main!(benches);
