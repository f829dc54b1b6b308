//! What came of it, as `--json` shows it and everything else draws it.

use jiff::Timestamp as Moment;
use serde::Serialize;
use tollgate::Rule;
use tollgate_server::config::RuleView;

use super::{
    curve::{Curves, Point},
    log::{Trouble, Unreadable},
    replay::Replay,
    tally::{KeyName, Keys, Named, Tally},
    timeline::Timeline,
};

/// The shares for which a curve names an amount.
pub(super) const TARGETS: [f64; 3] = [0.001, 0.01, 0.05];

/// Everything.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    pub(super) logs: Vec<String>,
    pub(super) lines: Lines,
    /// Requests that were asked about.
    pub(super) requests: u64,
    pub(super) from: Option<Moment>,
    pub(super) to: Option<Moment>,
    pub(super) timeline: Series,
    pub(super) rules: File,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) against: Option<File>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) difference: Option<Difference>,
}

/// What was read.
#[derive(Debug, Default, Serialize)]
pub(super) struct Lines {
    pub(super) read: u64,
    pub(super) unreadable: u64,
    /// The first few of those.
    pub(super) unreadable_first: Vec<Unreadable>,
    /// Lines whose time lies before that of a line before them.
    pub(super) out_of_order: u64,
    /// How far at most, in seconds.
    pub(super) furthest_back_seconds: f64,
}

/// Requests over time.
#[derive(Debug, Serialize)]
pub(super) struct Series {
    /// When the first bucket begins.
    pub(super) start: Option<Moment>,
    pub(super) bucket_seconds: u64,
    pub(super) requests: Vec<u64>,
    pub(super) refused: Vec<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) refused_against: Option<Vec<u64>>,
}

/// What one rule file did.
#[derive(Debug, Serialize)]
pub(super) struct File {
    pub(super) file: String,
    pub(super) refused: u64,
    pub(super) refused_share: f64,
    /// Requests that no rule applied to.
    pub(super) unmatched: u64,
    /// The most counters that were in use at once, as far as was looked.
    pub(super) most_counters: usize,
    pub(super) rules: Vec<RuleReport>,
}

/// What one rule did.
#[derive(Debug, Serialize)]
pub(super) struct RuleReport {
    #[serde(flatten)]
    pub(super) rule: RuleView,
    pub(super) matched: u64,
    pub(super) refused: u64,
    /// Of requests it applied to.
    pub(super) refused_share: f64,
    /// Would have been refused, were the rule not in shadow.
    pub(super) shadow_refused: u64,
    pub(super) keys_refused: u64,
    /// There were no more than these.
    pub(super) keys_exact: bool,
    pub(super) worst: Vec<Named>,
    pub(super) longest_lockout: Option<LockoutReport>,
    /// Labels it needs that no request had.
    pub(super) labels_never_seen: Vec<String>,
    /// Nothing in the log says how many of its unit a request takes, so that all take none.
    pub(super) unit_unknown: bool,
    pub(super) refused_over_time: Vec<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) curve: Option<CurveReport>,
}

/// The longest time in which somebody was refused every time.
#[derive(Debug, Serialize)]
pub(super) struct LockoutReport {
    pub(super) key: KeyName,
    pub(super) from: Option<Moment>,
    pub(super) seconds: f64,
}

/// What other amounts would have done, the rule taken by itself.
#[derive(Debug, Serialize)]
pub(super) struct CurveReport {
    /// One key of so many was counted.
    pub(super) one_key_in: u64,
    pub(super) points: Vec<PointReport>,
    pub(super) targets: Vec<Target>,
}

/// One amount.
#[derive(Debug, Serialize)]
pub(super) struct PointReport {
    pub(super) amount: u64,
    pub(super) refused: u64,
    pub(super) share: f64,
}

/// The smallest amount of the curve that refuses no more than a share, as do all above it.
#[derive(Debug, Serialize)]
pub(super) struct Target {
    pub(super) share: f64,
    pub(super) amount: Option<u64>,
    /// The next smaller one, which refuses more.
    pub(super) above: Option<u64>,
}

/// Requests that the two rule files do not agree about.
#[derive(Debug, Default, Serialize)]
pub(super) struct Difference {
    /// Refused by `--config`, and not by `--against`.
    pub(super) newly_refused: u64,
    /// The other way round.
    pub(super) no_longer_refused: u64,
    pub(super) refused_by_both: u64,
    /// By rules of `--config`.
    pub(super) newly_by_rule: Vec<Changed>,
    /// By rules of `--against`.
    pub(super) no_longer_by_rule: Vec<Changed>,
}

/// Requests that a rule refuses and the other file lets pass.
#[derive(Debug, Serialize)]
pub(super) struct Changed {
    pub(super) rule: String,
    pub(super) requests: u64,
    pub(super) keys: u64,
    pub(super) worst: Vec<Named>,
}

pub(super) fn moment(micros: u64) -> Option<Moment> {
    Moment::from_microsecond(i64::try_from(micros).ok()?).ok()
}

pub(super) fn share(part: u64, of: u64) -> f64 {
    if of == 0 { 0.0 } else { part as f64 / of as f64 }
}

impl Lines {
    pub(super) fn of(read: u64, trouble: &Trouble, out_of_order: u64, furthest_us: u64) -> Self {
        Self {
            read,
            unreadable: trouble.lines,
            unreadable_first: trouble.shown.clone(),
            out_of_order,
            furthest_back_seconds: seconds(furthest_us),
        }
    }
}

impl Series {
    /// Row 0 has the requests, `refused` and `against` those refused by the files.
    pub(super) fn of(timeline: &Timeline, refused: usize, against: Option<usize>) -> Self {
        Self {
            start: moment(timeline.start_us()),
            bucket_seconds: timeline.width_us() / 1_000_000,
            requests: timeline.row(0),
            refused: timeline.row(refused),
            refused_against: against.map(|row| timeline.row(row)),
        }
    }
}

impl File {
    pub(super) fn of(name: String, replay: &Replay, requests: u64, timeline: &Timeline) -> Self {
        let rules = replay.rules.rules().zip(&replay.tallies).enumerate();
        Self {
            file: name,
            refused: replay.refused,
            refused_share: share(replay.refused, requests),
            unmatched: replay.unmatched,
            most_counters: replay.counters.peak,
            rules: rules
                .map(|(at, (rule, tally))| RuleReport {
                    refused_over_time: timeline.row(replay.row_of(at)),
                    curve: replay.curves.as_ref().map(|curves| CurveReport::of(curves, at)),
                    labels_never_seen: never_seen(rule, replay),
                    unit_unknown: replay.lacks_unit(at),
                    ..RuleReport::of(rule, tally)
                })
                .collect(),
        }
    }
}

fn never_seen(rule: &Rule, replay: &Replay) -> Vec<String> {
    let needed = rule.when.pairs().map(|(label, _)| label).chain(rule.per.iter().map(|label| &**label));
    let mut unseen: Vec<_> =
        needed.filter(|label| !replay.shape.has_seen(label)).map(str::to_owned).collect();
    unseen.sort_unstable();
    unseen.dedup();
    unseen
}

impl RuleReport {
    fn of(rule: &Rule, tally: &Tally) -> Self {
        let (keys_refused, keys_exact) = tally.keys.count();
        Self {
            rule: RuleView::from(rule),
            matched: tally.matched,
            refused: tally.refused,
            refused_share: share(tally.refused, tally.matched),
            shadow_refused: tally.shadowed,
            keys_refused,
            keys_exact,
            worst: tally.keys.worst(),
            longest_lockout: tally.longest.as_ref().map(|longest| LockoutReport {
                key: longest.key.clone(),
                from: moment(longest.since_us),
                seconds: seconds(longest.last_us - longest.since_us),
            }),
            labels_never_seen: Vec::new(),
            unit_unknown: false,
            refused_over_time: Vec::new(),
            curve: None,
        }
    }

    /// What it refused or would have.
    pub(super) fn turned_away(&self) -> u64 {
        self.refused + self.shadow_refused
    }
}

impl CurveReport {
    fn of(curves: &Curves, rule: usize) -> Self {
        let points = curves.points(rule);
        Self {
            one_key_in: curves.sampling(),
            targets: TARGETS.iter().map(|&share| Target::of(share, &points)).collect(),
            points: points
                .iter()
                .map(|point| PointReport {
                    amount: point.amount,
                    refused: point.refused,
                    share: point.share(),
                })
                .collect(),
        }
    }
}

impl Target {
    fn of(share: f64, points: &[Point]) -> Self {
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
        Self { newly_by_rule: changed(new), no_longer_by_rule: changed(old), ..self }
    }
}

fn changed(replay: &Replay) -> Vec<Changed> {
    let rules = replay.rules.rules().zip(&replay.tallies);
    let of = |rule: &Rule, keys: &Keys| Changed {
        rule: rule.name.to_string(),
        requests: keys.total,
        keys: keys.count().0,
        worst: keys.worst(),
    };
    rules
        .filter(|(_, tally)| tally.only_here.total > 0)
        .map(|(rule, tally)| of(rule, &tally.only_here))
        .collect()
}

fn seconds(micros: u64) -> f64 {
    micros as f64 / 1e6
}
