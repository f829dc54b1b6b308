//! Several processes that hold and settle on the same counters of one Redis, and report each step.
//!
//! A [`HoldHammer`] describes one process. `bin/hold_hammer.rs` runs it and prints a line before and after each step, so that the report of a
//! killed process contains every hold that it may have made or settled. [`HoldReport`] collects the lines of all processes and verifies them.

use std::collections::HashMap;
use std::ops::RangeInclusive;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use sluicegate::limiter::OnExpiry;
use sluicegate::{Cost, Costs, Labels, Limit, OnStoreFailure, Rule};
use sluicegate_core::limit::MAX_WINDOW;

use super::process::ReportingProcess;

/// The limit of requests in flight, shared by all processes.
pub const IN_FLIGHT: u64 = 10;
/// The limit of tokens in [`WINDOW`], shared by all processes.
pub const TOKENS: u64 = 600;
/// The window of [`TOKENS`].
pub const WINDOW: Duration = Duration::from_millis(500);
/// The limit of tokens of one account.
pub const BUDGET: u64 = 150;
/// The time until a hold expires.
pub const TTL: Duration = Duration::from_secs(1);

/// The work of one process. It runs until it is killed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HoldHammer {
    /// The URL of the Redis.
    pub url: String,
    /// The rules.
    pub tiers: Tiers,
    /// Number of concurrent callers.
    pub callers: usize,
    /// The tokens of each hold.
    pub estimate: u64,
    /// The tokens with which holds are settled.
    pub actual: RangeInclusive<u64>,
}

/// The rules of a hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tiers {
    /// Requests in flight, tokens in a short window, a budget of tokens for each account, and requests that are refunded if their hold
    /// expires.
    All,
    /// Requests in flight and the budgets, which Redis decides on the fast path of the script.
    FastPath,
}

impl HoldHammer {
    fn to_args(&self) -> Vec<String> {
        let Self { url, tiers, callers, estimate, actual } = self;
        let tiers = match tiers {
            Tiers::All => "all",
            Tiers::FastPath => "fast-path",
        };
        let numbers = [*callers as u64, *estimate, *actual.start(), *actual.end()];
        [url.clone(), tiers.to_owned()].into_iter().chain(numbers.map(|number| number.to_string())).collect()
    }

    /// Parses a command line: `URL TIERS CALLERS ESTIMATE LEAST_ACTUAL MOST_ACTUAL`.
    ///
    /// # Errors
    ///
    /// When an argument is invalid or missing.
    pub fn from_args(args: impl IntoIterator<Item = String>) -> Result<HoldHammer, String> {
        let args: Vec<String> = args.into_iter().collect();
        let [url, tiers, numbers @ ..] = &*args else { return Err("needs a URL and tiers".to_owned()) };
        let tiers = match &**tiers {
            "all" => Tiers::All,
            "fast-path" => Tiers::FastPath,
            _ => return Err(format!("tiers {tiers:?}: use all or fast-path")),
        };
        let numbers: Result<Vec<u64>, _> = numbers.iter().map(|number| number.parse()).collect();
        match numbers.as_deref() {
            Ok(&[callers, estimate, least, most]) => Ok(HoldHammer {
                url: url.clone(),
                tiers,
                callers: usize::try_from(callers).map_err(|error| error.to_string())?,
                estimate,
                actual: least..=most,
            }),
            _ => Err("needs URL TIERS CALLERS ESTIMATE LEAST_ACTUAL MOST_ACTUAL".to_owned()),
        }
    }
}

impl Tiers {
    /// Returns the rules.
    ///
    /// # Panics
    ///
    /// Never: the limits are valid.
    #[must_use]
    pub fn rules(self) -> Vec<Rule> {
        let limit = |limit: Result<Limit, _>| limit.expect("within the range");
        let requests = limit(Limit::fixed_window(1_000_000, MAX_WINDOW));
        let requests = limit(requests.with_on_expiry(OnExpiry::Release));
        let budget = limit(Limit::fixed_window(BUDGET, MAX_WINDOW));
        let in_flight = Rule::new("in-flight", limit(Limit::concurrency(IN_FLIGHT)));
        let budget = Rule::new("budget", budget).per(["account"]).unit("tokens");
        let tokens = Rule::new("tokens", limit(Limit::sliding_log(TOKENS, WINDOW))).unit("tokens");
        let requests = Rule::new("requests", requests);
        let rules = match self {
            Self::All => vec![in_flight, budget, tokens, requests],
            Self::FastPath => vec![in_flight, budget],
        };
        rules.into_iter().map(|rule| rule.ttl(TTL).on_store_failure(OnStoreFailure::Closed)).collect()
    }
}

/// Returns the labels of a request of an account.
///
/// # Panics
///
/// When the name is too long for a label.
#[must_use]
pub fn labels(account: &str) -> Labels {
    Labels::new([("account", account)]).expect("accounts are short")
}

/// Returns the costs of requests and tokens.
///
/// # Panics
///
/// When a number is too large.
#[must_use]
pub fn costs(requests: u64, tokens: u64) -> Costs {
    let cost = |units| Cost::new(units).expect("within the range");
    Costs::new([("requests", cost(requests)), ("tokens", cost(tokens))]).expect("two units")
}

/// A step of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HoldStep {
    /// A hold is about to be sent.
    Holding {
        /// Its account, without white space.
        account: String,
    },
    /// The store made the hold.
    Held {
        /// When, on the store's clock.
        at: Duration,
        /// When it expires, on the store's clock.
        expires_at: Duration,
    },
    /// The store denied the hold.
    Denied,
    /// A settlement is about to be sent.
    Settling {
        /// The system time.
        sent: Duration,
        /// The actual number of tokens.
        tokens: u64,
        /// The actual number of requests: 0 if the hold is released.
        requests: u64,
    },
    /// The store has settled the hold.
    Settled,
}

impl HoldStep {
    /// Returns the line of a step of the named request, including the line break.
    #[must_use]
    pub fn text(&self, request: &str) -> String {
        match self {
            Self::Holding { account } => format!("holding {request} {account}\n"),
            Self::Held { at, expires_at } => {
                format!("held {request} {} {}\n", at.as_micros(), expires_at.as_micros())
            }
            Self::Denied => format!("denied {request}\n"),
            Self::Settling { sent, tokens, requests } => {
                format!("settling {request} {} {tokens} {requests}\n", sent.as_micros())
            }
            Self::Settled => format!("settled {request}\n"),
        }
    }

    fn parse(line: &str) -> Option<(String, HoldStep)> {
        let fields: Vec<&str> = line.split(' ').collect();
        let moment = |text: &str| text.parse().ok().map(Duration::from_micros);
        let step = match *fields {
            ["holding", _, account] => Self::Holding { account: account.to_owned() },
            ["held", _, at, expires] => Self::Held { at: moment(at)?, expires_at: moment(expires)? },
            ["denied", _] => Self::Denied,
            ["settling", _, sent, tokens, requests] => Self::Settling {
                sent: moment(sent)?,
                tokens: tokens.parse().ok()?,
                requests: requests.parse().ok()?,
            },
            ["settled", _] => Self::Settled,
            _ => return None,
        };
        Some((fields[1].to_owned(), step))
    }
}

/// A running process, killed on drop.
#[derive(Debug)]
pub struct HoldProcess(ReportingProcess);

/// Starts the processes, and lets them begin once all are ready.
///
/// `program` is the path of the built `bin/hold_hammer.rs`: `env!("CARGO_BIN_EXE_hold_hammer")`.
///
/// # Panics
///
/// When a process does not start in time.
#[must_use]
pub fn start(program: impl AsRef<Path>, hammers: &[HoldHammer]) -> Vec<HoldProcess> {
    let spawn = |hammer: &HoldHammer| {
        let mut command = Command::new(program.as_ref());
        command.args(hammer.to_args());
        ReportingProcess::spawn(command)
    };
    let mut processes: Vec<_> = hammers.iter().map(spawn).collect();
    processes.iter_mut().for_each(ReportingProcess::wait_until_ready);
    processes.iter_mut().for_each(ReportingProcess::begin);
    processes.into_iter().map(HoldProcess).collect()
}

impl HoldProcess {
    /// Kills the process with SIGKILL, and adds its steps up to then to the report.
    ///
    /// # Panics
    ///
    /// When it failed before.
    pub fn kill(mut self, report: &mut HoldReport) {
        self.0.kill();
        while let Some(line) = self.0.next_line() {
            let (request, step) =
                HoldStep::parse(&line).unwrap_or_else(|| panic!("a hammer failed: {line:?}"));
            report.add(request, step);
        }
    }
}

/// What is known about a request.
#[derive(Clone, Debug, Default)]
struct Reported {
    account: String,
    is_denied: bool,
    /// When it was held and when the hold expires.
    held: Option<(Duration, Duration)>,
    settling: Option<Actual>,
    is_settled: bool,
}

#[derive(Clone, Copy, Debug)]
struct Actual {
    sent: Duration,
    tokens: u64,
    requests: u64,
}

/// The steps of all processes.
#[derive(Debug)]
pub struct HoldReport {
    tiers: Tiers,
    estimate: u64,
    requests: HashMap<String, Reported>,
}

/// The least and the most that a counter may have counted.
pub type Bounds = RangeInclusive<u64>;

impl HoldReport {
    /// Returns an empty report of such processes.
    #[must_use]
    pub fn new(hammer: &HoldHammer) -> HoldReport {
        HoldReport { tiers: hammer.tiers, estimate: hammer.estimate, requests: HashMap::new() }
    }

    fn add(&mut self, request: String, step: HoldStep) {
        let reported = self.requests.entry(request).or_default();
        match step {
            HoldStep::Holding { account } => reported.account = account,
            HoldStep::Held { at, expires_at } => reported.held = Some((at, expires_at)),
            HoldStep::Denied => reported.is_denied = true,
            HoldStep::Settling { sent, tokens, requests } => {
                reported.settling = Some(Actual { sent, tokens, requests });
            }
            HoldStep::Settled => reported.is_settled = true,
        }
    }

    fn count(&self, is_counted: impl Fn(&Reported) -> bool) -> usize {
        self.requests.values().filter(|request| is_counted(request)).count()
    }

    /// Returns the number of holds, of settlements and of denials that were reported.
    #[must_use]
    pub fn counts(&self) -> [usize; 3] {
        [
            self.count(|request| request.held.is_some()),
            self.count(|request| request.is_settled),
            self.count(|request| request.is_denied),
        ]
    }

    /// Returns the accounts.
    #[must_use]
    pub fn accounts(&self) -> Vec<&str> {
        let mut accounts: Vec<&str> =
            self.requests.values().map(|request| request.account.as_str()).collect();
        accounts.sort_unstable();
        accounts.dedup();
        accounts
    }

    fn of_account<'a>(&'a self, account: &'a str) -> impl Iterator<Item = &'a Reported> {
        self.requests.values().filter(move |request| request.account == account)
    }

    /// Returns how many tokens the budget of an account has counted if every hold was charged once and settled at most once. Steps whose result
    /// was not reported, because a process was killed or the store did not answer, may have had an effect.
    #[must_use]
    pub fn tokens_of(&self, account: &str) -> Bounds {
        let bounds = self.of_account(account).map(|request| match (request.held, request.settling) {
            _ if request.is_denied => (0, 0),
            (None, _) => (0, self.estimate),
            (Some(_), None) => (self.estimate, self.estimate),
            (Some(_), Some(actual)) if request.is_settled => (actual.tokens, actual.tokens),
            (Some(_), Some(actual)) => (actual.tokens.min(self.estimate), actual.tokens.max(self.estimate)),
        });
        let (least, most) = bounds.fold((0, 0), |sum, bounds| (sum.0 + bounds.0, sum.1 + bounds.1));
        least..=most
    }

    /// Returns by how many tokens settlements of an account may have exceeded the estimates.
    #[must_use]
    pub fn excess_of(&self, account: &str) -> u64 {
        let settling = self.of_account(account).filter_map(|request| request.settling);
        settling.map(|actual| actual.tokens.saturating_sub(self.estimate)).sum()
    }

    /// Returns how many tokens requests of an account have certainly used.
    #[must_use]
    pub fn spent_by(&self, account: &str) -> u64 {
        let settled = self.of_account(account).filter(|request| request.is_settled);
        settled.filter_map(|request| request.settling).map(|actual| actual.tokens).sum()
    }

    /// Returns how many requests are counted once every hold has been settled or has expired.
    #[must_use]
    pub fn requests(&self) -> Bounds {
        let bounds = self.requests.values().filter_map(|request| {
            let actual = request.settling?;
            Some(if request.is_settled { (actual.requests, actual.requests) } else { (0, actual.requests) })
        });
        let (least, most) = bounds.fold((0, 0), |sum, bounds| (sum.0 + bounds.0, sum.1 + bounds.1));
        least..=most
    }

    /// Returns an error if more requests than [`IN_FLIGHT`] were certainly live when a hold was made, or more tokens than [`TOKENS`] were
    /// certainly charged in the [`WINDOW`] before it.
    ///
    /// A hold is certainly live from the time at which the store made it until its settlement is sent or it expires. Its estimate is certainly
    /// charged until its settlement is sent, and then the smaller one of estimate and actual cost.
    ///
    /// # Errors
    ///
    /// The first violation.
    pub fn check_limits(&self) -> Result<(), String> {
        let mut held: Vec<(Duration, Duration, Option<Actual>)> = self
            .requests
            .values()
            .filter_map(|request| request.held.map(|(at, expires)| (at, expires, request.settling)))
            .collect();
        held.sort_unstable_by_key(|(at, ..)| *at);
        for (position, &(now, ..)) in held.iter().enumerate() {
            let is_last = held.get(position + 1).is_none_or(|(next, ..)| *next > now);
            if !is_last {
                continue; // of several at one time, the last one follows all
            }
            let (mut live, mut tokens) = (0, 0);
            for &(at, expires, settling) in &held[..=position] {
                let was_sent = settling.is_some_and(|actual| actual.sent <= now);
                live += u64::from(!was_sent && now < expires);
                let charged =
                    settling.filter(|_| was_sent).map_or(self.estimate, |it| it.tokens.min(self.estimate));
                tokens += if at + WINDOW > now { charged } else { 0 };
            }
            if live > IN_FLIGHT || (self.tiers == Tiers::All && tokens > TOKENS) {
                return Err(format!("{live} requests in flight and {tokens} tokens at {now:?}"));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    fn hammer(estimate: u64) -> HoldHammer {
        let url = "redis://127.0.0.1:1".to_owned();
        HoldHammer { url, tiers: Tiers::All, callers: 3, estimate, actual: 0..=9 }
    }

    fn report(estimate: u64, holds: u64) -> HoldReport {
        let mut report = HoldReport::new(&hammer(estimate));
        for hold in 0..holds {
            let name = format!("r{hold}");
            report.add(name.clone(), HoldStep::Holding { account: "a".to_owned() });
            report.add(name, HoldStep::Held { at: at(hold), expires_at: at(1_000 + hold) });
        }
        report
    }

    #[test]
    fn a_command_line_and_a_step_round_trip() {
        for tiers in [Tiers::All, Tiers::FastPath] {
            let hammer = HoldHammer { tiers, ..hammer(5) };
            assert_eq!(HoldHammer::from_args(hammer.to_args()), Ok(hammer));
        }
        let steps = [
            HoldStep::Holding { account: "a".to_owned() },
            HoldStep::Held { at: at(1), expires_at: at(2) },
            HoldStep::Denied,
            HoldStep::Settling { sent: at(3), tokens: 4, requests: 1 },
            HoldStep::Settled,
        ];
        for step in steps {
            let line = step.text("r");
            assert_eq!(HoldStep::parse(line.trim_end()), Some(("r".to_owned(), step)));
        }
        assert_eq!(HoldStep::parse("failed: no route"), None);
    }

    #[test]
    fn one_request_in_flight_too_many_is_detected_unless_another_was_settled_or_has_expired() {
        assert_eq!(report(1, IN_FLIGHT).check_limits(), Ok(()));
        assert!(report(1, IN_FLIGHT + 1).check_limits().is_err());
        let mut settled = report(1, IN_FLIGHT + 1);
        let settling = HoldStep::Settling { sent: at(IN_FLIGHT), tokens: 1, requests: 1 };
        settled.add("r0".to_owned(), settling);
        assert_eq!(settled.check_limits(), Ok(()));
        let mut expired = report(1, IN_FLIGHT + 1);
        expired.add("r0".to_owned(), HoldStep::Held { at: at(0), expires_at: at(IN_FLIGHT) });
        assert_eq!(expired.check_limits(), Ok(()));
    }

    #[test]
    fn one_token_too_many_in_a_window_is_detected_unless_it_was_refunded() {
        assert_eq!(report(TOKENS / 2, 2).check_limits(), Ok(()));
        let mut beyond = report(TOKENS / 2 + 1, 2);
        assert!(beyond.check_limits().is_err());
        beyond.add("r0".to_owned(), HoldStep::Settling { sent: at(1), tokens: 0, requests: 0 });
        assert_eq!(beyond.check_limits(), Ok(()));
    }

    #[test]
    fn usage_is_bounded_by_the_steps_without_a_result() {
        let mut report = report(5, 3);
        assert_eq!(report.tokens_of("a"), 15..=15);
        report.add("r0".to_owned(), HoldStep::Settling { sent: at(9), tokens: 7, requests: 1 });
        assert_eq!((report.tokens_of("a"), report.requests(), report.excess_of("a")), (15..=17, 0..=1, 2));
        assert_eq!(report.spent_by("a"), 0);
        report.add("r0".to_owned(), HoldStep::Settled);
        assert_eq!((report.tokens_of("a"), report.requests(), report.spent_by("a")), (17..=17, 1..=1, 7));
        report.add("other".to_owned(), HoldStep::Holding { account: "a".to_owned() });
        assert_eq!(report.tokens_of("a"), 17..=22);
        report.add("other".to_owned(), HoldStep::Denied);
        assert_eq!((report.tokens_of("a"), report.counts()), (17..=17, [3, 1, 1]));
    }
}
