//! Clients of Envoy's rate limit service, and of throttlecrab's own. tonic's client takes about as much of the
//! processor as the servers, so that what differs between them looks smaller than it is: see their CPU time.

use std::net::SocketAddr;

use anyhow::{Result, ensure};
use prost::Message;
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

use super::{CALLERS, Caller, Contestant, user};

/// How many connections there are.
pub const CHANNELS: usize = 4;

const SHOULD_RATE_LIMIT: &str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";
const THROTTLE: &str = "/throttlecrab.RateLimiter/Throttle";

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

impl ThrottleRequest {
    fn about(user: String) -> Self {
        Self { key: user, max_burst: 1_000_000, count_per_period: 1_000_000, period: 60, quantity: 1 }
    }
}

/// Envoy's.
fn request(user: String) -> RateLimitRequest {
    let entries = vec![Entry { key: "user".to_owned(), value: user.into_bytes() }];
    let descriptors = vec![RateLimitDescriptor { entries, ..RateLimitDescriptor::default() }];
    RateLimitRequest { domain: "edge".to_owned(), descriptors, hits_addend: 0 }
}

/// A call's path and its one message, framed, for a client that knows no gRPC.
pub fn call(contestant: Contestant) -> (&'static str, Vec<u8>) {
    let user = user(&mut fastrand::Rng::new());
    let (path, message) = match contestant {
        Contestant::Throttlecrab => (THROTTLE, ThrottleRequest::about(user).encode_to_vec()),
        Contestant::Tollgate | Contestant::AlwaysAllow => (SHOULD_RATE_LIMIT, request(user).encode_to_vec()),
    };
    // not compressed, and its length
    let mut framed = vec![0];
    framed.extend_from_slice(&(message.len() as u32).to_be_bytes());
    framed.extend_from_slice(&message);
    (path, framed)
}

/// The part of its answer that counts here.
#[derive(Clone, PartialEq, prost::Message)]
struct ThrottleResponse {
    #[prost(bool, tag = "1")]
    allowed: bool,
}

pub async fn callers(contestant: Contestant, address: SocketAddr, channels: usize) -> Result<Vec<Client>> {
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
                let answer = client.should_rate_limit(request(user)).await?;
                answer.get_ref().overall_code == i32::from(Code::Ok)
            }
            Self::Throttlecrab(client) => {
                let path = PathAndQuery::from_static(THROTTLE);
                client.ready().await?;
                let codec = ProstCodec::<ThrottleRequest, ThrottleResponse>::default();
                client.unary(Request::new(ThrottleRequest::about(user)), path, codec).await?.get_ref().allowed
            }
        };
        ensure!(is_allowed, "the server does not allow");
        Ok(1)
    }
}
