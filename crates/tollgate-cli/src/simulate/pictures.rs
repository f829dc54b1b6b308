//! The pictures of docs/algorithms.md: the same traffic under each algorithm, replayed as a log is.
//!
//! They are checked in. `scripts/pictures` draws them again; the test sees that nobody forgot to.

use std::{fs, path::PathBuf, time::Duration};

use tollgate::{Algorithm, Limit, Rule, RuleSet, Timestamp};
use tollgate_server::labels::LabelPolicy;

use super::{
    chart::{self, Column, Frame, push},
    labels::Shape,
    log::{Fields, Record},
    replay::Replay,
    timeline::Timeline,
};

/// Set, the pictures are written instead of compared.
const WRITE: &str = "TOLLGATE_WRITE_PICTURES";

/// Each limit is so much in so long, in seconds.
const AMOUNT: u64 = 60;
const WINDOW: u64 = 60;
/// How long one column lasts, in seconds.
const COLUMN: u64 = 2;

const WIDTH: f64 = 760.0;
const HEAD: f64 = 58.0;
const PANEL: f64 = 118.0;
const PLOT: Frame = Frame { left: 44.0, top: 0.0, width: 700.0, height: 72.0 };
const MILLI: u64 = 1_000;

/// Some traffic.
struct Scenario {
    file: &'static str,
    title: &'static str,
    explained: &'static str,
    seconds: u64,
    /// When its requests come.
    times_ms: Vec<u64>,
    /// What stands beside a column that is too high, at this second.
    note: Option<(u64, &'static str)>,
}

/// What became of it under one algorithm.
struct Outcome {
    columns: Vec<Column>,
    admitted: u64,
    refused: u64,
    /// The most admitted in any window.
    most_in_a_window: u64,
}

fn scenarios() -> [Scenario; 3] {
    // so many in so many seconds, evenly
    let evenly = |from_s: u64, seconds: u64, count: u64| {
        (0..count).map(move |n| from_s * MILLI + n * seconds * MILLI / count)
    };
    [
        Scenario {
            file: "edge.svg",
            title: "A burst at the edge of a window",
            explained: "6 requests a second from 50 s to 70 s: twice the limit within a third of a window",
            seconds: 120,
            times_ms: evenly(50, 20, 2 * AMOUNT).collect(),
            note: None,
        },
        Scenario {
            file: "steady.svg",
            title: "Steadily too much",
            explained: "2 requests a second for three minutes: twice the limit",
            seconds: 180,
            times_ms: evenly(0, 180, 360).collect(),
            note: None,
        },
        Scenario {
            file: "burst.svg",
            title: "One big burst, then calm",
            explained: "150 requests at 20 s, then one every 2 s: half of the limit",
            seconds: 180,
            times_ms: std::iter::repeat_n(20 * MILLI, 150).chain(evenly(22, 158, 79)).collect(),
            note: Some((20, "150 at once")),
        },
    ]
}

/// How high the calm traffic beside a burst is drawn.
const CALM: u64 = 4;

/// Replays it under one rule for everybody.
fn replayed(scenario: &Scenario, algorithm: Algorithm) -> Outcome {
    let limit = Limit::new(algorithm, AMOUNT, Duration::from_secs(WINDOW)).unwrap();
    let rules = RuleSet::new(vec![Rule::new("all", limit)]).unwrap();
    let mut fields = Fields::new(None);
    let shape = Shape::new(rules.rules(), LabelPolicy::default(), &[], &[], &mut fields);
    let mut timeline = Timeline::new(1 + Replay::rows(&rules));
    let mut replay = Replay::new(rules, shape, Vec::new(), None, 1);
    let mut record = Record::new(&fields);
    let mut columns = vec![Column::default(); (scenario.seconds / COLUMN) as usize];
    let mut admitted_ms = Vec::new();
    for &time_ms in &scenario.times_ms {
        record.time_us = time_ms * MILLI;
        let now = Timestamp::from_micros(record.time_us);
        timeline.reach(now);
        let column = &mut columns[(time_ms / MILLI / COLUMN) as usize];
        let plan = replay.prepare(&record).unwrap();
        if replay.decide(&plan, now, &mut timeline) {
            column.allowed += 1;
            admitted_ms.push(time_ms);
        } else {
            column.refused += 1;
        }
    }
    let within =
        |from: &u64| admitted_ms.iter().filter(|&at| (*from..from + WINDOW * MILLI).contains(at)).count();
    Outcome {
        columns,
        admitted: admitted_ms.len() as u64,
        refused: replay.refused,
        most_in_a_window: admitted_ms.iter().map(within).max().unwrap_or_default() as u64,
    }
}

fn picture(scenario: &Scenario) -> String {
    let height = HEAD + PANEL * Algorithm::ALL.len() as f64 + 14.0;
    let mut svg = String::new();
    chart::text(&mut svg, 16.0, 24.0, "t head", "start", scenario.title);
    let limit = format!("{}. The limit: {AMOUNT} in {WINDOW} s.", scenario.explained);
    chart::text(&mut svg, 16.0, 44.0, "t", "start", &limit);
    for (at, (class, words)) in [("allowed", "admitted"), ("refused", "refused")].into_iter().enumerate() {
        let x = WIDTH - 160.0 + 80.0 * at as f64;
        push(
            &mut svg,
            format_args!(
                "<rect class=\"{class}\" x=\"{x:.1}\" y=\"14\" width=\"11\" height=\"11\" rx=\"2\"/>\n"
            ),
        );
        chart::text(&mut svg, x + 17.0, 24.0, "t", "start", words);
    }
    for (at, algorithm) in Algorithm::ALL.into_iter().enumerate() {
        panel(&mut svg, HEAD + PANEL * at as f64, scenario, algorithm);
    }
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH:.0} {height:.0}\" width=\"{WIDTH:.0}\" height=\"{height:.0}\" \
         role=\"img\" aria-label=\"{}: admitted and refused requests over time under each algorithm\">\n<style>{}</style>\n{svg}</svg>\n",
        scenario.title,
        chart::STYLE
    )
}

fn panel(svg: &mut String, top: f64, scenario: &Scenario, algorithm: Algorithm) {
    let outcome = replayed(scenario, algorithm);
    let frame = Frame { top: top + 24.0, ..PLOT };
    let most = outcome.columns.iter().map(|column| column.allowed + column.refused).max().unwrap_or_default();
    let most = if scenario.note.is_some() { CALM } else { chart::nice(most) };
    chart::text(svg, frame.left, top + 14.0, "t own", "start", algorithm.name());
    let words = format!(
        "{} admitted, {} refused; at most {} in any {WINDOW} s",
        outcome.admitted, outcome.refused, outcome.most_in_a_window
    );
    chart::text(svg, frame.left + frame.width, top + 14.0, "t", "end", &words);
    chart::grid(svg, frame, ["0", &(most / 2).to_string(), &most.to_string()]);
    // where the windows of the clock begin
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
    chart::columns(svg, frame, &outcome.columns, most, |_| None);
    if let Some((second, words)) = scenario.note {
        let beside = (second + COLUMN) as f64 / scenario.seconds as f64;
        chart::text(svg, frame.left + frame.width * beside + 5.0, frame.top + 13.0, "t", "start", words);
    }
    let seconds = (0..=scenario.seconds).step_by(WINDOW as usize).map(|second| format!("{second} s"));
    chart::below(svg, frame, &seconds.collect::<Vec<_>>());
}

fn directory() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs/algorithms")
}

#[test]
fn the_pictures_of_the_documentation_are_what_is_drawn_now() {
    for scenario in scenarios() {
        let (path, drawn) = (directory().join(scenario.file), picture(&scenario));
        if std::env::var_os(WRITE).is_some() {
            fs::create_dir_all(directory()).unwrap();
            fs::write(&path, &drawn).unwrap();
        }
        let kept = fs::read_to_string(&path).unwrap_or_default();
        assert!(kept == drawn, "{} is not what is drawn now: run scripts/pictures", path.display());
    }
}

#[test]
fn the_pictures_show_what_the_documentation_says() {
    let [edge, steady, burst] = scenarios();
    let of = |scenario, algorithm| replayed(scenario, algorithm);
    // across an edge, twice the limit in a fixed window, and the burst and what has drained since in a bucket
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
    // a bucket lets the calm traffic after a burst pass, a log makes it wait for the burst to leave
    assert!(of(&burst, Algorithm::TokenBucket).refused < of(&burst, Algorithm::SlidingLog).refused);
}
