//! The number of denials with other amounts, for all candidates in the same pass.
//!
//! Each rule is simulated separately. Everything but the amount is unchanged, including overrides with an amount and an
//! explicit burst. Each point therefore equals the simulation of a file with only that rule and that amount.
//!
//! Memory is bounded: whenever too many counters are in use, half of the keys (selected by hash) are dropped, and the
//! weight of the others is doubled. The points are then estimates.

use std::{collections::HashMap, hash::BuildHasher, rc::Rc, time::Duration};

use foldhash::fast::FixedState;
use sluicegate::{
    Costs, Labels, Limit, Rule, Timestamp,
    limiter::Operation,
    rules::{Effect, RuleSet},
    store::Terms,
};
use sluicegate_core::{State, step::step};

use super::counters::{Counters, Kept};

/// Candidates are the rule's amount times powers of the square root of two, with exponents up to this value in both directions: from a 32nd to
/// 32 times the amount.
const STEPS: i32 = 10;
/// The maximum number of amounts of `--curve`.
pub(super) const MAX_AMOUNTS: usize = 64;
/// The maximum number of states in memory, of about 64 bytes each.
const MAX_STATES: usize = 1 << 21;
/// The seed of the sampling hash. Its value is arbitrary, but constant for reproducible results.
const SAMPLING_SEED: u64 = 0x746f_6c6c;

/// The curves of all rules.
pub(super) struct Curves {
    rules: Vec<Curve>,
    /// Terms for each amount of a rule, shared by most labels.
    variants: Vec<Rc<[Terms]>>,
    known: HashMap<Rc<[Terms]>, usize, foldhash::fast::RandomState>,
    counters: Counters<Box<[State]>>,
    windows: Vec<u64>,
    max_counters: usize,
    /// One of 2^`halvings` keys is counted, with that weight.
    halvings: u32,
}

struct Curve {
    /// Only this rule, under another amount. A limit that stays the same is set by an override.
    probe: RuleSet,
    stagger: bool,
    matched: u64,
    candidates: Vec<Candidate>,
}

/// An amount and its denials.
struct Candidate {
    amount: u64,
    denied: u64,
}

/// The result of one amount.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Point {
    pub(super) amount: u64,
    pub(super) matched: u64,
    pub(super) denied: u64,
}

impl Point {
    pub(super) fn share(&self) -> f64 {
        if self.matched == 0 { 0.0 } else { self.denied as f64 / self.matched as f64 }
    }
}

impl Kept for Box<[State]> {
    fn expires_at(&self) -> Timestamp {
        self.iter().map(State::expires_at).max().unwrap_or_default()
    }
}

impl Curves {
    /// Creates curves over these amounts or, if empty, over amounts around each rule's own.
    pub(super) fn new(rules: &RuleSet, amounts: &[u64]) -> Self {
        Self::bounded(rules, amounts, MAX_STATES)
    }

    fn bounded(rules: &RuleSet, amounts: &[u64], max_states: usize) -> Self {
        let curve = |rule: &Rule| {
            let around = amounts_around(rule.limit.amount());
            let tried = if amounts.is_empty() { &around[..] } else { amounts };
            let largest = rule.limit.algorithm().max_amount();
            let candidates = tried.iter().filter(|amount| (1..=largest).contains(*amount));
            Curve {
                probe: probe(rule),
                stagger: rule.stagger,
                matched: 0,
                candidates: candidates.map(|&amount| Candidate { amount, denied: 0 }).collect(),
            }
        };
        let rules_of: Vec<Curve> = rules.rules().map(curve).collect();
        let longest = rules_of.iter().map(|curve| curve.candidates.len()).max().unwrap_or_default().max(1);
        Self {
            rules: rules_of,
            variants: Vec::new(),
            known: HashMap::default(),
            counters: Counters::new(),
            windows: rules.rules().map(|rule| rule.limit.window_us()).collect(),
            max_counters: (max_states / longest).max(2),
            halvings: 0,
        }
    }

    /// Returns the index of the terms for each amount of a rule, given its own `terms` for these labels.
    pub(super) fn variant(&mut self, rule: usize, terms: &Terms, labels: &Labels, costs: &Costs) -> usize {
        let Curve { probe, stagger, candidates, .. } = &self.rules[rule];
        let probed = probe.matching(labels, costs).ok().and_then(|applied| match applied.first()?.effect {
            Effect::Limit { limit, .. } => Some(limit),
            Effect::Deny { .. } => None,
        });
        let probed = probed.unwrap_or(terms.limit);
        let variant: Rc<[Terms]> = candidates
            .iter()
            .map(|candidate| {
                let limit = other_amount(&terms.limit, &probed, candidate.amount).unwrap_or(terms.limit);
                // the phase depends on the key and is set for each request
                let limit = if *stagger { with_phase(limit, Duration::ZERO) } else { limit };
                Terms { limit, ..*terms }
            })
            .collect();
        if let Some(&known) = self.known.get(&variant) {
            return known;
        }
        self.variants.push(Rc::clone(&variant));
        self.known.insert(variant, self.variants.len() - 1);
        self.variants.len() - 1
    }

    /// Simulates a request of `key` with all amounts; `own` has the rule's own terms.
    pub(super) fn check(&mut self, rule: usize, variant: usize, own: &Terms, key: &[u8], now: Timestamp) {
        if !is_chosen(key, self.halvings) {
            return;
        }
        self.counters.sweep_if_full(1, now, &self.windows);
        if self.counters.len() >= self.max_counters {
            self.thin_out(now);
            if !is_chosen(key, self.halvings) {
                return;
            }
        }
        let variant = &self.variants[variant];
        let hash = self.counters.hash(key);
        let at = self.counters.find(hash, key, rule, || {
            variant.iter().map(|terms| State::fresh(terms.limit.algorithm())).collect()
        });
        let weight = 1 << self.halvings;
        let curve = &mut self.rules[rule];
        curve.matched += weight;
        let states = &mut self.counters.at(at).state;
        for ((candidate, terms), state) in curve.candidates.iter_mut().zip(&**variant).zip(states) {
            let mut terms = Terms { cost: own.cost, ..*terms };
            if curve.stagger {
                terms.limit = with_phase(terms.limit, Duration::from_micros(own.limit.phase_us()));
            }
            if step(state, &terms, Operation::Check, 1, now).passes == 0 {
                candidate.denied += weight;
            }
        }
    }

    /// Records a request that a rule denies regardless of its amount.
    pub(super) fn denied_outright(&mut self, rule: usize) {
        let curve = &mut self.rules[rule];
        curve.matched += 1;
        for candidate in &mut curve.candidates {
            candidate.denied += 1;
        }
    }

    /// The results of a rule, by ascending amount.
    pub(super) fn points(&self, rule: usize) -> Vec<Point> {
        let Curve { candidates, matched, .. } = &self.rules[rule];
        let point = |candidate: &Candidate| Point {
            amount: candidate.amount,
            matched: *matched,
            denied: candidate.denied,
        };
        candidates.iter().map(point).collect()
    }

    /// The sampling rate: one key in this many is counted.
    pub(super) fn sampling(&self) -> u64 {
        1 << self.halvings
    }

    /// Drops unused counters, then halves the sampled keys until at most half of the capacity is used.
    #[cold]
    fn thin_out(&mut self, now: Timestamp) {
        let windows = &self.windows;
        self.counters.retain(|counter| counter.is_in_use(now, windows[counter.rule]));
        while self.counters.len() > self.max_counters / 2 {
            self.halvings += 1;
            let halvings = self.halvings;
            self.counters.retain(|counter| is_chosen(counter.key(), halvings));
        }
    }
}

fn is_chosen(key: &[u8], halvings: u32) -> bool {
    halvings == 0 || FixedState::with_seed(SAMPLING_SEED).hash_one(key) >> (64 - halvings) == 0
}

/// Returns a rule set with only this rule, under a different amount.
fn probe(rule: &Rule) -> RuleSet {
    const VALID: &str = "a valid rule is valid with an adjacent amount";
    let amount = rule.limit.amount();
    let adjacent = if amount > 1 { amount - 1 } else { amount + 1 };
    let mut other = rule.clone();
    other.limit = Limit::new(rule.limit.algorithm(), adjacent, rule.limit.window_setting()).expect(VALID);
    RuleSet::new(vec![other]).expect(VALID)
}

/// Returns the limit that applies under another amount of the rule; none if the limit does not depend on that amount.
/// `probed` is the limit under the probe's amount.
fn other_amount(limit: &Limit, probed: &Limit, amount: u64) -> Option<Limit> {
    if limit.amount() == probed.amount() {
        return None;
    }
    let mut other = Limit::new(limit.algorithm(), amount, limit.window_setting()).ok()?;
    if limit.capacity() == probed.capacity() {
        other = other.with_burst(limit.capacity()).ok()?;
    }
    Some(with_phase(other, Duration::from_micros(limit.phase_us())))
}

/// The limit with another phase, if its windows have one.
fn with_phase(limit: Limit, phase: Duration) -> Limit {
    limit.with_phase(phase).unwrap_or(limit)
}

fn amounts_around(amount: u64) -> Vec<u64> {
    let mut amounts: Vec<u64> = (-STEPS..=STEPS)
        .map(|step| match step {
            0 => amount,
            _ => ((amount as f64 * 2_f64.powf(f64::from(step) / 2.0)).round() as u64).max(1),
        })
        .collect();
    amounts.dedup();
    amounts
}

#[cfg(test)]
mod tests {
    use sluicegate::Cost;

    use super::*;

    #[test]
    fn candidates_are_around_the_rules_amount() {
        let amounts = amounts_around(100);
        assert_eq!((amounts[0], amounts[10], amounts[20]), (3, 100, 3_200));
        assert_eq!(amounts_around(1), [1, 2, 3, 4, 6, 8, 11, 16, 23, 32]);
    }

    #[test]
    fn too_many_keys_are_sampled() {
        const KEYS: u64 = 20_000;
        let limit = Limit::sliding_log(2, Duration::from_secs(3_600)).unwrap();
        let rules = RuleSet::new(vec![Rule::new("per-key", limit)]).unwrap();
        let mut curves = Curves::bounded(&rules, &[1, 2, 3], 3_000);
        let terms = Terms::new(limit, Cost::ONE);
        let labels = Labels::new::<&str, &str>([]).unwrap();
        let variant = curves.variant(0, &terms, &labels, &Costs::from(1));
        for second in 0..3 {
            for key in 0..KEYS {
                let now = Timestamp::from_micros((1 + second) * 1_000_000);
                curves.check(0, variant, &terms, &key.to_le_bytes(), now);
            }
        }
        assert!(curves.counters.len() <= 1_000 && curves.sampling() >= 16, "{}", curves.sampling());
        let points = curves.points(0);
        // every key occurs three times; keys dropped later have counted with the weight of that time
        let matched = points[0].matched as f64 / (3 * KEYS) as f64;
        assert!((0.8..1.2).contains(&matched), "{matched}");
        for (point, share) in points.iter().zip([2.0 / 3.0, 1.0 / 3.0, 0.0]) {
            assert!((point.share() - share).abs() < 0.1, "{point:?}");
        }
    }
}
