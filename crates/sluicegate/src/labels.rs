//! The labels of a request: a few names, each with one value.
//!
//! Number, length and uniqueness are validated here. The front ends extract labels from requests and normalize their values.

use std::fmt;

/// The largest number of labels of one request.
pub const MAX_LABELS: usize = 64;
/// The longest name of a label, in bytes.
pub const MAX_LABEL_NAME: usize = 128;
/// The longest value of a label, in bytes.
pub const MAX_LABEL_VALUE: usize = 1024;

/// Up to this number, a linear search is faster than a binary search.
const FEW_LABELS: usize = 8;

/// The labels of one request, in the order of their names.
///
/// ```
/// use sluicegate::labels::Labels;
///
/// let labels = Labels::new([("route", "login"), ("ip", "203.0.113.9")])?;
/// assert_eq!(labels.get("ip"), Some(&b"203.0.113.9"[..]));
/// assert_eq!(labels.get("tenant"), None);
/// # Ok::<(), sluicegate::labels::LabelError>(())
/// ```
#[derive(Clone, Default)]
pub struct Labels {
    // two buffers and a table of ranges: three allocations for any number of labels
    names: String,
    values: Vec<u8>,
    ranges: Vec<LabelRanges>,
}

/// The ranges of one label in the two buffers.
#[derive(Clone, Copy)]
struct LabelRanges {
    name: (usize, usize),
    value: (usize, usize),
}

/// Why labels are invalid. Each message names the fix.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LabelError {
    /// There are too many.
    #[error("more than {MAX_LABELS} labels: send only those that rules name, at most {MAX_LABELS}")]
    TooMany,
    /// A name is empty.
    #[error("a label has an empty name: use 1 to {MAX_LABEL_NAME} bytes of text, for example \"route\"")]
    EmptyName,
    /// A name is too long.
    #[error("a label's name has {0} bytes: use 1 to {MAX_LABEL_NAME}")]
    NameTooLong(usize),
    /// A value is too long.
    #[error("label {name:?} has a value of {length} bytes: use at most {MAX_LABEL_VALUE}, or a hash of it")]
    ValueTooLong {
        /// The label's name.
        name: String,
        /// The length of the value.
        length: usize,
    },
    /// A name occurs twice.
    #[error("label {0:?} is given more than once: give each label one value")]
    Repeated(String),
}

impl Labels {
    /// Creates labels from names and values in any order.
    ///
    /// # Errors
    /// If there are too many, a name is empty or given twice, or a name or value is too long.
    pub fn new<N, V>(pairs: impl IntoIterator<Item = (N, V)>) -> Result<Self, LabelError>
    where
        N: AsRef<str>,
        V: AsRef<[u8]>,
    {
        let mut labels = Self::default();
        for (name, value) in pairs {
            labels.push(name.as_ref(), value.as_ref())?;
        }
        let Self { names, ranges, .. } = &mut labels;
        ranges.sort_unstable_by_key(|range| &names[range.name.0..range.name.1]);
        for pair in labels.ranges.windows(2) {
            if labels.name(&pair[0]) == labels.name(&pair[1]) {
                return Err(LabelError::Repeated(labels.name(&pair[0]).to_owned()));
            }
        }
        Ok(labels)
    }

    /// Returns the value of a label, if the request has it.
    pub fn get(&self, name: &str) -> Option<&[u8]> {
        // byte slices compare without character boundaries, and usually differ in length
        let bytes = |range: &LabelRanges| &self.names.as_bytes()[range.name.0..range.name.1];
        let range = if self.ranges.len() <= FEW_LABELS {
            self.ranges.iter().find(|range| bytes(range) == name.as_bytes())?
        } else {
            let index = self.ranges.binary_search_by_key(&name.as_bytes(), bytes).ok()?;
            &self.ranges[index]
        };
        Some(self.value(range))
    }

    /// Returns names and values, in the order of the names.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &[u8])> {
        self.ranges.iter().map(|range| (self.name(range), self.value(range)))
    }

    /// Returns the number of labels.
    pub fn len(&self) -> usize {
        self.ranges.len()
    }

    /// Returns whether there are no labels.
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    fn push(&mut self, name: &str, value: &[u8]) -> Result<(), LabelError> {
        if self.ranges.len() == MAX_LABELS {
            return Err(LabelError::TooMany);
        }
        check_name(name)?;
        if value.len() > MAX_LABEL_VALUE {
            return Err(LabelError::ValueTooLong { name: name.to_owned(), length: value.len() });
        }
        let (name_start, value_start) = (self.names.len(), self.values.len());
        self.names.push_str(name);
        self.values.extend_from_slice(value);
        self.ranges.push(LabelRanges {
            name: (name_start, self.names.len()),
            value: (value_start, self.values.len()),
        });
        Ok(())
    }

    fn name(&self, range: &LabelRanges) -> &str {
        &self.names[range.name.0..range.name.1]
    }

    fn value(&self, range: &LabelRanges) -> &[u8] {
        &self.values[range.value.0..range.value.1]
    }
}

/// Validates the name of a label.
pub(crate) fn check_name(name: &str) -> Result<(), LabelError> {
    match name.len() {
        0 => Err(LabelError::EmptyName),
        1..=MAX_LABEL_NAME => Ok(()),
        length => Err(LabelError::NameTooLong(length)),
    }
}

impl PartialEq for Labels {
    fn eq(&self, other: &Self) -> bool {
        self.iter().eq(other.iter())
    }
}

impl Eq for Labels {}

impl fmt::Debug for Labels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map()
            .entries(self.iter().map(|(name, value)| (name, value.escape_ascii().to_string())))
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_found_by_name_and_sorted() {
        let labels = Labels::new([("route", "login"), ("ip", "203.0.113.9"), ("empty", "")]).unwrap();
        assert_eq!(labels.get("route"), Some(&b"login"[..]));
        assert_eq!(labels.get("empty"), Some(&b""[..]));
        assert_eq!(labels.get("rout"), None);
        assert_eq!(labels.iter().map(|(name, _)| name).collect::<Vec<_>>(), ["empty", "ip", "route"]);
        assert_eq!((labels.len(), labels.is_empty()), (3, false));
        assert!(Labels::default().is_empty() && Labels::default().get("a").is_none());
    }

    #[test]
    fn values_are_any_bytes() {
        let labels = Labels::new([("a", &b"\xff\0{},"[..])]).unwrap();
        assert_eq!(labels.get("a"), Some(&b"\xff\0{},"[..]));
        assert_eq!(format!("{labels:?}"), r#"{"a": "\\xff\\x00{},"}"#);
    }

    #[test]
    fn the_order_in_which_labels_are_given_does_not_matter() {
        let one = Labels::new([("a", "1"), ("b", "2")]).unwrap();
        assert_eq!(one, Labels::new([("b", "2"), ("a", "1")]).unwrap());
        assert_ne!(one, Labels::new([("b", "1"), ("a", "2")]).unwrap());
        assert_ne!(one, Labels::new([("a", "1")]).unwrap());
    }

    #[test]
    fn each_bound_is_accepted_and_one_beyond_is_rejected() {
        let many = |count: usize| Labels::new((0..count).map(|index| (format!("l{index}"), "v")));
        let most = many(MAX_LABELS).unwrap();
        assert_eq!(most.len(), MAX_LABELS);
        assert!(most.iter().all(|(name, value)| most.get(name) == Some(value)) && most.get("l64").is_none());
        assert_eq!(many(MAX_LABELS + 1), Err(LabelError::TooMany));
        assert!(Labels::new([("n".repeat(MAX_LABEL_NAME), [b'v'; MAX_LABEL_VALUE])]).is_ok());
        assert_eq!(Labels::new([("n".repeat(129), "v")]), Err(LabelError::NameTooLong(129)));
        assert_eq!(
            Labels::new([("n", [b'v'; MAX_LABEL_VALUE + 1])]),
            Err(LabelError::ValueTooLong { name: "n".into(), length: MAX_LABEL_VALUE + 1 })
        );
        assert_eq!(Labels::new([("", "v")]), Err(LabelError::EmptyName));
    }

    #[test]
    fn a_repeated_name_is_rejected_even_with_the_same_value() {
        let error = Labels::new([("a", "1"), ("b", "2"), ("a", "1")]).unwrap_err();
        assert_eq!(error, LabelError::Repeated("a".into()));
        assert_eq!(error.to_string(), "label \"a\" is given more than once: give each label one value");
    }
}
