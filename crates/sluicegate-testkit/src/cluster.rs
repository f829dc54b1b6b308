//! A Redis Cluster of real processes: three primaries, with or without replicas.
//!
//! The nodes are joined by `CLUSTER` commands, which is faster than `redis-cli --cluster create`. The start takes at
//! least two seconds, because a new primary rejects writes for that long. Faults of each node are in [`crate::faults`].

use std::net::Ipv4Addr;
use std::time::Duration;

use redis::ToRedisArgs;
use sluicegate::store::Key;
use tempfile::TempDir;

use crate::proxy::Proxy;
use crate::server::{self, Flavor, Server};
use crate::tls::Certificates;
use crate::wait;

/// Number of hash slots of every cluster.
pub const SLOTS: u16 = 16_384;

/// Number of primaries: the minimum that can agree on a failure.
pub const PRIMARIES: usize = 3;

/// Timeout of `MIGRATE` in milliseconds.
const MIGRATE_MILLIS: u32 = 5_000;

/// Number of slots per pipeline when all slots of a node move, so that clients are served in between.
const SLOTS_AT_ONCE: usize = 256;

/// The configuration of a cluster.
#[derive(Clone, Debug)]
pub struct Setup {
    flavor: Flavor,
    replicas: usize,
    node_timeout: Duration,
    coverage: Coverage,
    is_encrypted: bool,
    args: Vec<String>,
}

/// The behaviour while some slots are not served: `cluster-require-full-coverage`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Coverage {
    /// Serves no slot.
    Required,
    /// Serves the other slots. For slots that are not served, clients are still redirected (`MOVED`) to the failed
    /// node.
    Partial,
}

impl Setup {
    /// Returns a configuration of three primaries without replicas. A silent node counts as failed after 1 s.
    #[must_use]
    pub fn new(flavor: Flavor) -> Setup {
        let node_timeout = Duration::from_secs(1);
        let coverage = Coverage::Required;
        Setup { flavor, replicas: 0, node_timeout, coverage, is_encrypted: false, args: Vec::new() }
    }

    /// Sets the number of replicas per primary.
    #[must_use]
    pub fn replicas(mut self, per_primary: usize) -> Setup {
        self.replicas = per_primary;
        self
    }

    /// Sets the time after which a silent node counts as failed.
    #[must_use]
    pub fn node_timeout(mut self, timeout: Duration) -> Setup {
        self.node_timeout = timeout;
        self
    }

    /// Sets the behaviour while some slots are not served.
    #[must_use]
    pub fn coverage(mut self, coverage: Coverage) -> Setup {
        self.coverage = coverage;
        self
    }

    /// Makes every port accept only TLS, including the bus, with certificates of one authority (see [`Server::tls`]).
    /// Requires Redis 7.
    #[must_use]
    pub fn tls(mut self) -> Setup {
        self.is_encrypted = true;
        self
    }

    /// Adds command line arguments to each node.
    #[must_use]
    pub fn args(mut self, args: &[&str]) -> Setup {
        self.args.extend(args.iter().map(ToString::to_string));
        self
    }

    /// Starts the cluster, and returns when every node serves its slots and has discovered all others.
    ///
    /// # Panics
    ///
    /// When a node does not start, or discovery does not complete.
    #[must_use]
    pub fn start(self) -> Cluster {
        let timeout = self.node_timeout.as_millis().to_string();
        let coverage = match self.coverage {
            Coverage::Required => "yes",
            Coverage::Partial => "no",
        };
        let args: Vec<&str> = self.args.iter().map(String::as_str).collect();
        let dir = self.is_encrypted.then(|| tempfile::tempdir().expect("a temporary directory"));
        let certificates =
            dir.as_ref().map(|dir| Certificates::issue(dir.path(), Ipv4Addr::LOCALHOST.into()));
        let node = || {
            let mut setup = server::Setup::new(self.flavor).cluster_node();
            if let Some(certificates) = &certificates {
                setup = setup.group_tls(certificates).args(&["--tls-cluster", "yes"]);
            }
            let setup = setup.args(&["--cluster-node-timeout", &timeout]);
            let setup = setup.args(&["--cluster-require-full-coverage", coverage]);
            setup.args(&["--repl-diskless-sync-delay", "0"]).args(&args).start()
        };
        let nodes = (0..PRIMARIES * (1 + self.replicas)).map(|_| node()).collect();
        let cluster = Cluster { nodes, _certificates: dir };
        cluster.join();
        cluster
    }
}

/// A running cluster; its nodes end on drop.
///
/// Nodes 0, 1 and 2 start as primaries of a third of the slots each, in order. Nodes 3, 4 and 5 are their replicas, if
/// any, and so on.
#[derive(Debug)]
pub struct Cluster {
    nodes: Vec<Server>,
    /// The directory of the shared certificates, if any; removed on drop.
    _certificates: Option<TempDir>,
}

impl Cluster {
    /// Starts three primaries without replicas.
    ///
    /// # Panics
    ///
    /// When a node does not start, or discovery does not complete.
    #[must_use]
    pub fn start(flavor: Flavor) -> Cluster {
        Setup::new(flavor).start()
    }

    /// Returns all nodes, including stopped ones.
    #[must_use]
    pub fn nodes(&self) -> &[Server] {
        &self.nodes
    }

    /// Returns a node, to stop or restart it.
    pub fn node_mut(&mut self, node: usize) -> &mut Server {
        &mut self.nodes[node]
    }

    /// Returns the URLs of all nodes.
    #[must_use]
    pub fn urls(&self) -> Vec<String> {
        self.nodes.iter().map(Server::url).collect()
    }

    /// Returns the slot of a key.
    ///
    /// # Panics
    ///
    /// When no node answers.
    #[must_use]
    pub fn slot_of(&self, key: impl ToRedisArgs) -> u16 {
        let mut command = redis::cmd("CLUSTER");
        command.arg("KEYSLOT").arg(key);
        let slot = self.nodes.iter().find_map(|node| node.try_query(&command).ok());
        slot.expect("a node that answers")
    }

    /// Returns a Redis key whose slot the node serves; none of its bytes needs escaping.
    ///
    /// # Panics
    ///
    /// When the node serves too few slots.
    #[must_use]
    pub fn redis_key_on(&self, node: usize) -> String {
        let mut keys = (0..10_000).map(|number| format!("key-{number}"));
        let key = keys.find(|key| self.primary_of(self.slot_of(key)) == Some(node));
        key.unwrap_or_else(|| panic!("node {node} serves no slot, or hardly any"))
    }

    /// Returns an input of [`Key::without_rule`] whose slot the node serves.
    ///
    /// # Panics
    ///
    /// When the node serves too few slots.
    #[must_use]
    pub fn limiter_key_on(&self, node: usize) -> String {
        let mut identities = (0..10_000).map(|number| format!("user-{number}"));
        let identity = identities.find(|identity| {
            let tag = Key::without_rule(identity).expect("a short identity").tag();
            self.primary_of(self.slot_of(format!("{{{tag:08x}}}"))) == Some(node)
        });
        identity.unwrap_or_else(|| panic!("node {node} serves no slot, or hardly any"))
    }

    /// Starts a proxy in front of each node, in order, and returns when all nodes redirect clients to the proxies.
    ///
    /// # Panics
    ///
    /// When the nodes do not announce the proxies.
    #[must_use]
    pub fn start_proxies(&self) -> Vec<Proxy> {
        let proxies: Vec<Proxy> = self.nodes.iter().map(|node| Proxy::start(node.addr())).collect();
        for (node, proxy) in self.nodes.iter().zip(&proxies) {
            node.config_set("cluster-announce-port", proxy.addr().port());
        }
        wait::until("all nodes announce the proxies", wait::PATIENCE, || {
            self.nodes.iter().all(|node| {
                let nodes: String = node.query(redis::cmd("CLUSTER").arg("NODES"));
                proxies.iter().all(|proxy| nodes.contains(&format!(":{}@", proxy.addr().port())))
            })
        });
        proxies
    }

    /// Returns the node that serves a slot according to the first node that answers, or `None` if that node has
    /// failed.
    #[must_use]
    pub fn primary_of(&self, slot: u16) -> Option<usize> {
        self.nodes.iter().find_map(|observer| self.view(observer, slot))?
    }

    /// Waits until all running nodes agree that another node serves the slot, and returns it.
    ///
    /// # Panics
    ///
    /// When they do not agree in time.
    pub fn wait_for_other_primary(&self, slot: u16, than: usize) -> usize {
        wait::for_some(format!("slot {slot} is served by another node than {than}"), wait::PATIENCE, || {
            let primary = self.agreed_primary(slot)?;
            (primary != than && self.nodes[primary].is_primary()).then_some(primary)
        })
    }

    /// Waits until every running node reports this state.
    ///
    /// # Panics
    ///
    /// When they do not report it in time.
    pub fn wait_for_state(&self, state: ClusterState) {
        wait::until(format!("the cluster is {state:?}"), wait::PATIENCE, || {
            self.running().all(|node| node.cluster_info("cluster_state").as_deref() == Some(state.name()))
        });
    }

    /// Makes a replica take over from its primary, which becomes a replica. Returns when all nodes agree.
    ///
    /// # Panics
    ///
    /// When the node is not a replica or does not take over.
    pub fn failover(&self, replica: usize) {
        self.nodes[replica].query::<()>(redis::cmd("CLUSTER").arg("FAILOVER"));
        wait::until(format!("node {replica} takes over"), wait::PATIENCE, || {
            self.nodes[replica].is_primary()
                && self.running().all(|observer| {
                    let line = self.line_of(observer, &self.nodes[replica]);
                    line.is_some_and(|line| line.is_primary() && !line.slots.is_empty())
                })
        });
    }

    /// Starts a migration of a slot. From now on the source answers `ASK` for keys that it does not have, and the
    /// target `TRYAGAIN` for several keys of which it does not have all.
    ///
    /// # Panics
    ///
    /// When a node replies with an error, or no node serves the slot.
    #[must_use]
    pub fn begin_migration(&self, slot: u16, to: usize) -> Migration<'_> {
        let from = self.primary_of(slot).expect("a slot that is served");
        let set = |node: usize, state: &str, other: usize| {
            let mut command = redis::cmd("CLUSTER");
            command.arg("SETSLOT").arg(slot).arg(state).arg(self.nodes[other].node_id());
            self.nodes[node].query::<()>(&command);
        };
        // In this order: otherwise the source would redirect clients to a node that redirects them back.
        set(to, "IMPORTING", from);
        set(from, "MIGRATING", to);
        Migration { cluster: self, slot, from, to }
    }

    /// Moves a slot with `CLUSTER MIGRATESLOTS` (Valkey 9.0 and later). Returns when all nodes have the new owner.
    ///
    /// # Panics
    ///
    /// When a node replies with an error.
    pub fn migrate_atomically(&self, slot: u16, to: usize) {
        let from = self.primary_of(slot).expect("a slot that is served");
        let mut command = redis::cmd("CLUSTER");
        command.arg("MIGRATESLOTS").arg("SLOTSRANGE").arg(slot).arg(slot);
        self.nodes[from].query::<()>(command.arg("NODE").arg(self.nodes[to].node_id()));
        wait::until(format!("slot {slot} belongs to node {to}"), wait::PATIENCE, || {
            self.agreed_primary(slot) == Some(to)
        });
    }

    /// Moves all slots of one node to another, with all keys. Returns when all nodes have the new owner.
    ///
    /// # Panics
    ///
    /// When a node replies with an error.
    pub fn move_all_slots(&self, from: usize, to: usize) {
        let lines = lines(&self.nodes[from]);
        let line = lines.into_iter().find(|line| line.port == self.nodes[from].port());
        let slots: Vec<u16> = line.into_iter().flat_map(|line| line.slots).flat_map(|(a, b)| a..=b).collect();
        let ids = [from, to].map(|node| self.nodes[node].node_id());
        let set = |node: usize, state: &str, id: &str| {
            let mut connection = self.nodes[node].connection();
            for some in slots.chunks(SLOTS_AT_ONCE) {
                let mut commands = redis::pipe();
                for slot in some {
                    commands.cmd("CLUSTER").arg("SETSLOT").arg(slot).arg(state).arg(id).ignore();
                }
                // The error lists every slot.
                let first =
                    |error: redis::RedisError| error.to_string().chars().take(200).collect::<String>();
                commands.exec(&mut connection).unwrap_or_else(|error| {
                    panic!("{} replied with an error: {}", self.nodes[node], first(error))
                });
            }
        };
        // In this order, as for a single slot.
        set(to, "IMPORTING", &ids[0]);
        set(from, "MIGRATING", &ids[1]);
        for slot in &slots {
            let migration = Migration { cluster: self, slot: *slot, from, to };
            while migration.move_keys(1_000) > 0 {}
        }
        let others = (0..self.nodes.len()).filter(|node| ![from, to].contains(node));
        for node in [to, from].into_iter().chain(others) {
            if self.nodes[node].is_running() && self.nodes[node].is_primary() {
                set(node, "NODE", &ids[1]);
            }
        }
        wait::until(format!("node {to} has all slots of node {from}"), wait::PATIENCE, || {
            let all = slots.first().into_iter().chain(slots.last());
            all.into_iter().all(|slot| self.agreed_primary(*slot) == Some(to))
        });
    }

    /// Joins the nodes to a cluster.
    fn join(&self) {
        let (primaries, replicas) = self.nodes.split_at(PRIMARIES);
        for (number, node) in self.nodes.iter().enumerate() {
            // Distinct from the start: otherwise conflicts are resolved one by one.
            node.query::<()>(redis::cmd("CLUSTER").arg("SET-CONFIG-EPOCH").arg(number + 1));
            for other in &self.nodes[..number] {
                let addr = other.addr();
                node.query::<()>(
                    redis::cmd("CLUSTER").arg("MEET").arg(addr.ip().to_string()).arg(addr.port()),
                );
            }
        }
        for (number, node) in primaries.iter().enumerate() {
            let bound = |number: usize| (usize::from(SLOTS) * number).div_ceil(PRIMARIES);
            let slots: Vec<usize> = (bound(number)..bound(number + 1)).collect();
            node.query::<()>(redis::cmd("CLUSTER").arg("ADDSLOTS").arg(slots));
        }
        for (number, replica) in replicas.iter().enumerate() {
            let primary = &primaries[number % PRIMARIES];
            let id = primary.node_id();
            wait::until(format!("{replica} replicates {primary}"), wait::PATIENCE, || {
                replica.try_query::<()>(redis::cmd("CLUSTER").arg("REPLICATE").arg(&id)).is_ok()
            });
        }
        replicas.iter().for_each(Server::wait_for_link);
        wait::until("all nodes have discovered each other", wait::PATIENCE, || {
            self.nodes.iter().all(|node| self.is_complete(node))
        });
        self.wait_for_state(ClusterState::Ok);
    }

    /// Returns whether a node has discovered all nodes and their roles.
    fn is_complete(&self, observer: &Server) -> bool {
        let lines = lines(observer);
        let primaries = lines.iter().filter(|line| line.is_primary() && !line.slots.is_empty()).count();
        let slots = observer.cluster_info("cluster_slots_ok");
        lines.len() == self.nodes.len()
            && primaries == PRIMARIES
            && slots.is_some_and(|count| count == SLOTS.to_string())
            && lines.iter().all(|line| !line.flags.contains("handshake"))
            && lines.iter().filter(|line| line.flags.contains("slave")).count()
                == self.nodes.len() - PRIMARIES
    }

    fn running(&self) -> impl Iterator<Item = &Server> {
        self.nodes.iter().filter(|node| node.is_running())
    }

    fn agreed_primary(&self, slot: u16) -> Option<usize> {
        let mut views = self.running().map(|observer| self.view(observer, slot).flatten());
        let first = views.next()??;
        views.all(|view| view == Some(first)).then_some(first)
    }

    /// Returns the node that serves the slot according to one node. The outer option is `None` if that node does not
    /// answer.
    fn view(&self, observer: &Server, slot: u16) -> Option<Option<usize>> {
        let lines = lines(observer);
        if lines.is_empty() {
            return None;
        }
        let line = lines.into_iter().find(|line| {
            line.is_primary() && line.slots.iter().any(|(first, last)| (*first..=*last).contains(&slot))
        });
        Some(line.and_then(|line| self.nodes.iter().position(|node| node.port() == line.port)))
    }

    fn line_of(&self, observer: &Server, node: &Server) -> Option<NodeLine> {
        lines(observer).into_iter().find(|line| line.port == node.port())
    }
}

/// Whether a cluster serves requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClusterState {
    /// It serves requests.
    Ok,
    /// It answers `CLUSTERDOWN` for every slot.
    Fail,
}

impl ClusterState {
    fn name(self) -> &'static str {
        match self {
            ClusterState::Ok => "ok",
            ClusterState::Fail => "fail",
        }
    }
}

/// A slot migration in progress. Dropping it does not move the slot.
#[derive(Debug)]
pub struct Migration<'a> {
    cluster: &'a Cluster,
    slot: u16,
    from: usize,
    to: usize,
}

impl Migration<'_> {
    /// Returns the source node.
    #[must_use]
    pub fn from(&self) -> usize {
        self.from
    }

    /// Moves at most this many keys of the slot, and returns how many were moved.
    ///
    /// # Panics
    ///
    /// When a node replies with an error.
    pub fn move_keys(&self, at_most: u32) -> usize {
        let mut command = redis::cmd("CLUSTER");
        command.arg("GETKEYSINSLOT").arg(self.slot).arg(at_most);
        let keys: Vec<Vec<u8>> = self.source().query(&command);
        keys.iter().for_each(|key| self.move_key(key));
        keys.len()
    }

    /// Moves one key, if it exists.
    ///
    /// # Panics
    ///
    /// When a node replies with an error.
    pub fn move_key(&self, key: impl ToRedisArgs) {
        let to = self.cluster.nodes[self.to].addr();
        let mut command = redis::cmd("MIGRATE");
        command.arg(to.ip().to_string()).arg(to.port()).arg(key).arg(0).arg(MIGRATE_MILLIS);
        self.source().query::<String>(&command);
    }

    /// Moves the remaining keys and then the slot itself. Returns when all nodes have the new owner.
    ///
    /// # Panics
    ///
    /// When a node replies with an error.
    pub fn finish(self) {
        while self.move_keys(1_000) > 0 {}
        let Migration { cluster, slot, from, to } = self;
        let id = cluster.nodes[to].node_id();
        // In this order, so that the slot always has an owner.
        let others = (0..cluster.nodes.len()).filter(|node| ![from, to].contains(node));
        for node in [to, from].into_iter().chain(others) {
            let node = &cluster.nodes[node];
            if node.is_running() && node.is_primary() {
                node.query::<()>(redis::cmd("CLUSTER").arg("SETSLOT").arg(slot).arg("NODE").arg(&id));
            }
        }
        wait::until(format!("slot {slot} belongs to node {to}"), wait::PATIENCE, || {
            cluster.agreed_primary(slot) == Some(to)
        });
    }

    /// Cancels the migration. Keys that were already moved are lost to clients.
    ///
    /// # Panics
    ///
    /// When a node replies with an error.
    pub fn abandon(self) {
        for node in [self.from, self.to] {
            let node = &self.cluster.nodes[node];
            node.query::<()>(redis::cmd("CLUSTER").arg("SETSLOT").arg(self.slot).arg("STABLE"));
        }
    }

    fn source(&self) -> &Server {
        &self.cluster.nodes[self.from]
    }
}

/// A line of `CLUSTER NODES`.
struct NodeLine {
    port: u16,
    flags: String,
    slots: Vec<(u16, u16)>,
}

impl NodeLine {
    /// Returns whether the node serves its slots; `fail?` is only a suspicion.
    fn is_primary(&self) -> bool {
        let mut flags = self.flags.split(',');
        self.flags.contains("master") && !flags.any(|flag| flag == "fail")
    }
}

/// Returns the cluster as one node reports it; empty if the node does not answer.
fn lines(observer: &Server) -> Vec<NodeLine> {
    let text: String = observer.try_query(redis::cmd("CLUSTER").arg("NODES")).unwrap_or_default();
    text.lines().filter_map(line).collect()
}

/// Parses `<id> <ip>:<port>@<bus> <flags> <primary> <ping> <pong> <epoch> <link> <slots> ...`.
fn line(text: &str) -> Option<NodeLine> {
    let mut words = text.split(' ').skip(1);
    let (_, port) = words.next()?.split('@').next()?.rsplit_once(':')?;
    let flags = words.next()?.to_string();
    // Migrating slots, such as `[93->-id]`, are also listed as ordinary slots.
    let slots = words.skip(5).filter(|word| !word.starts_with('['));
    let slots = slots.filter_map(|word| {
        let (first, last) = word.split_once('-').unwrap_or((word, word));
        Some((first.parse().ok()?, last.parse().ok()?))
    });
    Some(NodeLine { port: port.parse().ok()?, flags, slots: slots.collect() })
}

impl Server {
    fn node_id(&self) -> String {
        self.query(redis::cmd("CLUSTER").arg("MYID"))
    }

    fn cluster_info(&self, field: &str) -> Option<String> {
        let info: String = self.try_query(redis::cmd("CLUSTER").arg("INFO")).ok()?;
        crate::faults::info_field(&info, field)
    }
}
