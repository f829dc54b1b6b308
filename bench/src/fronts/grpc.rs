//! Clients of Envoy's rate limit service, and of throttlecrab's own. tonic's client takes about as much of the
//! processor as the servers, so that what differs between them looks smaller than it is: see their CPU time.

use std::net::SocketAddr;

use anyhow::{Result, ensure};
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
