//! Every fault, for rules of every policy: the outcome is the policy's, in time and marked, and afterwards all is as before.

use std::{collections::HashMap, time::Duration};

use tokio::{
    task::{JoinSet, block_in_place},
    time::Instant,
};
use tollgate::{Decision, Limiter, Source, StoreError};
use tollgate_testkit::server::Flavor;

use crate::{
    bench::{MANY, Mixture, RECOVERY, alone, check, limiter},
    table::{
        self, Counters, Effect, Fault, OF_DISTANT_SERVERS, OF_NETWORKS, OF_PROCESSES, OF_REFUSALS,
        OF_STRANGERS, OF_USERS, Patient,
    },
};

/// How long a fault lasts: until the breaker has opened, and a connection that is silent is given up.
const LASTING: Duration = Duration::from_millis(1_500);
/// The pause between two requests of a caller.
const PAUSE: Duration = Duration::from_millis(3);
/// How many calls may reach a store that does not decide, until it is left alone.
const MOST_IN_VAIN: usize = 40;
/// How many requests of each mixture follow when all is well again.
const AFTERWARDS: usize = 10;
/// How many of those, and of what a fault should leave alone, a busy machine may answer too late.
const MOST_LATE: usize = 4;

/// What callers were told, by what they asked for.
type Calls = HashMap<&'static [&'static str], Vec<Decision>>;

/// All mixtures at once, each by a caller that never stops.
async fn ask_for(lasting: Duration, limiter: &Limiter, context: &str) -> Calls {
    let begun = Instant::now();
    let callers = Mixture::ALL.map(|mixture| {
        let (limiter, labels, context) = (limiter.clone(), mixture.labels("meanwhile"), context.to_owned());
        let caller = tokio::spawn(async move {
            let mut calls = Vec::new();
            while begun.elapsed() < lasting {
                calls.push(check(&limiter, &labels, &context).await);
                tokio::time::sleep(PAUSE).await;
            }
            calls
        });
        (mixture, caller)
    });
    let mut calls = HashMap::new();
    for (mixture, caller) in callers {
        calls.insert(mixture.0, caller.await.unwrap());
    }
    calls
}

fn assert_effect(fault: &Fault, calls: &Calls, context: &str) {
    if fault.effect == Effect::Away {
        let failures = calls.values().flatten().filter_map(|call| call.failure.as_ref());
        let told: Vec<String> = failures.map(ToString::to_string).collect();
        let is_said = told.iter().any(|text| text.contains(fault.says));
        assert!(is_said, "{context}: nobody hears of {:?}, but {:?}", fault.says, told[0]);
        let asked = told.iter().filter(|text| !text.contains("circuit breaker open")).count();
        assert!(asked <= MOST_IN_VAIN, "{context}: the store was asked {asked} times");
    }
    for mixture in Mixture::ALL {
        let calls = &calls[mixture.0];
        let (degraded, decided): (Vec<_>, Vec<_>) = calls.iter().partition(|call| call.is_degraded());
        match fault.effect {
            Effect::Away => assert!(decided.is_empty(), "{context}: {:?}", decided[0]),
            Effect::Unseen => assert!(degraded.len() <= MOST_LATE, "{context}: {:?}", degraded[0]),
            Effect::Flaky => {}
        }
        assert!(calls.len() >= 5, "{context}: {mixture:?} was asked {} times", calls.len());
        for (passed, call) in (0..).zip(degraded) {
            mixture.assert_degraded_right(call, passed, context);
        }
    }
}

/// Waits until the store decides for everybody, and asserts that it goes on doing so.
async fn recover(limiter: &Limiter, context: &str) {
    let begun = Instant::now();
    let mut missing = Mixture::ALL.to_vec();
    while !missing.is_empty() {
        let waited = begun.elapsed();
        assert!(waited < RECOVERY, "{context}: {missing:?} are not decided after {waited:?}");
        for mixture in std::mem::take(&mut missing) {
            let peeked = limiter.peek(&mixture.labels("afterwards"), 1).await.unwrap();
            if peeked.source != Source::Store {
                missing.push(mixture);
            }
        }
        tokio::time::sleep(PAUSE).await;
    }
    let mut late = 0;
    for _ in 0..AFTERWARDS {
        for mixture in Mixture::ALL {
            let call = check(limiter, &mixture.labels("afterwards"), context).await;
            assert!(call.is_allowed() || call.source == Source::Closed, "{context}: {call:?}");
            late += usize::from(call.source != Source::Store);
        }
    }
    assert!(late <= MOST_LATE, "{context}: {late} calls were not decided");
}

/// Asserts that what was admitted was charged, and that nothing was that nobody knows of.
async fn assert_charged_right(limiter: &Limiter, fault: &Fault, calls: &Calls, context: &str) {
    let of_open = &calls[Mixture::OPEN.0];
    let told = of_open.iter().filter(|call| call.source == Source::Store).count();
    let is_unknown = |call: &&Decision| matches!(call.failure, Some(StoreError::Ambiguous(_)));
    let unknown = of_open.iter().filter(is_unknown).count();
    let peeked = limiter.peek(&Mixture::OPEN.labels("meanwhile"), 1).await.unwrap();
    let used = usize::try_from(MANY - peeked.remaining().unwrap()).unwrap();
    let least = if fault.counters == Counters::Kept { told } else { 0 };
    let is_right = (least..=told + unknown).contains(&used);
    assert!(is_right, "{context}: {used} used, {told} admitted, {unknown} unknown");
}

/// Does every fault to servers of these flavors, at the same time.
async fn hold_through(faults: &'static [Fault], flavors: &[Flavor], credentials: &str) {
    let _alone = alone().await;
    for fault in faults {
        let mut flavors: JoinSet<()> =
            flavors.iter().map(|flavor| hold(fault, *flavor, None, credentials.to_owned())).collect();
        while let Some(held) = flavors.join_next().await {
            held.unwrap();
        }
    }
}

async fn hold(fault: &'static Fault, flavor: Flavor, round_trip: Option<Duration>, credentials: String) {
    let mut patient = block_in_place(|| Patient::start(flavor, round_trip));
    let context = format!("{flavor} at {:?}, {}", round_trip.unwrap_or_default(), fault.name);
    let limiter = limiter(&format!("redis://{credentials}{}", patient.proxy.addr())).await;
    recover(&limiter, &context).await;
    let (begun, before) = (Instant::now(), patient.proxy.counters().accepted);

    block_in_place(|| (fault.begin)(&mut patient));
    let calls = ask_for(LASTING, &limiter, &context).await;
    block_in_place(|| (fault.end)(&mut patient));

    assert_effect(fault, &calls, &context);
    recover(&limiter, &context).await;
    assert_charged_right(&limiter, fault, &calls, &context).await;
    let connections = patient.proxy.counters().accepted - before;
    let most = 2 * begun.elapsed().as_secs() + 2 + 1;
    assert!(connections <= most, "{context}: {connections} connections in {:?}", begun.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_stops_dies_or_forgets_gives_each_policys_outcome_and_comes_back() {
    // Redis 6.2 cannot be made to load slowly
    hold_through(&OF_PROCESSES, &[Flavor::Redis7, Flavor::Valkey9], "").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_refuses_gives_each_policys_outcome_and_comes_back() {
    hold_through(&OF_REFUSALS, &Flavor::ALL, "").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_may_not_ask_gets_each_policys_outcome_until_it_may() {
    hold_through(&OF_USERS, &Flavor::ALL, &format!("{}:{}@", table::USER, table::PASSWORD)).await;
    hold_through(&OF_STRANGERS, &Flavor::ALL, "").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bad_network_gives_each_policys_outcome_and_nothing_once_it_is_good() {
    hold_through(&OF_NETWORKS, &[Flavor::Redis7], "").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fault_of_each_class_gives_each_policys_outcome_one_and_five_milliseconds_away() {
    let _alone = alone().await;
    for fault in OF_DISTANT_SERVERS {
        let mut distances: JoinSet<()> = [1, 5]
            .map(|millis| hold(fault, Flavor::Redis7, Some(Duration::from_millis(millis)), String::new()))
            .into_iter()
            .collect();
        while let Some(held) = distances.join_next().await {
            held.unwrap();
        }
    }
}
