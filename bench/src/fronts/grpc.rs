//! Clients of Envoy's rate limit service, and of throttlecrab's own. tonic's client takes about as much of the
//! processor as the servers, so that what differs between them looks smaller than it is: see their CPU time.

use std::{net::SocketAddr, thread};

use anyhow::{Result, ensure};
use tokio::task::JoinSet;
use tollgate_server::grpc::messages::{
    Code, RateLimitDescriptor, RateLimitRequest, rate_limit_descriptor::Entry,
    rate_limit_service_client::RateLimitServiceClient,
};
use tonic::{
    Request,
    client::Grpc,
    codegen::http::uri::PathAndQuery,
    transport::{Channel, Endpoint},
};
use tonic_prost::ProstCodec;

use super::{CALLERS, Caller, Contestant, Period, ask, sum, user};

/// How many connections there are.
pub const CHANNELS: usize = 4;

/// One call at a time.
pub enum Client {
    Envoy(RateLimitServiceClient<Channel>),
    Throttlecrab(Grpc<Channel>),
}

/// throttlecrab's request, as its `throttlecrab.proto` has it.
#[derive(Clone, PartialEq, prost::Message)]
struct ThrottleRequest {
    #[prost(string, tag = "1")]
    key: String,
    #[prost(int32, tag = "2")]
    max_burst: i32,
    #[prost(int32, tag = "3")]
    count_per_period: i32,
    #[prost(int32, tag = "4")]
    period: i32,
    #[prost(int32, tag = "5")]
    quantity: i32,
}

/// The part of its answer that counts here.
#[derive(Clone, PartialEq, prost::Message)]
struct ThrottleResponse {
    #[prost(bool, tag = "1")]
    allowed: bool,
}

/// How many of the connections each thread has: there is one for each core.
pub fn channels_by_thread() -> Result<impl Iterator<Item = usize>> {
    let threads = thread::available_parallelism()?.get();
    Ok((0..threads).map(move |thread| (thread..CHANNELS).step_by(threads).count()))
}

/// Has the callers of these connections ask, on this thread alone. How many answers came while measured.
///
/// What tonic's client makes for a call is freed when it is answered. Where threads take calls from each other they free each other's
/// memory, and wait for the allocator: once a call with a server that writes several answers at once.
pub fn ask_alone(
    contestant: Contestant,
    address: SocketAddr,
    channels: usize,
    period: Period,
) -> Result<u64> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut asking = JoinSet::new();
        ask(callers(contestant, address, channels).await?, period, &mut asking);
        sum(asking).await
    })
}

async fn callers(contestant: Contestant, address: SocketAddr, channels: usize) -> Result<Vec<Client>> {
    let mut clients = Vec::new();
    for _ in 0..channels {
        let channel = Endpoint::from_shared(format!("http://{address}"))?.connect().await?;
        for _ in 0..CALLERS / CHANNELS {
            let channel = channel.clone();
            clients.push(match contestant {
                Contestant::Throttlecrab => Client::Throttlecrab(Grpc::new(channel)),
                Contestant::Tollgate | Contestant::AlwaysAllow => {
                    Client::Envoy(RateLimitServiceClient::new(channel))
                }
            });
        }
    }
    Ok(clients)
}

impl Caller for Client {
    async fn ask(&mut self, random: &mut fastrand::Rng) -> Result<u64> {
        let user = user(random);
        let is_allowed = match self {
            Self::Envoy(client) => {
                let entries = vec![Entry { key: "user".to_owned(), value: user.into_bytes() }];
                let descriptors = vec![RateLimitDescriptor { entries, ..RateLimitDescriptor::default() }];
                let request = RateLimitRequest { domain: "edge".to_owned(), descriptors, hits_addend: 0 };
                let answer = client.should_rate_limit(request).await?;
                answer.get_ref().overall_code == i32::from(Code::Ok)
            }
            Self::Throttlecrab(client) => {
                let request = ThrottleRequest {
                    key: user,
                    max_burst: 1_000_000,
                    count_per_period: 1_000_000,
                    period: 60,
                    quantity: 1,
                };
                let path = PathAndQuery::from_static("/throttlecrab.RateLimiter/Throttle");
                client.ready().await?;
                let codec = ProstCodec::<ThrottleRequest, ThrottleResponse>::default();
                client.unary(Request::new(request), path, codec).await?.get_ref().allowed
            }
        };
        ensure!(is_allowed, "the server does not allow");
        Ok(1)
    }
}
