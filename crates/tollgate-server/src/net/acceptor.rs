//! Connections of any front end: taken within bounds, secured, and told to go when the server stops.

use std::{convert::Infallible, future::Future, net::SocketAddr, time::Duration};

use tokio::{
    net::TcpListener,
    sync::watch,
    task::JoinSet,
    time::{sleep, timeout},
};

use crate::{
    net::connection_limit::{Crowd, Voice},
    net::runtime::Workers,
    net::stream::Stream,
    net::tls::{Protocol, TlsAcceptor},
};

/// How long calls in flight may take to finish once the server is told to stop.
pub const SHUTDOWN_GRACE: Duration = Duration::from_secs(10);

/// The same for connections that have not asked anything yet.
pub(crate) const QUIET_GRACE: Duration = Duration::from_secs(1);

/// The pause after a connection could not be accepted, for want of open files for example.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// How clients are received, on every front end: by default in the open, and by the runtime of whoever listens.
#[derive(Clone, Default)]
pub struct Reception {
    /// What connections are secured with.
    pub tls: TlsAcceptor,
    /// Who serves them.
    pub workers: Workers,
}

/// Where the connections of a front end come in.
pub(crate) struct Entrance {
    pub(crate) listener: TcpListener,
    /// The most connections at a time. For one more, the one that has been silent the longest is ended.
    pub(crate) places: usize,
    pub(crate) reception: Reception,
    pub(crate) protocol: Protocol,
}

/// A client that is let in.
pub(crate) struct Visitor {
    pub(crate) stream: Stream,
    pub(crate) peer: SocketAddr,
    pub(crate) voice: Voice,
    pub(crate) stop: Stop,
}

/// Tells connections that the server stops.
#[derive(Clone, Debug)]
pub struct Stop(watch::Receiver<()>);

impl Stop {
    /// A stop that comes when the sender is dropped.
    pub fn when_dropped() -> (watch::Sender<()>, Self) {
        let (sender, receiver) = watch::channel(());
        (sender, Self(receiver))
    }

    /// Whether the server stops.
    pub(crate) fn has_come(&self) -> bool {
        self.0.has_changed().is_err()
    }

    /// Ready once the server stops.
    pub(crate) async fn stopped(&mut self) {
        // nothing is ever sent: that the sender has gone is the message
        while self.0.changed().await.is_ok() {}
    }

    /// Ready once the server has been stopping for so long.
    async fn stopped_for(mut self, grace: Duration) {
        self.stopped().await;
        sleep(grace).await;
    }
}

impl Entrance {
    /// Has each client served until `stop` is ready. Then takes no more of them, tells those there are, and gives them
    /// [`SHUTDOWN_GRACE`] to end.
    pub(crate) async fn run<F>(
        self,
        serve: impl Fn(Visitor) -> F + Clone + Send + 'static,
        stop: impl Future<Output = ()>,
    ) where
        F: Future<Output = ()> + Send + 'static,
    {
        let (stopping, stopped) = Stop::when_dropped();
        let mut connections = JoinSet::new();
        tokio::select! {
            never = self.accept(&serve, &stopped, &mut connections) => match never {},
            () = stop => {}
        }
        // Who comes now is turned away, rather than kept waiting for somebody who does not accept.
        drop(self.listener);
        drop(stopping);
        let all_ended = async { while connections.join_next().await.is_some() {} };
        let _ended_or_cut_off = timeout(SHUTDOWN_GRACE, all_ended).await;
    }

    async fn accept<F>(
        &self,
        serve: &(impl Fn(Visitor) -> F + Clone + Send + 'static),
        stopped: &Stop,
        connections: &mut JoinSet<()>,
    ) -> Infallible
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let mut crowd = Crowd::new(self.places);
        loop {
            let (stream, peer) = match self.listener.accept().await {
                Ok(accepted) => accepted,
                Err(_) => {
                    sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            };
            while connections.try_join_next().is_some() {}
            let guest = crowd.enter().await;
            let voice = guest.voice();
            let Reception { tls, workers } = &self.reception;
            let worker = workers.choose(|threads| crowd.lively(threads));
            if let Some(worker) = worker {
                voice.is_served_by(worker);
            }
            let (serve, tls, protocol) = (serve.clone(), tls.clone(), self.protocol);
            let stop = stopped.clone();
            let serve = move |stream| async move {
                let voice = guest.voice();
                let secured = tokio::select! {
                    secured = tls.accept(stream, protocol) => secured,
                    () = stop.clone().stopped_for(QUIET_GRACE) => return,
                };
                // A connection that breaks off is its client's affair.
                if let Ok(stream) = secured {
                    serve(Visitor { stream, peer, voice, stop }).await;
                }
            };
            // A connection that cannot be handed over has broken off.
            if let Ok(connection) = workers.spawn(worker, stream, serve, connections) {
                voice.ends_with(connection);
            }
        }
    }
}
