//! The connection to one server: established on first use, shared by all callers, replaced when lost.
//!
//! A request without an answer is reported as rejected, not sent, or lost. No request is sent twice, except a request that was never
//! written and a script that the server did not have. A closed connection is detected immediately, even while it is idle. If a reply
//! has been outstanding for a second, the connection is pinged, and closed if the ping is not answered within another second. A
//! probe replaces such a connection immediately.

use std::{
    fmt,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use redis::{Cmd, Value, aio::ConnectionLike};
use sluicegate_core::Timestamp;
use tokio::{
    sync::watch,
    task::yield_now,
    time::{Instant, sleep_until, timeout, timeout_at},
};

use super::{
    clock_offset::ClockOffset,
    connector::{CONNECT_TIMEOUT, Connection, Connector},
    dial_backoff::{DialBackoff, QUICK_ATTEMPTS},
    health::{self, HealthCounters, ServerInfo},
    script::{Call, DIGEST, ReplyHeader, SOURCE, SendTimes, read_header},
    sentinel::Sentinels,
    url::Node,
};
use crate::{clock::wall_clock, store::StoreError};

/// How long before its deadline a call stops waiting for a connection, so that it is reported as not sent.
const CONNECT_MARGIN: Duration = Duration::from_millis(1);
/// How long a reply may be outstanding before the connection is pinged, and how long the ping may take.
const MAX_SILENCE: Duration = Duration::from_secs(1);
/// How long a reply must have been outstanding for a probe to use another connection.
const MIN_SILENCE: Duration = Duration::from_millis(20);
/// The maximum number of attempts to send a request whose connections ended before it was written.
const MAX_SENDS: u32 = 3;

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
    /// The script without arguments, which writes nothing to this key.
    Probe(&'a str),
    Command(&'a Cmd),
}

impl RedisRequest<'_> {
    /// Returns the time after which the request is not sent any more, shortly before its deadline.
    pub(super) fn send_by(self) -> Option<Instant> {
        match self {
            Self::Script(call) => Some(call.process_deadline()? - CONNECT_MARGIN),
            Self::Probe(_) | Self::Command(_) => None,
        }
    }
}

/// Whether a request is preceded by `ASKING`, because its slot is being migrated to the node.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Asking {
    No,
    Yes,
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
    state: Mutex<State>,
    /// The last information that the server returned.
    server_info: Mutex<Option<ServerInfo>>,
}

type Outcome = Option<Result<Arc<Established>, String>>;

struct State {
    phase: Phase,
    backoff: DialBackoff,
}

enum Phase {
    /// The next caller starts an attempt.
    Disconnected(Pause),
    /// An attempt starts when the pause is over. `named` is the primary that the sentinels have named since the pause
    /// began.
    Connecting {
        outcome: watch::Receiver<Outcome>,
        pause: Pause,
        named: Option<Node>,
    },
    Connected(Arc<Established>),
}

/// The earliest time of the next attempt. Until then, callers fail with the reason if there is one; otherwise they wait.
#[derive(Clone)]
struct Pause {
    until: Instant,
    reason: Option<String>,
}

impl Pause {
    /// Until now.
    fn none() -> Self {
        Self { until: Instant::now(), reason: None }
    }
}

/// Why a connection is dropped.
enum Loss {
    /// It ended or does not answer, or the server changed its role, for example became a replica.
    Ended,
    /// The server rejects this user, with this reason.
    Unauthorized(String),
}

/// An established connection.
pub(super) struct Established {
    pub(super) connection: Connection,
    node: Node,
    /// Since when a reply is outstanding, without any reply in between.
    silent_since: Mutex<Option<Instant>>,
    /// Whether a request has been answered, and not with an error.
    has_answered: AtomicBool,
    /// The offset of the server's clock. Another connection may have another server.
    offset: ClockOffset,
}

impl Established {
    fn new(node: Node, connection: Connection) -> Self {
        Self {
            connection,
            node,
            silent_since: Mutex::default(),
            has_answered: AtomicBool::new(false),
            offset: ClockOffset::default(),
        }
    }

    /// Returns the server's time at `moment`, or this process's time before the first reply.
    fn server_time(&self, moment: Instant) -> Timestamp {
        self.offset.server_time(moment).unwrap_or_else(wall_clock)
    }

    fn answered(&self) {
        *self.silent_since.lock() = None;
        // no write in the common case: the cache line is shared by all threads
        if !self.has_answered.load(Ordering::Relaxed) {
            self.has_answered.store(true, Ordering::Relaxed);
        }
    }
}

impl ServerConnection {
    pub(super) fn new(connector: Arc<Connector>, target: Target) -> Arc<Self> {
        let quick_attempts = match target {
            Target::Fixed(_) => QUICK_ATTEMPTS,
            // each attempt queries every sentinel, and a failover takes longer
            Target::Primary(_) => 0,
        };
        let backoff = DialBackoff::new(quick_attempts, Instant::now());
        let state = State { phase: Phase::Disconnected(Pause::none()), backoff };
        Arc::new(Self { connector, target, state: Mutex::new(state), server_info: Mutex::default() })
    }

    pub(super) fn connector(&self) -> &Connector {
        &self.connector
    }

    /// Sends a request; once more on the next connection if it was not written.
    pub(super) async fn send(
        self: &Arc<Self>,
        request: RedisRequest<'_>,
        asking: Asking,
    ) -> Result<Value, CallFailure> {
        let mut sends = 0;
        loop {
            let established = match request {
                RedisRequest::Probe(_) | RedisRequest::Command(_) => self.established().await,
                RedisRequest::Script(call) => self.established_by(call.process_deadline()).await,
            };
            let established = established.map_err(CallFailure::NotSent)?;
            let reply = match request {
                RedisRequest::Command(command) => self.send_command(&established, command, asking).await,
                RedisRequest::Script(call) => self.send_call(&established, call, asking).await,
                RedisRequest::Probe(key) => {
                    self.send_script(&established, asking, |request| _ = request.arg(1).arg(key)).await
                }
            };
            sends += 1;
            if !matches!(reply, Err(CallFailure::NotSent(_))) || sends == MAX_SENDS {
                return reply;
            }
        }
    }

    /// Sends a call with a deadline on the server's clock, and with the calendar periods around its time. If the server reports it as late
    /// although the deadline has not passed here, or its time is in none of the periods, the call is sent once more: it did not run, and
    /// the known clock offset was wrong.
    async fn send_call(
        self: &Arc<Self>,
        established: &Arc<Established>,
        call: &Call,
        asking: Asking,
    ) -> Result<Value, CallFailure> {
        let (by, mut corrected) = (call.process_deadline(), None);
        loop {
            let deadline = by.and_then(|by| established.offset.server_time(by));
            let sent = Instant::now();
            let now = match corrected {
                Some(at) => at,
                None if call.has_calendars() => established.server_time(sent),
                None => Timestamp::default(),
            };
            let times = SendTimes { deadline, now };
            let reply =
                self.send_script(established, asking, |request| call.write_to(request, times)).await?;
            let received = Instant::now();
            let Some(ReplyHeader { is_late, has_no_period, at }) = header_of(&reply) else {
                return Ok(reply);
            };
            if !is_late && !has_no_period {
                established.offset.record(at, sent, received);
                return Ok(reply);
            }
            established.offset.correct(at, sent, received);
            let is_too_late = by.map_or(is_late, |by| received >= by);
            if corrected.is_some() || is_too_late {
                return Ok(reply);
            }
            corrected = Some(at);
        }
    }

    /// Sends the script by its digest, and in full if the server does not have it.
    async fn send_script(
        self: &Arc<Self>,
        established: &Arc<Established>,
        asking: Asking,
        write_arguments: impl Fn(&mut Cmd),
    ) -> Result<Value, CallFailure> {
        let evaluate = |command: &str, script: &str| {
            let mut request = redis::cmd(command);
            request.arg(script);
            write_arguments(&mut request);
            request
        };
        match self.send_command(established, &evaluate("EVALSHA", &DIGEST), asking).await {
            Err(failure) if failure.is("NOSCRIPT") => {
                HealthCounters::add(&self.connector.health().script_reloads, 1);
                self.send_command(established, &evaluate("EVAL", SOURCE), asking).await
            }
            reply => reply,
        }
    }

    async fn send_command(
        self: &Arc<Self>,
        established: &Arc<Established>,
        command: &Cmd,
        asking: Asking,
    ) -> Result<Value, CallFailure> {
        self.ping_if_silent(established);
        let writes = established.connection.writes();
        let mut connection = established.connection.clone();
        let reply = match asking {
            Asking::No => connection.req_packed_command(command).await,
            Asking::Yes => {
                // one write, so that no request of another caller comes between the two
                let mut both = redis::pipe();
                both.cmd("ASKING").add_command(command.clone());
                let replies = connection.req_packed_commands(&both, 1, 1).await;
                replies.map(|mut replies| replies.pop().unwrap_or(Value::Nil))
            }
        };
        let error = match reply {
            Ok(Value::ServerError(error)) => error.into(),
            Ok(value) => {
                established.answered();
                return Ok(value);
            }
            Err(error) => error,
        };
        let Some(code) = error.code().map(str::to_owned) else {
            self.disconnect(established, Loss::Ended);
            let reason = format!("{}: {error}", established.node);
            let was_written = established.connection.writes() != writes;
            return Err(if was_written {
                CallFailure::ReplyLost(reason)
            } else {
                CallFailure::NotSent(reason)
            });
        };
        *established.silent_since.lock() = None;
        let (code, detail) = unwrap_script_error(code, error.detail().unwrap_or_default().to_owned());
        match &*code {
            // the server is a replica now
            "READONLY" => self.disconnect(established, Loss::Ended),
            "NOAUTH" | "WRONGPASS" => {
                self.disconnect(established, Loss::Unauthorized(format!("{code} {detail}")))
            }
            _ => {}
        }
        Err(CallFailure::Rejected { code, detail })
    }

    /// Connects if necessary; returns the reason if that fails.
    pub(super) async fn ready(self: &Arc<Self>) -> Result<(), String> {
        self.established().await.map(|_| ())
    }

    /// Waits for a connection, no matter how many attempts fail. A connection that does not answer is replaced first: the network may
    /// have lost it without an error.
    pub(super) async fn connected(self: &Arc<Self>) {
        if let Some(silent) = self.silent() {
            self.disconnect(&silent, Loss::Ended);
            silent.connection.close();
        }
        loop {
            match self.established_or_attempt() {
                Ok(_) => return,
                Err((mut attempt, _)) => self.outcome_of(&mut attempt).await,
            };
        }
    }

    /// Returns the connection, if a reply has been outstanding for [`MIN_SILENCE`].
    fn silent(&self) -> Option<Arc<Established>> {
        let state = self.state.lock();
        let Phase::Connected(established) = &state.phase else { return None };
        let since = *established.silent_since.lock();
        since.is_some_and(|since| since.elapsed() >= MIN_SILENCE).then(|| Arc::clone(established))
    }

    /// Returns whether this is the current connection.
    pub(super) fn is_current(&self, established: &Arc<Established>) -> bool {
        self.state.lock().is_current(established)
    }

    /// Records the information that the server returned.
    pub(super) fn record_info(&self, established: &Established, server_info: ServerInfo) {
        let mut last = self.server_info.lock();
        *last = Some(server_info.record(last.take(), &established.node, self.connector.health()));
    }

    /// Converts a moment of this process to the server's clock, if its offset is known.
    pub(super) fn server_time(&self, moment: Instant) -> Option<Timestamp> {
        match &self.state.lock().phase {
            Phase::Connected(established) => established.offset.server_time(moment),
            Phase::Disconnected(_) | Phase::Connecting { .. } => None,
        }
    }

    /// Returns why the last attempt to connect failed, if there is no connection.
    pub(super) fn connect_error(&self) -> Option<String> {
        match &self.state.lock().phase {
            Phase::Connected(_) => None,
            Phase::Disconnected(pause) | Phase::Connecting { pause, .. } => pause.reason.clone(),
        }
    }

    /// Returns how messages name the server.
    pub(super) fn target_name(&self) -> String {
        self.target.to_string()
    }

    /// Returns whether a connection is established.
    pub(super) fn is_up(&self) -> bool {
        matches!(&self.state.lock().phase, Phase::Connected(_))
    }

    /// Drops the connection and reconnects unless it is to this node. An attempt in progress may have started before the node was
    /// known.
    pub(super) fn follow(self: &Arc<Self>, node: &Node) {
        let elsewhere = match &mut self.state.lock().phase {
            Phase::Connected(established) if established.node != *node => Some(Arc::clone(established)),
            Phase::Connecting { named, .. } => {
                *named = Some(node.clone());
                None
            }
            Phase::Connected(_) | Phase::Disconnected(_) => None,
        };
        if let Some(established) = elsewhere {
            self.disconnect(&established, Loss::Ended);
        }
    }

    /// Returns the connection, or an error shortly before the deadline.
    async fn established_by(self: &Arc<Self>, by: Option<Instant>) -> Result<Arc<Established>, String> {
        if let Phase::Connected(established) = &self.state.lock().phase {
            return Ok(Arc::clone(established));
        }
        let Some(by) = by else { return self.established().await };
        match timeout_at(by - CONNECT_MARGIN, self.established()).await {
            Ok(established) => established,
            Err(_) => Err(format!("no connection to {} before the deadline", self.target)),
        }
    }

    /// Returns the connection. Fails immediately during the pause after a failed attempt.
    async fn established(self: &Arc<Self>) -> Result<Arc<Established>, String> {
        loop {
            let mut attempt = match self.established_or_attempt() {
                Ok(established) => return Ok(established),
                Err((_, Pause { until, reason: Some(reason) })) if Instant::now() < until => {
                    // a caller that retries in a loop must yield to the task that connects
                    yield_now().await;
                    return Err(reason);
                }
                Err((attempt, _)) => attempt,
            };
            if let Some(outcome) = self.outcome_of(&mut attempt).await {
                return outcome;
            }
        }
    }

    /// Returns the connection, or the attempt to connect and the pause before it. Starts an attempt if there is none.
    fn established_or_attempt(
        self: &Arc<Self>,
    ) -> Result<Arc<Established>, (watch::Receiver<Outcome>, Pause)> {
        let mut state = self.state.lock();
        if let Phase::Disconnected(pause) = &state.phase {
            let (outcome, pause) = (self.attempt(pause.until), pause.clone());
            state.phase = Phase::Connecting { outcome, pause, named: None };
        }
        match &state.phase {
            Phase::Connected(established) => Ok(Arc::clone(established)),
            Phase::Connecting { outcome, pause, .. } => Err((outcome.clone(), pause.clone())),
            Phase::Disconnected(_) => unreachable!("an attempt has just started"),
        }
    }

    /// Waits for the outcome of an attempt; `None` if its runtime has shut down.
    async fn outcome_of(&self, attempt: &mut watch::Receiver<Outcome>) -> Outcome {
        if let Ok(outcome) = attempt.wait_for(Option::is_some).await {
            return outcome.clone();
        }
        let mut state = self.state.lock();
        if matches!(&state.phase, Phase::Connecting { outcome, .. } if outcome.same_channel(attempt)) {
            state.phase = Phase::Disconnected(Pause::none());
        }
        None
    }

    /// Connects in a separate task, because callers may be cancelled.
    fn attempt(self: &Arc<Self>, not_before: Instant) -> watch::Receiver<Outcome> {
        let (sender, outcome) = watch::channel(None);
        let connection = Arc::clone(self);
        tokio::spawn(async move {
            sleep_until(not_before).await;
            loop {
                let started = Instant::now();
                let result = connection.connect().await;
                if connection.settle(&result, started.elapsed()) {
                    if let Ok(established) = &result {
                        HealthCounters::add(&connection.connector.health().connections, 1);
                        tokio::spawn(replace_when_ended(Arc::downgrade(&connection), established));
                        tokio::spawn(health::watch(Arc::downgrade(&connection), Arc::clone(established)));
                    }
                    sender.send_replace(Some(result));
                    return;
                }
            }
        });
        outcome
    }

    /// Tries to connect.
    async fn connect(&self) -> Result<Arc<Established>, String> {
        let (node, connection) = match &self.target {
            // the connector has this timeout itself
            Target::Fixed(node) => (node.clone(), self.connector.connect(node).await?),
            Target::Primary(sentinels) => {
                let connected = timeout(CONNECT_TIMEOUT, sentinels.connect(&self.connector)).await;
                connected.map_err(|_| {
                    format!("cannot connect to {}: no answer within {CONNECT_TIMEOUT:?}", self.target)
                })??
            }
        };
        Ok(Arc::new(Established::new(node, connection)))
    }

    /// Records the result of an attempt and how long it took. Returns false, and discards the connection, if the
    /// sentinels have since named another primary.
    fn settle(&self, result: &Result<Arc<Established>, String>, took: Duration) -> bool {
        let mut state = self.state.lock();
        if let (Ok(established), Phase::Connecting { named, .. }) = (result, &mut state.phase)
            && named.take().is_some_and(|named| named != established.node)
        {
            return false;
        }
        state.phase = match result {
            Ok(established) => Phase::Connected(Arc::clone(established)),
            Err(reason) => {
                let until = state.backoff.failed(Instant::now(), took);
                Phase::Disconnected(Pause { until, reason: Some(reason.clone()) })
            }
        };
        true
    }

    /// Drops the connection. One that has answered is replaced without waiting for a caller.
    fn disconnect(self: &Arc<Self>, established: &Arc<Established>, loss: Loss) {
        let has_answered = established.has_answered.load(Ordering::Relaxed);
        let is_replaced = has_answered && matches!(loss, Loss::Ended);
        {
            let mut state = self.state.lock();
            if !state.is_current(established) {
                return;
            }
            let now = Instant::now();
            state.phase = Phase::Disconnected(match loss {
                Loss::Ended => Pause { until: state.backoff.lost(now, has_answered), reason: None },
                Loss::Unauthorized(reason) => {
                    Pause { until: state.backoff.rejected(now), reason: Some(reason) }
                }
            });
        }
        if is_replaced {
            // the attempt runs in its own task
            let _ = self.established_or_attempt();
        }
    }

    /// Pings the server if a reply has been outstanding for too long. The network may lose a peer without an error, and callers give
    /// up long before the client does.
    fn ping_if_silent(self: &Arc<Self>, established: &Arc<Established>) {
        let now = Instant::now();
        let mut silent_since = established.silent_since.lock();
        let since = *silent_since.get_or_insert(now);
        if now.duration_since(since) < MAX_SILENCE {
            return;
        }
        *silent_since = Some(now);
        let (connection, established) = (Arc::clone(self), Arc::clone(established));
        tokio::spawn(async move {
            let ping = redis::cmd("PING");
            let mut silent = established.connection.clone();
            match timeout(MAX_SILENCE, silent.req_packed_command(&ping)).await {
                Ok(Ok(_)) => *established.silent_since.lock() = None,
                Ok(Err(_)) | Err(_) => {
                    connection.disconnect(&established, Loss::Ended);
                    established.connection.close();
                }
            }
        });
    }
}

impl State {
    fn is_current(&self, established: &Arc<Established>) -> bool {
        matches!(&self.phase, Phase::Connected(current) if Arc::ptr_eq(current, established))
    }
}

/// Returns a future that replaces a connection when it ends. It keeps neither of its arguments alive.
fn replace_when_ended(
    connection: Weak<ServerConnection>,
    established: &Arc<Established>,
) -> impl Future<Output = ()> + use<> {
    let (ended, established) = (established.connection.ended(), Arc::downgrade(established));
    async move {
        ended.await;
        if let (Some(connection), Some(established)) = (connection.upgrade(), established.upgrade()) {
            connection.disconnect(&established, Loss::Ended);
        }
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

fn header_of(reply: &Value) -> Option<ReplyHeader> {
    match reply {
        Value::BulkString(reply) => read_header(reply),
        _ => None,
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fixed(node) => write!(f, "{node}"),
            Self::Primary(sentinels) => write!(f, "the primary {:?}", sentinels.name()),
        }
    }
}
