//! Seeded random histories: every store must agree with the model on every field of every answer.
//!
//! A history mixes tiers, costs, operations, changed limits, equal times, times one microsecond before and at a
//! boundary, and clocks that are set back and forth. A failure prints its seed. `SLUICEGATE_SEED` replays it, and
//! `SLUICEGATE_STEPS` sets the length.

use std::{env, time::Duration};

use rand::{Rng, SeedableRng, rngs::StdRng, seq::IndexedRandom};
use sluicegate::{
    Algorithm, Cost, Limit, ManualClock, Retry, Timestamp,
    calendar::{Anchor, Calendar, CalendarUnit, Weekday, Zone},
    limiter::Operation,
    store::{Check, CheckAnswer, Key, Store, Terms, Tier},
};
use sluicegate_core::{
    step::{Admission, Mode},
    time::MAX_WAIT_US,
};

use crate::{
    model::{Expected, Model},
    reference_calendar::ZONES,
    store_fixture::{decide, reset},
};

/// Number of steps of a history unless `SLUICEGATE_STEPS` is set.
pub const STEPS: usize = 10_000;

/// A time with all digits in use.
const START: Timestamp = Timestamp::from_micros(1_794_765_441_799_839);
/// A history that passes this time starts again at [`START`]: 50 years later.
const END: Timestamp = Timestamp::from_micros(START.as_micros() + 50 * 365 * 86_400 * 1_000_000);
const IDENTITIES: usize = 4;
const MAX_TIERS: usize = 8;
const LARGEST: u64 = (1 << 53) - 1;

/// The parameters of a history.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The algorithms of its counters.
    pub algorithms: Vec<Algorithm>,
    /// Number of checks.
    pub steps: usize,
    /// The seed of the random numbers.
    pub seed: u64,
    /// The sizes of the limits.
    pub limits: Limits,
    /// Maximum number of checks per batch.
    pub largest_batch: usize,
}

/// The sizes of the limits of a history.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limits {
    /// All sizes, mostly small, so that limits are reached often.
    Any,
    /// From 20 to 400 in some seconds, with costs of one: sliding logs grow long and wrap around their ring.
    Dense,
}

impl Plan {
    /// Returns a history of [`STEPS`] or `SLUICEGATE_STEPS` checks, from `seed` or `SLUICEGATE_SEED`.
    pub fn new(algorithms: &[Algorithm], seed: u64) -> Self {
        let number = |name: &str| env::var(name).ok().and_then(|value| value.parse().ok());
        Self {
            algorithms: algorithms.to_vec(),
            steps: number("SLUICEGATE_STEPS")
                .map_or(STEPS, |steps| usize::try_from(steps).unwrap_or(usize::MAX)),
            seed: number("SLUICEGATE_SEED").unwrap_or(seed),
            limits: Limits::Any,
            largest_batch: 4,
        }
    }

    /// Returns the same history with one check per batch: where a check spans several nodes, a denied check has
    /// released its reservations only when the next batch begins.
    pub fn one_at_a_time(self) -> Self {
        Self { largest_batch: 1, ..self }
    }

    /// Returns the same history with this many checks, unless `SLUICEGATE_STEPS` is set.
    pub fn steps(self, steps: usize) -> Self {
        if env::var_os("SLUICEGATE_STEPS").is_some() { self } else { Self { steps, ..self } }
    }

    /// Returns the same history over limits that fill up slowly.
    pub fn dense(self) -> Self {
        Self { limits: Limits::Dense, ..self }
    }
}

/// Runs a history on a store whose clock is `clock`, and on the model.
///
/// # Panics
/// When they disagree. The message contains the seed, the step and both answers.
pub async fn assert_agrees_with_model(store: impl Into<Store>, clock: &ManualClock, plan: &Plan) {
    let store = &store.into();
    let mut chance = StdRng::seed_from_u64(plan.seed);
    let mut model = Model::default();
    let mut counters: Vec<Counter> = counters(plan, &mut chance);
    let mut now = START;
    let mut notable_times = NotableTimes::default();
    let mut done = 0;
    while done < plan.steps {
        now = notable_times.next_moment(now, plan.limits, &counters, &mut chance);
        clock.set(now);
        let checks: Vec<Check> = (0..chance.random_range(1..=plan.largest_batch))
            .map(|_| random_check(&mut counters, plan.limits, &notable_times, now, &mut chance))
            .collect();
        let decided = decide(store, &checks, None).await.unwrap_or_else(|error| {
            panic!("seed {} step {done}: the store failed: {error}\n{checks:#?}", plan.seed)
        });
        for (check, CheckAnswer { at, answers }) in checks.iter().zip(&decided) {
            assert_eq!(*at, now, "seed {} step {done}: the store uses another clock", plan.seed);
            let expected = model.decide(check, now);
            let granted = u32::try_from(expected.iter().filter(|one| one.granted).count()).expect("small");
            for (index, expected) in (0..).zip(&expected) {
                let granted = if check.operation() == Operation::Peek { 0 } else { granted };
                let shares = answers
                    .iter()
                    .zip(check.tiers())
                    .map(|(answer, tier)| answer.share(&tier.terms, index, granted));
                let mut found: Vec<_> = shares.collect();
                for (found, expected) in found.iter_mut().zip(&expected.shares) {
                    // A batch that fills a bucket for more than 285 years reports that to all of its requests.
                    if check.count() > 1 && found.reset_after == Duration::from_micros(MAX_WAIT_US) {
                        found.reset_after = expected.reset_after;
                    }
                }
                assert_eq!(
                    found,
                    expected.shares,
                    "seed {} step {done}, request {index} of {} at {now:?}: found (left) differs from expected (right)\n\
                     {check:#?}\n{answers:#?}",
                    plan.seed,
                    check.count(),
                );
            }
            notable_times.record(now, check, &expected);
            done += 1;
        }
        if chance.random_bool(0.002) {
            let counter = counters.choose(&mut chance).expect("there are counters");
            let algorithm = counter.limit.algorithm();
            reset(store, &counter.key, algorithm).await;
            model.reset(&counter.key, algorithm);
        }
    }
}

struct Counter {
    key: Key,
    limit: Limit,
}

fn counters(plan: &Plan, chance: &mut StdRng) -> Vec<Counter> {
    let mut counters = Vec::new();
    for rule in 0..MAX_TIERS {
        for identity in 0..IDENTITIES {
            let algorithm = *plan.algorithms.choose(chance).expect("a plan has algorithms");
            let key = Key::without_rule(format!("{rule}:{identity}")).expect("a short key");
            counters.push(Counter { key, limit: random_limit(algorithm, plan.limits, chance) });
        }
    }
    counters
}

/// Times just before, at and after a change.
#[derive(Default)]
struct NotableTimes {
    moments: Vec<u64>,
    charges: Vec<Timestamp>,
}

impl NotableTimes {
    fn record(&mut self, now: Timestamp, check: &Check, expected: &[Expected]) {
        let waits = expected.iter().flat_map(|one| &one.shares).flat_map(|share| {
            let retry = match share.retry {
                Some(Retry::After(wait)) => Some(wait),
                _ => None,
            };
            [retry, Some(share.reset_after)]
        });
        let near = waits.flatten().filter(|wait| *wait < Duration::from_secs(1 << 32));
        self.moments.extend(near.map(|wait| now.plus(wait).as_micros()));
        let excess = self.moments.len().saturating_sub(64);
        self.moments.drain(..excess);
        if matches!(check.operation(), Operation::Check | Operation::Charge) {
            self.charges.push(now);
            let excess = self.charges.len().saturating_sub(16);
            self.charges.drain(..excess);
        }
    }

    fn next_moment(
        &self,
        now: Timestamp,
        limits: Limits,
        counters: &[Counter],
        chance: &mut StdRng,
    ) -> Timestamp {
        let window = counters.choose(chance).expect("there are counters").limit.window();
        let up_to = |duration: Duration, chance: &mut StdRng| {
            Duration::from_micros(chance.random_range(0..=u64::try_from(duration.as_micros()).expect("fits")))
        };
        match chance.random_range(0..100) {
            _ if now > END => START,
            5.. if limits == Limits::Dense => now.plus(up_to(Duration::from_millis(20), chance)),
            0..30 => now,
            30..35 => now.plus(Duration::from_micros(1)),
            35..65 => match self.moments.choose(chance) {
                Some(moment) => {
                    Timestamp::from_micros((moment - 1 + chance.random_range(0..3)).max(now.as_micros()))
                }
                None => now,
            },
            65..80 => now.plus(up_to(Duration::from_millis(20), chance)),
            80..90 => now.plus(up_to(window.min(Duration::from_secs(5)), chance)),
            90..96 => now.plus(up_to(2 * window.min(Duration::from_secs(7200)), chance)),
            96..98 => now.minus(up_to(Duration::from_millis(50), chance)),
            98 => now.minus(up_to(window.min(Duration::from_secs(50)), chance)),
            _ => now.plus(up_to(window, chance).min(Duration::from_secs(86_400))),
        }
    }
}

pub(crate) fn random_limit(algorithm: Algorithm, limits: Limits, chance: &mut StdRng) -> Limit {
    if limits == Limits::Dense {
        let window = Duration::from_millis(chance.random_range(1_000..=10_000));
        return Limit::new(algorithm, chance.random_range(20..=400), window).expect("within the range");
    }
    let max = algorithm.max_amount();
    let amount = match chance.random_range(0..20) {
        0 => 1,
        1..13 => chance.random_range(1..=12),
        13..16 => (*[7, 60, 100, 1_000, 9_973, 300_000].choose(chance).expect("not empty")).min(max),
        16 => max,
        17 => max - 1,
        _ => chance.random_range(1..=max),
    };
    if algorithm == Algorithm::FixedWindow && chance.random_bool(0.3) {
        return Limit::fixed_window(amount, random_calendar(chance)).expect("within the range");
    }
    let micros = match chance.random_range(0..20) {
        0..4 => 1_000,
        4..8 => chance.random_range(1_000..=20_000),
        8..14 => *[1_000_000, 60_000_000, 7_000_000, 1_000_003].choose(chance).expect("not empty"),
        14..16 => 3_600_000_000,
        16 => 315_360_000_000_000,
        17 => 315_359_999_999_999,
        _ => chance.random_range(1_000..=100_000_000_000),
    };
    let limit = Limit::new(algorithm, amount, Duration::from_micros(micros)).expect("within the range");
    match algorithm {
        Algorithm::TokenBucket if chance.random_bool(0.5) => {
            let burst = if chance.random_bool(0.8) { chance.random_range(1..=20) } else { 1_000_000_000 };
            limit.with_burst(burst).expect("within the range")
        }
        Algorithm::FixedWindow if chance.random_bool(0.3) => {
            limit.with_phase(Duration::from_micros(chance.random_range(0..=micros))).expect("a fixed window")
        }
        _ => limit,
    }
}

fn random_calendar(chance: &mut StdRng) -> &'static Calendar {
    let unit = *CalendarUnit::ALL.choose(chance).expect("not empty");
    let anchor = match unit {
        CalendarUnit::Day => None,
        CalendarUnit::Week => Some(Anchor::Weekday(*Weekday::ALL.choose(chance).expect("not empty"))),
        _ => Some(Anchor::DayOfMonth(chance.random_range(1..=31))),
    };
    let zone = Zone::named(ZONES.choose(chance).expect("not empty")).expect("a zone of the database");
    zone.calendar(unit, anchor).expect("the anchor fits the unit")
}

fn random_check(
    counters: &mut [Counter],
    limits: Limits,
    notable_times: &NotableTimes,
    now: Timestamp,
    chance: &mut StdRng,
) -> Check {
    let operation = match chance.random_range(0..20) {
        0..14 => Operation::Check,
        14..16 => Operation::Peek,
        16..18 => Operation::Charge,
        18 => Operation::Refund { at: None },
        _ => Operation::Refund { at: Some(*notable_times.charges.choose(chance).unwrap_or(&now)) },
    };
    let tier_count = match chance.random_range(0..10) {
        0..5 => 1,
        5..8 => 2,
        _ => chance.random_range(3..=MAX_TIERS),
    };
    let first = chance.random_range(0..MAX_TIERS);
    let tiers = (0..tier_count).map(|tier| {
        let identity = if limits == Limits::Dense { 0 } else { chance.random_range(0..IDENTITIES) };
        let counter = &mut counters[(first + tier) % MAX_TIERS * IDENTITIES + identity];
        if chance.random_bool(if limits == Limits::Dense { 0.001 } else { 0.03 }) {
            counter.limit = random_limit(counter.limit.algorithm(), limits, chance);
        }
        let mut terms = Terms::new(counter.limit, random_cost(&counter.limit, limits, operation, chance));
        if chance.random_bool(0.15) {
            terms.mode = Mode::Shadow;
        }
        if chance.random_bool(0.15) {
            terms.admission = Admission::Overdraft;
        }
        Tier { key: counter.key.clone(), terms }
    });
    let check = Check::new(operation, tiers.collect()).expect("tiers are on different keys");
    match operation {
        Operation::Check if chance.random_bool(0.3) => check.times(chance.random_range(2..=9)),
        _ => check,
    }
}

fn random_cost(limit: &Limit, limits: Limits, operation: Operation, chance: &mut StdRng) -> Cost {
    let capacity = limit.capacity();
    let units = match chance.random_range(0..24) {
        // Costs of one, except for a rare charge that makes a log wide.
        1.. if limits == Limits::Dense => 1,
        _ if limits == Limits::Dense && operation == Operation::Charge => {
            *[2, 1 << 40].choose(chance).expect("not empty")
        }
        _ if limits == Limits::Dense => chance.random_range(1..=capacity),
        _ => units_of_any_size(capacity, operation, chance),
    };
    Cost::new(units).expect("within the range")
}

pub(crate) fn units_of_any_size(capacity: u64, operation: Operation, chance: &mut StdRng) -> u64 {
    match chance.random_range(0..24) {
        0..2 => 0,
        2..12 => 1,
        12..16 => chance.random_range(1..=5),
        16 => capacity,
        17 => capacity + 1,
        18 => capacity - 1,
        19 => capacity / 2 + 1,
        20 if operation == Operation::Charge => {
            *[LARGEST, LARGEST - 1, 1 << 40, (1 << 40) - 1].choose(chance).expect("not empty")
        }
        _ => chance.random_range(1..=capacity),
    }
}
