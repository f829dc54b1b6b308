//! One primary that holds everything: a server at a fixed address, or the one that sentinels name.

use std::sync::{Arc, OnceLock};

use redis::Value;
use tokio::task::JoinSet;

use super::{
    link::{Asking, Connector, Failure, Link, Request, Target},
    sentinel::Sentinels,
    url::Node,
};

pub(super) struct Primary {
    link: Arc<Link>,
    sentinels: Option<Arc<Sentinels>>,
    /// Started with the first call, for want of a runtime before; ends with this.
    listeners: OnceLock<JoinSet<()>>,
}

impl Primary {
    pub(super) fn fixed(connector: Connector, node: Node) -> Self {
        let link = Link::new(Arc::new(connector), Target::Fixed(node));
        Self { link, sentinels: None, listeners: OnceLock::new() }
    }

    pub(super) fn watched(connector: Connector, sentinels: Sentinels) -> Self {
        let sentinels = Arc::new(sentinels);
        let link = Link::new(Arc::new(connector), Target::Primary(Arc::clone(&sentinels)));
        Self { link, sentinels: Some(sentinels), listeners: OnceLock::new() }
    }

    pub(super) fn link(&self) -> &Arc<Link> {
        &self.link
    }

    /// Connects if need be; why not, otherwise.
    pub(super) async fn ready(&self) -> Result<(), String> {
        self.listen();
        self.link.ready().await
    }

    /// Sends a request; once more if the server says that it is not the primary any more.
    pub(super) async fn send(&self, request: Request<'_>) -> Result<Value, Failure> {
        self.listen();
        match self.link.send(request, Asking::No).await {
            Err(failure) if failure.is("READONLY") => self.link.send(request, Asking::No).await,
            reply => reply,
        }
    }

    fn listen(&self) {
        if let Some(sentinels) = &self.sentinels {
            self.listeners.get_or_init(|| sentinels.watch(&self.link));
        }
    }
}
