//! The report as text.

use sluicegate_server::config::window_text;

use crate::{
    client::print::AT_ONE_TIME,
    format::{coarse_duration, count, percent, plural, timestamp},
    output::{self, Cell, DIM, ERROR, HEADING, SUCCESS, Table, WARNING, paint},
};

use super::report::{
    CurveReport, CurveTarget, FileReport, RuleDifference, RuleReport, SimulationReport, share,
};

/// The width of charts, in columns.
const WIDTH: usize = 72;
/// The height of charts, in lines.
const HEIGHT: usize = 5;
/// The width of a curve's bars.
const BAR: usize = 40;
/// Blocks of a column, by eighths.
const EIGHTHS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
/// Blocks of a bar, by eighths.
const BAR_EIGHTHS: [&str; 8] = ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"];

/// Prints the report.
pub(super) fn print(report: &SimulationReport) {
    heading(report);
    chart("requests", &report.timeline.requests, report, anstyle::Style::new());
    chart(&format!("denied by {}", report.rules.file), &report.timeline.denied, report, ERROR);
    if let (Some(against), Some(denied)) = (&report.against, &report.timeline.denied_against) {
        chart(&format!("denied by {}", against.file), denied, report, ERROR);
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

fn heading(report: &SimulationReport) {
    let lines = &report.lines;
    let period = match (report.from, report.to) {
        (Some(from), Some(to)) => {
            let lasted = coarse_duration(to.duration_since(from).as_secs_f64());
            format!(" from {} to {} UTC ({lasted})", timestamp(from), timestamp(to))
        }
        _ => String::new(),
    };
    output::line(format_args!("{}{period}", paint(HEADING, plural(report.requests, "request", "requests"))));
    if lines.unreadable > 0 {
        let of = lines.unreadable + lines.read;
        let share = percent(share(lines.unreadable, of));
        let unread = plural(lines.unreadable, "line", "lines");
        output::line(paint(WARNING, format!("{unread} ({share}) could not be read:")));
        for line in &lines.unreadable_first {
            output::line(format_args!("  {line}"));
        }
        if lines.unreadable > lines.unreadable_first.len() as u64 {
            output::line("  …");
        }
    }
    if lines.out_of_order > 0 {
        output::line(paint(
            DIM,
            format!(
                "{} out of order, by up to {}: decided at the time of the latest line",
                plural(lines.out_of_order, "line", "lines"),
                coarse_duration(lines.furthest_back_seconds)
            ),
        ));
    }
}

/// Prints counts over time.
fn chart(title: &str, values: &[u64], report: &SimulationReport, style: anstyle::Style) {
    let columns = binned(values);
    let most = columns.iter().copied().max().unwrap_or_default();
    let per_column = values.len().div_ceil(WIDTH).max(1) as u64 * report.timeline.bucket_seconds;
    output::line("");
    let every = coarse_duration(per_column as f64);
    output::line(format_args!(
        "{}  {}",
        paint(HEADING, title),
        paint(DIM, format!("every {every}, at most {}", count(most)))
    ));
    if most == 0 {
        return;
    }
    for line in (0..HEIGHT).rev() {
        output::line(paint(style, chart_line(&columns, most, line)));
    }
    let end = report.to.map(|to| to.strftime("%H:%M:%S").to_string()).unwrap_or_default();
    let start = report.timeline.start.map(timestamp).unwrap_or_default();
    let gap = columns.len().saturating_sub(start.len() + end.len());
    if gap > 0 {
        output::line(paint(DIM, format!("{start}{}{end}", " ".repeat(gap))));
    } else {
        output::line(paint(DIM, start));
    }
}

/// Sums values into at most [`WIDTH`] columns.
fn binned(values: &[u64]) -> Vec<u64> {
    let per_column = values.len().div_ceil(WIDTH).max(1);
    values.chunks(per_column).map(|chunk| chunk.iter().sum()).collect()
}

/// One line of a chart, counted from the bottom. A nonzero value is always visible.
fn chart_line(columns: &[u64], most: u64, line: usize) -> String {
    let eighths = |value: u64| {
        let height = (value as f64 / most as f64 * (HEIGHT * 8) as f64).round() as usize;
        if value > 0 { height.max(1) } else { 0 }
    };
    let of = |&value: &u64| EIGHTHS[eighths(value).saturating_sub(line * 8).min(8)];
    let text: String = columns.iter().map(of).collect();
    text.trim_end().to_owned()
}

fn file(file: &FileReport, report: &SimulationReport) {
    use crate::output::Align::{Left, Right};

    output::line("");
    let denied = format!("{} ({})", count(file.denied), percent(file.denied_share));
    let style = if file.denied > 0 { ERROR } else { SUCCESS };
    output::line(format_args!(
        "{} denied {} of {}",
        paint(HEADING, &file.file),
        paint(style, denied),
        count(report.requests)
    ));
    if file.unmatched > 0 {
        output::line(paint(DIM, format!("no rule applies to {}", count(file.unmatched))));
    }
    if let Some(note) = file.not_simulated_note() {
        output::line(paint(WARNING, note));
    }
    let mut table = Table::new([
        ("rule", Left),
        ("limit", Left),
        ("matched", Right),
        ("denied", Right),
        ("share", Right),
        ("keys", Right),
        ("longest lockout", Right),
        ("worst hit", Left),
    ]);
    for rule in &file.rules {
        let denials = rule.denials();
        let style = if rule.denied > 0 { ERROR } else { anstyle::Style::new() };
        let shadow = if rule.denied == 0 && rule.shadow_denied > 0 { " (shadow)" } else { "" };
        let at_least = if rule.keys_exact { "" } else { "≥" };
        table.row([
            Cell::from(&rule.rule.name),
            limit(rule).into(),
            count(rule.matched).into(),
            Cell::painted(style, format!("{}{shadow}", count(denials))),
            percent(share(denials, rule.matched)).into(),
            format!("{at_least}{}", count(rule.denied_keys)).into(),
            rule.longest_lockout
                .as_ref()
                .map_or("-".to_owned(), |longest| coarse_duration(longest.seconds))
                .into(),
            rule.worst
                .first()
                .map_or("-".to_owned(), |worst| format!("{} ({})", worst.key, count(worst.requests)))
                .into(),
        ]);
    }
    output::line(table);
    for rule in file.rules.iter().filter(|rule| rule.unit_unknown) {
        let (name, unit) = (&rule.rule.name, &rule.rule.unit);
        let hint =
            format!("{name} counts {unit}, but no field is configured: set it with --cost {unit}=FIELD");
        output::line(paint(WARNING, hint));
    }
    for rule in file.rules.iter().filter(|rule| rule.matched == 0) {
        let hint = match &rule.labels_never_seen[..] {
            [] => "no request matches".to_owned(),
            [label] => format!("no line has the label {label}: {}", remedy(label)),
            labels => format!("no line has the labels {}: {}", labels.join(", "), remedy(&labels[0])),
        };
        output::line(paint(WARNING, format!("{} never applies: {hint}", rule.rule.name)));
    }
}

fn remedy(label: &str) -> String {
    format!(
        "set its field with --field {label}=NAME, or derive it with --label '{label}=VALUE when path=/…*'"
    )
}

/// Formats a rule's limit.
pub(super) fn limit(rule: &RuleReport) -> String {
    let view = &rule.rule;
    let burst = match view.burst {
        Some(burst) if burst != view.amount => format!(", burst {burst}"),
        _ => String::new(),
    };
    let per = if view.per.is_empty() { String::new() } else { format!(", per {}", view.per.join(" and ")) };
    let window = match &view.window {
        Some(window) => format!("per {}", window_text(window, view.zone, view.anchor.as_ref())),
        None => AT_ONE_TIME.to_owned(),
    };
    format!("{} {window}{burst}{per} ({})", count(view.amount), view.algorithm)
}

fn difference(report: &SimulationReport) {
    let (Some(difference), Some(against)) = (&report.difference, &report.against) else { return };
    let (new, old) = (&report.rules.file, &against.file);
    output::line("");
    output::line(paint(HEADING, format!("{new} against {old}")));
    rule_differences(ERROR, "newly denied", difference.newly_denied, &difference.newly_by_rule);
    rule_differences(SUCCESS, "no longer denied", difference.no_longer_denied, &difference.no_longer_by_rule);
    output::line(format_args!("{:>12}  denied by both", count(difference.denied_by_both)));
}

fn rule_differences(style: anstyle::Style, what: &str, requests: u64, rules: &[RuleDifference]) {
    output::line(format_args!("{}  {what}", paint(style, format!("{:>12}", count(requests)))));
    for rule in rules {
        let worst =
            rule.worst.first().map(|worst| format!(", most {} ({})", worst.key, count(worst.requests)));
        output::line(paint(
            DIM,
            format!(
                "{:>12}    by {}: {}{}",
                count(rule.requests),
                rule.rule,
                plural(rule.keys, "key", "keys"),
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
        paint(HEADING, &rule.rule.name),
        paint(DIM, format!("denied with other amounts, this rule only{sampled}"))
    ));
    if rule.matched == 0 {
        return;
    }
    // amounts above the first that denies nothing are omitted
    let none_denied =
        curve.points.iter().position(|point| point.amount >= rule.rule.amount && point.denied == 0);
    for point in &curve.points[..none_denied.map_or(curve.points.len(), |at| at + 1)] {
        let own = point.amount == rule.rule.amount;
        let (mark, style) = if own { ("→", HEADING) } else { (" ", anstyle::Style::new()) };
        let line =
            format!("{mark} {:>11}  {:>8}  {}", count(point.amount), percent(point.share), bar(point.share));
        output::line(paint(style, line.trim_end()));
    }
    for text in curve.targets.iter().filter_map(target_text) {
        output::line(paint(DIM, text));
    }
}

/// Describes the amount that meets a target, as far as the curve shows it.
pub(super) fn target_text(target: &CurveTarget) -> Option<String> {
    let share = format!("{} %", target.share * 100.0);
    Some(match (target.amount, target.above) {
        (Some(amount), Some(above)) => {
            format!("{} denies at most {share}; {} denies more", count(amount), count(above))
        }
        (Some(amount), None) => format!("{} or less denies at most {share}", count(amount)),
        (None, Some(above)) => format!("more than {} is needed to deny at most {share}", count(above)),
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
    fn columns_fill_from_the_bottom_and_small_values_are_visible() {
        let columns = [0, 1, 500, 1_000];
        let lines: Vec<_> = (0..HEIGHT).rev().map(|line| chart_line(&columns, 1_000, line)).collect();
        assert_eq!(lines, ["   █", "   █", "  ▄█", "  ██", " ▁██"]);
    }

    #[test]
    fn bar_lengths_are_proportional() {
        assert_eq!((bar(0.0), bar(1.0), bar(0.000_1)), (String::new(), "█".repeat(BAR), "▏".to_owned()));
        assert_eq!(bar(0.5), "█".repeat(BAR / 2));
    }
}
