//! From the labels of a request to the few conditions that may match it.
//!
//! Each condition is indexed by the one of its pairs that the fewest others share; a list by each of its members. Each label of a request is
//! looked up: the value among exact values, its prefixes of every indexed length, and its address masked to every indexed length. The result
//! is a sorted list of candidates, which the caller matches in full.
//!
//! Requests choose the looked-up keys, so the hashers have random keys.

use std::{
    collections::{BTreeSet, HashMap},
    slice,
};

use super::pattern::{Network, Pattern};
use crate::{address, labels::Labels};

/// Conditions, indexed by label and value.
#[derive(Debug, Default)]
pub(super) struct MatchIndex {
    /// Conditions without pairs.
    always: Vec<u32>,
    labels: HashMap<Box<str>, LabelIndex>,
}

/// The conditions indexed by one label.
#[derive(Debug, Default)]
struct LabelIndex {
    exact: HashMap<Box<[u8]>, Ids>,
    prefixes: HashMap<Box<[u8]>, Ids>,
    prefix_lengths: BTreeSet<usize>,
    networks: HashMap<Network, Ids>,
    v4_lengths: BTreeSet<u8>,
    v6_lengths: BTreeSet<u8>,
    present: Vec<u32>,
}

/// Positions of conditions: usually one, and there may be a million of these lists.
#[derive(Debug)]
enum Ids {
    One(u32),
    Many(Vec<u32>),
}

/// Number of conditions with each (label, pattern other than a list).
type Shares<'a> = HashMap<(&'a str, &'a Pattern), usize>;

impl MatchIndex {
    /// Indexes each condition, given as its pairs, by its position.
    pub(super) fn new<'a, P>(conditions: impl Iterator<Item = P> + Clone) -> Self
    where
        P: Iterator<Item = (&'a str, &'a Pattern)>,
    {
        let mut shares = Shares::new();
        for (label, pattern) in conditions.clone().flatten() {
            for leaf in pattern.leaves() {
                *shares.entry((label, leaf)).or_default() += 1;
            }
        }
        let mut index = Self::default();
        for (id, pairs) in (0..).zip(conditions) {
            match pairs.min_by_key(|pair| expense(pair, &shares)) {
                None => index.always.push(id),
                Some((label, pattern)) => index.add(id, label, pattern),
            }
        }
        index
    }

    /// Fills `found` with the positions of all conditions that may match, ascending, each once.
    pub(super) fn candidates(&self, labels: &Labels, found: &mut Vec<u32>) {
        found.clear();
        found.extend_from_slice(&self.always);
        if !self.labels.is_empty() {
            for (name, value) in labels.iter() {
                if let Some(index) = self.labels.get(name) {
                    index.candidates(value, found);
                }
            }
        }
        found.sort_unstable();
        found.dedup();
    }

    fn add(&mut self, id: u32, label: &str, pattern: &Pattern) {
        if !self.labels.contains_key(label) {
            self.labels.insert(label.into(), LabelIndex::default());
        }
        let index = self.labels.get_mut(label).expect("the label was just inserted");
        for leaf in pattern.leaves() {
            index.add(id, leaf);
        }
    }
}

/// Returns the lookup cost of indexing by this pair: the number of candidates, weighted by how often they do not match.
fn expense((label, pattern): &(&str, &Pattern), shares: &Shares<'_>) -> (usize, usize) {
    let leaves = pattern.leaves();
    let worst = leaves.iter().map(|leaf| {
        let weight = match leaf {
            Pattern::Exact(_) => 1,
            Pattern::Prefix(_) | Pattern::Network(_) => 4,
            Pattern::Present | Pattern::AnyOf(_) => 16,
        };
        shares.get(&(*label, leaf)).map_or(0, |count| count * weight)
    });
    (worst.max().unwrap_or_default(), leaves.len())
}

impl LabelIndex {
    fn add(&mut self, id: u32, leaf: &Pattern) {
        match leaf {
            Pattern::Exact(value) => Ids::add(&mut self.exact, value.clone(), id),
            Pattern::Prefix(prefix) => {
                self.prefix_lengths.insert(prefix.len());
                Ids::add(&mut self.prefixes, prefix.clone(), id);
            }
            Pattern::Network(network) => {
                let lengths = if network.is_v4() { &mut self.v4_lengths } else { &mut self.v6_lengths };
                lengths.insert(network.prefix_len());
                Ids::add(&mut self.networks, *network, id);
            }
            Pattern::Present => self.present.push(id),
            Pattern::AnyOf(_) => {
                unreachable!("a list is indexed by its members, none of which is a list")
            }
        }
    }

    fn candidates(&self, value: &[u8], found: &mut Vec<u32>) {
        found.extend_from_slice(&self.present);
        if let Some(ids) = self.exact.get(value) {
            found.extend_from_slice(ids.as_slice());
        }
        for &length in self.prefix_lengths.range(..=value.len()) {
            if let Some(ids) = self.prefixes.get(&value[..length]) {
                found.extend_from_slice(ids.as_slice());
            }
        }
        if self.networks.is_empty() {
            return;
        }
        let Some(address) = address::parse(value) else { return };
        let lengths = if address.is_ipv4() { &self.v4_lengths } else { &self.v6_lengths };
        for network in lengths.iter().filter_map(|&length| Network::around(address, length)) {
            if let Some(ids) = self.networks.get(&network) {
                found.extend_from_slice(ids.as_slice());
            }
        }
    }
}

impl Ids {
    fn add<K: std::hash::Hash + Eq>(map: &mut HashMap<K, Self>, key: K, id: u32) {
        map.entry(key).and_modify(|ids| ids.push(id)).or_insert(Self::One(id));
    }

    fn push(&mut self, id: u32) {
        match self {
            Self::One(first) => *self = Self::Many(vec![*first, id]),
            Self::Many(ids) => ids.push(id),
        }
    }

    fn as_slice(&self) -> &[u32] {
        match self {
            Self::One(id) => slice::from_ref(id),
            Self::Many(ids) => ids,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn index(conditions: &[Vec<(&'static str, Pattern)>]) -> MatchIndex {
        MatchIndex::new(conditions.iter().map(|pairs| pairs.iter().map(|(label, pattern)| (*label, pattern))))
    }

    fn candidates(index: &MatchIndex, labels: &[(&str, &str)]) -> Vec<u32> {
        let mut found = vec![77];
        index.candidates(&Labels::new(labels.iter().copied()).unwrap(), &mut found);
        found
    }

    #[test]
    fn every_kind_of_pattern_is_found_and_candidates_are_sorted_and_unique() {
        let list =
            Pattern::any_of(["a".into(), "b*".into(), Pattern::network("10.0.0.0/8").unwrap()]).unwrap();
        let index = index(&[
            vec![("x", "a".into())],
            vec![],
            vec![("x", "*".into())],
            vec![("x", list)],
            vec![("x", "bb*".into())],
            vec![("x", Pattern::network("10.1.0.0/16").unwrap())],
            vec![("y", "*".into())],
            vec![("x", Pattern::network("2001:db8::/32").unwrap())],
        ]);
        assert_eq!(candidates(&index, &[]), [1]);
        assert_eq!(candidates(&index, &[("x", "a")]), [0, 1, 2, 3]);
        assert_eq!(candidates(&index, &[("x", "b")]), [1, 2, 3]);
        assert_eq!(candidates(&index, &[("x", "bbb")]), [1, 2, 3, 4]);
        assert_eq!(candidates(&index, &[("x", "10.1.2.3")]), [1, 2, 3, 5]);
        assert_eq!(candidates(&index, &[("x", "::ffff:10.1.2.3")]), [1, 2, 3, 5]);
        assert_eq!(candidates(&index, &[("x", "2001:db8::1")]), [1, 2, 7]);
        assert_eq!(candidates(&index, &[("y", "a")]), [1, 6]);
    }

    #[test]
    fn a_condition_is_indexed_by_its_rarest_pair() {
        let conditions: Vec<_> = (0..100)
            .map(|n| vec![("domain", Pattern::parse("all")), ("path", Pattern::parse(&format!("/{n}/*")))])
            .collect();
        let index = index(&conditions);
        assert_eq!(candidates(&index, &[("domain", "all"), ("path", "/7/a"), ("other", "x")]), [7]);
    }
}
