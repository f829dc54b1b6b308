//! Warnings about rules that are valid but probably unintended: they never apply, never deny, or store more than needed.
//!
//! Definite errors are reported when the configuration is loaded.

use std::{
    collections::{HashMap, HashSet},
    fmt,
};

use serde::Serialize;
use sluicegate::{
    Algorithm, Override, Rule,
    rules::{Absent, Condition, Pattern},
};
use sluicegate_server::{
    config::{Config, RuleView, StoreSettings},
    store::StoreUrl,
};

/// The number of entries above which a sliding log is reported: each entry is stored, for each key.
const LARGE_LOG: u64 = 100_000;

/// The maximum number of overrides reported per rule.
const MAX_OVERRIDES_SHOWN: usize = 10;

/// A warning.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct LintWarning {
    /// The rule concerned, if any.
    rule: Option<String>,
    /// The line where the rule begins.
    pub(super) line: Option<usize>,
    message: String,
}

impl fmt::Display for LintWarning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.rule {
            Some(rule) => write!(f, "rule {rule:?}: {}", self.message),
            None => f.write_str(&self.message),
        }
    }
}

impl LintWarning {
    /// Creates a warning about the rule at this index.
    fn for_rule(config: &Config, at: usize, message: String) -> Self {
        let rule = Some(config.rules[at].name.to_string());
        Self { rule, line: config.rule_lines.get(at).copied(), message }
    }
}

/// Returns all warnings about a valid configuration.
pub(super) fn findings(config: &Config) -> Vec<LintWarning> {
    let general = |message: String| LintWarning { rule: None, line: None, message };
    let mut found: Vec<LintWarning> =
        config.warnings.iter().chain(&config.policy_warning).cloned().map(general).collect();
    if config.rules.is_empty() {
        found.push(general("there are no rules: every request is allowed; add a [[rule]]".to_owned()));
    }
    for (at, rule) in config.rules.iter().enumerate() {
        let warning = |message| LintWarning::for_rule(config, at, message);
        let single = [
            never_applies(rule),
            redundant_exception(rule),
            fixed_per(rule),
            large_log(rule),
            useless_lease(rule, &config.store),
            skipped_by_proxies(rule),
            id_in_per(rule),
            fixed_id(rule),
        ];
        found.extend(single.into_iter().flatten().map(warning));
        found.extend(ineffective_overrides(rule).into_iter().map(warning));
    }
    let redundant = redundant_rules(&config.rules).into_iter();
    found.extend(redundant.map(|(at, message)| LintWarning::for_rule(config, at, message)));
    found.extend(unused_labels(config).map(general));
    found
}

/// Reports a rule whose `unless` excludes everything that its `when` matches.
fn never_applies(rule: &Rule) -> Option<String> {
    rule.unless.pairs().find_map(|(label, excepted)| {
        let required = condition_on(&rule.when, label).or_else(|| {
            let is_needed = rule.absent == Absent::Skip && counts_by(rule, label);
            is_needed.then_some(&Pattern::Present)
        })?;
        covers(excepted, required).then(|| {
            format!("never applies: unless excludes every {label} that the rule matches; correct one of them")
        })
    })
}

/// Reports an `unless` on a label that an `exact` rule never matches anyway.
fn redundant_exception(rule: &Rule) -> Option<String> {
    let (label, _) = rule.unless.pairs().find(|(label, _)| {
        rule.exact && condition_on(&rule.when, label).is_none() && !counts_by(rule, label)
    })?;
    Some(format!(
        "unless refers to {label}, but the rule is exact and never matches a request with {label}: remove one of them"
    ))
}

/// Reports a `per` label that `when` fixes to one value.
fn fixed_per(rule: &Rule) -> Option<String> {
    let (label, _) = rule
        .when
        .pairs()
        .find(|(label, pattern)| matches!(pattern, Pattern::Exact(_)) && counts_by(rule, label))?;
    Some(format!("when fixes {label} to one value: counting per {label} has no effect; remove it from per"))
}

fn large_log(rule: &Rule) -> Option<String> {
    let amounts = rule.overrides.iter().filter_map(|other| other.amount);
    let largest = amounts.chain([rule.limit.amount()]).max().unwrap_or_default();
    (rule.limit.algorithm() == Algorithm::SlidingLog && largest > LARGE_LOG).then(|| {
        format!(
            "the sliding log stores up to {largest} entries per key: sliding-counter stores two numbers and is nearly as exact"
        )
    })
}

/// Reports a lease that is never drawn.
fn useless_lease(rule: &Rule, store: &StoreSettings) -> Option<String> {
    let lease = rule.lease.filter(|lease| !lease.is_none())?;
    let (units, instances) = (lease.units_of(rule.limit.amount()), u64::from(store.instances));
    if store.url == StoreUrl::Memory {
        return Some(
            "lease has no effect on the memory store, which decides in the process: remove it".to_owned(),
        );
    }
    (units < instances).then(|| {
        format!(
            "a lease of {units} units is less than one unit for each of {instances} instances, and never drawn: use a larger \
             lease, or remove it"
        )
    })
}

/// Reports a concurrency rule without a label for the id of a hold: proxies skip it.
fn skipped_by_proxies(rule: &Rule) -> Option<String> {
    let needs_hold = !rule.limit.algorithm().properties().has_window;
    (needs_hold && rule.hold.is_none()).then(|| {
        "forward-auth and Envoy calls without the id of a hold skip this rule: set hold to the label that carries the id, for \
         example hold = \"request_id\""
            .to_owned()
    })
}

/// Reports a rule that counts by the label that contains the id of a hold.
fn id_in_per(rule: &Rule) -> Option<String> {
    let label = rule.hold.as_deref().filter(|label| counts_by(rule, label))?;
    Some(format!(
        "{label} carries the id of a hold, which differs for each request, and per counts by it: every request has its own \
         counter, and none is ever denied; remove {label} from per"
    ))
}

/// Reports a rule whose `when` fixes the label that contains the id of a hold.
fn fixed_id(rule: &Rule) -> Option<String> {
    let label = rule.hold.as_deref()?;
    matches!(condition_on(&rule.when, label), Some(Pattern::Exact(_))).then(|| {
        format!(
            "{label} carries the id of a hold, and when fixes it to one value: every request has the same id; remove {label} \
             from when"
        )
    })
}

/// Reports overrides that change nothing, or that match none of the rule's requests.
fn ineffective_overrides(rule: &Rule) -> Vec<String> {
    let numbered = rule.overrides.iter().enumerate();
    let ineffective = numbered.filter_map(|(at, other)| {
        let number = at + 1;
        if changes_nothing(other) {
            return Some(format!(
                "override {number} changes nothing: add for example amount = 100, or remove it"
            ));
        }
        let label =
            other.when.pairs().find_map(|(label, pattern)| match condition_on(&rule.when, label) {
                Some(Pattern::Exact(value)) if !pattern.matches(value) => Some(label),
                _ => None,
            })?;
        Some(format!(
            "override {number} never applies: it matches another {label} than the rule; correct one of them"
        ))
    });
    // a file may repeat the same mistake in a million overrides
    ineffective.take(MAX_OVERRIDES_SHOWN).collect()
}

fn changes_nothing(other: &Override) -> bool {
    let mut empty = Override::default();
    empty.when = other.when.clone();
    *other == empty
}

/// Reports rules that another rule with the same conditions makes redundant: index and message.
fn redundant_rules(rules: &[Rule]) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    let mut seen: HashMap<String, Vec<usize>> = HashMap::new();
    let whole = |(_, rule): &(usize, &Rule)| rule.overrides.is_empty() && !rule.shadow && !rule.overdraft;
    for (at, rule) in rules.iter().enumerate().filter(whole) {
        let group = seen.entry(conditions_text(rule)).or_default();
        for (earlier_at, earlier) in group.iter().map(|&at| (at, &rules[at])) {
            found.push(if rule.limit == earlier.limit {
                let message = format!(
                    "counts the same requests as rule {:?}, with the same limit: remove one of them",
                    earlier.name
                );
                (at, message)
            } else if is_stricter(earlier, rule) {
                (at, never_denies(earlier))
            } else if is_stricter(rule, earlier) {
                (earlier_at, never_denies(rule))
            } else {
                continue;
            });
        }
        group.push(at);
    }
    found
}

fn never_denies(stricter: &Rule) -> String {
    format!(
        "never denies: rule {:?} matches the same requests in the same window and is stricter; remove one of them",
        stricter.name
    )
}

fn is_stricter(one: &Rule, other: &Rule) -> bool {
    one.limit.amount() <= other.limit.amount() && one.limit.capacity() <= other.limit.capacity()
}

/// Serializes a rule without its name, amounts, failure policy, and the expiry and the label of its holds: rules that count the same requests
/// have the same text.
fn conditions_text(rule: &Rule) -> String {
    let view = RuleView {
        name: String::new(),
        amount: 0,
        burst: None,
        on_store_failure: "",
        ttl: None,
        hold: None,
        per: {
            let mut per: Vec<_> = rule.per.iter().map(|label| label.to_string()).collect();
            per.sort_unstable();
            per
        },
        tag: None,
        ..RuleView::from(rule)
    };
    serde_json::to_string(&view).expect("a rule view is serializable")
}

/// Reports configured labels that no rule uses.
fn unused_labels(config: &Config) -> impl Iterator<Item = String> {
    let mut named: HashSet<&str> = HashSet::new();
    for rule in &config.rules {
        named.extend(rule.per.iter().chain(&rule.hold).map(|label| &**label));
        let overrides = rule.overrides.iter().map(|other| &other.when);
        for condition in overrides.chain([&rule.when, &rule.unless]) {
            named.extend(condition.pairs().map(|(label, _)| label));
        }
    }
    let configured = config.labels.labels().iter().filter(|label| label.strict);
    configured.filter(move |label| !named.contains(&*label.name)).map(|label| {
        format!(
            "labels.{name} is configured, but no rule uses {name}: correct its name, or remove it",
            name = label.name
        )
    })
}

fn condition_on<'a>(when: &'a Condition, label: &str) -> Option<&'a Pattern> {
    when.pairs().find(|(name, _)| *name == label).map(|(_, pattern)| pattern)
}

fn counts_by(rule: &Rule, label: &str) -> bool {
    rule.per.iter().any(|per| **per == *label)
}

/// Whether `wide` certainly matches everything that `narrow` matches.
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

    use sluicegate::{Limit, rules::LeaseSize};
    use sluicegate_server::config::{Flags, Source, load};

    use super::*;

    fn rule(name: &str, amount: u64) -> Rule {
        Rule::new(name, Limit::fixed_window(amount, Duration::from_secs(60)).unwrap())
    }

    /// The warnings about a configuration of these rules.
    fn warnings(rules: Vec<Rule>) -> Vec<String> {
        let directory = "/a-directory-that-is-not-there".into();
        let source = Source { directory, ..Source::new(Flags::default()) };
        let config = Config { rules, ..load(&source).unwrap() };
        findings(&config).iter().map(LintWarning::to_string).collect()
    }

    fn assert_no_warning(rules: Vec<Rule>) {
        assert_eq!(warnings(rules), Vec::<String>::new());
    }

    fn assert_warning(rules: Vec<Rule>, part: &str) {
        let found = warnings(rules);
        assert!(found.len() == 1 && found[0].contains(part), "{found:?}");
    }

    #[test]
    fn ordinary_rules_have_no_warnings() {
        assert_no_warning(vec![
            rule("a", 5).when("route", "login").per(["ip"]),
            rule("b", 5).when("route", "login").per(["user"]),
            rule("c", 5).when("route", "*").unless("route", "log*").per(["ip"]),
            rule("d", 50).when("route", "login").per(["ip"]).unit("tokens"),
            rule("e", 9).when("route", "login").per(["ip"]).shadow(),
            rule("f", 5).per(["tenant"]).with_override(Override::when("tenant", "acme").amount(9)),
        ]);
    }

    #[test]
    fn a_rule_that_excludes_everything_is_reported() {
        let never = "never applies: unless excludes every route";
        for (asked, excepted) in [("login", "login"), ("login", "log*"), ("login*", "log*"), ("x", "*")] {
            assert_warning(vec![rule("a", 5).when("route", asked).unless("route", excepted)], never);
        }
        assert_warning(vec![rule("a", 5).per(["route"]).unless("route", "*")], never);
        let both = Pattern::any_of(["a".into(), "b".into()]).unwrap();
        assert_warning(vec![rule("a", 5).when("route", "a").unless("route", both.clone())], never);
        assert_no_warning(vec![rule("a", 5).when("route", both).unless("route", "a")]);
    }

    #[test]
    fn settings_without_effect_are_reported() {
        assert_warning(vec![rule("a", 5).per(["ip"]).exact().unless("plan", "x")], "but the rule is exact");
        assert_warning(vec![rule("a", 5).when("route", "login").per(["route", "ip"])], "remove it from per");
        let other = Override::when("tenant", "acme");
        assert_warning(vec![rule("a", 5).with_override(other.clone())], "override 1 changes nothing");
        let rule = rule("a", 5).when("tenant", "other").with_override(other.amount(7));
        assert_warning(vec![rule], "override 1 never applies");
    }

    #[test]
    fn of_two_rules_for_the_same_requests_the_redundant_one_is_reported() {
        let login = |name, amount| rule(name, amount).when("route", "login").per(["ip", "user"]);
        assert_warning(
            vec![login("a", 5), login("b", 5)],
            "rule \"b\": counts the same requests as rule \"a\"",
        );
        assert_warning(vec![login("a", 5), login("b", 6)], "rule \"b\": never denies: rule \"a\"");
        assert_warning(vec![login("a", 6), login("b", 5)], "rule \"a\": never denies: rule \"b\"");
    }

    #[test]
    fn a_lease_that_is_never_drawn_is_reported() {
        let leased = rule("a", 500).lease(LeaseSize::units(5));
        assert_warning(vec![leased.clone()], "lease has no effect on the memory store");
        let redis = |instances| {
            let directory = "/a-directory-that-is-not-there".into();
            let settings = load(&Source { directory, ..Source::new(Flags::default()) }).unwrap().store;
            StoreSettings { url: "redis://127.0.0.1".parse().unwrap(), instances, ..settings }
        };
        let warning = "a lease of 5 units is less than one unit for each of 6 instances";
        assert!(useless_lease(&leased, &redis(6)).is_some_and(|message| message.starts_with(warning)));
        assert_eq!(useless_lease(&leased, &redis(5)), None);
        assert_no_warning(vec![rule("a", 500).lease(LeaseSize::NONE)]);
    }

    #[test]
    fn a_rule_that_proxies_skip_is_reported() {
        let in_flight = || Rule::new("a", Limit::concurrency(5).unwrap()).per(["tenant"]);
        assert_warning(
            vec![in_flight()],
            "forward-auth and Envoy calls without the id of a hold skip this rule",
        );
        assert_no_warning(vec![in_flight().hold("request_id")]);
        assert_no_warning(vec![rule("a", 5).per(["tenant"])]);
    }

    #[test]
    fn a_label_with_hold_ids_in_per_or_fixed_by_when_is_reported() {
        let held = || rule("a", 5).hold("id");
        assert_warning(vec![held().per(["tenant", "id"])], "remove id from per");
        assert_warning(vec![held().when("id", "7")], "every request has the same id");
        assert_no_warning(vec![held().per(["tenant"]).when("id", "*").exact()]);
    }

    #[test]
    fn a_large_sliding_log_is_reported_even_in_an_override() {
        let log = |amount| Rule::new("a", Limit::sliding_log(amount, Duration::from_secs(60)).unwrap());
        assert_no_warning(vec![log(LARGE_LOG)]);
        assert_warning(vec![log(LARGE_LOG + 1)], "stores up to 100001 entries");
        assert_warning(
            vec![log(1).with_override(Override::when("tenant", "x").amount(200_000))],
            "200000 entries",
        );
    }

    #[test]
    fn a_configuration_without_rules_is_reported() {
        assert_warning(Vec::new(), "there are no rules");
    }
}
