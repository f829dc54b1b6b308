//! Many callers of a Redis that says nothing: nobody waits long, nothing piles up, and nothing is charged afterwards.

use std::time::Duration;

use tokio::{
    task::{JoinSet, block_in_place},
    time::Instant,
};
use tollgate::{Limiter, Source, StoreError};
use tollgate_testkit::{
    proxy::Proxy,
    server::{Flavor, Server},
};

use crate::scenario::{
    DEADLINE, LOCAL_AMOUNT, RECOVERY, RuleMix, check, limiter, resident_bytes, run_exclusively,
};

/// What memory may grow by, whatever happens.
const MAX_GROWTH: u64 = 50 << 20;

#[tokio::test(flavor = "multi_thread")]
async fn a_redis_stopped_for_ten_seconds_under_load_delays_no_call_and_charges_nothing() {
    const STOPPED: Duration = Duration::from_secs(10);
    const BETWEEN_CALLS: Duration = Duration::from_millis(2);
    let _exclusive = run_exclusively().await;
    let server = Server::start(Flavor::Redis7);
    let proxy = Proxy::start(server.addr());
    let limiter = limiter(&proxy.url()).await;
    for mix in RuleMix::ALL {
        assert_eq!(check(&limiter, &mix.labels("stop"), "before").await.source, Source::Store);
    }
    let (memory, connections) = (resident_bytes(), proxy.counters().accepted);

    block_in_place(|| server.suspend());
    let begun = Instant::now();
    let mut calls = JoinSet::new();
    let mut ticks = tokio::time::interval(BETWEEN_CALLS);
    for mix in RuleMix::ALL.into_iter().cycle() {
        ticks.tick().await;
        if begun.elapsed() >= STOPPED {
            break;
        }
        let limiter = limiter.clone();
        calls.spawn(async move { (mix, check(&limiter, &mix.labels("stop"), "stopped").await) });
    }
    let told = calls.join_all().await;
    let (grown, made) = (resident_bytes().saturating_sub(memory), proxy.counters().accepted - connections);
    block_in_place(|| server.resume());
    let resumed = Instant::now();
    while limiter.peek(&RuleMix::OPEN.labels("stop"), 1).await.unwrap().source != Source::Store {
        assert!(resumed.elapsed() < RECOVERY, "nothing is decided {:?} after it goes on", resumed.elapsed());
        tokio::time::sleep(BETWEEN_CALLS).await;
    }

    assert!(told.len() > 4_000, "only {} calls were made", told.len());
    for mix in RuleMix::ALL {
        let of_mixture = || told.iter().filter(|(other, _)| *other == mix).map(|(_, call)| call);
        let (source, rule) = mix.degraded_outcome();
        for decision in of_mixture() {
            assert_eq!((decision.source, decision.rule()), (source, rule), "{mix:?}");
            assert!(decision.is_degraded() && decision.failure.is_some(), "{mix:?}");
        }
        let passed = of_mixture().filter(|decision| decision.is_allowed()).count();
        let expected = match source {
            Source::Closed => 0,
            Source::Fallback => usize::try_from(LOCAL_AMOUNT).unwrap(),
            _ => of_mixture().count(),
        };
        assert_eq!(passed, expected, "{mix:?}");
    }
    assert!(grown < MAX_GROWTH, "memory grew by {grown} bytes");
    let most = 2 * STOPPED.as_secs() + 1;
    assert!(made <= most, "{made} connections were made in {STOPPED:?}");

    // whatever reached Redis before it stopped ran when it went on, and found that it was late
    for mix in RuleMix::ALL {
        let peeked = limiter.peek(&mix.labels("stop"), 1).await.unwrap();
        for tier in peeked.tiers {
            assert_eq!(tier.limit - tier.remaining, 1, "{mix:?}, {:?}", tier.rule);
        }
    }
}

/// How many callers come at once: more than may wait for a store.
const CALLERS: usize = 20_000;

#[tokio::test(flavor = "multi_thread")]
async fn callers_beyond_the_queue_bound_are_answered_and_leave_no_memory_behind() {
    /// They all begin at once, on two cores: the last is asked late.
    const TOGETHER: Duration = Duration::from_secs(5);
    let _exclusive = run_exclusively().await;
    let server = Server::start(Flavor::Redis7);
    let mut memory = Vec::new();
    for _ in 0..6 {
        let limiter = limiter(&server.url()).await;
        block_in_place(|| server.suspend());
        let begun = Instant::now();
        let (waited, rejected) = flood(&limiter).await;
        let took = begun.elapsed();
        block_in_place(|| server.resume());
        assert!((DEADLINE..TOGETHER).contains(&took), "they took {took:?}");
        // as many as may wait, and those of the batches that were sent meanwhile
        assert!(waited <= 16_384 + 1_024 && rejected > 0, "{waited} waited, {rejected} did not");
        memory.push(resident_bytes());
    }
    // the first floods show what it takes, also the allocator's, the others that it is given back
    let taken = memory[..3].iter().max().unwrap();
    assert!(memory[5] < taken + MAX_GROWTH, "{memory:?} bytes");
}

/// How many of all callers waited in vain, and how many were not let wait.
async fn flood(limiter: &Limiter) -> (usize, usize) {
    let mut calls = JoinSet::new();
    for caller in 0..CALLERS {
        let limiter = limiter.clone();
        // each has a counter of its own, so that none can share another's answer
        let labels = RuleMix::OPEN.labels(&caller.to_string());
        calls.spawn(async move { limiter.check(&labels, 1).await.unwrap() });
    }
    let (mut waited, mut rejected) = (0, 0);
    while let Some(decision) = calls.join_next().await {
        let decision = decision.unwrap();
        assert_eq!((decision.is_allowed(), decision.source), (true, Source::Open));
        match decision.failure.unwrap() {
            StoreError::Ambiguous(_) => waited += 1,
            _ => rejected += 1,
        }
    }
    (waited, rejected)
}
