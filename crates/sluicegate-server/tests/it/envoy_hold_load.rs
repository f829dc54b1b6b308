//! A thousand callers through a real Envoy, in front of a limit of ten streams in flight.

#![expect(clippy::unwrap_used, reason = "a failing helper fails the test")]

use std::time::Duration;

use futures_util::future::join_all;
use rand::{Rng, SeedableRng, rngs::StdRng};
use sluicegate::{
    Limit, Limiter, ManualClock, MemoryStore, OnStoreFailure, Options, RedisStore, Rule, Timestamp,
    store::Store,
};
use sluicegate_server::net::listener::raise_open_files_limit;
use sluicegate_testkit::{
    server::{Flavor, Server as Redis},
    wait,
};
use tokio::time::sleep;

use crate::envoy_holds::{Edge, Stream};

const DAY: Duration = Duration::from_secs(24 * 60 * 60);
const TTL: Duration = Duration::from_secs(600);
const SLOTS: usize = 10;
const CALLERS: usize = 1_000;
/// The requests of a caller, one after the other.
const REQUESTS: usize = 3;
/// The longest random pause before a request.
const LONGEST_PAUSE_MS: u64 = 300;
const TOKENS: u64 = 1_000_000_000;

/// A thousand clients connect at once.
const SLOW_CONNECT: (&str, &str) = ("connect_timeout: 0.25s", "connect_timeout: 5s");

/// The limiter, and the store's clock: holds expire when a test moves it, however slow the machine is.
fn limiter(store: impl FnOnce(ManualClock) -> Store) -> (Limiter, ManualClock) {
    let clock = ManualClock::new(Timestamp::from_micros(1_794_765_441_799_839));
    let rule = |name, limit| {
        let rule = Rule::new(name, limit).per(["api_key"]).hold("request_id").ttl(TTL);
        rule.on_store_failure(OnStoreFailure::Closed)
    };
    let rules = [
        rule("tokens", Limit::fixed_window(TOKENS, DAY).unwrap()).unit("tokens"),
        rule("in-flight", Limit::concurrency(SLOTS as u64).unwrap()),
    ];
    let options = Options::new().deadline(Duration::from_secs(60));
    let limiter = Limiter::builder().store(store(clock.clone())).rules(rules).options(options);
    (limiter.build().unwrap(), clock)
}

fn on_memory() -> (Limiter, ManualClock) {
    limiter(|clock| MemoryStore::new().with_clock(clock).into())
}

async fn on_redis(redis: &Redis) -> (Limiter, ManualClock) {
    let store = RedisStore::connect(&redis.url()).await.unwrap();
    limiter(|clock| store.with_clock(clock).into())
}

impl Edge {
    /// Opens a stream for each name at the same time. Returns those that are allowed.
    async fn open_all(&self, names: impl Iterator<Item = String>) -> Vec<Stream> {
        let streams = join_all(names.map(async |name| self.open_named("/3", &name).await)).await;
        assert!(streams.iter().all(|stream| [200, 429].contains(&stream.status())));
        streams.into_iter().filter(|stream| stream.status() == 200).collect()
    }

    /// Takes all slots with streams of these names, which do not end.
    async fn take_all_slots(&self, name: &str) -> Vec<Stream> {
        let streams = self.open_all((0..SLOTS).map(|number| format!("{name}-{number}"))).await;
        assert_eq!(streams.len(), SLOTS, "{name}");
        assert_eq!(self.open_named("/3", &format!("{name}-denied")).await.status(), 429, "{name}");
        streams
    }
}

/// How many requests ended in each way.
#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    finished: u64,
    aborted: u64,
    denied: u64,
    /// The client disconnected before the response began.
    left: u64,
}

impl Counts {
    fn sum(counts: &[Self]) -> Self {
        let sum = |of: fn(&Self) -> u64| counts.iter().map(of).sum();
        Self {
            finished: sum(|counts| counts.finished),
            aborted: sum(|counts| counts.aborted),
            denied: sum(|counts| counts.denied),
            left: sum(|counts| counts.left),
        }
    }
}

/// Makes some requests, one after the other.
async fn call(edge: &Edge, caller: usize) -> Counts {
    let mut random = StdRng::seed_from_u64(caller as u64);
    let mut counts = Counts::default();
    for request in 0..REQUESTS {
        sleep(Duration::from_millis(random.random_range(0..LONGEST_PAUSE_MS))).await;
        let name = format!("{caller}-{request}");
        if random.random_bool(0.2) {
            let stream = edge.send_named("/3", &name).await;
            sleep(Duration::from_millis(random.random_range(0..20))).await;
            edge.api.ends(&name);
            drop(stream);
            counts.left += 1;
            continue;
        }
        let stream = edge.open_named("/3", &name).await;
        match stream.status() {
            200 if random.random_bool(0.4) => {
                edge.api.ends(&name);
                drop(stream);
                counts.aborted += 1;
            }
            200 => {
                stream.finish().await;
                counts.finished += 1;
            }
            status => {
                assert_eq!(status, 429);
                counts.denied += 1;
            }
        }
    }
    counts
}

async fn run((limiter, clock): (Limiter, ManualClock)) {
    let needed = 2 * CALLERS as u64;
    let allowed = raise_open_files_limit();
    assert!(allowed >= needed, "this test opens {needed} files: raise the limit (ulimit -Hn)");
    let edge = Edge::over(limiter, &[SLOW_CONNECT]).await;

    // none of the streams ends
    let streams = edge.open_all((0..CALLERS).map(|caller| format!("first-{caller}"))).await;
    assert_eq!((streams.len(), edge.api.most_live()), (SLOTS, SLOTS));
    edge.api.end(SLOTS + CALLERS * REQUESTS);
    for stream in streams {
        stream.finish().await;
    }
    edge.until_left((TOKENS - 3 * SLOTS as u64, SLOTS as u64)).await;

    // every stream ends at once
    let counts = Counts::sum(&join_all((0..CALLERS).map(|caller| call(&edge, caller))).await);
    let Counts { finished, aborted, denied, left } = counts;
    assert!(finished > 0 && aborted > 0 && denied > 0 && left > 0, "{counts:?}");
    assert_eq!(edge.api.most_live(), SLOTS);
    assert_eq!(edge.envoy.count("error").await, 0);

    // A slot is lost until its hold expires only if the client disconnected when the decision was on its way to Envoy, which then sends no
    // call for the end of the stream.
    wait::until_async("every other hold has ended", wait::PATIENCE, async || {
        let holds = edge.limiter.stats().holds;
        let lost = holds.held - holds.settled - holds.released;
        edge.envoy.active_requests().await == 0
            && edge.limiter.flush_settlements(Duration::ZERO).await == 0
            && lost <= left
            && edge.left().await.1 == (SLOTS as u64).saturating_sub(lost)
    })
    .await;
    let holds = edge.limiter.stats().holds;
    assert!(holds.settled >= SLOTS as u64 + finished + aborted, "{holds:?}, {counts:?}");
    assert_eq!((holds.expired, holds.late, holds.unknown, holds.waiting), (0, 0, 0, 0), "{holds:?}");
    edge.api.end_no_more();
    clock.advance(TTL);
    edge.take_all_slots("last").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_of_a_thousand_callers_never_exceed_their_limit_and_no_slot_is_lost() {
    run(on_memory()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_of_a_thousand_callers_never_exceed_their_limit_and_no_slot_is_lost_on_redis() {
    let redis = Redis::start(Flavor::Redis7);
    run(on_redis(&redis).await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_slots_of_streams_whose_envoy_was_killed_are_free_after_their_ttl() {
    let redis = Redis::start(Flavor::Redis7);
    for (limiter, clock) in [on_memory(), on_redis(&redis).await] {
        let edge = Edge::over(limiter.clone(), &[]).await;
        let streams = edge.take_all_slots("before").await;
        drop(edge); // kills Envoy
        for stream in streams {
            stream.finish().await;
        }
        let edge = Edge::over(limiter, &[]).await;
        assert_eq!(edge.open_named("/3", "early").await.status(), 429);
        let holds = edge.limiter.stats().holds;
        assert_eq!((holds.held, holds.settled, holds.released), (SLOTS as u64, 0, 0));
        clock.advance(TTL);
        edge.take_all_slots("after").await;
    }
}
