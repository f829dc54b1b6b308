//! A Cluster: each slot's requests go to the node that serves it, over one connection a node.
//!
//! The client's own cluster connection sends a request again when its reply was lost, so it is not used. Here, only
//! a reply that proves that nothing ran sends a request elsewhere: `MOVED`, `ASK` and `TRYAGAIN` are followed, for a
//! bounded time. A node that is gone harms the slots that it serves, and no others.

mod decide;
mod node_call;
mod outcome;
mod recent_capacity;
mod slots;
mod split;

use std::{collections::HashMap, sync::Arc, time::Duration};

use futures_util::future::join_all;
use parking_lot::{Mutex, RwLock};
use redis::Value;
use tokio::{
    sync::watch,
    time::{Instant, sleep, sleep_until, timeout},
};

use self::{
    node_call::OneSlotNodes,
    recent_capacity::RecentCapacity,
    slots::{SLOTS, SlotMap, redirection, slot_of, slot_of_tag},
};
use super::{
    connection::{Asking, CallFailure, Connector, RedisRequest, ServerConnection, Target},
    probe::probe,
    url::Node,
};
use crate::{check::Check, key::Key};

/// How long a request is sent after a slot that moves; callers give up sooner.
const REDIRECT_TIMEOUT: Duration = Duration::from_secs(2);
/// How long to wait for a slot's keys to arrive before asking again.
const MOVE_PAUSE: Duration = Duration::from_millis(5);
/// How many redirections are followed without a pause: more mean that nodes disagree.
const QUICK_HOPS: u32 = 4;
/// How long a node may take to tell who serves what.
const MAP_TIMEOUT: Duration = Duration::from_millis(500);
/// How long a node may take to answer for the first time; then the others are used without it.
const WARM_UP_TIMEOUT: Duration = Duration::from_secs(1);
/// The least time between two questions for who serves what.
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
}

/// Who serves what, as one node tells it.
pub(super) struct Layout {
    /// Each node that serves anything, with a tag of which it serves the slot.
    pub(super) nodes: Vec<(Node, String)>,
    /// How many slots nobody serves.
    pub(super) unserved: u16,
}

impl Layout {
    /// Reads the reply of `CLUSTER SLOTS` that `asked` gave.
    pub(super) fn read(reply: Value, asked: &Node) -> Option<Self> {
        let map = SlotMap::read(reply, asked)?;
        let nodes = map.nodes().iter().filter_map(|node| Some((node.clone(), map.tag_at(node)?)));
        let unserved = (0..SLOTS).filter(|slot| map.owner(*slot).is_none()).count();
        Some(Self { nodes: nodes.collect(), unserved: u16::try_from(unserved).unwrap_or(SLOTS) })
    }
}

#[derive(Default)]
struct Refresh {
    /// The question that is under way, or was last.
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
        })
    }

    pub(super) fn connector(&self) -> &Connector {
        &self.connector
    }

    /// The connections to all nodes that were asked.
    pub(super) fn connections(&self) -> Vec<Arc<ServerConnection>> {
        self.connections.lock().values().cloned().collect()
    }

    /// Learns who serves what, and sends a request to every node that serves anything: each is connected to then. Fails if none
    /// answers; one that is away harms its own slots only.
    pub(super) async fn warm_up(self: &Arc<Self>, request: RedisRequest<'_>) -> Result<(), CallFailure> {
        self.refreshed().await.map_err(CallFailure::NotSent)?;
        let connections: Vec<Arc<ServerConnection>> =
            self.map.read().nodes().iter().map(|node| self.connection(node)).collect();
        let sent = connections
            .iter()
            .map(|connection| timeout(WARM_UP_TIMEOUT, connection.send(request, Asking::No)));
        let mut outcome = Err(CallFailure::NotSent("no node of the cluster serves anything".to_owned()));
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

    /// Which node decides a check. Those over several nodes have a lane of their own.
    pub(super) fn lane(&self, check: &Check) -> u64 {
        let map = self.map.read();
        let mut lanes =
            check.tiers().iter().map(|tier| map.owner(slot_of(&tier.key)).map_or(0, Node::number));
        let first = lanes.next().unwrap_or(0);
        if lanes.all(|lane| lane == first) { first } else { 0 }
    }

    /// Whether the node of a lane would decide, or any node where it is nobody's.
    pub(super) async fn probe(self: &Arc<Self>, lane: u64, prefix: &str) -> Result<Value, CallFailure> {
        let nodes = self.map.read().nodes().to_vec();
        let nobody = "no node of the cluster is known to serve anything";
        let mut outcome = Err(CallFailure::NotSent(nobody.to_owned()));
        let is_known = nodes.iter().any(|node| node.number() == lane);
        for node in nodes.iter().filter(|node| !is_known || node.number() == lane) {
            let Some(tag) = self.map.read().tag_at(node) else { continue };
            outcome =
                self.connection(node).send(RedisRequest::Command(&probe(prefix, &tag)), Asking::No).await;
            if outcome.is_ok() {
                return outcome;
            }
        }
        // whoever is gone may have been replaced
        self.refresh_soon();
        outcome
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

    /// Sends a request to the node that serves the slot, wherever that is by now.
    async fn send(self: &Arc<Self>, slot: u16, request: RedisRequest<'_>) -> Result<Value, CallFailure> {
        self.send_within(REDIRECT_TIMEOUT, slot, request).await
    }

    /// The same; for keys that are not together yet, it waits at most so long.
    async fn send_within(
        self: &Arc<Self>,
        wait: Duration,
        slot: u16,
        request: RedisRequest<'_>,
    ) -> Result<Value, CallFailure> {
        let start = Instant::now();
        let mut node = self.owner(slot).await?;
        let mut asking = Asking::No;
        for hop in 0.. {
            let failure = match self.connection(&node).send(request, asking).await {
                Ok(reply) => return Ok(reply),
                Err(failure) => failure,
            };
            // a node that took its time before it said where to go is no reason not to go there
            let is_late = hop >= QUICK_HOPS && start.elapsed() >= REDIRECT_TIMEOUT;
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
                CallFailure::Rejected { code, .. } if code == "TRYAGAIN" && start.elapsed() < wait => {
                    // from the start: the slot may have arrived meanwhile
                    sleep(MOVE_PAUSE).await;
                    node = self.owner(slot).await?;
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
                    // others may know who has taken over; if it is still the same, only its own slots suffer
                    if is_late || !self.refreshed_since_a_while().await {
                        return Err(failure);
                    }
                    let next = self.owner(slot).await?;
                    if next == node {
                        return Err(failure);
                    }
                    (node, asking) = (next, Asking::No);
                }
            }
        }
        unreachable!("hops are counted without end, and time is bounded")
    }

    async fn owner(self: &Arc<Self>, slot: u16) -> Result<Node, CallFailure> {
        if self.map.read().is_empty() {
            self.refreshed().await.map_err(CallFailure::NotSent)?;
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

    /// Asks who serves what, unless that was asked a moment ago; whether it was asked now.
    async fn refreshed_since_a_while(self: &Arc<Self>) -> bool {
        let is_fresh = self.refresh.lock().ended.is_some_and(|ended| ended.elapsed() < MAP_PAUSE);
        !is_fresh && self.refreshed().await.is_ok()
    }

    async fn refreshed(self: &Arc<Self>) -> Result<(), String> {
        let mut outcome = self.refresh_soon();
        match outcome.wait_for(Option::is_some).await {
            Ok(outcome) => outcome.clone().expect("the wait was for an outcome"),
            Err(_) => Err("the runtime has ended".to_owned()),
        }
    }

    /// Asks who serves what, in a task of its own: one at a time, and not too often.
    fn refresh_soon(self: &Arc<Self>) -> watch::Receiver<Refreshed> {
        let mut refresh = self.refresh.lock();
        if let Some(outcome) = &refresh.outcome
            && outcome.borrow().is_none()
            && outcome.has_changed().is_ok()
        {
            return outcome.clone();
        }
        let (told, outcome) = watch::channel(None);
        refresh.outcome = Some(outcome.clone());
        let not_before = refresh.ended.map(|ended| ended + MAP_PAUSE);
        let cluster = Arc::clone(self);
        tokio::spawn(async move {
            if let Some(not_before) = not_before {
                sleep_until(not_before).await;
            }
            let learned = cluster.learn().await;
            cluster.refresh.lock().ended = Some(Instant::now());
            told.send_replace(Some(learned));
        });
        outcome
    }

    /// Asks one node after the other, those first to which there is a connection.
    async fn learn(&self) -> Result<(), String> {
        let mut nodes = self.map.read().nodes().to_vec();
        nodes.extend(self.seeds.iter().cloned());
        nodes.sort_by_cached_key(|node| !self.connection(node).is_up());
        nodes.dedup();
        let mut question = redis::cmd("CLUSTER");
        question.arg("SLOTS");
        let mut reasons = Vec::new();
        for node in nodes {
            let connection = self.connection(&node);
            let answer = connection.send(RedisRequest::Command(&question), Asking::No);
            match timeout(MAP_TIMEOUT, answer).await {
                Ok(Ok(reply)) => match SlotMap::read(reply, &node) {
                    Some(map) => {
                        self.adopt(map);
                        return Ok(());
                    }
                    None => reasons.push(format!("{node} knows no slots")),
                },
                Ok(Err(failure)) => reasons.push(match failure {
                    CallFailure::Rejected { code, detail } => format!("{node}: {code} {detail}"),
                    CallFailure::NotSent(reason) | CallFailure::ReplyLost(reason) => reason,
                }),
                Err(_) => reasons.push(format!("{node} does not answer within {MAP_TIMEOUT:?}")),
            }
        }
        Err(reasons.join("; "))
    }

    /// Takes over a map, and lets go of nodes that are no longer on it.
    fn adopt(&self, map: SlotMap) {
        self.connections.lock().retain(|node, _| map.nodes().contains(node) || self.seeds.contains(node));
        *self.map.write() = map;
    }
}
