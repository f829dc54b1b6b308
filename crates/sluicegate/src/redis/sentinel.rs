//! Sentinels: discovery of the primary, and notification of failovers.
//!
//! All sentinels are queried, and the one with the highest failover epoch is used: after a planned failover, the other sentinels report
//! the old primary for several seconds, and that server still considers itself the primary. A named server must confirm its role
//! (`ROLE`) before any request is sent to it.

use std::{
    collections::BTreeMap,
    sync::{Arc, Weak},
    time::Duration,
};

use futures_util::{StreamExt, future::join_all};
use redis::{FromRedisValue, Value, aio::ConnectionLike};
use tokio::{
    task::JoinSet,
    time::{sleep, timeout},
};

use super::{
    connection::ServerConnection,
    connector::{Connection, Connector},
    dial_backoff::jittered,
    url::Node,
};

/// How long one sentinel may take to answer.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(500);
/// How long the named primary may take to accept a connection before the sentinels are queried again: it may be
/// partitioned, and another server may have replaced it.
const ACCEPT_TIMEOUT: Duration = Duration::from_secs(1);
/// Wait before the role of a server that is not yet the primary is checked again.
const ROLE_PAUSE: Duration = Duration::from_millis(500);
/// Time between two connections to one sentinel, on average.
const RESUBSCRIBE_PAUSE: Duration = Duration::from_millis(750);
/// How long a sentinel may be silent before it is pinged.
const MAX_SILENCE: Duration = Duration::from_secs(2);
/// The channel on which sentinels announce a new primary.
const SWITCH: &str = "+switch-master";

/// The sentinels of one primary.
pub(super) struct Sentinels {
    connector: Connector,
    nodes: Vec<Node>,
    name: String,
}

/// The primary that a sentinel names.
struct Named {
    primary: Node,
    /// Epoch of the failover that promoted it.
    epoch: u64,
}

/// The primary that a sentinel names, with the fields of `SENTINEL MASTER`.
pub(super) type View = (Node, BTreeMap<String, String>);

impl Sentinels {
    pub(super) fn new(connector: Connector, nodes: Vec<Node>, name: String) -> Self {
        Self { connector, nodes, name }
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Connects to the primary. Retries while the named server is not a primary or does not respond.
    pub(super) async fn connect(&self, to_data: &Connector) -> Result<(Node, Connection), String> {
        loop {
            let node = self.primary().await?;
            let Ok(connected) = timeout(ACCEPT_TIMEOUT, to_data.connect(&node)).await else { continue };
            let mut connection = connected?;
            let role: Vec<Value> = redis::cmd("ROLE")
                .query_async(&mut connection)
                .await
                .map_err(|error| format!("{node}: ROLE failed: {error}"))?;
            let role = role.into_iter().next().map(String::from_redis_value);
            if role.is_some_and(|role| role.is_ok_and(|role| role == "master")) {
                return Ok((node, connection));
            }
            sleep(ROLE_PAUSE).await;
        }
    }

    async fn primary(&self) -> Result<Node, String> {
        let answers = join_all(self.nodes.iter().map(|node| self.query(node))).await;
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
            .ok_or_else(|| format!("no sentinel reports the primary {:?}: {}", self.name, reasons.join("; ")))
    }

    async fn query(&self, sentinel: &Node) -> Result<Named, String> {
        let (primary, details) = self.view(sentinel).await?;
        let epoch = details.get("config-epoch").and_then(|epoch| epoch.parse().ok()).unwrap_or(0);
        Ok(Named { primary, epoch })
    }

    /// Returns the view of each sentinel.
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
                return Err(format!("{sentinel}: incomplete reply"));
            };
            let address = address.extract_error().map_err(|error| format!("{sentinel}: {error}"))?;
            let Ok(Some((host, port))) = Option::<(String, u16)>::from_redis_value(address) else {
                return Err(format!("{sentinel}: unknown primary"));
            };
            Ok((Node { host, port }, BTreeMap::from_redis_value(details).unwrap_or_default()))
        };
        match timeout(ANSWER_TIMEOUT, answer).await {
            Ok(answer) => answer,
            Err(_) => Err(format!("{sentinel}: no reply within {ANSWER_TIMEOUT:?}")),
        }
    }

    /// Subscribes to all sentinels and updates the connection on a failover, until the returned set is dropped.
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
        // the reason does not matter: other sentinels are subscribed to as well, and this one is retried
        let _ = follow_failovers(&sentinels, &sentinel, &connection).await;
        sleep(jittered(RESUBSCRIBE_PAUSE)).await;
    }
}

async fn follow_failovers(
    sentinels: &Sentinels,
    sentinel: &Node,
    connection: &Weak<ServerConnection>,
) -> Option<()> {
    let (mut sink, mut stream) =
        timeout(ANSWER_TIMEOUT, sentinels.connector.subscribe(sentinel)).await.ok()?.ok()?.split();
    timeout(ANSWER_TIMEOUT, sink.subscribe(SWITCH)).await.ok()?.ok()?;
    // after the subscription: a failover between query and subscription would be missed
    if let Ok(primary) = sentinels.primary().await {
        connection.upgrade()?.follow(&primary);
    }
    loop {
        let Ok(message) = timeout(MAX_SILENCE, stream.next()).await else {
            timeout(ANSWER_TIMEOUT, sink.ping::<Value>()).await.ok()?.ok()?;
            continue;
        };
        let text: String = message?.get_payload().ok()?;
        if let Some(primary) = parse_switch(&text, &sentinels.name) {
            connection.upgrade()?.follow(&primary);
        }
    }
}

/// Parses `<name> <old host> <old port> <new host> <new port>`.
fn parse_switch(text: &str, name: &str) -> Option<Node> {
    let rest = text.strip_prefix(name)?.strip_prefix(' ')?;
    let mut words = rest.split(' ').skip(2);
    let (host, port) = (words.next()?, words.next()?);
    Some(Node { host: host.to_owned(), port: port.parse().ok()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_failovers_of_the_configured_primary_are_followed() {
        let text = "main 10.0.0.1 6379 10.0.0.2 6380";
        assert_eq!(parse_switch(text, "main"), Some(Node { host: "10.0.0.2".to_owned(), port: 6380 }));
        assert_eq!(parse_switch(text, "mai"), None);
        assert_eq!(parse_switch("other 10.0.0.1 6379 10.0.0.2 6380", "main"), None);
        assert_eq!(parse_switch("main 10.0.0.1", "main"), None);
    }
}
