//! The meaning of each field of rules and overrides, and what is rejected.

use std::{sync::Arc, time::Duration};

use sluicegate_core::{Algorithm, Cost, Limit, LimitError, Window};

use super::*;
use crate::{
    calendar::{Anchor, Calendar, CalendarUnit, Weekday, Zone},
    key::Key,
    labels::Labels,
};

const MINUTE: Duration = Duration::from_secs(60);

fn bucket(amount: u64) -> Limit {
    Limit::token_bucket(amount, MINUTE).unwrap()
}

fn set(rules: impl IntoIterator<Item = Rule>) -> RuleSet {
    RuleSet::new(rules.into_iter().collect()).unwrap()
}

fn labels(pairs: &[(&str, &str)]) -> Labels {
    Labels::new(pairs.iter().copied()).unwrap()
}

fn one() -> Costs {
    Costs::from(Cost::ONE)
}

fn names(rules: &RuleSet, pairs: &[(&str, &str)]) -> Vec<String> {
    rules
        .matching(&labels(pairs), &one())
        .unwrap()
        .iter()
        .map(|applied| applied.rule.name.to_string())
        .collect()
}

/// Returns the effect of the only matching rule, with a cost of one.
fn effect(rules: &RuleSet, pairs: &[(&str, &str)]) -> Effect {
    let labels = labels(pairs);
    let mut applied = rules.matching(&labels, &one()).unwrap();
    assert_eq!(applied.len(), 1, "{labels:?}");
    applied.remove(0).effect
}

fn key(rules: &RuleSet, pairs: &[(&str, &str)]) -> Key {
    match effect(rules, pairs) {
        Effect::Limit { key, .. } => key,
        denied => panic!("{denied:?}"),
    }
}

fn limit(rules: &RuleSet, pairs: &[(&str, &str)]) -> Limit {
    match effect(rules, pairs) {
        Effect::Limit { limit, .. } => limit,
        denied => panic!("{denied:?}"),
    }
}

fn rejection(rule: Rule) -> String {
    RuleSet::new(vec![rule]).unwrap_err().to_string()
}

#[test]
fn all_matching_rules_apply_in_their_order() {
    let rules = set([
        Rule::new("z-all", bucket(1)),
        Rule::new("login", bucket(1)).when("route", "login"),
        Rule::new("log-prefix", bucket(1)).when("route", "log*").when("ip", "*"),
        Rule::new("a-list", bucket(1))
            .when("route", Pattern::any_of(["login".into(), "logout".into()]).unwrap()),
        Rule::new("net", bucket(1)).when("ip", Pattern::network("10.0.0.0/8").unwrap()),
    ]);
    assert_eq!(names(&rules, &[]), ["z-all"]);
    assert_eq!(names(&rules, &[("route", "login")]), ["z-all", "login", "a-list"]);
    assert_eq!(
        names(&rules, &[("ip", "10.0.0.1"), ("route", "login")]),
        ["z-all", "login", "log-prefix", "a-list", "net"]
    );
    assert_eq!(names(&rules, &[("ip", "11.0.0.1"), ("route", "logs")]), ["z-all", "log-prefix"]);
    assert_eq!(rules.rules().map(|rule| &*rule.name).collect::<Vec<_>>()[..2], ["z-all", "login"]);
    assert_eq!((rules.len(), rules.is_empty()), (5, false));
    assert!(rules.get("net").is_some() && rules.get("nat").is_none());
}

#[test]
fn unless_excludes_when_any_of_its_pairs_matches() {
    let rules =
        set([Rule::new("r", bucket(1)).when("route", "*").unless("plan", "internal").unless("ip", "10.*")]);
    assert_eq!(names(&rules, &[("route", "a")]), ["r"]);
    assert_eq!(names(&rules, &[("route", "a"), ("plan", "free"), ("ip", "11.0.0.1")]), ["r"]);
    assert!(names(&rules, &[("route", "a"), ("plan", "internal")]).is_empty());
    assert!(names(&rules, &[("route", "a"), ("ip", "10.0.0.1")]).is_empty());
}

#[test]
fn exact_rules_apply_only_without_further_labels() {
    let rules = set([Rule::new("r", bucket(1)).when("route", "*").per(["ip"]).unless("plan", "x").exact()]);
    assert_eq!(names(&rules, &[("route", "a"), ("ip", "b")]), ["r"]);
    assert!(names(&rules, &[("route", "a"), ("ip", "b"), ("plan", "y")]).is_empty());
    let nothing = set([Rule::new("r", bucket(1)).exact()]);
    assert_eq!(names(&nothing, &[]), ["r"]);
    assert!(names(&nothing, &[("a", "")]).is_empty());
}

#[test]
fn per_counts_each_combination_separately_and_without_per_all_requests_together() {
    let rules = set([Rule::new("r", bucket(1)).per(["user", "route"])]);
    let a = key(&rules, &[("user", "1"), ("route", "a")]);
    assert_eq!((a.rule(), a.identity()), ("r", "1,a"));
    assert_eq!(a, key(&rules, &[("route", "a"), ("user", "1"), ("other", "x")]));
    assert_ne!(a, key(&rules, &[("user", "a"), ("route", "1")]));
    let all = set([Rule::new("r", bucket(1))]);
    assert_eq!(key(&all, &[("user", "1")]), key(&all, &[]));
}

#[test]
fn braces_and_commas_in_values_never_collide() {
    let rules = set([Rule::new("r", bucket(1)).per(["a", "b"]).absent(Absent::Shared)]);
    let values = ["", ",", "{", "}", "{x}", "x,y", "x", "y", "!", "*", "%2c", ":"];
    let mut keys = std::collections::HashSet::new();
    for a in values {
        for b in values {
            let key = key(&rules, &[("a", a), ("b", b)]);
            assert!(!key.identity().contains(['{', '}', ':']));
            keys.insert(key);
        }
        keys.insert(key(&rules, &[("a", a)]));
        keys.insert(key(&rules, &[("b", a)]));
    }
    assert_eq!(keys.len(), values.len() * values.len() + 2 * values.len());
}

#[test]
fn a_rule_skips_shares_or_denies_without_its_per_label() {
    let rule = || Rule::new("r", bucket(1)).per(["tenant", "ip"]);
    let without = &[("tenant", "acme")];
    let with = &[("tenant", "acme"), ("ip", "1")];
    assert!(names(&set([rule()]), without).is_empty());
    assert_eq!(names(&set([rule()]), with), ["r"]);

    let shared = set([rule().absent(Absent::Shared)]);
    assert_eq!(key(&shared, without).identity(), "acme,!");
    assert_ne!(key(&shared, without), key(&shared, &[("tenant", "acme"), ("ip", "")]));

    let deny = set([rule().absent(Absent::Deny)]);
    assert_eq!(effect(&deny, without), Effect::Deny { reason: DenialReason::Absent, shadow: false });
    assert_eq!(key(&deny, with).identity(), "acme,1");
    let shadow = set([rule().absent(Absent::Deny).shadow()]);
    assert_eq!(effect(&shadow, without), Effect::Deny { reason: DenialReason::Absent, shadow: true });
}

#[test]
fn flags_of_the_rule_reach_the_tier_and_overrides_change_them() {
    let rules = set([Rule::new("r", bucket(1))
        .shadow()
        .overdraft()
        .on_store_failure(OnStoreFailure::Closed)
        .with_override(Override::when("t", "x").on_store_failure(OnStoreFailure::Open))
        .with_override(Override { shadow: Some(false), ..Override::when("t", "x") })]);
    let flags = |pairs| match effect(&rules, pairs) {
        Effect::Limit { shadow, overdraft, on_store_failure, .. } => (shadow, overdraft, on_store_failure),
        denied => panic!("{denied:?}"),
    };
    assert_eq!(flags(&[]), (true, true, OnStoreFailure::Closed));
    assert_eq!(flags(&[("t", "x")]), (false, true, OnStoreFailure::Open));
    let plain = effect(&set([Rule::new("r", bucket(1))]), &[]);
    let Effect::Limit { shadow, overdraft, on_store_failure, cost, .. } = plain else { panic!("{plain:?}") };
    assert_eq!((shadow, overdraft, on_store_failure, cost), (false, false, OnStoreFailure::Open, Cost::ONE));
}

#[test]
fn costs_are_taken_in_the_rules_unit_times_its_factor() {
    let rules = set([
        Rule::new("requests", bucket(1)),
        Rule::new("tokens", bucket(1)).unit("tokens").cost(Cost::from(3)),
        Rule::new("free", bucket(1)).with_override(Override::when("t", "x").cost(Cost::ZERO)),
    ]);
    let costs = |asked: &Costs| -> Vec<u64> {
        let applied = rules.matching(&labels(&[("t", "x")]), asked).unwrap();
        applied
            .iter()
            .map(|applied| match &applied.effect {
                Effect::Limit { cost, .. } => cost.units(),
                denied => panic!("{denied:?}"),
            })
            .collect()
    };
    assert_eq!(costs(&Costs::from(Cost::from(5))), [5, 0, 0]);
    let both = Costs::new([("requests", Cost::ONE), ("tokens", Cost::from(850))]).unwrap();
    assert_eq!(costs(&both), [1, 2550, 0]);
    assert_eq!(costs(&Costs::new([("tokens", Cost::from(2))]).unwrap()), [0, 6, 0]);
}

#[test]
fn a_cost_that_overflows_is_the_callers_error_but_never_a_shadow_rules() {
    let rule = Rule::new("r", bucket(1)).cost(Cost::from(2));
    let half = Cost::new(Cost::MAX.units() / 2).unwrap();
    let ask = |rules: &RuleSet, cost: Cost| {
        rules.matching(&Labels::default(), &Costs::from(cost)).map(|mut applied| applied.remove(0).effect)
    };
    let rules = set([rule.clone()]);
    assert!(
        matches!(ask(&rules, half), Ok(Effect::Limit { cost, .. }) if cost.units() == Cost::MAX.units() - 1)
    );
    for cost in [Cost::new(half.units() + 1).unwrap(), Cost::MAX] {
        let error = ask(&rules, cost).unwrap_err();
        let expected = MatchError::CostTooLarge {
            rule: Arc::from("r"),
            unit: Unit::default(),
            cost,
            factor: Cost::from(2),
        };
        assert_eq!(error, expected);
        assert!(error.to_string().contains("\"r\"") && error.to_string().contains("9007199254740991"));
    }
    let shadow = set([rule.shadow().cost(Cost::MAX)]);
    assert!(matches!(ask(&shadow, Cost::MAX), Ok(Effect::Limit { cost: Cost::MAX, .. })));
}

#[test]
fn overrides_win_field_by_field_in_order() {
    let hour = Duration::from_secs(3600);
    let rules = set([Rule::new("r", bucket(10))
        .per(["tenant"])
        .with_override(Override::when("plan", "pro").amount(100).window(hour))
        .with_override(Override::when("tenant", "acme").amount(1000))
        .with_override(Override::when("tenant", "a*").and("plan", "pro").burst(7))]);
    let numbers = |pairs: &[(&str, &str)]| {
        let limit = limit(&rules, pairs);
        (limit.amount(), limit.window(), limit.capacity())
    };
    assert_eq!(numbers(&[("tenant", "b")]), (10, MINUTE, 10));
    assert_eq!(numbers(&[("tenant", "b"), ("plan", "pro")]), (100, hour, 100));
    assert_eq!(numbers(&[("tenant", "acme")]), (1000, MINUTE, 1000));
    assert_eq!(numbers(&[("tenant", "acme"), ("plan", "pro")]), (1000, hour, 7));
    let same = key(&rules, &[("tenant", "acme")]);
    assert_eq!(same, key(&rules, &[("tenant", "acme"), ("plan", "pro")]));
}

#[test]
fn a_burst_follows_an_overridden_amount_unless_the_rule_names_one() {
    let raised =
        |rule: Rule| limit(&set([rule.with_override(Override::when("t", "x").amount(50))]), &[("t", "x")]);
    assert_eq!(raised(Rule::new("r", bucket(10))).capacity(), 50);
    assert_eq!(raised(Rule::new("r", bucket(10).with_burst(3).unwrap())).capacity(), 3);
    assert_eq!(raised(Rule::new("r", bucket(10)).burst(10)).capacity(), 10);
    let rules = set([Rule::new("r", bucket(10)).burst(3)]);
    assert_eq!(limit(&rules, &[]).capacity(), 3);
}

#[test]
fn unlimited_exempts_blocked_denies_and_the_later_one_wins() {
    let off = |label: &str| Override { unlimited: Some(false), ..Override::when(label, "*") };
    let rules = set([Rule::new("r", bucket(1))
        .with_override(Override::when("vip", "*").unlimited())
        .with_override(Override::when("bad", "*").blocked())
        .with_override(Override::when("late-vip", "*").unlimited())
        .with_override(off("audit"))
        .with_override(Override::when("quiet", "*").shadow())]);
    let blocked = |shadow| Effect::Deny { reason: DenialReason::Blocked, shadow };
    assert!(names(&rules, &[("vip", "")]).is_empty());
    assert_eq!(effect(&rules, &[("bad", "")]), blocked(false));
    assert_eq!(effect(&rules, &[("bad", ""), ("quiet", "")]), blocked(true));
    assert_eq!(effect(&rules, &[("bad", ""), ("vip", "")]), blocked(false));
    assert!(names(&rules, &[("bad", ""), ("late-vip", "")]).is_empty());
    assert_eq!(effect(&rules, &[("bad", ""), ("late-vip", ""), ("audit", "")]), blocked(false));
    assert_eq!(names(&rules, &[("vip", ""), ("audit", "")]), ["r"]);
    assert_eq!(limit(&rules, &[("vip", ""), ("audit", "")]), bucket(1));
}

#[test]
fn an_exempt_request_is_not_denied_for_a_missing_label() {
    let rule = Rule::new("r", bucket(1)).per(["ip"]).absent(Absent::Deny);
    let rules = set([rule.with_override(Override::when("vip", "*").unlimited().cost(Cost::MAX))]);
    assert!(rules.matching(&labels(&[("vip", "")]), &Costs::from(Cost::MAX)).unwrap().is_empty());
}

#[test]
fn a_tag_moves_the_key_and_leaves_its_identity() {
    let rules = set([
        Rule::new("tenant", bucket(1)).per(["tenant"]),
        Rule::new("user", bucket(1)).per(["tenant", "user"]).tag(["tenant"]),
        Rule::new("untagged", bucket(1)).per(["tenant", "user"]),
    ]);
    let applied = rules.matching(&labels(&[("tenant", "acme"), ("user", "7")]), &one()).unwrap();
    let keys: Vec<_> = applied
        .iter()
        .map(|applied| match &applied.effect {
            Effect::Limit { key, .. } => key,
            denied => panic!("{denied:?}"),
        })
        .collect();
    assert_eq!(keys[0].tag(), keys[1].tag());
    assert_ne!(keys[1].tag(), keys[2].tag());
    assert_eq!(keys[1].identity(), keys[2].identity());
}

#[test]
fn staggered_windows_start_at_a_fixed_phase_of_each_key() {
    let fixed = Limit::fixed_window(10, MINUTE).unwrap();
    let double = Override::when("slow", "*").window(2 * MINUTE);
    let rules = set([Rule::new("r", fixed).per(["user"]).stagger().with_override(double)]);
    let phase = |pairs: &[(&str, &str)]| limit(&rules, pairs).phase_us();
    let phases: Vec<u64> = (0..1000).map(|user| phase(&[("user", &user.to_string())])).collect();
    for sixth in 0..6 {
        let inside = phases.iter().filter(|phase| **phase / 10_000_000 == sixth).count();
        assert!((100..240).contains(&inside), "{inside} of 1000 keys begin in 10 s number {sixth}");
    }
    // a fixed vector: every process of every version must compute the same phase crc32("1") = 0x83dcefb7.
    assert_eq!(phases[1], 0x83dc_efb7 * 60_000_000 / (1 << 32));
    assert_eq!(phase(&[("user", "1"), ("slow", "")]), 0x83dc_efb7 * 120_000_000 / (1 << 32));
    let plain = set([Rule::new("r", fixed.with_phase(Duration::from_secs(7)).unwrap())
        .with_override(Override::when("t", "x").amount(3))]);
    assert_eq!(limit(&plain, &[("t", "x")]).phase_us(), 7_000_000);
}

#[test]
fn any_combination_of_valid_numbers_is_a_valid_limit() {
    for algorithm in Algorithm::WINDOWED {
        let (low, high) = (Duration::from_millis(1), Duration::from_secs(3650 * 86_400));
        let mut rule = Rule::new("r", Limit::new(algorithm, 5, MINUTE).unwrap());
        for (label, amount) in [("least", 1), ("most", algorithm.max_amount())] {
            rule = rule.with_override(Override::when(label, "*").amount(amount));
        }
        for (label, window) in [("short", low), ("long", high)] {
            rule = rule.with_override(Override::when(label, "*").window(window));
        }
        if algorithm == Algorithm::TokenBucket {
            rule = rule.with_override(Override::when("small", "*").burst(1));
            rule = rule.with_override(Override::when("large", "*").burst(1_000_000_000));
        }
        let rules = set([rule]);
        let names = ["least", "most", "short", "long", "small", "large"];
        for chosen in 0_u32..64 {
            let pairs = names
                .iter()
                .enumerate()
                .filter(|(bit, _)| chosen >> bit & 1 == 1)
                .map(|(_, name)| (*name, ""));
            limit(&rules, &pairs.collect::<Vec<_>>());
        }
    }
}

#[test]
fn invalid_rules_are_rejected_with_the_rule_and_the_fix() {
    let log = Limit::sliding_log(10, MINUTE).unwrap();
    let rule = || Rule::new("r", log);
    let with = |other| rule().with_override(Override::when("t", "ok").amount(2)).with_override(other);
    let when = || Override::when("t", "x");
    let long = "v".repeat(1025);
    for (rule, parts) in [
        (Rule::new("", log), ["rule \"\": name", "printable ASCII"]),
        (Rule::new("é", log), ["rule \"é\": name", "1 to 128"]),
        (Rule::new("a\nb", log), ["name", "printable ASCII"]),
        (Rule::new(&"n".repeat(129), log), ["name", "1 to 128"]),
        (rule().when("", "x"), ["rule \"r\": when: ", "empty name"]),
        (rule().unless("u", &*long), ["unless: label \"u\"", "1025 bytes"]),
        (rule().per(["ip", "ip"]), ["per: label \"ip\"", "name it once"]),
        (rule().per(["l"; 17]), ["per: 17 labels", "at most 16"]),
        (rule().tag([""]), ["tag: ", "empty name"]),
        (rule().per(["user"]).tag(["tenant"]), ["tag: ", "\"tenant\" is not in per"]),
        (rule().unit("a b"), ["unit \"a b\"", "letters"]),
        (rule().burst(5), ["sliding-log has no burst", "remove it"]),
        (Rule::new("r", bucket(1)).burst(0), ["burst 0", "1 to 1000000000"]),
        (rule().stagger(), ["stagger", "fixed-window"]),
        (with(when().amount(0)), ["rule \"r\": override 2: amount 0", "1 to 200000"]),
        (with(when().amount(200_001)), ["override 2: amount 200001", "1 to 200000"]),
        (with(when().window(Duration::ZERO)), ["override 2: window 0ns", "1ms to 10 years"]),
        (with(when().burst(1)), ["override 2: sliding-log has no burst", "remove it"]),
        (with(Override::when("t", &*long)), ["override 2: when: label \"t\"", "1024"]),
        (with(when().unlimited().blocked()), ["override 2: unlimited and blocked", "one of them"]),
    ] {
        let by_itself = rule.check().unwrap_err().to_string();
        let error = rejection(rule);
        assert!(error.ends_with(&by_itself), "{by_itself}");
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
    }
    let mut crowded = rule();
    for _ in 0..=MAX_PAIRS {
        crowded = crowded.when("l", "*");
    }
    assert!(rejection(crowded).contains("65 pairs"));
    let problem = RuleSet::new(vec![Rule::new("a", log), rule().burst(5)]).unwrap_err();
    let burst = RuleError::Limit(LimitError::BurstNotSupported(Algorithm::SlidingLog));
    assert_eq!(problem, RulesError::Rule { name: "r".into(), position: 1, problem: burst });
}

#[test]
fn names_are_unique_and_the_bounds_hold() {
    let rule = |name: String| Rule::new(&name, bucket(1));
    let twice = RuleSet::new(vec![rule("a".into()), rule("b".into()), rule("a".into())]);
    assert_eq!(twice.unwrap_err(), RulesError::DuplicateName { name: "a".into(), first: 0, second: 2 });
    let many = |count: usize| RuleSet::new((0..count).map(|n| rule(n.to_string())).collect());
    assert_eq!(many(MAX_RULES).unwrap().len(), MAX_RULES);
    assert_eq!(many(MAX_RULES + 1).unwrap_err(), RulesError::TooManyRules(MAX_RULES + 1));
    let mut crowded = rule("a".into());
    crowded.overrides = vec![Override::default(); MAX_OVERRIDES];
    let last = rule("b".into()).with_override(Override::default());
    let error = RuleSet::new(vec![crowded, last]).unwrap_err();
    assert_eq!(error, RulesError::TooManyOverrides(MAX_OVERRIDES + 1));
}

fn calendar(unit: CalendarUnit, zone: &str, anchor: Option<Anchor>) -> &'static Calendar {
    Zone::named(zone).unwrap().calendar(unit, anchor).unwrap()
}

#[test]
fn overrides_change_unit_zone_and_anchor_of_a_calendar_window_field_by_field() {
    use CalendarUnit::{Day, Month, Week};
    let (berlin, day_15) = ("Europe/Berlin", Some(Anchor::DayOfMonth(15)));
    let quota = Limit::fixed_window(10, calendar(Month, berlin, day_15)).unwrap();
    let tokyo = Zone::named("Asia/Tokyo").unwrap();
    let rules = set([Rule::new("r", quota)
        .with_override(Override::when("big", "*").amount(100))
        .with_override(Override::when("japan", "*").zone(tokyo))
        .with_override(Override::when("late", "*").anchor(Anchor::DayOfMonth(31)))
        .with_override(Override::when("weekly", "*").calendar(Week))
        .with_override(Override::when("daily", "*").calendar(Day))
        .with_override(Override::when("hourly", "*").window(60 * MINUTE))
        .with_override(Override::when("monthly", "*").calendar(Month))]);
    let window = |names: &[&str]| {
        let pairs: Vec<_> = names.iter().map(|name| (*name, "")).collect();
        limit(&rules, &pairs).window_setting()
    };
    let on = |unit, zone, anchor| Window::Calendar(calendar(unit, zone, anchor));
    assert_eq!((window(&["big"]), limit(&rules, &[("big", "")]).amount()), (on(Month, berlin, day_15), 100));
    assert_eq!(window(&["japan"]), on(Month, "Asia/Tokyo", day_15));
    assert_eq!(window(&["japan", "late"]), on(Month, "Asia/Tokyo", Some(Anchor::DayOfMonth(31))));
    assert_eq!(window(&["weekly"]), on(Week, berlin, None), "the anchor of a month does not apply");
    assert_eq!(window(&["late", "daily", "japan"]), on(Day, "Asia/Tokyo", None));
    assert_eq!(window(&["daily", "hourly"]), Window::Length(60 * MINUTE));
    assert_eq!(
        window(&["hourly", "monthly", "japan"]),
        on(Month, "Asia/Tokyo", day_15),
        "the later one wins"
    );
}

#[test]
fn an_override_can_set_a_calendar_window_of_a_rule_without_one() {
    let rule = |limit| {
        let monthly = Override::when("quota", "*").calendar(CalendarUnit::Month);
        Rule::new("r", limit).per(["user"]).with_override(monthly)
    };
    let rules = set([rule(Limit::fixed_window(10, MINUTE).unwrap()).stagger()]);
    let changed = limit(&rules, &[("user", "7"), ("quota", "")]);
    assert_eq!((changed.calendar().unwrap().zone(), changed.phase_us()), ("UTC", 0));
    let error = RuleSet::new(vec![rule(bucket(10))]).unwrap_err().to_string();
    assert!(error.contains("token-bucket has no calendar windows: use fixed-window"), "{error}");
}

#[test]
fn calendar_settings_without_a_calendar_window_are_rejected() {
    let month = Limit::fixed_window(10, calendar(CalendarUnit::Month, "UTC", None)).unwrap();
    let fixed = Limit::fixed_window(10, MINUTE).unwrap();
    let (tokyo, friday) = (Zone::named("Asia/Tokyo").unwrap(), Anchor::Weekday(Weekday::Friday));
    let other = || Override::when("t", "x");
    let table = [
        (
            fixed,
            other().zone(tokyo),
            "zone needs a calendar window: set window to \"1 month\", for example, or remove zone",
        ),
        (fixed, other().anchor(friday), "anchor needs a calendar window"),
        (
            month,
            other().anchor(friday),
            "anchor \"friday\" does not fit \"1 month\": use a day of the month, 1 to 31",
        ),
        (fixed, other().calendar(CalendarUnit::Day).anchor(friday), "\"1 day\" has no anchor"),
        (month, other().calendar(CalendarUnit::Day).window(MINUTE), "contradict each other"),
    ];
    for (limit, other, part) in table {
        let error = RuleSet::new(vec![Rule::new("r", limit).with_override(other)]).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
    let staggered = RuleSet::new(vec![Rule::new("r", month).stagger()]).unwrap_err().to_string();
    assert!(
        staggered.contains("a calendar window has no stagger: remove it, or use a window such as \"1d\""),
        "{staggered}"
    );
}

#[test]
fn a_hold_of_other_units_is_one_request_in_flight() {
    let in_flight = Limit::concurrency(3).unwrap();
    let rules = set([Rule::new("in-flight", in_flight), Rule::new("streams", in_flight).unit("streams")]);
    let costs_of = |costs: &[(&str, u64)]| -> Vec<u64> {
        let costs = costs.iter().map(|(unit, cost)| (*unit, Cost::new(*cost).unwrap()));
        let applied = rules.matching(&Labels::default(), &Costs::new(costs).unwrap()).unwrap();
        let cost = |applied: &Applied<'_>| match &applied.effect {
            Effect::Limit { cost, .. } => cost.units(),
            denied => panic!("{denied:?}"),
        };
        applied.iter().map(cost).collect()
    };
    assert_eq!(costs_of(&[("tokens", 500)]), [1, 0]);
    assert_eq!(costs_of(&[("tokens", 500), ("requests", 2)]), [2, 0]);
    assert_eq!(costs_of(&[("tokens", 500), ("requests", 0), ("streams", 1)]), [0, 1]);
}
