//! The connection to one server: made when first needed, shared by all callers, made anew when it is lost.
//!
//! It says what became of a request: the server's word, never sent, or lost. It sends nothing twice but a script that
//! the server did not know. A connection is not health: one that has been silent for a second is asked for a
//! sign of life, and dropped without one.

use std::{
    fmt,
    hash::{BuildHasher, Hasher, RandomState},
    sync::Arc,
    time::Duration,
};

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

use tollgate_core::Timestamp;

use super::{
    RedisSetupError,
    notes::{self, About, Notes},
    offset::Offset,
    script::{Arrival, Call, DIGEST, SOURCE, arrival},
    sentinel::Sentinels,
    settings::{Credentials, DEFAULT_CLIENT_NAME, RedisSettings},
    url::Node,
};
use crate::store::StoreError;

/// How long one attempt to connect may take.
pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// How long the client waits for a reply before it gives the call up; callers give up sooner.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(5);
/// The least time between the beginnings of two attempts: at most two connections a second to any one server.
const ATTEMPT_SPACING: Duration = Duration::from_millis(500);
/// How much later the next attempt may be, so that clients do not come all at once.
const MAX_JITTER: Duration = Duration::from_millis(500);
/// How long before its deadline a call that waits for a connection is given up: its caller then knows that nothing was sent.
const GIVE_UP: Duration = Duration::from_millis(1);
/// How long a connection may owe a reply until it is asked for a sign of life, and how long that may take.
const SILENCE: Duration = Duration::from_secs(1);
/// The longest name of a client.
const MAX_CLIENT_NAME: usize = 64;

/// What became of a request that got no answer.
#[derive(Clone, Debug)]
pub(super) enum Failure {
    /// The server's word that it did not run.
    Refused { code: String, detail: String },
    /// It was never sent.
    Unreachable(String),
    /// It was sent, and nobody knows.
    Lost(String),
}

impl Failure {
    pub(super) fn is(&self, wanted: &str) -> bool {
        matches!(self, Self::Refused { code, .. } if code == wanted)
    }
}

impl From<Failure> for StoreError {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Refused { code, detail } => Self::Refused { code, detail },
            Failure::Unreachable(reason) => Self::NotRun(reason),
            Failure::Lost(reason) => Self::Ambiguous(reason),
        }
    }
}

/// What is asked of a server.
#[derive(Clone, Copy)]
pub(super) enum Request<'a> {
    Script(&'a Call),
    Command(&'a Cmd),
}

/// Whether a cluster's node is asked for a slot that is still on its way to it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Asking {
    No,
    Yes,
}

/// How to connect to any server of a set-up.
pub(super) struct Connector {
    /// An address by TLS whose certificates those of all servers share; none in the clear.
    tls: Option<ConnectionAddr>,
    redis: RedisConnectionInfo,
    client_name: String,
    notes: Notes,
}

impl Connector {
    /// What was noticed of the servers that it connects to.
    pub(super) fn notes(&self) -> &Notes {
        &self.notes
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
            .set_lib_name("tollgate", env!("CARGO_PKG_VERSION"));
        if let Some(password) = &credentials.password {
            redis = redis.set_password(password.reveal());
            if let Some(user) = &credentials.user {
                redis = redis.set_username(user);
            }
        } else if credentials.user.is_some() {
            return Err(RedisSetupError::Credentials);
        }
        Ok(Self { tls: tls(is_tls, settings)?, redis, client_name, notes: Notes::default() })
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
        // Nagle's algorithm would hold a call back until the reply to the one before it has arrived.
        redis::Client::open(info.set_tcp_settings(TcpSettings::default().set_nodelay(true)))
    }

    /// Connects, and returns once the server has answered something.
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
            // the name is a courtesy, which a user may be denied
            Err(error) if error.code().is_none_or(|code| code == "NOAUTH") => Err(failed(error)),
            _ => Ok(connection),
        }
    }

    /// Connects to listen to channels.
    pub(super) async fn listen(&self, node: &Node) -> redis::RedisResult<PubSub> {
        self.client(node)?.get_async_pubsub().await
    }
}

fn tls(is_tls: bool, settings: &RedisSettings) -> Result<Option<ConnectionAddr>, RedisSetupError> {
    let RedisSettings { authority, identity, .. } = settings;
    if !is_tls {
        return match (authority, identity) {
            (None, None) => Ok(None),
            _ => Err(RedisSetupError::Tls("certificates are given, and the URL does not ask for TLS".into())),
        };
    }
    // the first to choose wins, which is the application, if it did
    let _ = rustls::crypto::ring::default_provider().install_default();
    if authority
        .as_ref()
        .is_some_and(|pem| !pem.windows(27).any(|part| part == b"-----BEGIN CERTIFICATE-----"))
    {
        return Err(RedisSetupError::Tls("the authority's PEM has no certificate".into()));
    }
    let certificates = TlsCertificates {
        root_cert: authority.clone(),
        client_tls: identity.as_ref().map(|identity| redis::ClientTlsConfig {
            client_cert: identity.certificate.clone(),
            client_key: identity.key.clone(),
        }),
    };
    let wrong = |error: redis::RedisError| RedisSetupError::Tls(error.to_string());
    let nowhere =
        ConnectionAddr::TcpTls { host: "localhost".into(), port: 0, insecure: false, tls_params: None };
    let client = redis::Client::build_with_tls(nowhere, certificates).map_err(wrong)?;
    Ok(Some(client.get_connection_info().addr().clone()))
}

/// Where a link leads.
pub(super) enum Target {
    /// Always to the same server.
    Fixed(Node),
    /// To whichever server the sentinels call the primary, once it agrees.
    Primary(Arc<Sentinels>),
}

/// The connection that all callers share.
pub(super) struct Link {
    connector: Arc<Connector>,
    target: Target,
    state: Mutex<State>,
    /// What the server last said about itself.
    about: Mutex<Option<About>>,
}

type Outcome = Option<Result<Live, String>>;

enum State {
    /// The next caller has a connection made.
    Down(Pause),
    /// A connection is made as soon as the pause is over. If the sentinels name another primary meanwhile, it is this one.
    Connecting {
        outcome: watch::Receiver<Outcome>,
        pause: Pause,
        named: Option<Node>,
    },
    Up(Live),
}

/// Until when there is no further attempt. If there is a reason, it is the answer until then; otherwise callers wait.
#[derive(Clone)]
struct Pause {
    until: Instant,
    reason: Option<String>,
}

/// A connection that was made.
#[derive(Clone)]
pub(super) struct Live {
    pub(super) connection: MultiplexedConnection,
    node: Arc<Node>,
    since: Instant,
    /// Since when it has owed a reply without giving any.
    silent_since: Arc<Mutex<Option<Instant>>>,
    /// What is known of the server's clock. Another connection may lead to another server.
    offset: Arc<Offset>,
}

impl Live {
    fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.silent_since, &other.silent_since)
    }
}

impl Link {
    pub(super) fn new(connector: Arc<Connector>, target: Target) -> Arc<Self> {
        let state = State::Down(Pause { until: Instant::now(), reason: None });
        Arc::new(Self { connector, target, state: Mutex::new(state), about: Mutex::default() })
    }

    pub(super) fn connector(&self) -> &Connector {
        &self.connector
    }

    /// Sends a request, a script by its digest first and in full if the server does not know it.
    pub(super) async fn send(
        self: &Arc<Self>,
        request: Request<'_>,
        asking: Asking,
    ) -> Result<Value, Failure> {
        match request {
            Request::Command(command) => {
                let mut live = self.live().await.map_err(Failure::Unreachable)?;
                self.send_command(&mut live, command, asking).await
            }
            Request::Script(call) => {
                let mut live = self.live_by(call.by()).await.map_err(Failure::Unreachable)?;
                self.send_script(&mut live, call, asking).await
            }
        }
    }

    /// Sends a script that runs only while it is of use, on the server's clock. One that came too late on that clock
    /// although it is not, here, is sent once more: it has not run, and what was known of that clock is wrong.
    async fn send_script(
        self: &Arc<Self>,
        live: &mut Live,
        call: &Call,
        asking: Asking,
    ) -> Result<Value, Failure> {
        let (by, mut is_corrected) = (call.by(), false);
        loop {
            let deadline = by.and_then(|by| live.offset.on_server(by));
            let sent = Instant::now();
            let by_digest = script(call, deadline, "EVALSHA", &DIGEST);
            let reply = match self.send_command(live, &by_digest, asking).await {
                Err(failure) if failure.is("NOSCRIPT") => {
                    Notes::add(&self.connector.notes.script_reloads, 1);
                    self.send_command(live, &script(call, deadline, "EVAL", SOURCE), asking).await?
                }
                reply => reply?,
            };
            let received = Instant::now();
            let Some(Arrival { is_late, at }) = arrival_of(&reply) else { return Ok(reply) };
            if !is_late {
                live.offset.learn(at, sent, received);
                return Ok(reply);
            }
            live.offset.correct(at, sent, received);
            if is_corrected || by.is_none_or(|by| received >= by) {
                return Ok(reply);
            }
            is_corrected = true;
        }
    }

    async fn send_command(
        self: &Arc<Self>,
        live: &mut Live,
        command: &Cmd,
        asking: Asking,
    ) -> Result<Value, Failure> {
        self.notice_silence(live);
        let reply = match asking {
            Asking::No => live.connection.req_packed_command(command).await,
            Asking::Yes => {
                // one piece, so that no other caller's request comes between the two
                let mut both = redis::pipe();
                both.cmd("ASKING").add_command(command.clone());
                let replies = live.connection.req_packed_commands(&both, 1, 1).await;
                replies.map(|mut replies| replies.pop().unwrap_or(Value::Nil))
            }
        };
        let error = match reply {
            Ok(Value::ServerError(error)) => error.into(),
            Ok(value) => {
                *live.silent_since.lock() = None;
                return Ok(value);
            }
            Err(error) => error,
        };
        let Some(code) = error.code().map(str::to_owned) else {
            self.lose(live, None);
            return Err(Failure::Lost(format!("{}: {error}", live.node)));
        };
        *live.silent_since.lock() = None;
        let (code, detail) = unwrapped(code, error.detail().unwrap_or_default().to_owned());
        match &*code {
            // it is a replica now, or the user is another one: only a new connection can be better
            "READONLY" => self.lose(live, None),
            "NOAUTH" | "WRONGPASS" | "NOPERM" => self.lose(live, Some(format!("{code} {detail}"))),
            _ => {}
        }
        Err(Failure::Refused { code, detail })
    }

    /// Connects if need be; why not, otherwise.
    pub(super) async fn ready(self: &Arc<Self>) -> Result<(), String> {
        self.live().await.map(|_| ())
    }

    /// Whether this is the connection that callers share now.
    pub(super) fn is_current(&self, live: &Live) -> bool {
        matches!(&*self.state.lock(), State::Up(current) if current.is(live))
    }

    /// Takes note of what the server said about itself.
    pub(super) fn learn(&self, live: &Live, about: About) {
        let mut last = self.about.lock();
        *last = Some(about.note(last.take(), &live.node, &self.connector.notes));
    }

    /// What is known of the server's clock: a moment of this process, on it.
    pub(super) fn on_server(&self, moment: Instant) -> Option<Timestamp> {
        match &*self.state.lock() {
            State::Up(live) => live.offset.on_server(moment),
            State::Down(_) | State::Connecting { .. } => None,
        }
    }

    /// Whether there is a connection now.
    pub(super) fn is_up(&self) -> bool {
        matches!(&*self.state.lock(), State::Up(_))
    }

    /// Drops the connection unless it leads there, and makes a new one. One that is being made may have begun before
    /// that was known.
    pub(super) fn follow(self: &Arc<Self>, node: &Node) {
        let elsewhere = match &mut *self.state.lock() {
            State::Up(live) if *live.node != *node => Some(live.clone()),
            State::Connecting { named, .. } => {
                *named = Some(node.clone());
                None
            }
            State::Up(_) | State::Down(_) => None,
        };
        if let Some(live) = elsewhere {
            self.lose(&live, None);
            let link = Arc::clone(self);
            tokio::spawn(async move { link.live().await.map(|_| ()) });
        }
    }

    /// The connection; if there is none in time, that is known before the caller goes away.
    async fn live_by(self: &Arc<Self>, by: Option<Instant>) -> Result<Live, String> {
        if let State::Up(live) = &*self.state.lock() {
            return Ok(live.clone());
        }
        let Some(by) = by else { return self.live().await };
        match timeout_at(by - GIVE_UP, self.live()).await {
            Ok(live) => live,
            Err(_) => Err(format!("no connection to {} in time", self.target)),
        }
    }

    async fn live(self: &Arc<Self>) -> Result<Live, String> {
        loop {
            let mut outcome = match self.live_or_attempt() {
                Ok(Ok(live)) => return Ok(live),
                Ok(Err(outcome)) => outcome,
                Err(reason) => {
                    // a caller who asks in a loop must leave the runtime time to connect
                    yield_now().await;
                    return Err(reason);
                }
            };
            if let Ok(outcome) = outcome.wait_for(Option::is_some).await {
                return outcome.clone().expect("the wait was for an outcome");
            }
            // the runtime that was to connect has ended
            let mut state = self.state.lock();
            if matches!(&*state, State::Connecting { outcome: current, .. } if current.same_channel(&outcome))
            {
                *state = State::Down(Pause { until: Instant::now(), reason: None });
            }
        }
    }

    fn live_or_attempt(self: &Arc<Self>) -> Result<Result<Live, watch::Receiver<Outcome>>, String> {
        let mut state = self.state.lock();
        if let State::Down(pause) = &*state {
            let (outcome, pause) = (self.attempt(pause.until), pause.clone());
            *state = State::Connecting { outcome, pause, named: None };
        }
        match &*state {
            State::Up(live) => Ok(Ok(live.clone())),
            State::Connecting { pause: Pause { until, reason: Some(reason) }, .. }
                if Instant::now() < *until =>
            {
                Err(reason.clone())
            }
            State::Connecting { outcome, .. } => Ok(Err(outcome.clone())),
            State::Down(_) => unreachable!("an attempt has just begun"),
        }
    }

    /// Connects in a task of its own: callers come and go.
    fn attempt(self: &Arc<Self>, not_before: Instant) -> watch::Receiver<Outcome> {
        let (told, outcome) = watch::channel(None);
        let link = Arc::clone(self);
        tokio::spawn(async move {
            sleep_until(not_before).await;
            loop {
                let (made, since) = link.connect().await;
                if link.settle(&made, since) {
                    if let Ok(live) = &made {
                        Notes::add(&link.connector.notes.connections, 1);
                        tokio::spawn(notes::watch(Arc::downgrade(&link), live.clone()));
                    }
                    told.send_replace(Some(made));
                    return;
                }
            }
        });
        outcome
    }

    /// Tries to connect; also when that began.
    async fn connect(&self) -> (Result<Live, String>, Instant) {
        let since = Instant::now();
        let made = match timeout(CONNECT_TIMEOUT, self.establish()).await {
            Ok(Ok((node, connection))) => {
                let (node, silent_since, offset) = (Arc::new(node), Arc::default(), Arc::default());
                Ok(Live { connection, node, since, silent_since, offset })
            }
            Ok(Err(reason)) => Err(reason),
            Err(_) => Err(format!("cannot connect to {}: no answer within {CONNECT_TIMEOUT:?}", self.target)),
        };
        (made, since)
    }

    /// Takes note of what came of an attempt. Not of a connection to somebody who has just been replaced: whether all is
    /// said and done.
    fn settle(&self, made: &Result<Live, String>, since: Instant) -> bool {
        let mut state = self.state.lock();
        if let (Ok(live), State::Connecting { named, .. }) = (made, &mut *state)
            && named.take().is_some_and(|named| named != *live.node)
        {
            return false;
        }
        *state = match made {
            Ok(live) => State::Up(live.clone()),
            Err(reason) => State::Down(Pause { until: next_attempt(since), reason: Some(reason.clone()) }),
        };
        true
    }

    async fn establish(&self) -> Result<(Node, MultiplexedConnection), String> {
        match &self.target {
            Target::Fixed(node) => Ok((node.clone(), self.connector.connect(node).await?)),
            Target::Primary(sentinels) => sentinels.connect(&self.connector).await,
        }
    }

    fn lose(&self, live: &Live, reason: Option<String>) {
        let mut state = self.state.lock();
        if matches!(&*state, State::Up(current) if current.is(live)) {
            *state = State::Down(Pause { until: next_attempt(live.since), reason });
        }
    }

    /// Callers give up long before the connection does, and the network may lose a peer without a word.
    fn notice_silence(self: &Arc<Self>, live: &Live) {
        let now = Instant::now();
        let mut silent_since = live.silent_since.lock();
        let since = *silent_since.get_or_insert(now);
        if now.duration_since(since) < SILENCE {
            return;
        }
        *silent_since = Some(now);
        let (link, mut live) = (Arc::clone(self), live.clone());
        tokio::spawn(async move {
            let ping = redis::cmd("PING");
            match timeout(SILENCE, live.connection.req_packed_command(&ping)).await {
                Ok(Ok(_)) => *live.silent_since.lock() = None,
                Ok(Err(_)) | Err(_) => link.lose(&live, None),
            }
        });
    }
}

/// What a command within a script said, which Redis 6.2 wraps: `ERR Error running script (…): @user_script: 9: -OOM command …`.
fn unwrapped(code: String, detail: String) -> (String, String) {
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

fn arrival_of(reply: &Value) -> Option<Arrival> {
    match reply {
        Value::BulkString(reply) => arrival(reply),
        _ => None,
    }
}

/// When the next attempt may begin, after one that began `since` then.
fn next_attempt(since: Instant) -> Instant {
    since + ATTEMPT_SPACING + jitter()
}

/// A random part of [`MAX_JITTER`].
pub(super) fn jitter() -> Duration {
    let chance = RandomState::new().build_hasher().finish() >> 32;
    MAX_JITTER * u32::try_from(chance >> 16).unwrap_or(0) / (1 << 16)
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fixed(node) => write!(f, "{node}"),
            Self::Primary(sentinels) => write!(f, "the primary {:?}", sentinels.name()),
        }
    }
}
