//! The connection to one server: established on first use, shared by all callers, re-established when lost.
//!
//! A request without an answer is reported as rejected, not sent, or lost. No request is sent twice, except a script that the server
//! did not have. A connection that has been silent for a second is pinged, and dropped without a reply.

use std::{fmt, sync::Arc, time::Duration};

use parking_lot::Mutex;
use redis::{
    AsyncConnectionConfig, Cmd, ConnectionAddr, IntoConnectionInfo, RedisConnectionInfo, TlsCertificates,
    Value,
    aio::{ConnectionLike, MultiplexedConnection, PubSub},
    io::tcp::TcpSettings,
};
use tokio::{
    sync::watch,
    task::yield_now,
    time::{Instant, sleep_until, timeout, timeout_at},
};

use sluicegate_core::Timestamp;

use super::{
    RedisSetupError,
    clock_offset::ClockOffset,
    health::{self, HealthCounters, ServerInfo},
    script::{Call, DIGEST, ReplyHeader, SOURCE, read_header},
    sentinel::Sentinels,
    settings::{Credentials, DEFAULT_CLIENT_NAME, RedisSettings},
    url::Node,
};
use crate::{hashing::random, store::StoreError};

/// How long one attempt to connect may take.
pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// How long the client waits for a reply; callers give up sooner.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(5);
/// Minimum time between the starts of two attempts: at most two connections per second to any server.
const ATTEMPT_SPACING: Duration = Duration::from_millis(500);
/// Maximum random delay of the next attempt, so that clients do not connect at the same time.
const MAX_JITTER: Duration = Duration::from_millis(500);
/// How long before its deadline a call stops waiting for a connection, so that it is reported as not sent.
const CONNECT_MARGIN: Duration = Duration::from_millis(1);
/// How long a reply may be outstanding before the connection is pinged, and how long the ping may take.
const MAX_SILENCE: Duration = Duration::from_secs(1);
/// The longest client name.
const MAX_CLIENT_NAME: usize = 64;

/// Why a request has no answer.
#[derive(Clone, Debug)]
pub(super) enum CallFailure {
    /// The server replied with an error; the request did not run.
    Rejected { code: String, detail: String },
    /// The request was not sent.
    NotSent(String),
    /// The request was sent, and whether it ran is unknown.
    ReplyLost(String),
}

impl CallFailure {
    pub(super) fn is(&self, wanted: &str) -> bool {
        matches!(self, Self::Rejected { code, .. } if code == wanted)
    }
}

impl From<CallFailure> for StoreError {
    fn from(failure: CallFailure) -> Self {
        match failure {
            CallFailure::Rejected { code, detail } => Self::Rejected { code, detail },
            CallFailure::NotSent(reason) => Self::NotRun(reason),
            CallFailure::ReplyLost(reason) => Self::Ambiguous(reason),
        }
    }
}

/// A request to a server.
#[derive(Clone, Copy)]
pub(super) enum RedisRequest<'a> {
    Script(&'a Call),
    Command(&'a Cmd),
}

/// Whether a request is preceded by `ASKING`, because its slot is being migrated to the node.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Asking {
    No,
    Yes,
}

/// Connects to any server of a deployment.
pub(super) struct Connector {
    /// An address whose TLS parameters apply to all servers; absent without TLS.
    tls: Option<ConnectionAddr>,
    redis: RedisConnectionInfo,
    client_name: String,
    health: HealthCounters,
}

impl Connector {
    /// Returns the health counters of the servers.
    pub(super) fn health(&self) -> &HealthCounters {
        &self.health
    }

    pub(super) fn new(
        is_tls: bool,
        credentials: &Credentials,
        database: u32,
        settings: &RedisSettings,
    ) -> Result<Self, RedisSetupError> {
        let client_name = settings.client_name.clone().unwrap_or_else(|| DEFAULT_CLIENT_NAME.to_owned());
        let is_visible = client_name.bytes().all(|byte| byte.is_ascii_graphic());
        if client_name.is_empty() || client_name.len() > MAX_CLIENT_NAME || !is_visible {
            return Err(RedisSetupError::ClientName(client_name));
        }
        let mut redis = RedisConnectionInfo::default()
            .set_db(database.into())
            .set_lib_name("sluicegate", env!("CARGO_PKG_VERSION"));
        if let Some(password) = &credentials.password {
            redis = redis.set_password(password.reveal());
            if let Some(user) = &credentials.user {
                redis = redis.set_username(user);
            }
        } else if credentials.user.is_some() {
            return Err(RedisSetupError::Credentials);
        }
        Ok(Self { tls: tls(is_tls, settings)?, redis, client_name, health: HealthCounters::default() })
    }

    fn client(&self, node: &Node) -> redis::RedisResult<redis::Client> {
        let Node { host, port } = node.clone();
        let addr = match &self.tls {
            Some(ConnectionAddr::TcpTls { tls_params, .. }) => {
                ConnectionAddr::TcpTls { host, port, insecure: false, tls_params: tls_params.clone() }
            }
            _ => ConnectionAddr::Tcp(host, port),
        };
        let info = addr.into_connection_info()?.set_redis_settings(self.redis.clone());
        // Nagle's algorithm would delay a call until the previous reply has arrived.
        redis::Client::open(info.set_tcp_settings(TcpSettings::default().set_nodelay(true)))
    }

    /// Connects, and returns once the server has answered a command.
    pub(super) async fn connect(&self, node: &Node) -> Result<MultiplexedConnection, String> {
        let failed = |error: redis::RedisError| format!("cannot connect to {node}: {error}");
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(CONNECT_TIMEOUT))
            .set_response_timeout(Some(RESPONSE_TIMEOUT));
        let client = self.client(node).map_err(failed)?;
        let mut connection =
            client.get_multiplexed_async_connection_with_config(&config).await.map_err(failed)?;
        let mut name = redis::cmd("CLIENT");
        match name.arg("SETNAME").arg(&self.client_name).exec_async(&mut connection).await {
            // the name is optional, and the user may lack the permission
            Err(error) if error.code().is_none_or(|code| code == "NOAUTH") => Err(failed(error)),
            _ => Ok(connection),
        }
    }

    /// Connects for subscriptions.
    pub(super) async fn subscribe(&self, node: &Node) -> redis::RedisResult<PubSub> {
        self.client(node)?.get_async_pubsub().await
    }
}

fn tls(is_tls: bool, settings: &RedisSettings) -> Result<Option<ConnectionAddr>, RedisSetupError> {
    let RedisSettings { authority, identity, .. } = settings;
    if !is_tls {
        return match (authority, identity) {
            (None, None) => Ok(None),
            _ => Err(RedisSetupError::Tls("certificates are set, but the URL does not use TLS".into())),
        };
    }
    // fails if the application has installed a provider, which then stays in use
    let _ = rustls::crypto::ring::default_provider().install_default();
    if authority
        .as_ref()
        .is_some_and(|pem| !pem.windows(27).any(|part| part == b"-----BEGIN CERTIFICATE-----"))
    {
        return Err(RedisSetupError::Tls(
            "the PEM of the certificate authority contains no certificate".into(),
        ));
    }
    let certificates = TlsCertificates {
        root_cert: authority.clone(),
        client_tls: identity.as_ref().map(|identity| redis::ClientTlsConfig {
            client_cert: identity.certificate.clone(),
            client_key: identity.key.clone(),
        }),
    };
    let invalid = |error: redis::RedisError| RedisSetupError::Tls(error.to_string());
    let placeholder =
        ConnectionAddr::TcpTls { host: "localhost".into(), port: 0, insecure: false, tls_params: None };
    let client = redis::Client::build_with_tls(placeholder, certificates).map_err(invalid)?;
    Ok(Some(client.get_connection_info().addr().clone()))
}

/// The server to connect to.
pub(super) enum Target {
    /// Always the same server.
    Fixed(Node),
    /// The primary that the sentinels name, once it confirms its role.
    Primary(Arc<Sentinels>),
}

/// The connection that all callers share.
pub(super) struct ServerConnection {
    connector: Arc<Connector>,
    target: Target,
    state: Mutex<ConnectionState>,
    /// The last information that the server returned.
    server_info: Mutex<Option<ServerInfo>>,
}

type Outcome = Option<Result<Established, String>>;

enum ConnectionState {
    /// The next caller starts an attempt.
    Disconnected(Backoff),
    /// An attempt starts when the backoff has elapsed. `named` is the primary that the sentinels have named meanwhile.
    Connecting {
        outcome: watch::Receiver<Outcome>,
        backoff: Backoff,
        named: Option<Node>,
    },
    Connected(Established),
}

/// The earliest time of the next attempt. Until then, callers fail with the reason if there is one; otherwise they wait.
#[derive(Clone)]
struct Backoff {
    until: Instant,
    reason: Option<String>,
}

/// An established connection.
#[derive(Clone)]
pub(super) struct Established {
    pub(super) connection: MultiplexedConnection,
    node: Arc<Node>,
    since: Instant,
    /// Since when a reply is outstanding, without any reply in between.
    silent_since: Arc<Mutex<Option<Instant>>>,
    /// The offset of the server's clock. Another connection may have another server.
    offset: Arc<ClockOffset>,
}

impl Established {
    fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.silent_since, &other.silent_since)
    }
}

impl ServerConnection {
    pub(super) fn new(connector: Arc<Connector>, target: Target) -> Arc<Self> {
        let state = ConnectionState::Disconnected(Backoff { until: Instant::now(), reason: None });
        Arc::new(Self { connector, target, state: Mutex::new(state), server_info: Mutex::default() })
    }

    pub(super) fn connector(&self) -> &Connector {
        &self.connector
    }

    /// Sends a request. A script is sent by its digest first, and in full if the server does not have it.
    pub(super) async fn send(
        self: &Arc<Self>,
        request: RedisRequest<'_>,
        asking: Asking,
    ) -> Result<Value, CallFailure> {
        match request {
            RedisRequest::Command(command) => {
                let mut established = self.established().await.map_err(CallFailure::NotSent)?;
                self.send_command(&mut established, command, asking).await
            }
            RedisRequest::Script(call) => {
                let mut established =
                    self.established_by(call.process_deadline()).await.map_err(CallFailure::NotSent)?;
                self.send_script(&mut established, call, asking).await
            }
        }
    }

    /// Sends a script with a deadline on the server's clock. If the server reports it as late although the deadline has not passed
    /// here, the script is sent once more: it did not run, and the known clock offset was wrong.
    async fn send_script(
        self: &Arc<Self>,
        established: &mut Established,
        call: &Call,
        asking: Asking,
    ) -> Result<Value, CallFailure> {
        let (by, mut is_corrected) = (call.process_deadline(), false);
        loop {
            let deadline = by.and_then(|by| established.offset.server_time(by));
            let sent = Instant::now();
            let by_digest = script(call, deadline, "EVALSHA", &DIGEST);
            let reply = match self.send_command(established, &by_digest, asking).await {
                Err(failure) if failure.is("NOSCRIPT") => {
                    HealthCounters::add(&self.connector.health.script_reloads, 1);
                    self.send_command(established, &script(call, deadline, "EVAL", SOURCE), asking).await?
                }
                reply => reply?,
            };
            let received = Instant::now();
            let Some(ReplyHeader { is_late, at }) = header_of(&reply) else { return Ok(reply) };
            if !is_late {
                established.offset.record(at, sent, received);
                return Ok(reply);
            }
            established.offset.correct(at, sent, received);
            if is_corrected || by.is_none_or(|by| received >= by) {
                return Ok(reply);
            }
            is_corrected = true;
        }
    }

    async fn send_command(
        self: &Arc<Self>,
        established: &mut Established,
        command: &Cmd,
        asking: Asking,
    ) -> Result<Value, CallFailure> {
        self.ping_if_silent(established);
        let reply = match asking {
            Asking::No => established.connection.req_packed_command(command).await,
            Asking::Yes => {
                // one write, so that no request of another caller comes between the two
                let mut both = redis::pipe();
                both.cmd("ASKING").add_command(command.clone());
                let replies = established.connection.req_packed_commands(&both, 1, 1).await;
                replies.map(|mut replies| replies.pop().unwrap_or(Value::Nil))
            }
        };
        let error = match reply {
            Ok(Value::ServerError(error)) => error.into(),
            Ok(value) => {
                *established.silent_since.lock() = None;
                return Ok(value);
            }
            Err(error) => error,
        };
        let Some(code) = error.code().map(str::to_owned) else {
            self.disconnect(established, None);
            return Err(CallFailure::ReplyLost(format!("{}: {error}", established.node)));
        };
        *established.silent_since.lock() = None;
        let (code, detail) = unwrap_script_error(code, error.detail().unwrap_or_default().to_owned());
        match &*code {
            // the server is a replica now, or the user changed: only a new connection can help
            "READONLY" => self.disconnect(established, None),
            "NOAUTH" | "WRONGPASS" | "NOPERM" => {
                self.disconnect(established, Some(format!("{code} {detail}")))
            }
            _ => {}
        }
        Err(CallFailure::Rejected { code, detail })
    }

    /// Connects if necessary; returns the reason if that fails.
    pub(super) async fn ready(self: &Arc<Self>) -> Result<(), String> {
        self.established().await.map(|_| ())
    }

    /// Returns whether this is the current connection.
    pub(super) fn is_current(&self, established: &Established) -> bool {
        matches!(&*self.state.lock(), ConnectionState::Connected(current) if current.is(established))
    }

    /// Records the information that the server returned.
    pub(super) fn record_info(&self, established: &Established, server_info: ServerInfo) {
        let mut last = self.server_info.lock();
        *last = Some(server_info.record(last.take(), &established.node, &self.connector.health));
    }

    /// Converts a moment of this process to the server's clock, if its offset is known.
    pub(super) fn server_time(&self, moment: Instant) -> Option<Timestamp> {
        match &*self.state.lock() {
            ConnectionState::Connected(established) => established.offset.server_time(moment),
            ConnectionState::Disconnected(_) | ConnectionState::Connecting { .. } => None,
        }
    }

    /// Returns whether a connection is established.
    pub(super) fn is_up(&self) -> bool {
        matches!(&*self.state.lock(), ConnectionState::Connected(_))
    }

    /// Drops the connection and reconnects unless it is to this node. An attempt in progress may have started before the node was
    /// known.
    pub(super) fn follow(self: &Arc<Self>, node: &Node) {
        let elsewhere = match &mut *self.state.lock() {
            ConnectionState::Connected(established) if *established.node != *node => {
                Some(established.clone())
            }
            ConnectionState::Connecting { named, .. } => {
                *named = Some(node.clone());
                None
            }
            ConnectionState::Connected(_) | ConnectionState::Disconnected(_) => None,
        };
        if let Some(established) = elsewhere {
            self.disconnect(&established, None);
            let connection = Arc::clone(self);
            tokio::spawn(async move { connection.established().await.map(|_| ()) });
        }
    }

    /// Returns the connection, or an error shortly before the deadline.
    async fn established_by(self: &Arc<Self>, by: Option<Instant>) -> Result<Established, String> {
        if let ConnectionState::Connected(established) = &*self.state.lock() {
            return Ok(established.clone());
        }
        let Some(by) = by else { return self.established().await };
        match timeout_at(by - CONNECT_MARGIN, self.established()).await {
            Ok(established) => established,
            Err(_) => Err(format!("no connection to {} before the deadline", self.target)),
        }
    }

    async fn established(self: &Arc<Self>) -> Result<Established, String> {
        loop {
            let mut outcome = match self.established_or_attempt() {
                Ok(Ok(established)) => return Ok(established),
                Ok(Err(outcome)) => outcome,
                Err(reason) => {
                    // a caller that retries in a loop must yield to the task that connects
                    yield_now().await;
                    return Err(reason);
                }
            };
            if let Ok(outcome) = outcome.wait_for(Option::is_some).await {
                return outcome.clone().expect("the outcome is present after the wait");
            }
            // the runtime of the attempt has shut down
            let mut state = self.state.lock();
            if matches!(&*state, ConnectionState::Connecting { outcome: current, .. } if current.same_channel(&outcome))
            {
                *state = ConnectionState::Disconnected(Backoff { until: Instant::now(), reason: None });
            }
        }
    }

    fn established_or_attempt(
        self: &Arc<Self>,
    ) -> Result<Result<Established, watch::Receiver<Outcome>>, String> {
        let mut state = self.state.lock();
        if let ConnectionState::Disconnected(backoff) = &*state {
            let (outcome, backoff) = (self.attempt(backoff.until), backoff.clone());
            *state = ConnectionState::Connecting { outcome, backoff, named: None };
        }
        match &*state {
            ConnectionState::Connected(established) => Ok(Ok(established.clone())),
            ConnectionState::Connecting { backoff: Backoff { until, reason: Some(reason) }, .. }
                if Instant::now() < *until =>
            {
                Err(reason.clone())
            }
            ConnectionState::Connecting { outcome, .. } => Ok(Err(outcome.clone())),
            ConnectionState::Disconnected(_) => unreachable!("an attempt has just started"),
        }
    }

    /// Connects in a separate task, because callers may be cancelled.
    fn attempt(self: &Arc<Self>, not_before: Instant) -> watch::Receiver<Outcome> {
        let (sender, outcome) = watch::channel(None);
        let connection = Arc::clone(self);
        tokio::spawn(async move {
            sleep_until(not_before).await;
            loop {
                let (result, since) = connection.connect().await;
                if connection.settle(&result, since) {
                    if let Ok(established) = &result {
                        HealthCounters::add(&connection.connector.health.connections, 1);
                        tokio::spawn(health::watch(Arc::downgrade(&connection), established.clone()));
                    }
                    sender.send_replace(Some(result));
                    return;
                }
            }
        });
        outcome
    }

    /// Tries to connect. Also returns the start of the attempt.
    async fn connect(&self) -> (Result<Established, String>, Instant) {
        let since = Instant::now();
        let result = match timeout(CONNECT_TIMEOUT, self.establish()).await {
            Ok(Ok((node, connection))) => {
                let (node, silent_since, offset) = (Arc::new(node), Arc::default(), Arc::default());
                Ok(Established { connection, node, since, silent_since, offset })
            }
            Ok(Err(reason)) => Err(reason),
            Err(_) => Err(format!("cannot connect to {}: no answer within {CONNECT_TIMEOUT:?}", self.target)),
        };
        (result, since)
    }

    /// Records the result of an attempt. Returns false, and discards the connection, if the sentinels have named another primary
    /// meanwhile.
    fn settle(&self, result: &Result<Established, String>, since: Instant) -> bool {
        let mut state = self.state.lock();
        if let (Ok(established), ConnectionState::Connecting { named, .. }) = (result, &mut *state)
            && named.take().is_some_and(|named| named != *established.node)
        {
            return false;
        }
        *state = match result {
            Ok(established) => ConnectionState::Connected(established.clone()),
            Err(reason) => ConnectionState::Disconnected(Backoff {
                until: next_attempt(since),
                reason: Some(reason.clone()),
            }),
        };
        true
    }

    async fn establish(&self) -> Result<(Node, MultiplexedConnection), String> {
        match &self.target {
            Target::Fixed(node) => Ok((node.clone(), self.connector.connect(node).await?)),
            Target::Primary(sentinels) => sentinels.connect(&self.connector).await,
        }
    }

    fn disconnect(&self, established: &Established, reason: Option<String>) {
        let mut state = self.state.lock();
        if matches!(&*state, ConnectionState::Connected(current) if current.is(established)) {
            *state =
                ConnectionState::Disconnected(Backoff { until: next_attempt(established.since), reason });
        }
    }

    /// Pings the server if a reply has been outstanding for too long. The network may lose a peer without an error, and callers give
    /// up long before the client does.
    fn ping_if_silent(self: &Arc<Self>, established: &Established) {
        let now = Instant::now();
        let mut silent_since = established.silent_since.lock();
        let since = *silent_since.get_or_insert(now);
        if now.duration_since(since) < MAX_SILENCE {
            return;
        }
        *silent_since = Some(now);
        let (connection, mut established) = (Arc::clone(self), established.clone());
        tokio::spawn(async move {
            let ping = redis::cmd("PING");
            match timeout(MAX_SILENCE, established.connection.req_packed_command(&ping)).await {
                Ok(Ok(_)) => *established.silent_since.lock() = None,
                Ok(Err(_)) | Err(_) => connection.disconnect(&established, None),
            }
        });
    }
}

/// Returns the error of a command within a script, which Redis 6.2 wraps: `ERR Error running script (…): @user_script: 9: -OOM command …`.
fn unwrap_script_error(code: String, detail: String) -> (String, String) {
    let inner = detail.strip_prefix("Error running script").and_then(|rest| rest.split_once(": -"));
    match inner.and_then(|(_, inner)| inner.split_once(' ')) {
        Some((inner, rest)) if inner.bytes().all(|byte| byte.is_ascii_uppercase()) => {
            (inner.to_owned(), rest.to_owned())
        }
        _ => (code, detail),
    }
}

fn script(call: &Call, deadline: Option<Timestamp>, command: &str, script: &str) -> Cmd {
    let mut request = redis::cmd(command);
    request.arg(script);
    call.write_to(&mut request, deadline);
    request
}

fn header_of(reply: &Value) -> Option<ReplyHeader> {
    match reply {
        Value::BulkString(reply) => read_header(reply),
        _ => None,
    }
}

/// Returns the earliest start of the next attempt after one that started at `since`.
fn next_attempt(since: Instant) -> Instant {
    since + ATTEMPT_SPACING + jitter()
}

/// Returns a random delay up to [`MAX_JITTER`].
pub(super) fn jitter() -> Duration {
    let fraction = u16::try_from(random() >> 48).expect("the highest 16 bits");
    MAX_JITTER * u32::from(fraction) / (1 << 16)
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fixed(node) => write!(f, "{node}"),
            Self::Primary(sentinels) => write!(f, "the primary {:?}", sentinels.name()),
        }
    }
}
