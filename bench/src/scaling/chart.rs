//! Primaries by decisions per second, both axes in powers of ten.

use super::{
    costs::Costs,
    fleet::{MAX_NODES, primaries},
};
use crate::report::svg::{STYLE, TEXT};

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 380.0;
const LEFT: f64 = 60.0;
const RIGHT: f64 = 150.0;
const TOP: f64 = 56.0;
const BOTTOM: f64 = 44.0;
/// The range of each axis in powers of ten: decisions per second, and primaries.
const X: (f64, f64) = (5.0, 8.0);
const Y: (f64, f64) = (0.0, 4.0);
/// Points of each line.
const POINTS: usize = 60;

/// The chart.
pub fn chart(costs: &Costs) -> String {
    let mut body = format!(
        "<text class=\"{TEXT} title\" x=\"16\" y=\"24\">Redis primaries by decisions per second</text>\n\
         <text class=\"{TEXT} small\" x=\"16\" y=\"42\">computed from measured CPU per decision, each primary 60 % busy</text>\n"
    );
    for power in 0..=(Y.1 - Y.0) as i32 {
        let at = y(f64::from(power));
        body.push_str(&format!(
            "<line class=\"grid\" x1=\"{LEFT}\" y1=\"{at:.1}\" x2=\"{:.1}\" y2=\"{at:.1}\"/>\n\
             <text class=\"{TEXT} small\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>\n",
            WIDTH - RIGHT,
            LEFT - 8.0,
            at + 4.0,
            10_u32.pow(power as u32)
        ));
    }
    for (power, label) in [(5.0, "100 k/s"), (6.0, "1 M/s"), (7.0, "10 M/s"), (8.0, "100 M/s")] {
        body.push_str(&format!(
            "<text class=\"{TEXT} small\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{label}</text>\n",
            x(power),
            HEIGHT - BOTTOM + 20.0
        ));
    }
    let limit = y(MAX_NODES.log10());
    body.push_str(&format!(
        "<line class=\"bound\" x1=\"{LEFT}\" y1=\"{limit:.1}\" x2=\"{:.1}\" y2=\"{limit:.1}\"/>\n\
         <text class=\"{TEXT} small\" x=\"{:.1}\" y=\"{:.1}\">one Redis Cluster: about 1000 nodes</text>\n",
        WIDTH - RIGHT,
        LEFT + 6.0,
        limit - 6.0
    ));
    for (class, keys, label) in [
        ("them", 1.0, "1 key per call"),
        ("us soft", 16.0, "16 keys per call"),
        ("us", 64.0, "64 keys per call"),
    ] {
        let points = (0..=POINTS).map(|point| {
            let power = X.0 + (X.1 - X.0) * point as f64 / POINTS as f64;
            let count = primaries(10_f64.powf(power), costs, keys);
            format!("{:.1},{:.1}", x(power), y(count.log10()))
        });
        let end = y(primaries(10_f64.powf(X.1), costs, keys).log10());
        body.push_str(&format!(
            "<polyline class=\"line {class}\" points=\"{}\"/>\n\
             <text class=\"{TEXT} small\" x=\"{:.1}\" y=\"{:.1}\">{label}</text>\n",
            points.collect::<Vec<_>>().join(" "),
            WIDTH - RIGHT + 8.0,
            end + if keys == 16.0 { -4.0 } else { 10.0 }
        ));
    }
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" width=\"{WIDTH}\" height=\"{HEIGHT}\" \
         role=\"img\" aria-label=\"Redis primaries by decisions per second, for 1, 16 and 64 keys per call\">\n{STYLE}{body}</svg>\n"
    )
}

fn x(power: f64) -> f64 {
    LEFT + (WIDTH - LEFT - RIGHT) * (power - X.0) / (X.1 - X.0)
}

fn y(power: f64) -> f64 {
    HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (power - Y.0) / (Y.1 - Y.0)
}
