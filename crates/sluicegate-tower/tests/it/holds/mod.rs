//! Holds in a real axum server with real clients.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod ends;
mod load;
mod outage;
mod renewal;
mod settling;

use std::{io, net::SocketAddr, time::Duration};

use axum::{Router, body::Body, routing::get};
use bytes::Bytes;
use futures_util::stream;
use http::{Request, Response};
use http_body_util::{BodyExt, Empty};
use hyper::body::Incoming;
use hyper_util::{client::legacy::Client, rt::TokioExecutor};
use sluicegate::{Cost, Costs, Labels, Limit, Limiter, Rule};
use sluicegate_testkit::wait;
use sluicegate_tower::{ActualCosts, RateLimitLayer};
use tokio::{net::TcpListener, sync::mpsc};

const HOUR: Duration = Duration::from_secs(3_600);

type Chunk = Result<Bytes, io::Error>;

/// At most this many requests in flight.
fn in_flight(slots: u64) -> Rule {
    Rule::new("in-flight", Limit::concurrency(slots).unwrap())
}

/// 1,000 tokens per hour.
fn tokens() -> Rule {
    Rule::new("tokens", Limit::fixed_window(1_000, HOUR).unwrap()).unit("tokens")
}

/// A layer that estimates one request and 500 tokens.
fn with_estimate(limiter: &Limiter) -> RateLimitLayer {
    RateLimitLayer::new(limiter.clone()).estimate(|_| estimate())
}

fn estimate() -> Costs {
    Costs::new([("requests", Cost::ONE), ("tokens", Cost::from(500))]).unwrap()
}

/// Returns the least remaining quota of the rules that count a unit.
async fn remaining(limiter: &Limiter, unit: &str) -> u64 {
    let peeked = limiter.peek(&Labels::default(), estimate()).await.unwrap();
    let tiers = peeked.tiers.iter().filter(|tier| *tier.unit == *unit);
    tiers.map(|tier| tier.remaining).min().unwrap()
}

/// Waits until this many slots or requests remain.
async fn until_remaining(limiter: &Limiter, expected: u64) {
    let what = format!("{expected} requests remain");
    wait::until_async(what, wait::PATIENCE, || async { remaining(limiter, "requests").await == expected })
        .await;
}

/// A request that is being served. The test writes the body of its response; dropping this ends the body.
struct Stream {
    chunks: mpsc::UnboundedSender<Chunk>,
    actual: ActualCosts,
}

impl Stream {
    fn send(&self, chunk: &'static str) {
        self.chunks.send(Ok(Bytes::from_static(chunk.as_bytes()))).unwrap();
    }

    fn fail(self) {
        self.chunks.send(Err(io::Error::other("the model failed"))).unwrap();
    }
}

/// A server whose responses the test writes.
struct Server {
    address: SocketAddr,
    streams: mpsc::UnboundedReceiver<Stream>,
}

impl Server {
    async fn start(layer: RateLimitLayer) -> Self {
        let (started, streams) = mpsc::unbounded_channel();
        let handler = move |actual: ActualCosts| async move {
            let (chunks, written) = mpsc::unbounded_channel();
            started.send(Stream { chunks, actual }).unwrap();
            streamed(written)
        };
        let address = serve(Router::new().route("/", get(handler)).layer(layer)).await;
        Self { address, streams }
    }

    /// Sends a request, and waits for the start of its response.
    async fn open(&mut self) -> (Response<Incoming>, Stream) {
        let response = fetch(self.address, "/").await;
        assert_eq!(response.status(), 200);
        (response, self.streams.recv().await.unwrap())
    }
}

/// Returns a body of chunks.
fn streamed(chunks: mpsc::UnboundedReceiver<Chunk>) -> Body {
    Body::from_stream(stream::unfold(chunks, async |mut chunks| Some((chunks.recv().await?, chunks))))
}

async fn serve(app: Router) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, app).await });
    address
}

/// Sends a request on a new connection.
async fn fetch(server: SocketAddr, path: &str) -> Response<Incoming> {
    try_fetch(server, path).await.unwrap()
}

async fn try_fetch(
    server: SocketAddr,
    path: &str,
) -> Result<Response<Incoming>, hyper_util::client::legacy::Error> {
    let client = Client::builder(TokioExecutor::new()).build_http::<Empty<Bytes>>();
    client.request(Request::get(format!("http://{server}{path}")).body(Empty::new()).unwrap()).await
}

async fn next_chunk(response: &mut Response<Incoming>) -> Option<Bytes> {
    Some(response.frame().await?.unwrap().into_data().unwrap())
}

fn field<'a, B>(response: &'a Response<B>, name: &str) -> &'a str {
    response.headers().get(name).map_or("", |value| value.to_str().unwrap())
}
