//! The results, as serialized by `--json` and rendered by the text and HTML reports.

use jiff::Timestamp as JiffTimestamp;
use serde::Serialize;
use sluicegate::Rule;
use sluicegate_server::config::RuleView;

use super::{
    curve::{Curves, Point},
    log::{Unreadable, UnreadableLines},
    replay::Replay,
    rule_stats::{KeyCount, KeyCounts, KeyName, RuleStats},
    timeline::Timeline,
};

/// The shares of denials for which a curve reports an amount.
pub(super) const TARGETS: [f64; 3] = [0.001, 0.01, 0.05];

/// The report.
#[derive(Debug, Serialize)]
pub(super) struct SimulationReport {
    pub(super) logs: Vec<String>,
    pub(super) lines: LineCounts,
    /// Simulated requests.
    pub(super) requests: u64,
    pub(super) from: Option<JiffTimestamp>,
    pub(super) to: Option<JiffTimestamp>,
    pub(super) timeline: Series,
    pub(super) rules: FileReport,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) against: Option<FileReport>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) difference: Option<Difference>,
}

/// Counts of log lines.
#[derive(Debug, Default, Serialize)]
pub(super) struct LineCounts {
    pub(super) read: u64,
    pub(super) unreadable: u64,
    /// The first unreadable lines.
    pub(super) unreadable_first: Vec<Unreadable>,
    /// Lines with a time before that of an earlier line.
    pub(super) out_of_order: u64,
    /// The largest difference, in seconds.
    pub(super) furthest_back_seconds: f64,
}

/// Requests over time.
#[derive(Debug, Serialize)]
pub(super) struct Series {
    /// The start of the first bucket.
    pub(super) start: Option<JiffTimestamp>,
    pub(super) bucket_seconds: u64,
    pub(super) requests: Vec<u64>,
    pub(super) denied: Vec<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) denied_against: Option<Vec<u64>>,
}

/// The results of one rule file.
#[derive(Debug, Serialize)]
pub(super) struct FileReport {
    pub(super) file: String,
    pub(super) denied: u64,
    pub(super) denied_share: f64,
    /// Requests that no rule applied to.
    pub(super) unmatched: u64,
    /// The highest number of counters in memory.
    pub(super) most_counters: usize,
    pub(super) rules: Vec<RuleReport>,
    /// Concurrency rules: a log does not contain the times at which requests end.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) not_simulated: Vec<String>,
}

/// The results of one rule.
#[derive(Debug, Serialize)]
pub(super) struct RuleReport {
    #[serde(flatten)]
    pub(super) rule: RuleView,
    pub(super) matched: u64,
    pub(super) denied: u64,
    /// Relative to `matched`.
    pub(super) denied_share: f64,
    /// Requests it would have denied without shadow mode.
    pub(super) shadow_denied: u64,
    pub(super) denied_keys: u64,
    /// Whether the number of keys is exact.
    pub(super) keys_exact: bool,
    pub(super) worst: Vec<KeyCount>,
    pub(super) longest_lockout: Option<LockoutReport>,
    /// Labels it requires that no request has.
    pub(super) labels_never_seen: Vec<String>,
    /// Whether no field has the cost in its unit, so that all costs are 0.
    pub(super) unit_unknown: bool,
    pub(super) denied_over_time: Vec<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) curve: Option<CurveReport>,
}

/// The longest period in which every request of a key was denied.
#[derive(Debug, Serialize)]
pub(super) struct LockoutReport {
    pub(super) key: KeyName,
    pub(super) from: Option<JiffTimestamp>,
    pub(super) seconds: f64,
}

/// The results of other amounts, with only this rule.
#[derive(Debug, Serialize)]
pub(super) struct CurveReport {
    /// The sampling rate: one key in this many was counted.
    pub(super) one_key_in: u64,
    pub(super) points: Vec<PointReport>,
    pub(super) targets: Vec<CurveTarget>,
}

/// One amount.
#[derive(Debug, Serialize)]
pub(super) struct PointReport {
    pub(super) amount: u64,
    pub(super) denied: u64,
    pub(super) share: f64,
}

/// The smallest amount of the curve that denies at most `share`, as do all larger ones.
#[derive(Debug, Serialize)]
pub(super) struct CurveTarget {
    pub(super) share: f64,
    pub(super) amount: Option<u64>,
    /// The next smaller amount, which denies more.
    pub(super) above: Option<u64>,
}

/// Requests that the two rule files decide differently.
#[derive(Debug, Default, Serialize)]
pub(super) struct Difference {
    /// Denied by `--config` and not by `--against`.
    pub(super) newly_denied: u64,
    /// Denied by `--against` and not by `--config`.
    pub(super) no_longer_denied: u64,
    pub(super) denied_by_both: u64,
    /// By rules of `--config`.
    pub(super) newly_by_rule: Vec<RuleDifference>,
    /// By rules of `--against`.
    pub(super) no_longer_by_rule: Vec<RuleDifference>,
}

/// Requests that a rule denies and the other file allows.
#[derive(Debug, Serialize)]
pub(super) struct RuleDifference {
    pub(super) rule: String,
    pub(super) requests: u64,
    pub(super) keys: u64,
    pub(super) worst: Vec<KeyCount>,
}

pub(super) fn jiff_timestamp(micros: u64) -> Option<JiffTimestamp> {
    JiffTimestamp::from_microsecond(i64::try_from(micros).ok()?).ok()
}

pub(super) fn share(part: u64, of: u64) -> f64 {
    if of == 0 { 0.0 } else { part as f64 / of as f64 }
}

impl LineCounts {
    pub(super) fn new(read: u64, unreadable: &UnreadableLines, out_of_order: u64, furthest_us: u64) -> Self {
        Self {
            read,
            unreadable: unreadable.lines,
            unreadable_first: unreadable.shown.clone(),
            out_of_order,
            furthest_back_seconds: seconds(furthest_us),
        }
    }
}

impl Series {
    /// Row 0 of the timeline has the requests; `denied` and `against` are the rows of denials by the two files.
    pub(super) fn new(timeline: &Timeline, denied: usize, against: Option<usize>) -> Self {
        Self {
            start: jiff_timestamp(timeline.start_us()),
            bucket_seconds: timeline.width_us() / 1_000_000,
            requests: timeline.row(0),
            denied: timeline.row(denied),
            denied_against: against.map(|row| timeline.row(row)),
        }
    }
}

impl FileReport {
    /// The note about rules that are not simulated, if there are any.
    pub(super) fn not_simulated_note(&self) -> Option<String> {
        (!self.not_simulated.is_empty()).then(|| {
            let rules = self.not_simulated.join(", ");
            format!("not simulated, because a log does not contain the times at which requests end: {rules} (concurrency)")
        })
    }

    pub(super) fn new(name: String, replay: &Replay, requests: u64, timeline: &Timeline) -> Self {
        let rules = replay.rules.rules().zip(&replay.stats).enumerate();
        Self {
            file: name,
            denied: replay.denied,
            denied_share: share(replay.denied, requests),
            unmatched: replay.unmatched,
            most_counters: replay.counters.peak,
            not_simulated: replay.not_simulated.clone(),
            rules: rules
                .map(|(at, (rule, stats))| RuleReport {
                    denied_over_time: timeline.row(replay.row_of(at)),
                    curve: replay.curves.as_ref().map(|curves| CurveReport::new(curves, at)),
                    labels_never_seen: never_seen(rule, replay),
                    unit_unknown: replay.lacks_unit(at),
                    ..RuleReport::new(rule, stats)
                })
                .collect(),
        }
    }
}

fn never_seen(rule: &Rule, replay: &Replay) -> Vec<String> {
    let needed = rule.when.pairs().map(|(label, _)| label).chain(rule.per.iter().map(|label| &**label));
    let mut unseen: Vec<_> =
        needed.filter(|label| !replay.extractor.has_seen(label)).map(str::to_owned).collect();
    unseen.sort_unstable();
    unseen.dedup();
    unseen
}

impl RuleReport {
    fn new(rule: &Rule, stats: &RuleStats) -> Self {
        let (denied_keys, keys_exact) = stats.keys.count();
        Self {
            rule: RuleView::from(rule),
            matched: stats.matched,
            denied: stats.denied,
            denied_share: share(stats.denied, stats.matched),
            shadow_denied: stats.shadowed,
            denied_keys,
            keys_exact,
            worst: stats.keys.worst(),
            longest_lockout: stats.longest.as_ref().map(|longest| LockoutReport {
                key: longest.key.clone(),
                from: jiff_timestamp(longest.since_us),
                seconds: seconds(longest.last_us - longest.since_us),
            }),
            labels_never_seen: Vec::new(),
            unit_unknown: false,
            denied_over_time: Vec::new(),
            curve: None,
        }
    }

    /// Requests it denied, or would have denied without shadow mode.
    pub(super) fn denials(&self) -> u64 {
        self.denied + self.shadow_denied
    }
}

impl CurveReport {
    fn new(curves: &Curves, rule: usize) -> Self {
        let points = curves.points(rule);
        Self {
            one_key_in: curves.sampling(),
            targets: TARGETS.iter().map(|&share| CurveTarget::new(share, &points)).collect(),
            points: points
                .iter()
                .map(|point| PointReport { amount: point.amount, denied: point.denied, share: point.share() })
                .collect(),
        }
    }
}

impl CurveTarget {
    fn new(share: f64, points: &[Point]) -> Self {
        let enough = points.iter().rev().take_while(|point| point.share() <= share).count();
        let first = points.len() - enough;
        Self {
            share,
            amount: points.get(first).map(|point| point.amount),
            above: first.checked_sub(1).map(|below| points[below].amount),
        }
    }
}

impl Difference {
    pub(super) fn by_rules(self, new: &Replay, old: &Replay) -> Self {
        Self { newly_by_rule: rule_differences(new), no_longer_by_rule: rule_differences(old), ..self }
    }
}

fn rule_differences(replay: &Replay) -> Vec<RuleDifference> {
    let rules = replay.rules.rules().zip(&replay.stats);
    let of = |rule: &Rule, keys: &KeyCounts| RuleDifference {
        rule: rule.name.to_string(),
        requests: keys.total,
        keys: keys.count().0,
        worst: keys.worst(),
    };
    rules
        .filter(|(_, stats)| stats.denied_only_here.total > 0)
        .map(|(rule, stats)| of(rule, &stats.denied_only_here))
        .collect()
}

fn seconds(micros: u64) -> f64 {
    micros as f64 / 1e6
}
