//! A bar chart as plain SVG, readable on light and dark backgrounds.

use crate::stats::Table;

const WIDTH: f64 = 760.0;
const LABELS: f64 = 250.0;
const FIGURES: f64 = 130.0;
const BAR: f64 = 18.0;
const GAP: f64 = 6.0;
const HEADING: f64 = 34.0;

/// Tables whose first column is a rate.
const CHARTED: [&str; 5] = ["random-keys", "hot-allowed", "hot-refused", "two-tiers", "log"];

/// Decisions per second, one group of bars per table. Each group has a scale of its own.
pub fn chart(tables: &[Table]) -> String {
    let tables: Vec<_> = tables.iter().filter(|table| CHARTED.contains(&table.name.as_str())).collect();
    let mut body = String::new();
    let mut y = 10.0;
    for table in tables {
        y += HEADING;
        body.push_str(&format!("<text class=\"h\" x=\"0\" y=\"{:.0}\">{}</text>\n", y - 10.0, table.name));
        let rate = |row: &crate::stats::Row| row.cells[0].map_or(0.0, |stat| stat.median);
        let most = table.rows.iter().map(rate).fold(f64::MIN_POSITIVE, f64::max);
        for row in &table.rows {
            let width = (WIDTH - LABELS - FIGURES) * rate(row) / most;
            let class = if row.contestant.starts_with("tollgate") { "us" } else { "them" };
            let line = y + BAR * 0.75;
            body.push_str(&format!(
                "<text x=\"{:.0}\" y=\"{line:.0}\" text-anchor=\"end\">{}</text>\n\
                 <rect class=\"{class}\" x=\"{LABELS:.0}\" y=\"{y:.0}\" width=\"{width:.1}\" height=\"{BAR:.0}\" rx=\"2\"/>\n\
                 <text x=\"{:.0}\" y=\"{line:.0}\">{}</text>\n",
                LABELS - 8.0,
                row.contestant,
                LABELS + width + 8.0,
                thousands(rate(row))
            ));
            y += BAR + GAP;
        }
    }
    let height = y + 10.0;
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH:.0} {height:.0}\" width=\"{WIDTH:.0}\" \
         height=\"{height:.0}\" role=\"img\" aria-label=\"decisions per second by scenario and contestant\">\n\
         <style>text{{font:13px sans-serif;fill:#777}}.h{{font-weight:bold}}.us{{fill:#2f9e6e}}.them{{fill:#8a8f98}}</style>\n\
         <text x=\"0\" y=\"14\">decisions per second, median; each group has its own scale</text>\n{body}</svg>\n"
    )
}

fn thousands(thousands: f64) -> String {
    if thousands >= 1000.0 { format!("{:.1} M/s", thousands / 1000.0) } else { format!("{thousands:.0} k/s") }
}
