//! Statistics of each rule.

use std::{collections::HashMap, fmt};

use serde::{Serialize, Serializer};

/// The maximum number of keys counted separately per rule.
const MAX_KEYS: usize = 1 << 20;
/// The number of reported keys with the most denials.
const MAX_WORST: usize = 5;

/// The `per` labels of a key with their values; none for absent labels.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct KeyName(pub(super) Vec<(String, Option<String>)>);

/// The statistics of one rule.
#[derive(Debug, Default)]
pub(super) struct RuleStats {
    /// Requests it applied to.
    pub(super) matched: u64,
    /// Requests it denied.
    pub(super) denied: u64,
    /// Requests it would have denied without shadow mode.
    pub(super) shadowed: u64,
    /// Keys it denied, or would have.
    pub(super) keys: KeyCounts,
    /// The longest period in which it denied every request of a key.
    pub(super) longest: Option<LongestLockout>,
    /// Keys it denied while the other rule file allowed the request.
    pub(super) denied_only_here: KeyCounts,
}

/// Counts of requests per key.
#[derive(Debug, Default)]
pub(super) struct KeyCounts {
    counts: HashMap<u64, u64, foldhash::fast::RandomState>,
    worst: Vec<KeyCount>,
    pub(super) total: u64,
    /// Requests of keys beyond [`MAX_KEYS`].
    beyond: u64,
}

/// A key and its number of requests.
#[derive(Clone, Debug, Serialize)]
pub(super) struct KeyCount {
    pub(super) key: KeyName,
    pub(super) requests: u64,
    #[serde(skip)]
    hash: u64,
}

/// A lockout and its key.
#[derive(Clone, Debug)]
pub(super) struct LongestLockout {
    pub(super) since_us: u64,
    pub(super) last_us: u64,
    pub(super) key: KeyName,
    hash: u64,
}

impl KeyCounts {
    /// Counts a request of a key.
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
        } else if self.worst.len() < MAX_WORST {
            self.worst.push(KeyCount { key: name(), requests, hash });
        } else if let Some(least) = self.worst.iter_mut().min_by_key(|named| named.requests)
            && least.requests < requests
        {
            *least = KeyCount { key: name(), requests, hash };
        }
    }

    /// The number of keys, and whether it is exact.
    pub(super) fn count(&self) -> (u64, bool) {
        (self.counts.len() as u64, self.beyond == 0)
    }

    /// The keys with the most requests, in descending order.
    pub(super) fn worst(&self) -> Vec<KeyCount> {
        let mut worst = self.worst.clone();
        worst.sort_by_key(|named| std::cmp::Reverse(named.requests));
        worst
    }
}

impl RuleStats {
    /// Records the current length of a lockout.
    pub(super) fn record_lockout(
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
            longest => *longest = Some(LongestLockout { since_us, last_us, key: name(), hash }),
        }
    }
}

impl fmt::Display for KeyName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("all requests");
        }
        for (at, (label, value)) in self.0.iter().enumerate() {
            let space = if at > 0 { " " } else { "" };
            match value {
                // values from a log may contain terminal control sequences
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
