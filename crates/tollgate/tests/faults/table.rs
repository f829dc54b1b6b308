//! The faults: what each does to a server or to the way to it, how that ends, and what callers may see of it.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use tollgate_testkit::{
    delay_proxy::DelayProxy,
    faults::Paused,
    proxy::{Direction, Mode, Proxy, Requests, Swallow, Then, Turn},
    server::{Flavor, Server},
};

use crate::bench::DEADLINE;

/// What callers may see of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Effect {
    /// No decision is the store's.
    Away,
    /// Any decision may be the store's, or not.
    Flaky,
    /// Nothing at all.
    Unseen,
}

/// Whether counters survive it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Counters {
    Kept,
    Lost,
}

/// Something that goes wrong, and is put right again.
pub(crate) struct Fault {
    pub(crate) name: &'static str,
    pub(crate) effect: Effect,
    pub(crate) counters: Counters,
    /// What callers are told about it, among other things.
    pub(crate) says: &'static str,
    pub(crate) begin: fn(&mut Patient),
    pub(crate) end: fn(&mut Patient),
}

/// The user of the faults that are about users.
pub(crate) const USER: &str = "limiter";
pub(crate) const PASSWORD: &str = "first";
const EVERYTHING: [&str; 4] = ["on", ">first", "~*", "+@all"];

/// A server, the way to it, and what a fault needs meanwhile.
pub(crate) struct Patient {
    pub(crate) server: Server,
    pub(crate) proxy: Arc<Proxy>,
    /// Between the proxy and the server, if the server is to be some way off.
    _delay_proxy: Option<DelayProxy>,
    /// A connection from before the fault, for faults that let nobody in.
    inside: Option<redis::Connection>,
    other: Option<Server>,
    repeated: Option<Repeated>,
}

impl Patient {
    /// Starts a server; with a round trip, behind a proxy that adds it.
    pub(crate) fn start(flavor: Flavor, round_trip: Option<Duration>) -> Self {
        let server = Server::start(flavor);
        server.set_user(USER, &EVERYTHING);
        let delay_proxy = round_trip.map(|round_trip| DelayProxy::start(server.addr(), round_trip));
        let upstream = delay_proxy.as_ref().map_or(server.addr(), DelayProxy::addr);
        let proxy = Arc::new(Proxy::start(upstream));
        Self { server, proxy, _delay_proxy: delay_proxy, inside: None, other: None, repeated: None }
    }

    fn tell(&mut self, words: &[&str]) {
        let inside = self.inside.get_or_insert_with(|| self.server.connection());
        redis::cmd(words[0]).arg(&words[1..]).exec(inside).unwrap();
    }

    /// Does something again and again, until the fault ends.
    fn repeat(&mut self, mut action: impl FnMut() + Send + 'static) {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                action();
                thread::park_timeout(Duration::from_millis(20));
            }
        });
        self.repeated = Some(Repeated { stop, thread: Some(thread) });
    }

    fn repeat_command(&mut self, words: &'static [&'static str]) {
        let mut connection = self.server.connection();
        self.repeat(move || redis::cmd(words[0]).arg(&words[1..]).exec(&mut connection).unwrap());
    }

    fn end_repeated(&mut self) {
        self.repeated = None;
    }
}

/// Ends when dropped.
struct Repeated {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Repeated {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            assert!(ended.is_ok() || thread::panicking(), "the server did not do as it was told");
        }
    }
}

const fn away(name: &'static str, begin: fn(&mut Patient), end: fn(&mut Patient)) -> Fault {
    Fault { name, effect: Effect::Away, counters: Counters::Kept, says: "", begin, end }
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

    const fn says(mut self, words: &'static str) -> Self {
        self.says = words;
        self
    }
}

/// What happens to a server's process.
pub(crate) const OF_PROCESSES: [Fault; 6] = [
    away("stopped", |it| it.server.suspend(), |it| it.server.resume()).says("no reply for"),
    away("killed and restarted", |it| it.server.stop_hard(), |it| it.server.restart()).loses_counters(),
    away(
        "paused",
        |it| it.server.pause_clients(Duration::from_secs(60), Paused::Writes),
        |it| it.server.unpause_clients(),
    ),
    away(
        "clients killed",
        |it| it.repeat_command(&["CLIENT", "KILL", "TYPE", "normal"]),
        Patient::end_repeated,
    )
    .effect(Effect::Flaky),
    away("scripts forgotten", |it| it.repeat_command(&["SCRIPT", "FLUSH"]), Patient::end_repeated)
        .effect(Effect::Unseen),
    away("loading", |it| it.server.restart_into_loading(), |it| it.server.finish_loading())
        .says("LOADING")
        .loses_counters(),
];

/// What a server says instead of deciding.
pub(crate) const OF_REFUSALS: [Fault; 6] = [
    away("busy", |it| it.server.make_busy(), |it| it.server.end_busy()).says("BUSY"),
    away(
        "out of memory",
        |it| it.server.config_set("maxmemory", 1),
        |it| it.server.config_set("maxmemory", 0),
    )
    .says("nothing changed: OOM"),
    away(
        "without replicas",
        |it| it.server.config_set("min-replicas-to-write", 1),
        |it| it.server.config_set("min-replicas-to-write", 0),
    )
    .says("nothing changed: NOREPLICAS"),
    away("unable to save", |it| it.server.break_saving(), |it| it.server.mend_saving())
        .says("nothing changed: MISCONF"),
    away(
        "too many clients",
        |it| {
            it.tell(&["CONFIG", "SET", "maxclients", "1"]);
            it.tell(&["CLIENT", "KILL", "TYPE", "normal"]);
        },
        |it| it.tell(&["CONFIG", "SET", "maxclients", "100"]),
    )
    .says("cannot connect"),
    away(
        "a replica",
        |it| it.server.replicate(it.other.insert(Server::start(it.server.flavor()))),
        |it| {
            it.server.promote();
            it.other = None;
        },
    )
    .loses_counters(),
];

/// One fault of each class, for servers that are some way off: the process, its replies, and the network.
pub(crate) const OF_DISTANT_SERVERS: [&Fault; 4] =
    [&OF_PROCESSES[0], &OF_REFUSALS[1], &OF_NETWORKS[2], &OF_NETWORKS[7]];

/// Who may do what; all of these are about [`USER`].
pub(crate) const OF_USERS: [Fault; 4] = [
    away(
        "another password",
        |it| {
            it.server.set_user(USER, &["resetpass", ">second"]);
            it.tell(&["CLIENT", "KILL", "USER", USER]);
        },
        |it| it.server.set_user(USER, &["resetpass", ">first"]),
    )
    .says("Password authentication failed"),
    away(
        "without permission",
        |it| it.server.set_user(USER, &["-@all"]),
        |it| it.server.set_user(USER, &["+@all"]),
    )
    .says("NOPERM"),
    away(
        "without its keys",
        |it| it.server.set_user(USER, &["resetkeys", "~other:*"]),
        |it| it.server.set_user(USER, &["allkeys"]),
    )
    .says("NOPERM"),
    away("no such user", |it| it.tell(&["ACL", "DELUSER", USER]), |it| it.server.set_user(USER, &EVERYTHING))
        .says("Password authentication failed"),
];

/// The one that is about those who have no password.
pub(crate) const OF_STRANGERS: [Fault; 1] = [away(
    "a password is wanted",
    |it| {
        it.tell(&["CONFIG", "SET", "requirepass", "secret"]);
        it.tell(&["CLIENT", "KILL", "TYPE", "normal"]);
    },
    |it| it.tell(&["CONFIG", "SET", "requirepass", ""]),
)
.says("NOAUTH")];

const SILENT_REPLIES: Mode =
    Mode::Swallow(Swallow { of: Requests::SCRIPTS, turn: Turn::Every(1), then: Then::Stall });
const SOME_REPLIES_LOST: Mode =
    Mode::Swallow(Swallow { of: Requests::SCRIPTS, turn: Turn::Every(3), then: Then::Cut });
/// Ten times what a request takes at best: a fault of which nobody should hear.
const SLOW: Duration = Duration::from_millis(20);
/// So slow that no answer comes in time.
const TOO_SLOW: Duration = DEADLINE;

/// What happens on the way to a server.
pub(crate) const OF_NETWORKS: [Fault; 10] = [
    away("late", |it| it.proxy.delay(TOO_SLOW), |it| it.proxy.pass()),
    away("slow", |it| it.proxy.delay(SLOW), |it| it.proxy.pass()).effect(Effect::Unseen),
    away("cut", |it| it.proxy.cut(), |it| it.proxy.pass()),
    away("refused", |it| it.proxy.set(Mode::Refuse), |it| it.proxy.pass()).says("refused"),
    away("stalled", |it| it.proxy.stall(), |it| it.proxy.pass()),
    away(
        "trickling",
        |it| it.proxy.set(Mode::Trickle { pause: Duration::from_millis(5) }),
        |it| it.proxy.pass(),
    ),
    away("without replies", |it| it.proxy.set(SILENT_REPLIES), |it| it.proxy.pass()),
    away("losing replies", |it| it.proxy.set(SOME_REPLIES_LOST), |it| it.proxy.pass()).effect(Effect::Flaky),
    away("half closed above", |it| half_close(it, Direction::Requests), Patient::end_repeated)
        .effect(Effect::Flaky),
    away("half closed below", |it| half_close(it, Direction::Replies), Patient::end_repeated)
        .effect(Effect::Flaky),
];

fn half_close(it: &mut Patient, direction: Direction) {
    let proxy = Arc::clone(&it.proxy);
    it.repeat(move || proxy.half_close(direction));
}
