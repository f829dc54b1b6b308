//! The charts of docs/algorithms.md: the same traffic under each algorithm, replayed like a log.
//!
//! They are checked in. `scripts/pictures` regenerates them; a test compares them.

use std::{fs, path::PathBuf, time::Duration};

use sluicegate::label_policy::LabelPolicy;
use sluicegate::{Algorithm, Limit, Rule, Timestamp, rules::RuleSet};

use super::{
    chart::{self, Column, Frame, push},
    labels::LabelExtractor,
    log::{Fields, Record},
    replay::Replay,
    timeline::Timeline,
};

/// If this variable is set, the charts are written before they are compared.
const WRITE: &str = "SLUICEGATE_WRITE_PICTURES";

/// The amount of each limit.
const AMOUNT: u64 = 60;
/// The window of each limit, in seconds.
const WINDOW: u64 = 60;
/// The width of one column, in seconds.
const COLUMN: u64 = 2;

const WIDTH: f64 = 760.0;
const HEAD: f64 = 58.0;
const PANEL: f64 = 118.0;
const PLOT: Frame = Frame { left: 44.0, top: 0.0, width: 700.0, height: 72.0 };
const MILLI: u64 = 1_000;

/// A traffic pattern.
struct Scenario {
    file: &'static str,
    title: &'static str,
    explained: &'static str,
    seconds: u64,
    /// The times of its requests.
    times_ms: Vec<u64>,
    /// The note beside a truncated column, and its second.
    note: Option<(u64, &'static str)>,
}

/// The result under one algorithm.
struct ScenarioResult {
    columns: Vec<Column>,
    admitted: u64,
    denied: u64,
    /// The most requests admitted in any window.
    most_in_a_window: u64,
}

fn scenarios() -> [Scenario; 3] {
    // evenly distributed requests
    let evenly = |from_s: u64, seconds: u64, count: u64| {
        (0..count).map(move |n| from_s * MILLI + n * seconds * MILLI / count)
    };
    [
        Scenario {
            file: "edge.svg",
            title: "A burst across a window boundary",
            explained: "6 requests per second from 50 s to 70 s: twice the limit within a third of a window",
            seconds: 120,
            times_ms: evenly(50, 20, 2 * AMOUNT).collect(),
            note: None,
        },
        Scenario {
            file: "steady.svg",
            title: "Constant overload",
            explained: "2 requests per second for three minutes: twice the limit",
            seconds: 180,
            times_ms: evenly(0, 180, 360).collect(),
            note: None,
        },
        Scenario {
            file: "burst.svg",
            title: "One large burst, then low traffic",
            explained: "150 requests at 20 s, then one every 2 s: half of the limit",
            seconds: 180,
            times_ms: std::iter::repeat_n(20 * MILLI, 150).chain(evenly(22, 158, 79)).collect(),
            note: Some((20, "150 at once")),
        },
    ]
}

/// The scale of a chart with a truncated column.
const TRUNCATED_SCALE: u64 = 4;

/// Replays a scenario under a single rule.
fn replay_scenario(scenario: &Scenario, algorithm: Algorithm) -> ScenarioResult {
    let limit = Limit::new(algorithm, AMOUNT, Duration::from_secs(WINDOW)).unwrap();
    let rules = RuleSet::new(vec![Rule::new("all", limit)]).unwrap();
    let mut fields = Fields::new(None);
    let extractor = LabelExtractor::new(rules.rules(), LabelPolicy::default(), &[], &[], &mut fields);
    let mut timeline = Timeline::new(1 + Replay::rows(&rules));
    let mut replay = Replay::new(rules, extractor, Vec::new(), None, 1);
    let mut record = Record::new(&fields);
    let mut columns = vec![Column::default(); (scenario.seconds / COLUMN) as usize];
    let mut admitted_ms = Vec::new();
    for &time_ms in &scenario.times_ms {
        record.time_us = time_ms * MILLI;
        let now = Timestamp::from_micros(record.time_us);
        timeline.advance(now);
        let column = &mut columns[(time_ms / MILLI / COLUMN) as usize];
        let plan = replay.prepare(&record).unwrap();
        if replay.decide(&plan, now, &mut timeline) {
            column.allowed += 1;
            admitted_ms.push(time_ms);
        } else {
            column.denied += 1;
        }
    }
    let within =
        |from: &u64| admitted_ms.iter().filter(|&at| (*from..from + WINDOW * MILLI).contains(at)).count();
    ScenarioResult {
        columns,
        admitted: admitted_ms.len() as u64,
        denied: replay.denied,
        most_in_a_window: admitted_ms.iter().map(within).max().unwrap_or_default() as u64,
    }
}

fn svg_chart(scenario: &Scenario) -> String {
    let height = HEAD + PANEL * Algorithm::WINDOWED.len() as f64 + 14.0;
    let mut svg = String::new();
    chart::text(&mut svg, 16.0, 24.0, "t head", "start", scenario.title);
    let limit = format!("{}. The limit: {AMOUNT} in {WINDOW} s.", scenario.explained);
    chart::text(&mut svg, 16.0, 44.0, "t", "start", &limit);
    for (at, (class, label)) in [("allowed", "admitted"), ("denied", "denied")].into_iter().enumerate() {
        let x = WIDTH - 160.0 + 80.0 * at as f64;
        push(
            &mut svg,
            format_args!(
                "<rect class=\"{class}\" x=\"{x:.1}\" y=\"14\" width=\"11\" height=\"11\" rx=\"2\"/>\n"
            ),
        );
        chart::text(&mut svg, x + 17.0, 24.0, "t", "start", label);
    }
    for (at, algorithm) in Algorithm::WINDOWED.into_iter().enumerate() {
        panel(&mut svg, HEAD + PANEL * at as f64, scenario, algorithm);
    }
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH:.0} {height:.0}\" width=\"{WIDTH:.0}\" height=\"{height:.0}\" \
         role=\"img\" aria-label=\"{}: admitted and denied requests over time under each algorithm\">\n<style>{}</style>\n{svg}</svg>\n",
        scenario.title,
        chart::STYLE
    )
}

fn panel(svg: &mut String, top: f64, scenario: &Scenario, algorithm: Algorithm) {
    let result = replay_scenario(scenario, algorithm);
    let frame = Frame { top: top + 24.0, ..PLOT };
    let most = result.columns.iter().map(|column| column.allowed + column.denied).max().unwrap_or_default();
    let most = if scenario.note.is_some() { TRUNCATED_SCALE } else { chart::round_up(most) };
    chart::text(svg, frame.left, top + 14.0, "t own", "start", algorithm.name());
    let summary = format!(
        "{} admitted, {} denied; at most {} in any {WINDOW} s",
        result.admitted, result.denied, result.most_in_a_window
    );
    chart::text(svg, frame.left + frame.width, top + 14.0, "t", "end", &summary);
    chart::grid(svg, frame, ["0", &(most / 2).to_string(), &most.to_string()]);
    // window boundaries
    for edge in (WINDOW..scenario.seconds).step_by(WINDOW as usize) {
        let x = frame.left + frame.width * edge as f64 / scenario.seconds as f64;
        let bottom = frame.top + frame.height;
        push(
            svg,
            format_args!(
                "<line class=\"mark\" x1=\"{x:.1}\" y1=\"{:.1}\" x2=\"{x:.1}\" y2=\"{bottom:.1}\"/>\n",
                frame.top
            ),
        );
    }
    chart::columns(svg, frame, &result.columns, most, |_| None);
    if let Some((second, note)) = scenario.note {
        let beside = (second + COLUMN) as f64 / scenario.seconds as f64;
        chart::text(svg, frame.left + frame.width * beside + 5.0, frame.top + 13.0, "t", "start", note);
    }
    let seconds = (0..=scenario.seconds).step_by(WINDOW as usize).map(|second| format!("{second} s"));
    chart::x_axis(svg, frame, &seconds.collect::<Vec<_>>());
}

fn directory() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs/algorithms")
}

#[test]
fn the_charts_of_the_documentation_are_up_to_date() {
    for scenario in scenarios() {
        let (path, drawn) = (directory().join(scenario.file), svg_chart(&scenario));
        if std::env::var_os(WRITE).is_some() {
            fs::create_dir_all(directory()).unwrap();
            fs::write(&path, &drawn).unwrap();
        }
        let kept = fs::read_to_string(&path).unwrap_or_default();
        assert!(kept == drawn, "{} is outdated: run scripts/pictures", path.display());
    }
}

#[test]
fn the_charts_show_what_the_documentation_describes() {
    let [edge, steady, burst] = scenarios();
    let of = |scenario, algorithm| replay_scenario(scenario, algorithm);
    // across a window boundary, a fixed window admits twice the limit
    assert_eq!(of(&edge, Algorithm::FixedWindow).most_in_a_window, 2 * AMOUNT);
    assert_eq!(of(&edge, Algorithm::SlidingLog).most_in_a_window, AMOUNT);
    let counter = of(&edge, Algorithm::SlidingCounter).most_in_a_window;
    assert!((AMOUNT..2 * AMOUNT).contains(&counter), "{counter}");
    for scenario in [&edge, &steady, &burst] {
        let log = of(scenario, Algorithm::SlidingLog).most_in_a_window;
        assert!(log <= AMOUNT, "{log}");
        let bucket = of(scenario, Algorithm::TokenBucket).most_in_a_window;
        assert!(bucket <= 2 * AMOUNT, "{bucket}");
    }
    // after a burst, a bucket admits low traffic at once, a log only when the burst has expired
    assert!(of(&burst, Algorithm::TokenBucket).denied < of(&burst, Algorithm::SlidingLog).denied);
}
