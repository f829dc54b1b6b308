//! Conversion of a descriptor tree to rules, with a list of what rules cannot express.
//!
//! envoyproxy/ratelimit follows the entries of a request from the root. At each level it selects one node, without backtracking: the
//! one with exactly this value, else the first whose wildcard matches, else the one without a value. The limit of the node at the last
//! entry applies, with one counter for each combination of values. Here, each node with a limit becomes a rule:
//!
//! * a fixed value or wildcard becomes a `when` condition, everything else a `per` label;
//! * values that select another node of the same level become `unless` conditions;
//! * `exact` requires the same number of entries.

use std::collections::{BTreeSet, HashMap, HashSet};

use sluicegate::{
    Algorithm,
    labels::{MAX_LABEL_NAME, MAX_LABEL_VALUE},
    rules::{MAX_ALTERNATIVES, MAX_PER, MAX_RULE_NAME},
};

use super::envoy::{Descriptor, Domain, RateLimit};

/// The label of a request's domain.
pub(super) const DOMAIN: &str = "domain";

/// The largest amount of a fixed window.
const MAX_AMOUNT: u64 = Algorithm::FixedWindow.max_amount();

/// The wildcard that matches every value.
const ANY: &str = "*";

/// The result of the conversion.
#[derive(Debug, Default)]
pub(super) struct Imported {
    pub(super) rules: Vec<ImportedRule>,
    /// Descriptions of nodes that were not converted.
    pub(super) skipped: Vec<String>,
}

/// A rule to be written.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ImportedRule {
    pub(super) name: String,
    pub(super) domain: String,
    /// The keys of its entries, in order.
    keys: Vec<String>,
    /// Labels besides the domain, each with its pattern.
    pub(super) when: Vec<(String, String)>,
    /// Labels, each with its excluded patterns.
    pub(super) unless: Vec<(String, Vec<String>)>,
    pub(super) per: Vec<String>,
    pub(super) amount: u64,
    pub(super) window: &'static str,
    pub(super) is_shadow: bool,
    /// Whether it denies every request.
    pub(super) is_blocked: bool,
    /// Differences from the original.
    pub(super) remarks: Vec<String>,
}

impl Imported {
    /// All differences from the original.
    pub(super) fn remarks(&self) -> impl Iterator<Item = &str> {
        let of_rules = self.rules.iter().flat_map(|rule| &rule.remarks);
        self.skipped.iter().chain(of_rules).map(String::as_str)
    }

    /// The labels that the rules use.
    pub(super) fn labels(&self) -> BTreeSet<&str> {
        let mut labels = BTreeSet::new();
        for rule in &self.rules {
            labels.extend(rule.keys.iter().map(String::as_str));
        }
        labels
    }
}

/// One entry on the path to a node.
#[derive(Clone, Debug)]
struct Step {
    key: String,
    value: Matcher,
    /// The patterns of sibling nodes that take precedence.
    unless: Vec<String>,
}

/// The values that a node matches.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Matcher {
    /// Exactly this value.
    Value(String),
    /// Values with this prefix; counted separately, or together if shared.
    Wildcard { pattern: String, is_shared: bool },
    /// Any value that no other node matches.
    Rest,
}

/// Converts domains to rules.
pub(super) fn rules(domains: &[Domain]) -> Result<Imported, String> {
    let mut imported = Imported::default();
    for domain in domains {
        if domain.name.ends_with('*') {
            let place = domain.file.display();
            imported.skipped.push(format!(
                "{place}: skipped: a domain ending with \"*\" is not supported, it would match any suffix"
            ));
            continue;
        }
        let mut walk = Walk { domain, imported: &mut imported };
        walk.level(&domain.descriptors, &[])?;
    }
    note_order_differences(&mut imported);
    make_names_unique(&mut imported.rules);
    Ok(imported)
}

struct Walk<'a> {
    domain: &'a Domain,
    imported: &'a mut Imported,
}

impl Walk<'_> {
    /// Converts the nodes of one level, below these entries.
    fn level(&mut self, nodes: &[Descriptor], above: &[Step]) -> Result<(), String> {
        let mut seen = HashSet::new();
        for node in nodes {
            if node.key().is_empty() {
                return Err(self.error("descriptor has empty key"));
            }
            if !seen.insert(flattened(node)) {
                let key = flattened(node);
                return Err(
                    self.error(&format!("duplicate descriptor composite key '{}.{key}'", self.domain.name))
                );
            }
        }
        self.note_collisions(nodes, above);
        for (at, node) in nodes.iter().enumerate() {
            self.node(node, nodes, at, above)?;
        }
        Ok(())
    }

    fn node(
        &mut self,
        node: &Descriptor,
        level: &[Descriptor],
        at: usize,
        above: &[Step],
    ) -> Result<(), String> {
        let place = self.place(above, node);
        if node.is_shared() && !node.value().is_some_and(|value| value.contains('*')) {
            let message = format!(
                "share_threshold can only be used with wildcard values (containing '*'), but found key '{}'",
                flattened(node)
            );
            return Err(self.error(&message));
        }
        if let Some(reason) = self.unsupported(node, above) {
            self.imported.skipped.push(format!("{place}: skipped: {reason}"));
            // errors in skipped nodes are still reported
            return self.check(node);
        }
        let value = matcher(node);
        let unless = preceding_patterns(node, level, at);
        if unless.len() > MAX_ALTERNATIVES {
            self.imported
                .skipped
                .push(format!("{place}: skipped: more than {MAX_ALTERNATIVES} values are excluded"));
            return self.check(node);
        }
        if let Some(first) = unless.iter().find(|pattern| covers(pattern, &value)) {
            self.imported.skipped.push(format!(
                "{place}: skipped: unreachable in the original too, {first:?} matches all of its values"
            ));
            return self.check(node);
        }
        let mut steps = above.to_vec();
        steps.push(Step { key: node.key().to_owned(), value, unless });
        self.limit(node, &steps, &place)?;
        self.level(node.children(), &steps)
    }

    /// Returns why a node and its children cannot be converted.
    fn unsupported(&self, node: &Descriptor, above: &[Step]) -> Option<String> {
        let (key, value) = (node.key(), node.value().unwrap_or_default());
        let stars = value.matches('*').count();
        if key.contains('*') {
            Some("wildcards in keys are not supported".to_owned())
        } else if stars > 1 || (stars == 1 && !value.ends_with('*')) {
            Some(
                "only a \"*\" at the end of a value is supported; a node without a value applies instead"
                    .to_owned(),
            )
        } else if key == DOMAIN {
            Some("the key domain is reserved for the request's domain".to_owned())
        } else if above.iter().any(|step| step.key == key) {
            Some(format!("a request can have {key:?} only once"))
        } else if key.len() > MAX_LABEL_NAME || value.len() > MAX_LABEL_VALUE {
            Some(format!("a key is limited to {MAX_LABEL_NAME} bytes and a value to {MAX_LABEL_VALUE}"))
        } else if above.len() == MAX_PER {
            Some(format!("a rule can count by at most {MAX_PER} entries"))
        } else {
            None
        }
    }

    /// Converts a node to a rule, if it has a limit.
    fn limit(&mut self, node: &Descriptor, steps: &[Step], place: &str) -> Result<(), String> {
        let Some(limit) = &node.rate_limit else { return Ok(()) };
        let (is_unlimited, replaces) = self.checked(limit)?;
        let mut remarks = Vec::new();
        if !replaces.is_empty() {
            remarks.push(format!(
                "{place}: replaces {} is not supported: both limits apply",
                replaces.join(", ")
            ));
        }
        if is_unlimited {
            // unlimited values are excluded from the other rules
            self.imported.skipped.extend(remarks);
            return Ok(());
        }
        let window = limit.window().map_err(|message| self.error(&message))?;
        if node.is_quota() {
            remarks.push(format!(
                "{place}: quota_mode is not supported: the rule denies independently of other rules"
            ));
        }
        if node.has_metadata() {
            remarks.push(format!("{place}: metadata is not supported and not sent"));
        }
        if node.has_metric_settings() {
            remarks.push(format!(
                "{place}: detailed_metric and value_to_metric are not supported: metrics are named after the rule"
            ));
        }
        if limit.amount() > MAX_AMOUNT {
            remarks
                .push(format!("{place}: amount {} is above the maximum, using {MAX_AMOUNT}", limit.amount()));
        }
        let given = limit.name().map(str::to_owned);
        let name = given.unwrap_or_else(|| place.to_owned());
        self.imported.rules.push(ImportedRule {
            name,
            domain: self.domain.name.clone(),
            keys: steps.iter().map(|step| step.key.clone()).collect(),
            when: steps.iter().filter_map(Step::condition).collect(),
            unless: steps
                .iter()
                .filter(|step| !step.unless.is_empty())
                .map(|step| (step.key.clone(), step.unless.clone()))
                .collect(),
            per: steps
                .iter()
                .filter(|step| step.is_counted_separately())
                .map(|step| step.key.clone())
                .collect(),
            amount: limit.amount().clamp(1, MAX_AMOUNT),
            window,
            is_shadow: node.is_shadow(),
            is_blocked: limit.amount() == 0,
            remarks,
        });
        Ok(())
    }

    /// Reports errors of a skipped node and its children.
    fn check(&self, node: &Descriptor) -> Result<(), String> {
        if let Some(limit) = &node.rate_limit
            && !self.checked(limit)?.0
        {
            limit.window().map_err(|message| self.error(&message))?;
        }
        node.children().iter().try_for_each(|child| self.check(child))
    }

    fn checked<'l>(&self, limit: &'l RateLimit) -> Result<(bool, Vec<&'l str>), String> {
        let replaces = limit.replaces().map_err(|message| self.error(&message))?;
        let is_unlimited = limit.is_unlimited().map_err(|message| self.error(&message))?;
        Ok((is_unlimited, replaces))
    }

    /// The original joins keys and values by `_`, so that some nodes also match entries with another key.
    fn note_collisions(&mut self, nodes: &[Descriptor], above: &[Step]) {
        let keys: BTreeSet<&str> = nodes.iter().map(Descriptor::key).collect();
        for node in nodes {
            let (joined, place) = (flattened(node), self.place(above, node));
            let is_shorter =
                |key: &&&str| node.key().strip_prefix(**key).is_some_and(|rest| rest.starts_with('_'));
            if let Some(key) = keys.iter().find(is_shorter) {
                let value = one_line(&joined[key.len() + 1..]);
                self.imported.skipped.push(format!(
                    "{place}: envoyproxy/ratelimit also matches an entry {key}={value}; sluicegate does not join keys and values"
                ));
            }
        }
    }

    fn error(&self, message: &str) -> String {
        format!("{}: {message}", self.domain.file.display())
    }

    /// The path to a node, on one line.
    fn path(&self, steps: &[Step]) -> String {
        let mut path = self.domain.name.clone();
        for step in steps {
            path.push_str(&format!("/{}", step.key));
            if let Matcher::Value(value) | Matcher::Wildcard { pattern: value, .. } = &step.value {
                path.push_str(&format!("={value}"));
            }
        }
        one_line(&path)
    }

    fn place(&self, above: &[Step], node: &Descriptor) -> String {
        let own = node.value().map(|value| format!("={value}")).unwrap_or_default();
        one_line(&format!("{}/{}{own}", self.path(above), node.key()))
    }
}

fn one_line(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

impl Step {
    /// The `when` condition, unless the `per` label implies it.
    fn condition(&self) -> Option<(String, String)> {
        let pattern = match &self.value {
            Matcher::Value(value) => value,
            Matcher::Wildcard { pattern, is_shared } if *is_shared || pattern != ANY => pattern,
            Matcher::Wildcard { .. } | Matcher::Rest => return None,
        };
        Some((self.key.clone(), pattern.clone()))
    }

    fn is_counted_separately(&self) -> bool {
        match &self.value {
            Matcher::Value(_) => false,
            Matcher::Wildcard { is_shared, .. } => !is_shared,
            Matcher::Rest => true,
        }
    }
}

/// Joins key and value as the original does.
pub(super) fn flattened(node: &Descriptor) -> String {
    match node.value() {
        Some(value) => format!("{}_{value}", node.key()),
        None => node.key().to_owned(),
    }
}

fn matcher(node: &Descriptor) -> Matcher {
    match node.value() {
        None => Matcher::Rest,
        Some(value) if value.contains('*') => {
            Matcher::Wildcard { pattern: value.to_owned(), is_shared: node.is_shared() }
        }
        Some(value) => Matcher::Value(value.to_owned()),
    }
}

/// The patterns of sibling nodes that take precedence over this one and overlap with it.
fn preceding_patterns(node: &Descriptor, level: &[Descriptor], at: usize) -> Vec<String> {
    let siblings =
        level.iter().enumerate().filter(|(other, sibling)| *other != at && sibling.key() == node.key());
    let patterns = siblings.filter_map(|(other, sibling)| Some((other, sibling.value()?)));
    let preceding = patterns.filter(|(other, pattern)| match node.value() {
        None => is_supported(pattern),
        Some(own) => match own.strip_suffix('*') {
            None => false,
            Some(prefix) if pattern.contains('*') => {
                let begins = pattern.trim_end_matches('*');
                *other < at
                    && is_supported(pattern)
                    && (begins.starts_with(prefix) || prefix.starts_with(begins))
            }
            Some(prefix) => pattern.starts_with(prefix),
        },
    });
    preceding.map(|(_, pattern)| pattern.to_owned()).collect()
}

/// Whether the pattern `first` matches everything that `value` matches.
fn covers(first: &str, value: &Matcher) -> bool {
    match (first.strip_suffix('*'), value) {
        (Some(first), Matcher::Wildcard { pattern, .. }) => pattern.starts_with(first),
        (Some(first), Matcher::Rest) => first.is_empty(),
        _ => false,
    }
}

/// Whether a pattern is supported: a value or a prefix.
fn is_supported(pattern: &str) -> bool {
    pattern.strip_suffix('*').unwrap_or(pattern).matches('*').count() == 0
}

/// In the original, entries have an order. Rules that differ only in the order match the same requests here.
fn note_order_differences(imported: &mut Imported) {
    let mut seen: HashMap<(String, BTreeSet<String>), Vec<String>> = HashMap::new();
    for rule in &mut imported.rules {
        let which = (rule.domain.clone(), rule.keys.iter().cloned().collect());
        let first = seen.entry(which).or_insert_with(|| rule.keys.clone());
        if *first != rule.keys {
            let (one, other) = (first.join(", "), rule.keys.join(", "));
            rule.remarks.push(format!(
                "{}: the order of entries is ignored: a request with {one} matches this rule like one with {other}",
                rule.name
            ));
        }
    }
}

/// Makes names unique and replaces characters that names cannot contain.
fn make_names_unique(rules: &mut [ImportedRule]) {
    let mut taken = HashSet::new();
    for rule in rules {
        let printable = |c: char| if c == ' ' || c.is_ascii_graphic() { c } else { '?' };
        let wanted: String = rule.name.chars().map(printable).take(MAX_RULE_NAME).collect();
        let numbered = (2..).map(|number| {
            let ending = format!("-{number}");
            format!("{}{ending}", &wanted[..wanted.len().min(MAX_RULE_NAME - ending.len())])
        });
        let free = std::iter::once(wanted.clone()).chain(numbered).find(|name| !taken.contains(name));
        rule.name = free.expect("the numbering is unbounded");
        taken.insert(rule.name.clone());
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::rules::import::envoy::parse;

    fn imported(yaml: &str) -> Imported {
        rules(&[parse(Path::new("a.yaml"), &format!("domain: d\ndescriptors:\n{yaml}")).unwrap()]).unwrap()
    }

    fn import_error(yaml: &str) -> String {
        rules(&[parse(Path::new("a.yaml"), &format!("domain: d\ndescriptors:\n{yaml}")).unwrap()])
            .unwrap_err()
    }

    /// Name, when, unless and per of a rule.
    fn summary(rule: &ImportedRule) -> String {
        format!("{} when {:?} unless {:?} per {:?}", rule.name, rule.when, rule.unless, rule.per)
    }

    const LIMIT: &str = "rate_limit: {unit: minute, requests_per_unit: 5}";

    #[test]
    fn values_become_when_and_values_of_siblings_become_unless() {
        let imported = imported(&format!(
            "- {{key: a, value: x, {LIMIT}}}\n- {{key: a, value: y}}\n- {{key: a, value: z*, {LIMIT}}}\n- {{key: a, {LIMIT}}}\n"
        ));
        let rules: Vec<_> = imported.rules.iter().map(summary).collect();
        assert_eq!(
            rules,
            [
                r#"d/a=x when [("a", "x")] unless [] per []"#,
                r#"d/a=z* when [("a", "z*")] unless [] per ["a"]"#,
                r#"d/a when [] unless [("a", ["x", "y", "z*"])] per ["a"]"#,
            ]
        );
        assert_eq!(imported.remarks().count(), 0);
    }

    #[test]
    fn values_precede_wildcards_and_the_first_wildcard_wins() {
        let imported = imported(&format!(
            "- {{key: a, value: xy*, share_threshold: true, {LIMIT}}}\n- {{key: a, value: x*, {LIMIT}}}\n- {{key: a, value: xz}}\n\
             - {{key: a, value: q, {LIMIT}}}\n- {{key: a, value: xyz*, {LIMIT}}}\n"
        ));
        let rules: Vec<_> = imported.rules.iter().map(summary).collect();
        assert_eq!(
            rules,
            [
                r#"d/a=xy* when [("a", "xy*")] unless [] per []"#,
                r#"d/a=x* when [("a", "x*")] unless [("a", ["xy*", "xz"])] per ["a"]"#,
                r#"d/a=q when [("a", "q")] unless [] per []"#,
            ]
        );
        let remarks: Vec<_> = imported.remarks().collect();
        assert!(
            remarks.len() == 1
                && remarks[0].starts_with("d/a=xyz*: skipped: unreachable in the original too"),
            "{remarks:?}"
        );
    }

    #[test]
    fn child_nodes_have_the_conditions_of_their_path() {
        let imported = imported(&format!(
            "- key: a\n  value: x\n  descriptors:\n  - {{key: b, {LIMIT}}}\n  - {{key: b, value: v, rate_limit: {{unlimited: true}}}}\n\
             - key: a\n  descriptors:\n  - {{key: b, {LIMIT}}}\n"
        ));
        let rules: Vec<_> = imported.rules.iter().map(summary).collect();
        assert_eq!(
            rules,
            [
                r#"d/a=x/b when [("a", "x")] unless [("b", ["v"])] per ["b"]"#,
                r#"d/a/b when [] unless [("a", ["x"])] per ["a", "b"]"#,
            ]
        );
    }

    #[test]
    fn unsupported_settings_are_reported() {
        let table = [
            (format!("- {{key: a, value: '*x', {LIMIT}}}"), "only a \"*\" at the end"),
            (format!("- {{key: a, value: 'x*y*', {LIMIT}}}"), "only a \"*\" at the end"),
            (format!("- {{key: 'a*', {LIMIT}}}"), "wildcards in keys"),
            (format!("- {{key: domain, {LIMIT}}}"), "the key domain is reserved"),
            (format!("- {{key: a, descriptors: [{{key: a, {LIMIT}}}]}}"), "can have \"a\" only once"),
            (format!("- {{key: a, quota_mode: true, {LIMIT}}}"), "quota_mode"),
            (format!("- {{key: a, metadata: {{x: 1.5}}, {LIMIT}}}"), "metadata"),
            (format!("- {{key: a, detailed_metric: true, {LIMIT}}}"), "detailed_metric"),
            (
                "- {key: a, rate_limit: {unit: day, requests_per_unit: 5, replaces: [{name: b}]}}".to_owned(),
                "replaces b",
            ),
            ("- {key: a, rate_limit: {unlimited: true, replaces: [{name: b}]}}".to_owned(), "replaces b"),
            (
                "- {key: a, rate_limit: {unit: day, requests_per_unit: 4294967295}}".to_owned(),
                "using 1000000000",
            ),
            (
                format!("- {{key: a_b, {LIMIT}}}\n- {{key: a, {LIMIT}}}"),
                "d/a_b: envoyproxy/ratelimit also matches an entry a=b",
            ),
            (
                format!(
                    "- {{key: a, descriptors: [{{key: b, {LIMIT}}}]}}\n- {{key: b, descriptors: [{{key: a, {LIMIT}}}]}}"
                ),
                "the order of entries is ignored",
            ),
        ];
        for (yaml, part) in table {
            let imported = imported(&yaml);
            let remarks: Vec<_> = imported.remarks().collect();
            assert!(remarks.len() == 1 && remarks[0].contains(part), "{yaml}: {remarks:?}");
        }
    }

    #[test]
    fn invalid_descriptors_are_rejected_with_envoys_messages() {
        let table = [
            ("- {value: x}", "a.yaml: descriptor has empty key"),
            ("- {key: a}\n- {key: a}", "a.yaml: duplicate descriptor composite key 'd.a'"),
            ("- {key: a_b}\n- {key: a, value: b}", "a.yaml: duplicate descriptor composite key 'd.a_b'"),
            ("- {key: a, rate_limit: {unit: foo}}", "a.yaml: invalid rate limit unit 'foo'"),
            ("- {key: a, value: '*x', rate_limit: {unit: foo}}", "a.yaml: invalid rate limit unit 'foo'"),
            (
                "- {key: a, rate_limit: {unit: day, unlimited: true}}",
                "a.yaml: should not specify rate limit unit when unlimited",
            ),
            (
                "- {key: a, value: b, share_threshold: true}",
                "a.yaml: share_threshold can only be used with wildcard values",
            ),
        ];
        for (yaml, start) in table {
            let error = import_error(yaml);
            assert!(error.starts_with(start), "{error}");
        }
    }

    #[test]
    fn rule_names_are_unique() {
        let named = |key: &str, name: &str| {
            format!("- {{key: {key}, rate_limit: {{unit: day, requests_per_unit: 1, name: {name}}}}}\n")
        };
        let long = "x".repeat(200);
        let yaml = [named("a", "n"), named("b", "n"), named("c", "ü"), named("d", &long), named("e", &long)]
            .concat();
        let names: Vec<_> = imported(&yaml).rules.into_iter().map(|rule| rule.name).collect();
        let cut = |ending: &str| format!("{}{ending}", "x".repeat(MAX_RULE_NAME - ending.len()));
        assert_eq!(names, ["n".to_owned(), "n-2".to_owned(), "?".to_owned(), cut(""), cut("-2")]);
    }
}
