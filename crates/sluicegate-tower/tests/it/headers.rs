//! The headers of each dialect, byte for byte.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::time::Duration;

use http::HeaderMap;
use sfv::{BareItem, Dictionary, List, ListEntry, Parser};
use sluicegate::{
    Algorithm, Cost, Costs, Decision, Labels, Limit, Limiter, ManualClock, MemoryStore, Override, Rule,
    Timestamp,
    calendar::{CalendarUnit, Zone},
    rules::Absent,
};
use sluicegate_tower::headers::{self, Dialect};

const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);
/// A quarter of a second after a full minute.
const START_US: u64 = 1_794_765_420_250_000;

fn limiter(rules: impl IntoIterator<Item = Rule>) -> (Limiter, ManualClock) {
    let clock = ManualClock::new(Timestamp::from_micros(START_US));
    (Limiter::new(MemoryStore::new().with_clock(clock.clone()), rules).unwrap(), clock)
}

/// Checks requests with these costs and returns the last decision.
async fn after(rules: impl IntoIterator<Item = Rule>, costs: &[u32]) -> Decision {
    let (limiter, _clock) = limiter(rules);
    let (last, before) = costs.split_last().unwrap();
    for cost in before {
        limiter.check(&Labels::default(), *cost).await.unwrap();
    }
    limiter.check(&Labels::default(), *last).await.unwrap()
}

fn lines(decision: &Decision, dialect: Dialect) -> Vec<String> {
    let fields = headers::of(decision, dialect);
    fields.iter().map(|(name, value)| format!("{name}: {}", value.to_str().unwrap())).collect()
}

fn log(amount: u64, window: Duration) -> Limit {
    Limit::sliding_log(amount, window).unwrap()
}

#[tokio::test]
async fn an_allowed_request_in_every_dialect() {
    let rules = [Rule::new("login", log(10, MINUTE)), Rule::new("daily", log(1000, 1440 * MINUTE))];
    let decision = after(rules, &[1, 1]).await;
    let table: [(Dialect, &[&str]); 6] = [
        (
            Dialect::Draft11,
            &[
                r#"ratelimit-policy: "login";q=10;w=60, "daily";q=1000;w=86400"#,
                r#"ratelimit: "login";r=8;t=60, "daily";r=998;t=86400"#,
            ],
        ),
        (
            Dialect::Draft07,
            &["ratelimit-policy: 10;w=60, 1000;w=86400", "ratelimit: limit=10, remaining=8, reset=60"],
        ),
        (
            Dialect::Draft06,
            &[
                "ratelimit-policy: 10;w=60, 1000;w=86400",
                "ratelimit-limit: 10",
                "ratelimit-remaining: 8",
                "ratelimit-reset: 60",
            ],
        ),
        (
            Dialect::XRateLimit,
            &["x-ratelimit-limit: 10", "x-ratelimit-remaining: 8", "x-ratelimit-reset: 60"],
        ),
        (
            Dialect::GitHub,
            &[
                "x-ratelimit-limit: 10",
                "x-ratelimit-remaining: 8",
                "x-ratelimit-used: 2",
                "x-ratelimit-reset: 1794765481",
                "x-ratelimit-resource: login",
            ],
        ),
        (Dialect::None, &[]),
    ];
    for (dialect, fields) in table {
        assert_eq!(lines(&decision, dialect), fields, "{dialect}");
    }
}

#[tokio::test]
async fn a_denied_request_in_every_dialect() {
    let rules = [Rule::new("login", log(10, MINUTE)), Rule::new("daily", log(1000, 1440 * MINUTE))];
    let (limiter, clock) = limiter(rules);
    limiter.check(&Labels::default(), 10).await.unwrap();
    clock.advance(Duration::from_micros(18_300_001));
    let decision = limiter.check(&Labels::default(), 1).await.unwrap();
    assert!(!decision.is_allowed());
    let table: [(Dialect, &[&str]); 6] = [
        (
            Dialect::Draft11,
            &[
                r#"ratelimit-policy: "login";q=10;w=60, "daily";q=1000;w=86400"#,
                r#"ratelimit: "login";r=0;t=42"#,
                "retry-after: 42",
            ],
        ),
        (
            Dialect::Draft07,
            &[
                "ratelimit-policy: 10;w=60, 1000;w=86400",
                "ratelimit: limit=10, remaining=0, reset=42",
                "retry-after: 42",
            ],
        ),
        (
            Dialect::Draft06,
            &[
                "ratelimit-policy: 10;w=60, 1000;w=86400",
                "ratelimit-limit: 10",
                "ratelimit-remaining: 0",
                "ratelimit-reset: 42",
                "retry-after: 42",
            ],
        ),
        (
            Dialect::XRateLimit,
            &[
                "x-ratelimit-limit: 10",
                "x-ratelimit-remaining: 0",
                "x-ratelimit-reset: 42",
                "retry-after: 42",
            ],
        ),
        (
            Dialect::GitHub,
            &[
                "x-ratelimit-limit: 10",
                "x-ratelimit-remaining: 0",
                "x-ratelimit-used: 10",
                "x-ratelimit-reset: 1794765481",
                "x-ratelimit-resource: login",
                "retry-after: 42",
            ],
        ),
        (Dialect::None, &["retry-after: 42"]),
    ];
    for (dialect, fields) in table {
        assert_eq!(lines(&decision, dialect), fields, "{dialect}");
    }
}

#[tokio::test]
async fn the_effective_window_depends_on_the_algorithm() {
    let table = [
        // until the clock-aligned window ends
        (Limit::fixed_window(10, MINUTE).unwrap(), 4, r#""r";r=6;t=60"#),
        // always a whole window
        (log(10, MINUTE), 4, r#""r";r=6;t=60"#),
        (Limit::sliding_counter(10, MINUTE).unwrap(), 4, r#""r";r=6;t=60"#),
        // until the bucket is full again, not until the next unit
        (Limit::token_bucket(10, MINUTE).unwrap(), 4, r#""r";r=6;t=24"#),
        (Limit::token_bucket(1_000, SECOND).unwrap(), 1, r#""r";r=999;t=1"#),
        // nothing used: the bucket is full, and no window has started
        (Limit::token_bucket(10, MINUTE).unwrap(), 0, r#""r";r=10"#),
        (Limit::fixed_window(10, MINUTE).unwrap(), 0, r#""r";r=10"#),
        (log(10, MINUTE), 0, r#""r";r=10;t=60"#),
    ];
    for (limit, cost, state) in table {
        let decision = after([Rule::new("r", limit)], &[cost]).await;
        assert_eq!(lines(&decision, Dialect::Draft11)[1], format!("ratelimit: {state}"), "{limit:?}");
    }
}

#[tokio::test]
async fn a_policy_has_the_amount_and_the_window_in_seconds() {
    let bucket = Limit::token_bucket(100, MINUTE).unwrap().with_burst(10).unwrap();
    let table = [
        // the amount, not the burst
        (Rule::new("b", bucket), r#""b";q=100;w=60"#),
        // windows under a second cannot be expressed
        (Rule::new("fast", log(5, Duration::from_millis(999))), r#""fast";q=5"#),
        // fractions are rounded up
        (Rule::new("odd", log(5, Duration::from_millis(1001))), r#""odd";q=5;w=2"#),
        (Rule::new("u", log(5, SECOND)).unit("content-bytes"), r#""u";q=5;qu="content-bytes";w=1"#),
        (Rule::new(r#"a "b" \c, d;e=1"#, log(5, SECOND)), r#""a \"b\" \\c, d;e=1";q=5;w=1"#),
        (
            Rule::new("max", Limit::fixed_window(1_000_000_000, 3650 * 1440 * MINUTE).unwrap()),
            r#""max";q=1000000000;w=315360000"#,
        ),
    ];
    for (rule, policy) in table {
        let decision = after([rule], &[0]).await;
        assert_eq!(lines(&decision, Dialect::Draft11)[0], format!("ratelimit-policy: {policy}"));
    }
}

#[tokio::test]
async fn drafts_6_and_7_list_each_quota_once_and_omit_short_windows() {
    let rules = [
        Rule::new("a", log(20, MINUTE)),
        Rule::new("b", log(10, 2 * MINUTE)),
        Rule::new("c", log(10, MINUTE)),
        Rule::new("fast", log(30, Duration::from_millis(10))),
    ];
    let decision = after(rules, &[1]).await;
    for dialect in [Dialect::Draft06, Dialect::Draft07] {
        assert_eq!(lines(&decision, dialect)[0], "ratelimit-policy: 10;w=120, 20;w=60", "{dialect}");
    }
    let decision = after([Rule::new("fast", log(30, Duration::from_millis(10)))], &[1]).await;
    assert_eq!(lines(&decision, Dialect::Draft07), ["ratelimit: limit=30, remaining=29, reset=1"]);
}

#[tokio::test]
async fn a_denial_lists_the_denying_rules_and_never_a_wait_of_zero() {
    let rules = [
        Rule::new("short", log(1, Duration::from_millis(5))),
        Rule::new("long", log(1, 2 * MINUTE)),
        Rule::new("wide", log(100, 1440 * MINUTE)),
    ];
    let decision = after(rules.clone(), &[1, 1]).await;
    assert_eq!(
        lines(&decision, Dialect::Draft11),
        [
            r#"ratelimit-policy: "short";q=1, "long";q=1;w=120, "wide";q=100;w=86400"#,
            r#"ratelimit: "short";r=0;t=1, "long";r=0;t=120"#,
            "retry-after: 120"
        ]
    );
    let [short, ..] = rules;
    let decision = after([short], &[1, 1]).await;
    assert_eq!(lines(&decision, Dialect::None), ["retry-after: 1"]);
}

#[tokio::test]
async fn a_denial_without_a_possible_retry_has_no_time() {
    let decision = after([Rule::new("r", log(10, MINUTE))], &[4, 11]).await;
    assert_eq!(
        lines(&decision, Dialect::Draft11),
        [r#"ratelimit-policy: "r";q=10;w=60"#, r#"ratelimit: "r";r=6;t=60"#]
    );
    let blocked = Rule::new("r", log(10, MINUTE)).absent(Absent::Deny).per(["user"]);
    let decision = after([blocked], &[1]).await;
    assert_eq!(lines(&decision, Dialect::Draft11), [r#"ratelimit-policy: "r";q=0"#, r#"ratelimit: "r";r=0"#]);
    assert_eq!(
        lines(&decision, Dialect::GitHub),
        [
            "x-ratelimit-limit: 0",
            "x-ratelimit-remaining: 0",
            "x-ratelimit-used: 0",
            "x-ratelimit-resource: r"
        ],
        "without the store's time there is no reset"
    );
}

#[tokio::test]
async fn shadow_rules_and_unmatched_requests_have_no_headers() {
    let shadow = [Rule::new("shadow", log(1, MINUTE)).shadow(), Rule::new("real", log(9, MINUTE))];
    let decision = after(shadow.clone(), &[1, 1]).await;
    assert_eq!(
        lines(&decision, Dialect::Draft11),
        [r#"ratelimit-policy: "real";q=9;w=60"#, r#"ratelimit: "real";r=7;t=60"#]
    );
    let [only_shadow, _] = shadow;
    let exempt = Rule::new("r", log(1, MINUTE)).with_override(Override::default().unlimited());
    for rules in [vec![], vec![only_shadow], vec![exempt]] {
        let decision = after(rules, &[1, 1]).await;
        for dialect in Dialect::ALL {
            assert_eq!(lines(&decision, dialect), [""; 0], "{dialect}");
        }
    }
}

#[tokio::test]
async fn a_limit_without_a_rule_is_the_default() {
    let (limiter, _clock) = limiter([]);
    let decision = limiter.check_key("user:42", &log(3, MINUTE), Cost::ONE).await.unwrap();
    assert_eq!(
        lines(&decision, Dialect::Draft11),
        [r#"ratelimit-policy: "default";q=3;w=60"#, r#"ratelimit: "default";r=2;t=60"#]
    );
}

#[tokio::test]
async fn limits_of_inner_and_outer_layers_are_combined() {
    let mut fields = HeaderMap::new();
    for (rule, amount) in [("inner", 5), ("outer", 7)] {
        let decision = after([Rule::new(rule, log(amount, MINUTE))], &[1]).await;
        headers::add(&mut fields, &decision, Dialect::Draft11);
        headers::add(&mut fields, &decision, Dialect::XRateLimit);
    }
    let all = |name: &str| fields.get_all(name).iter().cloned().collect::<Vec<_>>();
    assert_eq!(all("ratelimit"), [r#""inner";r=4;t=60"#, r#""outer";r=6;t=60"#]);
    assert_eq!(all("ratelimit-policy"), [r#""inner";q=5;w=60"#, r#""outer";q=7;w=60"#]);
    assert_eq!(all("x-ratelimit-limit"), ["5"]);
}

#[test]
fn dialects_are_parsed_by_name() {
    for dialect in Dialect::ALL {
        assert_eq!(dialect.name().parse(), Ok(dialect));
    }
    assert_eq!(Dialect::default().name(), "draft-11");
    let error = "draft-12".parse::<Dialect>().unwrap_err();
    assert!(error.to_string().starts_with("unknown header dialect \"draft-12\": use draft-11,"), "{error}");
}

/// Parses the headers of many limits and states with an independent parser.
#[tokio::test]
async fn headers_are_valid_structured_fields() {
    let windows = [Duration::from_millis(1), Duration::from_millis(1500), MINUTE, 3650 * 1440 * MINUTE];
    for algorithm in Algorithm::WINDOWED {
        for (amount, window) in [1, 7, 200_000].into_iter().flat_map(|n| windows.map(|window| (n, window))) {
            let name = format!(r#"{algorithm} "\{amount}~"#);
            let limit = Limit::new(algorithm, amount, window).unwrap();
            let (limiter, clock) =
                limiter([Rule::new(&name, limit).unit("tokens"), Rule::new("other", limit)]);
            for step in 0..12 {
                let cost = Cost::from(1 + step % 3);
                let costs = Costs::new([("tokens", cost), ("requests", Cost::ONE)]).unwrap();
                let decision = limiter.check(&Labels::default(), costs).await.unwrap();
                parses(&decision, &name);
                clock.advance(Duration::from_micros(317 + u64::from(step) * 700_000));
            }
        }
    }
}

fn parses(decision: &Decision, name: &str) {
    let field = |dialect, name: &str| {
        let fields = headers::of(decision, dialect);
        let found = fields.iter().find(|(field, _)| field == name);
        found.map(|(_, value)| value.to_str().unwrap().to_owned())
    };
    let retry_after = field(Dialect::Draft11, "retry-after").map(|text| text.parse::<i64>().unwrap());
    let policies = members(&field(Dialect::Draft11, "ratelimit-policy").unwrap());
    assert_eq!(policies[0].0, name);
    for (_, parameters) in &policies {
        assert!(parameters["q"] >= 1 && parameters.get("w").is_none_or(|w| *w >= 1));
    }
    for (name, parameters) in members(&field(Dialect::Draft11, "ratelimit").unwrap()) {
        assert!(policies.iter().any(|(policy, _)| *policy == name), "the two fields join by name");
        assert!(parameters["r"] >= 0);
        let t = parameters.get("t").copied();
        assert!(
            t.is_none_or(|t| t >= 1 && retry_after.is_none_or(|wait| wait >= t)),
            "{t:?} {retry_after:?}"
        );
    }
    assert_eq!(retry_after.is_some(), decision.retry_after().is_some());
    let state: Dictionary = Parser::new(&field(Dialect::Draft07, "ratelimit").unwrap()).parse().unwrap();
    assert_eq!(state.keys().map(|key| key.as_str()).collect::<Vec<_>>(), ["limit", "remaining", "reset"]);
    if let Some(policy) = field(Dialect::Draft06, "ratelimit-policy") {
        let policy: List = Parser::new(&policy).parse().unwrap();
        assert!(
            policy
                .iter()
                .all(|member| matches!(member, ListEntry::Item(item) if item.params.contains_key("w")))
        );
    }
}

/// The members of a list: names and integer parameters.
fn members(field: &str) -> Vec<(String, std::collections::HashMap<String, i64>)> {
    let list: List = Parser::new(field).parse().unwrap_or_else(|error| panic!("{field}: {error}"));
    let members = list.into_iter().map(|member| {
        let ListEntry::Item(item) = member else { panic!("{field}: an inner list") };
        let BareItem::String(name) = item.bare_item else { panic!("{field}: no string") };
        let integers = item.params.into_iter().filter_map(|(key, value)| match value {
            BareItem::Integer(number) => Some((key.as_str().to_owned(), number.into())),
            _ => None,
        });
        (name.as_str().to_owned(), integers.collect())
    });
    members.collect()
}

/// The clock shows 2026-11-15 17:57:00.25 UTC.
#[tokio::test]
async fn a_calendar_window_has_the_length_of_its_current_period() {
    let berlin = Zone::named("Europe/Berlin").unwrap();
    let per = |unit| Limit::fixed_window(10, berlin.calendar(unit, None).unwrap()).unwrap();
    let rules = || [Rule::new("month", per(CalendarUnit::Month)), Rule::new("day", per(CalendarUnit::Day))];
    let decision = after(rules(), &[1]).await;
    assert_eq!(
        lines(&decision, Dialect::Draft11),
        [
            r#"ratelimit-policy: "month";q=10;w=2592000, "day";q=10;w=86400"#,
            r#"ratelimit: "month";r=9;t=1314180, "day";r=9;t=18180"#,
        ]
    );
    // the day on which clocks are set back, in a month of 31 days and one hour
    let (limiter, clock) = limiter(rules());
    clock.set(Timestamp::from_micros(1_792_928_000_000_000));
    let decision = limiter.check(&Labels::default(), 1).await.unwrap();
    assert_eq!(lines(&decision, Dialect::Draft07)[0], "ratelimit-policy: 10;w=2682000");
    assert!(lines(&decision, Dialect::Draft11)[0].contains(r#""day";q=10;w=90000"#), "{decision:?}");
}
