//! Holds of responses that last longer than their time to live.

use sluicegate::{ManualClock, MemoryStore, Options, RedisStore, Timestamp};
use sluicegate_testkit::server::{Flavor, Server as Redis};
use tower::{Layer, ServiceExt, service_fn};

use super::*;

const START: Timestamp = Timestamp::from_micros(1_794_765_441_000_000);

const TTL: Duration = Duration::from_secs(9);

/// An in-flight limit of one, and a response that does not end.
async fn endless() -> (Limiter, ManualClock, Response<impl Sized>) {
    let clock = ManualClock::new(START);
    let store = MemoryStore::new().with_clock(clock.clone());
    let limiter = Limiter::new(store, [in_flight(1).ttl(TTL)]).unwrap();
    let inner = service_fn(async |_: Request<()>| {
        Ok::<_, io::Error>(Response::new(Body::from_stream(stream::pending::<Chunk>())))
    });
    let response = RateLimitLayer::new(limiter.clone()).layer(inner).oneshot(Request::new(())).await.unwrap();
    (limiter, clock, response)
}

/// Advances tokio's clock, and runs the tasks that are then ready.
async fn advance(time: Duration) {
    for time in [Duration::ZERO, time] {
        tokio::time::advance(time).await;
        for _ in 0..10 {
            tokio::task::yield_now().await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_hold_is_renewed_before_two_thirds_of_its_time_have_passed() {
    let (limiter, clock, response) = endless().await;
    for _ in 0..10 {
        clock.advance(TTL * 2 / 3);
        advance(TTL * 2 / 3).await;
        assert!(!limiter.hold(&Labels::default(), 1).await.unwrap().is_allowed(), "the hold is live");
    }
    drop(response);
    assert_eq!(remaining(&limiter, "requests").await, 1);
    clock.advance(TTL);
    advance(TTL).await;
    let holds = limiter.stats().holds;
    assert_eq!((holds.held, holds.settled, holds.late, holds.expired), (1, 1, 0, 0), "{holds:?}");
}

#[tokio::test(start_paused = true)]
async fn a_hold_that_expired_is_not_renewed_again() {
    let (limiter, clock, response) = endless().await;
    clock.advance(TTL * 2);
    advance(TTL * 10).await;
    let next = limiter.hold(&Labels::default(), 1).await.unwrap();
    assert!(next.is_allowed());
    drop(response);
    assert_eq!(
        remaining(&limiter, "requests").await,
        0,
        "the expired hold does not free the slot of the next"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hold_on_redis_is_renewed_until_the_body_ends() {
    let ttl = Duration::from_millis(200);
    let clock = ManualClock::new(START);
    let redis = Redis::start(Flavor::Redis7);
    let store = RedisStore::connect(&redis.url()).await.unwrap().with_clock(clock.clone());
    let options = Options::new().deadline(Duration::from_secs(10));
    let rule = in_flight(1).ttl(ttl);
    let limiter = Limiter::builder().store(store).rules([rule]).options(options).build().unwrap();
    let mut server = Server::start(RateLimitLayer::new(limiter.clone())).await;
    let (mut response, stream) = server.open().await;
    for _ in 0..5 {
        let retry_after = async || {
            let peeked = limiter.peek(&Labels::default(), 1).await.unwrap();
            peeked.retry_after().unwrap()
        };
        clock.advance(ttl / 2);
        // the store's clock is paused: only a renewal moves the expiry
        wait::until_async("the hold is renewed", wait::PATIENCE, || async { retry_after().await == ttl })
            .await;
        stream.send("a");
        next_chunk(&mut response).await.unwrap();
    }
    drop(stream);
    assert_eq!(next_chunk(&mut response).await, None);
    until_remaining(&limiter, 1).await;
    assert_eq!(limiter.stats().holds.settled, 1);
}
