//! Measures rule matching: its time depends on the number of rules that apply, not on the total number of rules.
//!
//! Not measured: overrides, patterns other than equality, and building the labels of a request.

use std::{hint::black_box, time::Duration};

use criterion::{Criterion, criterion_group, criterion_main};
use sluicegate::{Cost, Costs, Labels, Limit, Rule, rules::RuleSet};

fn matching(criterion: &mut Criterion) {
    for count in [1, 100, 10_000] {
        let rules = RuleSet::new((0..count).map(rule).collect()).expect("the rules are valid");
        let labels = Labels::new([("route", "/r0"), ("user", "user-42")]).expect("the labels are valid");
        let costs = Costs::from(Cost::ONE);
        let applied = rules.matching(&labels, &costs).expect("the rules can be matched").len();
        assert_eq!(applied, 1, "exactly one rule matches this route");
        criterion.bench_function(&format!("rules/one of {count} applies"), |bencher| {
            bencher.iter(|| rules.matching(black_box(&labels), &costs).map(|applied| applied.len()));
        });
    }
}

fn rule(number: usize) -> Rule {
    let limit = Limit::token_bucket(100, Duration::from_secs(1)).expect("the limit is valid");
    Rule::new(&format!("rule-{number}"), limit).when("route", format!("/r{number}").as_str()).per(["user"])
}

criterion_group! {
    name = benches;
    config = Criterion::default().warm_up_time(Duration::from_millis(500)).measurement_time(Duration::from_secs(2));
    targets = matching
}
criterion_main!(benches);
