//! Replays requests through one rule file on a virtual clock.
//!
//! Rules are matched by the library's matcher and decided by the core's step functions, all or none, as in a store. In between, the matching
//! result is cached for each combination of relevant label values, and counters are found by the bytes of their key.

use std::{collections::HashMap, rc::Rc, sync::Arc};

use sluicegate::{
    Algorithm, Cost, Costs, Limit, Rule, Timestamp,
    decision::Mode,
    limiter::Operation,
    rules::{Applied, DEFAULT_UNIT, Effect, RuleSet, staggered_phase},
    store::{Admission, Key, MAX_TIERS, Terms, encoded_rule},
};
use sluicegate_core::{
    State,
    step::{granted, step},
};

use super::{
    counters::Counters,
    curve::Curves,
    labels::{LabelExtractor, LabelRow, write_value},
    log::Record,
    rule_stats::{KeyName, RuleStats},
    timeline::Timeline,
};

/// The maximum number of cached plans; when exceeded, the cache is cleared.
const MAX_PLANS: usize = 1 << 16;

/// `--cost`: a unit and the field of its cost.
#[derive(Clone, Debug)]
pub(super) struct UnitField {
    pub(super) unit: String,
    pub(super) field: String,
    pub(super) slot: usize,
}

/// A rule file under replay.
pub(super) struct Replay {
    pub(super) rules: RuleSet,
    pub(super) extractor: LabelExtractor,
    positions: HashMap<Arc<str>, usize>,
    prepared: Vec<PreparedRule>,
    windows: Vec<u64>,
    units: Vec<UnitField>,
    /// A cost of one in each unit.
    one_of_each: Costs,
    plans: HashMap<Box<[u8]>, Rc<Plan>, foldhash::fast::RandomState>,
    pub(super) counters: Counters<State>,
    pub(super) curves: Option<Curves>,
    /// The names of skipped rules.
    pub(super) not_simulated: Vec<String>,
    pub(super) stats: Vec<RuleStats>,
    /// Requests that no rule applied to.
    pub(super) unmatched: u64,
    pub(super) denied: u64,
    /// The first timeline row of this file: its denials, followed by one row per rule.
    first_row: usize,
    /// The rules that denied the last request, or would have, with the hash of the key.
    denying: Vec<(usize, u64, Mode)>,
    row: LabelRow,
    key: Vec<u8>,
    tiers: Vec<PendingTier>,
}

/// The parts of a rule that are computed once.
struct PreparedRule {
    per: Vec<usize>,
    unit: Unit,
    stagger: bool,
    stored_name: Arc<str>,
    algorithm: Algorithm,
}

/// The source of a request's cost in a rule's unit.
#[derive(Clone, Copy)]
enum Unit {
    One,
    /// The field at this index of the units.
    Field(usize),
    /// No field is configured: the cost is 0.
    Unknown,
}

/// The matching result for requests with certain labels.
pub(super) struct Plan {
    /// The rules that count, with their terms for a cost of one.
    tiers: Box<[PlannedTier]>,
    /// The rules that deny without counting.
    denying: Box<[(usize, Mode)]>,
}

struct PlannedTier {
    rule: usize,
    terms: Terms,
    /// The index of the terms for each amount of the rule's curve.
    variant: usize,
}

/// A tier of the request being decided.
struct PendingTier {
    at: usize,
    hash: u64,
    terms: Terms,
    passes: u32,
}

impl Replay {
    pub(super) fn new(
        rules: RuleSet,
        extractor: LabelExtractor,
        units: Vec<UnitField>,
        curves: Option<Curves>,
        first_row: usize,
    ) -> Self {
        let known = units.iter().map(|unit| &*unit.unit).chain([DEFAULT_UNIT]);
        let mut one_of_each: Vec<_> = known.map(|unit| (unit, Cost::ONE)).collect();
        one_of_each.dedup_by_key(|(unit, _)| *unit);
        let prepared = rules.rules().map(|rule| PreparedRule::of(rule, &extractor, &units)).collect();
        let positions = rules.rules().enumerate().map(|(at, rule)| (Arc::clone(&rule.name), at)).collect();
        Self {
            positions,
            prepared,
            windows: rules.rules().map(|rule| rule.limit.window_us()).collect(),
            stats: rules.rules().map(|_| RuleStats::default()).collect(),
            one_of_each: Costs::new(one_of_each).expect("units were validated when the flags were parsed"),
            rules,
            extractor,
            units,
            plans: HashMap::default(),
            counters: Counters::new(),
            curves,
            unmatched: 0,
            denied: 0,
            first_row,
            not_simulated: Vec::new(),
            denying: Vec::new(),
            row: LabelRow::default(),
            key: Vec::new(),
            tiers: Vec::new(),
        }
    }

    /// Whether no field has the cost in the rule's unit.
    pub(super) fn lacks_unit(&self, rule: usize) -> bool {
        matches!(self.prepared[rule].unit, Unit::Unknown)
    }

    /// The number of timeline rows.
    pub(super) fn rows(rules: &RuleSet) -> usize {
        1 + rules.len()
    }

    /// The timeline row of a rule's denials.
    pub(super) fn row_of(&self, rule: usize) -> usize {
        self.first_row + 1 + rule
    }

    /// Extracts a request's labels and costs, and matches the rules.
    ///
    /// # Errors
    /// If the server would reject the request. Nothing was counted.
    #[inline]
    pub(super) fn prepare(&mut self, record: &Record) -> Result<Rc<Plan>, String> {
        self.extractor.read(record, &mut self.row)?;
        self.key.clear();
        self.extractor.write_matched(&self.row, &mut self.key);
        let plan = match self.plans.get(&*self.key) {
            Some(plan) => Rc::clone(plan),
            None => self.plan()?,
        };
        self.tiers.clear();
        for planned in &plan.tiers {
            let cost = self.cost(planned, record)?;
            let terms = Terms { cost, ..planned.terms };
            self.tiers.push(PendingTier { at: 0, hash: 0, terms, passes: 0 });
        }
        Ok(plan)
    }

    /// Decides the prepared request. Returns whether it is allowed.
    #[inline]
    pub(super) fn decide(&mut self, plan: &Plan, now: Timestamp, timeline: &mut Timeline) -> bool {
        self.denying.clear();
        if plan.tiers.is_empty() && plan.denying.is_empty() {
            self.unmatched += 1;
            return true;
        }
        let allowed = self.apply_plan(plan, now);
        if !allowed {
            self.denied += 1;
            timeline.count(self.first_row);
        }
        for &(rule, ..) in &self.denying {
            timeline.count(self.row_of(rule));
        }
        allowed
    }

    /// Records that the last request was denied here and allowed by the other rule file.
    pub(super) fn record_denied_only_here(&mut self) {
        for &(rule, hash, _) in self.denying.iter().filter(|(_, _, mode)| *mode == Mode::Enforced) {
            let name = || key_name(&self.extractor, &self.row, &self.prepared[rule].per);
            self.stats[rule].denied_only_here.add(hash, name);
        }
    }

    fn apply_plan(&mut self, plan: &Plan, now: Timestamp) -> bool {
        self.counters.sweep_if_full(plan.tiers.len() + plan.denying.len(), now, &self.windows);
        for &(rule, mode) in &plan.denying {
            self.stats[rule].matched += 1;
            let (hash, at) = self.counter(rule);
            self.note_denial(rule, mode, hash, at, now);
            if let Some(curves) = &mut self.curves {
                curves.denied_outright(rule);
            }
        }
        for (place, planned) in plan.tiers.iter().enumerate() {
            self.stats[planned.rule].matched += 1;
            let (hash, at) = self.counter(planned.rule);
            let tier = &mut self.tiers[place];
            (tier.hash, tier.at) = (hash, at);
            if self.prepared[planned.rule].stagger {
                tier.terms.limit = self.prepared[planned.rule].staggered(&self.row, tier.terms.limit);
            }
            if let Some(curves) = &mut self.curves {
                curves.check(planned.rule, planned.variant, &tier.terms, &self.key, now);
            }
        }
        if plan.denying.iter().any(|(_, mode)| *mode == Mode::Enforced) {
            return false;
        }
        self.all_or_none(plan, now)
    }

    /// Decides all tiers or none, as in a store.
    fn all_or_none(&mut self, plan: &Plan, now: Timestamp) -> bool {
        let count = 1;
        let allowed = if let [only] = &mut self.tiers[..] {
            let state = &mut self.counters.at(only.at).state;
            only.passes = step(state, &only.terms, Operation::Check, count, now).passes;
            only.passes > 0 || only.terms.mode == Mode::Shadow
        } else {
            for tier in &mut self.tiers {
                tier.passes = tier.terms.passes(&self.counters.at(tier.at).state, count, now);
            }
            let granted = granted(count, self.tiers.iter().map(|tier| (&tier.terms, tier.passes)));
            for tier in &self.tiers {
                let state = &mut self.counters.at(tier.at).state;
                tier.terms.settle(state, tier.passes, granted, count, now);
            }
            granted > 0
        };
        for place in 0..self.tiers.len() {
            let PendingTier { at, hash, passes, terms } = &self.tiers[place];
            if *passes > 0 {
                self.counters.at(*at).allowed();
            } else {
                self.note_denial(plan.tiers[place].rule, terms.mode, *hash, *at, now);
            }
        }
        allowed
    }

    fn note_denial(&mut self, rule: usize, mode: Mode, hash: u64, at: usize, now: Timestamp) {
        let lockout = self.counters.at(at).denied(now, self.windows[rule]);
        let stats = &mut self.stats[rule];
        match mode {
            Mode::Enforced => stats.denied += 1,
            Mode::Shadow => stats.shadowed += 1,
        }
        self.denying.push((rule, hash, mode));
        let name = || key_name(&self.extractor, &self.row, &self.prepared[rule].per);
        stats.keys.add(hash, name);
        stats.record_lockout(lockout.since_us, lockout.last_us, hash, name);
    }

    /// Finds the counter of a rule for the current labels; writes its key to `self.key`.
    #[inline]
    fn counter(&mut self, rule: usize) -> (u64, usize) {
        self.key.clear();
        self.key.extend_from_slice(&(rule as u32).to_le_bytes());
        for &label in &self.prepared[rule].per {
            match self.row.get(label) {
                Some(value) => write_value(value, &mut self.key),
                None => self.key.push(0),
            }
        }
        let hash = self.counters.hash(&self.key);
        let fresh = || State::fresh(self.prepared[rule].algorithm);
        (hash, self.counters.find(hash, &self.key, rule, fresh))
    }

    fn cost(&self, planned: &PlannedTier, record: &Record) -> Result<Cost, String> {
        let one = planned.terms.cost;
        let Unit::Field(place) = self.prepared[planned.rule].unit else { return Ok(one) };
        let UnitField { unit, field, slot } = &self.units[place];
        let Some(text) = record.get(*slot) else { return Ok(Cost::ZERO) };
        let units: Option<u64> = std::str::from_utf8(text).ok().and_then(|text| text.parse().ok());
        let units = units.ok_or_else(|| format!("expected a whole number of {unit} in {field:?}"))?;
        match units.checked_mul(one.units()).map(Cost::new) {
            Some(Ok(cost)) => Ok(cost),
            // as in the library: above any limit
            _ if planned.terms.mode == Mode::Shadow => Ok(Cost::MAX),
            _ => Err(format!("expected a valid cost, found {units} of {unit}")),
        }
    }

    /// Matches the rules against the current labels and caches the plan.
    #[cold]
    fn plan(&mut self) -> Result<Rc<Plan>, String> {
        if self.plans.len() >= MAX_PLANS {
            self.plans.clear();
        }
        let labels = self.extractor.labels(&self.row).map_err(|error| error.to_string())?;
        let applied = self.rules.matching(&labels, &self.one_of_each).map_err(|error| error.to_string())?;
        let (mut tiers, mut denying) = (Vec::new(), Vec::new());
        for Applied { rule, effect, .. } in applied {
            let at = self.positions[&rule.name];
            match effect {
                Effect::Limit { limit, cost, shadow, overdraft, .. } => {
                    let admission = if overdraft { Admission::Overdraft } else { Admission::InFull };
                    let terms = Terms { limit, cost, mode: mode(shadow), admission };
                    let variant = match &mut self.curves {
                        Some(curves) => curves.variant(at, &terms, &labels, &self.one_of_each),
                        None => 0,
                    };
                    tiers.push(PlannedTier { rule: at, terms, variant });
                }
                Effect::Deny { shadow, .. } => denying.push((at, mode(shadow))),
            }
        }
        if tiers.len() > MAX_TIERS {
            return Err(format!("expected at most {MAX_TIERS} rules to apply, found {}", tiers.len()));
        }
        let plan = Rc::new(Plan { tiers: tiers.into(), denying: denying.into() });
        self.plans.insert(self.key.as_slice().into(), Rc::clone(&plan));
        Ok(plan)
    }
}

impl PreparedRule {
    fn of(rule: &Rule, extractor: &LabelExtractor, units: &[UnitField]) -> Self {
        let position =
            |label: &str| extractor.position(label).expect("the labels of all rules are registered");
        let unit = match units.iter().position(|unit| *unit.unit == *rule.unit) {
            Some(place) => Unit::Field(place),
            None if *rule.unit == *DEFAULT_UNIT => Unit::One,
            None => Unit::Unknown,
        };
        Self {
            per: rule.per.iter().map(|label| position(label)).collect(),
            unit,
            stagger: rule.stagger,
            stored_name: encoded_rule(&rule.name),
            algorithm: rule.limit.algorithm(),
        }
    }

    /// The limit with the phase of this key, unless an override has set a calendar window.
    fn staggered(&self, row: &LabelRow, limit: Limit) -> Limit {
        if limit.calendar().is_some() {
            return limit;
        }
        let values: Vec<_> = self.per.iter().map(|&label| row.get(label)).collect();
        let phase = staggered_phase(&Key::of_rule(&self.stored_name, &values, None), limit.window_us());
        limit.with_phase(phase).expect("only fixed windows are staggered")
    }
}

fn mode(shadow: bool) -> Mode {
    if shadow { Mode::Shadow } else { Mode::Enforced }
}

fn key_name(extractor: &LabelExtractor, row: &LabelRow, per: &[usize]) -> KeyName {
    let value = |&label: &usize| {
        let text = row.get(label).map(|value| String::from_utf8_lossy(value).into_owned());
        (extractor.name(label).to_owned(), text)
    };
    KeyName(per.iter().map(value).collect())
}
