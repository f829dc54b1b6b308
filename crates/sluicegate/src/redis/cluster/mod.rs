//! A Cluster: the requests of a slot go to the node that serves it, over one connection per node.
//!
//! The cluster connection of the client library is not used, because it repeats a request whose reply was lost. Here, a request is sent
//! to another node only after a reply that proves that nothing ran: `MOVED`, `ASK` and `TRYAGAIN` are followed for a bounded time. An
//! unavailable node affects only the slots that it serves.

mod decide;
mod node_call;
mod outcome;
mod recent_capacity;
mod release;
mod slots;
mod split;

use std::{collections::HashMap, sync::Arc, time::Duration};

use futures_util::{StreamExt, future::join_all, stream::FuturesUnordered};
use parking_lot::{Mutex, RwLock};
use redis::Value;
use tokio::{
    sync::watch,
    time::{Instant, sleep, sleep_until, timeout, timeout_at},
};

use self::{
    node_call::OneSlotNodes,
    recent_capacity::RecentCapacity,
    release::PendingReleases,
    slots::{SLOTS, SlotMap, redirection, slot_of, slot_of_tag},
};
use super::{
    connection::{Asking, CallFailure, RedisRequest, ServerConnection, Target},
    connector::Connector,
    keys::probe_key,
    url::Node,
};
use crate::key::Key;

/// How long redirections of a migrating slot are followed; callers give up sooner.
const REDIRECT_TIMEOUT: Duration = Duration::from_secs(2);
/// Wait before a request for a migrating slot is repeated.
const MOVE_PAUSE: Duration = Duration::from_millis(5);
/// Number of redirections that are followed without a pause; with more, nodes disagree.
const QUICK_HOPS: u32 = 4;
/// How long a node may take to return the slot map.
const MAP_TIMEOUT: Duration = Duration::from_millis(500);
/// How long a node may take for its first answer; the others are then used without it.
const WARM_UP_TIMEOUT: Duration = Duration::from_secs(1);
/// Minimum time between two refreshes of the slot map.
const MAP_PAUSE: Duration = Duration::from_millis(250);

type Refreshed = Option<Result<(), String>>;

pub(super) struct Cluster {
    connector: Arc<Connector>,
    seeds: Vec<Node>,
    map: RwLock<SlotMap>,
    connections: Mutex<HashMap<Node, Arc<ServerConnection>>>,
    refresh: Mutex<Refresh>,
    one_slot_nodes: OneSlotNodes,
    recent_capacity: RecentCapacity,
    pending_releases: PendingReleases,
}

/// The slot assignment, as reported by one node.
pub(super) struct Layout {
    /// Each node that serves slots, with a tag in one of its slots.
    pub(super) nodes: Vec<(Node, String)>,
    /// Number of slots without a node.
    pub(super) unserved: u16,
}

impl Layout {
    /// Parses the reply of `CLUSTER SLOTS` from `queried`.
    pub(super) fn read(reply: Value, queried: &Node) -> Option<Self> {
        let map = SlotMap::read(reply, queried)?;
        let nodes = map.nodes().iter().filter_map(|node| Some((node.clone(), map.tag_at(node)?)));
        let unserved = (0..SLOTS).filter(|slot| map.owner(*slot).is_none()).count();
        Some(Self { nodes: nodes.collect(), unserved: u16::try_from(unserved).unwrap_or(SLOTS) })
    }
}

#[derive(Default)]
struct Refresh {
    /// The current or last refresh.
    outcome: Option<watch::Receiver<Refreshed>>,
    ended: Option<Instant>,
}

impl Cluster {
    pub(super) fn new(connector: Connector, seeds: Vec<Node>) -> Arc<Self> {
        Arc::new(Self {
            connector: Arc::new(connector),
            seeds,
            map: RwLock::default(),
            connections: Mutex::default(),
            refresh: Mutex::default(),
            one_slot_nodes: OneSlotNodes::default(),
            recent_capacity: RecentCapacity::default(),
            pending_releases: PendingReleases::default(),
        })
    }

    pub(super) fn connector(&self) -> &Connector {
        &self.connector
    }

    /// Returns the connections to all nodes used so far.
    pub(super) fn connections(&self) -> Vec<Arc<ServerConnection>> {
        self.connections.lock().values().cloned().collect()
    }

    /// Fetches the slot map and sends a request to every node that serves slots, which connects to each of them. Fails if no node
    /// answers.
    pub(super) async fn warm_up(self: &Arc<Self>, request: RedisRequest<'_>) -> Result<(), CallFailure> {
        self.refreshed().await.map_err(CallFailure::NotSent)?;
        let connections: Vec<Arc<ServerConnection>> =
            self.map.read().nodes().iter().map(|node| self.connection(node)).collect();
        let sent = connections
            .iter()
            .map(|connection| timeout(WARM_UP_TIMEOUT, connection.send(request, Asking::No)));
        let mut outcome = Err(CallFailure::NotSent("no node of the cluster serves slots".to_owned()));
        for reply in join_all(sent).await {
            match reply {
                Ok(Ok(_)) => outcome = Ok(()),
                Ok(Err(failure)) if outcome.is_err() => outcome = Err(failure),
                Err(_) if outcome.is_err() => {
                    outcome = Err(CallFailure::ReplyLost(format!("no answer within {WARM_UP_TIMEOUT:?}")));
                }
                _ => {}
            }
        }
        outcome
    }

    /// Returns the number of the node that serves a counter; 0 if the node is unknown.
    pub(super) fn node_number(&self, key: &Key) -> u64 {
        self.map.read().owner(slot_of(key)).map_or(0, Node::number)
    }

    /// Returns the address of the node with this number.
    pub(super) fn node_name(&self, number: u64) -> Option<String> {
        let map = self.map.read();
        map.nodes().iter().find(|node| node.number() == number).map(ToString::to_string)
    }

    /// Returns why there is no connection to the node with this number.
    pub(super) fn connect_error(&self, number: u64) -> Option<String> {
        let node = self.map.read().nodes().iter().find(|node| node.number() == number)?.clone();
        self.connection(&node).connect_error()
    }

    /// Probes the node with this number. If there is none, probes all nodes in parallel, and one of them has to answer.
    pub(super) async fn probe(self: &Arc<Self>, number: u64, prefix: &str) -> Result<Value, CallFailure> {
        // an unavailable node may have been replaced; a probe of a silent node is cancelled, so this comes first
        self.refresh_soon();
        let mut nodes = self.map.read().nodes().to_vec();
        if nodes.iter().any(|node| node.number() == number) {
            nodes.retain(|node| node.number() == number);
        }
        let mut probes: FuturesUnordered<_> =
            nodes.iter().map(|node| self.probe_node(node, prefix)).collect();
        let mut failure = CallFailure::NotSent("no node of the cluster serves slots".to_owned());
        while let Some(outcome) = probes.next().await {
            match outcome {
                Ok(reply) => return Ok(reply),
                Err(reason) => failure = reason,
            }
        }
        Err(failure)
    }

    async fn probe_node(self: &Arc<Self>, node: &Node, prefix: &str) -> Result<Value, CallFailure> {
        let Some(tag) = self.map.read().tag_at(node) else {
            return Err(CallFailure::NotSent(format!("{node} serves no slots")));
        };
        let connection = self.connection(node);
        connection.connected().await;
        connection.send(RedisRequest::Probe(&probe_key(prefix, &tag)), Asking::No).await
    }

    /// Sends a request for a key with this tag.
    pub(super) async fn send_for_tag(
        self: &Arc<Self>,
        tag: &str,
        request: RedisRequest<'_>,
    ) -> Result<Value, CallFailure> {
        self.send(slot_of_tag(tag), request).await
    }

    /// Sends a request for a counter.
    pub(super) async fn send_for_key(
        self: &Arc<Self>,
        key: &Key,
        request: RedisRequest<'_>,
    ) -> Result<Value, CallFailure> {
        self.send(slot_of(key), request).await
    }

    /// Sends a request to the current node of a slot.
    async fn send(self: &Arc<Self>, slot: u16, request: RedisRequest<'_>) -> Result<Value, CallFailure> {
        self.send_within(REDIRECT_TIMEOUT, slot, request).await
    }

    /// Sends a request to the current node of a slot. Waits at most `wait` for the keys of a migrating slot, but not
    /// beyond the time by which the request must be sent. A request that was not sent by then is reported as not sent.
    async fn send_within(
        self: &Arc<Self>,
        wait: Duration,
        slot: u16,
        request: RedisRequest<'_>,
    ) -> Result<Value, CallFailure> {
        let (start, send_by) = (Instant::now(), request.send_by());
        let is_over = |pause: Duration| send_by.is_some_and(|by| Instant::now() + pause >= by);
        let mut node = self.owner(slot, send_by).await?;
        let mut asking = Asking::No;
        for hop in 0.. {
            let failure = match self.connection(&node).send(request, asking).await {
                Ok(reply) => return Ok(reply),
                Err(failure) => failure,
            };
            // the first redirections are followed even if the node answered slowly
            let is_late = is_over(Duration::ZERO) || hop >= QUICK_HOPS && start.elapsed() >= REDIRECT_TIMEOUT;
            match &failure {
                CallFailure::Rejected { code, detail } if code == "MOVED" || code == "ASK" => {
                    let Some(next) = redirection(detail, &node).filter(|_| !is_late) else {
                        return Err(failure);
                    };
                    if code == "MOVED" {
                        self.map.write().set_owner(slot, &next);
                        self.refresh_soon();
                        asking = Asking::No;
                    } else {
                        asking = Asking::Yes;
                    }
                    node = next;
                    if hop >= QUICK_HOPS {
                        sleep(MOVE_PAUSE).await;
                    }
                }
                CallFailure::Rejected { code, .. }
                    if code == "TRYAGAIN" && start.elapsed() < wait && !is_over(MOVE_PAUSE) =>
                {
                    // start again: the migration may have finished
                    sleep(MOVE_PAUSE).await;
                    node = self.owner(slot, send_by).await?;
                    asking = Asking::No;
                }
                CallFailure::Rejected { code, .. } if code == "CLUSTERDOWN" || code == "READONLY" => {
                    self.refresh_soon();
                    return Err(failure);
                }
                CallFailure::Rejected { .. } => return Err(failure),
                CallFailure::ReplyLost(_) => {
                    self.refresh_soon();
                    return Err(failure);
                }
                CallFailure::NotSent(_) => {
                    // another node may have taken over
                    if is_late || ready_by(send_by, self.refresh_if_stale()).await != Some(true) {
                        return Err(failure);
                    }
                    let next = self.owner(slot, send_by).await?;
                    if next == node {
                        return Err(failure);
                    }
                    (node, asking) = (next, Asking::No);
                }
            }
        }
        unreachable!("the loop ends by return")
    }

    async fn owner(self: &Arc<Self>, slot: u16, send_by: Option<Instant>) -> Result<Node, CallFailure> {
        if self.map.read().is_empty() {
            let refreshed = ready_by(send_by, self.refreshed()).await;
            let refreshed = refreshed.unwrap_or_else(|| Err("no slot map before the deadline".to_owned()));
            refreshed.map_err(CallFailure::NotSent)?;
        }
        if let Some(node) = self.map.read().owner(slot).cloned() {
            return Ok(node);
        }
        self.refresh_soon();
        Err(CallFailure::NotSent(format!("no node of the cluster serves slot {slot}")))
    }

    fn connection(&self, node: &Node) -> Arc<ServerConnection> {
        let mut connections = self.connections.lock();
        if let Some(connection) = connections.get(node) {
            return Arc::clone(connection);
        }
        let connection = ServerConnection::new(Arc::clone(&self.connector), Target::Fixed(node.clone()));
        connections.insert(node.clone(), Arc::clone(&connection));
        connection
    }

    /// Refreshes the slot map unless that happened recently, and returns whether it was refreshed now.
    async fn refresh_if_stale(self: &Arc<Self>) -> bool {
        let is_fresh = self.refresh.lock().ended.is_some_and(|ended| ended.elapsed() < MAP_PAUSE);
        !is_fresh && self.refreshed().await.is_ok()
    }

    async fn refreshed(self: &Arc<Self>) -> Result<(), String> {
        let mut outcome = self.refresh_soon();
        match outcome.wait_for(Option::is_some).await {
            Ok(outcome) => outcome.clone().expect("the outcome is present after the wait"),
            Err(_) => Err("the runtime has shut down".to_owned()),
        }
    }

    /// Refreshes the slot map in a separate task: one at a time, and not more often than [`MAP_PAUSE`].
    fn refresh_soon(self: &Arc<Self>) -> watch::Receiver<Refreshed> {
        let mut refresh = self.refresh.lock();
        if let Some(outcome) = &refresh.outcome
            && outcome.borrow().is_none()
            && outcome.has_changed().is_ok()
        {
            return outcome.clone();
        }
        let (sender, outcome) = watch::channel(None);
        refresh.outcome = Some(outcome.clone());
        let not_before = refresh.ended.map(|ended| ended + MAP_PAUSE);
        let cluster = Arc::clone(self);
        tokio::spawn(async move {
            if let Some(not_before) = not_before {
                sleep_until(not_before).await;
            }
            let learned = cluster.fetch_map().await;
            cluster.refresh.lock().ended = Some(Instant::now());
            sender.send_replace(Some(learned));
        });
        outcome
    }

    /// Fetches the slot map from one node after the other, connected nodes first.
    async fn fetch_map(&self) -> Result<(), String> {
        let mut nodes = self.map.read().nodes().to_vec();
        nodes.extend(self.seeds.iter().cloned());
        nodes.sort_by_cached_key(|node| !self.connection(node).is_up());
        nodes.dedup();
        let mut command = redis::cmd("CLUSTER");
        command.arg("SLOTS");
        let mut reasons = Vec::new();
        for node in nodes {
            let connection = self.connection(&node);
            let answer = connection.send(RedisRequest::Command(&command), Asking::No);
            match timeout(MAP_TIMEOUT, answer).await {
                Ok(Ok(reply)) => match SlotMap::read(reply, &node) {
                    Some(map) => {
                        self.adopt(map);
                        return Ok(());
                    }
                    None => reasons.push(format!("{node}: empty slot map")),
                },
                Ok(Err(failure)) => reasons.push(match failure {
                    CallFailure::Rejected { code, detail } => format!("{node}: {code} {detail}"),
                    CallFailure::NotSent(reason) | CallFailure::ReplyLost(reason) => reason,
                }),
                Err(_) => reasons.push(format!("{node}: no reply within {MAP_TIMEOUT:?}")),
            }
        }
        Err(reasons.join("; "))
    }

    /// Installs a slot map and drops connections to removed nodes.
    fn adopt(&self, map: SlotMap) {
        self.connections.lock().retain(|node, _| map.nodes().contains(node) || self.seeds.contains(node));
        *self.map.write() = map;
    }
}

/// Returns the output of a future if it is ready in time.
async fn ready_by<T>(by: Option<Instant>, future: impl Future<Output = T>) -> Option<T> {
    match by {
        Some(by) => timeout_at(by, future).await.ok(),
        None => Some(future.await),
    }
}
