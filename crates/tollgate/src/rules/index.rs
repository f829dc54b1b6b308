//! From the labels of a request to the few conditions that may match it.
//!
//! Each condition is filed under one of its pairs, the one that fewest others share: a list under each of its
//! members. A request then looks up each of its labels: the whole value among values, the value cut to each
//! length in use among prefixes, the address masked to each length in use among networks. What comes out are
//! candidates, in order; whether they match in full is for the caller to see.
//!
//! The maps are keyed by what requests say, so their hashers are keyed randomly.

use std::{
    collections::{BTreeSet, HashMap},
    slice,
};

use super::pattern::{Network, Pattern, address};
use crate::labels::Labels;

/// Conditions, filed by label and value.
#[derive(Debug, Default)]
pub(super) struct MatchIndex {
    /// Those without pairs.
    always: Vec<u32>,
    labels: HashMap<Box<str>, LabelIndex>,
}

/// The conditions filed under one label.
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

/// Positions of conditions: mostly one, and there may be a million of these.
#[derive(Debug)]
enum Ids {
    One(u32),
    Many(Vec<u32>),
}

/// How many conditions share each (label, pattern other than a list).
type Shares<'a> = HashMap<(&'a str, &'a Pattern), usize>;

impl MatchIndex {
    /// Files each condition, given as its pairs, under its position.
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
                Some((label, pattern)) => index.file(id, label, pattern),
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

    fn file(&mut self, id: u32, label: &str, pattern: &Pattern) {
        if !self.labels.contains_key(label) {
            self.labels.insert(label.into(), LabelIndex::default());
        }
        let index = self.labels.get_mut(label).expect("the label was just filed");
        for leaf in pattern.leaves() {
            index.file(id, leaf);
        }
    }
}

/// What filing under this pair costs requests: how many candidates one lookup brings, and how often in vain.
fn expense((label, pattern): &(&str, &Pattern), shares: &Shares<'_>) -> (usize, usize) {
    let leaves = pattern.leaves();
    let worst = leaves.iter().map(|leaf| {
        let in_vain = match leaf {
            Pattern::Exact(_) => 1,
            Pattern::Prefix(_) | Pattern::Network(_) => 4,
            Pattern::Present | Pattern::AnyOf(_) => 16,
        };
        shares.get(&(*label, leaf)).map_or(0, |count| count * in_vain)
    });
    (worst.max().unwrap_or_default(), leaves.len())
}

impl LabelIndex {
    fn file(&mut self, id: u32, leaf: &Pattern) {
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
                unreachable!("a list is filed under each of its members, none of them a list")
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
        let Some(address) = address(value) else { return };
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
    fn every_kind_of_pattern_is_found_and_candidates_are_in_order_and_once() {
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
    fn a_condition_is_filed_under_the_pair_that_fewest_share() {
        let conditions: Vec<_> = (0..100)
            .map(|n| vec![("domain", Pattern::parse("all")), ("path", Pattern::parse(&format!("/{n}/*")))])
            .collect();
        let index = index(&conditions);
        assert_eq!(candidates(&index, &[("domain", "all"), ("path", "/7/a"), ("other", "x")]), [7]);
    }
}
