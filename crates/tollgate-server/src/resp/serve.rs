//! Connections: how many, and how they end when the server does.

use std::{convert::Infallible, future::Future, sync::Arc, time::Duration};

use tokio::{
    net::TcpListener,
    sync::{Semaphore, watch},
    task::JoinSet,
};
use tollgate::Store;

use super::Endpoint;
use crate::listen::{Protocol, Security};

/// The most connections at a time, within the 1024 open files that a process usually may have. More wait
/// to be accepted.
pub const MAX_CONNECTIONS: usize = 1_000;

/// How long clients may take to be answered once the server is told to stop.
pub const SHUTDOWN_GRACE: Duration = Duration::from_secs(10);

/// The pause after a connection could not be accepted, for want of open files for example.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Tells connections that the server stops.
#[derive(Clone, Debug)]
pub struct Stop(watch::Receiver<()>);

impl Stop {
    /// A stop that comes when the sender is dropped.
    pub fn when_dropped() -> (watch::Sender<()>, Self) {
        let (sender, receiver) = watch::channel(());
        (sender, Self(receiver))
    }

    /// Ready once the server stops.
    pub(super) async fn stopped(&mut self) {
        // nothing is ever sent: that the sender has gone is the message
        while self.0.changed().await.is_ok() {}
    }
}

/// Serves clients until `stop` is ready. Then takes no more of them, answers what they have sent, and ends each connection
/// once it is quiet, or after [`SHUTDOWN_GRACE`].
pub async fn run<S: Store>(
    listener: TcpListener,
    endpoint: Endpoint<S>,
    security: Security,
    stop: impl Future<Output = ()>,
) {
    let (stopping, stopped) = Stop::when_dropped();
    let mut connections = JoinSet::new();
    tokio::select! {
        never = accept(&listener, &endpoint, &security, &stopped, &mut connections) => match never {},
        () = stop => {}
    }
    // Who comes now is turned away, rather than kept waiting for somebody who does not accept.
    drop(listener);
    drop(stopping);
    let all_ended = async { while connections.join_next().await.is_some() {} };
    let _ended_or_cut_off = tokio::time::timeout(SHUTDOWN_GRACE, all_ended).await;
}

async fn accept<S: Store>(
    listener: &TcpListener,
    endpoint: &Endpoint<S>,
    security: &Security,
    stopped: &Stop,
    connections: &mut JoinSet<()>,
) -> Infallible {
    let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        let place = Arc::clone(&places).acquire_owned().await.expect("the semaphore is never closed");
        while connections.try_join_next().is_some() {}
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(_) => {
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let (endpoint, security, stopped) = (endpoint.clone(), security.clone(), stopped.clone());
        connections.spawn(async move {
            // A connection that breaks off is its client's affair.
            if let Ok(stream) = security.secure(stream, Protocol::Redis).await {
                endpoint.serve(stream, stopped).await;
            }
            drop(place);
        });
    }
}
