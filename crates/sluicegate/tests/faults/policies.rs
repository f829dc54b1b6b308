//! Every fault for rules of every failure policy: decisions follow the policy, in time and marked as degraded, and
//! everything recovers.

use std::{collections::HashMap, time::Duration};

use sluicegate::{Decision, Limiter, Source, StoreError};
use sluicegate_testkit::server::Flavor;
use tokio::{
    task::{JoinSet, block_in_place},
    time::Instant,
};

use crate::{
    scenario::{MANY, RECOVERY, RuleMix, check, limiter, run_exclusively},
    table::{
        self, ACL_FAULTS, Counters, ERROR_REPLY_FAULTS, Effect, Fault, FaultTarget, NETWORK_FAULTS,
        PASSWORD_FAULTS, PROCESS_FAULTS, ROUND_TRIP_FAULTS,
    },
};

/// Duration of a fault: until the breaker has opened and a silent connection has been replaced.
const LASTING: Duration = Duration::from_millis(1_500);
/// The pause between two requests of a caller.
const PAUSE: Duration = Duration::from_millis(3);
/// Maximum number of calls to a store that does not decide, until the breaker opens.
const MAX_FAILED_CALLS: usize = 40;
/// Number of requests of each mix after recovery.
const CALLS_AFTERWARDS: usize = 10;
/// Maximum number of late answers on a busy machine, afterwards and during invisible faults.
const MAX_LATE: usize = 4;

/// The decisions, by rule mix.
type Calls = HashMap<&'static [&'static str], Vec<Decision>>;

/// Checks all mixes concurrently, each by its own caller.
async fn check_repeatedly(lasting: Duration, limiter: &Limiter, context: &str) -> Calls {
    let begun = Instant::now();
    let callers = RuleMix::ALL.map(|mix| {
        let (limiter, labels, context) = (limiter.clone(), mix.labels("meanwhile"), context.to_owned());
        let caller = tokio::spawn(async move {
            let mut calls = Vec::new();
            while begun.elapsed() < lasting {
                calls.push(check(&limiter, &labels, &context).await);
                tokio::time::sleep(PAUSE).await;
            }
            calls
        });
        (mix, caller)
    });
    let mut calls = HashMap::new();
    for (mix, caller) in callers {
        calls.insert(mix.0, caller.await.unwrap());
    }
    calls
}

fn assert_effect(fault: &Fault, calls: &Calls, context: &str) {
    if fault.effect == Effect::Unavailable {
        let failures = calls.values().flatten().filter_map(|call| call.failure.as_ref());
        let errors: Vec<String> = failures.map(ToString::to_string).collect();
        let is_reported = errors.iter().any(|text| text.contains(fault.message));
        assert!(
            is_reported,
            "{context}: no error contains {:?}; the first is {:?}",
            fault.message, errors[0]
        );
        let sent = errors.iter().filter(|text| !text.contains("circuit breaker open")).count();
        assert!(sent <= MAX_FAILED_CALLS, "{context}: the store was called {sent} times");
    }
    for mix in RuleMix::ALL {
        let calls = &calls[mix.0];
        let (degraded, decided): (Vec<_>, Vec<_>) = calls.iter().partition(|call| call.is_degraded());
        match fault.effect {
            Effect::Unavailable => assert!(decided.is_empty(), "{context}: {:?}", decided[0]),
            Effect::Invisible => assert!(degraded.len() <= MAX_LATE, "{context}: {:?}", degraded[0]),
            Effect::Intermittent => {}
        }
        assert!(calls.len() >= 5, "{context}: {mix:?} was checked {} times", calls.len());
        for (passed, call) in (0..).zip(degraded) {
            mix.assert_degraded_decision(call, passed, context);
        }
    }
}

/// Waits until the store decides for every mix, and asserts that it continues to do so.
async fn recover(limiter: &Limiter, context: &str) {
    let begun = Instant::now();
    let mut missing = RuleMix::ALL.to_vec();
    while !missing.is_empty() {
        let waited = begun.elapsed();
        assert!(waited < RECOVERY, "{context}: {missing:?} are not decided after {waited:?}");
        for mix in std::mem::take(&mut missing) {
            let peeked = limiter.peek(&mix.labels("afterwards"), 1).await.unwrap();
            if peeked.source != Source::Store {
                missing.push(mix);
            }
        }
        tokio::time::sleep(PAUSE).await;
    }
    let mut late = 0;
    for _ in 0..CALLS_AFTERWARDS {
        for mix in RuleMix::ALL {
            let call = check(limiter, &mix.labels("afterwards"), context).await;
            assert!(call.is_allowed() || call.source == Source::Closed, "{context}: {call:?}");
            late += usize::from(call.source != Source::Store);
        }
    }
    assert!(late <= MAX_LATE, "{context}: {late} calls were not decided");
}

/// Asserts that everything admitted was charged, and nothing else except ambiguous calls.
async fn assert_charged_correctly(limiter: &Limiter, fault: &Fault, calls: &Calls, context: &str) {
    let of_open = &calls[RuleMix::OPEN.0];
    let admitted = of_open.iter().filter(|call| call.source == Source::Store).count();
    let is_unknown = |call: &&Decision| matches!(call.failure, Some(StoreError::Ambiguous(_)));
    let unknown = of_open.iter().filter(is_unknown).count();
    let peeked = limiter.peek(&RuleMix::OPEN.labels("meanwhile"), 1).await.unwrap();
    let used = usize::try_from(MANY - peeked.remaining().unwrap()).unwrap();
    let least = if fault.counters == Counters::Kept { admitted } else { 0 };
    let is_right = (least..=admitted + unknown).contains(&used);
    assert!(is_right, "{context}: {used} used, {admitted} admitted, {unknown} unknown");
}

/// Applies every fault to servers of these flavors concurrently.
async fn assert_faults(faults: &'static [Fault], flavors: &[Flavor], credentials: &str) {
    let _exclusive = run_exclusively().await;
    for fault in faults {
        let mut flavors: JoinSet<()> =
            flavors.iter().map(|flavor| assert_fault(fault, *flavor, None, credentials.to_owned())).collect();
        while let Some(held) = flavors.join_next().await {
            held.unwrap();
        }
    }
}

async fn assert_fault(
    fault: &'static Fault,
    flavor: Flavor,
    round_trip: Option<Duration>,
    credentials: String,
) {
    let mut target = block_in_place(|| FaultTarget::start(flavor, round_trip));
    let context = format!("{flavor} at {:?}, {}", round_trip.unwrap_or_default(), fault.name);
    let limiter = limiter(&format!("redis://{credentials}{}", target.proxy.addr())).await;
    recover(&limiter, &context).await;
    let (begun, before) = (Instant::now(), target.proxy.counters().accepted);

    block_in_place(|| (fault.begin)(&mut target));
    let calls = check_repeatedly(LASTING, &limiter, &context).await;
    block_in_place(|| (fault.end)(&mut target));

    assert_effect(fault, &calls, &context);
    recover(&limiter, &context).await;
    assert_charged_correctly(&limiter, fault, &calls, &context).await;
    let connections = target.proxy.counters().accepted - before;
    let seconds = begun.elapsed().as_secs() + 1;
    let most = if calls[RuleMix::OPEN.0].iter().any(|call| call.source == Source::Store) {
        // each connection that has answered is replaced
        10 + 10 * seconds
    } else {
        // the replacement of the lost connection and a few quick attempts, then two per second
        1 + 6 + 2 * seconds
    };
    assert!(connections <= most, "{context}: {connections} connections in {:?}", begun.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn process_faults_apply_each_failure_policy_and_recover() {
    // Redis 6.2 cannot load slowly.
    assert_faults(&PROCESS_FAULTS, &[Flavor::Redis7, Flavor::Valkey9], "").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn error_replies_apply_each_failure_policy_and_recover() {
    assert_faults(&ERROR_REPLY_FAULTS, &Flavor::ALL, "").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn authentication_faults_apply_each_failure_policy_and_recover() {
    assert_faults(&ACL_FAULTS, &Flavor::ALL, &format!("{}:{}@", table::USER, table::PASSWORD)).await;
    assert_faults(&PASSWORD_FAULTS, &Flavor::ALL, "").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn network_faults_apply_each_failure_policy_and_recover() {
    assert_faults(&NETWORK_FAULTS, &[Flavor::Redis7], "").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn faults_at_round_trips_of_1_and_5_ms_apply_each_failure_policy_and_recover() {
    let _exclusive = run_exclusively().await;
    for fault in ROUND_TRIP_FAULTS {
        let mut distances: JoinSet<()> = [1, 5]
            .map(|millis| {
                assert_fault(fault, Flavor::Redis7, Some(Duration::from_millis(millis)), String::new())
            })
            .into_iter()
            .collect();
        while let Some(held) = distances.join_next().await {
            held.unwrap();
        }
    }
}
