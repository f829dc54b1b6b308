//! The rules of a server without a configuration file, for demonstration.

use std::{fmt::Write, time::Duration};

use sluicegate::{Limit, LimitError, OnStoreFailure, Rule};

/// Logins per minute and address.
pub const LOGINS_PER_MINUTE: u64 = 5;

/// The body of a check that `login-per-ip` denies after [`LOGINS_PER_MINUTE`] of them.
pub const LOGIN: &str = r#"{"labels":{"route":"login","ip":"203.0.113.9"}}"#;

/// Returns the demo rules.
///
/// ```
/// # use sluicegate_server::demo;
/// let lines: Vec<_> = demo::rules().iter().map(demo::summary).collect();
/// assert_eq!(lines[0], "login-per-ip: 5 per 60s per ip when route=login (sliding-log)");
/// assert_eq!(lines[1], "api-per-user: 10 per 1s, burst 20, per user (token-bucket)");
/// ```
pub fn rules() -> Vec<Rule> {
    limits().expect("the demo's limits are in range").into()
}

fn limits() -> Result<[Rule; 2], LimitError> {
    let logins = Limit::sliding_log(LOGINS_PER_MINUTE, Duration::from_secs(60))?;
    let calls = Limit::token_bucket(10, Duration::from_secs(1))?.with_burst(20)?;
    Ok([
        Rule::new("login-per-ip", logins).when("route", "login").per(["ip"]),
        Rule::new("api-per-user", calls).per(["user"]),
    ]
    .map(|rule| rule.on_store_failure(OnStoreFailure::Local)))
}

/// Describes a demo rule in one line.
pub fn summary(rule: &Rule) -> String {
    let limit = &rule.limit;
    let mut line = format!("{}: {} per {:?}", rule.name, limit.amount(), limit.window());
    if limit.capacity() != limit.amount() {
        push(&mut line, format_args!(", burst {},", limit.capacity()));
    }
    push(&mut line, format_args!(" per {}", rule.per.join(" and ")));
    for (label, pattern) in rule.when.pairs() {
        push(&mut line, format_args!(" when {label}={pattern}"));
    }
    push(&mut line, format_args!(" ({})", limit.algorithm()));
    line
}

fn push(line: &mut String, words: std::fmt::Arguments<'_>) {
    line.write_fmt(words).expect("writing to a string cannot fail");
}
