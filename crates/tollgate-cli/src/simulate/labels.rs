//! From a record to the labels that a rule file's rules name, cleaned as the server cleans them.
//!
//! A label is read from the field of its name, from where `--field` says, or is made up by `--label`. What no rule names is not
//! there, so that rules with `exact` apply as they do to callers who send what is needed.

use std::{collections::BTreeMap, str::FromStr};

use tollgate::{LabelError, Labels, Pattern, Rule, labels::MAX_LABEL_VALUE};
use tollgate_server::labels::{IP, LabelPolicy, LabelSettings};

use super::log::{Fields, Record};

/// The most patterns of a label that are tried on every value: as many as there are bits.
const MAX_PATTERNS: usize = 64;

/// The labels that forward-auth derives from requests, and cuts where they are too long.
const CUT: [&str; 3] = ["method", "path", "host"];

/// `--field label=name`: a label and the field of the log it is read from.
#[derive(Clone, Debug)]
pub(crate) struct FieldFlag {
    label: String,
    name: String,
}

/// `--label 'route=login when path=/login* method=POST'`: a label, its value, and which requests have it.
#[derive(Clone, Debug)]
pub(crate) struct LabelFlag {
    label: String,
    value: String,
    when: Vec<(String, Pattern)>,
}

impl FromStr for FieldFlag {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (label, name) = pair(text).ok_or("write label=field, for example ip=client_address")?;
        Ok(Self { label: label.to_owned(), name: name.to_owned() })
    }
}

impl FromStr for LabelFlag {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        const HINT: &str = "write label=value, or for example 'route=login when path=/login* method=POST'";
        let (said, when) = text.split_once(" when ").unwrap_or((text, ""));
        let (label, value) = pair(said.trim()).ok_or(HINT)?;
        // a word that should have been "when", or one with nothing after it
        if value.contains(char::is_whitespace) {
            return Err(HINT.to_owned());
        }
        let when = when.split_whitespace().map(|one| {
            let (label, pattern) = pair(one).ok_or(HINT)?;
            // as in a rule: an address may be a network
            let network = if label == IP { Pattern::network(pattern).ok() } else { None };
            Ok((label.to_owned(), network.unwrap_or_else(|| Pattern::parse(pattern))))
        });
        let when = when.collect::<Result<_, &str>>()?;
        Ok(Self { label: label.to_owned(), value: value.to_owned(), when })
    }
}

fn pair(text: &str) -> Option<(&str, &str)> {
    text.split_once('=').filter(|(label, value)| !label.is_empty() && !value.is_empty())
}

/// The labels of one rule file.
#[derive(Debug)]
pub(super) struct Shape {
    labels: Vec<Label>,
    policy: LabelPolicy,
}

#[derive(Debug)]
struct Label {
    name: String,
    from: From,
    settings: Option<LabelSettings>,
    matters: Matters,
    /// Some request has had it.
    seen: bool,
}

/// What of a label decides which rules apply, and with which numbers.
#[derive(Clone, Debug)]
enum Matters {
    /// Whether it is there; and which of these it matches.
    Patterns(Vec<Pattern>),
    /// Its value: there are too many patterns to try them all.
    Value,
}

#[derive(Debug)]
enum From {
    Field(usize),
    /// The first that matches.
    Made(Vec<Made>),
}

/// A value, and the fields that must look so for it.
#[derive(Debug)]
struct Made {
    value: Box<[u8]>,
    when: Vec<(usize, Pattern)>,
}

/// The labels of one request, in buffers that every request uses again.
#[derive(Debug, Default)]
pub(super) struct Row {
    bytes: Vec<u8>,
    values: Vec<Option<(usize, usize)>>,
}

impl Shape {
    /// The labels that these rules name, and those that flags name; asks for the fields they are read from.
    pub(super) fn new<'r>(
        rules: impl Iterator<Item = &'r Rule>,
        policy: LabelPolicy,
        given: &[FieldFlag],
        made: &[LabelFlag],
        fields: &mut Fields,
    ) -> Self {
        let mut named: BTreeMap<&str, Matters> = BTreeMap::new();
        for label in given.iter().map(|flag| &*flag.label).chain(made.iter().map(|flag| &*flag.label)) {
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
        let labels = named.into_iter().map(|(name, matters)| {
            let ways: Vec<_> = made.iter().filter(|flag| flag.label == name).collect();
            let from = if ways.is_empty() {
                From::Field(fields.label(name, field_of(name)))
            } else {
                let made = ways.into_iter().map(|flag| Made {
                    value: flag.value.as_bytes().into(),
                    when: flag
                        .when
                        .iter()
                        .map(|(label, pattern)| (fields.label(label, field_of(label)), pattern.clone()))
                        .collect(),
                });
                From::Made(made.collect())
            };
            let settings = policy.label(name).cloned();
            Label { name: name.to_owned(), from, settings, matters, seen: false }
        });
        let labels = labels.collect();
        Self { labels, policy }
    }

    /// Which of its labels this is.
    pub(super) fn position(&self, name: &str) -> Option<usize> {
        self.labels.iter().position(|label| label.name == name)
    }

    pub(super) fn name(&self, position: usize) -> &str {
        &self.labels[position].name
    }

    /// Whether some request has had this label.
    pub(super) fn has_seen(&self, name: &str) -> bool {
        self.labels.iter().any(|label| label.name == name && label.seen)
    }

    /// The labels of a record.
    ///
    /// # Errors
    /// When the server would refuse to be asked with them.
    #[inline]
    pub(super) fn read(&mut self, record: &Record, row: &mut Row) -> Result<(), String> {
        row.bytes.clear();
        row.values.clear();
        for label in &mut self.labels {
            let value = match &label.from {
                From::Field(slot) => record.get(*slot),
                From::Made(ways) => ways.iter().find(|made| made.applies(record)).map(|made| &*made.value),
            };
            let Some(mut value) = value else {
                row.values.push(None);
                continue;
            };
            label.seen = true;
            if value.len() > MAX_LABEL_VALUE {
                if !CUT.contains(&&*label.name) {
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

    /// Writes all that decides which rules apply and with which numbers.
    #[inline]
    pub(super) fn write_matched(&self, row: &Row, into: &mut Vec<u8>) {
        for (position, label) in self.labels.iter().enumerate() {
            match (row.get(position), &label.matters) {
                (None, _) => into.push(0),
                (Some(_), Matters::Patterns(patterns)) if patterns.is_empty() => into.push(1),
                (Some(value), Matters::Patterns(patterns)) => {
                    let matches = patterns
                        .iter()
                        .rev()
                        .fold(0_u64, |bits, pattern| bits << 1 | u64::from(pattern.matches(value)));
                    into.push(1);
                    into.extend_from_slice(&matches.to_le_bytes());
                }
                (Some(value), Matters::Value) => write_value(value, into),
            }
        }
    }

    /// The labels of a request as rules see them.
    pub(super) fn labels(&self, row: &Row) -> Result<Labels, LabelError> {
        let pairs = self.labels.iter().enumerate();
        Labels::new(pairs.filter_map(|(position, label)| Some((&*label.name, row.get(position)?))))
    }
}

impl Default for Matters {
    fn default() -> Self {
        Self::Patterns(Vec::new())
    }
}

impl Matters {
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

impl Made {
    fn applies(&self, record: &Record) -> bool {
        self.when.iter().all(|(slot, pattern)| record.get(*slot).is_some_and(|value| pattern.matches(value)))
    }
}

impl Row {
    #[inline]
    pub(super) fn get(&self, position: usize) -> Option<&[u8]> {
        self.values[position].map(|(start, end)| &self.bytes[start..end])
    }
}

/// Writes a value so that where it ends is not a question of what follows.
#[inline]
pub(super) fn write_value(value: &[u8], into: &mut Vec<u8>) {
    let length = u16::try_from(value.len()).expect("no label's value is longer");
    into.extend_from_slice(&[2, length.to_le_bytes()[0], length.to_le_bytes()[1]]);
    into.extend_from_slice(value);
}
