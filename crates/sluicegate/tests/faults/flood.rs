//! Many callers of a Redis that does not reply: no call waits long, no memory accumulates, and nothing is charged
//! afterwards.

use std::time::Duration;

use sluicegate::{Limiter, Source, StoreError};
use sluicegate_testkit::{
    proxy::Proxy,
    server::{Flavor, Server},
};
use tokio::{
    task::{JoinSet, block_in_place},
    time::Instant,
};

use crate::scenario::{
    DEADLINE, LOCAL_AMOUNT, RECOVERY, RuleMix, check, limiter, resident_bytes, run_exclusively,
};

/// Maximum growth of memory.
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
    let decisions = calls.join_all().await;
    let (grown, made) = (resident_bytes().saturating_sub(memory), proxy.counters().accepted - connections);
    block_in_place(|| server.resume());
    let resumed = Instant::now();
    while limiter.peek(&RuleMix::OPEN.labels("stop"), 1).await.unwrap().source != Source::Store {
        assert!(
            resumed.elapsed() < RECOVERY,
            "no decision by the store {:?} after it resumed",
            resumed.elapsed()
        );
        tokio::time::sleep(BETWEEN_CALLS).await;
    }

    assert!(decisions.len() > 4_000, "only {} calls were made", decisions.len());
    for mix in RuleMix::ALL {
        let of_mixture = || decisions.iter().filter(|(other, _)| *other == mix).map(|(_, call)| call);
        let (source, rule) = mix.degraded_outcome();
        for decision in of_mixture() {
            assert_eq!((decision.source, decision.rule()), (source, rule), "{mix:?}");
            assert!(decision.is_degraded() && decision.failure.is_some(), "{mix:?}");
        }
        let passed = of_mixture().filter(|decision| decision.is_allowed()).count();
        let expected = match source {
            Source::Closed => 0,
            // units that the store admitted before it stopped count as well
            Source::Fallback => {
                let most = usize::try_from(LOCAL_AMOUNT).unwrap();
                assert!((most - 2..=most).contains(&passed), "{mix:?}: {passed} passed");
                continue;
            }
            _ => of_mixture().count(),
        };
        assert_eq!(passed, expected, "{mix:?}");
    }
    assert!(grown < MAX_GROWTH, "memory grew by {grown} bytes");
    let most = 2 * STOPPED.as_secs() + 1;
    assert!(made <= most, "{made} connections were made in {STOPPED:?}");

    // Requests that reached Redis before it stopped run when it resumes, and find that their deadline has passed.
    for mix in RuleMix::ALL {
        let peeked = limiter.peek(&mix.labels("stop"), 1).await.unwrap();
        for tier in peeked.tiers {
            assert_eq!(tier.limit - tier.remaining, 1, "{mix:?}, {:?}", tier.rule);
        }
    }
}

/// Number of concurrent callers: more than the queue bound.
const CALLERS: usize = 20_000;

#[tokio::test(flavor = "multi_thread")]
async fn callers_beyond_the_queue_bound_are_answered_and_leave_no_memory_behind() {
    /// They all start at the same time on two cores, so the last ones start late.
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
        assert!((DEADLINE..TOGETHER).contains(&took), "took {took:?}");
        // The queue bound, plus the batches that were sent by then.
        assert!(waited <= 16_384 + 1_024 && rejected > 0, "{waited} waited, {rejected} were rejected");
        memory.push(resident_bytes());
    }
    // The first rounds show the peak, including the allocator's; the others that memory is released.
    let taken = memory[..3].iter().max().unwrap();
    assert!(memory[5] < taken + MAX_GROWTH, "{memory:?} bytes");
}

/// Returns how many callers timed out, and how many were rejected immediately.
async fn flood(limiter: &Limiter) -> (usize, usize) {
    let mut calls = JoinSet::new();
    for caller in 0..CALLERS {
        let limiter = limiter.clone();
        // Each caller has its own counter, so that no answer is shared.
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
