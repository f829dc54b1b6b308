//! The whole server: configuration, listeners, reloads, shutdown.

use std::{io, net::SocketAddr, pin::pin, sync::Arc, time::Duration};

use sluicegate::{Limiter, rules::RulesError};
use sluicegate_tower::client::ClientAddress;
use tokio::{
    net::TcpListener,
    signal::unix::{self, SignalKind, signal},
    task::JoinSet,
    time::{Instant, timeout},
};

use crate::{
    auth::Access,
    config::{
        Config, ConfigError, ExplicitlyEmpty, Listen, Live, ServerSettings, Source, live,
        watch::{Reload, Watcher},
    },
    engine::Engine,
    forward_auth, grpc, http,
    key_scan::KeyScanner,
    net::{
        acceptor::AcceptConfig,
        listener::{self, ListenError},
        pending::MAX_PENDING,
        runtime::NoStealRuntime,
        shutdown::Shutdown,
        tls::{Certificates, TlsAcceptor},
    },
    observe::logs::{Audit, AuditResult, audit},
    resp,
    startup::Startup,
    store::{self, OpenError},
};

/// How long a server still answers after SIGTERM, so that load balancers can remove it: `/readyz` and gRPC health report that it
/// is not ready, and HTTP responses carry `Connection: close`.
pub const DRAIN_NOTICE: Duration = Duration::from_secs(2);

/// How many files are open apart from connections: the store, the configuration and the log. The files of
/// [`NoStealRuntime`] are added to this.
const OTHER_FILES: usize = 100;
/// How long the end of the server waits for settlements in the background.
const MAX_FLUSH: Duration = Duration::from_millis(500);

/// How many round trips to the store are measured at start-up.
const ROUND_TRIPS: usize = 5;

/// A server that has bound its addresses and does not answer yet.
pub struct Server {
    config: Config,
    watcher: Watcher,
    /// The process's limit on open files.
    max_open_files: u64,
    engine: Engine,
    access: Access,
    accept: AcceptConfig,
    startup: Startup,
    forward_auth: Live<forward_auth::Settings>,
    envoy: Live<grpc::Settings>,
    listeners: Listeners,
    addresses: Addresses,
}

/// The bound listener of each front end that is on.
struct Listeners {
    http: Option<TcpListener>,
    grpc: Option<TcpListener>,
    resp: Option<TcpListener>,
}

/// The addresses a server listens on.
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
    /// The configuration is invalid.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The rules are invalid in combination.
    #[error(transparent)]
    Rules(#[from] RulesError),
    /// The store cannot be set up.
    #[error(transparent)]
    Store(#[from] OpenError),
    /// An address cannot be bound, or a certificate is invalid.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// The operating system cannot create the threads.
    #[error("cannot start worker threads: {0}; raise ulimit -u and -n, or set TOKIO_WORKER_THREADS")]
    Threads(io::Error),
    /// A reload would remove all tokens while the server listens on an address that other machines can reach.
    #[error(
        "{0} can be reached from other machines and would accept requests without a token: keep a token while the \
         server listens there, or set insecure = true"
    )]
    Exposed(SocketAddr),
    /// A reload would remove all rules, which happens if a file is empty or partially written.
    #[error(
        "the file has no rules, which would lift all limits: restore them, or write rule = [] at the top of the file \
         to have none"
    )]
    NoRules,
    /// A reload would remove all tokens.
    #[error(
        "the file has no tokens, which would allow every call without one: restore them, or write token = [] under \
         [server] to have none"
    )]
    NoTokens,
}

impl Addresses {
    /// Returns an address that other machines can reach.
    fn exposed(self) -> Option<SocketAddr> {
        let all = [self.http, self.grpc, self.resp];
        all.into_iter().flatten().find(|address| !address.ip().to_canonical().is_loopback())
    }
}

/// The signals that the server handles.
pub struct Signals {
    terminate: unix::Signal,
    interrupt: unix::Signal,
    hangup: unix::Signal,
}

enum Signal {
    Stop(StopMode),
    Reload,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StopMode {
    /// SIGTERM: with [`DRAIN_NOTICE`].
    Drain,
    /// SIGINT: without.
    Now,
}

impl Signals {
    /// Starts to listen for signals.
    ///
    /// # Errors
    /// When the operating system does not permit it.
    pub fn listen() -> io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
        })
    }

    async fn next(&mut self) -> Signal {
        tokio::select! {
            _ = self.terminate.recv() => Signal::Stop(StopMode::Drain),
            _ = self.interrupt.recv() => Signal::Stop(StopMode::Now),
            _ = self.hangup.recv() => Signal::Reload,
        }
    }
}

impl Server {
    /// Reads the configuration, sets up the store, which may be unavailable, and binds the addresses.
    ///
    /// # Errors
    /// When the configuration is invalid, or an address cannot be bound.
    pub async fn start(source: Source) -> Result<Self, StartError> {
        let (config, watcher) = Watcher::start(source).await?;
        // Before the threads start, because they open files too.
        let max_open_files = listener::raise_open_files_limit();
        let engine = engine(&config)?;
        engine.observer().reloads().succeeded();
        let is_remote = engine.limiter().is_remote();
        let accept = AcceptConfig {
            tls: TlsAcceptor::new(config.server.tls.as_ref())?,
            // Without work stealing only if decisions never wait: see `net::runtime`.
            runtime: if is_remote {
                None
            } else {
                Some(NoStealRuntime::start().map_err(StartError::Threads)?)
            },
            shutdown: Shutdown::default(),
            max_connections: config.server.max_connections,
            max_connections_per_address: config.server.max_connections_per_address,
        };
        let startup = if is_remote { Startup::waiting() } else { Startup::default() };
        let (listeners, addresses) = bind(&config.server).await?;
        Ok(Self {
            max_open_files,
            engine,
            access: Access::new(config.server.tokens.clone()),
            accept,
            startup,
            forward_auth: live(forward_auth_settings(&config.server)),
            envoy: live(envoy_settings(&config.server)),
            listeners,
            addresses,
            config,
            watcher,
        })
    }

    /// The configuration it was started with.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The addresses it listens on.
    pub fn addresses(&self) -> Addresses {
        self.addresses
    }

    /// Serves until a signal stops it. Applies changes of the configuration.
    pub async fn run(mut self, mut signals: Signals) {
        self.log_warnings();
        self.warn_if_few_files();
        let (mut front_ends, grpc_services) = self.spawn_front_ends().await;
        let engine = self.engine.clone();
        let history = tokio::spawn(async move { engine.record_history().await });
        let key_scan = KeyScanner::new(&self.config.store).map(|scanner| {
            let engine = self.engine.clone();
            tokio::spawn(async move { scanner.run(engine.observer().key_scans()).await })
        });
        let (engine, startup) = (self.engine.clone(), self.startup.clone());
        let reach_store = tokio::spawn(async move {
            startup.reach_store(|| engine.limiter().warm_up()).await;
            warn_if_slow(&engine).await;
        });
        let startup = self.startup.clone();
        let mut ready = pin!(startup.ready());
        let mut is_starting = true;
        let reloader = self.watcher.reloader();
        let mode = loop {
            tokio::select! {
                () = &mut ready, if is_starting => {
                    is_starting = false;
                    if let Some(services) = &grpc_services {
                        services.set_ready().await;
                    }
                }
                signal = signals.next() => match signal {
                    Signal::Stop(mode) => break mode,
                    Signal::Reload => reloader.reload_now(),
                },
                reload = self.watcher.next() => self.apply(reload),
            }
        };
        self.accept.shutdown.drain();
        if mode == StopMode::Drain {
            // A second signal ends the notice early.
            let _elapsed_or_signal = timeout(DRAIN_NOTICE, signals.next()).await;
        }
        self.accept.shutdown.stop();
        while front_ends.join_next().await.is_some() {}
        self.engine.limiter().return_leases().await;
        self.flush_settlements().await;
        history.abort();
        reach_store.abort();
        if let Some(key_scan) = key_scan {
            key_scan.abort();
        }
    }

    fn log_warnings(&self) {
        let Config { warnings, policy_warning, .. } = &self.config;
        for warning in warnings.iter().chain(policy_warning) {
            tracing::warn!("{warning}");
        }
    }

    /// Waits for settlements in the background, and logs those that the store does not answer: they are lost with this process.
    async fn flush_settlements(&self) {
        let left = self.engine.limiter().flush_settlements(MAX_FLUSH).await;
        if left > 0 {
            tracing::warn!(
                "{left} settlements lost: the store did not answer before shutdown; their holds will expire"
            );
        }
    }

    fn warn_if_few_files(&self) {
        let threads = self.accept.runtime.as_ref().map_or(0, NoStealRuntime::files);
        let front_ends =
            [http::server::MAX_CONNECTIONS, grpc::server::MAX_CONNECTIONS, resp::MAX_CONNECTIONS];
        let connections: usize =
            front_ends.iter().map(|&default| self.accept.max_connections(default) + MAX_PENDING).sum();
        let (limit, needed) = (self.max_open_files, (connections + OTHER_FILES) as u64 + threads);
        if limit < needed {
            tracing::warn!(
                "the limit on open files is {limit}, too low for all connections: raise it to {needed} (ulimit -n, LimitNOFILE)"
            );
        }
    }

    /// Starts the front ends. Each ends after the shutdown stops the server.
    async fn spawn_front_ends(&mut self) -> (JoinSet<()>, Option<grpc::Services>) {
        let mut front_ends = JoinSet::new();
        let mut grpc_services = None;
        if let Some(listener) = self.listeners.http.take() {
            let settings = http::Settings {
                access: self.access.clone(),
                startup: self.startup.clone(),
                shutdown: self.accept.shutdown.clone(),
                forward_auth: Arc::clone(&self.forward_auth),
                untrusted_peers: forward_auth::UntrustedPeers::default(),
            };
            let service = http::HttpService::new(self.engine.clone(), settings);
            front_ends.spawn(http::server::run(listener, service, self.accept.clone()));
        }
        if let Some(listener) = self.listeners.grpc.take() {
            let services =
                grpc::Services::new(self.engine.clone(), Arc::clone(&self.envoy), self.access.clone()).await;
            if !self.startup.is_ready() {
                services.set_not_ready().await;
            }
            grpc_services = Some(services.clone());
            front_ends.spawn(grpc::server::run(listener, services, self.accept.clone()));
        }
        if let Some(listener) = self.listeners.resp.take() {
            let endpoint = resp::Endpoint::new(self.engine.clone(), self.access.clone());
            front_ends.spawn(resp::server::run(listener, endpoint, self.accept.clone()));
        }
        (front_ends, grpc_services)
    }

    /// Applies a changed configuration, all of it or nothing.
    fn apply(&mut self, reload: Reload) {
        let changed = match reload {
            Reload::Changed { config, needs_restart } => {
                self.adopt(*config).map(|()| needs_restart).map_err(|error| error.to_string())
            }
            Reload::Rejected(error) => Err(error.to_string()),
        };
        let reloads = self.engine.observer().reloads();
        match &changed {
            Ok(needs_restart) => {
                reloads.succeeded();
                self.log_warnings();
                for setting in needs_restart {
                    tracing::warn!(setting, "this change takes effect at the next restart");
                }
            }
            Err(error) => {
                reloads.failed();
                tracing::error!("configuration rejected, keeping the previous one: {error}");
            }
        }
        let result = match &changed {
            Ok(_) => AuditResult::Done,
            Err(error) => AuditResult::Rejected(error),
        };
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
        let certificates = config.server.tls.as_ref().map(Certificates::parse).transpose()?;
        self.engine.limiter().reconfigure(config.rules.iter().cloned())?;
        self.engine.set_label_policy(config.labels.clone());
        if let Some(certificates) = certificates {
            self.accept.tls.replace(certificates);
        }
        self.access.replace(config.server.tokens.clone());
        self.forward_auth.store(Arc::new(forward_auth_settings(&config.server)));
        self.envoy.store(Arc::new(envoy_settings(&config.server)));
        self.config = config;
        Ok(())
    }
}

/// Builds the engine of a configuration. Its store may be unavailable.
///
/// # Errors
/// When the rules are invalid in combination, or the store cannot be set up.
pub fn engine(config: &Config) -> Result<Engine, StartError> {
    let store = store::open(&config.store)?;
    let options = config.store.options();
    let engine =
        Engine::new(Limiter::builder().store(store).rules(config.rules.clone()).options(options).build()?);
    engine.set_label_policy(config.labels.clone());
    Ok(engine)
}

async fn bind(server: &ServerSettings) -> Result<(Listeners, Addresses), ListenError> {
    let (http, http_address) = bind_one(server.http).await?.unzip();
    let (grpc, grpc_address) = bind_one(server.grpc).await?.unzip();
    let (resp, resp_address) = bind_one(server.resp).await?.unzip();
    let addresses = Addresses { http: http_address, grpc: grpc_address, resp: resp_address };
    Ok((Listeners { http, grpc, resp }, addresses))
}

async fn bind_one(listen: Listen) -> Result<Option<(TcpListener, SocketAddr)>, ListenError> {
    match listen {
        Listen::Off => Ok(None),
        Listen::Address(address) => listener::bind(address).await.map(Some),
    }
}

/// Measures the round trip to the store, and logs a warning if it takes much of the deadline.
async fn warn_if_slow(engine: &Engine) {
    let mut shortest = Duration::MAX;
    for _ in 0..ROUND_TRIPS {
        let sent = Instant::now();
        if engine.limiter().warm_up().await.is_err() {
            return;
        }
        shortest = shortest.min(sent.elapsed());
    }
    engine.limiter().warn_if_slow(shortest);
}

fn forward_auth_settings(server: &ServerSettings) -> forward_auth::Settings {
    let client = ClientAddress::trusting_networks(server.trusted_proxies.clone());
    forward_auth::Settings { client, dialect: server.headers }
}

fn envoy_settings(server: &ServerSettings) -> grpc::Settings {
    grpc::Settings { headers: server.headers, closed: server.envoy_closed }
}
