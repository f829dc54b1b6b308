//! The report for a terminal.

use crate::output::{self, BAD, Cell, FAINT, GOOD, ODD, TITLE, Table, count, paint, several};

use super::{
    report::{Changed, CurveReport, File, Report, RuleReport, Target, share},
    words::{duration, percent, time},
};

/// How wide charts are, in columns.
const WIDTH: usize = 72;
/// How high charts are, in lines.
const HEIGHT: usize = 5;
/// How wide the bars of a curve are.
const BAR: usize = 40;
/// The parts of a column, by eighths.
const EIGHTHS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
/// The parts of a bar, by eighths.
const BAR_EIGHTHS: [&str; 8] = ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"];

/// Prints everything.
pub(super) fn print(report: &Report) {
    heading(report);
    chart("requests", &report.timeline.requests, report, anstyle::Style::new());
    chart(&format!("refused by {}", report.rules.file), &report.timeline.refused, report, BAD);
    if let (Some(against), Some(refused)) = (&report.against, &report.timeline.refused_against) {
        chart(&format!("refused by {}", against.file), refused, report, BAD);
    }
    file(&report.rules, report);
    if let Some(against) = &report.against {
        file(against, report);
    }
    difference(report);
    for rule in &report.rules.rules {
        if let Some(curve) = &rule.curve {
            self::curve(rule, curve);
        }
    }
}

fn heading(report: &Report) {
    let lines = &report.lines;
    let period = match (report.from, report.to) {
        (Some(from), Some(to)) => {
            let lasted = duration(to.duration_since(from).as_secs_f64());
            format!(" from {} to {} UTC ({lasted})", time(from), time(to))
        }
        _ => String::new(),
    };
    output::line(format_args!("{}{period}", paint(TITLE, several(report.requests, "request", "requests"))));
    if lines.unreadable > 0 {
        let of = lines.unreadable + lines.read;
        let share = percent(share(lines.unreadable, of));
        let unread = several(lines.unreadable, "line", "lines");
        output::line(paint(ODD, format!("{unread} ({share}) could not be read:")));
        for line in &lines.unreadable_first {
            output::line(format_args!("  {line}"));
        }
        if lines.unreadable > lines.unreadable_first.len() as u64 {
            output::line("  …");
        }
    }
    if lines.out_of_order > 0 {
        output::line(paint(
            FAINT,
            format!(
                "{} out of order, by up to {}: the clock waited",
                several(lines.out_of_order, "line", "lines"),
                duration(lines.furthest_back_seconds)
            ),
        ));
    }
}

/// Counts over time.
fn chart(title: &str, values: &[u64], report: &Report, style: anstyle::Style) {
    let columns = binned(values);
    let most = columns.iter().copied().max().unwrap_or_default();
    let per_column = values.len().div_ceil(WIDTH).max(1) as u64 * report.timeline.bucket_seconds;
    output::line("");
    let every = duration(per_column as f64);
    output::line(format_args!(
        "{}  {}",
        paint(TITLE, title),
        paint(FAINT, format!("every {every}, at most {}", count(most)))
    ));
    if most == 0 {
        return;
    }
    for line in (0..HEIGHT).rev() {
        output::line(paint(style, chart_line(&columns, most, line)));
    }
    let end = report.to.map(|to| to.strftime("%H:%M:%S").to_string()).unwrap_or_default();
    let start = report.timeline.start.map(time).unwrap_or_default();
    let gap = columns.len().saturating_sub(start.len() + end.len());
    if gap > 0 {
        output::line(paint(FAINT, format!("{start}{}{end}", " ".repeat(gap))));
    } else {
        output::line(paint(FAINT, start));
    }
}

/// As many columns as there is room for, each the sum of some values.
fn binned(values: &[u64]) -> Vec<u64> {
    let per_column = values.len().div_ceil(WIDTH).max(1);
    values.chunks(per_column).map(|chunk| chunk.iter().sum()).collect()
}

/// One line of a chart, counted from below. What is not nothing is seen.
fn chart_line(columns: &[u64], most: u64, line: usize) -> String {
    let eighths = |value: u64| {
        let height = (value as f64 / most as f64 * (HEIGHT * 8) as f64).round() as usize;
        if value > 0 { height.max(1) } else { 0 }
    };
    let of = |&value: &u64| EIGHTHS[eighths(value).saturating_sub(line * 8).min(8)];
    let text: String = columns.iter().map(of).collect();
    text.trim_end().to_owned()
}

fn file(file: &File, report: &Report) {
    use crate::output::Align::{Left, Right};

    output::line("");
    let refused = format!("{} ({})", count(file.refused), percent(file.refused_share));
    let style = if file.refused > 0 { BAD } else { GOOD };
    output::line(format_args!(
        "{} refuses {} of {}",
        paint(TITLE, &file.file),
        paint(style, refused),
        count(report.requests)
    ));
    if file.unmatched > 0 {
        output::line(paint(FAINT, format!("no rule applies to {}", count(file.unmatched))));
    }
    let mut table = Table::new([
        ("rule", Left),
        ("limit", Left),
        ("matched", Right),
        ("refused", Right),
        ("share", Right),
        ("keys", Right),
        ("longest lockout", Right),
        ("worst hit", Left),
    ]);
    for rule in &file.rules {
        let turned_away = rule.turned_away();
        let style = if rule.refused > 0 { BAD } else { anstyle::Style::new() };
        let shadow = if rule.refused == 0 && rule.shadow_refused > 0 { " (shadow)" } else { "" };
        let at_least = if rule.keys_exact { "" } else { "≥" };
        table.row([
            Cell::from(&rule.rule.name),
            limit(rule).into(),
            count(rule.matched).into(),
            Cell::painted(style, format!("{}{shadow}", count(turned_away))),
            percent(share(turned_away, rule.matched)).into(),
            format!("{at_least}{}", count(rule.keys_refused)).into(),
            rule.longest_lockout.as_ref().map_or("-".to_owned(), |longest| duration(longest.seconds)).into(),
            rule.worst
                .first()
                .map_or("-".to_owned(), |worst| format!("{} ({})", worst.key, count(worst.requests)))
                .into(),
        ]);
    }
    output::line(table);
    for rule in file.rules.iter().filter(|rule| rule.unit_unknown) {
        let (name, unit) = (&rule.rule.name, &rule.rule.unit);
        let hint = format!(
            "{name} counts {unit}, and nothing says how many: name the field with --cost {unit}=FIELD"
        );
        output::line(paint(ODD, hint));
    }
    for rule in file.rules.iter().filter(|rule| rule.matched == 0) {
        let hint = match &rule.labels_never_seen[..] {
            [] => "no request matches it".to_owned(),
            [label] => format!("no line has the label {label}: {}", remedy(label)),
            labels => format!("no line has the labels {}: {}", labels.join(", "), remedy(&labels[0])),
        };
        output::line(paint(ODD, format!("{} never applies: {hint}", rule.rule.name)));
    }
}

fn remedy(label: &str) -> String {
    format!(
        "say where it is with --field {label}=NAME, or make it up with --label '{label}=VALUE when path=/…*'"
    )
}

/// A rule's limit in a few words.
pub(super) fn limit(rule: &RuleReport) -> String {
    let view = &rule.rule;
    let burst = match view.burst {
        Some(burst) if burst != view.amount => format!(", burst {burst}"),
        _ => String::new(),
    };
    let per = if view.per.is_empty() { String::new() } else { format!(" per {}", view.per.join(" and ")) };
    format!("{} in {}{burst}{per} by {}", count(view.amount), view.window, view.algorithm)
}

fn difference(report: &Report) {
    let (Some(difference), Some(against)) = (&report.difference, &report.against) else { return };
    let (new, old) = (&report.rules.file, &against.file);
    output::line("");
    output::line(paint(TITLE, format!("{new} against {old}")));
    changed(BAD, "newly refused", difference.newly_refused, &difference.newly_by_rule);
    changed(GOOD, "no longer refused", difference.no_longer_refused, &difference.no_longer_by_rule);
    output::line(format_args!("{:>12}  refused by both", count(difference.refused_by_both)));
}

fn changed(style: anstyle::Style, what: &str, requests: u64, rules: &[Changed]) {
    output::line(format_args!("{}  {what}", paint(style, format!("{:>12}", count(requests)))));
    for rule in rules {
        let worst =
            rule.worst.first().map(|worst| format!(", most {} ({})", worst.key, count(worst.requests)));
        output::line(paint(
            FAINT,
            format!(
                "{:>12}    by {}: {}{}",
                count(rule.requests),
                rule.rule,
                several(rule.keys, "key", "keys"),
                worst.unwrap_or_default()
            ),
        ));
    }
}

fn curve(rule: &RuleReport, curve: &CurveReport) {
    output::line("");
    let sampled = match curve.one_key_in {
        1 => String::new(),
        keys => format!("; estimated from one key in {keys}"),
    };
    output::line(format_args!(
        "{}  {}",
        paint(TITLE, &rule.rule.name),
        paint(FAINT, format!("refused with other amounts, the rule by itself{sampled}"))
    ));
    if rule.matched == 0 {
        return;
    }
    // behind the first amount that refuses nobody, all others are alike
    let nobody = curve.points.iter().position(|point| point.amount >= rule.rule.amount && point.refused == 0);
    for point in &curve.points[..nobody.map_or(curve.points.len(), |at| at + 1)] {
        let own = point.amount == rule.rule.amount;
        let (mark, style) = if own { ("→", TITLE) } else { (" ", anstyle::Style::new()) };
        let line =
            format!("{mark} {:>11}  {:>8}  {}", count(point.amount), percent(point.share), bar(point.share));
        output::line(paint(style, line.trim_end()));
    }
    for words in curve.targets.iter().filter_map(target_words) {
        output::line(paint(FAINT, words));
    }
}

/// Which amount refuses little enough, as far as the curve tells.
pub(super) fn target_words(target: &Target) -> Option<String> {
    let share = format!("{} %", target.share * 100.0);
    Some(match (target.amount, target.above) {
        (Some(amount), Some(above)) => {
            format!("{} refuses at most {share}; {} refuses more", count(amount), count(above))
        }
        (Some(amount), None) => format!("{} or less refuses at most {share}", count(amount)),
        (None, Some(above)) => format!("more than {} is needed to refuse at most {share}", count(above)),
        (None, None) => return None,
    })
}

fn bar(share: f64) -> String {
    let eighths = (share * (BAR * 8) as f64).round() as usize;
    let eighths = if share > 0.0 { eighths.max(1) } else { 0 };
    format!("{}{}", "█".repeat(eighths / 8), BAR_EIGHTHS[eighths % 8])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_fill_from_below_and_what_is_little_is_seen() {
        let columns = [0, 1, 500, 1_000];
        let lines: Vec<_> = (0..HEIGHT).rev().map(|line| chart_line(&columns, 1_000, line)).collect();
        assert_eq!(lines, ["   █", "   █", "  ▄█", "  ██", " ▁██"]);
    }

    #[test]
    fn bars_are_as_long_as_their_share() {
        assert_eq!((bar(0.0), bar(1.0), bar(0.000_1)), (String::new(), "█".repeat(BAR), "▏".to_owned()));
        assert_eq!(bar(0.5), "█".repeat(BAR / 2));
    }
}
