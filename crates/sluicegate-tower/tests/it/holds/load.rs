//! Many callers with every way to end a request.

use std::{
    collections::HashMap,
    mem,
    panic::AssertUnwindSafe,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use axum::extract::Path;
use futures_util::{
    FutureExt,
    future::{Either, select},
};
use sluicegate::{ManualClock, MemoryStore, OnStoreFailure, Options, RedisStore, Timestamp};
use sluicegate_testkit::server::{Flavor, Server as Redis};
use tokio::{sync::Semaphore, task::JoinSet, time::sleep};
use tower::ServiceExt;

use super::*;

const SLOTS: u64 = 10;
/// All of them call at the same time, and repeat a denied request.
const CALLERS: usize = 1_000;
/// One of so many callers has a TCP connection to a server, the others call the service in this process.
const CALLERS_PER_CLIENT: usize = 8;
/// The responses that are lost, as in a crash: nothing ends their holds. They are fewer than the slots, so that the other callers go on.
const CRASHES: usize = 5;
/// On a clock that the test moves after all other requests have ended.
const TTL: Duration = HOUR;
/// A denied request is repeated after at most this time.
const LONGEST_PAUSE_MS: usize = 400;

/// Counts the requests that are being served.
#[derive(Default)]
struct Gauge {
    now: AtomicU64,
    most: AtomicU64,
}

struct Counted(Arc<Gauge>);

impl Counted {
    fn start(gauge: &Arc<Gauge>) -> Self {
        let now = gauge.now.fetch_add(1, Ordering::SeqCst) + 1;
        gauge.most.fetch_max(now, Ordering::SeqCst);
        Self(Arc::clone(gauge))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.now.fetch_sub(1, Ordering::SeqCst);
    }
}

/// How a request ends.
const ENDS: [&str; 7] =
    ["complete", "fail", "panic", "cancel", "disconnect", "disconnect-early", "disconnect-anywhere"];
/// A client that disconnects anywhere is polled at most this often.
const MOST_POLLS: usize = 40;

/// The state of the service.
struct Served {
    gauge: Arc<Gauge>,
    /// For each caller, whether its handler has started.
    started: Vec<Semaphore>,
}

/// The service, and a server for it.
struct Subject {
    app: Router,
    server: SocketAddr,
    served: Arc<Served>,
    denied: AtomicU64,
}

impl Subject {
    /// Makes one request. Returns `None` if the handler panicked.
    async fn request(&self, caller: usize) -> Option<Response<Body>> {
        let path = format!("/{caller}");
        if caller.is_multiple_of(CALLERS_PER_CLIENT) {
            return Some(try_fetch(self.server, &path).await.ok()?.map(Body::new));
        }
        let request = Request::get(path).body(Body::empty()).unwrap();
        let answered = AssertUnwindSafe(self.app.clone().oneshot(request)).catch_unwind().await;
        answered.ok().map(Result::unwrap)
    }
}

async fn handler(served: Arc<Served>, caller: usize, actual: ActualCosts) -> Body {
    let counted = Counted::start(&served.gauge);
    served.started[caller].add_permits(1);
    tokio::task::yield_now().await;
    let end = end_of(caller);
    match end {
        "panic" => panic!("a handler of this test panics"),
        "disconnect-early" | "disconnect-anywhere" => std::future::pending().await,
        "cancel" => actual.cancel(),
        _ => actual.set("tokens", 1),
    }
    Body::from_stream(stream::unfold((0, counted), move |(sent, counted)| async move {
        tokio::task::yield_now().await;
        let chunk = match (sent, end) {
            (3, "complete" | "cancel") => return None,
            (3, "fail") => Err(io::Error::other("the model failed")),
            (3, _) => std::future::pending().await,
            _ => Ok(Bytes::from_static(b"token ")),
        };
        Some((chunk, (sent + 1, counted)))
    }))
}

fn end_of(caller: usize) -> &'static str {
    if caller % (CALLERS / CRASHES) == 1 { "crash" } else { ENDS[caller % ENDS.len()] }
}

/// Makes a request, again if it is denied, and returns how it ended.
async fn call(subject: &Subject, caller: usize) -> &'static str {
    let end = end_of(caller);
    for attempt in 0.. {
        let request = pin!(subject.request(caller));
        let disconnected = pin!(async {
            match end {
                "disconnect-early" => subject.served.started[caller].acquire().await.unwrap().forget(),
                "disconnect-anywhere" => {
                    for _ in 0..caller % MOST_POLLS {
                        tokio::task::yield_now().await;
                    }
                }
                _ => std::future::pending().await,
            }
        });
        let Either::Left((answer, _)) = select(request, disconnected).await else { return end };
        let Some(mut response) = answer else {
            assert_eq!(end, "panic");
            return end;
        };
        if response.status() == 429 {
            assert_ne!(field(&response, "retry-after"), "");
            subject.denied.fetch_add(1, Ordering::Relaxed);
            let pause_ms = 1 + (caller * 31 + attempt * 97) % LONGEST_PAUSE_MS;
            sleep(Duration::from_millis(pause_ms as u64)).await;
            continue;
        }
        assert_eq!(response.status(), 200);
        response.frame().await.unwrap().unwrap();
        match end {
            "crash" => mem::forget(response),
            "disconnect" => {}
            _ => assert_eq!(response.collect().await.is_err(), end == "fail"),
        }
        break;
    }
    end
}

async fn run(limiter: Limiter, clock: ManualClock) {
    let started = (0..CALLERS).map(|_| Semaphore::new(0)).collect();
    let served = Arc::new(Served { gauge: Arc::default(), started });
    let serving = Arc::clone(&served);
    let handler = move |Path(caller): Path<usize>, actual| handler(Arc::clone(&serving), caller, actual);
    let app = Router::new().route("/{caller}", get(handler)).layer(with_estimate(&limiter));
    let server = serve(app.clone()).await;
    let subject = Arc::new(Subject { app, server, served, denied: AtomicU64::new(0) });

    let mut callers = JoinSet::new();
    for caller in 0..CALLERS {
        let subject = Arc::clone(&subject);
        callers.spawn(async move { call(&subject, caller).await });
    }
    let mut ends = HashMap::<_, usize>::new();
    while let Some(end) = callers.join_next().await {
        *ends.entry(end.unwrap()).or_default() += 1;
    }
    let most = subject.served.gauge.most.load(Ordering::SeqCst);
    assert!(most <= SLOTS, "{most} requests were in flight");
    assert!(ENDS.iter().all(|end| ends[end] > 0) && ends["crash"] == CRASHES, "{ends:?}");
    assert!(subject.denied.load(Ordering::Relaxed) > 0);

    until_remaining(&limiter, SLOTS - CRASHES as u64).await;
    wait::until_async("every other hold has one end", wait::PATIENCE, || async {
        let holds = limiter.stats().holds;
        holds.held == holds.settled + holds.released + CRASHES as u64
    })
    .await;
    let holds = limiter.stats().holds;
    assert_eq!((holds.expired, holds.late, holds.already), (0, 0, 0), "{holds:?}");
    clock.advance(TTL);
    let all = Costs::new([("requests", Cost::new(SLOTS).unwrap())]).unwrap();
    let held = limiter.hold(&Labels::default(), all).await.unwrap();
    assert!(held.is_allowed(), "all slots are free: {held:?}");
}

fn clock() -> ManualClock {
    ManualClock::new(Timestamp::from_micros(1_794_765_441_000_000))
}

fn rules() -> [Rule; 2] {
    let tokens = Rule::new("tokens", Limit::fixed_window(100_000_000, HOUR).unwrap()).unit("tokens");
    [in_flight(SLOTS), tokens].map(|rule| rule.on_store_failure(OnStoreFailure::Closed).ttl(TTL))
}

#[tokio::test(flavor = "multi_thread")]
async fn at_most_ten_of_a_thousand_requests_are_in_flight_and_no_slot_is_lost() {
    let clock = clock();
    let store = MemoryStore::new().with_clock(clock.clone());
    run(Limiter::new(store, rules()).unwrap(), clock).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn at_most_ten_of_a_thousand_requests_are_in_flight_and_no_slot_is_lost_on_redis() {
    let (clock, redis) = (clock(), Redis::start(Flavor::Redis7));
    let store = RedisStore::connect(&redis.url()).await.unwrap().with_clock(clock.clone());
    let options = Options::new().deadline(Duration::from_secs(60));
    run(Limiter::builder().store(store).rules(rules()).options(options).build().unwrap(), clock).await;
}
