//! A bar chart as plain SVG, readable on light and dark backgrounds, small enough for a README.

use crate::stats::{Row, Table};

const WIDTH: f64 = 760.0;
const LABELS: f64 = 280.0;
const FIGURES: f64 = 118.0;
const MARGIN: f64 = 16.0;
const BAR: f64 = 16.0;
const GAP: f64 = 7.0;
const HEADING: f64 = 40.0;
const TITLE: f64 = 46.0;

/// Tables whose first column is a rate, and their titles in the chart.
const CHARTED: [(&str, &str); 5] = [
    ("random-keys", "100,000 keys, allowed"),
    ("hot-allowed", "one hot key, allowed"),
    ("hot-denied", "one hot key, denied"),
    ("two-tiers", "two limits on one request"),
    ("log-churn", "sliding log, entries expire"),
];

/// CSS class of all text.
pub const TEXT: &str = "t";
/// Colours for light and dark backgrounds, selected by the viewer's color scheme.
pub const STYLE: &str = "<style>\
    .t{font:13px system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;fill:#24292f}\
    .title{font-size:16px;font-weight:600}.head{font-weight:600}.small{font-size:12px;fill:#57606a}.strong{font-weight:600}\
    .track{fill:#8c959f;fill-opacity:.13}.them{fill:#8c959f}.us{fill:#1a7f5a}\
    .grid{stroke:#8c959f;stroke-opacity:.3}.bound{stroke:#bf5b16;stroke-dasharray:5 4}\
    .line{fill:none;stroke-width:2.5;stroke-linejoin:round}.line.them{stroke:#8c959f}.line.us{stroke:#1a7f5a}.line.soft{stroke-opacity:.55}\
    @media(prefers-color-scheme:dark){.t{fill:#e6edf3}.small{fill:#9198a1}.them{fill:#6e7681}.us{fill:#3fb98a}\
    .line.them{stroke:#8b949e;fill:none}.line.us{stroke:#3fb98a;fill:none}.bound{stroke:#e09b52}}\
    .line.us,.line.them{fill:none}</style>\n";

/// Returns a chart of decisions per second, with one group of bars and one scale per table.
pub fn chart(tables: &[Table]) -> String {
    let mut body = format!(
        "<text class=\"{TEXT} title\" x=\"{MARGIN}\" y=\"26\">Decisions per second, one Redis</text>\n\
         <text class=\"{TEXT} small\" x=\"{:.0}\" y=\"26\" text-anchor=\"end\">64 callers, medians; each group has its own \
         scale</text>\n",
        WIDTH - MARGIN
    );
    let mut y = TITLE;
    for (name, title) in CHARTED {
        if let Some(table) = tables.iter().find(|table| table.name == name) {
            group(&mut body, &mut y, title, table);
        }
    }
    let height = y + MARGIN;
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH:.0} {height:.0}\" width=\"{WIDTH:.0}\" \
         height=\"{height:.0}\" role=\"img\" aria-label=\"decisions per second by scenario and contestant\">\n{STYLE}{body}</svg>\n"
    )
}

/// Draws the bars of one table, fastest first.
fn group(body: &mut String, y: &mut f64, title: &str, table: &Table) {
    *y += HEADING;
    body.push_str(&format!(
        "<text class=\"{TEXT} head\" x=\"{MARGIN}\" y=\"{:.0}\">{title}</text>\n",
        *y - 12.0
    ));
    let mut rows: Vec<_> = table.rows.iter().collect();
    rows.sort_by(|a, b| rate(b).total_cmp(&rate(a)));
    let most = rows.first().map_or(1.0, |row| rate(row)).max(f64::MIN_POSITIVE);
    let track = WIDTH - LABELS - FIGURES;
    for row in rows {
        let width = (track * rate(row) / most).max(2.0);
        let ours = row.contestant.starts_with("sluicegate");
        let (bar, text) = if ours { ("us", "strong") } else { ("them", "") };
        let line = *y + BAR * 0.8;
        body.push_str(&format!(
            "<text class=\"{TEXT} {text}\" x=\"{:.0}\" y=\"{line:.0}\" text-anchor=\"end\">{}</text>\n\
             <rect class=\"track\" x=\"{LABELS:.0}\" y=\"{y:.0}\" width=\"{track:.0}\" height=\"{BAR:.0}\" rx=\"3\"/>\n\
             <rect class=\"{bar}\" x=\"{LABELS:.0}\" y=\"{y:.0}\" width=\"{width:.1}\" height=\"{BAR:.0}\" rx=\"3\"/>\n\
             <text class=\"{TEXT} {text}\" x=\"{:.0}\" y=\"{line:.0}\" text-anchor=\"end\">{}</text>\n",
            LABELS - 10.0,
            row.contestant,
            WIDTH - MARGIN,
            thousands(rate(row)),
        ));
        *y += BAR + GAP;
    }
}

fn rate(row: &Row) -> f64 {
    row.cells[0].map_or(0.0, |stat| stat.median)
}

fn thousands(thousands: f64) -> String {
    if thousands >= 1000.0 { format!("{:.2} M/s", thousands / 1000.0) } else { format!("{thousands:.0} k/s") }
}
