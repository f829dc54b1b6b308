//! Holds through a real Envoy with the configuration `deploy/envoy/holds.yaml`, in front of an API that streams its answers.

#![expect(clippy::unwrap_used, reason = "a failing helper fails the test")]

use std::{collections::HashSet, convert::Infallible, sync::Arc, time::Duration};

use axum::{
    Router,
    body::{Body, Bytes},
    extract::State,
    http::{HeaderMap, Uri},
    response::IntoResponse,
    routing::get,
};
use parking_lot::Mutex;
use sluicegate::{Cost, Labels, Limit, Limiter, MemoryStore, Options, Rule, stats::HoldStats};
use sluicegate_server::grpc::Settings;
use sluicegate_testkit::{gated_store::GatedStore, wait};
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

/// The name that a test gives to a stream.
const STREAM: &str = "x-stream";

/// The API. Every stream sends an event, waits until it may end, and sends the number of its tokens.
#[derive(Clone)]
pub(crate) struct Api {
    ends: Arc<Semaphore>,
    streams: Arc<Mutex<Streams>>,
}

/// The streams in flight: each from the arrival of its request until the API is about to end it, or its client to disconnect. A hold is
/// made before and ended after that, so this number is never above that of the holds.
#[derive(Default)]
struct Streams {
    live: HashSet<String>,
    ended: HashSet<String>,
    most_live: usize,
}

impl Api {
    fn new() -> Self {
        Self { ends: Arc::new(Semaphore::new(0)), streams: Arc::default() }
    }

    fn service(&self) -> Router {
        Router::new().fallback(get(answer)).with_state(self.clone())
    }

    /// Ends this number of streams.
    pub(crate) fn end(&self, streams: usize) {
        self.ends.add_permits(streams);
    }

    /// Ends no further streams.
    pub(crate) fn end_no_more(&self) {
        self.ends.forget_permits(Semaphore::MAX_PERMITS);
    }

    fn begins(&self, stream: &str) {
        let mut streams = self.streams.lock();
        // the request of a client that has disconnected may arrive later
        if !streams.ended.contains(stream) {
            streams.live.insert(stream.to_owned());
            streams.most_live = streams.most_live.max(streams.live.len());
        }
    }

    /// Records that a stream is about to end.
    pub(crate) fn ends(&self, stream: &str) {
        let mut streams = self.streams.lock();
        streams.live.remove(stream);
        streams.ended.insert(stream.to_owned());
    }

    /// Returns the most streams that were in flight at one time.
    pub(crate) fn most_live(&self) -> usize {
        self.streams.lock().most_live
    }
}

/// Answers `/7` with a stream of 7 tokens, and `/` with one that ends without their number.
async fn answer(State(api): State<Api>, uri: Uri, headers: HeaderMap) -> impl IntoResponse {
    let tokens: Option<u64> = uri.path()[1..].parse().ok();
    let name = headers.get(STREAM).map(|name| name.to_str().unwrap().to_owned());
    let name = name.unwrap_or_else(|| rand::random::<u64>().to_string());
    api.begins(&name);
    let (send, events) = mpsc::channel(1);
    tokio::spawn(async move {
        let event = |text: String| Ok::<_, Infallible>(Bytes::from(format!("data: {text}\n\n")));
        let _ = send.send(event(r#"{"delta":"hello"}"#.to_owned())).await;
        let ended = tokio::select! {
            permit = api.ends.acquire() => permit.map(|permit| permit.forget()).is_ok(),
            () = send.closed() => false,
        };
        api.ends(&name);
        if let Some(tokens) = tokens.filter(|_| ended) {
            let _ = send.send(event(format!(r#"{{"usage":{{"total_tokens":{tokens}}}}}"#))).await;
        }
    });
    ([("content-type", "text/event-stream")], Body::from_stream(ReceiverStream::new(events)))
}

/// An Envoy in front of the API, and the limiter that decides.
pub(crate) struct Edge {
    pub(crate) envoy: Envoy,
    pub(crate) limiter: Limiter,
    pub(crate) api: Api,
}

/// A request.
pub(crate) struct Stream {
    stream: TcpStream,
    read: Vec<u8>,
}

/// No call of a test takes longer.
const TIMEOUT: (&str, &str) = ("timeout: 0.02s", "timeout: 60s");

impl Edge {
    async fn start(rules: impl IntoIterator<Item = Rule>, changes: &[(&str, &str)]) -> Self {
        Self::over(Limiter::new(MemoryStore::new(), rules).unwrap(), changes).await
    }

    pub(crate) async fn over(limiter: Limiter, changes: &[(&str, &str)]) -> Self {
        let front = Front::start(limiter.clone(), Settings::default()).await;
        let api = Api::new();
        let changes = [&[TIMEOUT], changes].concat();
        let envoy = Envoy::start_with("holds.yaml", api.service(), front, &changes).await;
        Self { envoy, limiter, api }
    }

    /// Sends a request.
    async fn send(&self, path: &str, fields: &str) -> Stream {
        let mut stream = TcpStream::connect(self.envoy.address).await.unwrap();
        let head =
            format!("GET {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\nx-api-key: acme\r\n{fields}\r\n");
        stream.write_all(head.as_bytes()).await.unwrap();
        Stream { stream, read: Vec::new() }
    }

    /// Sends a request, and returns once its first event or its denial has arrived.
    async fn open(&self, path: &str, fields: &str) -> Stream {
        let mut stream = self.send(path, fields).await;
        while !stream.has_begun() && stream.read_more().await {}
        stream
    }

    /// [`Self::send`], with a name for the stream.
    pub(crate) async fn send_named(&self, path: &str, name: &str) -> Stream {
        self.send(path, &format!("{STREAM}: {name}\r\n")).await
    }

    /// [`Self::open`], with a name for the stream.
    pub(crate) async fn open_named(&self, path: &str, name: &str) -> Stream {
        self.open(path, &format!("{STREAM}: {name}\r\n")).await
    }

    /// Returns the remaining tokens and in-flight slots.
    pub(crate) async fn left(&self) -> (u64, u64) {
        let labels = Labels::new([("domain", "llm"), ("api_key", "acme")]).unwrap();
        let decision = self.limiter.peek(&labels, Cost::ZERO).await.unwrap();
        let left = |rule: &str| {
            let tier = decision.tiers.iter().find(|tier| tier.rule.as_deref() == Some(rule)).unwrap();
            assert_eq!(tier.debt, 0, "{rule}");
            tier.remaining
        };
        (left("tokens"), left("in-flight"))
    }

    pub(crate) async fn until_left(&self, expected: (u64, u64)) {
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

    pub(crate) fn status(&self) -> u16 {
        self.text().split(' ').nth(1).unwrap().parse().unwrap()
    }

    /// Reads the rest.
    pub(crate) async fn finish(mut self) -> String {
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

/// Envoy then sends no call for the end of the stream.
#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_disconnects_while_the_store_decides_leaves_no_hold() {
    let store = GatedStore::closed();
    let options = Options::new().deadline(Duration::from_secs(60));
    let limiter = Limiter::builder().store(Arc::clone(&store)).rules(rules(10_000, 3)).options(options);
    let edge = Edge::over(limiter.build().unwrap(), &[]).await;
    let client = edge.send("/7", "").await;
    store.received().await;
    drop(client);
    wait::until_async("the hold is completed in the background", wait::PATIENCE, async || {
        edge.limiter.flush_settlements(Duration::ZERO).await > 0
    })
    .await;
    store.permit(1_000);
    edge.until_holds("the hold is released", |holds| holds.released > 0).await;
    assert_eq!(edge.left().await, (10_000, 3));
    let holds = edge.limiter.stats().holds;
    assert_eq!((holds.held, holds.released, holds.settled, holds.unknown), (1, 1, 0, 0));
    assert_eq!(edge.api.most_live(), 0, "the request is not forwarded");
    assert_eq!(edge.envoy.count("error").await, 0);
}
