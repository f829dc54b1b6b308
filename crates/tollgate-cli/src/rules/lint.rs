//! Rules that work and are probably not meant: they never apply, never refuse, or keep more than they need to.
//!
//! Nothing here is certain to be a mistake. What is one, the configuration's reader has refused before.

use std::{
    collections::{HashMap, HashSet},
    fmt,
};

use serde::Serialize;
use tollgate::{Absent, Algorithm, Override, Pattern, Rule, rules::Condition};
use tollgate_server::{
    config::{Config, RuleView},
    labels::IP,
};

/// From how many entries a sliding log is worth a thought: each is kept, for each key.
const LARGE_LOG: u64 = 100_000;

/// The most overrides of one rule that are named.
const MAX_OVERRIDES_SHOWN: usize = 10;

/// One thing that is probably not meant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Finding {
    /// The rule it is about, if it is about one.
    rule: Option<String>,
    /// Where that begins in the file.
    pub(super) line: Option<usize>,
    message: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.rule {
            Some(rule) => write!(f, "rule {rule:?}: {}", self.message),
            None => f.write_str(&self.message),
        }
    }
}

impl Finding {
    /// One about the rule in this place.
    fn about(config: &Config, at: usize, message: String) -> Self {
        let rule = Some(config.rules[at].name.to_string());
        Self { rule, line: config.rule_lines.get(at).copied(), message }
    }
}

/// Everything that is to be said of a configuration that works.
pub(super) fn findings(config: &Config) -> Vec<Finding> {
    let general = |message: String| Finding { rule: None, line: None, message };
    let mut found: Vec<Finding> = config.warnings.iter().cloned().map(general).collect();
    if config.rules.is_empty() {
        found.push(general(
            "there are no rules, so that every request passes: add one as [[rule]]".to_owned(),
        ));
    }
    for (at, rule) in config.rules.iter().enumerate() {
        let about = |message| Finding::about(config, at, message);
        let own = [never_applies(rule), idle_exception(rule), fixed_per(rule), large_log(rule)];
        found.extend(own.into_iter().flatten().map(about));
        found.extend(idle_overrides(rule).into_iter().map(about));
    }
    found.extend(alike(&config.rules).into_iter().map(|(at, message)| Finding::about(config, at, message)));
    found.extend(unused_labels(config).map(general));
    found
}

/// Everything that `when` asks for, `unless` excepts.
fn never_applies(rule: &Rule) -> Option<String> {
    rule.unless.pairs().find_map(|(label, excepted)| {
        let asked = wanted(&rule.when, label).or_else(|| {
            let is_needed = rule.absent == Absent::Skip && counts_by(rule, label);
            is_needed.then_some(&Pattern::Present)
        })?;
        covers(excepted, asked).then(|| {
            format!("it never applies: its unless excepts every {label} that it is for; correct one of them")
        })
    })
}

/// A request with this label is not for the rule anyway.
fn idle_exception(rule: &Rule) -> Option<String> {
    let (label, _) = rule
        .unless
        .pairs()
        .find(|(label, _)| rule.exact && wanted(&rule.when, label).is_none() && !counts_by(rule, label))?;
    Some(format!(
        "its unless names {label}, and as it is exact no request with a {label} is for it: leave that out, or exact"
    ))
}

/// Counting apart by a label that always has the same value.
fn fixed_per(rule: &Rule) -> Option<String> {
    let (label, _) = rule
        .when
        .pairs()
        .find(|(label, pattern)| matches!(pattern, Pattern::Exact(_)) && counts_by(rule, label))?;
    Some(format!(
        "its when fixes {label} to one value, so that counting per {label} tells nobody apart: leave it out of per"
    ))
}

fn large_log(rule: &Rule) -> Option<String> {
    let amounts = rule.overrides.iter().filter_map(|other| other.amount);
    let largest = amounts.chain([rule.limit.amount()]).max().unwrap_or_default();
    (rule.limit.algorithm() == Algorithm::SlidingLog && largest > LARGE_LOG).then(|| {
        format!(
            "its sliding log keeps up to {largest} entries for each key: sliding-counter needs two numbers, and is nearly as exact"
        )
    })
}

/// Overrides that change nothing, or are for requests that the rule is not for.
fn idle_overrides(rule: &Rule) -> Vec<String> {
    let numbered = rule.overrides.iter().enumerate();
    let idle = numbered.filter_map(|(at, other)| {
        let number = at + 1;
        if says_nothing(other) {
            return Some(format!(
                "override {number} changes nothing: add for example amount = 100, or leave it out"
            ));
        }
        let label = other.when.pairs().find_map(|(label, pattern)| match wanted(&rule.when, label) {
            Some(Pattern::Exact(value)) if !pattern.matches(value) => Some(label),
            _ => None,
        })?;
        Some(format!(
            "override {number} never matters: it is for another {label} than the rule; correct one of them"
        ))
    });
    // a file may have a million of them, all with the same slip
    idle.take(MAX_OVERRIDES_SHOWN).collect()
}

fn says_nothing(other: &Override) -> bool {
    let mut silent = Override::default();
    silent.when = other.when.clone();
    *other == silent
}

/// Rules for the same requests, counted in the same way, of which one makes the other idle: the place of that one, and why.
fn alike(rules: &[Rule]) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    let mut seen: HashMap<String, Vec<usize>> = HashMap::new();
    let whole = |(_, rule): &(usize, &Rule)| rule.overrides.is_empty() && !rule.shadow && !rule.overdraft;
    for (at, rule) in rules.iter().enumerate().filter(whole) {
        let group = seen.entry(who_and_how(rule)).or_default();
        for (earlier_at, earlier) in group.iter().map(|&at| (at, &rules[at])) {
            found.push(if rule.limit == earlier.limit {
                let message = format!(
                    "it counts the same requests as rule {:?}, by the same limit: leave one of them out",
                    earlier.name
                );
                (at, message)
            } else if is_stricter(earlier, rule) {
                (at, never_refuses(earlier))
            } else if is_stricter(rule, earlier) {
                (earlier_at, never_refuses(rule))
            } else {
                continue;
            });
        }
        group.push(at);
    }
    found
}

fn never_refuses(stricter: &Rule) -> String {
    format!(
        "it never refuses: rule {:?} is for the same requests, in the same window, and stricter; leave one of them out",
        stricter.name
    )
}

fn is_stricter(one: &Rule, other: &Rule) -> bool {
    one.limit.amount() <= other.limit.amount() && one.limit.capacity() <= other.limit.capacity()
}

/// Everything about a rule but its name and its amounts.
fn who_and_how(rule: &Rule) -> String {
    let view = RuleView {
        name: String::new(),
        amount: 0,
        burst: None,
        on_store_failure: "",
        per: {
            let mut per: Vec<_> = rule.per.iter().map(|label| label.to_string()).collect();
            per.sort_unstable();
            per
        },
        tag: None,
        ..RuleView::from(rule)
    };
    serde_json::to_string(&view).expect("texts and numbers can be written")
}

/// Labels that were configured and that no rule names: one of both names has a slip.
fn unused_labels(config: &Config) -> impl Iterator<Item = String> {
    let mut named: HashSet<&str> = HashSet::new();
    for rule in &config.rules {
        named.extend(rule.per.iter().map(|label| &**label));
        let overrides = rule.overrides.iter().map(|other| &other.when);
        for condition in overrides.chain([&rule.when, &rule.unless]) {
            named.extend(condition.pairs().map(|(label, _)| label));
        }
    }
    let configured = config.labels.labels().iter().filter(|label| label.strict || label.name != IP);
    configured.filter(move |label| !named.contains(&*label.name)).map(|label| {
        format!(
            "labels.{name} is configured, and no rule names {name}: correct its name, or leave it out",
            name = label.name
        )
    })
}

fn wanted<'a>(when: &'a Condition, label: &str) -> Option<&'a Pattern> {
    when.pairs().find(|(name, _)| *name == label).map(|(_, pattern)| pattern)
}

fn counts_by(rule: &Rule, label: &str) -> bool {
    rule.per.iter().any(|per| **per == *label)
}

/// Whether everything that `narrow` matches, `wide` matches; when in doubt, not.
fn covers(wide: &Pattern, narrow: &Pattern) -> bool {
    match (wide, narrow) {
        (Pattern::Present, _) => true,
        (_, Pattern::AnyOf(several)) => several.members().iter().all(|one| covers(wide, one)),
        (_, Pattern::Exact(value)) => wide.matches(value),
        (Pattern::AnyOf(several), _) => several.members().iter().any(|one| covers(one, narrow)),
        (Pattern::Prefix(wide), Pattern::Prefix(narrow)) => narrow.starts_with(wide),
        _ => wide == narrow,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tollgate::Limit;
    use tollgate_server::config::{Flags, Source, load};

    use super::*;

    fn rule(name: &str, amount: u64) -> Rule {
        Rule::new(name, Limit::fixed_window(amount, Duration::from_secs(60)).unwrap())
    }

    /// What is found in a configuration of these rules.
    fn found(rules: Vec<Rule>) -> Vec<String> {
        let directory = "/a-directory-that-is-not-there".into();
        let source = Source { directory, ..Source::new(Flags::default()) };
        let config = Config { rules, ..load(&source).unwrap() };
        findings(&config).iter().map(Finding::to_string).collect()
    }

    fn is_silent(rules: Vec<Rule>) {
        assert_eq!(found(rules), Vec::<String>::new());
    }

    fn is_found(rules: Vec<Rule>, part: &str) {
        let found = found(rules);
        assert!(found.len() == 1 && found[0].contains(part), "{found:?}");
    }

    #[test]
    fn ordinary_rules_are_left_alone() {
        is_silent(vec![
            rule("a", 5).when("route", "login").per(["ip"]),
            rule("b", 5).when("route", "login").per(["user"]),
            rule("c", 5).when("route", "*").unless("route", "log*").per(["ip"]),
            rule("d", 50).when("route", "login").per(["ip"]).unit("tokens"),
            rule("e", 9).when("route", "login").per(["ip"]).shadow(),
            rule("f", 5).per(["tenant"]).with_override(Override::when("tenant", "acme").amount(9)),
        ]);
    }

    #[test]
    fn a_rule_that_excepts_everything_is_named() {
        let never = "it never applies: its unless excepts every route";
        for (asked, excepted) in [("login", "login"), ("login", "log*"), ("login*", "log*"), ("x", "*")] {
            is_found(vec![rule("a", 5).when("route", asked).unless("route", excepted)], never);
        }
        is_found(vec![rule("a", 5).per(["route"]).unless("route", "*")], never);
        let both = Pattern::any_of(["a".into(), "b".into()]).unwrap();
        is_found(vec![rule("a", 5).when("route", "a").unless("route", both.clone())], never);
        is_silent(vec![rule("a", 5).when("route", both).unless("route", "a")]);
    }

    #[test]
    fn words_that_do_nothing_are_named() {
        is_found(vec![rule("a", 5).per(["ip"]).exact().unless("plan", "x")], "as it is exact");
        is_found(vec![rule("a", 5).when("route", "login").per(["route", "ip"])], "leave it out of per");
        let other = Override::when("tenant", "acme");
        is_found(vec![rule("a", 5).with_override(other.clone())], "override 1 changes nothing");
        let rule = rule("a", 5).when("tenant", "other").with_override(other.amount(7));
        is_found(vec![rule], "override 1 never matters");
    }

    #[test]
    fn of_two_rules_for_the_same_requests_the_idle_one_is_named() {
        let login = |name, amount| rule(name, amount).when("route", "login").per(["ip", "user"]);
        is_found(vec![login("a", 5), login("b", 5)], "rule \"b\": it counts the same requests as rule \"a\"");
        is_found(vec![login("a", 5), login("b", 6)], "rule \"b\": it never refuses: rule \"a\"");
        is_found(vec![login("a", 6), login("b", 5)], "rule \"a\": it never refuses: rule \"b\"");
    }

    #[test]
    fn a_large_log_is_named_also_by_an_override() {
        let log = |amount| Rule::new("a", Limit::sliding_log(amount, Duration::from_secs(60)).unwrap());
        is_silent(vec![log(LARGE_LOG)]);
        is_found(vec![log(LARGE_LOG + 1)], "keeps up to 100001 entries");
        is_found(
            vec![log(1).with_override(Override::when("tenant", "x").amount(1_000_000))],
            "1000000 entries",
        );
    }

    #[test]
    fn no_rules_at_all_are_named() {
        is_found(Vec::new(), "there are no rules");
    }
}
