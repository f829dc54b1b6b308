//! Several processes that call the library on the same counters of one Redis, and report what was admitted.
//!
//! A [`Hammer`] describes one process, and is passed on its command line. `bin/hammer.rs` runs it and prints a line
//! for each admitted call. [`run`] starts several of them at the same time and collects the lines. [`check_snapshot`]
//! verifies a single reply; the [`oracle`](crate::oracle) verifies all calls together.
//!
//! The processes use only the public API of the library.

mod arguments;
pub mod holds;
mod process;
mod skewed_clock;
mod snapshot;

use std::path::Path;
use std::process::Command;
use std::time::{Duration, SystemTime};

use sluicegate::{Labels, Limit, Rule};

use self::process::ReportingProcess;
pub use self::skewed_clock::SkewedClock;
pub use self::snapshot::check_snapshot;
use crate::oracle::Admitted;

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
    let spawn = |hammer: &Hammer| {
        let mut command = Command::new(program.as_ref());
        command.args(hammer.to_args());
        if let Some(clock) = &hammer.clock {
            clock.apply_to(&mut command);
        }
        ReportingProcess::spawn(command)
    };
    let mut processes: Vec<_> = hammers.iter().map(spawn).collect();
    processes.iter_mut().for_each(ReportingProcess::wait_until_ready);
    processes.iter_mut().for_each(ReportingProcess::begin);
    let running = |process| HammerProcess { process, report: HammerReport::default() };
    processes.into_iter().map(running).collect()
}

/// A running process, killed on drop.
#[derive(Debug)]
pub struct HammerProcess {
    process: ReportingProcess,
    report: HammerReport,
}

impl HammerProcess {
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
        self.process.kill();
        while self.read() {}
        self.report
    }

    /// Waits until the process ends, and returns its report.
    ///
    /// # Panics
    ///
    /// When the process fails or times out.
    #[must_use]
    pub fn finish(mut self) -> HammerReport {
        while self.read() {}
        let status = self.process.wait();
        assert!(status.success() && self.report.calls.is_some(), "a hammer ended early: {status}");
        self.report
    }

    /// Reads a line of the report. Returns `false` at the end.
    fn read(&mut self) -> bool {
        let Some(line) = self.process.next_line() else { return false };
        match ReportLine::parse(&line) {
            Some(ReportLine::AdmittedCall(call)) => self.report.admitted.push(call),
            Some(ReportLine::Done(calls)) => self.report.calls = Some(calls),
            Some(ReportLine::Failed(reason)) => panic!("a hammer failed: {reason}"),
            None => panic!("unexpected output of a hammer: {line:?}"),
        }
        true
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

#[cfg(test)]
mod tests {
    use super::*;

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
}
