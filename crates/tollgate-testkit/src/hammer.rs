//! Several processes that call the library on the same counters of one Redis, and report what was admitted.
//!
//! A [`Hammer`] describes one process, and is passed on its command line. `bin/hammer.rs` runs it and prints a line
//! for each admitted call. [`run`] starts several of them at the same time and collects the lines. [`check_snapshot`]
//! verifies a single reply; the [`oracle`](crate::oracle) verifies all calls together.
//!
//! The processes use only the public API of the library.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, SystemTime};

use tollgate::{Algorithm, Cost, Decision, Labels, Limit, Outcome, Retry, Rule, Source, TierDecision};

use crate::oracle::Admitted;

/// Timeout of a process: several times what the slowest test needs on a busy machine.
const PROCESS_DEADLINE: Duration = Duration::from_secs(60);

/// The line that a process prints when it is connected and waits for the end of its input.
const READY: &str = "ready";

/// The work of one process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hammer {
    /// The URL of the Redis.
    pub url: String,
    /// The limit of each key.
    pub limit: Limit,
    /// The keys, used in turn; without white space.
    pub keys: Vec<String>,
    /// A second tier: a user without white space, and its limit.
    pub user: Option<(String, Limit)>,
    /// The costs of the calls, used in turn.
    pub costs: Vec<u64>,
    /// Number of concurrent calls.
    pub callers: usize,
    /// When the process stops.
    pub workload: Workload,
    /// A skewed clock of the process, if any.
    pub clock: Option<SkewedClock>,
}

/// A skewed clock of one process. Its reported times are on that clock, except for the times of the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SkewedClock {
    /// Offset in seconds.
    pub offset_seconds: i64,
    /// Number of its seconds in ten real seconds.
    pub seconds_in_ten: u32,
}

impl SkewedClock {
    /// Returns the setting of libfaketime.
    fn setting(&self) -> String {
        let SkewedClock { offset_seconds, seconds_in_ten } = self;
        format!("{offset_seconds:+} x{}.{}", seconds_in_ten / 10, seconds_in_ten % 10)
    }

    fn text(&self) -> String {
        format!("{}:{}", self.offset_seconds, self.seconds_in_ten)
    }

    fn parse(text: &str) -> Option<SkewedClock> {
        let (offset, speed) = text.split_once(':')?;
        Some(SkewedClock { offset_seconds: offset.parse().ok()?, seconds_in_ten: speed.parse().ok()? })
    }

    /// Runs a process with this clock.
    ///
    /// # Panics
    ///
    /// When libfaketime is missing.
    pub fn apply_to(&self, command: &mut Command) {
        let libraries = Path::new("/usr/lib").read_dir().into_iter().flatten().flatten();
        let mut libraries = libraries.map(|entry| entry.path().join("faketime/libfaketimeMT.so.1"));
        let library = libraries.find(|path| path.exists());
        let library = library.unwrap_or_else(|| panic!("libfaketime is missing: run scripts/servers"));
        command.env("LD_PRELOAD", library).env("FAKETIME", self.setting());
    }
}

/// When a process stops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Workload {
    /// After this many calls of all callers together.
    Calls(u64),
    /// After this time.
    Time(Duration),
}

/// The report of one process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HammerReport {
    /// The calls that were admitted.
    pub admitted: Vec<AdmittedCall>,
    /// Number of calls; unknown if the process was killed.
    pub calls: Option<u64>,
}

/// A call that was admitted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdmittedCall {
    /// The key.
    pub key: String,
    /// When it was sent and received, since the epoch on the system clock, and its cost.
    pub call: Admitted,
    /// The time of the decision on the clock of the store.
    pub at: Duration,
}

/// Runs the processes at the same time, and returns their reports in order.
///
/// `program` is the path of the built `bin/hammer.rs`: `env!("CARGO_BIN_EXE_hammer")`.
///
/// # Panics
///
/// When a process fails, finds an inconsistent reply, or times out.
#[must_use]
pub fn run(program: impl AsRef<Path>, hammers: &[Hammer]) -> Vec<HammerReport> {
    start(program, hammers).into_iter().map(HammerProcess::finish).collect()
}

/// Starts the processes, and lets them begin once all are ready.
///
/// # Panics
///
/// When a process does not start in time.
#[must_use]
pub fn start(program: impl AsRef<Path>, hammers: &[Hammer]) -> Vec<HammerProcess> {
    let mut processes: Vec<_> =
        hammers.iter().map(|hammer| HammerProcess::spawn(program.as_ref(), hammer)).collect();
    for process in &mut processes {
        let line = process.next_line();
        assert_eq!(line.as_deref(), Some(READY), "a hammer does not start");
    }
    for process in &mut processes {
        drop(process.child.stdin.take());
    }
    processes
}

/// A running process, killed on drop.
#[derive(Debug)]
pub struct HammerProcess {
    child: Child,
    lines: Receiver<String>,
    deadline: Duration,
    report: HammerReport,
}

impl HammerProcess {
    fn spawn(program: &Path, hammer: &Hammer) -> HammerProcess {
        let mut command = Command::new(program);
        command.args(hammer.to_args()).stdin(Stdio::piped()).stdout(Stdio::piped());
        if let Some(clock) = &hammer.clock {
            clock.apply_to(&mut command);
        }
        let mut child =
            command.spawn().unwrap_or_else(|error| panic!("{} cannot be run: {error}", program.display()));
        let output = BufReader::new(child.stdout.take().expect("the output is a pipe"));
        let (tell, lines) = channel();
        // A read has no timeout, but a channel has. The thread ends with the process.
        thread::spawn(move || output.lines().map_while(Result::ok).try_for_each(|line| tell.send(line)));
        HammerProcess {
            child,
            lines,
            deadline: system_time() + PROCESS_DEADLINE,
            report: HammerReport::default(),
        }
    }

    /// Waits until this many calls have been admitted, or the process has ended.
    ///
    /// # Panics
    ///
    /// When the process fails or times out.
    pub fn wait_for_admitted(&mut self, admitted: usize) {
        while self.report.admitted.len() < admitted && self.read() {}
    }

    /// Kills the process with SIGKILL, and returns its report up to then.
    ///
    /// # Panics
    ///
    /// When it failed before.
    #[must_use]
    pub fn kill(mut self) -> HammerReport {
        // An error means that the process has ended already.
        let _ = self.child.kill();
        while self.read() {}
        std::mem::take(&mut self.report)
    }

    /// Waits until the process ends, and returns its report.
    ///
    /// # Panics
    ///
    /// When the process fails or times out.
    #[must_use]
    pub fn finish(mut self) -> HammerReport {
        while self.read() {}
        let status = self.child.wait().expect("a child can be waited for");
        assert!(status.success() && self.report.calls.is_some(), "a hammer ended early: {status}");
        std::mem::take(&mut self.report)
    }

    /// Reads a line of the report. Returns `false` at the end.
    fn read(&mut self) -> bool {
        let Some(line) = self.next_line() else { return false };
        match ReportLine::parse(&line) {
            Some(ReportLine::AdmittedCall(call)) => self.report.admitted.push(call),
            Some(ReportLine::Done(calls)) => self.report.calls = Some(calls),
            Some(ReportLine::Failed(reason)) => panic!("a hammer failed: {reason}"),
            None => panic!("unexpected output of a hammer: {line:?}"),
        }
        true
    }

    fn next_line(&mut self) -> Option<String> {
        match self.lines.recv_timeout(self.deadline.saturating_sub(system_time())) {
            Ok(line) => Some(line),
            Err(RecvTimeoutError::Disconnected) => None,
            Err(RecvTimeoutError::Timeout) => panic!("a hammer did not end within {PROCESS_DEADLINE:?}"),
        }
    }
}

impl Drop for HammerProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A line that a process prints once it is ready.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReportLine {
    /// A call was admitted.
    AdmittedCall(AdmittedCall),
    /// The process is done, after this many calls.
    Done(u64),
    /// The process failed with this error.
    Failed(String),
}

impl ReportLine {
    /// Returns the line, including the line break.
    #[must_use]
    pub fn text(&self) -> String {
        match self {
            ReportLine::AdmittedCall(AdmittedCall { key, call: Admitted { sent, received, cost }, at }) => {
                let [sent, received, at] = [sent, received, at].map(|moment| moment.as_micros());
                format!("admitted {sent} {received} {cost} {at} {key}\n")
            }
            ReportLine::Done(calls) => format!("done {calls}\n"),
            ReportLine::Failed(reason) => format!("failed {}\n", reason.replace('\n', " ")),
        }
    }

    fn parse(line: &str) -> Option<ReportLine> {
        let (kind, rest) = line.split_once(' ')?;
        match kind {
            "admitted" => {
                let fields: Vec<&str> = rest.split(' ').collect();
                let [sent, received, cost, at, key] = *fields else { return None };
                let moment = |text: &str| text.parse().ok().map(Duration::from_micros);
                let call =
                    Admitted { sent: moment(sent)?, received: moment(received)?, cost: cost.parse().ok()? };
                Some(ReportLine::AdmittedCall(AdmittedCall { key: key.to_owned(), call, at: moment(at)? }))
            }
            "done" => rest.parse().ok().map(ReportLine::Done),
            "failed" => Some(ReportLine::Failed(rest.to_owned())),
            _ => None,
        }
    }
}

impl Hammer {
    /// Returns the limits of a call, in the order of its tiers.
    #[must_use]
    pub fn limits(&self) -> Vec<Limit> {
        [self.limit].into_iter().chain(self.user.as_ref().map(|(_, limit)| *limit)).collect()
    }

    /// Returns the rules of the process.
    #[must_use]
    pub fn rules(&self) -> Vec<Rule> {
        let per_user = self.user.as_ref().map(|(_, limit)| Rule::new("per-user", *limit).per(["user"]));
        [Rule::new("per-key", self.limit).per(["key"])].into_iter().chain(per_user).collect()
    }

    /// Returns the labels of a call on a key.
    ///
    /// # Panics
    ///
    /// When the key or the user is too long for a label.
    #[must_use]
    pub fn labels(&self, key: &str) -> Labels {
        let user = self.user.as_ref().map(|(name, _)| ("user", name.as_str()));
        Labels::new([("key", key)].into_iter().chain(user)).expect("keys and users are short")
    }

    fn to_args(&self) -> Vec<String> {
        let mut args = vec![
            format!("--url={}", self.url),
            format!("--limit={}", limit_text(&self.limit)),
            format!("--callers={}", self.callers),
            match self.workload {
                Workload::Calls(calls) => format!("--calls={calls}"),
                Workload::Time(time) => format!("--millis={}", time.as_millis()),
            },
        ];
        args.extend(self.keys.iter().map(|key| format!("--key={key}")));
        args.extend(self.costs.iter().map(|cost| format!("--cost={cost}")));
        if let Some((name, limit)) = &self.user {
            args.extend([format!("--user={name}"), format!("--user-limit={}", limit_text(limit))]);
        }
        args.extend(self.clock.iter().map(|clock| format!("--clock={}", clock.text())));
        args
    }

    /// Parses a command line:
    ///
    /// ```text
    /// --url=URL --limit=ALGORITHM:AMOUNT:WINDOW_MS[:BURST] --key=KEY... --cost=COST... --callers=COUNT
    /// (--calls=COUNT | --millis=TIME) [--user=NAME --user-limit=LIMIT] [--clock=OFFSET:SPEED]
    /// ```
    ///
    /// # Errors
    ///
    /// When an argument is unknown, invalid or missing.
    pub fn from_args(args: impl IntoIterator<Item = String>) -> Result<Hammer, String> {
        let (mut url, mut limit, mut callers, mut workload) = (None, None, None, None);
        let (mut user, mut user_limit, mut clock) = (None, None, None);
        let (mut keys, mut costs) = (Vec::new(), Vec::new());
        for arg in args {
            let (name, value) = arg.split_once('=').ok_or_else(|| format!("{arg}: not --name=value"))?;
            let number = || value.parse::<u64>().map_err(|error| format!("{arg}: {error}"));
            match name {
                "--url" => url = Some(value.to_owned()),
                "--limit" => limit = Some(parse_limit(value)?),
                "--key" => keys.push(value.to_owned()),
                "--cost" => costs.push(number()?),
                "--callers" => callers = usize::try_from(number()?).ok(),
                "--calls" => workload = Some(Workload::Calls(number()?)),
                "--millis" => workload = Some(Workload::Time(Duration::from_millis(number()?))),
                "--user" => user = Some(value.to_owned()),
                "--user-limit" => user_limit = Some(parse_limit(value)?),
                "--clock" => {
                    let parsed = SkewedClock::parse(value);
                    clock = Some(parsed.ok_or_else(|| format!("{arg}: not OFFSET:SPEED"))?);
                }
                _ => return Err(format!("{arg}: unknown argument")),
            }
        }
        if keys.is_empty() || costs.is_empty() || user.is_some() != user_limit.is_some() {
            return Err("needs --key and --cost, and --user together with --user-limit".to_owned());
        }
        Ok(Hammer {
            url: url.ok_or("needs --url")?,
            limit: limit.ok_or("needs --limit")?,
            keys,
            user: user.zip(user_limit),
            costs,
            callers: callers.ok_or("needs --callers")?,
            workload: workload.ok_or("needs --calls or --millis")?,
            clock,
        })
    }
}

fn limit_text(limit: &Limit) -> String {
    let text = format!("{}:{}:{}", limit.algorithm(), limit.amount(), limit.window().as_millis());
    match limit.algorithm() {
        Algorithm::TokenBucket => format!("{text}:{}", limit.capacity()),
        Algorithm::FixedWindow | Algorithm::SlidingLog | Algorithm::SlidingCounter => text,
    }
}

fn parse_limit(text: &str) -> Result<Limit, String> {
    let wrong = |reason: &dyn std::fmt::Display| format!("limit {text:?}: {reason}");
    let number = |part: &str| part.parse::<u64>().map_err(|error| wrong(&error));
    let parts: Vec<&str> = text.split(':').collect();
    let (algorithm, amount, window, burst) = match *parts {
        [algorithm, amount, window] => (algorithm, amount, window, None),
        [algorithm, amount, window, burst] => (algorithm, amount, window, Some(burst)),
        _ => return Err(wrong(&"use ALGORITHM:AMOUNT:WINDOW_MS[:BURST]")),
    };
    let algorithm = algorithm.parse().map_err(|error| wrong(&error))?;
    let window = Duration::from_millis(number(window)?);
    let limit = Limit::new(algorithm, number(amount)?, window).map_err(|error| wrong(&error))?;
    match burst {
        Some(burst) => limit.with_burst(number(burst)?).map_err(|error| wrong(&error)),
        None => Ok(limit),
    }
}

/// Returns the system time, in whole microseconds since the epoch.
///
/// An `Instant` cannot be compared across processes. On one machine the system clock is also the clock of Redis: a decision must lie
/// between the send and the receipt of its call.
#[must_use]
#[expect(clippy::disallowed_methods, reason = "no other clock can be compared across processes")]
pub fn system_time() -> Duration {
    let since_epoch = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("it is after 1970");
    Duration::new(since_epoch.as_secs(), since_epoch.subsec_micros() * 1_000)
}

/// Checks that all fields of a reply are consistent: outcome, remaining, retry and reset, in each tier and between tiers. Applies to
/// enforced rules without overdraft and debt.
///
/// `ahead` is how far a counter may be dated ahead of a decision: zero in Redis, where one thread reads one clock; in memory, the time
/// a thread may be suspended between reading the clock and taking the lock.
///
/// # Errors
///
/// The inconsistency, with the reply.
pub fn check_snapshot(
    decision: &Decision,
    limits: &[Limit],
    cost: Cost,
    ahead: Duration,
) -> Result<(), String> {
    let inconsistent =
        |what: String| Err(format!("{what}, at a cost of {} under {limits:?}: {decision:?}", cost.units()));
    if decision.source == Source::Cache {
        return match is_cached_denial(decision, limits, cost) {
            true => Ok(()),
            false => inconsistent("neither a cached denial nor decided by the store".to_owned()),
        };
    }
    let Some(at) = decision.at.filter(|_| matches!(decision.source, Source::Store | Source::Memory)) else {
        return inconsistent("not decided by the store".to_owned());
    };
    if decision.tiers.len() != limits.len() {
        return inconsistent("wrong number of tiers".to_owned());
    }
    for (index, (tier, limit)) in decision.tiers.iter().zip(limits).enumerate() {
        let asked = TierCheck {
            limit,
            cost: cost.units(),
            at_us: at.as_micros(),
            ahead,
            charged: decision.is_allowed(),
        };
        if let Some(what) = asked.inconsistency(tier) {
            return inconsistent(format!("tier {index}: {what}"));
        }
    }
    let refusals = decision.tiers.iter().filter_map(|tier| match tier.outcome {
        Outcome::Denied { retry } => Some(retry),
        Outcome::Allowed => None,
    });
    let expected = refusals.max().map_or(Outcome::Allowed, |retry| Outcome::Denied { retry });
    if decision.outcome != expected {
        return inconsistent(format!("its tiers imply {expected:?}"));
    }
    Ok(())
}

/// Returns whether a decision without the store is a denial by some tiers with a retry_after.
fn is_cached_denial(decision: &Decision, limits: &[Limit], cost: Cost) -> bool {
    let refuses = |tier: &TierDecision| {
        let waits = matches!(tier.outcome, Outcome::Denied { retry: Retry::After(wait) } if !wait.is_zero());
        let is_asked = limits.iter().any(|limit| limit.capacity() == tier.limit);
        waits && is_asked && tier.remaining < cost.units()
    };
    let is_known = decision.at.is_none() && !decision.is_allowed() && decision.retry_after().is_some();
    is_known && !decision.tiers.is_empty() && decision.tiers.iter().all(refuses)
}

/// The check of one tier, and whether the whole check was charged.
struct TierCheck<'a> {
    limit: &'a Limit,
    cost: u64,
    at_us: u64,
    ahead: Duration,
    charged: bool,
}

impl TierCheck<'_> {
    fn inconsistency(&self, tier: &TierDecision) -> Option<&'static str> {
        let retry_wrong = match tier.outcome {
            Outcome::Allowed => false,
            Outcome::Denied { retry: Retry::Never } => self.cost <= tier.limit,
            Outcome::Denied { retry: Retry::After(wait) } => wait.is_zero() || wait > tier.reset_after,
        };
        let fits_wrong = match tier.outcome {
            Outcome::Allowed if self.charged => tier.limit.saturating_sub(tier.remaining) < self.cost,
            Outcome::Allowed => tier.remaining < self.cost,
            Outcome::Denied { .. } => tier.remaining >= self.cost,
        };
        let reset_us = u64::try_from(tier.reset_after.as_micros()).unwrap_or(u64::MAX);
        [
            (tier.limit != self.limit.capacity(), "the limit is not the capacity"),
            (tier.remaining > tier.limit, "more remains than the limit"),
            (retry_wrong, "retry does not match the outcome"),
            (fits_wrong, "remaining does not match the outcome"),
            (
                (tier.remaining == tier.limit) != (reset_us == 0),
                "reset_after without usage, or usage without reset_after",
            ),
            (reset_us > 0 && !self.reset_is_possible(tier, reset_us), "reset_after is not possible"),
        ]
        .into_iter()
        .find_map(|(is_wrong, what)| is_wrong.then_some(what))
    }

    /// Returns whether this reset_after is consistent with the usage and with the charge of this check.
    fn reset_is_possible(&self, tier: &TierDecision, reset_us: u64) -> bool {
        let window = self.limit.window_us();
        let just_charged = self.charged && self.cost > 0;
        let ahead = u64::try_from(self.ahead.as_micros()).unwrap_or(u64::MAX);
        let is_edge = |phase: u64| (self.at_us + reset_us - phase).is_multiple_of(window);
        let (shortest, longest) = match self.limit.algorithm() {
            Algorithm::FixedWindow if !is_edge(self.limit.phase_us()) => return false,
            Algorithm::SlidingCounter if !is_edge(0) => return false,
            Algorithm::FixedWindow => (1, window),
            Algorithm::SlidingLog => (if just_charged { window } else { 1 }, window),
            Algorithm::SlidingCounter => (if just_charged { window + 1 } else { 1 }, 2 * window),
            Algorithm::TokenBucket => {
                let used = tier.limit.saturating_sub(tier.remaining);
                (self.drain_us(used.saturating_sub(1)), self.drain_us(used))
            }
        };
        (shortest..=longest.saturating_add(ahead)).contains(&reset_us)
    }

    /// Returns how long a bucket takes to drain `units`, rounded up.
    fn drain_us(&self, units: u64) -> u64 {
        let micros = u128::from(units) * u128::from(self.limit.window_us());
        u64::try_from(micros.div_ceil(u128::from(self.limit.amount()))).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tollgate::{Limiter, ManualClock, MemoryStore, Timestamp};

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_command_line_round_trips_a_hammer() {
        let bucket = Limit::token_bucket(7, SECOND).unwrap().with_burst(3).unwrap();
        let plain = Hammer {
            url: "redis://127.0.0.1:1".to_owned(),
            limit: Limit::sliding_log(100, Duration::from_millis(1)).unwrap(),
            keys: vec!["a".to_owned(), "b=c".to_owned()],
            user: None,
            costs: vec![1, 5],
            callers: 3,
            workload: Workload::Calls(9),
            clock: None,
        };
        let tiered = Hammer {
            user: Some(("me".to_owned(), bucket)),
            workload: Workload::Time(SECOND),
            clock: Some(SkewedClock { offset_seconds: -5, seconds_in_ten: 3 }),
            ..plain.clone()
        };
        for hammer in [plain, tiered] {
            assert_eq!(Hammer::from_args(hammer.to_args()), Ok(hammer.clone()));
            let mut args = hammer.to_args();
            args.remove(0);
            assert_eq!(Hammer::from_args(args), Err("needs --url".to_owned()));
        }
        assert!(parse_limit("sliding-log:1").is_err() && parse_limit("sliding-log:1:1:1").is_err());
    }

    #[test]
    fn a_report_line_round_trips() {
        let [sent, at, received] = [5, 6, 7].map(Duration::from_micros);
        let call = AdmittedCall { key: "k".to_owned(), call: Admitted { sent, received, cost: 2 }, at };
        assert_eq!(ReportLine::AdmittedCall(call.clone()).text(), "admitted 5 7 2 6 k\n");
        for line in [
            ReportLine::AdmittedCall(call),
            ReportLine::Done(8),
            ReportLine::Failed("unreachable".to_owned()),
        ] {
            assert_eq!(ReportLine::parse(line.text().trim_end()), Some(line));
        }
        assert_eq!(ReportLine::parse("admitted 5 7 2 6"), None);
    }

    /// Returns one admitted and one denied reply of each algorithm.
    fn replies() -> Vec<(Limit, Decision)> {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let clock = ManualClock::new(Timestamp::from_micros(1_794_765_441_799_839));
        let limiter = Limiter::new(MemoryStore::new().with_clock(clock), []).unwrap();
        let mut replies = Vec::new();
        for algorithm in Algorithm::ALL {
            let limit = Limit::new(algorithm, 5, SECOND).unwrap();
            for _ in 0..2 {
                let decision = runtime.block_on(limiter.check_key("k", &limit, Cost::from(3))).unwrap();
                replies.push((limit, decision));
            }
        }
        replies
    }

    #[test]
    fn a_consistent_reply_is_accepted_and_any_altered_one_is_not() {
        type Alteration = (&'static str, fn(&mut Decision));
        let alterations: [Alteration; 10] = [
            ("source", |reply| reply.source = Source::Open),
            ("time", |reply| reply.at = None),
            ("tiers", |reply| reply.tiers.clear()),
            ("outcome", |reply| {
                reply.outcome = match reply.outcome {
                    Outcome::Allowed => Outcome::Denied { retry: Retry::Never },
                    Outcome::Denied { .. } => Outcome::Allowed,
                };
            }),
            ("retry", |reply| {
                reply.tiers[0].outcome = Outcome::Denied { retry: Retry::After(Duration::ZERO) };
            }),
            ("never", |reply| reply.tiers[0].outcome = Outcome::Denied { retry: Retry::Never }),
            ("limit", |reply| reply.tiers[0].limit += 1),
            ("remaining", |reply| reply.tiers[0].remaining = 5),
            ("no reset", |reply| reply.tiers[0].reset_after = Duration::ZERO),
            ("late reset", |reply| reply.tiers[0].reset_after += 2 * SECOND),
        ];
        for (limit, reply) in replies() {
            let cost = Cost::from(3);
            assert_eq!(check_snapshot(&reply, &[limit], cost, Duration::ZERO), Ok(()));
            for (what, alter) in &alterations {
                let mut altered = reply.clone();
                alter(&mut altered);
                let verdict = check_snapshot(&altered, &[limit], cost, Duration::ZERO);
                assert!(verdict.is_err(), "an altered {what} is not detected: {altered:?}");
            }
        }
    }
}
