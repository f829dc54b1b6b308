//! Sentinels: who is the primary now, and being told when that changes.
//!
//! All of them are asked, and the one that knows of the latest failover is believed: after a planned one, the others
//! still name the old primary for seconds, and it still takes itself for one. Whoever is named must say so
//! itself (`ROLE`) before anything is sent to it.

use std::{
    collections::BTreeMap,
    sync::{Arc, Weak},
    time::Duration,
};

use futures_util::{StreamExt, future::join_all};
use redis::{
    FromRedisValue, Value,
    aio::{ConnectionLike, MultiplexedConnection},
};
use tokio::{
    task::JoinSet,
    time::{sleep, timeout},
};

use super::{
    connection::{Connector, ServerConnection, jitter},
    url::Node,
};

/// How long one sentinel may take to answer.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(500);
/// How long the server that they name may take to accept a connection, before they are asked again: it may be cut off, and be
/// replaced meanwhile.
const ACCEPT_TIMEOUT: Duration = Duration::from_secs(1);
/// How long to wait before a server that is not yet the primary is asked again.
const ROLE_PAUSE: Duration = Duration::from_millis(500);
/// The least time between two connections to one sentinel.
const LISTEN_PAUSE: Duration = Duration::from_millis(500);
/// How long a sentinel may say nothing before it is asked for a sign of life.
const QUIET: Duration = Duration::from_secs(2);
/// Where sentinels tell of a new primary.
const SWITCH: &str = "+switch-master";

/// The sentinels of one primary.
pub(super) struct Sentinels {
    connector: Connector,
    nodes: Vec<Node>,
    name: String,
}

/// What a sentinel says.
struct Named {
    primary: Node,
    /// Which failover made it so.
    epoch: u64,
}

/// What a sentinel says in full.
pub(super) type View = (Node, BTreeMap<String, String>);

impl Sentinels {
    pub(super) fn new(connector: Connector, nodes: Vec<Node>, name: String) -> Self {
        Self { connector, nodes, name }
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Connects to the primary; goes on asking as long as a server is named that is none, or is silent.
    pub(super) async fn connect(&self, to_data: &Connector) -> Result<(Node, MultiplexedConnection), String> {
        loop {
            let node = self.primary().await?;
            let Ok(connected) = timeout(ACCEPT_TIMEOUT, to_data.connect(&node)).await else { continue };
            let mut connection = connected?;
            let role: Vec<Value> = redis::cmd("ROLE")
                .query_async(&mut connection)
                .await
                .map_err(|error| format!("{node} does not say whether it is the primary: {error}"))?;
            let role = role.into_iter().next().map(String::from_redis_value);
            if role.is_some_and(|role| role.is_ok_and(|role| role == "master")) {
                return Ok((node, connection));
            }
            sleep(ROLE_PAUSE).await;
        }
    }

    async fn primary(&self) -> Result<Node, String> {
        let answers = join_all(self.nodes.iter().map(|node| self.ask(node))).await;
        let mut reasons = Vec::new();
        let mut latest: Option<Named> = None;
        for answer in answers {
            match answer {
                Ok(named) if latest.as_ref().is_none_or(|latest| named.epoch > latest.epoch) => {
                    latest = Some(named);
                }
                Ok(_) => {}
                Err(reason) => reasons.push(reason),
            }
        }
        latest
            .map(|named| named.primary)
            .ok_or_else(|| format!("no sentinel names the primary {:?}: {}", self.name, reasons.join("; ")))
    }

    async fn ask(&self, sentinel: &Node) -> Result<Named, String> {
        let (primary, details) = self.view(sentinel).await?;
        let epoch = details.get("config-epoch").and_then(|epoch| epoch.parse().ok()).unwrap_or(0);
        Ok(Named { primary, epoch })
    }

    /// What each of them says: the primary, and the fields of `SENTINEL MASTER`.
    pub(super) async fn views(&self) -> Vec<(Node, Result<View, String>)> {
        let view = async |node: &Node| (node.clone(), self.view(node).await);
        join_all(self.nodes.iter().map(view)).await
    }

    async fn view(&self, sentinel: &Node) -> Result<View, String> {
        let answer = async {
            let mut connection = self.connector.connect(sentinel).await?;
            let mut questions = redis::pipe();
            questions.cmd("SENTINEL").arg("get-master-addr-by-name").arg(&self.name);
            questions.cmd("SENTINEL").arg("MASTER").arg(&self.name);
            let replies = connection.req_packed_commands(&questions, 0, 2).await;
            let replies = replies.map_err(|error| format!("{sentinel}: {error}"))?;
            let Ok([address, details]) = <[Value; 2]>::try_from(replies) else {
                return Err(format!("{sentinel} answers by halves"));
            };
            let address = address.extract_error().map_err(|error| format!("{sentinel}: {error}"))?;
            let Ok(Some((host, port))) = Option::<(String, u16)>::from_redis_value(address) else {
                return Err(format!("{sentinel} knows no primary of that name"));
            };
            Ok((Node { host, port }, BTreeMap::from_redis_value(details).unwrap_or_default()))
        };
        match timeout(ANSWER_TIMEOUT, answer).await {
            Ok(answer) => answer,
            Err(_) => Err(format!("{sentinel} does not answer within {ANSWER_TIMEOUT:?}")),
        }
    }

    /// Keeps listening to all sentinels, and has the connection follow, until what is returned is dropped.
    pub(super) fn watch(self: &Arc<Self>, connection: &Arc<ServerConnection>) -> JoinSet<()> {
        let mut listeners = JoinSet::new();
        for node in &self.nodes {
            listeners.spawn(listen(Arc::clone(self), node.clone(), Arc::downgrade(connection)));
        }
        listeners
    }
}

async fn listen(sentinels: Arc<Sentinels>, sentinel: Node, connection: Weak<ServerConnection>) {
    loop {
        // why it ended does not matter: the others are listened to as well, and it is tried again
        let _ = hear(&sentinels, &sentinel, &connection).await;
        sleep(LISTEN_PAUSE + jitter()).await;
    }
}

async fn hear(sentinels: &Sentinels, sentinel: &Node, connection: &Weak<ServerConnection>) -> Option<()> {
    let (mut sink, mut stream) =
        timeout(ANSWER_TIMEOUT, sentinels.connector.listen(sentinel)).await.ok()?.ok()?.split();
    timeout(ANSWER_TIMEOUT, sink.subscribe(SWITCH)).await.ok()?.ok()?;
    // not before: what is said between the answer and the subscription would be missed
    if let Ok(primary) = sentinels.primary().await {
        connection.upgrade()?.follow(&primary);
    }
    loop {
        let Ok(message) = timeout(QUIET, stream.next()).await else {
            timeout(ANSWER_TIMEOUT, sink.ping::<Value>()).await.ok()?.ok()?;
            continue;
        };
        let text: String = message?.get_payload().ok()?;
        if let Some(primary) = switched(&text, &sentinels.name) {
            connection.upgrade()?.follow(&primary);
        }
    }
}

/// Reads `<name> <old host> <old port> <new host> <new port>`.
fn switched(text: &str, name: &str) -> Option<Node> {
    let rest = text.strip_prefix(name)?.strip_prefix(' ')?;
    let mut words = rest.split(' ').skip(2);
    let (host, port) = (words.next()?, words.next()?);
    Some(Node { host: host.to_owned(), port: port.parse().ok()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_switch_of_our_primary_is_followed() {
        let text = "main 10.0.0.1 6379 10.0.0.2 6380";
        assert_eq!(switched(text, "main"), Some(Node { host: "10.0.0.2".to_owned(), port: 6380 }));
        assert_eq!(switched(text, "mai"), None);
        assert_eq!(switched("other 10.0.0.1 6379 10.0.0.2 6380", "main"), None);
        assert_eq!(switched("main 10.0.0.1", "main"), None);
    }
}
