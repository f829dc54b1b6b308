//! The faults: how each starts and ends, and how it affects callers.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use sluicegate_testkit::{
    delay_proxy::DelayProxy,
    faults::PausedCommands,
    proxy::{AfterDrop, Direction, DropReplies, Mode, Occurrence, Proxy, RequestFilter},
    server::{Flavor, Server},
};

use crate::scenario::DEADLINE;

/// How a fault affects callers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Effect {
    /// The store makes no decision.
    Unavailable,
    /// The store makes some of the decisions.
    Intermittent,
    /// Not at all.
    Invisible,
}

/// Whether counters survive the fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Counters {
    Kept,
    Lost,
}

/// A fault with its start and end.
pub(crate) struct Fault {
    pub(crate) name: &'static str,
    pub(crate) effect: Effect,
    pub(crate) counters: Counters,
    /// A part of the error that callers get.
    pub(crate) message: &'static str,
    pub(crate) begin: fn(&mut FaultTarget),
    pub(crate) end: fn(&mut FaultTarget),
}

/// The user of the ACL faults.
pub(crate) const USER: &str = "limiter";
pub(crate) const PASSWORD: &str = "first";
const ALL_PERMISSIONS: [&str; 4] = ["on", ">first", "~*", "+@all"];

/// A server, the proxy in front of it, and resources of a fault.
pub(crate) struct FaultTarget {
    pub(crate) server: Server,
    pub(crate) proxy: Arc<Proxy>,
    /// Between the proxy and the server, if a round trip is added.
    _delay_proxy: Option<DelayProxy>,
    /// A connection opened before the fault, for faults that reject new connections.
    inside: Option<redis::Connection>,
    other: Option<Server>,
    repeated: Option<RepeatedAction>,
}

impl FaultTarget {
    /// Starts a server, behind a delay proxy if a round trip is given.
    pub(crate) fn start(flavor: Flavor, round_trip: Option<Duration>) -> Self {
        let server = Server::start(flavor);
        server.set_user(USER, &ALL_PERMISSIONS);
        let delay_proxy = round_trip.map(|round_trip| DelayProxy::start(server.addr(), round_trip));
        let upstream = delay_proxy.as_ref().map_or(server.addr(), DelayProxy::addr);
        let proxy = Arc::new(Proxy::start(upstream));
        Self { server, proxy, _delay_proxy: delay_proxy, inside: None, other: None, repeated: None }
    }

    fn send_command(&mut self, words: &[&str]) {
        let inside = self.inside.get_or_insert_with(|| self.server.connection());
        redis::cmd(words[0]).arg(&words[1..]).exec(inside).unwrap();
    }

    /// Repeats an action until the fault ends.
    fn repeat(&mut self, mut action: impl FnMut() + Send + 'static) {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                action();
                thread::park_timeout(Duration::from_millis(20));
            }
        });
        self.repeated = Some(RepeatedAction { stop, thread: Some(thread) });
    }

    fn repeat_command(&mut self, words: &'static [&'static str]) {
        let mut connection = self.server.connection();
        self.repeat(move || redis::cmd(words[0]).arg(&words[1..]).exec(&mut connection).unwrap());
    }

    fn end_repeated_action(&mut self) {
        self.repeated = None;
    }
}

/// Stops when dropped.
struct RepeatedAction {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for RepeatedAction {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            assert!(ended.is_ok() || thread::panicking(), "the repeated action failed");
        }
    }
}

const fn outage(name: &'static str, begin: fn(&mut FaultTarget), end: fn(&mut FaultTarget)) -> Fault {
    Fault { name, effect: Effect::Unavailable, counters: Counters::Kept, message: "", begin, end }
}

impl Fault {
    const fn effect(mut self, effect: Effect) -> Self {
        self.effect = effect;
        self
    }

    const fn loses_counters(mut self) -> Self {
        self.counters = Counters::Lost;
        self
    }

    const fn message(mut self, words: &'static str) -> Self {
        self.message = words;
        self
    }
}

/// Faults of the server process.
pub(crate) const PROCESS_FAULTS: [Fault; 6] = [
    outage("stopped", |it| it.server.suspend(), |it| it.server.resume()).message("no reply for"),
    outage("killed and restarted", |it| it.server.kill(), |it| it.server.restart()).loses_counters(),
    outage(
        "paused",
        |it| it.server.pause_clients(Duration::from_secs(60), PausedCommands::Writes),
        |it| it.server.unpause_clients(),
    ),
    outage(
        "clients killed",
        |it| it.repeat_command(&["CLIENT", "KILL", "TYPE", "normal"]),
        FaultTarget::end_repeated_action,
    )
    .effect(Effect::Intermittent),
    outage("scripts flushed", |it| it.repeat_command(&["SCRIPT", "FLUSH"]), FaultTarget::end_repeated_action)
        .effect(Effect::Invisible),
    outage("loading", |it| it.server.restart_into_loading(), |it| it.server.finish_loading())
        .message("LOADING")
        .loses_counters(),
];

/// Error replies of the server.
pub(crate) const ERROR_REPLY_FAULTS: [Fault; 6] = [
    outage("busy", |it| it.server.make_busy(), |it| it.server.end_busy()).message("BUSY"),
    outage(
        "out of memory",
        |it| it.server.config_set("maxmemory", 1),
        |it| it.server.config_set("maxmemory", 0),
    )
    .message("nothing changed: OOM"),
    outage(
        "without replicas",
        |it| it.server.config_set("min-replicas-to-write", 1),
        |it| it.server.config_set("min-replicas-to-write", 0),
    )
    .message("nothing changed: NOREPLICAS"),
    outage("unable to save", |it| it.server.break_saving(), |it| it.server.restore_saving())
        .message("nothing changed: MISCONF"),
    outage(
        "too many clients",
        |it| {
            it.send_command(&["CONFIG", "SET", "maxclients", "1"]);
            it.send_command(&["CLIENT", "KILL", "TYPE", "normal"]);
        },
        |it| it.send_command(&["CONFIG", "SET", "maxclients", "100"]),
    )
    .message("cannot connect"),
    outage(
        "a replica",
        |it| it.server.replicate(it.other.insert(Server::start(it.server.flavor()))),
        |it| {
            it.server.promote();
            it.other = None;
        },
    )
    .loses_counters(),
];

/// One fault of each class for servers with a round trip: process, error reply and network.
pub(crate) const ROUND_TRIP_FAULTS: [&Fault; 4] =
    [&PROCESS_FAULTS[0], &ERROR_REPLY_FAULTS[1], &NETWORK_FAULTS[2], &NETWORK_FAULTS[7]];

/// ACL faults of [`USER`].
pub(crate) const ACL_FAULTS: [Fault; 4] = [
    outage(
        "another password",
        |it| {
            it.server.set_user(USER, &["resetpass", ">second"]);
            it.send_command(&["CLIENT", "KILL", "USER", USER]);
        },
        |it| it.server.set_user(USER, &["resetpass", ">first"]),
    )
    .message("Password authentication failed"),
    outage(
        "without permission",
        |it| it.server.set_user(USER, &["-@all"]),
        |it| it.server.set_user(USER, &["+@all"]),
    )
    .message("NOPERM"),
    outage(
        "without its keys",
        |it| it.server.set_user(USER, &["resetkeys", "~other:*"]),
        |it| it.server.set_user(USER, &["allkeys"]),
    )
    .message("NOPERM"),
    outage(
        "no such user",
        |it| it.send_command(&["ACL", "DELUSER", USER]),
        |it| it.server.set_user(USER, &ALL_PERMISSIONS),
    )
    .message("Password authentication failed"),
];

/// A password is required of clients without one.
pub(crate) const PASSWORD_FAULTS: [Fault; 1] = [outage(
    "a password is required",
    |it| {
        it.send_command(&["CONFIG", "SET", "requirepass", "secret"]);
        it.send_command(&["CLIENT", "KILL", "TYPE", "normal"]);
    },
    |it| it.send_command(&["CONFIG", "SET", "requirepass", ""]),
)
.message("NOAUTH")];

const STALLED_REPLIES: Mode = Mode::DropReplies(DropReplies {
    requests: RequestFilter::SCRIPTS,
    occurrence: Occurrence::Every(1),
    after: AfterDrop::Stall,
});
const DROPPED_REPLIES: Mode = Mode::DropReplies(DropReplies {
    requests: RequestFilter::SCRIPTS,
    occurrence: Occurrence::Every(3),
    after: AfterDrop::Close,
});
/// Ten times the best case of a request: callers should not notice it.
const SLOW: Duration = Duration::from_millis(20);
/// So slow that no answer arrives in time.
const TOO_SLOW: Duration = DEADLINE;

/// Network faults.
pub(crate) const NETWORK_FAULTS: [Fault; 10] = [
    outage("late", |it| it.proxy.delay(TOO_SLOW), |it| it.proxy.pass()),
    outage("slow", |it| it.proxy.delay(SLOW), |it| it.proxy.pass()).effect(Effect::Invisible),
    outage("cut", |it| it.proxy.cut(), |it| it.proxy.pass()),
    outage("refused", |it| it.proxy.set(Mode::Refuse), |it| it.proxy.pass()).message("refused"),
    outage("stalled", |it| it.proxy.stall(), |it| it.proxy.pass()),
    outage(
        "trickling",
        |it| it.proxy.set(Mode::Trickle { pause: Duration::from_millis(5) }),
        |it| it.proxy.pass(),
    ),
    outage("without replies", |it| it.proxy.set(STALLED_REPLIES), |it| it.proxy.pass()),
    outage("losing replies", |it| it.proxy.set(DROPPED_REPLIES), |it| it.proxy.pass())
        .effect(Effect::Intermittent),
    outage("half closed above", |it| half_close(it, Direction::Requests), FaultTarget::end_repeated_action)
        .effect(Effect::Intermittent),
    outage("half closed below", |it| half_close(it, Direction::Replies), FaultTarget::end_repeated_action)
        .effect(Effect::Intermittent),
];

fn half_close(it: &mut FaultTarget, direction: Direction) {
    let proxy = Arc::clone(&it.proxy);
    it.repeat(move || proxy.half_close(direction));
}
