//! Patterns for the value of a label.

use std::{fmt, net::IpAddr, slice};

use ipnet::IpNet;

use crate::{address, labels::MAX_LABEL_VALUE};

/// The largest number of members of a list of patterns.
pub const MAX_ALTERNATIVES: usize = 10_000;

/// A pattern for the value of a label. An absent label matches no pattern.
///
/// ```
/// use sluicegate::rules::Pattern;
///
/// assert!(Pattern::parse("login").matches(b"login"));
/// assert!(Pattern::parse("/api/*").matches(b"/api/users"));
/// assert!(Pattern::parse("*").matches(b""));
/// assert!(Pattern::network("10.0.0.0/8")?.matches(b"10.1.2.3"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
// Declared in the order in which `AnyOf` sorts its members.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Pattern {
    /// This value.
    Exact(Box<[u8]>),
    /// Any value with this prefix.
    Prefix(Box<[u8]>),
    /// Any value, including the empty one.
    Present,
    /// An IP address inside this network.
    Network(Network),
    /// A value that matches one of these.
    AnyOf(Alternatives),
}

/// A network of IP addresses. An IPv4 address written as IPv6 (`::ffff:192.0.2.1`) counts as IPv4.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Network(IpNet);

/// At least two patterns, none of which is a list or "any value".
// Sorted, without overlapping prefixes and networks, so that each kind is a binary search.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Alternatives(Vec<Pattern>);

/// Why a pattern is invalid. Each message names the fix.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PatternError {
    /// This is not a network.
    #[error("{0:?} is not a network: use an address and a prefix length, for example \"10.0.0.0/8\"")]
    Network(String),
    /// A list without members matches nothing.
    #[error("empty list matches nothing: add at least one value, or \"*\" for any")]
    Empty,
    /// A list has too many members.
    #[error("list has more than {MAX_ALTERNATIVES} members: split the rule, or use a prefix or network")]
    TooMany,
    /// No value can be that long.
    #[error("pattern has {0} bytes: a label value has at most {MAX_LABEL_VALUE}")]
    TooLong(usize),
}

impl Pattern {
    /// Parses `*` as any value, `x*` as a prefix, and everything else, including a `*` elsewhere, as a value.
    pub fn parse(text: &str) -> Self {
        match text.strip_suffix('*') {
            Some("") => Self::Present,
            Some(prefix) => Self::Prefix(prefix.as_bytes().into()),
            None => Self::Exact(text.as_bytes().into()),
        }
    }

    /// Parses a network such as `10.0.0.0/8` or `2001:db8::/32`, or one address. Host bits are ignored.
    ///
    /// # Errors
    /// If it is neither.
    pub fn network(text: &str) -> Result<Self, PatternError> {
        let network = address::parse_network(text).ok_or_else(|| PatternError::Network(text.to_owned()))?;
        Ok(Self::Network(Network(network)))
    }

    /// Returns a pattern that matches if any of these matches.
    ///
    /// # Errors
    /// If there are none, or too many.
    pub fn any_of(patterns: impl IntoIterator<Item = Self>) -> Result<Self, PatternError> {
        let mut members = Vec::new();
        let mut networks = Vec::new();
        for pattern in patterns {
            for leaf in pattern.leaves() {
                match leaf {
                    Self::Network(network) => networks.push(network.0),
                    other => members.push(other.clone()),
                }
            }
            if members.len() + networks.len() > MAX_ALTERNATIVES {
                return Err(PatternError::TooMany);
            }
        }
        if members.contains(&Self::Present) {
            return Ok(Self::Present);
        }
        members.sort_unstable();
        // a prefix that starts with its predecessor is redundant, and so are equal values
        members.dedup_by(|later, earlier| match (&*later, &*earlier) {
            (Self::Prefix(later), Self::Prefix(earlier)) => later.starts_with(earlier),
            (later, earlier) => later == earlier,
        });
        members
            .extend(IpNet::aggregate(&networks).into_iter().map(|network| Self::Network(Network(network))));
        members.sort_unstable();
        match members.len() {
            0 => Err(PatternError::Empty),
            1 => Ok(members.remove(0)),
            _ => Ok(Self::AnyOf(Alternatives(members))),
        }
    }

    /// Returns whether `value` matches.
    pub fn matches(&self, value: &[u8]) -> bool {
        match self {
            Self::Exact(exact) => **exact == *value,
            Self::Prefix(prefix) => value.starts_with(prefix),
            Self::Present => true,
            Self::Network(network) => {
                address::parse(value).is_some_and(|address| network.0.contains(&address))
            }
            Self::AnyOf(alternatives) => alternatives.matches(value),
        }
    }

    /// Returns the pattern itself, or the members of a list.
    pub(super) fn leaves(&self) -> &[Self] {
        match self {
            Self::AnyOf(alternatives) => alternatives.members(),
            leaf => slice::from_ref(leaf),
        }
    }

    /// Rejects patterns that no label can match.
    pub(super) fn check(&self) -> Result<(), PatternError> {
        let longest = |leaf: &Self| match leaf {
            Self::Exact(bytes) | Self::Prefix(bytes) => bytes.len(),
            Self::Present | Self::Network(_) | Self::AnyOf(_) => 0,
        };
        match self.leaves().iter().map(longest).find(|length| *length > MAX_LABEL_VALUE) {
            Some(length) => Err(PatternError::TooLong(length)),
            None => Ok(()),
        }
    }
}

impl Alternatives {
    /// Returns the members, sorted by kind.
    pub fn members(&self) -> &[Pattern] {
        &self.0
    }

    fn matches(&self, value: &[u8]) -> bool {
        // of each kind, only the last member at or before the value can match, because members do not overlap
        let exact = self.0.partition_point(|member| match member {
            Pattern::Exact(exact) => **exact <= *value,
            _ => false,
        });
        let prefix = self.0.partition_point(|member| match member {
            Pattern::Exact(_) => true,
            Pattern::Prefix(prefix) => **prefix <= *value,
            _ => false,
        });
        if self.matches_before(exact, value) || self.matches_before(prefix, value) {
            return true;
        }
        let Some(Pattern::Network(_)) = self.0.last() else { return false };
        let Some(address) = address::parse(value) else { return false };
        let network = self.0.partition_point(|member| match member {
            Pattern::Network(network) => network.0.network() <= address,
            _ => true,
        });
        network > 0
            && matches!(&self.0[network - 1], Pattern::Network(network) if network.0.contains(&address))
    }

    fn matches_before(&self, index: usize, value: &[u8]) -> bool {
        index > 0 && self.0[index - 1].matches(value)
    }
}

impl Network {
    /// Returns the network of `length` leading bits that contains an address; `None` if the address has fewer bits.
    pub(super) fn around(address: IpAddr, length: u8) -> Option<Self> {
        IpNet::new(address, length).ok().map(|network| Self(network.trunc()))
    }

    pub(super) fn is_v4(&self) -> bool {
        matches!(self.0, IpNet::V4(_))
    }

    pub(super) fn prefix_len(&self) -> u8 {
        self.0.prefix_len()
    }
}

impl From<&str> for Pattern {
    /// As [`Pattern::parse`].
    fn from(text: &str) -> Self {
        Self::parse(text)
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exact(bytes) => write!(f, "{}", bytes.escape_ascii()),
            Self::Prefix(bytes) => write!(f, "{}*", bytes.escape_ascii()),
            Self::Present => f.write_str("*"),
            Self::Network(network) => write!(f, "{}", network.0),
            Self::AnyOf(alternatives) => {
                for (index, member) in alternatives.members().iter().enumerate() {
                    write!(f, "{}{member}", if index == 0 { "" } else { " | " })?;
                }
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trailing_star_is_a_prefix_a_single_star_any_value_and_other_stars_are_literal() {
        assert_eq!(Pattern::parse("login"), Pattern::Exact((*b"login").into()));
        assert_eq!(Pattern::parse("log*"), Pattern::Prefix((*b"log").into()));
        assert_eq!(Pattern::parse("*"), Pattern::Present);
        assert_eq!(Pattern::parse("a*b"), Pattern::Exact((*b"a*b").into()));
        assert_eq!(Pattern::parse("*b"), Pattern::Exact((*b"*b").into()));
        assert_eq!(Pattern::parse("a**"), Pattern::Prefix((*b"a*").into()));
        assert_eq!(Pattern::parse(""), Pattern::Exact((*b"").into()));
    }

    #[test]
    fn values_prefixes_and_presence_match() {
        for (pattern, value, expected) in [
            ("login", "login", true),
            ("login", "logi", false),
            ("login", "login2", false),
            ("log*", "log", true),
            ("log*", "login", true),
            ("log*", "lo", false),
            ("*", "", true),
            ("*", "x", true),
            ("", "", true),
            ("", "x", false),
        ] {
            assert_eq!(Pattern::parse(pattern).matches(value.as_bytes()), expected, "{pattern} {value}");
        }
    }

    #[test]
    fn networks_match_addresses_inside_and_mapped_addresses_count_as_ipv4() {
        for (network, value, expected) in [
            ("10.0.0.0/8", "10.255.0.1", true),
            ("10.0.0.0/8", "11.0.0.1", false),
            ("10.9.9.9/8", "10.1.1.1", true),
            ("10.0.0.0/8", "::ffff:10.0.0.1", true),
            ("10.0.0.0/8", "::ffff:a00:1", true),
            ("::ffff:10.0.0.0/104", "10.2.3.4", true),
            ("10.0.0.1", "10.0.0.1", true),
            ("10.0.0.1", "10.0.0.2", false),
            ("2001:db8::/32", "2001:DB8::1", true),
            ("2001:db8::/32", "2001:db9::1", false),
            ("::/0", "2001:db8::1", true),
            ("::/0", "10.0.0.1", false),
            ("0.0.0.0/0", "1.2.3.4", true),
            ("0.0.0.0/0", "::1", false),
            ("0.0.0.0/0", "1.2.3", false),
            ("0.0.0.0/0", "", false),
            ("0.0.0.0/0", "1.2.3.4 ", false),
        ] {
            assert_eq!(
                Pattern::network(network).unwrap().matches(value.as_bytes()),
                expected,
                "{network} {value}"
            );
        }
        assert!(!Pattern::network("0.0.0.0/0").unwrap().matches(b"1.2.3.\xff"));
    }

    #[test]
    fn an_invalid_network_is_rejected_with_an_example() {
        for text in ["", "10.0.0.0/33", "10.0.0/8", "localhost", "10.0.0.0/8 "] {
            let error = Pattern::network(text).unwrap_err();
            assert_eq!(error, PatternError::Network(text.to_owned()));
            assert!(error.to_string().contains("10.0.0.0/8"));
        }
    }

    #[test]
    fn a_list_matches_exactly_what_any_member_matches() {
        let members = [
            Pattern::parse("b"),
            Pattern::parse("bb"),
            Pattern::parse("d*"),
            Pattern::parse("dd*"),
            Pattern::parse("da*"),
            Pattern::parse("f*"),
            Pattern::network("10.0.0.0/8").unwrap(),
            Pattern::network("10.1.0.0/16").unwrap(),
            Pattern::network("192.0.2.0/24").unwrap(),
            Pattern::network("2001:db8::/32").unwrap(),
        ];
        let list = Pattern::any_of(members.clone()).unwrap();
        let mut hits = 0;
        for value in [
            "",
            "a",
            "b",
            "ba",
            "bb",
            "bbb",
            "c",
            "d",
            "da",
            "dd",
            "dz",
            "e",
            "f",
            "ff",
            "g",
            "9.255.255.255",
            "10.0.0.0",
            "10.1.2.3",
            "10.255.255.255",
            "11.0.0.0",
            "192.0.2.77",
            "192.0.3.0",
            "::1",
            "2001:db8::1",
            "2001:db9::",
            "::ffff:10.0.0.1",
            "fe80::1",
        ] {
            let expected = members.iter().any(|member| member.matches(value.as_bytes()));
            assert_eq!(list.matches(value.as_bytes()), expected, "{value}");
            hits += usize::from(expected);
        }
        assert_eq!(hits, 15);
    }

    #[test]
    fn lists_are_flat_and_trivial_ones_are_simple_patterns() {
        let inner = Pattern::any_of(["a".into(), "b".into()]).unwrap();
        let outer = Pattern::any_of([inner.clone(), "c*".into()]).unwrap();
        assert_eq!(outer.leaves().len(), 3);
        assert_eq!(outer.to_string(), "a | b | c*");
        assert_eq!(Pattern::any_of(["a".into(), "a".into()]).unwrap(), Pattern::parse("a"));
        assert_eq!(Pattern::any_of([inner, Pattern::Present]).unwrap(), Pattern::Present);
        assert_eq!(Pattern::any_of([]), Err(PatternError::Empty));
        let many = |count: usize| Pattern::any_of((0..count).map(|n| Pattern::parse(&n.to_string())));
        assert!(many(MAX_ALTERNATIVES).is_ok());
        assert_eq!(many(MAX_ALTERNATIVES + 1), Err(PatternError::TooMany));
    }
}
