//! Holds through a real Envoy with the configuration `deploy/envoy/holds.yaml`, in front of an API that streams its answers.

#![expect(clippy::unwrap_used, reason = "a failing helper fails the test")]

use std::{
    convert::Infallible,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use axum::{
    Router,
    body::{Body, Bytes},
    extract::State,
    http::Uri,
    response::IntoResponse,
    routing::get,
};
use futures_util::future::join_all;
use rand::{Rng, SeedableRng, rngs::StdRng};
use sluicegate::{Cost, Labels, Limit, Limiter, MemoryStore, Rule, stats::HoldStats};
use sluicegate_server::grpc::Settings;
use sluicegate_testkit::wait;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    sync::{Semaphore, mpsc},
};
use tokio_stream::wrappers::ReceiverStream;

use crate::{envoy::Envoy, grpc_front::Front};

const DAY: Duration = Duration::from_secs(24 * 60 * 60);
/// The estimate in the configuration.
const ESTIMATE: u64 = 500;

/// The API. Every stream sends an event, waits until it may end, and sends the number of its tokens.
#[derive(Clone)]
struct Api {
    ends: Arc<Semaphore>,
    live: Arc<AtomicUsize>,
    most_live: Arc<AtomicUsize>,
}

/// Counts a stream as long as the API sends it.
struct LiveStream(Arc<AtomicUsize>);

impl Drop for LiveStream {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Api {
    fn new() -> Self {
        let (live, most_live) = Default::default();
        Self { ends: Arc::new(Semaphore::new(0)), live, most_live }
    }

    fn service(&self) -> Router {
        Router::new().fallback(get(answer)).with_state(self.clone())
    }

    /// Ends this number of streams.
    fn end(&self, streams: usize) {
        self.ends.add_permits(streams);
    }
}

/// Answers `/7` with a stream of 7 tokens, and `/` with one that ends without their number.
async fn answer(State(api): State<Api>, uri: Uri) -> impl IntoResponse {
    let tokens: Option<u64> = uri.path()[1..].parse().ok();
    let live = api.live.fetch_add(1, Ordering::Relaxed) + 1;
    api.most_live.fetch_max(live, Ordering::Relaxed);
    let stream = LiveStream(Arc::clone(&api.live));
    let (send, events) = mpsc::channel(1);
    tokio::spawn(async move {
        let event = |text: String| Ok::<_, Infallible>(Bytes::from(format!("data: {text}\n\n")));
        let _ = send.send(event(r#"{"delta":"hello"}"#.to_owned())).await;
        let ended = tokio::select! {
            permit = api.ends.acquire() => permit.map(|permit| permit.forget()).is_ok(),
            () = send.closed() => false,
        };
        drop(stream);
        if let Some(tokens) = tokens.filter(|_| ended) {
            let _ = send.send(event(format!(r#"{{"usage":{{"total_tokens":{tokens}}}}}"#))).await;
        }
    });
    ([("content-type", "text/event-stream")], Body::from_stream(ReceiverStream::new(events)))
}

/// An Envoy in front of the API, and the limiter that decides.
struct Edge {
    envoy: Envoy,
    limiter: Limiter,
    api: Api,
}

/// A request whose response has begun.
struct Stream {
    stream: TcpStream,
    read: Vec<u8>,
}

impl Edge {
    async fn start(rules: impl IntoIterator<Item = Rule>, changes: &[(&str, &str)]) -> Self {
        let limiter = Limiter::new(MemoryStore::new(), rules).unwrap();
        let front = Front::start(limiter.clone(), Settings::default()).await;
        let api = Api::new();
        let changes: Vec<(&str, &str)> =
            [("timeout: 0.02s", "timeout: 5s")].into_iter().chain(changes.iter().copied()).collect();
        let envoy = Envoy::start_with("holds.yaml", api.service(), front, &changes).await;
        Self { envoy, limiter, api }
    }

    /// Sends a request, and returns once its first event or its denial has arrived.
    async fn open(&self, path: &str, fields: &str) -> Stream {
        let mut stream = TcpStream::connect(self.envoy.address).await.unwrap();
        let head =
            format!("GET {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\nx-api-key: acme\r\n{fields}\r\n");
        stream.write_all(head.as_bytes()).await.unwrap();
        let mut stream = Stream { stream, read: Vec::new() };
        while !stream.has_begun() && stream.read_more().await {}
        stream
    }

    /// Returns the remaining tokens and in-flight slots.
    async fn left(&self) -> (u64, u64) {
        let labels = Labels::new([("domain", "llm"), ("api_key", "acme")]).unwrap();
        let decision = self.limiter.peek(&labels, Cost::ZERO).await.unwrap();
        let left = |rule: &str| {
            let tier = decision.tiers.iter().find(|tier| tier.rule.as_deref() == Some(rule)).unwrap();
            assert_eq!(tier.debt, 0, "{rule}");
            tier.remaining
        };
        (left("tokens"), left("in-flight"))
    }

    async fn until_left(&self, expected: (u64, u64)) {
        let what = format!("{expected:?} are left");
        wait::until_async(&what, wait::PATIENCE, async || self.left().await == expected).await;
    }

    async fn until_holds(&self, what: &str, is_so: impl Fn(HoldStats) -> bool) {
        wait::until_async(what, wait::PATIENCE, async || is_so(self.limiter.stats().holds)).await;
    }
}

impl Stream {
    /// Reads some bytes. Returns `false` at the end.
    async fn read_more(&mut self) -> bool {
        self.stream.read_buf(&mut self.read).await.is_ok_and(|count| count > 0)
    }

    /// Whether the first event has arrived.
    fn has_begun(&self) -> bool {
        self.text().contains("delta")
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.read).into_owned()
    }

    fn status(&self) -> u16 {
        self.text().split(' ').nth(1).unwrap().parse().unwrap()
    }

    /// Reads the rest.
    async fn finish(mut self) -> String {
        while self.read_more().await {}
        self.text()
    }
}

fn rules(tokens: u64, in_flight: u64) -> [Rule; 2] {
    let rule = |name, limit| {
        Rule::new(name, limit).per(["api_key"]).hold("request_id").ttl(Duration::from_secs(600))
    };
    [
        rule("tokens", Limit::fixed_window(tokens, DAY).unwrap()).unit("tokens"),
        rule("in-flight", Limit::concurrency(in_flight).unwrap()),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_is_held_until_its_end_and_settled_with_its_tokens() {
    let edge = Edge::start(rules(10_000, 3), &[]).await;
    let first = edge.open("/7", "").await;
    let second = edge.open("/1200", "").await;
    assert_eq!((first.status(), second.status()), (200, 200));
    assert_eq!(edge.left().await, (10_000 - 2 * ESTIMATE, 1));
    edge.api.end(2);
    assert!(first.finish().await.contains("total_tokens"));
    assert!(second.finish().await.contains("total_tokens"));
    edge.until_left((10_000 - 1_207, 3)).await;
    let holds = edge.limiter.stats().holds;
    assert_eq!((holds.held, holds.settled), (2, 2));
    assert_eq!(edge.envoy.count("error").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_the_client_aborts_or_that_reports_no_tokens_keeps_its_estimate() {
    let edge = Edge::start(rules(10_000, 1), &[]).await;
    let aborted = edge.open("/7", "").await;
    assert_eq!(edge.left().await, (10_000 - ESTIMATE, 0));
    drop(aborted);
    edge.until_left((10_000 - ESTIMATE, 1)).await;

    let without_tokens = edge.open("/", "").await;
    assert_eq!(without_tokens.status(), 200);
    edge.api.end(1);
    without_tokens.finish().await;
    edge.until_left((10_000 - 2 * ESTIMATE, 1)).await;
    assert_eq!(edge.limiter.stats().holds.settled, 2);
}

/// The settle entry as a constant, which denied requests have as well.
const CONSTANT_MARK: (&str, &str) = (
    "metadata:\n                          descriptor_key: sluicegate\n                          \
     metadata_key: { key: envoy.filters.http.ratelimit, path: [{ key: sluicegate }] }",
    "generic_key: { descriptor_key: sluicegate, descriptor_value: settle }",
);

#[tokio::test(flavor = "multi_thread")]
async fn the_end_of_a_denied_request_is_not_sent_or_changes_nothing() {
    for (changes, unknown) in [(&[][..], 0), (&[CONSTANT_MARK][..], 3)] {
        let edge = Edge::start(rules(10_000, 1), changes).await;
        let held = edge.open("/7", "").await;
        for _ in 0..3 {
            let denied = edge.open("/7", "").await;
            assert_eq!(denied.status(), 429);
            denied.finish().await;
        }
        edge.until_holds("Envoy sends the ends", |holds| holds.unknown == unknown).await;
        assert_eq!(edge.left().await, (10_000 - ESTIMATE, 0));
        edge.api.end(1);
        held.finish().await;
        edge.until_left((10_000 - 7, 1)).await;
        assert_eq!(edge.limiter.stats().holds.unknown, unknown);
    }
}

/// Envoy keeps the `x-request-id` of clients at internal addresses.
const INTERNAL: (&str, &str) = (
    "xff_num_trusted_hops: 0",
    "xff_num_trusted_hops: 0\n          \
     internal_address_config: { cidr_ranges: [{ address_prefix: 127.0.0.0, prefix_len: 8 }] }",
);
const ID: &str = "x-request-id: 7fd3c7d1-0000-4000-8000-000000000001\r\n";

#[tokio::test(flavor = "multi_thread")]
async fn an_external_client_cannot_choose_the_id_of_its_holds() {
    let edge = Edge::start(rules(10_000, 2), &[]).await;
    let first = edge.open("/1", ID).await;
    let second = edge.open("/2", ID).await;
    assert_eq!((first.status(), second.status()), (200, 200));
    assert_eq!(edge.left().await, (10_000 - 2 * ESTIMATE, 0));
    assert_eq!(edge.open("/3", ID).await.status(), 429);
    edge.api.end(2);
    first.finish().await;
    second.finish().await;
    edge.until_left((10_000 - 3, 2)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_repeated_live_id_neither_makes_nor_ends_a_hold() {
    let edge = Edge::start(rules(10_000, 5), &[INTERNAL]).await;
    let first = edge.open("/1", ID).await;
    assert_eq!(first.status(), 200);
    for _ in 0..3 {
        let again = edge.open("/2", ID).await;
        assert_eq!(again.status(), 429);
        again.finish().await;
    }
    assert_eq!(edge.open("/2", "").await.status(), 200, "another id is held, and its stream is aborted");
    edge.until_holds("the aborted stream is settled", |holds| holds.settled == 1).await;
    assert_eq!(edge.left().await, (10_000 - 2 * ESTIMATE, 4), "the first is still held");
    edge.api.end(1);
    first.finish().await;
    edge.until_left((10_000 - ESTIMATE - 1, 5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_repeats_a_live_id_is_charged_for_each_request() {
    let [tokens, in_flight] = rules(10_000, 5);
    let edge = Edge::start([tokens, in_flight.shadow()], &[INTERNAL]).await;
    let first = edge.open("/2", ID).await;
    let again = [edge.open("/2", ID).await, edge.open("/2", ID).await];
    assert_eq!(edge.left().await, (10_000 - 3 * ESTIMATE, 4), "every request is charged, one is held");
    edge.api.end(3);
    for stream in again {
        assert_eq!(stream.status(), 200);
        stream.finish().await;
    }
    first.finish().await;
    edge.until_left((10_000 - 2 * ESTIMATE - 2, 5)).await;
    let holds = edge.limiter.stats().holds;
    assert_eq!((holds.held, holds.settled, holds.already), (1, 1, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_in_flight_never_exceed_their_limit_and_all_slots_are_free_at_the_end() {
    const CALLERS: u64 = 150;
    const REQUESTS: usize = 8;
    const LIMIT: usize = 10;
    let edge = Edge::start(rules(1_000_000_000, LIMIT as u64), &[]).await;
    // streams end at once
    edge.api.end(CALLERS as usize * REQUESTS);
    let callers = (0..CALLERS).map(async |seed| {
        let mut random = StdRng::seed_from_u64(seed);
        let mut counts = [0; 3];
        for _ in 0..REQUESTS {
            let stream = edge.open("/3", "").await;
            match stream.status() {
                200 if random.random_bool(0.3) => counts[1] += 1, // aborted
                200 => {
                    counts[0] += 1;
                    stream.finish().await;
                }
                status => {
                    assert_eq!(status, 429);
                    counts[2] += 1;
                }
            }
            edge.left().await; // not in debt
        }
        counts
    });
    let counts = join_all(callers).await;
    let [finished, aborted, denied] =
        [0, 1, 2].map(|kind| counts.iter().map(|counts| counts[kind]).sum::<u64>());
    assert!(
        finished > 0 && aborted > 0 && denied > 0,
        "{finished} finished, {aborted} aborted, {denied} denied"
    );
    edge.until_holds("all holds are settled", |holds| holds.settled == holds.held).await;
    assert_eq!(edge.left().await.1, LIMIT as u64);
    assert_eq!(edge.limiter.stats().holds.held, finished + aborted);
    assert_eq!(edge.envoy.count("error").await, 0);

    // the API is never called by more, as long as no client aborts
    let edge = Edge::start(rules(1_000_000_000, LIMIT as u64), &[]).await;
    let open = join_all((0..CALLERS).map(|_| edge.open("/3", ""))).await;
    assert_eq!(open.iter().filter(|stream| stream.status() == 200).count(), LIMIT);
    edge.api.end(LIMIT);
    for stream in open {
        stream.finish().await;
    }
    edge.until_left((1_000_000_000 - 3 * LIMIT as u64, LIMIT as u64)).await;
    assert_eq!(edge.api.most_live.load(Ordering::Relaxed), LIMIT);
}
