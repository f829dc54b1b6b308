//! Extraction of labels from log records, normalized as in the server.
//!
//! A label is read from the field of its name or of `--field`, or derived by `--label`. Labels that no rule uses are omitted, so that
//! `exact` rules apply as if clients sent only the needed labels.

use std::{collections::BTreeMap, str::FromStr};

use sluicegate::label_policy::{ADDRESS_LABELS, LabelPolicy, LabelSettings};
use sluicegate::{
    Labels, Rule,
    labels::{LabelError, MAX_LABEL_VALUE},
    rules::Pattern,
};

use super::log::{Fields, Record};

/// The maximum number of patterns evaluated per label: one bit each.
const MAX_PATTERNS: usize = 64;

/// The labels that forward-auth derives from requests and truncates if they are too long.
const TRUNCATED: [&str; 3] = ["method", "path", "host"];

/// `--field label=name`: a label and its field in the log.
#[derive(Clone, Debug)]
pub(crate) struct FieldFlag {
    label: String,
    name: String,
}

/// `--label 'route=login when path=/login* method=POST'`: a label, its value, and its conditions.
#[derive(Clone, Debug)]
pub(crate) struct LabelFlag {
    label: String,
    value: String,
    when: Vec<(String, Pattern)>,
}

impl FromStr for FieldFlag {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (label, name) = pair(text).ok_or("use label=field, for example ip=client_address")?;
        Ok(Self { label: label.to_owned(), name: name.to_owned() })
    }
}

impl FromStr for LabelFlag {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        const HINT: &str = "use label=value, or for example 'route=login when path=/login* method=POST'";
        let (assignment, when) = text.split_once(" when ").unwrap_or((text, ""));
        let (label, value) = pair(assignment.trim()).ok_or(HINT)?;
        // a misspelt or incomplete "when"
        if value.contains(char::is_whitespace) {
            return Err(HINT.to_owned());
        }
        let when = when.split_whitespace().map(|one| {
            let (label, pattern) = pair(one).ok_or(HINT)?;
            // as in a rule, an address may be a network
            let network = if ADDRESS_LABELS.contains(&label) { Pattern::network(pattern).ok() } else { None };
            Ok((label.to_owned(), network.unwrap_or_else(|| Pattern::parse(pattern))))
        });
        let when = when.collect::<Result<_, &str>>()?;
        Ok(Self { label: label.to_owned(), value: value.to_owned(), when })
    }
}

fn pair(text: &str) -> Option<(&str, &str)> {
    text.split_once('=').filter(|(label, value)| !label.is_empty() && !value.is_empty())
}

/// Extracts the labels of one rule file.
#[derive(Debug)]
pub(super) struct LabelExtractor {
    labels: Vec<Label>,
    policy: LabelPolicy,
}

#[derive(Debug)]
struct Label {
    name: String,
    source: LabelSource,
    settings: Option<LabelSettings>,
    relevance: Relevance,
    /// Whether any request has had it.
    seen: bool,
}

/// The part of a label that determines which rules and overrides apply.
#[derive(Clone, Debug)]
enum Relevance {
    /// Its presence, and which of these patterns it matches.
    Patterns(Vec<Pattern>),
    /// Its value, because there are too many patterns.
    Value,
}

#[derive(Debug)]
enum LabelSource {
    Field(usize),
    /// The first match applies.
    Derived(Vec<Derived>),
}

/// A derived value and its conditions on fields.
#[derive(Debug)]
struct Derived {
    value: Box<[u8]>,
    when: Vec<(usize, Pattern)>,
}

/// The labels of one request, in reusable buffers.
#[derive(Debug, Default)]
pub(super) struct LabelRow {
    bytes: Vec<u8>,
    values: Vec<Option<(usize, usize)>>,
}

impl LabelExtractor {
    /// Collects the labels of rules and flags, and registers their fields.
    pub(super) fn new<'r>(
        rules: impl Iterator<Item = &'r Rule>,
        policy: LabelPolicy,
        given: &[FieldFlag],
        derived: &[LabelFlag],
        fields: &mut Fields,
    ) -> Self {
        let mut named: BTreeMap<&str, Relevance> = BTreeMap::new();
        for label in given.iter().map(|flag| &*flag.label).chain(derived.iter().map(|flag| &*flag.label)) {
            named.entry(label).or_default();
        }
        for rule in rules {
            for label in &rule.per {
                named.entry(label).or_default();
            }
            let conditions =
                [&rule.when, &rule.unless].into_iter().chain(rule.overrides.iter().map(|other| &other.when));
            for (label, pattern) in conditions.flat_map(|condition| condition.pairs()) {
                named.entry(label).or_default().add(pattern);
            }
        }
        let field_of = |label: &str| given.iter().find(|flag| flag.label == label).map(|flag| &*flag.name);
        let labels = named.into_iter().map(|(name, relevance)| {
            let flags: Vec<_> = derived.iter().filter(|flag| flag.label == name).collect();
            let source = if flags.is_empty() {
                LabelSource::Field(fields.label(name, field_of(name)))
            } else {
                let values = flags.into_iter().map(|flag| Derived {
                    value: flag.value.as_bytes().into(),
                    when: flag
                        .when
                        .iter()
                        .map(|(label, pattern)| (fields.label(label, field_of(label)), pattern.clone()))
                        .collect(),
                });
                LabelSource::Derived(values.collect())
            };
            let settings = policy.label(name).cloned();
            Label { name: name.to_owned(), source, settings, relevance, seen: false }
        });
        let labels = labels.collect();
        Self { labels, policy }
    }

    /// The position of a label.
    pub(super) fn position(&self, name: &str) -> Option<usize> {
        self.labels.iter().position(|label| label.name == name)
    }

    pub(super) fn name(&self, position: usize) -> &str {
        &self.labels[position].name
    }

    /// Whether any request has had this label.
    pub(super) fn has_seen(&self, name: &str) -> bool {
        self.labels.iter().any(|label| label.name == name && label.seen)
    }

    /// Extracts the labels of a record.
    ///
    /// # Errors
    /// If the server would reject them.
    #[inline]
    pub(super) fn read(&mut self, record: &Record, row: &mut LabelRow) -> Result<(), String> {
        row.bytes.clear();
        row.values.clear();
        for label in &mut self.labels {
            let value = match &label.source {
                LabelSource::Field(slot) => record.get(*slot),
                LabelSource::Derived(ways) => {
                    ways.iter().find(|made| made.applies(record)).map(|made| &*made.value)
                }
            };
            let Some(mut value) = value else {
                row.values.push(None);
                continue;
            };
            label.seen = true;
            if value.len() > MAX_LABEL_VALUE {
                if !TRUNCATED.contains(&&*label.name) {
                    let (name, length) = (label.name.clone(), value.len());
                    return Err(LabelError::ValueTooLong { name, length }.to_string());
                }
                value = &value[..MAX_LABEL_VALUE];
            }
            let start = row.bytes.len();
            match &label.settings {
                Some(settings) => {
                    let cleaned = self.policy.cleaned(settings, value).map_err(|error| error.to_string())?;
                    row.bytes.extend_from_slice(&cleaned);
                }
                None => row.bytes.extend_from_slice(value),
            }
            row.values.push(Some((start, row.bytes.len())));
        }
        Ok(())
    }

    /// Writes everything that determines which rules and overrides apply.
    #[inline]
    pub(super) fn write_matched(&self, row: &LabelRow, into: &mut Vec<u8>) {
        for (position, label) in self.labels.iter().enumerate() {
            match (row.get(position), &label.relevance) {
                (None, _) => into.push(0),
                (Some(_), Relevance::Patterns(patterns)) if patterns.is_empty() => into.push(1),
                (Some(value), Relevance::Patterns(patterns)) => {
                    let matches = patterns
                        .iter()
                        .rev()
                        .fold(0_u64, |bits, pattern| bits << 1 | u64::from(pattern.matches(value)));
                    into.push(1);
                    into.extend_from_slice(&matches.to_le_bytes());
                }
                (Some(value), Relevance::Value) => write_value(value, into),
            }
        }
    }

    /// The labels of a request, for matching.
    pub(super) fn labels(&self, row: &LabelRow) -> Result<Labels, LabelError> {
        let pairs = self.labels.iter().enumerate();
        Labels::new(pairs.filter_map(|(position, label)| Some((&*label.name, row.get(position)?))))
    }
}

impl Default for Relevance {
    fn default() -> Self {
        Self::Patterns(Vec::new())
    }
}

impl Relevance {
    fn add(&mut self, pattern: &Pattern) {
        let Self::Patterns(patterns) = self else { return };
        if patterns.contains(pattern) {
            return;
        }
        if patterns.len() < MAX_PATTERNS {
            patterns.push(pattern.clone());
        } else {
            *self = Self::Value;
        }
    }
}

impl Derived {
    fn applies(&self, record: &Record) -> bool {
        self.when.iter().all(|(slot, pattern)| record.get(*slot).is_some_and(|value| pattern.matches(value)))
    }
}

impl LabelRow {
    #[inline]
    pub(super) fn get(&self, position: usize) -> Option<&[u8]> {
        self.values[position].map(|(start, end)| &self.bytes[start..end])
    }
}

/// Writes a value with its length, so that concatenated values are unambiguous.
#[inline]
pub(super) fn write_value(value: &[u8], into: &mut Vec<u8>) {
    let length = u16::try_from(value.len()).expect("label values are limited to MAX_LABEL_VALUE");
    into.extend_from_slice(&[2, length.to_le_bytes()[0], length.to_le_bytes()[1]]);
    into.extend_from_slice(value);
}
