//! One rule file, asked about one request after the other on a virtual clock.
//!
//! The rules are matched by the library's own matcher and decided by the core's own steps, all or none, as a store does. Only
//! what lies between is made for this: which rules apply, with which numbers, is remembered for each combination of label values
//! that conditions depend on, and counters are found by the bytes of their key.

use std::{collections::HashMap, rc::Rc, sync::Arc};

use tollgate::{
    Admission, Algorithm, Cost, Costs, Key, Limit, Mode, Operation, Rule, RuleSet, Terms, Timestamp,
    check::MAX_TIERS,
    key::encoded_rule,
    rules::{Applied, DEFAULT_UNIT, Effect, staggered_phase},
};
use tollgate_core::{
    State,
    step::{granted, step},
};

use super::{
    counters::Counters,
    curve::Curves,
    labels::{Row, Shape, write_value},
    log::Record,
    tally::{KeyName, Tally},
    timeline::Timeline,
};

/// How many combinations of label values are remembered at once; they are forgotten together.
const MAX_PLANS: usize = 1 << 16;

/// `--cost`: how many of a unit a request takes, read from a field.
#[derive(Clone, Debug)]
pub(super) struct UnitField {
    pub(super) unit: String,
    pub(super) field: String,
    pub(super) slot: usize,
}

/// A rule file on its way through a log.
pub(super) struct Replay {
    pub(super) rules: RuleSet,
    pub(super) shape: Shape,
    positions: HashMap<Arc<str>, usize>,
    facts: Vec<Facts>,
    windows: Vec<u64>,
    units: Vec<UnitField>,
    /// What a request costs of each unit it has, once.
    one_of_each: Costs,
    plans: HashMap<Box<[u8]>, Rc<Plan>, foldhash::fast::RandomState>,
    pub(super) counters: Counters<State>,
    pub(super) curves: Option<Curves>,
    pub(super) tallies: Vec<Tally>,
    /// Requests that no rule applied to.
    pub(super) unmatched: u64,
    pub(super) refused: u64,
    /// The first row of the timeline that is this file's: requests it refused, then one for each rule.
    first_row: usize,
    /// Who refused the last request, or would have.
    refusing: Vec<(usize, u64, Mode)>,
    row: Row,
    key: Vec<u8>,
    tiers: Vec<Asked>,
}

/// What is known of a rule before the first request.
struct Facts {
    per: Vec<usize>,
    unit: Unit,
    stagger: bool,
    stored_name: Arc<str>,
    algorithm: Algorithm,
}

/// How many of a rule's unit a request takes.
#[derive(Clone, Copy)]
enum Unit {
    One,
    /// What the field in this place of the units says.
    Field(usize),
    /// None: nothing in the log says how many.
    Unknown,
}

/// What the rules make of requests with certain labels.
pub(super) struct Plan {
    /// The rules that count, each with its terms; the cost is that of one unit.
    tiers: Box<[Planned]>,
    /// The rules that refuse outright, and whether they only would.
    refusing: Box<[(usize, Mode)]>,
}

struct Planned {
    rule: usize,
    terms: Terms,
    /// The same for each amount of the rule's curve.
    ladder: usize,
}

/// A counter of the request under way.
struct Asked {
    at: usize,
    hash: u64,
    terms: Terms,
    passes: u32,
}

impl Replay {
    pub(super) fn new(
        rules: RuleSet,
        shape: Shape,
        units: Vec<UnitField>,
        curves: Option<Curves>,
        first_row: usize,
    ) -> Self {
        let known = units.iter().map(|unit| &*unit.unit).chain([DEFAULT_UNIT]);
        let mut one_of_each: Vec<_> = known.map(|unit| (unit, Cost::ONE)).collect();
        one_of_each.dedup_by_key(|(unit, _)| *unit);
        let facts = rules.rules().map(|rule| Facts::of(rule, &shape, &units)).collect();
        let positions = rules.rules().enumerate().map(|(at, rule)| (Arc::clone(&rule.name), at)).collect();
        Self {
            positions,
            facts,
            windows: rules.rules().map(|rule| rule.limit.window_us()).collect(),
            tallies: rules.rules().map(|_| Tally::default()).collect(),
            one_of_each: Costs::new(one_of_each).expect("flags with impossible units were refused"),
            rules,
            shape,
            units,
            plans: HashMap::default(),
            counters: Counters::new(),
            curves,
            unmatched: 0,
            refused: 0,
            first_row,
            refusing: Vec::new(),
            row: Row::default(),
            key: Vec::new(),
            tiers: Vec::new(),
        }
    }

    /// Whether nothing in the log says how much a request takes of what a rule counts.
    pub(super) fn lacks_unit(&self, rule: usize) -> bool {
        matches!(self.facts[rule].unit, Unit::Unknown)
    }

    /// How many rows of the timeline it takes.
    pub(super) fn rows(rules: &RuleSet) -> usize {
        1 + rules.len()
    }

    /// The row of the timeline with what a rule refused.
    pub(super) fn row_of(&self, rule: usize) -> usize {
        self.first_row + 1 + rule
    }

    /// Reads a request's labels and costs, and finds out what the rules make of them.
    ///
    /// # Errors
    /// When it cannot be asked about: the server would say so too. Nothing was counted.
    #[inline]
    pub(super) fn prepare(&mut self, record: &Record) -> Result<Rc<Plan>, String> {
        self.shape.read(record, &mut self.row)?;
        self.key.clear();
        self.shape.write_matched(&self.row, &mut self.key);
        let plan = match self.plans.get(&*self.key) {
            Some(plan) => Rc::clone(plan),
            None => self.plan()?,
        };
        self.tiers.clear();
        for planned in &plan.tiers {
            let cost = self.cost(planned, record)?;
            let terms = Terms { cost, ..planned.terms };
            self.tiers.push(Asked { at: 0, hash: 0, terms, passes: 0 });
        }
        Ok(plan)
    }

    /// Decides the request that was prepared. Whether it may pass.
    #[inline]
    pub(super) fn decide(&mut self, plan: &Plan, now: Timestamp, timeline: &mut Timeline) -> bool {
        self.refusing.clear();
        if plan.tiers.is_empty() && plan.refusing.is_empty() {
            self.unmatched += 1;
            return true;
        }
        let allowed = self.follow(plan, now);
        if !allowed {
            self.refused += 1;
            timeline.count(self.first_row);
        }
        for &(rule, ..) in &self.refusing {
            timeline.count(self.row_of(rule));
        }
        allowed
    }

    /// Notes whom the last request's refusal hit, as the other rule file let it pass.
    pub(super) fn only_here(&mut self) {
        for &(rule, hash, _) in self.refusing.iter().filter(|(_, _, mode)| *mode == Mode::Enforced) {
            let name = || key_name(&self.shape, &self.row, &self.facts[rule].per);
            self.tallies[rule].only_here.add(hash, name);
        }
    }

    fn follow(&mut self, plan: &Plan, now: Timestamp) -> bool {
        self.counters.make_room(plan.tiers.len() + plan.refusing.len(), now, &self.windows);
        for &(rule, mode) in &plan.refusing {
            self.tallies[rule].matched += 1;
            let (hash, at) = self.counter(rule);
            self.note_refusal(rule, mode, hash, at, now);
            if let Some(curves) = &mut self.curves {
                curves.refused_outright(rule);
            }
        }
        for (place, planned) in plan.tiers.iter().enumerate() {
            self.tallies[planned.rule].matched += 1;
            let (hash, at) = self.counter(planned.rule);
            let asked = &mut self.tiers[place];
            (asked.hash, asked.at) = (hash, at);
            if self.facts[planned.rule].stagger {
                asked.terms.limit = self.facts[planned.rule].staggered(&self.row, asked.terms.limit);
            }
            if let Some(curves) = &mut self.curves {
                curves.ask(planned.rule, planned.ladder, &asked.terms, &self.key, now);
            }
        }
        if plan.refusing.iter().any(|(_, mode)| *mode == Mode::Enforced) {
            return false;
        }
        self.all_or_none(plan, now)
    }

    /// As a store decides.
    fn all_or_none(&mut self, plan: &Plan, now: Timestamp) -> bool {
        let count = 1;
        let allowed = if let [only] = &mut self.tiers[..] {
            let state = &mut self.counters.at(only.at).state;
            only.passes = step(state, &only.terms, Operation::Check, count, now).passes;
            only.passes > 0 || only.terms.mode == Mode::Shadow
        } else {
            for asked in &mut self.tiers {
                asked.passes = asked.terms.passes(&self.counters.at(asked.at).state, count, now);
            }
            let granted = granted(count, self.tiers.iter().map(|asked| (&asked.terms, asked.passes)));
            for asked in &self.tiers {
                let state = &mut self.counters.at(asked.at).state;
                asked.terms.settle(state, asked.passes, granted, count, now);
            }
            granted > 0
        };
        for place in 0..self.tiers.len() {
            let Asked { at, hash, passes, terms } = &self.tiers[place];
            if *passes > 0 {
                self.counters.at(*at).passed();
            } else {
                self.note_refusal(plan.tiers[place].rule, terms.mode, *hash, *at, now);
            }
        }
        allowed
    }

    fn note_refusal(&mut self, rule: usize, mode: Mode, hash: u64, at: usize, now: Timestamp) {
        let lockout = self.counters.at(at).refused(now, self.windows[rule]);
        let tally = &mut self.tallies[rule];
        match mode {
            Mode::Enforced => tally.refused += 1,
            Mode::Shadow => tally.shadowed += 1,
        }
        self.refusing.push((rule, hash, mode));
        let name = || key_name(&self.shape, &self.row, &self.facts[rule].per);
        tally.keys.add(hash, name);
        tally.locked_out(lockout.since_us, lockout.last_us, hash, name);
    }

    /// The counter of a rule for the labels at hand; `key` has its bytes.
    #[inline]
    fn counter(&mut self, rule: usize) -> (u64, usize) {
        self.key.clear();
        self.key.extend_from_slice(&(rule as u32).to_le_bytes());
        for &label in &self.facts[rule].per {
            match self.row.get(label) {
                Some(value) => write_value(value, &mut self.key),
                None => self.key.push(0),
            }
        }
        let hash = self.counters.hash(&self.key);
        let fresh = || State::fresh(self.facts[rule].algorithm);
        (hash, self.counters.find(hash, &self.key, rule, fresh))
    }

    fn cost(&self, planned: &Planned, record: &Record) -> Result<Cost, String> {
        let one = planned.terms.cost;
        let Unit::Field(place) = self.facts[planned.rule].unit else { return Ok(one) };
        let UnitField { unit, field, slot } = &self.units[place];
        let Some(text) = record.get(*slot) else { return Ok(Cost::ZERO) };
        let units: Option<u64> = std::str::from_utf8(text).ok().and_then(|text| text.parse().ok());
        let units = units.ok_or_else(|| format!("expected a whole number of {unit} in {field:?}"))?;
        match units.checked_mul(one.units()).map(Cost::new) {
            Some(Ok(cost)) => Ok(cost),
            // as the library does: more than any limit holds
            _ if planned.terms.mode == Mode::Shadow => Ok(Cost::MAX),
            _ => Err(format!("expected a cost that any limit could hold, not {units} of {unit}")),
        }
    }

    /// Finds out which rules apply to labels like these.
    #[cold]
    fn plan(&mut self) -> Result<Rc<Plan>, String> {
        if self.plans.len() >= MAX_PLANS {
            self.plans.clear();
        }
        let labels = self.shape.labels(&self.row).map_err(|error| error.to_string())?;
        let applied = self.rules.matching(&labels, &self.one_of_each).map_err(|error| error.to_string())?;
        let (mut tiers, mut refusing) = (Vec::new(), Vec::new());
        for Applied { rule, effect } in applied {
            let at = self.positions[&rule.name];
            match effect {
                Effect::Limit { limit, cost, shadow, overdraft, .. } => {
                    let admission = if overdraft { Admission::Overdraft } else { Admission::InFull };
                    let terms = Terms { limit, cost, mode: mode(shadow), admission };
                    let ladder = match &mut self.curves {
                        Some(curves) => curves.ladder(at, &terms, &labels, &self.one_of_each),
                        None => 0,
                    };
                    tiers.push(Planned { rule: at, terms, ladder });
                }
                Effect::Deny { shadow, .. } => refusing.push((at, mode(shadow))),
            }
        }
        if tiers.len() > MAX_TIERS {
            return Err(format!("expected at most {MAX_TIERS} rules to apply, found {}", tiers.len()));
        }
        let plan = Rc::new(Plan { tiers: tiers.into(), refusing: refusing.into() });
        self.plans.insert(self.key.as_slice().into(), Rc::clone(&plan));
        Ok(plan)
    }
}

impl Facts {
    fn of(rule: &Rule, shape: &Shape, units: &[UnitField]) -> Self {
        let position = |label: &str| shape.position(label).expect("all labels of rules have a place");
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

    /// The limit with the windows that this key has.
    fn staggered(&self, row: &Row, limit: Limit) -> Limit {
        let values: Vec<_> = self.per.iter().map(|&label| row.get(label)).collect();
        let phase = staggered_phase(&Key::of_rule(&self.stored_name, &values, None), limit.window_us());
        limit.with_phase(phase).expect("only fixed windows are staggered")
    }
}

fn mode(shadow: bool) -> Mode {
    if shadow { Mode::Shadow } else { Mode::Enforced }
}

fn key_name(shape: &Shape, row: &Row, per: &[usize]) -> KeyName {
    let value = |&label: &usize| {
        let text = row.get(label).map(|value| String::from_utf8_lossy(value).into_owned());
        (shape.name(label).to_owned(), text)
    };
    KeyName(per.iter().map(value).collect())
}
