//! Decisions per second by round trip: 256 callers, 100,000 keys, token bucket.

use crate::{
    network::{
        Kind,
        matrix::Point,
        workload::{Algorithm, Spread},
    },
    report::svg::{STYLE, TEXT},
};

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 360.0;
const LEFT: f64 = 60.0;
const RIGHT: f64 = 130.0;
const TOP: f64 = 60.0;
const BOTTOM: f64 = 52.0;
/// Vertical distance of two labels at the end of lines.
const LABEL: f64 = 15.0;

const CALLERS: usize = 256;

/// The chart; without lines if the points it shows were not measured.
pub fn chart(points: &[Point]) -> String {
    let shown: Vec<&Point> = points
        .iter()
        .filter(|point| {
            point.callers == CALLERS
                && point.algorithm == Algorithm::TokenBucket
                && point.keys == Spread::ManyKeys
        })
        .collect();
    let rates = shown.iter().flat_map(|point| point.contestants.iter().map(|figures| figures.rate.median));
    let scale = Scale { positions: shown.len(), max_rate: rounded_up(rates.fold(1.0, f64::max)) };
    let mut body = format!(
        "<text class=\"{TEXT} title\" x=\"16\" y=\"24\">Decisions per second by round trip to Redis</text>\n\
         <text class=\"{TEXT} small\" x=\"16\" y=\"43\">{CALLERS} callers in a closed loop, 100,000 keys, token bucket; medians</text>\n"
    );
    axes(&mut body, &shown, &scale);
    lines(&mut body, &shown, &scale);
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" width=\"{WIDTH}\" height=\"{HEIGHT}\" \
         role=\"img\" aria-label=\"decisions per second by round trip, for sluicegate, a hand-written client and fred\">\n\
         {STYLE}{body}</svg>\n"
    )
}

/// Round trips are evenly spaced, rates start at zero.
struct Scale {
    positions: usize,
    max_rate: f64,
}

impl Scale {
    fn x(&self, position: usize) -> f64 {
        let gaps = self.positions.saturating_sub(1).max(1) as f64;
        LEFT + (WIDTH - LEFT - RIGHT) * position as f64 / gaps
    }

    fn y(&self, rate: f64) -> f64 {
        HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * rate / self.max_rate
    }
}

fn axes(body: &mut String, shown: &[&Point], scale: &Scale) {
    const LINES: u32 = 5;
    for line in 0..=LINES {
        let rate = scale.max_rate * f64::from(line) / f64::from(LINES);
        let y = scale.y(rate);
        body.push_str(&format!(
            "<line class=\"grid\" x1=\"{LEFT}\" y1=\"{y:.1}\" x2=\"{:.1}\" y2=\"{y:.1}\"/>\n\
             <text class=\"{TEXT} small\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{:.0} k</text>\n",
            WIDTH - RIGHT,
            LEFT - 8.0,
            y + 4.0,
            rate / 1e3
        ));
    }
    for (position, point) in shown.iter().enumerate() {
        let label = match point.round_trip_us {
            0 => "loopback".to_owned(),
            micros => format!("{} ms", micros as f64 / 1e3),
        };
        body.push_str(&format!(
            "<text class=\"{TEXT} small\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{label}</text>\n",
            scale.x(position),
            HEIGHT - BOTTOM + 20.0
        ));
    }
}

fn lines(body: &mut String, shown: &[&Point], scale: &Scale) {
    let Some(last) = shown.last() else { return };
    let mut ends: Vec<(f64, Kind)> = Kind::ALL
        .iter()
        .zip(&last.contestants)
        .map(|(kind, figures)| (scale.y(figures.rate.median), *kind))
        .collect();
    ends.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut lowest = f64::NEG_INFINITY;
    for (end, kind) in ends {
        let (class, strong) = match kind {
            Kind::Sluicegate => ("us", "strong"),
            Kind::HandWritten => ("them", ""),
            Kind::Fred => ("them soft", ""),
        };
        let points = shown.iter().enumerate().filter_map(|(position, point)| {
            let figures = point.contestants.iter().find(|figures| figures.name == kind.name())?;
            Some(format!("{:.1},{:.1}", scale.x(position), scale.y(figures.rate.median)))
        });
        // Labels of lines that end close together are moved apart.
        let label = end.max(lowest + LABEL);
        lowest = label;
        body.push_str(&format!(
            "<polyline class=\"line {class}\" points=\"{}\"/>\n\
             <text class=\"{TEXT} small {strong}\" x=\"{:.1}\" y=\"{:.1}\">{}</text>\n",
            points.collect::<Vec<_>>().join(" "),
            WIDTH - RIGHT + 10.0,
            label + 4.0,
            kind.name()
        ));
    }
}

/// The next multiple of 50,000.
fn rounded_up(rate: f64) -> f64 {
    const STEP: f64 = 50_000.0;
    (rate / STEP).ceil() * STEP
}
