//! The whole server: from its configuration, through every change of it, to its end.

use std::{future::Future, io, net::SocketAddr, pin::pin, sync::Arc, time::Duration};

use tokio::{
    net::TcpListener,
    signal::unix::{Signal, SignalKind, signal},
    sync::watch,
    task::JoinSet,
    time::Instant,
};
use tollgate::{Limiter, RulesError, Store};
use tollgate_tower::client::ClientAddress;

use crate::{
    auth::Access,
    config::{
        Config, ConfigError, ExplicitlyEmpty, Listen, Live, ServerSettings, Source, live,
        watch::{Reload, Watcher},
    },
    connections::Reception,
    desk::Desk,
    forward_auth, grpc, http,
    listen::{self, Certificates, ListenError, Security},
    observe::logs::{Audit, audit},
    resp,
    serve::{self, Draining},
    startup::Startup,
    store::{AnyStore, OpenError},
    workers::Workers,
};

/// How long a server that is told to stop goes on answering, so that whoever sends it requests finds out first: `/readyz`
/// says so, and every answer asks to connect elsewhere next.
pub const DRAIN_NOTICE: Duration = Duration::from_secs(2);

/// So many files are open when all front ends have all the connections they may have, with some left for the store, the
/// configuration and the log; those of [`Workers`] come on top.
const NEEDED_FILES: u64 =
    (serve::MAX_CONNECTIONS + resp::MAX_CONNECTIONS + grpc::serve::MAX_CONNECTIONS + 100) as u64;

/// How many round trips to the store are measured at start-up.
const ROUND_TRIPS: usize = 5;

/// A server that has its addresses, and does not answer yet.
pub struct Tollgate {
    config: Config,
    watcher: Watcher,
    /// How many files the process may have open.
    files: u64,
    desk: Desk<AnyStore>,
    access: Access,
    reception: Reception,
    startup: Startup,
    draining: Draining,
    gatehouse: Live<forward_auth::Settings>,
    envoy: Live<grpc::Settings>,
    http: Option<serve::Server>,
    grpc: Option<(TcpListener, SocketAddr)>,
    resp: Option<(TcpListener, SocketAddr)>,
    addresses: Addresses,
}

/// Where a server listens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Addresses {
    /// JSON API, forward-auth, metrics.
    pub http: Option<SocketAddr>,
    /// Envoy's rate limit service.
    pub grpc: Option<SocketAddr>,
    /// The Redis protocol.
    pub resp: Option<SocketAddr>,
}

/// Why a server cannot start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// The configuration cannot be used.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Its rules cannot be used together.
    #[error(transparent)]
    Rules(#[from] RulesError),
    /// The store cannot be set up.
    #[error(transparent)]
    Store(#[from] OpenError),
    /// An address or a certificate cannot be used.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// The system does not let it have its threads.
    #[error(
        "cannot start the threads that serve connections: {0}; see ulimit -u and -n, or set TOKIO_WORKER_THREADS"
    )]
    Threads(io::Error),
    /// It would let everybody in where it listens now.
    #[error(
        "{0} can be reached from other machines, and would be open to everybody without a token: keep one as long as the \
         server listens there, or set insecure = true"
    )]
    Exposed(SocketAddr),
    /// A reload would lift all limits, as a file that is empty or half written does.
    #[error(
        "the file has no rules, which would lift all limits: restore them, or write rule = [] at the top of the file \
         to have none"
    )]
    NoRules,
    /// A reload would let everybody in who can connect.
    #[error(
        "the file has no tokens, which would allow every call without one: restore them, or write token = [] under \
         [server] to have none"
    )]
    NoTokens,
}

impl Addresses {
    /// One that other machines can reach.
    fn exposed(self) -> Option<SocketAddr> {
        let all = [self.http, self.grpc, self.resp];
        all.into_iter().flatten().find(|address| !address.ip().to_canonical().is_loopback())
    }
}

/// What the system tells the process to do.
pub struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
}

/// What a signal says.
enum Told {
    ToStop(Stop),
    ToReload,
}

/// How to stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stop {
    /// In good order: SIGTERM.
    Drain,
    /// At once: Ctrl-C.
    Now,
}

impl Signals {
    /// Listens for signals from now on.
    ///
    /// # Errors
    /// When the system does not let the process do so.
    pub fn listen() -> io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
        })
    }

    async fn next(&mut self) -> Told {
        tokio::select! {
            _ = self.terminate.recv() => Told::ToStop(Stop::Drain),
            _ = self.interrupt.recv() => Told::ToStop(Stop::Now),
            _ = self.hangup.recv() => Told::ToReload,
        }
    }
}

impl Tollgate {
    /// Reads the configuration, sets up the store, which may be away, and takes the addresses.
    ///
    /// # Errors
    /// When something of it is wrong, or an address is taken.
    pub async fn start(source: Source) -> Result<Self, StartError> {
        let (config, watcher) = Watcher::start(source).await?;
        // first of all: threads that serve connections have files too
        let files = listen::allow_open_files();
        let desk = desk(&config)?;
        desk.observer().reloads().succeeded();
        let reception = Reception {
            security: Security::new(config.server.tls.as_ref())?,
            workers: workers(&desk).map_err(StartError::Threads)?,
        };
        let startup =
            if desk.limiter().store().is_remote() { Startup::waiting() } else { Startup::default() };
        let draining = Draining::default();
        let http = match config.server.http {
            Listen::Off => None,
            Listen::Address(address) => {
                let server = serve::Server::bind(address).await?;
                Some(server.receiving(reception.clone()).draining(draining.clone()))
            }
        };
        let (grpc, resp) = (bind(config.server.grpc).await?, bind(config.server.resp).await?);
        let address = |bound: &Option<(TcpListener, SocketAddr)>| bound.as_ref().map(|(_, address)| *address);
        let addresses = Addresses {
            http: http.as_ref().map(serve::Server::address),
            grpc: address(&grpc),
            resp: address(&resp),
        };
        Ok(Self {
            files,
            desk,
            access: Access::new(config.server.tokens.clone()),
            reception,
            startup,
            draining,
            gatehouse: live(gatehouse(&config.server)),
            envoy: live(envoy(&config.server)),
            http,
            grpc,
            resp,
            addresses,
            config,
            watcher,
        })
    }

    /// What it was started with.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Where it listens.
    pub fn addresses(&self) -> Addresses {
        self.addresses
    }

    /// Answers until told to stop, and changes with its configuration.
    pub async fn run(mut self, mut signals: Signals) {
        for warning in &self.config.warnings {
            tracing::warn!("{warning}");
        }
        let (files, needed) = (self.files, NEEDED_FILES + self.reception.workers.files());
        if files < needed {
            tracing::warn!(
                "the process may have {files} files open, and each connection is one: raise that to {needed} \
                 (ulimit -n, LimitNOFILE)"
            );
        }
        let (stop, stopped) = watch::channel(());
        let (mut fronts, envoys) = self.open(&stopped).await;
        drop(stopped);
        let desk = self.desk.clone();
        let history = tokio::spawn(async move { desk.keep_history().await });
        let (desk, startup) = (self.desk.clone(), self.startup.clone());
        let reaching = tokio::spawn(async move {
            startup.reach_store(|| desk.limiter().store().warm_up()).await;
            warn_if_slow(&desk).await;
        });
        let startup = self.startup.clone();
        let mut ready = pin!(startup.ready());
        let mut is_starting = true;
        let reloader = self.watcher.reloader();
        let how = loop {
            tokio::select! {
                () = &mut ready, if is_starting => {
                    is_starting = false;
                    if let Some(envoys) = &envoys {
                        envoys.is_ready().await;
                    }
                }
                told = signals.next() => match told {
                    Told::ToStop(how) => break how,
                    Told::ToReload => reloader.reload_now(),
                },
                reload = self.watcher.next() => self.change(reload),
            }
        };
        self.draining.begin();
        if let Some(envoys) = envoys {
            envoys.is_not_ready().await;
        }
        if how == Stop::Drain {
            // whoever is in a hurry says so once more
            let _told_or_hurried = tokio::time::timeout(DRAIN_NOTICE, signals.next()).await;
        }
        drop(stop);
        while fronts.join_next().await.is_some() {}
        history.abort();
        reaching.abort();
    }

    /// Opens the front ends; each ends some time after the other side of `stopped` was dropped.
    async fn open(
        &mut self,
        stopped: &watch::Receiver<()>,
    ) -> (JoinSet<()>, Option<grpc::Services<AnyStore>>) {
        let mut fronts = JoinSet::new();
        let mut envoys = None;
        if let Some(server) = self.http.take() {
            let gatehouse = forward_auth::router(self.desk.clone(), Arc::clone(&self.gatehouse));
            let settings = http::Settings {
                access: self.access.clone(),
                startup: self.startup.clone(),
                draining: self.draining.clone(),
            };
            let routes = http::service(self.desk.clone(), settings, gatehouse);
            fronts.spawn(server.run(routes, until(stopped)));
        }
        if let Some((listener, _)) = self.grpc.take() {
            let services =
                grpc::Services::new(self.desk.clone(), Arc::clone(&self.envoy), self.access.clone()).await;
            if !self.startup.is_ready() {
                services.is_not_ready().await;
            }
            envoys = Some(services.clone());
            fronts.spawn(grpc::serve::run(listener, services, self.reception.clone(), until(stopped)));
        }
        if let Some((listener, _)) = self.resp.take() {
            let endpoint = resp::Endpoint::new(self.desk.clone(), self.access.clone());
            fronts.spawn(resp::run(listener, endpoint, self.reception.clone(), until(stopped)));
        }
        (fronts, envoys)
    }

    /// Puts another configuration in force, all of it or nothing.
    fn change(&mut self, reload: Reload) {
        let changed = match reload {
            Reload::Changed { config, needs_restart } => {
                self.adopt(*config).map(|()| needs_restart).map_err(|error| error.to_string())
            }
            Reload::Rejected(error) => Err(error.to_string()),
        };
        let reloads = self.desk.observer().reloads();
        match &changed {
            Ok(needs_restart) => {
                reloads.succeeded();
                for setting in needs_restart {
                    tracing::warn!(setting, "this change takes effect when the server is started again");
                }
            }
            Err(error) => {
                reloads.failed();
                tracing::error!("configuration rejected, keeping the previous one: {error}");
            }
        }
        let result = changed.as_ref().map(|_| ()).map_err(|error| error as &dyn std::fmt::Display);
        audit(&Audit { who: "server", from: None, action: "reload", subject: &"the configuration", result });
    }

    fn adopt(&mut self, config: Config) -> Result<(), StartError> {
        if let Some(address) = self.addresses.exposed()
            && config.server.tokens.is_empty()
            && !config.server.insecure
        {
            return Err(StartError::Exposed(address));
        }
        let ExplicitlyEmpty { rules, tokens } = config.explicitly_empty;
        if config.rules.is_empty() && !self.config.rules.is_empty() && !rules {
            return Err(StartError::NoRules);
        }
        if config.server.tokens.is_empty() && !self.config.server.tokens.is_empty() && !tokens {
            return Err(StartError::NoTokens);
        }
        let certificates = config.server.tls.as_ref().map(Certificates::read).transpose()?;
        self.desk.limiter().reconfigure(config.rules.iter().cloned())?;
        self.desk.clean_labels_by(config.labels.clone());
        if let Some(certificates) = certificates {
            self.reception.security.replace(certificates);
        }
        self.access.replace(config.server.tokens.clone());
        self.gatehouse.store(Arc::new(gatehouse(&config.server)));
        self.envoy.store(Arc::new(envoy(&config.server)));
        self.config = config;
        Ok(())
    }
}

/// What decides by a configuration: the way of a server's front ends to its store, which may be away.
///
/// # Errors
/// When the rules cannot be used together, or the store cannot be set up.
pub fn desk(config: &Config) -> Result<Desk<AnyStore>, StartError> {
    let store = AnyStore::set_up(&config.store)?;
    let desk = Desk::new(Limiter::with_options(store, config.rules.clone(), config.store.options())?);
    desk.clean_labels_by(config.labels.clone());
    Ok(desk)
}

/// Who serves connections: threads of their own where decisions are made in this process, else all together.
fn workers(desk: &Desk<AnyStore>) -> io::Result<Workers> {
    if desk.limiter().store().is_remote() { Ok(Workers::default()) } else { Workers::start() }
}

async fn bind(listen: Listen) -> Result<Option<(TcpListener, SocketAddr)>, ListenError> {
    match listen {
        Listen::Off => Ok(None),
        Listen::Address(address) => listen::bind(address).await.map(Some),
    }
}

/// Ready once the other side is dropped.
fn until(stopped: &watch::Receiver<()>) -> impl Future<Output = ()> + Send + use<> {
    let mut stopped = stopped.clone();
    async move { while stopped.changed().await.is_ok() {} }
}

/// Measures the round trip to the store, and logs if the deadline leaves little room for it.
async fn warn_if_slow(desk: &Desk<AnyStore>) {
    let mut shortest = Duration::MAX;
    for _ in 0..ROUND_TRIPS {
        let sent = Instant::now();
        if desk.limiter().store().warm_up().await.is_err() {
            return;
        }
        shortest = shortest.min(sent.elapsed());
    }
    desk.limiter().warn_if_slow(shortest);
}

fn gatehouse(server: &ServerSettings) -> forward_auth::Settings {
    let client = ClientAddress::trusting_networks(server.trusted_proxies.clone());
    forward_auth::Settings { client, dialect: server.headers }
}

fn envoy(server: &ServerSettings) -> grpc::Settings {
    grpc::Settings { headers: server.headers, closed: server.envoy_closed }
}
