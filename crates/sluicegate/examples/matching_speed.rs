//! Measures the time to find the rules that apply to a request.
//!
//! `cargo run --release -p sluicegate --example matching_speed`
//!
//! One thread repeats the same 4096 requests. Measured: from labels to keys, limits and costs. Not measured: building the labels,
//! and the decision.
#![expect(clippy::print_stdout, reason = "a benchmark prints its results")]

use std::{
    error::Error,
    hint::black_box,
    time::{Duration, Instant},
};

use sluicegate::{
    labels::Labels,
    rules::{Costs, Override, Pattern, Rule, RuleSet},
};
use sluicegate_core::{Cost, Limit};

const REQUESTS: u32 = 4096;
const ROUNDS: u32 = 100;

fn main() -> Result<(), Box<dyn Error>> {
    report("10 rules, 3 of them apply", few_rules)?;
    report("5,000 rules, 3 of them apply", || many_rules(5_000))?;
    report("1 rule with 100,000 overrides, 1 applies", || many_overrides(100_000))?;
    Ok(())
}

fn few_rules() -> Result<RuleSet, Box<dyn Error>> {
    many_rules(10)
}

/// A global limit, a limit per address inside a network, and one rule per route of one domain.
fn many_rules(count: u32) -> Result<RuleSet, Box<dyn Error>> {
    let limit = Limit::token_bucket(100, Duration::from_secs(60))?;
    let mut rules = vec![
        Rule::new("global", limit).unless("plan", "internal"),
        Rule::new("address", limit).when("ip", Pattern::network("203.0.113.0/24")?).per(["ip"]),
    ];
    rules.extend((2..count).map(|n| {
        let rule = Rule::new(&format!("route-{n}"), limit).when("domain", "api").per(["tenant"]);
        let routes = count - 2;
        if n % 2 == 0 {
            rule.when("route", &*format!("/{}/", n % routes))
        } else {
            rule.when("route", &*format!("/{}/*", n % routes))
        }
    }));
    Ok(RuleSet::new(rules)?)
}

fn many_overrides(count: u32) -> Result<RuleSet, Box<dyn Error>> {
    let mut rule = Rule::new("tenant", Limit::token_bucket(100, Duration::from_secs(60))?).per(["tenant"]);
    rule.overrides =
        (0..count).map(|n| Override::when("tenant", &*format!("tenant-{n}")).amount(1000)).collect();
    Ok(RuleSet::new(vec![rule])?)
}

#[expect(clippy::disallowed_methods, reason = "a benchmark measures real time")]
fn report(what: &str, build: impl FnOnce() -> Result<RuleSet, Box<dyn Error>>) -> Result<(), Box<dyn Error>> {
    let started = Instant::now();
    let rules = build()?;
    let built = started.elapsed();

    let routes = u32::try_from(rules.len())?.saturating_sub(2).max(1);
    let requests = (0..REQUESTS)
        .map(|n| {
            Labels::new([
                ("domain", "api".to_owned()),
                ("route", format!("/{}/", n % routes)),
                ("ip", format!("203.0.113.{}", n % 256)),
                ("tenant", format!("tenant-{}", n * 24)),
                ("method", "POST".to_owned()),
            ])
        })
        .collect::<Result<Vec<_>, _>>()?;
    let costs = Costs::from(Cost::ONE);
    let mut applied = 0;
    let started = Instant::now();
    for _ in 0..ROUNDS {
        for labels in &requests {
            applied += black_box(rules.matching(labels, &costs)?).len();
        }
    }
    let matches = REQUESTS * ROUNDS;
    let each = started.elapsed() / matches;
    let mean = applied as f64 / f64::from(matches);
    println!("{what:<42} {:>5} ns per match, {mean:.1} applied (built in {built:.1?})", each.as_nanos());
    Ok(())
}
