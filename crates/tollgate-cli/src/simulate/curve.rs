//! How many each rule would have refused with other amounts: several of them beside each other, in the same pass.
//!
//! Each rule is taken by itself, as if it were the only one; everything else about it stays as it is written, also overrides that name an
//! amount, and a burst that is named. So each point is exactly what a simulation of a file with that rule and that
//! amount alone would say.
//!
//! Memory is bounded: when there are too many counters in use, half of the keys are left out, chosen by a hash, and the
//! others count twice; and so on. Then the points are estimates.

use std::{collections::HashMap, hash::BuildHasher, rc::Rc, time::Duration};

use foldhash::fast::FixedState;
use tollgate::{Costs, Labels, Limit, Operation, Rule, RuleSet, Terms, Timestamp, rules::Effect};
use tollgate_core::{State, step::step};

use super::counters::{Counters, Kept};

/// The amounts that are tried are a rule's own times powers of the square root of two, up to this exponent both ways: from a 32nd of it
/// to 32 times as much.
const STEPS: i32 = 10;
/// The most amounts that can be asked for.
pub(super) const MAX_AMOUNTS: usize = 64;
/// The most states that are kept, of about 64 bytes each.
const MAX_STATES: usize = 1 << 21;
/// Chooses the keys that stay when there are too many. Any number would do; it is the same for every run.
const SAMPLING_SEED: u64 = 0x746f_6c6c;

/// The curves of all rules.
pub(super) struct Curves {
    rules: Vec<Curve>,
    /// Terms for each amount, of a rule and labels. Most labels share theirs.
    ladders: Vec<Rc<[Terms]>>,
    known: HashMap<Rc<[Terms]>, usize, foldhash::fast::RandomState>,
    counters: Counters<Box<[State]>>,
    windows: Vec<u64>,
    max_counters: usize,
    /// One key of 2 to this power is counted, as so many.
    halvings: u32,
}

struct Curve {
    /// The rule alone, with another amount: what does not change with it was named by an override.
    probe: RuleSet,
    stagger: bool,
    matched: u64,
    rungs: Vec<Rung>,
}

/// One amount.
struct Rung {
    amount: u64,
    refused: u64,
}

/// What is known of one amount in the end.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Point {
    pub(super) amount: u64,
    pub(super) matched: u64,
    pub(super) refused: u64,
}

impl Point {
    pub(super) fn share(&self) -> f64 {
        if self.matched == 0 { 0.0 } else { self.refused as f64 / self.matched as f64 }
    }
}

impl Kept for Box<[State]> {
    fn expires_at(&self) -> Timestamp {
        self.iter().map(State::expires_at).max().unwrap_or_default()
    }
}

impl Curves {
    /// Curves over these amounts, or over those around each rule's own.
    pub(super) fn new(rules: &RuleSet, amounts: &[u64]) -> Self {
        Self::bounded(rules, amounts, MAX_STATES)
    }

    fn bounded(rules: &RuleSet, amounts: &[u64], max_states: usize) -> Self {
        let curve = |rule: &Rule| {
            let around = amounts_around(rule.limit.amount());
            let tried = if amounts.is_empty() { &around[..] } else { amounts };
            let largest = rule.limit.algorithm().max_amount();
            let rungs = tried.iter().filter(|amount| (1..=largest).contains(*amount));
            Curve {
                probe: probe(rule),
                stagger: rule.stagger,
                matched: 0,
                rungs: rungs.map(|&amount| Rung { amount, refused: 0 }).collect(),
            }
        };
        let rules_of: Vec<Curve> = rules.rules().map(curve).collect();
        let longest = rules_of.iter().map(|curve| curve.rungs.len()).max().unwrap_or_default().max(1);
        Self {
            rules: rules_of,
            ladders: Vec::new(),
            known: HashMap::default(),
            counters: Counters::new(),
            windows: rules.rules().map(|rule| rule.limit.window_us()).collect(),
            max_counters: (max_states / longest).max(2),
            halvings: 0,
        }
    }

    /// The terms for each amount of a rule, which asks `terms` of requests with these labels.
    pub(super) fn ladder(&mut self, rule: usize, terms: &Terms, labels: &Labels, costs: &Costs) -> usize {
        let Curve { probe, stagger, rungs, .. } = &self.rules[rule];
        let probed = probe.matching(labels, costs).ok().and_then(|applied| match applied.first()?.effect {
            Effect::Limit { limit, .. } => Some(limit),
            Effect::Deny { .. } => None,
        });
        let probed = probed.unwrap_or(terms.limit);
        let ladder: Rc<[Terms]> = rungs
            .iter()
            .map(|rung| {
                let limit = other_amount(&terms.limit, &probed, rung.amount).unwrap_or(terms.limit);
                // each key has its own phase, which is put in when it is asked
                let limit = if *stagger { moved(limit, Duration::ZERO) } else { limit };
                Terms { limit, ..*terms }
            })
            .collect();
        if let Some(&known) = self.known.get(&ladder) {
            return known;
        }
        self.ladders.push(Rc::clone(&ladder));
        self.known.insert(ladder, self.ladders.len() - 1);
        self.ladders.len() - 1
    }

    /// A request that a rule counts, by its own terms `asked`, under `key`.
    pub(super) fn ask(&mut self, rule: usize, ladder: usize, asked: &Terms, key: &[u8], now: Timestamp) {
        if !is_chosen(key, self.halvings) {
            return;
        }
        self.counters.make_room(1, now, &self.windows);
        if self.counters.len() >= self.max_counters {
            self.thin_out(now);
            if !is_chosen(key, self.halvings) {
                return;
            }
        }
        let ladder = &self.ladders[ladder];
        let hash = self.counters.hash(key);
        let at = self.counters.find(hash, key, rule, || {
            ladder.iter().map(|terms| State::fresh(terms.limit.algorithm())).collect()
        });
        let weight = 1 << self.halvings;
        let curve = &mut self.rules[rule];
        curve.matched += weight;
        let states = &mut self.counters.at(at).state;
        for ((rung, terms), state) in curve.rungs.iter_mut().zip(&**ladder).zip(states) {
            let mut terms = Terms { cost: asked.cost, ..*terms };
            if curve.stagger {
                terms.limit = moved(terms.limit, Duration::from_micros(asked.limit.phase_us()));
            }
            if step(state, &terms, Operation::Check, 1, now).passes == 0 {
                rung.refused += weight;
            }
        }
    }

    /// A request that a rule refuses whatever its amount is.
    pub(super) fn refused_outright(&mut self, rule: usize) {
        let curve = &mut self.rules[rule];
        curve.matched += 1;
        for rung in &mut curve.rungs {
            rung.refused += 1;
        }
    }

    /// What became of a rule, from the smallest amount to the largest.
    pub(super) fn points(&self, rule: usize) -> Vec<Point> {
        let Curve { rungs, matched, .. } = &self.rules[rule];
        let point = |rung: &Rung| Point { amount: rung.amount, matched: *matched, refused: rung.refused };
        rungs.iter().map(point).collect()
    }

    /// One key of so many was counted.
    pub(super) fn sampling(&self) -> u64 {
        1 << self.halvings
    }

    /// Drops counters that are not in use; then keys, until half of the room is free.
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

/// The rule alone, with an amount that is not its own.
fn probe(rule: &Rule) -> RuleSet {
    const POSSIBLE: &str = "a possible rule is possible with an amount beside its own, alone";
    let amount = rule.limit.amount();
    let beside = if amount > 1 { amount - 1 } else { amount + 1 };
    let mut other = rule.clone();
    other.limit = Limit::new(rule.limit.algorithm(), beside, rule.limit.window()).expect(POSSIBLE);
    RuleSet::new(vec![other]).expect(POSSIBLE)
}

/// What becomes of a limit when its rule's amount is another. `probed` is the same limit for an amount that is not the rule's own.
fn other_amount(limit: &Limit, probed: &Limit, amount: u64) -> Option<Limit> {
    if limit.amount() == probed.amount() {
        return None;
    }
    let mut other = Limit::new(limit.algorithm(), amount, limit.window()).ok()?;
    if limit.capacity() == probed.capacity() {
        other = other.with_burst(limit.capacity()).ok()?;
    }
    Some(moved(other, Duration::from_micros(limit.phase_us())))
}

/// The limit with other windows, if it has windows.
fn moved(limit: Limit, phase: Duration) -> Limit {
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
    use tollgate::Cost;

    use super::*;

    #[test]
    fn amounts_lie_around_the_rules_own() {
        let amounts = amounts_around(100);
        assert_eq!((amounts[0], amounts[10], amounts[20]), (3, 100, 3_200));
        assert_eq!(amounts_around(1), [1, 2, 3, 4, 6, 8, 11, 16, 23, 32]);
    }

    #[test]
    fn with_too_many_keys_some_stand_for_all() {
        const KEYS: u64 = 20_000;
        let limit = Limit::sliding_log(2, Duration::from_secs(3_600)).unwrap();
        let rules = RuleSet::new(vec![Rule::new("per-key", limit)]).unwrap();
        let mut curves = Curves::bounded(&rules, &[1, 2, 3], 3_000);
        let terms = Terms::new(limit, Cost::ONE);
        let labels = Labels::new::<&str, &str>([]).unwrap();
        let ladder = curves.ladder(0, &terms, &labels, &Costs::from(1));
        for second in 0..3 {
            for key in 0..KEYS {
                let now = Timestamp::from_micros((1 + second) * 1_000_000);
                curves.ask(0, ladder, &terms, &key.to_le_bytes(), now);
            }
        }
        assert!(curves.counters.len() <= 1_000 && curves.sampling() >= 16, "{}", curves.sampling());
        let points = curves.points(0);
        // every key comes three times; those of the first turn that were left out later counted as what they were
        let asked = points[0].matched as f64 / (3 * KEYS) as f64;
        assert!((0.8..1.2).contains(&asked), "{asked}");
        for (point, share) in points.iter().zip([2.0 / 3.0, 1.0 / 3.0, 0.0]) {
            assert!((point.share() - share).abs() < 0.1, "{point:?}");
        }
    }
}
