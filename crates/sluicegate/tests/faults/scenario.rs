//! Code shared by the tests: rules, time bounds, and counting of calls.

use std::time::Duration;

use sluicegate::{Decision, Labels, Limit, Limiter, OnStoreFailure, Options, RedisStore, Rule, Source};
use sluicegate_testkit::{oracle::Admitted, server::Server};
use tokio::{
    sync::{Mutex, MutexGuard},
    time::Instant,
};

use crate::machine_pauses;

/// The deadline of a decision.
pub(crate) const DEADLINE: Duration = Duration::from_millis(200);
/// Maximum duration of a call: two busy cores and an unoptimized build are slow.
pub(crate) const LONGEST_CALL: Duration = DEADLINE.saturating_add(Duration::from_millis(250));
/// Maximum recovery time after a fault: the guaranteed two seconds, and slack.
pub(crate) const RECOVERY: Duration = Duration::from_millis(2_000 + 1_000);
/// A window that does not end during a test.
pub(crate) const HOUR: Duration = Duration::from_secs(3_600);

static EXCLUSIVE: Mutex<()> = Mutex::const_new(());

/// Waits until no other test of this binary runs.
pub(crate) async fn run_exclusively() -> MutexGuard<'static, ()> {
    EXCLUSIVE.lock().await
}

/// The amount per user of the rule with the policy `local`.
pub(crate) const LOCAL_AMOUNT: u64 = 20;
/// An amount that is never reached.
pub(crate) const MANY: u64 = 100_000;

/// Returns a rule of each policy, for requests with its name as a label.
pub(crate) fn rules() -> [Rule; 3] {
    let rule = |name, amount, policy| {
        let rule = Rule::new(name, Limit::sliding_log(amount, HOUR).unwrap());
        rule.when(name, "yes").per(["user"]).on_store_failure(policy)
    };
    [
        rule("open", MANY, OnStoreFailure::Open),
        rule("closed", MANY, OnStoreFailure::Closed),
        rule("local", LOCAL_AMOUNT, OnStoreFailure::Local),
    ]
}

pub(crate) const OPTIONS: Options = Options::new().deadline(DEADLINE).denial_cache(Duration::from_secs(1));

pub(crate) async fn limiter(url: &str) -> Limiter {
    let store = RedisStore::connect(url).await.unwrap();
    Limiter::builder().store(store).rules(rules()).options(OPTIONS).build().unwrap()
}

/// The rules that a request matches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RuleMix(pub(crate) &'static [&'static str]);

impl RuleMix {
    pub(crate) const OPEN: Self = Self(&["open"]);
    pub(crate) const ALL: [Self; 5] = [
        Self::OPEN,
        Self(&["closed"]),
        Self(&["local"]),
        Self(&["open", "local"]),
        Self(&["open", "local", "closed"]),
    ];

    pub(crate) fn labels(self, phase: &str) -> Labels {
        let user = format!("{}-{phase}", self.0.join("-"));
        let names = self.0.iter().map(|name| (*name, "yes"));
        Labels::new(names.chain([("user", user.as_str())])).unwrap()
    }

    /// Asserts that a degraded decision follows the policies of these rules, after this many were admitted.
    pub(crate) fn assert_degraded_decision(self, decision: &Decision, passed_before: u64, context: &str) {
        let (source, rule) = self.degraded_outcome();
        let passes = match source {
            Source::Closed => false,
            // units that the store admitted between two failures count as well
            Source::Fallback => decision.is_allowed() && passed_before < LOCAL_AMOUNT,
            _ => true,
        };
        let reported = (decision.is_allowed(), decision.source, decision.rule());
        assert_eq!(reported, (passes, source, rule), "{context}: {self:?}, {:?}", decision.failure);
        assert!(decision.is_degraded() && decision.failure.is_some(), "{context}: {self:?}");
    }

    /// Returns the source and rule of a degraded decision.
    pub(crate) fn degraded_outcome(self) -> (Source, Option<&'static str>) {
        if self.0.contains(&"closed") {
            (Source::Closed, Some("closed"))
        } else if self.0.contains(&"local") {
            (Source::Fallback, Some("local"))
        } else {
            (Source::Open, None)
        }
    }
}

/// Makes one check and asserts its duration.
pub(crate) async fn check(limiter: &Limiter, labels: &Labels, context: &str) -> Decision {
    let (begun, total_pause) = (Instant::now(), machine_pauses::total_pause());
    let decision = limiter.check(labels, 1).await.unwrap();
    let took = begun.elapsed();
    if took > LONGEST_CALL {
        // Until the monitor has run again.
        tokio::time::sleep(LONGEST_CALL).await;
        let paused = machine_pauses::total_pause() - total_pause;
        assert!(took <= LONGEST_CALL + paused, "{context}: a call took {took:?}, {decision:?}");
    }
    decision
}

/// Returns an admitted call for the oracle, with times since `origin`.
pub(crate) fn admitted(origin: Instant, sent: Instant) -> Admitted {
    Admitted { sent: sent - origin, received: origin.elapsed(), cost: 1 }
}

/// Returns how many scripts a server has run.
pub(crate) fn scripts_run(server: &Server) -> u64 {
    let info: String = redis::cmd("INFO").arg("commandstats").query(&mut server.connection()).unwrap();
    let calls = |line: &str| line.split_once("calls=")?.1.split(',').next()?.parse::<u64>().ok();
    let scripts = info.lines().filter(|line| line.starts_with("cmdstat_eval"));
    scripts.filter_map(calls).sum()
}

/// Returns the resident memory of this process in bytes.
pub(crate) fn resident_bytes() -> u64 {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = pages.split(' ').nth(1).unwrap().parse().unwrap();
    pages * 4096
}
