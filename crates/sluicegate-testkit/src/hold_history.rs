//! Seeded random histories of holds: made, repeated, settled, renewed and reverted, with several ids per counter, mixed with other
//! operations on the same counters, changed limits, resets, and clocks that are set back. A store must agree with the model on every field of
//! every answer. A failure prints its seed; `SLUICEGATE_SEED` and `SLUICEGATE_STEPS` apply as in [`history`](crate::history).

use std::time::Duration;

use rand::{Rng, SeedableRng, rngs::StdRng, seq::IndexedRandom};
use sluicegate::{
    Algorithm, Cost, Limit, ManualClock, Retry, Timestamp,
    limiter::Operation,
    store::{
        Check, CheckAnswer, HoldAnswer, HoldCall, HoldId, HoldOperation, HoldOutcome, Key, Store, Terms, Tier,
    },
};
use sluicegate_core::{
    OnExpiry,
    hold::{HOLD_RETENTION, MAX_CLOCK_SETBACK, MAX_HOLD_TTL},
    step::{Admission, Mode},
};

use crate::{
    cluster::Cluster,
    history::{Limits, Plan, random_limit, units_of_any_size},
    model::{HeldExpected, Model, Places},
    store_fixture::{START, decide, reset},
};

const COUNTERS: usize = 10;
const MAX_TIERS: usize = 4;
/// Holds that later steps refer to.
const RECENT: usize = 24;
/// The longest time from a hold of a calendar window until its last renewal. Redis stores the two periods around the time of the hold, so an excess
/// that is charged after both may count in one more period.
const LONGEST: Duration = Duration::from_secs(10 * 3_600);

/// A hold that was made, or denied.
#[derive(Clone)]
struct Recent {
    id: String,
    tiers: Vec<Tier>,
    at: Timestamp,
}

struct History<'a> {
    plan: &'a Plan,
    places: Places,
    chance: StdRng,
    now: Timestamp,
    counters: Vec<(Key, Limit)>,
    recent: Vec<Recent>,
    /// Times just before, at and after a change.
    moments: Vec<u64>,
    next_id: u64,
    /// A counter that gets several holds at once, which expire together, and the number of holds to come.
    burst: Option<(Tier, u32)>,
    /// Whether the last step was a hold with the longest time to live.
    made_longest: bool,
}

/// Runs a history on a store whose clock is `clock`, and on the model.
///
/// # Panics
/// When they disagree. The message contains the seed, the step and both answers.
pub async fn assert_holds_agree_with_model(store: impl Into<Store>, clock: &ManualClock, plan: &Plan) {
    run(&store.into(), clock, plan, None).await;
}

/// Runs a history on a store on this Cluster.
///
/// # Panics
/// When store and model disagree.
pub async fn assert_holds_agree_with_model_on(
    cluster: &Cluster,
    store: impl Into<Store>,
    clock: &ManualClock,
    plan: &Plan,
) {
    run(&store.into(), clock, plan, Some(cluster)).await;
}

async fn run(store: &Store, clock: &ManualClock, plan: &Plan, cluster: Option<&Cluster>) {
    let mut history = History::new(plan, cluster);
    let mut model = Model::default();
    let mut done = 0;
    while done < plan.steps {
        history.advance(&model);
        clock.set(history.now);
        let count = history.chance.random_range(1..=plan.largest_batch);
        let checks: Vec<Check> = (0..count).map(|_| history.check()).collect();
        let decided = decide(store, &checks, None).await.unwrap_or_else(|error| {
            panic!("seed {} step {done}: the store failed: {error}\n{checks:#?}", plan.seed)
        });
        for (check, answer) in checks.iter().zip(&decided) {
            let expected = model.decide_held(check, history.now, &history.places);
            history.compare(check, answer, &expected, done);
            history.record(check, &expected);
            done += 1;
        }
        if history.chance.random_bool(0.004) {
            let (key, limit) = history.counters.choose(&mut history.chance).expect("there are counters");
            reset(store, key, limit.algorithm()).await;
            model.reset(key, limit.algorithm());
        }
    }
}

impl<'a> History<'a> {
    fn new(plan: &'a Plan, cluster: Option<&Cluster>) -> Self {
        let chance = StdRng::seed_from_u64(plan.seed);
        let recent = Vec::new();
        let mut history = Self {
            plan,
            places: Places::new(),
            chance,
            now: START,
            counters: Vec::new(),
            recent,
            moments: Vec::new(),
            next_id: 0,
            burst: None,
            made_longest: false,
        };
        for number in 0..COUNTERS {
            let algorithm = *plan.algorithms.choose(&mut history.chance).expect("a plan has algorithms");
            let key = Key::without_rule(format!("held:{number}")).expect("a short key");
            if let Some(cluster) = cluster {
                let slot = cluster.slot_of(format!("{{{:08x}}}", key.tag()));
                let node = cluster.primary_of(slot).expect("every slot is served");
                history.places.insert(key.clone(), (slot, node));
            }
            let limit = history.limit(algorithm);
            history.counters.push((key, limit));
        }
        history
    }

    fn limit(&mut self, algorithm: Algorithm) -> Limit {
        let chance = &mut self.chance;
        let limit = if algorithm == Algorithm::Concurrency {
            let amount = if chance.random_bool(0.8) { chance.random_range(1..=12) } else { 1_000_000_000 };
            Limit::concurrency(amount).expect("within the range")
        } else if algorithm == Algorithm::TokenBucket && chance.random_bool(0.3) {
            slow_bucket(chance)
        } else {
            random_limit(algorithm, Limits::Any, chance)
        };
        let limit = if chance.random_bool(0.5) {
            limit.with_on_expiry(OnExpiry::Release).expect("without a lease")
        } else {
            limit
        };
        if chance.random_bool(0.3) { limit.with_max_excess(chance.random_range(0..=5)) } else { limit }
    }

    fn advance(&mut self, model: &Model) {
        if self.burst.is_some() {
            return;
        }
        let chance = &mut self.chance;
        let is_far = std::mem::take(&mut self.made_longest) && chance.random_bool(0.3);
        // On a Cluster, a denied hold is kept on the other nodes if its first attempt has a later time than the denial.
        if self.places.is_empty() && (is_far || chance.random_bool(0.03)) {
            let around = Duration::from_micros(chance.random_range(0..3));
            let step = match chance.random_range(0..10) {
                // the longest step that keeps all holds, without and with the time for which their ids are kept
                _ if is_far => MAX_CLOCK_SETBACK + chance.random_range(0..2) * HOLD_RETENTION + around,
                0..7 => Duration::from_micros(chance.random_range(1..=50_000)),
                _ => Duration::from_micros(chance.random_range(1..=50_000_000)),
            };
            let earliest = model.earliest_clock(self.now);
            self.now = self.now.minus(step).max(earliest);
            return;
        }
        let up_to = |micros: u64, chance: &mut StdRng| Duration::from_micros(chance.random_range(0..=micros));
        self.now = match chance.random_range(0..100) {
            0..50 => self.now,
            50..55 => self.now.plus(Duration::from_micros(1)),
            55..75 => match self.moments.choose(chance) {
                Some(moment) => {
                    let near = moment - 1 + chance.random_range(0..3);
                    Timestamp::from_micros(near.max(self.now.as_micros()))
                }
                None => self.now,
            },
            75..85 => self.now.plus(up_to(20_000, chance)),
            85..97 => self.now.plus(up_to(5_000_000, chance)),
            97 | 98 => self.now.plus(up_to(120_000_000, chance)),
            _ => self.now.plus(up_to(7_200_000_000, chance)),
        };
    }

    fn check(&mut self) -> Check {
        if let Some((tier, left)) = self.burst.take() {
            self.burst = (left > 1).then(|| (tier.clone(), left - 1));
            let ttl = Duration::from_micros(self.chance.random_range(1_000..=1_003));
            return on_hold(&self.new_id(), vec![tier], HoldOperation::Hold { ttl });
        }
        if self.chance.random_bool(0.002) {
            let mut tier = self.tiers(Operation::Check).remove(0);
            tier.terms.cost = Cost::new(self.chance.random_range(0..=1)).expect("within the range");
            self.burst = Some((tier, 40));
        }
        match self.chance.random_range(0..100) {
            0..30 => self.hold(),
            30..55 if !self.recent.is_empty() => self.settle(),
            55..62 if !self.recent.is_empty() => self.renew(),
            62..66 if !self.recent.is_empty() => self.revert(),
            _ => self.ordinary(),
        }
    }

    fn tiers(&mut self, operation: Operation) -> Vec<Tier> {
        let count = if self.chance.random_bool(0.5) { 1 } else { self.chance.random_range(2..=MAX_TIERS) };
        let first = self.chance.random_range(0..COUNTERS);
        let mut tiers = Vec::new();
        for number in 0..count {
            let index = (first + number) % COUNTERS;
            if self.chance.random_bool(0.03) {
                self.counters[index].1 = self.limit(self.counters[index].1.algorithm());
            }
            let (key, limit) = self.counters[index].clone();
            let cost = match self.chance.random_range(0..10) {
                0..7 => self.chance.random_range(0..=4),
                _ => units_of_any_size(limit.capacity(), operation, &mut self.chance),
            };
            let mut terms = Terms::new(limit, Cost::new(cost).expect("within the range"));
            if self.chance.random_bool(0.12) {
                terms.mode = Mode::Shadow;
            }
            if self.chance.random_bool(0.12) {
                terms.admission = Admission::Overdraft;
            }
            tiers.push(Tier { key, terms });
        }
        tiers
    }

    fn ttl(&mut self) -> Duration {
        let micros = match self.chance.random_range(0..10) {
            0..3 => 1_000,
            3 => self.chance.random_range(1_000..=20_000),
            4..8 => {
                *[1_000_000, 60_000_000, 60_000_000, 2_000_003].choose(&mut self.chance).expect("not empty")
            }
            8 => self.chance.random_range(1_000..=10_000_000),
            _ => 3_600_000_000,
        };
        Duration::from_micros(micros)
    }

    fn new_id(&mut self) -> String {
        self.next_id += 1;
        format!("id-{}", self.next_id)
    }

    /// A new hold, or a repeated one: with the same tiers, or with others. The id of some of them must be new.
    fn hold(&mut self) -> Check {
        let again = self.recent.choose(&mut self.chance).cloned().filter(|_| self.chance.random_bool(0.35));
        let recent = match again {
            Some(recent) if self.chance.random_bool(0.7) => recent,
            Some(Recent { id, .. }) => Recent { id, tiers: self.tiers(Operation::Check), at: self.now },
            None => Recent { id: self.new_id(), tiers: self.tiers(Operation::Check), at: self.now },
        };
        let ttl = self.ttl_for(&recent.tiers);
        let operation = if self.chance.random_bool(0.2) {
            HoldOperation::HoldNew { ttl }
        } else {
            HoldOperation::Hold { ttl }
        };
        on_hold(&recent.id, recent.tiers, operation)
    }

    /// The time to live of a hold of these tiers: the longest one, unless a tier has a calendar window.
    fn ttl_for(&mut self, tiers: &[Tier]) -> Duration {
        let is_longest = self.chance.random_bool(0.03) && !has_calendar(tiers);
        self.made_longest |= is_longest;
        if is_longest { MAX_HOLD_TTL } else { self.ttl() }
    }

    /// The tiers of an earlier hold, or some of them, with other costs, and often with another limit, as from a token.
    fn earlier(&mut self) -> (Recent, Vec<Tier>) {
        let recent = self.recent.choose(&mut self.chance).expect("there is one").clone();
        let mut tiers = recent.tiers.clone();
        if tiers.len() > 1 && self.chance.random_bool(0.2) {
            tiers.remove(0);
        }
        for tier in &mut tiers {
            let limit = &mut tier.terms.limit;
            let estimate = tier.terms.cost.units();
            if self.chance.random_bool(0.7) {
                *limit = any_limit(limit.algorithm());
            }
            let cost = match self.chance.random_range(0..10) {
                0..2 => 0,
                2..5 => self.chance.random_range(0..=estimate),
                5 => estimate,
                6..9 => estimate + self.chance.random_range(0..=6),
                _ => Cost::MAX.units() - self.chance.random_range(0..=1),
            };
            tier.terms =
                Terms::new(*limit, Cost::new(cost.min(Cost::MAX.units())).expect("within the range"));
        }
        (recent, tiers)
    }

    fn settle(&mut self) -> Check {
        let (recent, tiers) = self.earlier();
        let kept = if self.chance.random_bool(0.3) { self.chance.random_range(0..16) } else { 0 };
        let max_excess = match self.chance.random_range(0..4) {
            0 => Some(self.chance.random_range(0..=4)),
            1 => Some(Cost::MAX.units()),
            _ => None,
        };
        on_hold(&recent.id, tiers, HoldOperation::Settle { kept, max_excess })
    }

    fn renew(&mut self) -> Check {
        let (recent, tiers) = self.earlier();
        if self.now > recent.at.plus(LONGEST) && has_calendar(&recent.tiers) {
            return self.ordinary();
        }
        let ttl = self.ttl_for(&recent.tiers);
        on_hold(&recent.id, tiers, HoldOperation::Renew { ttl })
    }

    fn revert(&mut self) -> Check {
        let (recent, tiers) = self.earlier();
        let until = if self.chance.random_bool(0.7) { self.now } else { recent.at };
        on_hold(&recent.id, tiers, HoldOperation::Revert { until })
    }

    fn ordinary(&mut self) -> Check {
        let operation = match self.chance.random_range(0..20) {
            0..10 => Operation::Check,
            10..14 => Operation::Peek,
            14..17 => Operation::Charge,
            17 => Operation::Refund { at: None },
            _ => {
                let at = self.recent.choose(&mut self.chance).map_or(self.now, |recent| recent.at);
                Operation::Refund { at: Some(at) }
            }
        };
        let tiers = self.tiers(operation);
        let is_live = |tier: &Tier| tier.terms.limit.algorithm() == Algorithm::Concurrency;
        let is_single = !self.places.is_empty() || tiers.iter().any(is_live);
        let check = Check::new(operation, tiers).expect("tiers are on different keys");
        match operation {
            Operation::Check if !is_single && self.chance.random_bool(0.3) => {
                check.times(self.chance.random_range(2..=6))
            }
            _ => check,
        }
    }

    fn compare(&self, check: &Check, answer: &CheckAnswer, expected: &HeldExpected, step: usize) {
        let CheckAnswer { at, answers } = answer;
        let seed = self.plan.seed;
        assert_eq!(*at, self.now, "seed {seed} step {step}: the store uses another clock");
        let holds: Vec<_> = answers.iter().map(|answer| answer.hold).collect();
        let has_conflict =
            |holds: &[HoldAnswer]| holds.iter().any(|hold| hold.outcome == HoldOutcome::Conflict);
        let is_conflict = has_conflict(&holds);
        let context = || {
            format!(
                "seed {seed} step {step} at {:?}: found (left), expected (right)\n{check:#?}\n{answers:#?}",
                self.now
            )
        };
        assert_eq!(is_conflict, has_conflict(&expected.holds), "{}", context());
        if is_conflict && !self.places.is_empty() {
            return; // an error, whatever the other servers answered
        }
        assert_eq!(holds, expected.holds, "{}", context());
        let granted = expected.requests.iter().filter(|one| one.granted).count();
        let granted =
            if check.operation() == Operation::Peek { 0 } else { u32::try_from(granted).expect("small") };
        for (index, expected) in (0..).zip(&expected.requests) {
            let shares = answers.iter().zip(check.tiers());
            let mut shares: Vec<_> =
                shares.map(|(answer, tier)| answer.share(&tier.terms, index, granted)).collect();
            for (share, expected) in shares.iter_mut().zip(&expected.shares) {
                // a batch that fills a bucket for more than 285 years reports that to all of its requests
                if check.count() > 1
                    && share.reset_after == Duration::from_micros(sluicegate_core::time::MAX_WAIT_US)
                {
                    share.reset_after = expected.reset_after;
                }
            }
            assert_eq!(shares, expected.shares, "request {index}, {}", context());
        }
    }

    /// Records a hold, and the time of its next change. Later steps refer to it for a while, even if it has ended or was denied.
    fn record(&mut self, check: &Check, expected: &HeldExpected) {
        let now = self.now;
        if let Some(HoldCall { id, operation }) = check.hold() {
            let outcomes: Vec<_> = expected.holds.iter().map(|hold| hold.outcome).collect();
            let is_new = matches!(operation, HoldOperation::Hold { .. } | HoldOperation::HoldNew { .. })
                && (outcomes.contains(&HoldOutcome::Held) || self.chance.random_bool(0.1));
            let has_ended =
                outcomes.iter().all(|outcome| matches!(outcome, HoldOutcome::Already | HoldOutcome::Unknown));
            let is_removed = is_new || has_ended && self.chance.random_bool(0.5);
            self.recent.retain(|recent| recent.id != id.as_str() || !is_removed);
            if is_new {
                if self.recent.len() == RECENT {
                    self.recent.remove(self.chance.random_range(0..RECENT / 2));
                }
                self.recent.push(Recent {
                    id: id.as_str().to_owned(),
                    tiers: check.tiers().to_vec(),
                    at: now,
                });
            }
        }
        let shares = expected.requests.iter().flat_map(|one| &one.shares);
        let waits = shares.flat_map(|share| {
            let retry = match share.retry {
                Some(Retry::After(wait)) => Some(wait),
                _ => None,
            };
            [retry, Some(share.reset_after)]
        });
        let near = waits.flatten().filter(|wait| *wait < Duration::from_secs(3_600));
        self.moments.extend(near.map(|wait| now.plus(wait).as_micros()));
        for hold in expected.holds.iter().filter(|hold| hold.expires_at > now) {
            self.moments
                .extend([hold.expires_at, hold.expires_at.plus(HOLD_RETENTION)].map(Timestamp::as_micros));
        }
        if expected.holds.iter().any(|hold| matches!(hold.outcome, HoldOutcome::Settled | HoldOutcome::Late))
        {
            self.moments.push(now.plus(HOLD_RETENTION).as_micros());
        }
        self.moments.retain(|moment| *moment >= now.as_micros());
        let excess = self.moments.len().saturating_sub(32);
        self.moments.drain(..excess);
    }
}

fn on_hold(id: &str, tiers: Vec<Tier>, operation: HoldOperation) -> Check {
    let check = Check::new(Operation::Charge, tiers).expect("tiers are on different keys");
    check.with_hold(HoldId::new(id).expect("a short id"), operation)
}

/// Returns a bucket whose burst drains for many windows, so that refunds are often later than one window.
fn slow_bucket(chance: &mut StdRng) -> Limit {
    let window = Duration::from_millis(*[1, 20, 1_000].choose(chance).expect("not empty"));
    let limit = Limit::token_bucket(chance.random_range(1..=3), window);
    limit.and_then(|limit| limit.with_burst(chance.random_range(20..=1_000))).expect("within the range")
}

fn has_calendar(tiers: &[Tier]) -> bool {
    tiers.iter().any(|tier| tier.terms.limit.calendar().is_some())
}

fn any_limit(algorithm: Algorithm) -> Limit {
    match algorithm {
        Algorithm::Concurrency => Limit::concurrency(1).expect("within the range"),
        _ => Limit::new(algorithm, 1, Duration::from_secs(1)).expect("within the range"),
    }
}
