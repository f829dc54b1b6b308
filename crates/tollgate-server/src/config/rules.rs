//! From rules as written to the library's rules.

use std::{collections::HashMap, time::Duration};

use tollgate::{
    Algorithm, Cost, Limit, LimitError, Override, Pattern, Rule,
    rules::{Condition, MAX_OVERRIDES, MAX_RULES, OverrideError, RuleError},
};

use super::{
    error::{Place, Problem},
    files::{Files, MAX_OVERRIDES_BYTES},
    kinds::{Network, OneOrMore},
    overrides,
    read::{self, Conditions, Defaults},
    reader::{Field, FromText},
};
use crate::labels::{Kind, LabelPolicy};

/// What a rule is called that has no name, while the rest of it is looked at.
const UNNAMED: &str = "?";

/// Makes rules, and notes what is wrong with them.
pub(super) struct Builder<'a> {
    pub(super) labels: &'a LabelPolicy,
    pub(super) files: &'a mut Files,
    pub(super) problems: &'a mut Vec<Problem>,
}

impl Builder<'_> {
    /// All rules, with defaults and overrides, each with its place.
    pub(super) fn rules(
        &mut self,
        defaults: Field<Defaults>,
        read: Field<Vec<Field<read::Rule>>>,
    ) -> Vec<(Rule, Place)> {
        let defaults = defaults.into_value().unwrap_or_default().0;
        let place = read.place();
        let read = read.into_value().unwrap_or_default();
        if read.len() > MAX_RULES {
            let message =
                format!("{} rules are too many: use at most {MAX_RULES}, and overrides", read.len());
            self.problems.push(Problem::new(&place, message));
            return Vec::new();
        }
        let mut names: HashMap<String, Place> = HashMap::new();
        let mut rules = Vec::with_capacity(read.len());
        let mut overrides = 0;
        for field in &read {
            let Field::Given(read, place) = field else { continue };
            if let Field::Given(name, place) = &read.name
                && let Some(first) = names.insert(name.clone(), place.clone())
            {
                let message = format!("rule {name:?} is defined twice: give each rule a name of its own");
                self.problems.push(Problem::new(place, message).also(&first, "first defined here"));
            }
            let Some(rule) = self.rule(&defaults, read, place) else { continue };
            overrides += rule.overrides.len();
            if overrides > MAX_OVERRIDES {
                let message = format!("more than {MAX_OVERRIDES} overrides, over all rules, are too many");
                self.problems.push(Problem::new(place, message));
                break;
            }
            rules.push((rule, place.clone()));
        }
        rules
    }

    fn rule(&mut self, defaults: &read::Rule, own: &read::Rule, place: &Place) -> Option<Rule> {
        if own.name.is_absent() {
            let message = "a rule needs a name: add for example name = \"login-per-ip\"";
            self.problems.push(Problem::new(place, message));
        }
        let shown = own.name.get().map_or_else(|| "a rule".to_owned(), |name| format!("rule {name:?}"));
        let read = with_defaults(own, defaults);
        for (is_absent, key, example) in
            [(read.amount.is_absent(), "amount", "10"), (read.window.is_absent(), "window", "\"1m\"")]
        {
            if is_absent {
                let message = format!("{shown} has no {key}: add for example {key} = {example}");
                self.problems.push(Problem::new(&own.name.place_or(place), message));
            }
        }
        let algorithm = match &read.algorithm {
            Field::Absent => Some(Algorithm::TokenBucket),
            written => written.get().map(|word| word.0),
        };
        let limit = algorithm.and_then(|algorithm| self.limit(algorithm, &read, &shown));
        // Everything is looked at, so that every mistake is named, before anything that is missing ends this.
        let when = self.condition(&read.when);
        let unless = self.condition(&read.unless);
        let per = list(&read.per);
        let tag = read.tag.get().map(|_| list(&read.tag));
        let cost = self.cost(&read.cost, &shown);
        let overrides = [defaults, own].map(|level| self.overrides(level, &read, limit.as_ref(), &shown));
        let name = read.name.get().cloned();
        // without numbers, any others serve to look at the rest
        let stand_in = Limit::new(algorithm?, 1, Duration::from_secs(1)).expect("one a second is a limit");
        let mut rule = Rule::new(name.as_deref().unwrap_or(UNNAMED), limit.unwrap_or(stand_in));
        rule.when = when;
        rule.unless = unless;
        rule.per = per;
        rule.tag = tag;
        rule.burst = read.burst.into_value();
        if let Some(unit) = read.unit.get() {
            rule.unit = unit.as_str().into();
        }
        rule.cost = cost.unwrap_or(Cost::ONE);
        rule.shadow = read.shadow.into_value().unwrap_or_default();
        rule.overdraft = read.overdraft.into_value().unwrap_or_default();
        rule.absent = read.absent.into_value().map(|word| word.0).unwrap_or_default();
        rule.exact = read.exact.into_value().unwrap_or_default();
        rule.stagger = read.stagger.into_value().unwrap_or_default();
        rule.on_store_failure = read.on_store_failure.into_value().map(|word| word.0).unwrap_or_default();
        self.check(&rule, own, defaults, place);
        let [from_defaults, from_rule] = overrides;
        rule.overrides = from_defaults;
        rule.overrides.extend(from_rule);
        (name.is_some() && limit.is_some()).then_some(rule)
    }

    /// Amount and window; the burst is the rule's.
    fn limit(&mut self, algorithm: Algorithm, read: &read::Rule, shown: &str) -> Option<Limit> {
        let (amount, window) = (*read.amount.get()?, read.window.get()?.0);
        let limit = Limit::new(algorithm, amount, window);
        limit
            .map_err(|error| {
                let place = match error {
                    LimitError::Amount { .. } => read.amount.place(),
                    _ => read.window.place(),
                };
                self.problems.push(Problem::new(&place, format!("{shown}: {error}")));
            })
            .ok()
    }

    fn cost(&mut self, field: &Field<u64>, shown: &str) -> Option<Cost> {
        let cost = Cost::new(*field.get()?);
        cost.map_err(|error| self.problems.push(Problem::new(&field.place(), format!("{shown}: {error}"))))
            .ok()
    }

    /// What the library finds wrong with the rule itself, at the field that it is about.
    fn check(&mut self, rule: &Rule, own: &read::Rule, defaults: &read::Rule, place: &Place) {
        let read = with_defaults(own, defaults);
        for error in rule.problems() {
            let at = match &error {
                RuleError::Name => read.name.place(),
                RuleError::When(_) => read.when.place(),
                RuleError::Unless(_) => read.unless.place(),
                RuleError::Per(_) => read.per.place(),
                RuleError::Tag(_) | RuleError::TagNotInPer(_) => read.tag.place(),
                RuleError::Limit(_) => read.burst.place(),
                RuleError::Unit(_) => read.unit.place(),
                RuleError::Stagger(_) => read.stagger.place(),
                _ => place.clone(),
            };
            self.problems.push(Problem::new(&at, format!("rule {:?}: {error}", rule.name)));
        }
    }

    /// The overrides of one level: those of its file first, then those written beside it.
    fn overrides(
        &mut self,
        level: &read::Rule,
        rule: &read::Rule,
        limit: Option<&Limit>,
        shown: &str,
    ) -> Vec<Override> {
        let mut made = Vec::new();
        if let Some(bytes) = self.files.named(&level.overrides_file, MAX_OVERRIDES_BYTES, self.problems) {
            let path = self.files.path(level.overrides_file.get().map_or("", String::as_str));
            let known = labels_named(rule, self.labels);
            let mut rows = overrides::Rows::new(path, bytes, &known, self.problems);
            while let Some((row, place)) = rows.next(self.problems) {
                made.extend(self.an_override(&row, &place, limit, shown));
                if made.len() > MAX_OVERRIDES {
                    break;
                }
            }
        }
        for field in level.r#override.get().into_iter().flatten() {
            if let Field::Given(read, place) = field {
                made.extend(self.an_override(read, place, limit, shown));
            }
        }
        made
    }

    fn an_override(
        &mut self,
        read: &read::Override,
        place: &Place,
        limit: Option<&Limit>,
        shown: &str,
    ) -> Option<Override> {
        if read.when.is_absent() || read.when.get().is_some_and(Conditions::is_empty) {
            let message = format!(
                "an override of {shown} does not say for whom: add for example when = {{ tenant = \"acme\" }}"
            );
            self.problems.push(Problem::new(&read.when.place_or(place), message));
        }
        let mut other = Override::default();
        other.when = self.condition(&read.when);
        other.amount = read.amount.get().copied();
        other.window = read.window.get().map(|span| span.0);
        other.burst = read.burst.get().copied();
        other.cost = self.cost(&read.cost, shown);
        other.unlimited = read.unlimited.get().copied();
        other.blocked = read.blocked.get().copied();
        other.on_store_failure = read.on_store_failure.get().map(|word| word.0);
        other.shadow = read.shadow.get().copied();
        // Without the rule's own numbers nothing can be said about these.
        let error = other.check(limit?).err();
        if let Some(error) = error {
            let at = match &error {
                OverrideError::When(_) => read.when.place(),
                OverrideError::Limit(LimitError::Amount { .. }) => read.amount.place(),
                OverrideError::Limit(LimitError::Burst(_) | LimitError::BurstNotSupported(_)) => {
                    read.burst.place()
                }
                OverrideError::Limit(_) => read.window.place(),
                OverrideError::UnlimitedAndBlocked => read.blocked.place(),
                _ => place.clone(),
            };
            self.problems.push(Problem::new(&at, format!("an override of {shown}: {error}")));
        }
        Some(other)
    }

    fn condition(&mut self, field: &Field<Conditions>) -> Condition {
        let mut condition = Condition::new();
        for (label, patterns) in field.get().into_iter().flatten() {
            let Field::Given(patterns, place) = patterns else { continue };
            if let Some(pattern) = self.pattern(label, patterns, place) {
                condition = condition.and(label, pattern);
            }
        }
        condition
    }

    fn pattern(&mut self, label: &str, OneOrMore(written): &OneOrMore, place: &Place) -> Option<Pattern> {
        let mut patterns = Vec::with_capacity(written.len());
        for one in written {
            let Field::Given(text, place) = one else { continue };
            match self.one_pattern(label, text) {
                Ok(pattern) => patterns.push(pattern),
                Err(message) => {
                    self.problems.push(Problem::new(place, format!("label {label:?}: {message}")));
                }
            }
        }
        if patterns.is_empty() && !written.is_empty() {
            return None;
        }
        let pattern = Pattern::any_of(patterns);
        pattern
            .map_err(|error| self.problems.push(Problem::new(place, format!("label {label:?}: {error}"))))
            .ok()
    }

    /// A pattern for values as they look after cleaning.
    fn one_pattern(&self, label: &str, text: &str) -> Result<Pattern, String> {
        let parsed = Pattern::parse(text);
        let Some(settings) = self.labels.label(label) else { return Ok(parsed) };
        match parsed {
            Pattern::Exact(value) if settings.secret => match self.labels.cleaned(settings, &value) {
                Ok(cleaned) => Ok(Pattern::Exact(cleaned.into())),
                Err(_) => {
                    Err(format!("{text:?} is not an address, and hashed values are matched only whole"))
                }
            },
            Pattern::Prefix(_) if settings.secret => {
                Err("its values are hashed, so none begins like this: name whole values, or \"*\"".to_owned())
            }
            Pattern::Exact(_) if settings.kind == Kind::Ip => match Network::from_text(text) {
                Ok(Network(network)) if settings.cuts_into(&network) => Err(format!(
                    "{text} never matches, since IPv6 addresses are cut to /{prefix}: use at most /{prefix}, \
                     or set a longer ipv6_prefix in [labels]",
                    prefix = settings.ipv6_prefix
                )),
                Ok(_) => Pattern::network(text).map_err(|error| error.to_string()),
                Err(message) if settings.strict => Err(message),
                Err(_) => Ok(parsed_value(text)),
            },
            parsed => Ok(parsed),
        }
    }
}

/// The lines on which these begin, in one pass: they stand in the order of the file.
pub(super) fn lines(places: &[Place]) -> Vec<usize> {
    let (mut line, mut counted) = (1, 0);
    let of_place = |place: &Place| {
        let Place::In { file, span } = place else { return line };
        let passed = file.text.as_bytes().get(counted..span.start).unwrap_or_default();
        line += passed.iter().filter(|byte| **byte == b'\n').count();
        counted = counted.max(span.start);
        line
    };
    places.iter().map(of_place).collect()
}

fn parsed_value(text: &str) -> Pattern {
    Pattern::Exact(text.as_bytes().into())
}

/// What a rule says, or else the defaults; without overrides, which add up.
fn with_defaults(own: &read::Rule, defaults: &read::Rule) -> read::Rule {
    let algorithm = own.algorithm.or(&defaults.algorithm);
    let is = |wanted| algorithm.get().map_or(Algorithm::TokenBucket, |word| word.0) == wanted;
    // Defaults are for the rules that can have them.
    let burst = if is(Algorithm::TokenBucket) { own.burst.or(&defaults.burst) } else { own.burst.clone() };
    let stagger =
        if is(Algorithm::FixedWindow) { own.stagger.or(&defaults.stagger) } else { own.stagger.clone() };
    read::Rule {
        name: own.name.clone(),
        when: own.when.or(&defaults.when),
        unless: own.unless.or(&defaults.unless),
        per: own.per.or(&defaults.per),
        amount: own.amount.or(&defaults.amount),
        window: own.window.or(&defaults.window),
        unit: own.unit.or(&defaults.unit),
        cost: own.cost.or(&defaults.cost),
        on_store_failure: own.on_store_failure.or(&defaults.on_store_failure),
        shadow: own.shadow.or(&defaults.shadow),
        overdraft: own.overdraft.or(&defaults.overdraft),
        tag: own.tag.or(&defaults.tag),
        absent: own.absent.or(&defaults.absent),
        exact: own.exact.or(&defaults.exact),
        algorithm,
        burst,
        stagger,
        overrides_file: Field::Absent,
        r#override: Field::Absent,
    }
}

fn list(field: &Field<Vec<Field<String>>>) -> Vec<Box<str>> {
    field.get().into_iter().flatten().filter_map(|element| Some(element.get()?.as_str().into())).collect()
}

/// The labels that a file of overrides may have as columns.
fn labels_named(rule: &read::Rule, policy: &LabelPolicy) -> Vec<String> {
    let mut names: Vec<String> = policy.labels().iter().map(|label| label.name.clone()).collect();
    names.extend(list(&rule.per).into_iter().map(String::from));
    for condition in [&rule.when, &rule.unless] {
        names.extend(condition.get().into_iter().flat_map(Conditions::keys).cloned());
    }
    names
}
