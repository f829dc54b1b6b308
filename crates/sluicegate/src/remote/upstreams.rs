//! The upstreams of a store: one per server, and one per set of servers that decide checks together.
//!
//! A failure of a call to several servers does not show which of them is down. The breaker of such a set opens only until each of its
//! servers has been probed. The breakers of those that do not answer are opened, which also stops the checks of every set with that
//! server.

use std::{collections::HashMap, sync::Arc, time::Duration};

use futures_util::future::join_all;
use parking_lot::RwLock;
use smallvec::SmallVec;
use tokio::{
    runtime::Handle,
    time::{Instant, timeout},
};

use super::{
    Shared, Upstream,
    circuit_breaker::{CircuitBreaker, Failure, Probe},
};
use crate::{check::Check, store::StoreError};

/// The maximum number of servers with their own queue and circuit breaker; further servers share those of the first.
const MAX_SERVERS: usize = 1024;
/// The maximum number of sets of servers with their own queue. A new set replaces the sets without calls; if there are none, its checks
/// share the queue of the first server.
const MAX_SERVER_SETS: usize = 1024;

/// How long the probe of an open breaker waits for a connection and an answer.
const PROBE_TIMEOUT: Duration = Duration::from_secs(1);

/// The end of every log line about an outage.
const NEXT_STEP: &str = "applying failure policies; run sluicegate doctor for details";

/// The numbers of the servers of a check, in ascending order.
type ServerNumbers = SmallVec<[u64; 4]>;

/// The servers behind an upstream.
pub(super) enum Servers {
    One(u64),
    Several(Vec<Member>),
}

/// One server of a set.
pub(super) struct Member {
    server: u64,
    upstream: Arc<Upstream>,
}

pub(super) struct Upstreams {
    shared: Arc<Shared>,
    /// The only server, or the counters without a known server.
    first: Arc<Upstream>,
    others: RwLock<HashMap<u64, Arc<Upstream>>>,
    sets: RwLock<HashMap<ServerNumbers, Arc<Upstream>>>,
}

impl Upstreams {
    pub(super) fn new(shared: &Arc<Shared>) -> Self {
        Self {
            shared: Arc::clone(shared),
            first: Upstream::new(shared, Servers::One(0)),
            others: RwLock::default(),
            sets: RwLock::default(),
        }
    }

    pub(super) fn first(&self) -> &Arc<Upstream> {
        &self.first
    }

    /// Returns the upstream of all servers that a check needs.
    pub(super) fn for_check(&self, check: &Check) -> Arc<Upstream> {
        let numbers = check.tiers().iter().map(|tier| self.shared.store.server(&tier.key));
        let mut numbers: ServerNumbers = numbers.collect();
        numbers.sort_unstable();
        numbers.dedup();
        match numbers[..] {
            [server] => self.for_server(server),
            _ => self.for_set(numbers),
        }
    }

    pub(super) fn for_server(&self, server: u64) -> Arc<Upstream> {
        if server == 0 {
            return Arc::clone(&self.first);
        }
        if let Some(upstream) = self.others.read().get(&server) {
            return Arc::clone(upstream);
        }
        let mut others = self.others.write();
        if others.len() >= MAX_SERVERS && !others.contains_key(&server) {
            return Arc::clone(&self.first);
        }
        let new = || Upstream::new(&self.shared, Servers::One(server));
        Arc::clone(others.entry(server).or_insert_with(new))
    }

    fn for_set(&self, numbers: ServerNumbers) -> Arc<Upstream> {
        if let Some(upstream) = self.sets.read().get(&numbers) {
            return Arc::clone(upstream);
        }
        let member = |&server: &u64| Member { server, upstream: self.for_server(server) };
        let members: Vec<Member> = numbers.iter().map(member).collect();
        let mut sets = self.sets.write();
        if sets.len() >= MAX_SERVER_SETS {
            sets.retain(|_, upstream| !upstream.is_idle());
        }
        if sets.len() >= MAX_SERVER_SETS && !sets.contains_key(&numbers) {
            return Arc::clone(&self.first);
        }
        let new = || Upstream::new(&self.shared, Servers::Several(members));
        Arc::clone(sets.entry(numbers).or_insert_with(new))
    }

    /// Returns the upstreams of all servers and sets.
    pub(super) fn all(&self) -> Vec<Arc<Upstream>> {
        let mut all = vec![Arc::clone(&self.first)];
        all.extend(self.others.read().values().cloned());
        all.extend(self.sets.read().values().cloned());
        all
    }

    /// Returns how many servers have an open breaker.
    pub(super) fn open_servers(&self) -> usize {
        let others = self.others.read();
        others.values().chain([&self.first]).filter(|upstream| upstream.breaker.is_open()).count()
    }
}

impl Upstream {
    /// Returns an open breaker, of this upstream or of one of its servers.
    pub(super) fn open_breaker(&self) -> Option<&CircuitBreaker> {
        let members = match &self.servers {
            Servers::One(_) => &[][..],
            Servers::Several(members) => members,
        };
        let mut breakers = members.iter().map(|member| &member.upstream.breaker).chain([&self.breaker]);
        breakers.find(|breaker| breaker.is_open())
    }

    /// Probes in the background until the breaker, which has just opened, may close.
    pub(super) fn start_probing(self: &Arc<Self>, runtime: &Handle) {
        let reason = self.breaker.reason();
        match &self.servers {
            Servers::One(server) => {
                let name = self.shared.store_name(*server);
                tracing::warn!("{name} unavailable ({reason}); {NEXT_STEP}");
            }
            Servers::Several(members) => {
                tracing::debug!("checks over {} servers fail ({reason}); probing each", members.len());
            }
        }
        runtime.spawn(Probe(Arc::downgrade(self)).run());
    }

    /// Logs that an outage continues.
    pub(super) fn log_outage(&self, reason: &str, duration: Duration) {
        if let Servers::One(server) = &self.servers {
            let (name, seconds) = (self.shared.store_name(*server), duration.as_secs());
            tracing::warn!("{name} still unavailable after {seconds}s ({reason}); {NEXT_STEP}");
        }
    }

    /// Probes the server. For a set, probes all servers in parallel and opens the breakers of those that do not answer;
    /// then the breaker of the set may close.
    pub(super) async fn probe(&self) -> Result<(), Failure> {
        match &self.servers {
            Servers::One(server) => {
                self.shared.wait_for_answer(*server).await?;
                tracing::info!("{} available again", self.shared.store_name(*server));
            }
            Servers::Several(members) => {
                join_all(members.iter().map(Member::open_unless_it_answers)).await;
            }
        }
        Ok(())
    }

    /// Returns whether nothing is queued or in flight, and the breaker is closed.
    fn is_idle(&self) -> bool {
        let load = self.queue.load();
        load.waiting == 0 && load.in_flight == 0 && !self.breaker.is_open()
    }
}

impl Member {
    async fn open_unless_it_answers(&self) {
        let Self { server, upstream } = self;
        if !upstream.breaker.is_open()
            && let Err(failure) = upstream.shared.probe_once(*server).await
        {
            upstream.breaker.record(failure);
            if upstream.breaker.open() {
                upstream.start_probing(&Handle::current());
            }
        }
    }
}

impl Shared {
    /// Returns how log lines name a server: `store 10.0.0.7:6379`, or `store` if its address is unknown.
    fn store_name(&self, server: u64) -> String {
        self.store.server_name(server).map_or_else(|| "store".to_owned(), |name| format!("store {name}"))
    }

    /// Waits for a connection and an answer, so that a breaker closes as soon as there is one. If the server did not answer within the
    /// deadline, it must answer a second probe within it.
    async fn wait_for_answer(&self, server: u64) -> Result<(), Failure> {
        let started = Instant::now();
        self.probe(server, PROBE_TIMEOUT).await?;
        if started.elapsed() > self.options.deadline { self.probe_once(server).await } else { Ok(()) }
    }

    /// Sends a probe that the server must answer within the deadline.
    async fn probe_once(&self, server: u64) -> Result<(), Failure> {
        self.probe(server, self.options.deadline).await
    }

    /// Sends a probe, and counts it if it fails.
    async fn probe(&self, server: u64, longest: Duration) -> Result<(), Failure> {
        let failure = match timeout(longest, self.store.probe(server)).await {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(error)) => Failure::from(&error),
            Err(_) => match self.store.connect_error(server) {
                Some(reason) => Failure::from(&StoreError::NotRun(reason)),
                None => Failure::timeout(format!("no answer within {longest:?}")),
            },
        };
        self.counters.record_failed_probe(failure.kind);
        Err(failure)
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use sluicegate_core::{Algorithm, Cost, Limit, Operation, Terms};

    use super::*;
    use crate::{
        check::Tier,
        key::Key,
        remote::{Options, Remote},
        store::{BoxFuture, CheckAnswer, Deadline, RemoteStore},
    };

    /// The number of a server that never answers.
    const SILENT: u64 = 7;

    /// A store of many servers, on which the number of the server is the key. No call is answered, and all servers but one answer a
    /// probe.
    struct ManyServers;

    impl RemoteStore for ManyServers {
        fn decide<'a>(
            &'a self,
            _: &'a [Check],
            _: Option<Deadline>,
        ) -> BoxFuture<'a, Vec<Result<CheckAnswer, StoreError>>> {
            Box::pin(pending())
        }

        fn server(&self, key: &Key) -> u64 {
            key.identity().parse().unwrap()
        }

        fn probe(&self, server: u64) -> BoxFuture<'_, Result<(), StoreError>> {
            Box::pin(async move { if server == SILENT { pending().await } else { Ok(()) } })
        }

        fn announce(&self, _: u64, _: Duration) -> BoxFuture<'_, Result<u32, StoreError>> {
            Box::pin(pending())
        }

        fn reset<'a>(&'a self, _: &'a [(Key, Algorithm)]) -> BoxFuture<'a, Result<u64, StoreError>> {
            Box::pin(pending())
        }
    }

    fn remote() -> Arc<Remote> {
        Arc::new(Remote::new(Arc::new(ManyServers), Options::default()))
    }

    fn check(servers: &[u64]) -> Check {
        let limit = Limit::fixed_window(10, Duration::from_secs(60)).unwrap();
        let tier = |server: &u64| Tier {
            key: Key::without_rule(server.to_string()).unwrap(),
            terms: Terms::new(limit, Cost::ONE),
        };
        Check::new(Operation::Check, servers.iter().map(tier).collect()).unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn a_failing_set_opens_the_breaker_of_the_silent_server_only() {
        let remote = remote();
        while remote.upstreams.open_servers() == 0 {
            remote.decide(&check(&[3, SILENT]), None).await.unwrap_err();
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        // the breaker of the set has closed
        tokio::time::sleep(Duration::from_secs(1)).await;
        let is_open = |servers: &[u64]| remote.upstreams.for_check(&check(servers)).open_breaker().is_some();
        assert!(is_open(&[SILENT]) && is_open(&[3, SILENT]) && is_open(&[4, SILENT]));
        assert!(!is_open(&[3]) && !is_open(&[3, 4]));
        assert!(!remote.upstreams.for_check(&check(&[3, SILENT])).breaker.is_open());
        assert_eq!(remote.stats().open_breakers, 1);
    }

    #[tokio::test]
    async fn idle_sets_of_servers_are_replaced_and_busy_ones_are_bounded() {
        let remote = remote();
        let server = |number: usize| u64::try_from(number).unwrap() + 2;
        let set = |number: usize| remote.upstreams.for_check(&check(&[1, server(number)]));
        let sets = || remote.upstreams.sets.read().len();
        for number in 0..MAX_SERVER_SETS {
            set(number);
        }
        assert_eq!(sets(), MAX_SERVER_SETS);
        let busy: Vec<Arc<Upstream>> = (0..MAX_SERVER_SETS).map(set).collect();
        busy.iter().for_each(|upstream| assert!(upstream.breaker.open()));
        assert!(Arc::ptr_eq(&set(MAX_SERVER_SETS), remote.upstreams.first()), "no idle set can be replaced");
        assert_eq!(sets(), MAX_SERVER_SETS);
        let one = &busy[0];
        one.breaker.close();
        assert!(!Arc::ptr_eq(&set(MAX_SERVER_SETS), remote.upstreams.first()));
        assert_eq!(sets(), MAX_SERVER_SETS);
    }
}
