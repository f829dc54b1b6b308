//! Seeded random histories of leases: draws, returns of spent and unspent units, other operations on the same counters, resets and
//! lost returns. A store must agree with the model on every field. A failure prints its seed.

use std::{sync::Arc, time::Duration};

use rand::{Rng, SeedableRng, rngs::StdRng, seq::IndexedRandom};
use sluicegate::{
    Algorithm, Cost, Limit, ManualClock, Timestamp,
    limiter::Operation,
    store::{Check, Key, LeaseCall, RemoteStore, Terms, Tier},
};
use sluicegate_core::step::{Admission, Mode};

use crate::{model::Model, store_fixture::START};

const COUNTERS: usize = 6;
/// Leases that have not been returned; the oldest is lost when there are more.
const MAX_OPEN: usize = 40;

/// A lease on one counter that a process has not returned.
struct OpenLease {
    tier: Tier,
    at: Timestamp,
    units: u32,
}

/// Runs a history of `steps` calls on a store whose clock is `clock`, and on the model.
///
/// # Panics
/// When they disagree. The message contains the seed, the step and the check.
pub async fn assert_leases_agree_with_model(
    store: &Arc<dyn RemoteStore>,
    clock: &ManualClock,
    algorithms: &[Algorithm],
    seed: u64,
    steps: usize,
) {
    let mut chance = StdRng::seed_from_u64(seed);
    let mut model = Model::default();
    let mut now = START;
    let tiers: Vec<Tier> = (0..COUNTERS)
        .map(|number| {
            let key = Key::without_rule(format!("lease:{seed}:{number}")).expect("a short key");
            let limit = random_limit(*algorithms.choose(&mut chance).expect("algorithms"), &mut chance);
            Tier { key, terms: Terms::new(limit, Cost::ONE) }
        })
        .collect();
    let mut open: Vec<OpenLease> = Vec::new();
    for step in 0..steps {
        now = next_moment(now, &mut chance);
        clock.set(now);
        // returns come before checks, as in a call of the limiter
        let mut ended: Vec<OpenLease> = open.extract_if(.., |_| chance.random_bool(0.15)).collect();
        ended.retain(|_| chance.random_bool(0.9));
        let mut checks: Vec<Check> = ended.iter().map(|lease| end(lease, &mut chance)).collect();
        let count = chance.random_range(1..=3);
        checks.extend((0..count).map(|_| random_check(&tiers, now, &mut chance)));
        let outcomes = store.decide(&checks, None).await;
        for (check, outcome) in checks.iter().zip(outcomes) {
            let shown = || format!("seed {seed} step {step} at {now:?}\n{check:#?}");
            let answer = outcome.unwrap_or_else(|error| panic!("{}: {error}", shown()));
            assert_eq!(answer.at, now, "{}", shown());
            if let (Some(LeaseCall::End { spent, unspent }), Operation::Refund { at: Some(at) }) =
                (check.lease(), check.operation())
            {
                model.end_lease(&check.tiers()[0], at, spent.into(), unspent.into(), now);
                continue;
            }
            let expected = model.decide(check, now);
            let is_check = check.operation() == Operation::Check;
            let granted = u32::try_from(expected.iter().filter(|one| one.granted).count()).expect("small");
            for (index, expected) in (0..).zip(&expected) {
                let granted = if is_check || check.operation() != Operation::Peek { granted } else { 0 };
                let shares = answer.answers.iter().zip(check.tiers());
                let found: Vec<_> =
                    shares.map(|(answer, tier)| answer.share(&tier.terms, index, granted)).collect();
                assert_eq!(found, expected.shares, "request {index} of {}\n{:#?}", shown(), answer.answers);
            }
            let all_pass = expected.iter().all(|one| one.shares.iter().all(|share| share.passes));
            if let (Some(LeaseCall::Draw { requests }), true) = (check.lease(), all_pass) {
                let drawn = model.draw(check, requests, now);
                for (tier, answer) in check.tiers().iter().zip(&answer.answers) {
                    let found = answer.charged - check.count();
                    assert_eq!(found, drawn, "requests drawn: {}\n{:#?}", shown(), answer);
                    let units = u64::from(drawn) * tier.terms.cost.units();
                    if units > 0 {
                        let units = u32::try_from(units).expect("at most the lease");
                        open.push(OpenLease { tier: tier.clone(), at: now, units });
                    }
                }
            } else if let Some(LeaseCall::Draw { .. }) = check.lease() {
                for (tier, answer) in check.tiers().iter().zip(&answer.answers) {
                    assert!(answer.charged <= check.count(), "{}", shown());
                    assert_eq!(answer.leased, model.leased_units(tier, now), "{}", shown());
                }
            }
        }
        let excess = open.len().saturating_sub(MAX_OPEN);
        open.drain(..excess);
        let tier = tiers.choose(&mut chance).expect("counters");
        let counter = (tier.key.clone(), tier.terms.limit);
        let snapshot = store.inspect(std::slice::from_ref(&counter)).await.expect("the store answers");
        let leased = snapshot[0].as_ref().expect("a valid state").leased;
        assert_eq!(
            leased,
            model.leased_units(tier, now),
            "seed {seed} step {step}: leased units of {tier:#?}"
        );
        if chance.random_bool(0.01) {
            let algorithm = tier.terms.limit.algorithm();
            store.reset(&[(tier.key.clone(), algorithm)]).await.expect("the store answers");
            model.reset(&tier.key, algorithm);
        }
    }
}

/// Reports that a part of a lease was spent and returns the rest. Sometimes only a part of it is reported.
fn end(lease: &OpenLease, chance: &mut StdRng) -> Check {
    let spent = match chance.random_range(0..3) {
        0 => 0,
        1 => lease.units,
        _ => chance.random_range(0..=lease.units),
    };
    let unspent = if chance.random_bool(0.8) { lease.units - spent } else { 0 };
    let (spent, unspent) = if spent + unspent == 0 { (lease.units, 0) } else { (spent, unspent) };
    let tier = Tier { key: lease.tier.key.clone(), terms: Terms::new(lease.tier.terms.limit, Cost::ONE) };
    let check = Check::new(Operation::Refund { at: Some(lease.at) }, vec![tier]).expect("one tier");
    check.with_lease(LeaseCall::End { spent, unspent })
}

fn random_check(tiers: &[Tier], now: Timestamp, chance: &mut StdRng) -> Check {
    let operation = match chance.random_range(0..20) {
        0..16 => Operation::Check,
        16 => Operation::Peek,
        17 => Operation::Charge,
        18 => Operation::Refund { at: None },
        _ => Operation::Refund { at: Some(now) },
    };
    let count = *[1, 1, 1, 2, 3].choose(chance).expect("not empty");
    let mut chosen: Vec<Tier> = tiers.choose_multiple(chance, count).cloned().collect();
    for tier in &mut chosen {
        let capacity = tier.terms.limit.capacity();
        let units = *[1, 1, 1, 2, 5, 0, capacity, capacity / 3 + 1].choose(chance).expect("not empty");
        tier.terms.cost = Cost::new(units).expect("a small cost");
        if chance.random_bool(0.05) {
            tier.terms.mode = Mode::Shadow;
        }
        if chance.random_bool(0.05) {
            tier.terms.admission = Admission::Overdraft;
        }
    }
    let check = Check::new(operation, chosen).expect("different counters");
    if operation != Operation::Check {
        return check;
    }
    let check = check.times(chance.random_range(1..=4));
    let has_cost = check.tiers().iter().any(|tier| tier.terms.cost.units() > 0);
    if has_cost && chance.random_bool(0.7) {
        check.with_lease(LeaseCall::Draw { requests: chance.random_range(1..=60) })
    } else {
        check
    }
}

fn random_limit(algorithm: Algorithm, chance: &mut StdRng) -> Limit {
    let amount = *[8, 50, 200, 1_000].choose(chance).expect("not empty");
    let window = Duration::from_millis(*[20, 1_000, 10_000, 60_000].choose(chance).expect("not empty"));
    let limit = Limit::new(algorithm, amount, window).expect("a valid limit");
    let units = *[1, amount / 10 + 1, amount / 2, amount].choose(chance).expect("not empty");
    let lifetime =
        Duration::from_millis(*[1, 20, 700, 10_000].choose(chance).expect("not empty")).min(window);
    limit.with_lease(units, lifetime).expect("a valid lease")
}

fn next_moment(now: Timestamp, chance: &mut StdRng) -> Timestamp {
    let micros = match chance.random_range(0..20) {
        0..5 => 0,
        5 => 1,
        6..14 => chance.random_range(0..20_000),
        14..18 => chance.random_range(0..500_000),
        18 => chance.random_range(0..5_000_000),
        _ => {
            let longest = if chance.random_bool(0.1) { 60_000_000 } else { 10_000 };
            return now.minus(Duration::from_micros(chance.random_range(0..longest)));
        }
    };
    now.plus(Duration::from_micros(micros))
}
