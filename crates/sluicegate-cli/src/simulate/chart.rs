//! Self-contained SVG charts without scripts, for light and dark themes.

use std::fmt::Write;

use crate::format::count;
use crate::format::percent;

/// The style sheet of the charts.
pub(super) const STYLE: &str = "\
.t{font:12px system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;fill:#57606a}\
.head{font-size:14px;font-weight:600;fill:#24292f}.own{fill:#24292f;font-weight:600}\
.grid{stroke:#8c959f;stroke-opacity:.3}rect{extractor-rendering:crispEdges}.allowed{fill:#5aa383}.denied{fill:#d1493f}\
.mark{stroke:#8c959f;stroke-dasharray:4 4}.line{fill:none;stroke:#d1493f;stroke-width:2;stroke-linejoin:round}\
.line.old{stroke:#8c959f}.dot{fill:#d1493f}\
@media(prefers-color-scheme:dark){.t{fill:#9198a1}.head,.own{fill:#e6edf3}.allowed{fill:#3c8a69}.denied{fill:#f0685e}\
.line{stroke:#f0685e}.line.old{stroke:#8b949e}.dot{fill:#f0685e}}";

/// The position of a plot in an image.
#[derive(Clone, Copy, Debug)]
pub(super) struct Frame {
    pub(super) left: f64,
    pub(super) top: f64,
    pub(super) width: f64,
    pub(super) height: f64,
}

/// One column of a chart.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Column {
    pub(super) allowed: u64,
    pub(super) denied: u64,
}

impl Frame {
    fn bottom(&self) -> f64 {
        self.top + self.height
    }

    fn right(&self) -> f64 {
        self.left + self.width
    }
}

/// Draws columns of allowed requests with denied ones on top, up to `most`. Higher columns are scaled down to `most`. `title` returns the
/// tooltip of a column.
pub(super) fn columns(
    svg: &mut String,
    frame: Frame,
    columns: &[Column],
    most: u64,
    title: impl Fn(usize) -> Option<String>,
) {
    let step = frame.width / columns.len().max(1) as f64;
    let gap = if step > 4.0 { 1.0 } else { 0.0 };
    for (at, column) in columns.iter().enumerate() {
        let all = column.allowed + column.denied;
        if all == 0 {
            continue;
        }
        let (x, width) = (frame.left + at as f64 * step, step - gap);
        let title = title(at).map(|title| format!("<title>{}</title>", escaped(&title))).unwrap_or_default();
        let mut top = frame.bottom();
        for (class, value) in [("allowed", column.allowed), ("denied", column.denied)] {
            if value > 0 {
                // small values stay visible
                let height = (value as f64 / all.max(most) as f64 * frame.height).max(1.0);
                top -= height;
                push(
                    svg,
                    format_args!(
                        "<rect class=\"{class}\" x=\"{x:.1}\" y=\"{top:.1}\" width=\"{width:.1}\" height=\"{height:.1}\">{title}</rect>\n"
                    ),
                );
            }
        }
    }
}

/// Draws a line through values, up to `most`.
pub(super) fn line(svg: &mut String, frame: Frame, class: &str, values: &[u64], most: u64) {
    let step = frame.width / values.len().max(1) as f64;
    let points = values.iter().enumerate().map(|(at, &value)| {
        let y = frame.bottom() - value as f64 / most.max(1) as f64 * frame.height;
        format!("{:.1},{y:.1}", frame.left + (at as f64 + 0.5) * step)
    });
    let points = points.collect::<Vec<_>>().join(" ");
    push(svg, format_args!("<polyline class=\"{class}\" points=\"{points}\"/>\n"));
}

/// Draws horizontal grid lines with labels at the bottom, middle and top.
pub(super) fn grid(svg: &mut String, frame: Frame, labels: [&str; 3]) {
    for (label, part) in labels.into_iter().zip([0.0, 0.5, 1.0]) {
        let y = frame.bottom() - part * frame.height;
        push(
            svg,
            format_args!(
                "<line class=\"grid\" x1=\"{:.1}\" y1=\"{y:.1}\" x2=\"{:.1}\" y2=\"{y:.1}\"/>\
                 <text class=\"t\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{label}</text>\n",
                frame.left,
                frame.right(),
                frame.left - 6.0,
                y + 4.0
            ),
        );
    }
}

/// Draws the labels of the x axis, evenly distributed.
pub(super) fn x_axis(svg: &mut String, frame: Frame, labels: &[String]) {
    let last = labels.len().saturating_sub(1).max(1);
    for (at, label) in labels.iter().enumerate() {
        let x = frame.left + frame.width * at as f64 / last as f64;
        let anchor = match at {
            0 => "start",
            at if at == last => "end",
            _ => "middle",
        };
        text(svg, x, frame.bottom() + 16.0, "t", anchor, label);
    }
}

/// Draws a text.
pub(super) fn text(svg: &mut String, x: f64, y: f64, class: &str, anchor: &str, text: &str) {
    let text = escaped(text);
    push(
        svg,
        format_args!(
            "<text class=\"{class}\" x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{text}</text>\n"
        ),
    );
}

/// Draws the share of denials by amount, on a logarithmic x axis.
pub(super) fn curve(svg: &mut String, frame: Frame, points: &[(u64, f64)], own: u64) {
    let most = round_up_share(points.iter().map(|(_, share)| *share).fold(0.0, f64::max));
    grid(svg, frame, [&percent(0.0), &percent(most / 2.0), &percent(most)]);
    let (Some(first), Some(last)) = (points.first(), points.last()) else { return };
    let (low, high) = ((first.0 as f64).ln(), (last.0 as f64).ln());
    let x = |amount: u64| {
        let along = if high > low { ((amount as f64).ln() - low) / (high - low) } else { 0.5 };
        frame.left + along * frame.width
    };
    let y = |share: f64| frame.bottom() - share / most * frame.height;
    if (first.0..=last.0).contains(&own) {
        let at = x(own);
        let (top, bottom) = (frame.top, frame.bottom());
        push(
            svg,
            format_args!(
                "<line class=\"mark\" x1=\"{at:.1}\" y1=\"{top:.1}\" x2=\"{at:.1}\" y2=\"{bottom:.1}\"/>\n"
            ),
        );
        text(svg, at, frame.bottom() + 16.0, "t own", "middle", &count(own));
    }
    let path = points.iter().map(|&(amount, share)| format!("{:.1},{:.1}", x(amount), y(share)));
    let path = path.collect::<Vec<_>>().join(" ");
    push(svg, format_args!("<polyline class=\"line\" points=\"{path}\"/>\n"));
    let mut labelled_to = f64::NEG_INFINITY;
    for &(amount, share) in points {
        let (at, title) = (x(amount), format!("{}: {}", count(amount), percent(share)));
        push(
            svg,
            format_args!(
                "<circle class=\"dot\" cx=\"{at:.1}\" cy=\"{:.1}\" r=\"3.5\"><title>{title}</title></circle>\n",
                y(share)
            ),
        );
        // labels must not overlap each other or the rule's own amount
        if at - labelled_to > 60.0 && (at - x(own)).abs() > 45.0 {
            text(svg, at, frame.bottom() + 16.0, "t", "middle", &count(amount));
            labelled_to = at;
        }
    }
}

/// Rounds up to a round number.
pub(super) fn round_up(most: u64) -> u64 {
    let mut unit = 1_u64;
    loop {
        for times in [2, 4, 6, 8, 10, 12, 16] {
            match unit.checked_mul(times) {
                Some(round) if round >= most => return round,
                Some(_) => {}
                None => return most,
            }
        }
        unit = unit.saturating_mul(10);
    }
}

fn round_up_share(most: f64) -> f64 {
    [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0].into_iter().find(|&round| most <= round).unwrap_or(1.0)
}

/// Escapes a text for HTML and SVG.
pub(super) fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// Appends formatted text.
pub(super) fn push(text: &mut String, more: std::fmt::Arguments<'_>) {
    text.write_fmt(more).expect("writing to a string cannot fail");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_rounded_up() {
        for (most, round) in [
            (0, 2),
            (2, 2),
            (3, 4),
            (7, 8),
            (11, 12),
            (17, 20),
            (61, 80),
            (4_001, 6_000),
            (u64::MAX, u64::MAX),
        ] {
            assert_eq!(round_up(most), round);
        }
        assert_eq!((round_up_share(0.0), round_up_share(0.3), round_up_share(1.0)), (0.01, 0.5, 1.0));
    }

    #[test]
    fn denied_requests_are_stacked_on_allowed_ones() {
        let mut svg = String::new();
        let frame = Frame { left: 0.0, top: 0.0, width: 20.0, height: 100.0 };
        let both = [Column { allowed: 50, denied: 25 }, Column::default()];
        columns(&mut svg, frame, &both, 100, |at| Some(format!("<{at}>")));
        assert_eq!(
            svg,
            "<rect class=\"allowed\" x=\"0.0\" y=\"50.0\" width=\"9.0\" height=\"50.0\"><title>&lt;0&gt;</title></rect>\n\
             <rect class=\"denied\" x=\"0.0\" y=\"25.0\" width=\"9.0\" height=\"25.0\"><title>&lt;0&gt;</title></rect>\n"
        );
    }
}
