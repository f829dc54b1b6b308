//! Many callers with every way to end a request.

use std::{
    collections::HashMap,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use axum::extract::Path;
use futures_util::future::{Either, select};
use sluicegate::{OnStoreFailure, Options, RedisStore};
use sluicegate_testkit::server::{Flavor, Server as Redis};
use tokio::{sync::Semaphore, task::JoinSet};

use super::*;

const SLOTS: u64 = 10;
const CALLERS: usize = 1_000;
/// Callers at a time. More than the slots, so that some are denied.
const AT_A_TIME: usize = 50;

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

/// The state of the server.
struct Served {
    gauge: Arc<Gauge>,
    /// For each caller, whether its handler has started.
    started: Vec<Semaphore>,
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
    ENDS[caller % ENDS.len()]
}

/// Makes one request and returns how it ended.
async fn call(server: SocketAddr, caller: usize, served: Arc<Served>) -> &'static str {
    let end = end_of(caller);
    let path = format!("/{caller}");
    let request = pin!(try_fetch(server, &path));
    let disconnected = pin!(async {
        match end {
            "disconnect-early" => served.started[caller].acquire().await.unwrap().forget(),
            "disconnect-anywhere" => {
                for _ in 0..caller % MOST_POLLS {
                    tokio::task::yield_now().await;
                }
            }
            _ => std::future::pending().await,
        }
    });
    let Either::Left((answer, _)) = select(request, disconnected).await else { return end };
    let Ok(mut response) = answer else {
        assert_eq!(end, "panic");
        return end;
    };
    if response.status() == 429 {
        assert_ne!(field(&response, "retry-after"), "");
        return "denied";
    }
    assert_eq!(response.status(), 200);
    next_chunk(&mut response).await.unwrap();
    if end != "disconnect" {
        assert_eq!(response.collect().await.is_err(), end == "fail");
    }
    end
}

async fn run(limiter: Limiter) {
    let started = (0..CALLERS).map(|_| Semaphore::new(0)).collect();
    let served = Arc::new(Served { gauge: Arc::default(), started });
    let serving = Arc::clone(&served);
    let handler = move |Path(caller): Path<usize>, actual| handler(Arc::clone(&serving), caller, actual);
    let app = Router::new().route("/{caller}", get(handler)).layer(with_estimate(&limiter));
    let server = serve(app).await;

    let permits = Arc::new(Semaphore::new(AT_A_TIME));
    let mut callers = JoinSet::new();
    for caller in 0..CALLERS {
        let permit = Arc::clone(&permits).acquire_owned().await.unwrap();
        let served = Arc::clone(&served);
        callers.spawn(async move {
            let _permit = permit;
            call(server, caller, served).await
        });
    }
    let mut ends = HashMap::<_, u32>::new();
    while let Some(end) = callers.join_next().await {
        *ends.entry(end.unwrap()).or_default() += 1;
    }
    let most = served.gauge.most.load(Ordering::SeqCst);
    assert!(most <= SLOTS, "{most} requests were in flight");
    for end in ENDS.into_iter().chain(["denied"]) {
        assert!(ends.contains_key(end), "no request ended with {end}: {ends:?}");
    }
    until_remaining(&limiter, SLOTS).await;
    wait::until_async("every hold has one end", wait::PATIENCE, || async {
        let holds = limiter.stats().holds;
        holds.held == holds.settled + holds.released
    })
    .await;
    let holds = limiter.stats().holds;
    assert_eq!((holds.expired, holds.late, holds.already), (0, 0, 0), "{holds:?}");
}

fn rules() -> [Rule; 2] {
    let tokens = Rule::new("tokens", Limit::fixed_window(100_000_000, HOUR).unwrap()).unit("tokens");
    [in_flight(SLOTS), tokens].map(|rule| rule.on_store_failure(OnStoreFailure::Closed))
}

#[tokio::test(flavor = "multi_thread")]
async fn at_most_ten_of_a_thousand_requests_are_in_flight_and_no_slot_is_lost() {
    run(Limiter::in_memory(rules()).unwrap()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn at_most_ten_of_a_thousand_requests_are_in_flight_and_no_slot_is_lost_on_redis() {
    let redis = Redis::start(Flavor::Redis7);
    let store = RedisStore::connect(&redis.url()).await.unwrap();
    let options = Options::new().deadline(Duration::from_secs(10));
    run(Limiter::builder().store(store).rules(rules()).options(options).build().unwrap()).await;
}
