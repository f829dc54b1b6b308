//! Measures the overhead of a single caller in addition to its round trip.
//!
//! Not measured: a network, concurrent callers, and the comparison with a hand-written limiter
//! (`scripts/bench --only idle`).

#[path = "../src/server.rs"]
#[expect(dead_code, reason = "only the main benchmark uses all of it")]
mod server;

use std::{hint::black_box, time::Duration};

use criterion::{Criterion, criterion_group, criterion_main};
use sluicegate::{Cost, Limit, Limiter, Options, RedisStore};

/// Long enough that no failure policy decides on a busy machine.
const DEADLINE: Duration = Duration::from_secs(5);

fn idle(criterion: &mut Criterion) {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime starts");
    let (server, limiter) = runtime.block_on(async {
        let server = server::Server::start().await.expect("a private Redis starts");
        let store = RedisStore::connect(server.url()).await.expect("it answers");
        let options = Options::default().deadline(DEADLINE);
        (
            server,
            Limiter::builder().store(store).rules([]).options(options).build().expect("there are no rules"),
        )
    });
    let limit = Limit::token_bucket(1_000_000_000, Duration::from_secs(100_000)).expect("the limit is valid");
    criterion.bench_function("round trip/one caller", |bencher| {
        bencher
            .to_async(&runtime)
            .iter(|| async { black_box(limiter.check_key("user:hot", &limit, Cost::ONE).await) });
    });
    let connection = runtime.block_on(server.connect()).expect("it answers");
    criterion.bench_function("round trip/PING, for comparison", |bencher| {
        bencher.to_async(&runtime).iter(|| {
            let mut connection = connection.clone();
            async move { black_box(redis::cmd("PING").query_async::<String>(&mut connection).await) }
        });
    });
}

criterion_group! {
    name = benches;
    config = Criterion::default().warm_up_time(Duration::from_millis(500)).measurement_time(Duration::from_secs(2));
    targets = idle
}
criterion_main!(benches);
