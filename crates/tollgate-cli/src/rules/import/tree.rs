//! What a tree of descriptors means, as rules; and what it means that no rule can say.
//!
//! There, the entries of a request are followed from the root. At each level one node is taken: the one with exactly this value, or
//! the first whose wildcard matches, or the one without a value; never another one later. The limit of the node at the last entry
//! counts, for each combination of values apart. Here, each node with a limit is a rule:
//!
//! * a fixed value or wildcard is in `when`, everything else in `per`;
//! * what another node of its level is taken for is in `unless`;
//! * `exact` asks for just as many entries.

use std::collections::{BTreeSet, HashMap, HashSet};

use tollgate::{
    Algorithm,
    labels::{MAX_LABEL_NAME, MAX_LABEL_VALUE},
    rules::{MAX_ALTERNATIVES, MAX_PER, MAX_RULE_NAME},
};

use super::envoy::{Descriptor, Domain, RateLimit};

/// The label that a request's domain is.
pub(super) const DOMAIN: &str = "domain";

/// The most that can be counted.
const MAX_AMOUNT: u64 = Algorithm::FixedWindow.max_amount();

/// The wildcard that every value matches.
const ANY: &str = "*";

/// What came of the files.
#[derive(Debug, Default)]
pub(super) struct Imported {
    pub(super) rules: Vec<Rule>,
    /// What could not be said by any rule.
    pub(super) lost: Vec<String>,
}

/// One rule.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Rule {
    pub(super) name: String,
    pub(super) domain: String,
    /// The keys of its entries, in their order.
    keys: Vec<String>,
    /// Further labels, each with its one pattern.
    pub(super) when: Vec<(String, String)>,
    /// Labels, each with the patterns that are excepted.
    pub(super) unless: Vec<(String, Vec<String>)>,
    pub(super) per: Vec<String>,
    pub(super) amount: u64,
    pub(super) window: &'static str,
    pub(super) is_shadow: bool,
    /// It lets nothing pass.
    pub(super) is_blocked: bool,
    /// What is not the same here.
    pub(super) remarks: Vec<String>,
}

impl Imported {
    /// Everything that is not the same here.
    pub(super) fn remarks(&self) -> impl Iterator<Item = &str> {
        let of_rules = self.rules.iter().flat_map(|rule| &rule.remarks);
        self.lost.iter().chain(of_rules).map(String::as_str)
    }

    /// The labels that the rules name.
    pub(super) fn labels(&self) -> BTreeSet<&str> {
        let mut labels = BTreeSet::new();
        for rule in &self.rules {
            labels.extend(rule.keys.iter().map(String::as_str));
        }
        labels
    }
}

/// One entry on the way to a node.
#[derive(Clone, Debug)]
struct Step {
    key: String,
    value: Matched,
    /// The patterns of other nodes that are taken instead.
    unless: Vec<String>,
}

/// What a node is taken for.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Matched {
    /// This value.
    Value(String),
    /// Values that begin so, or any; counted apart, or together where the node says so.
    Wildcard { pattern: String, is_shared: bool },
    /// Any value that no other node is taken for.
    Rest,
}

/// The rules of these domains.
pub(super) fn rules(domains: &[Domain]) -> Result<Imported, String> {
    let mut imported = Imported::default();
    for domain in domains {
        if domain.name.ends_with('*') {
            let place = domain.file.display();
            imported.lost.push(format!(
                "{place}: a domain may not end with a \"*\" here, which would be any ending: it is left out"
            ));
            continue;
        }
        let mut walk = Walk { domain, imported: &mut imported };
        walk.level(&domain.descriptors, &[])?;
    }
    note_other_orders(&mut imported);
    rename(&mut imported.rules);
    Ok(imported)
}

struct Walk<'a> {
    domain: &'a Domain,
    imported: &'a mut Imported,
}

impl Walk<'_> {
    /// The nodes of one level, below these entries.
    fn level(&mut self, nodes: &[Descriptor], above: &[Step]) -> Result<(), String> {
        let mut seen = HashSet::new();
        for node in nodes {
            if node.key().is_empty() {
                return Err(self.wrong("descriptor has empty key"));
            }
            if !seen.insert(flattened(node)) {
                let key = flattened(node);
                return Err(
                    self.wrong(&format!("duplicate descriptor composite key '{}.{key}'", self.domain.name))
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
            return Err(self.wrong(&message));
        }
        if let Some(reason) = self.impossible(node, above) {
            self.imported.lost.push(format!("{place}: {reason}"));
            // its mistakes are still mistakes
            return self.check(node);
        }
        let value = matched(node);
        let unless = instead(node, level, at);
        if unless.len() > MAX_ALTERNATIVES {
            self.imported.lost.push(format!(
                "{place}: more than {MAX_ALTERNATIVES} other values are excepted: it is left out"
            ));
            return self.check(node);
        }
        if let Some(first) = unless.iter().find(|pattern| takes_all(pattern, &value)) {
            self.imported.lost.push(format!(
                "{place}: never reached there either, as {first:?} takes all of its values: it is left out"
            ));
            return self.check(node);
        }
        let mut steps = above.to_vec();
        steps.push(Step { key: node.key().to_owned(), value, unless });
        self.limit(node, &steps, &place)?;
        self.level(node.below(), &steps)
    }

    /// Why no rule can say what a node says, nor what is below it.
    fn impossible(&self, node: &Descriptor, above: &[Step]) -> Option<String> {
        let (key, value) = (node.key(), node.value().unwrap_or_default());
        let stars = value.matches('*').count();
        if key.contains('*') {
            Some("a wildcard in a key is not known here: it is left out".to_owned())
        } else if stars > 1 || (stars == 1 && !value.ends_with('*')) {
            Some("only a \"*\" at the end of a value is known here: it is left out, and a node without a value takes its place".to_owned())
        } else if key == DOMAIN {
            Some("an entry may not be called domain here, as this is what the request's domain is called: it is left out".to_owned())
        } else if above.iter().any(|step| step.key == key) {
            Some(format!("a request may have {key:?} only once here: it is left out"))
        } else if key.len() > MAX_LABEL_NAME || value.len() > MAX_LABEL_VALUE {
            Some(format!(
                "a key has at most {MAX_LABEL_NAME} bytes here, and a value {MAX_LABEL_VALUE}: it is left out"
            ))
        } else if above.len() == MAX_PER {
            Some(format!("a rule counts by at most {MAX_PER} entries here: it is left out"))
        } else {
            None
        }
    }

    /// Makes a rule of a node, if it has a limit.
    fn limit(&mut self, node: &Descriptor, steps: &[Step], place: &str) -> Result<(), String> {
        let Some(limit) = &node.rate_limit else { return Ok(()) };
        let (is_unlimited, replaces) = self.checked(limit)?;
        let mut remarks = Vec::new();
        if !replaces.is_empty() {
            remarks.push(format!(
                "{place}: replaces {} is not known here: both limits apply",
                replaces.join(", ")
            ));
        }
        if is_unlimited {
            // what has no limit is what other rules except
            self.imported.lost.extend(remarks);
            return Ok(());
        }
        let window = limit.window().map_err(|message| self.wrong(&message))?;
        if node.is_quota() {
            remarks.push(format!("{place}: quota_mode is not known here: it refuses by itself"));
        }
        if node.has_metadata() {
            remarks.push(format!("{place}: metadata is not known here, and not sent"));
        }
        if node.names_metrics() {
            remarks.push(format!("{place}: detailed_metric and value_to_metric are not known here: metrics have the rule's name"));
        }
        if limit.amount() > MAX_AMOUNT {
            remarks.push(format!(
                "{place}: {} is more than can be counted here: it is {MAX_AMOUNT}",
                limit.amount()
            ));
        }
        let given = limit.name().map(str::to_owned);
        let name = given.unwrap_or_else(|| place.to_owned());
        self.imported.rules.push(Rule {
            name,
            domain: self.domain.name.clone(),
            keys: steps.iter().map(|step| step.key.clone()).collect(),
            when: steps.iter().filter_map(Step::asked).collect(),
            unless: steps
                .iter()
                .filter(|step| !step.unless.is_empty())
                .map(|step| (step.key.clone(), step.unless.clone()))
                .collect(),
            per: steps.iter().filter(|step| step.is_counted_apart()).map(|step| step.key.clone()).collect(),
            amount: limit.amount().clamp(1, MAX_AMOUNT),
            window,
            is_shadow: node.is_shadow(),
            is_blocked: limit.amount() == 0,
            remarks,
        });
        Ok(())
    }

    /// What is wrong with a node that is left out, and with those below it.
    fn check(&self, node: &Descriptor) -> Result<(), String> {
        if let Some(limit) = &node.rate_limit
            && !self.checked(limit)?.0
        {
            limit.window().map_err(|message| self.wrong(&message))?;
        }
        node.below().iter().try_for_each(|below| self.check(below))
    }

    fn checked<'l>(&self, limit: &'l RateLimit) -> Result<(bool, Vec<&'l str>), String> {
        let replaces = limit.replaces().map_err(|message| self.wrong(&message))?;
        let is_unlimited = limit.is_unlimited().map_err(|message| self.wrong(&message))?;
        Ok((is_unlimited, replaces))
    }

    /// There, keys and values are joined by `_`, so that some nodes are also taken for entries that mean something else.
    fn note_collisions(&mut self, nodes: &[Descriptor], above: &[Step]) {
        let keys: BTreeSet<&str> = nodes.iter().map(Descriptor::key).collect();
        for node in nodes {
            let (joined, place) = (flattened(node), self.place(above, node));
            let is_shorter =
                |key: &&&str| node.key().strip_prefix(**key).is_some_and(|rest| rest.starts_with('_'));
            if let Some(key) = keys.iter().find(is_shorter) {
                let value = one_line(&joined[key.len() + 1..]);
                self.imported.lost.push(format!(
                    "{place}: there, an entry {key}={value} is taken for it too; here keys and values are told apart"
                ));
            }
        }
    }

    fn wrong(&self, message: &str) -> String {
        format!("{}: {message}", self.domain.file.display())
    }

    /// The way to a node, in one line.
    fn path(&self, steps: &[Step]) -> String {
        let mut path = self.domain.name.clone();
        for step in steps {
            path.push_str(&format!("/{}", step.key));
            if let Matched::Value(value) | Matched::Wildcard { pattern: value, .. } = &step.value {
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
    /// What the entry must look like, where counting by it does not say enough.
    fn asked(&self) -> Option<(String, String)> {
        let pattern = match &self.value {
            Matched::Value(value) => value,
            Matched::Wildcard { pattern, is_shared } if *is_shared || pattern != ANY => pattern,
            Matched::Wildcard { .. } | Matched::Rest => return None,
        };
        Some((self.key.clone(), pattern.clone()))
    }

    fn is_counted_apart(&self) -> bool {
        match &self.value {
            Matched::Value(_) => false,
            Matched::Wildcard { is_shared, .. } => !is_shared,
            Matched::Rest => true,
        }
    }
}

/// Key and value as they are joined there.
pub(super) fn flattened(node: &Descriptor) -> String {
    match node.value() {
        Some(value) => format!("{}_{value}", node.key()),
        None => node.key().to_owned(),
    }
}

fn matched(node: &Descriptor) -> Matched {
    match node.value() {
        None => Matched::Rest,
        Some(value) if value.contains('*') => {
            Matched::Wildcard { pattern: value.to_owned(), is_shared: node.is_shared() }
        }
        Some(value) => Matched::Value(value.to_owned()),
    }
}

/// The patterns of the nodes that are taken before this one, where both could be.
fn instead(node: &Descriptor, level: &[Descriptor], at: usize) -> Vec<String> {
    let siblings =
        level.iter().enumerate().filter(|(other, sibling)| *other != at && sibling.key() == node.key());
    let patterns = siblings.filter_map(|(other, sibling)| Some((other, sibling.value()?)));
    let taken_before = patterns.filter(|(other, pattern)| match node.value() {
        None => is_known(pattern),
        Some(own) => match own.strip_suffix('*') {
            None => false,
            Some(prefix) if pattern.contains('*') => {
                let begins = pattern.trim_end_matches('*');
                *other < at && is_known(pattern) && (begins.starts_with(prefix) || prefix.starts_with(begins))
            }
            Some(prefix) => pattern.starts_with(prefix),
        },
    });
    taken_before.map(|(_, pattern)| pattern.to_owned()).collect()
}

/// Whether nothing is left of `value` where this pattern is taken first.
fn takes_all(first: &str, value: &Matched) -> bool {
    match (first.strip_suffix('*'), value) {
        (Some(first), Matched::Wildcard { pattern, .. }) => pattern.starts_with(first),
        (Some(first), Matched::Rest) => first.is_empty(),
        _ => false,
    }
}

/// Whether a pattern can be said here: a value, or a prefix.
fn is_known(pattern: &str) -> bool {
    pattern.strip_suffix('*').unwrap_or(pattern).matches('*').count() == 0
}

/// There, entries have an order. Rules that differ in it alone are met by the same requests here.
fn note_other_orders(imported: &mut Imported) {
    let mut seen: HashMap<(String, BTreeSet<String>), Vec<String>> = HashMap::new();
    for rule in &mut imported.rules {
        let which = (rule.domain.clone(), rule.keys.iter().cloned().collect());
        let first = seen.entry(which).or_insert_with(|| rule.keys.clone());
        if *first != rule.keys {
            let (one, other) = (first.join(", "), rule.keys.join(", "));
            rule.remarks.push(format!(
                "{}: the order of entries does not matter here: a request with {one} meets this rule as one with {other} does",
                rule.name
            ));
        }
    }
}

/// Gives every rule a name of its own, of characters that a name may have.
fn rename(rules: &mut [Rule]) {
    let mut taken = HashSet::new();
    for rule in rules {
        let printable = |c: char| if c == ' ' || c.is_ascii_graphic() { c } else { '?' };
        let wanted: String = rule.name.chars().map(printable).take(MAX_RULE_NAME).collect();
        let numbered = (2..).map(|number| {
            let ending = format!("-{number}");
            format!("{}{ending}", &wanted[..wanted.len().min(MAX_RULE_NAME - ending.len())])
        });
        let free = std::iter::once(wanted.clone()).chain(numbered).find(|name| !taken.contains(name));
        rule.name = free.expect("there is always a further number");
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

    fn refused(yaml: &str) -> String {
        rules(&[parse(Path::new("a.yaml"), &format!("domain: d\ndescriptors:\n{yaml}")).unwrap()])
            .unwrap_err()
    }

    /// A rule in short: its name, when, unless, per.
    fn short(rule: &Rule) -> String {
        format!("{} when {:?} unless {:?} per {:?}", rule.name, rule.when, rule.unless, rule.per)
    }

    const LIMIT: &str = "rate_limit: {unit: minute, requests_per_unit: 5}";

    #[test]
    fn a_value_is_in_when_and_what_others_take_in_unless() {
        let imported = imported(&format!(
            "- {{key: a, value: x, {LIMIT}}}\n- {{key: a, value: y}}\n- {{key: a, value: z*, {LIMIT}}}\n- {{key: a, {LIMIT}}}\n"
        ));
        let rules: Vec<_> = imported.rules.iter().map(short).collect();
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
    fn the_first_wildcard_in_the_file_wins_and_values_win_over_both() {
        let imported = imported(&format!(
            "- {{key: a, value: xy*, share_threshold: true, {LIMIT}}}\n- {{key: a, value: x*, {LIMIT}}}\n- {{key: a, value: xz}}\n\
             - {{key: a, value: q, {LIMIT}}}\n- {{key: a, value: xyz*, {LIMIT}}}\n"
        ));
        let rules: Vec<_> = imported.rules.iter().map(short).collect();
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
            remarks.len() == 1 && remarks[0].starts_with("d/a=xyz*: never reached there either"),
            "{remarks:?}"
        );
    }

    #[test]
    fn nodes_below_have_what_leads_to_them() {
        let imported = imported(&format!(
            "- key: a\n  value: x\n  descriptors:\n  - {{key: b, {LIMIT}}}\n  - {{key: b, value: v, rate_limit: {{unlimited: true}}}}\n\
             - key: a\n  descriptors:\n  - {{key: b, {LIMIT}}}\n"
        ));
        let rules: Vec<_> = imported.rules.iter().map(short).collect();
        assert_eq!(
            rules,
            [
                r#"d/a=x/b when [("a", "x")] unless [("b", ["v"])] per ["b"]"#,
                r#"d/a/b when [] unless [("a", ["x"])] per ["a", "b"]"#,
            ]
        );
    }

    #[test]
    fn what_no_rule_can_say_is_told() {
        let table = [
            (format!("- {{key: a, value: '*x', {LIMIT}}}"), "only a \"*\" at the end"),
            (format!("- {{key: a, value: 'x*y*', {LIMIT}}}"), "only a \"*\" at the end"),
            (format!("- {{key: 'a*', {LIMIT}}}"), "a wildcard in a key"),
            (format!("- {{key: domain, {LIMIT}}}"), "may not be called domain"),
            (format!("- {{key: a, descriptors: [{{key: a, {LIMIT}}}]}}"), "may have \"a\" only once"),
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
                "it is 1000000000",
            ),
            (
                format!("- {{key: a_b, {LIMIT}}}\n- {{key: a, {LIMIT}}}"),
                "d/a_b: there, an entry a=b is taken for it too",
            ),
            (
                format!(
                    "- {{key: a, descriptors: [{{key: b, {LIMIT}}}]}}\n- {{key: b, descriptors: [{{key: a, {LIMIT}}}]}}"
                ),
                "the order of entries does not matter here",
            ),
        ];
        for (yaml, part) in table {
            let imported = imported(&yaml);
            let remarks: Vec<_> = imported.remarks().collect();
            assert!(remarks.len() == 1 && remarks[0].contains(part), "{yaml}: {remarks:?}");
        }
    }

    #[test]
    fn what_envoy_refuses_is_refused_in_its_words() {
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
            let refusal = refused(yaml);
            assert!(refusal.starts_with(start), "{refusal}");
        }
    }

    #[test]
    fn every_rule_has_a_name_of_its_own() {
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
