//! Measures a denial from the denial cache, which takes no round trip.
//!
//! Not measured: expiry of the cache entry (tests cover it), many denied keys, and threads (`scripts/bench --only hot-denied`).

#[path = "../src/server.rs"]
#[expect(dead_code, reason = "only the main benchmark uses all of it")]
mod server;

use std::{hint::black_box, time::Duration};

use criterion::{Criterion, criterion_group, criterion_main};
use sluicegate::{Cost, Limit, Limiter, Options, RedisStore};

fn cached_denial(criterion: &mut Criterion) {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime starts");
    let (_server, limiter) = runtime.block_on(async {
        let server = server::Server::start().await.expect("a private Redis starts");
        let store = RedisStore::connect(server.url()).await.expect("it answers");
        // cached for as long as the bench runs, so that no round trip is measured
        let options = Options::default().denial_cache(Duration::from_secs(3600));
        (
            server,
            Limiter::builder().store(store).rules([]).options(options).build().expect("there are no rules"),
        )
    });
    let limit = Limit::token_bucket(1, Duration::from_secs(86_400)).expect("the limit is valid");
    let check = || async { limiter.check_key("user:hot", &limit, Cost::ONE).await };
    let (first, second) = runtime.block_on(async { (check().await, check().await) });
    assert!(first.expect("it is decided").is_allowed());
    assert!(!second.expect("it is decided").is_allowed());
    criterion.bench_function("denial/cached", |bencher| {
        bencher.to_async(&runtime).iter(|| async { black_box(check().await) });
    });
}

criterion_group! {
    name = benches;
    config = Criterion::default().warm_up_time(Duration::from_millis(500)).measurement_time(Duration::from_secs(2));
    targets = cached_denial
}
criterion_main!(benches);
