//! One primary with all counters: a server at a fixed address, or the primary that sentinels name.

use std::sync::{Arc, OnceLock};

use redis::Value;
use tokio::task::JoinSet;

use super::{
    connection::{Asking, CallFailure, RedisRequest, ServerConnection, Target},
    connector::Connector,
    sentinel::Sentinels,
    url::Node,
};

pub(super) struct Primary {
    connection: Arc<ServerConnection>,
    sentinels: Option<Arc<Sentinels>>,
    /// Started by the first call, which has a runtime; stopped on drop.
    listeners: OnceLock<JoinSet<()>>,
}

impl Primary {
    pub(super) fn fixed(connector: Connector, node: Node) -> Self {
        let connection = ServerConnection::new(Arc::new(connector), Target::Fixed(node));
        Self { connection, sentinels: None, listeners: OnceLock::new() }
    }

    pub(super) fn watched(connector: Connector, sentinels: Sentinels) -> Self {
        let sentinels = Arc::new(sentinels);
        let connection = ServerConnection::new(Arc::new(connector), Target::Primary(Arc::clone(&sentinels)));
        Self { connection, sentinels: Some(sentinels), listeners: OnceLock::new() }
    }

    pub(super) fn connection(&self) -> &Arc<ServerConnection> {
        &self.connection
    }

    /// Connects if necessary; returns the reason if that fails.
    pub(super) async fn ready(&self) -> Result<(), String> {
        self.listen();
        self.connection.ready().await
    }

    /// Sends a request; once more if the server is no longer the primary.
    pub(super) async fn send(&self, request: RedisRequest<'_>) -> Result<Value, CallFailure> {
        self.listen();
        match self.connection.send(request, Asking::No).await {
            Err(failure) if failure.is("READONLY") => self.connection.send(request, Asking::No).await,
            reply => reply,
        }
    }

    /// Waits for a connection, no matter how many attempts fail, and sends a request.
    pub(super) async fn send_once_connected(&self, request: RedisRequest<'_>) -> Result<Value, CallFailure> {
        self.listen();
        self.connection.connected().await;
        self.send(request).await
    }

    fn listen(&self) {
        if let Some(sentinels) = &self.sentinels {
            self.listeners.get_or_init(|| sentinels.watch(&self.connection));
        }
    }
}
