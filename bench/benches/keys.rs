//! Measures the encoding of a key from arbitrary bytes: well under a microsecond.
//!
//! Not measured: the allocator under contention, and keys near the maximum length.

use std::{hint::black_box, time::Duration};

use criterion::{Criterion, criterion_group, criterion_main};
use sluicegate::store::{Key, encoded_rule};

fn make(criterion: &mut Criterion) {
    criterion.bench_function("keys/plain text", |bencher| {
        bencher.iter(|| Key::without_rule(black_box("user:0123456")));
    });
    criterion.bench_function("keys/bytes to escape", |bencher| {
        bencher.iter(|| Key::without_rule(black_box([0xff_u8, b'{', b'}', b':', b'/', 0, b'a', b' '])));
    });
    let rule = encoded_rule("per-user-and-route");
    criterion.bench_function("keys/of a rule, two labels", |bencher| {
        let values: [Option<&[u8]>; 2] = [Some(b"user-42"), Some(b"/orders")];
        bencher.iter(|| Key::of_rule(black_box(&rule), black_box(&values), None));
    });
}

criterion_group! {
    name = benches;
    config = Criterion::default().warm_up_time(Duration::from_millis(500)).measurement_time(Duration::from_secs(2));
    targets = make
}
criterion_main!(benches);
