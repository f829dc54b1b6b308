//! Inspection of the servers, for tools: version, configuration, permissions and keys.
//!
//! It returns facts without evaluating them. It does not interfere with decisions: it uses its own connections, one request at a time,
//! with a timeout. Only [`InspectedServer::remove_expired`], [`InspectedServer::set_ttl`] and [`InspectedServer::repair_holds`] change
//! anything.

mod holds;
mod keys;
mod rights;

use std::{collections::BTreeMap, fmt, time::Duration};

use futures_util::future::join_all;
use redis::{Cmd, FromRedisValue, Value, aio::ConnectionLike};
use sluicegate_core::Timestamp;
use tokio::time::{Instant, timeout};

pub use self::{
    holds::{CounterHolds, ExpiredHolds},
    keys::{FoundKey, KeyKind, KeyPages, PAGE},
    rights::{AclSubject, Permission, Right, Rights, User},
};
use super::{
    Deployment, RedisSettings, RedisSetupError,
    cluster::Layout,
    connection::CallFailure,
    connector::{Connection, Connector},
    keys::{INSTANCES, probe_key},
    script::SOURCE,
    sentinel::{Sentinels, View},
    url::{Node, UrlTopology},
    valid_prefix,
};
use crate::{clock::wall_clock, stats::Skew, store::StoreError};

/// How long a server may take to accept a connection, or the sentinels to name one.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// How long a server may take to answer one request.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(3);
/// Number of clock readings; the fastest one is the most precise.
const CLOCK_READINGS: u32 = 8;

/// The servers of a store, each with its own connection.
#[derive(Debug)]
pub struct Inspection {
    /// The topology.
    pub shape: Shape,
    /// The primaries, which hold data and decide.
    pub servers: Vec<InspectedServer>,
    /// Unreachable primaries of a Cluster: address and reason.
    pub away: Vec<(String, String)>,
    /// The report of each sentinel, in the order of the URL.
    pub sentinels: Vec<SentinelReport>,
    /// Number of slots of a Cluster without a node.
    pub unserved_slots: u16,
    /// Whether the connections use TLS.
    pub is_encrypted: bool,
}

/// The topology of the servers of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// One server at a fixed address.
    Single,
    /// A primary that sentinels watch.
    Watched,
    /// A Cluster.
    Cluster,
}

/// A sentinel and its view of the primary.
#[derive(Clone, Debug)]
pub struct SentinelReport {
    /// Its address.
    pub address: String,
    /// The primary it names and the fields of `SENTINEL MASTER`, or the error.
    pub report: Result<(String, BTreeMap<String, String>), String>,
}

/// One server that holds data.
pub struct InspectedServer {
    node: Node,
    connection: Connection,
    prefix: String,
    /// Part of a key that this server serves.
    tag: String,
    database: u32,
    shape: Shape,
}

/// The skew between a server's clock and this machine's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClockReading {
    /// The measured skew.
    pub skew: Skew,
    /// The error of the measurement: half of the round trip.
    pub uncertainty: Duration,
}

impl Inspection {
    /// Connects to all servers that hold data.
    ///
    /// # Errors
    /// If URL, settings or prefix are invalid, or no server is reachable.
    pub async fn of(url: &str, settings: &RedisSettings, prefix: &str) -> Result<Self, RedisSetupError> {
        let prefix = valid_prefix(prefix)?;
        let Deployment { connector, topology, nodes, is_tls, database } = Deployment::of(url, settings)?;
        let unreachable = RedisSetupError::Connect;
        let server = |shape, node: Node, connection, tag: String| InspectedServer {
            node,
            connection,
            prefix: prefix.clone(),
            tag,
            database,
            shape,
        };
        let mut inspection = Self {
            shape: Shape::Single,
            servers: Vec::new(),
            away: Vec::new(),
            sentinels: Vec::new(),
            unserved_slots: 0,
            is_encrypted: is_tls,
        };
        match topology {
            UrlTopology::Standalone => {
                let node = nodes.into_iter().next().expect("a URL names a server");
                let connection = connector.connect(&node).await.map_err(unreachable)?;
                inspection.servers.push(server(Shape::Single, node, connection, INSTANCES.to_owned()));
            }
            UrlTopology::Sentinel { name } => {
                inspection.shape = Shape::Watched;
                let to_sentinels = Connector::new(is_tls, &settings.sentinel, 0, settings)?;
                let sentinels = Sentinels::new(to_sentinels, nodes, name);
                inspection.sentinels = sentinels.views().await.into_iter().map(sentinel_report).collect();
                let (node, connection) = match timeout(CONNECT_TIMEOUT, sentinels.connect(&connector)).await {
                    Ok(connected) => connected.map_err(unreachable)?,
                    Err(_) => {
                        let reason = format!("no primary found within {CONNECT_TIMEOUT:?}");
                        return Err(unreachable(reason));
                    }
                };
                inspection.servers.push(server(Shape::Watched, node, connection, INSTANCES.to_owned()));
            }
            UrlTopology::Cluster => {
                inspection.shape = Shape::Cluster;
                let Layout { nodes, unserved } = layout(&connector, &nodes).await.map_err(unreachable)?;
                inspection.unserved_slots = unserved;
                let connections = join_all(nodes.iter().map(|(node, _)| connector.connect(node))).await;
                for ((node, tag), connection) in nodes.into_iter().zip(connections) {
                    match connection {
                        Ok(connection) => {
                            inspection.servers.push(server(Shape::Cluster, node, connection, tag));
                        }
                        Err(reason) => inspection.away.push((node.to_string(), reason)),
                    }
                }
            }
        }
        Ok(inspection)
    }
}

fn sentinel_report((node, report): (Node, Result<View, String>)) -> SentinelReport {
    let report = report.map(|(primary, fields)| (primary.to_string(), fields));
    SentinelReport { address: node.to_string(), report }
}

/// Fetches the slot assignment from one node after the other, until one returns it.
async fn layout(connector: &Connector, seeds: &[Node]) -> Result<Layout, String> {
    let mut reasons = Vec::new();
    for seed in seeds {
        let mut connection = match connector.connect(seed).await {
            Ok(connection) => connection,
            Err(reason) => {
                reasons.push(reason);
                continue;
            }
        };
        let mut question = redis::cmd("CLUSTER");
        question.arg("SLOTS");
        match query(&mut connection, seed, &question).await {
            Ok(reply) => match Layout::read(reply, seed) {
                Some(layout) => return Ok(layout),
                None => reasons.push(format!("{seed}: empty slot map")),
            },
            Err(error) => reasons.push(format!("{seed}: {error}")),
        }
    }
    Err(reasons.join("; "))
}

async fn query(connection: &mut Connection, node: &Node, command: &Cmd) -> Result<Value, StoreError> {
    let reply = match timeout(ANSWER_TIMEOUT, connection.req_packed_command(command)).await {
        Ok(reply) => reply,
        Err(_) => return Err(silent(node)),
    };
    match reply {
        Ok(Value::ServerError(error)) => Err(failed(node, &error.into())),
        Ok(value) => Ok(value),
        Err(error) => Err(failed(node, &error)),
    }
}

fn silent(node: &Node) -> StoreError {
    StoreError::Ambiguous(format!("{node}: no reply within {ANSWER_TIMEOUT:?}"))
}

fn failed(node: &Node, error: &redis::RedisError) -> StoreError {
    let failure = match error.code() {
        Some(code) => CallFailure::Rejected {
            code: code.to_owned(),
            detail: error.detail().unwrap_or_default().to_owned(),
        },
        None => CallFailure::ReplyLost(format!("{node}: {error}")),
    };
    failure.into()
}

impl InspectedServer {
    /// Returns the address.
    pub fn address(&self) -> String {
        self.node.to_string()
    }

    /// Measures the round trip of one request.
    ///
    /// # Errors
    /// If there is no reply.
    pub async fn round_trip(&self) -> Result<Duration, StoreError> {
        let sent = Instant::now();
        self.ask(&redis::cmd("PING")).await?;
        Ok(sent.elapsed())
    }

    /// Measures the skew between its clock and this machine's.
    ///
    /// # Errors
    /// If `TIME` fails.
    pub async fn clock(&self) -> Result<ClockReading, StoreError> {
        let mut best: Option<ClockReading> = None;
        for _ in 0..CLOCK_READINGS {
            let before = wall_clock();
            let reply = self.ask(&redis::cmd("TIME")).await?;
            let after = wall_clock();
            let (seconds, micros) =
                <(u64, u64)>::from_redis_value(reply).map_err(|_| self.unexpected_reply("TIME"))?;
            let there = seconds * 1_000_000 + micros;
            let reading = reading(there, before, after);
            if best.is_none_or(|best| reading.uncertainty < best.uncertainty) {
                best = Some(reading);
            }
        }
        best.ok_or_else(|| self.unexpected_reply("TIME"))
    }

    /// Returns the fields of `INFO`.
    ///
    /// # Errors
    /// If `INFO` fails.
    pub async fn info(&self) -> Result<BTreeMap<String, String>, StoreError> {
        let reply = self.ask(&redis::cmd("INFO")).await?;
        let text = String::from_redis_value(reply).map_err(|_| self.unexpected_reply("INFO"))?;
        let field = |line: &str| {
            let (name, value) = line.trim_end().split_once(':')?;
            Some((name.to_owned(), value.to_owned()))
        };
        Ok(text.lines().filter(|line| !line.starts_with('#')).filter_map(field).collect())
    }

    /// Returns one of its settings (`CONFIG GET`), if it exists.
    ///
    /// # Errors
    /// If `CONFIG GET` fails.
    pub async fn setting(&self, name: &str) -> Result<Option<String>, StoreError> {
        let mut command = redis::cmd("CONFIG");
        let reply = self.ask(command.arg("GET").arg(name)).await?;
        let settings = BTreeMap::<String, String>::from_redis_value(reply);
        Ok(settings.map_err(|_| self.unexpected_reply("CONFIG GET"))?.remove(name))
    }

    /// Probes whether the server would decide now, without a change.
    ///
    /// # Errors
    /// The error that a decision would have.
    pub async fn probe(&self) -> Result<(), StoreError> {
        let mut probe = redis::cmd("EVAL");
        self.ask(probe.arg(SOURCE).arg(1).arg(probe_key(&self.prefix, &self.tag))).await.map(|_| ())
    }

    async fn ask(&self, command: &Cmd) -> Result<Value, StoreError> {
        query(&mut self.connection.clone(), &self.node, command).await
    }

    /// Sends several commands in one pipeline.
    async fn ask_all(&self, commands: &redis::Pipeline, count: usize) -> Result<Vec<Value>, StoreError> {
        let mut connection = self.connection.clone();
        match timeout(ANSWER_TIMEOUT, connection.req_packed_commands(commands, 0, count)).await {
            Ok(replies) => replies.map_err(|error| failed(&self.node, &error)),
            Err(_) => Err(silent(&self.node)),
        }
    }

    fn unexpected_reply(&self, command: &str) -> StoreError {
        StoreError::Ambiguous(format!("{}: unexpected reply to {command}", self.node))
    }
}

impl fmt::Debug for InspectedServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InspectedServer").field("node", &self.node).finish_non_exhaustive()
    }
}

/// The server read its clock between these two readings; the middle has the smallest error.
fn reading(there_us: u64, before: Timestamp, after: Timestamp) -> ClockReading {
    let (before, after) = (before.as_micros(), after.as_micros());
    let half = after.saturating_sub(before) / 2;
    let here = before + half;
    let size = Duration::from_micros(there_us.abs_diff(here));
    let skew = if there_us > here { Skew::Ahead(size) } else { Skew::Behind(size) };
    ClockReading { skew, uncertainty: Duration::from_micros(half) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_is_compared_with_the_middle_of_the_round_trip() {
        let at = Timestamp::from_micros;
        let found = reading(5_000, at(1_000), at(1_400));
        assert_eq!(found.skew, Skew::Ahead(Duration::from_micros(3_800)));
        assert_eq!(found.uncertainty, Duration::from_micros(200));
        assert_eq!(reading(900, at(1_000), at(1_000)).skew, Skew::Behind(Duration::from_micros(100)));
        // this machine's clock was set back in between
        assert_eq!(reading(900, at(1_000), at(500)).uncertainty, Duration::ZERO);
    }
}
