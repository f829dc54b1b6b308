//! Clients of Envoy's rate limit service and of throttlecrab's own service. tonic's client uses about as much CPU time as the
//! servers, so the rates differ less than the CPU times of the servers.

use std::net::SocketAddr;

use anyhow::{Result, ensure};
use prost::Message;
use sluicegate_server::grpc::messages::{
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

use super::{CONCURRENCY, load::Client, process::Contestant, template::random_user};

/// Number of connections.
pub const CHANNELS: usize = 4;

const SHOULD_RATE_LIMIT: &str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";
const THROTTLE: &str = "/throttlecrab.RateLimiter/Throttle";

/// A client that sends one call at a time.
pub enum GrpcClient {
    Envoy(RateLimitServiceClient<Channel>),
    Throttlecrab(Grpc<Channel>),
}

/// throttlecrab's request, as in its `throttlecrab.proto`.
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
    fn new(user: String) -> Self {
        Self { key: user, max_burst: 1_000_000, count_per_period: 1_000_000, period: 60, quantity: 1 }
    }
}

fn envoy_request(user: String) -> RateLimitRequest {
    let entries = vec![Entry { key: "user".to_owned(), value: user.into_bytes() }];
    let descriptors = vec![RateLimitDescriptor { entries, ..RateLimitDescriptor::default() }];
    RateLimitRequest { domain: "edge".to_owned(), descriptors, hits_addend: 0 }
}

/// Returns the path of a call and its framed message, for a client without gRPC support.
pub fn raw_call(contestant: Contestant) -> (&'static str, Vec<u8>) {
    let user = random_user(&mut fastrand::Rng::new());
    let (path, message) = match contestant {
        Contestant::Throttlecrab => (THROTTLE, ThrottleRequest::new(user).encode_to_vec()),
        _ => (SHOULD_RATE_LIMIT, envoy_request(user).encode_to_vec()),
    };
    // the frame: an uncompressed message, and its length
    let mut framed = vec![0];
    framed.extend_from_slice(&(message.len() as u32).to_be_bytes());
    framed.extend_from_slice(&message);
    (path, framed)
}

/// The field of throttlecrab's response that is checked.
#[derive(Clone, PartialEq, prost::Message)]
struct ThrottleResponse {
    #[prost(bool, tag = "1")]
    allowed: bool,
}

/// Opens `channels` connections with the same number of clients on each.
pub async fn clients(
    contestant: Contestant,
    address: SocketAddr,
    channels: usize,
) -> Result<Vec<GrpcClient>> {
    let mut clients = Vec::new();
    for _ in 0..channels {
        let channel = Endpoint::from_shared(format!("http://{address}"))?.connect().await?;
        for _ in 0..CONCURRENCY / CHANNELS {
            let channel = channel.clone();
            clients.push(match contestant {
                Contestant::Throttlecrab => GrpcClient::Throttlecrab(Grpc::new(channel)),
                _ => GrpcClient::Envoy(RateLimitServiceClient::new(channel)),
            });
        }
    }
    Ok(clients)
}

impl Client for GrpcClient {
    async fn send(&mut self, random: &mut fastrand::Rng) -> Result<u64> {
        let user = random_user(random);
        let is_allowed = match self {
            Self::Envoy(client) => {
                let response = client.should_rate_limit(envoy_request(user)).await?;
                response.get_ref().overall_code == i32::from(Code::Ok)
            }
            Self::Throttlecrab(client) => {
                let path = PathAndQuery::from_static(THROTTLE);
                client.ready().await?;
                let codec = ProstCodec::<ThrottleRequest, ThrottleResponse>::default();
                client.unary(Request::new(ThrottleRequest::new(user)), path, codec).await?.get_ref().allowed
            }
        };
        ensure!(is_allowed, "the server denied a request");
        Ok(1)
    }
}
