//! A gRPC front end on its own port, and a client.

#![expect(clippy::unwrap_used, reason = "a failing helper fails the test")]

use std::{net::SocketAddr, time::Duration};

use sluicegate::{Limiter, ManualClock, MemoryStore, Rule, Timestamp};
use sluicegate_server::{
    auth::Access,
    config::live,
    engine::Engine,
    grpc::{
        Services, Settings,
        messages::{
            Code, DescriptorStatus, RateLimitDescriptor, RateLimitRequest, RateLimitResponse, Unit,
            rate_limit_descriptor::Entry, rate_limit_service_client::RateLimitServiceClient,
        },
        server,
    },
    net::{acceptor::AcceptConfig, shutdown::Shutdown},
};
use tokio::{net::TcpListener, task::JoinHandle};
use tonic::{Status, transport::Channel};

pub(crate) const NOW_US: u64 = 1_794_765_441_799_839;

pub(crate) struct Front {
    pub(crate) address: SocketAddr,
    pub(crate) channel: Channel,
    pub(crate) client: RateLimitServiceClient<Channel>,
    pub(crate) shutdown: Shutdown,
    pub(crate) server: JoinHandle<()>,
}

pub(crate) struct OnMemory {
    pub(crate) front: Front,
    pub(crate) clock: ManualClock,
    pub(crate) limiter: Limiter,
    pub(crate) engine: Engine,
}

impl OnMemory {
    pub(crate) async fn start(rules: impl IntoIterator<Item = Rule>) -> Self {
        let (limiter, clock) = on_memory(rules);
        let engine = Engine::new(limiter.clone());
        let front = Front::of(engine.clone(), Settings::default()).await;
        Self { front, clock, limiter, engine }
    }

    pub(crate) async fn call(
        &mut self,
        domain: &str,
        descriptors: Vec<RateLimitDescriptor>,
    ) -> RateLimitResponse {
        self.try_call(domain, descriptors).await.unwrap()
    }

    pub(crate) async fn try_call(
        &mut self,
        domain: &str,
        descriptors: Vec<RateLimitDescriptor>,
    ) -> Result<RateLimitResponse, Status> {
        self.front.call(request(domain, descriptors)).await
    }
}

pub(crate) fn on_memory(rules: impl IntoIterator<Item = Rule>) -> (Limiter, ManualClock) {
    let clock = ManualClock::new(Timestamp::from_micros(NOW_US));
    let store = MemoryStore::new().with_clock(clock.clone());
    (Limiter::new(store, rules).unwrap(), clock)
}

impl Front {
    pub(crate) async fn start(limiter: Limiter, settings: Settings) -> Self {
        Self::of(Engine::new(limiter), settings).await
    }

    pub(crate) async fn of(engine: Engine, settings: Settings) -> Self {
        Self::with_access(engine, settings, Access::default()).await
    }

    pub(crate) async fn with_access(engine: Engine, settings: Settings, access: Access) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let config = AcceptConfig::default();
        let shutdown = config.shutdown.clone();
        let services = Services::new(engine, live(settings), access).await;
        let server = tokio::spawn(server::run(listener, services, config));
        let channel = Channel::from_shared(format!("http://{address}")).unwrap().connect_lazy();
        let client = RateLimitServiceClient::new(channel.clone());
        Self { address, channel, client, shutdown, server }
    }

    pub(crate) async fn call(&mut self, request: RateLimitRequest) -> Result<RateLimitResponse, Status> {
        Ok(self.client.should_rate_limit(request).await?.into_inner())
    }
}

pub(crate) fn request(domain: &str, descriptors: Vec<RateLimitDescriptor>) -> RateLimitRequest {
    RateLimitRequest { domain: domain.to_owned(), descriptors, hits_addend: 0 }
}

pub(crate) fn descriptor<const N: usize>(entries: [(&str, &str); N]) -> RateLimitDescriptor {
    let entry = |(key, value): (&str, &str)| Entry { key: key.to_owned(), value: value.as_bytes().to_vec() };
    RateLimitDescriptor { entries: entries.map(entry).into(), ..RateLimitDescriptor::default() }
}

pub(crate) fn hits(addend: u64, descriptor: RateLimitDescriptor) -> RateLimitDescriptor {
    RateLimitDescriptor { hits_addend: Some(addend), ..descriptor }
}

pub(crate) fn negative(descriptor: RateLimitDescriptor) -> RateLimitDescriptor {
    RateLimitDescriptor { is_negative_hits: true, ..descriptor }
}

/// The code, remaining units and limit of a status.
pub(crate) type Short = (Code, u32, Option<(u32, Unit)>);

pub(crate) fn short(status: &DescriptorStatus) -> Short {
    let limit = status.current_limit.as_ref().map(|limit| (limit.requests_per_unit, limit.unit()));
    (status.code(), status.limit_remaining, limit)
}

pub(crate) fn shorts(response: &RateLimitResponse) -> (Code, Vec<Short>) {
    (response.overall_code(), response.statuses.iter().map(short).collect())
}

pub(crate) fn seconds(count: u64) -> Duration {
    Duration::from_secs(count)
}
