//! Builds the library's rules from `[defaults]` and `[[rule]]`.

use std::collections::{HashMap, HashSet};

use sluicegate_core::{Cost, Limit, LimitError};

use super::{
    defaults::{self, with_defaults},
    error::{Location, Problem},
    files::{Files, MAX_OVERRIDES_BYTES},
    limits::{self, LimitFields},
    overrides,
    schema::{self, Conditions, Defaults},
    toml_reader::{Field, FromText},
    values::{Network, Patterns},
};
use crate::{
    label_policy::{LabelKind, LabelPolicy},
    rules::{
        CalendarOverrideError, Condition, MAX_OVERRIDES, MAX_RULES, Override, OverrideError, Pattern, Rule,
        RuleError,
    },
    window::WrittenWindow,
};

/// Stands in for a missing name while the rest of the rule is validated.
const UNNAMED: &str = "?";

/// Builds rules and collects their problems.
pub struct Builder<'a> {
    pub labels: &'a LabelPolicy,
    pub files: &'a mut Files,
    pub problems: &'a mut Vec<Problem>,
    /// Names of enforcing rules that set no failure policy.
    pub without_policy: Vec<String>,
    /// Names of enforcing rules that do not set `absent`.
    pub without_absent: Vec<String>,
}

/// The most rule names in the warning about failure policies; the others are counted.
const MAX_NAMES_SHOWN: usize = 10;

/// Returns the warning about enforcing rules that set no failure policy, if there are any. Only relevant for a remote store.
pub fn policy_warning(names: &[String]) -> Option<String> {
    let shown: Vec<_> = names.iter().take(MAX_NAMES_SHOWN).map(|name| format!("{name:?}")).collect();
    let more = match names.len() - shown.len() {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    (!names.is_empty()).then(|| {
        format!(
            "rules without on_store_failure allow every request while the store is unavailable or late: {}{more}; set \
             on_store_failure in [defaults] (\"local\" is recommended, \"open\" keeps this behaviour)",
            shown.join(", ")
        )
    })
}

/// Returns warnings about rules that a client escapes if it omits a header: forward-auth reads a `per` label from it, `absent` is not
/// set, and no rule counts the same requests per address.
pub fn absent_warnings(names: &[String], rules: &[Rule], labels: &LabelPolicy) -> Vec<String> {
    let headers: HashMap<&str, &str> = labels.headers().collect();
    let counts_by_ip = |rule: &&Rule| !rule.shadow && rule.per.iter().any(|label| **label == *"ip");
    let per_ip: Vec<&Rule> = rules.iter().filter(counts_by_ip).collect();
    let has_other = |rule: &Rule| {
        let is_part = |other: &&Rule| other.when.pairs().all(|pair| rule.when.pairs().any(|own| own == pair));
        per_ip.iter().any(is_part)
    };
    let named: HashSet<&str> = names.iter().map(String::as_str).collect();
    let warning = |rule: &Rule| {
        let header = rule
            .per
            .iter()
            .filter(|label| !rule.when.names(label))
            .find_map(|label| headers.get(&**label))?;
        (!has_other(rule)).then(|| {
            format!(
                "clients that omit {header} are not limited by rule {:?}: set absent = \"deny\" or \"shared\", or add a rule per \
                 ip",
                rule.name
            )
        })
    };
    rules
        .iter()
        .filter(|rule| named.contains(&*rule.name))
        .filter_map(warning)
        .take(MAX_NAMES_SHOWN)
        .collect()
}

impl Builder<'_> {
    /// Builds all rules, with defaults and overrides, each with its location.
    pub fn rules(
        &mut self,
        defaults: Field<Defaults>,
        read: Field<Vec<Field<schema::Rule>>>,
    ) -> Vec<(Rule, Location)> {
        let defaults = defaults.into_value().unwrap_or_default().0;
        let location = read.location();
        let read = read.into_value().unwrap_or_default();
        if read.len() > MAX_RULES {
            let message = format!("{} rules are too many: use at most {MAX_RULES}, or overrides", read.len());
            self.problems.push(Problem::new(&location, message));
            return Vec::new();
        }
        let mut names: HashMap<String, Location> = HashMap::new();
        let mut rules = Vec::with_capacity(read.len());
        let mut overrides = 0;
        for field in &read {
            let Field::Given(read, location) = field else { continue };
            if let Field::Given(name, location) = &read.name
                && let Some(first) = names.insert(name.clone(), location.clone())
            {
                let message = format!("rule {name:?} is defined twice: use a unique name");
                self.problems.push(Problem::new(location, message).also(&first, "first defined here"));
            }
            let Some(rule) = self.rule(&defaults, read, location) else { continue };
            overrides += rule.overrides.len();
            if overrides > MAX_OVERRIDES {
                let message = format!("too many overrides: use at most {MAX_OVERRIDES} over all rules");
                self.problems.push(Problem::new(location, message));
                break;
            }
            rules.push((rule, location.clone()));
        }
        rules
    }

    fn rule(&mut self, defaults: &schema::Rule, own: &schema::Rule, location: &Location) -> Option<Rule> {
        if own.name.is_absent() {
            let message = "a rule needs a name: add for example name = \"login-per-ip\"";
            self.problems.push(Problem::new(location, message));
        }
        let shown = own.name.get().map_or_else(|| "a rule".to_owned(), |name| format!("rule {name:?}"));
        let read = with_defaults(own, defaults);
        let algorithm = defaults::algorithm(&read);
        let lacks_window =
            read.window.is_absent() && algorithm.is_some_and(|algorithm| algorithm.properties().has_window);
        for (is_absent, key, example) in
            [(read.amount.is_absent(), "amount", "10"), (lacks_window, "window", "\"1m\"")]
        {
            if is_absent {
                let message = format!("{shown} has no {key}: add for example {key} = {example}");
                self.problems.push(Problem::new(&own.name.location_or(location), message));
            }
        }
        let written = LimitFields { read: &read, own, shown: &shown };
        let limit = algorithm.and_then(|algorithm| written.limit(algorithm, self.problems));
        // Validate everything before returning early, so that every problem is reported.
        let when = self.condition(&read.when);
        let unless = self.condition(&read.unless);
        let per = list(&read.per);
        let tag = read.tag.get().map(|_| list(&read.tag));
        let cost = self.cost(&read.cost, &shown);
        let overrides = [defaults, own].map(|level| self.overrides(level, &read, limit.as_ref(), &shown));
        let name = read.name.get().cloned();
        // An invalid limit has been reported; a valid one lets the rest of the rule be validated.
        let limit_or_other = limit.unwrap_or(limits::any(algorithm?));
        let mut rule = Rule::new(name.as_deref().unwrap_or(UNNAMED), limit_or_other);
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
        if read.absent.is_absent() && !rule.shadow {
            self.without_absent.extend(name.clone());
        }
        rule.absent = read.absent.into_value().map(|word| word.0).unwrap_or_default();
        rule.exact = read.exact.into_value().unwrap_or_default();
        rule.stagger = read.stagger.into_value().unwrap_or_default();
        if read.on_store_failure.is_absent() && !rule.shadow {
            self.without_policy.extend(name.clone());
        }
        rule.on_store_failure = read.on_store_failure.into_value().map(|word| word.0).unwrap_or_default();
        rule.lease = read.lease.into_value().map(|lease| lease.0);
        rule.lease_for = read.lease_for.into_value().map(|span| span.0);
        rule.ttl = read.ttl.into_value().map(|span| span.0);
        rule.hold = read.hold.into_value().map(String::into_boxed_str);
        self.check(&rule, own, defaults, location);
        let [from_defaults, from_rule] = overrides;
        rule.overrides = from_defaults;
        rule.overrides.extend(from_rule);
        (name.is_some() && limit.is_some()).then_some(rule)
    }

    fn cost(&mut self, field: &Field<u64>, shown: &str) -> Option<Cost> {
        let cost = Cost::new(*field.get()?);
        cost.map_err(|error| self.problems.push(Problem::new(&field.location(), format!("{shown}: {error}"))))
            .ok()
    }

    /// Reports the problems that the library finds, each at its field.
    fn check(&mut self, rule: &Rule, own: &schema::Rule, defaults: &schema::Rule, location: &Location) {
        let read = with_defaults(own, defaults);
        for error in rule.problems() {
            let at = match &error {
                RuleError::Name => read.name.location(),
                RuleError::When(_) => read.when.location(),
                RuleError::Unless(_) => read.unless.location(),
                RuleError::Per(_) => read.per.location(),
                RuleError::Tag(_) | RuleError::TagNotInPer(_) => read.tag.location(),
                RuleError::Limit(_) => read.burst.location(),
                RuleError::Unit(_) => read.unit.location(),
                RuleError::Overdraft(_) => read.overdraft.location(),
                RuleError::Stagger(_) | RuleError::StaggeredCalendar => read.stagger.location(),
                RuleError::LeaseTooSmall { .. } | RuleError::Lease(LimitError::Lease { .. }) => {
                    read.lease.location()
                }
                RuleError::Lease(LimitError::LeaseNotSupported(_)) => {
                    read.lease.location_or(&read.lease_for.location())
                }
                RuleError::Lease(LimitError::LeaseWithRelease) => read.on_expiry.location(),
                RuleError::Lease(_) | RuleError::LeaseForWithoutLease => read.lease_for.location(),
                RuleError::Ttl(_) => read.ttl.location(),
                RuleError::Hold(_) => read.hold.location(),
                _ => location.clone(),
            };
            self.problems.push(Problem::new(&at, format!("rule {:?}: {error}", rule.name)));
        }
    }

    /// Builds the overrides of `[defaults]` or of one rule: first those of its CSV file, then those in the configuration file.
    fn overrides(
        &mut self,
        level: &schema::Rule,
        rule: &schema::Rule,
        limit: Option<&Limit>,
        shown: &str,
    ) -> Vec<Override> {
        let mut made = Vec::new();
        if let Some(bytes) = self.files.named(&level.overrides_file, MAX_OVERRIDES_BYTES, self.problems) {
            let path = self.files.path(level.overrides_file.get().map_or("", String::as_str));
            let known = labels_named(rule, self.labels);
            let mut rows = overrides::Rows::new(path, bytes, &known, self.problems);
            while let Some((row, location)) = rows.next(self.problems) {
                made.extend(self.an_override(&row, rule, &location, limit, shown));
                if made.len() > MAX_OVERRIDES {
                    break;
                }
            }
        }
        for field in level.r#override.get().into_iter().flatten() {
            if let Field::Given(read, location) = field {
                made.extend(self.an_override(read, rule, location, limit, shown));
            }
        }
        made
    }

    fn an_override(
        &mut self,
        read: &schema::Override,
        rule: &schema::Rule,
        location: &Location,
        limit: Option<&Limit>,
        shown: &str,
    ) -> Option<Override> {
        if read.when.is_absent() || read.when.get().is_some_and(Conditions::is_empty) {
            let message = format!(
                "an override of {shown} has no condition: add for example when = {{ tenant = \"acme\" }}"
            );
            self.problems.push(Problem::new(&read.when.location_or(location), message));
        }
        let mut other = Override {
            when: self.condition(&read.when),
            amount: read.amount.get().copied(),
            burst: read.burst.get().copied(),
            cost: self.cost(&read.cost, shown),
            unlimited: read.unlimited.get().copied(),
            blocked: read.blocked.get().copied(),
            on_store_failure: read.on_store_failure.get().map(|word| word.0),
            shadow: read.shadow.get().copied(),
            lease: read.lease.get().map(|lease| lease.0),
            lease_for: read.lease_for.get().map(|span| span.0),
            ..Override::default()
        };
        other.calendar.zone = read.zone.get().map(|zone| zone.0);
        other.calendar.anchor = read.anchor.get().map(|anchor| anchor.0);
        match read.window.get().map(|window| window.0) {
            Some(WrittenWindow::Length(length)) => other.window = Some(length),
            Some(WrittenWindow::Calendar(unit)) => {
                other.calendar.unit = Some(unit);
                // only a calendar window of the rule has the zone of [defaults]
                if limit.is_some_and(|limit| limit.calendar().is_none()) {
                    other.calendar.zone = read.zone.or(&rule.zone).get().map(|zone| zone.0);
                }
            }
            None => {}
        }
        // An override can only be validated against a valid limit.
        let error = other.check(limit?).err();
        if let Some(error) = error {
            let at = match &error {
                OverrideError::When(_) => read.when.location(),
                OverrideError::Limit(LimitError::Amount { .. }) => read.amount.location(),
                OverrideError::Limit(LimitError::Burst(_) | LimitError::BurstNotSupported(_)) => {
                    read.burst.location()
                }
                OverrideError::LeaseTooSmall { .. } => read.lease.location(),
                OverrideError::Lease(_) => read.lease.location_or(&read.lease_for.location()),
                OverrideError::Calendar(CalendarOverrideError::NoCalendar("zone")) => read.zone.location(),
                OverrideError::Calendar(_) => read.anchor.location(),
                OverrideError::Limit(_) | OverrideError::TwoWindows => read.window.location(),
                OverrideError::UnlimitedAndBlocked => read.blocked.location(),
            };
            self.problems.push(Problem::new(&at, format!("an override of {shown}: {error}")));
        }
        Some(other)
    }

    fn condition(&mut self, field: &Field<Conditions>) -> Condition {
        let mut condition = Condition::new();
        for (label, patterns) in field.get().into_iter().flatten() {
            let Field::Given(patterns, location) = patterns else { continue };
            if let Some(pattern) = self.pattern(label, patterns, location) {
                condition = condition.and(label, pattern);
            }
        }
        condition
    }

    fn pattern(&mut self, label: &str, Patterns(written): &Patterns, location: &Location) -> Option<Pattern> {
        let mut patterns = Vec::with_capacity(written.len());
        for one in written {
            let Field::Given(text, location) = one else { continue };
            match self.one_pattern(label, text) {
                Ok(pattern) => patterns.push(pattern),
                Err(message) => {
                    self.problems.push(Problem::new(location, format!("label {label:?}: {message}")));
                }
            }
        }
        if patterns.is_empty() && !written.is_empty() {
            return None;
        }
        let pattern = Pattern::any_of(patterns);
        pattern
            .map_err(|error| self.problems.push(Problem::new(location, format!("label {label:?}: {error}"))))
            .ok()
    }

    /// Parses a pattern that matches normalized values.
    fn one_pattern(&self, label: &str, text: &str) -> Result<Pattern, String> {
        let parsed = Pattern::parse(text);
        let Some(settings) = self.labels.label(label) else { return Ok(parsed) };
        match parsed {
            Pattern::Exact(value) if settings.secret => match self.labels.cleaned(settings, &value) {
                Ok(cleaned) if settings.kind != LabelKind::Ip || !text.contains('/') => {
                    Ok(Pattern::Exact(cleaned.into()))
                }
                _ => Err(format!("{text:?} is not an address, and hashed values match only as a whole")),
            },
            Pattern::Prefix(_) if settings.secret => {
                Err("its values are hashed and cannot match a prefix: use whole values or \"*\"".to_owned())
            }
            Pattern::Exact(_) if settings.kind == LabelKind::Ip => match Network::from_text(text) {
                Ok(Network(network)) if settings.truncates(&network) => Err(format!(
                    "{text} never matches because IPv6 addresses are truncated to /{prefix}: use at most /{prefix}, \
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

/// Returns the line number of each location, in one pass: the locations are in file order.
pub fn lines(locations: &[Location]) -> Vec<usize> {
    let (mut line, mut counted) = (1, 0);
    let line_of = |location: &Location| {
        let Location::InFile { file, span } = location else { return line };
        let passed = file.text.as_bytes().get(counted..span.start).unwrap_or_default();
        line += passed.iter().filter(|byte| **byte == b'\n').count();
        counted = counted.max(span.start);
        line
    };
    locations.iter().map(line_of).collect()
}

fn parsed_value(text: &str) -> Pattern {
    Pattern::Exact(text.as_bytes().into())
}

fn list(field: &Field<Vec<Field<String>>>) -> Vec<Box<str>> {
    field.get().into_iter().flatten().filter_map(|element| Some(element.get()?.as_str().into())).collect()
}

/// The labels that can be columns of a CSV file of overrides.
fn labels_named(rule: &schema::Rule, policy: &LabelPolicy) -> Vec<String> {
    let mut names: Vec<String> = policy.labels().iter().map(|label| label.name.clone()).collect();
    names.extend(list(&rule.per).into_iter().map(String::from));
    for condition in [&rule.when, &rule.unless] {
        names.extend(condition.get().into_iter().flat_map(Conditions::keys).cloned());
    }
    names
}
