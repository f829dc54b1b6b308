//! What is counted of each rule.

use std::{collections::HashMap, fmt};

use serde::{Serialize, Serializer};

/// The most keys of a rule that are told apart for good; counters themselves are only kept while they are in use.
const MAX_KEYS: usize = 1 << 20;
/// How many of the worst hit are named.
const MAX_NAMED: usize = 5;

/// Whose counter it is: the labels of `per` and their values, absent ones without.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct KeyName(pub(super) Vec<(String, Option<String>)>);

/// What happened under one rule.
#[derive(Debug, Default)]
pub(super) struct Tally {
    /// Requests it applied to.
    pub(super) matched: u64,
    /// Requests it refused.
    pub(super) refused: u64,
    /// Requests it would have refused, had it not been in shadow.
    pub(super) shadowed: u64,
    /// Whom it refused, or would have.
    pub(super) keys: Keys,
    /// The longest time in which it let somebody do nothing.
    pub(super) longest: Option<Longest>,
    /// Whom it refused while the other rule file let the request pass.
    pub(super) only_here: Keys,
}

/// How often which keys.
#[derive(Debug, Default)]
pub(super) struct Keys {
    counts: HashMap<u64, u64, foldhash::fast::RandomState>,
    worst: Vec<Named>,
    pub(super) total: u64,
    /// How often it was a key beyond those that are told apart.
    beyond: u64,
}

/// A key and how often.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Named {
    pub(super) key: KeyName,
    pub(super) requests: u64,
    #[serde(skip)]
    hash: u64,
}

/// A lockout and whose.
#[derive(Clone, Debug)]
pub(super) struct Longest {
    pub(super) since_us: u64,
    pub(super) last_us: u64,
    pub(super) key: KeyName,
    hash: u64,
}

impl Keys {
    /// Once more this key.
    pub(super) fn add(&mut self, hash: u64, name: impl FnOnce() -> KeyName) {
        self.total += 1;
        if self.counts.len() == MAX_KEYS && !self.counts.contains_key(&hash) {
            self.beyond += 1;
            return;
        }
        let requests = self.counts.entry(hash).or_default();
        *requests += 1;
        let requests = *requests;
        if let Some(named) = self.worst.iter_mut().find(|named| named.hash == hash) {
            named.requests = requests;
        } else if self.worst.len() < MAX_NAMED {
            self.worst.push(Named { key: name(), requests, hash });
        } else if let Some(least) = self.worst.iter_mut().min_by_key(|named| named.requests)
            && least.requests < requests
        {
            *least = Named { key: name(), requests, hash };
        }
    }

    /// How many keys; at least so many, if there were too many to tell apart.
    pub(super) fn count(&self) -> (u64, bool) {
        (self.counts.len() as u64, self.beyond == 0)
    }

    /// Those with the most, most first.
    pub(super) fn worst(&self) -> Vec<Named> {
        let mut worst = self.worst.clone();
        worst.sort_by_key(|named| std::cmp::Reverse(named.requests));
        worst
    }
}

impl Tally {
    /// A lockout that has come to last so long.
    pub(super) fn locked_out(
        &mut self,
        since_us: u64,
        last_us: u64,
        hash: u64,
        name: impl FnOnce() -> KeyName,
    ) {
        match &mut self.longest {
            Some(longest) if longest.last_us - longest.since_us >= last_us - since_us => {}
            Some(longest) if longest.hash == hash => {
                (longest.since_us, longest.last_us) = (since_us, last_us);
            }
            longest => *longest = Some(Longest { since_us, last_us, key: name(), hash }),
        }
    }
}

impl fmt::Display for KeyName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("everybody together");
        }
        for (at, (label, value)) in self.0.iter().enumerate() {
            let space = if at > 0 { " " } else { "" };
            match value {
                // what a log holds may be anything, also what a terminal obeys
                Some(value) => write!(f, "{space}{label}={}", value.replace(char::is_control, "\u{fffd}"))?,
                None => write!(f, "{space}no {label}")?,
            }
        }
        Ok(())
    }
}

impl Serialize for KeyName {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(label, value)| (label, value)))
    }
}
