//! The report as a self-contained HTML page without scripts, for light and dark themes.

use super::{
    chart::{self, Column, Frame, escaped, push},
    report::{CurveReport, FileReport, RuleDifference, RuleReport, SimulationReport, share},
    text_report::{limit, target_text},
};
use crate::format::{coarse_duration, count, percent, plural, timestamp};

const CSS: &str = include_str!("report.css");

/// The width of charts in their own coordinates; they are scaled to the page.
const WIDTH: f64 = 1_000.0;
const FRAME: Frame = Frame { left: 60.0, top: 10.0, width: 925.0, height: 180.0 };
const SMALL: Frame = Frame { height: 90.0, ..FRAME };
/// The number of time labels below a chart.
const TIMES: usize = 5;

/// Renders the page.
pub(super) fn page(report: &SimulationReport) -> String {
    let mut html = String::new();
    let title = format!("{} on {}", report.rules.file, report.logs.join(", "));
    push(
        &mut html,
        format_args!(
            "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
             <title>sluicegate simulate: {title}</title>\n<style>\n{CSS}{style}\n</style>\n</head>\n<body>\n",
            title = escaped(&title),
            style = chart::STYLE,
        ),
    );
    heading(&mut html, report);
    cards(&mut html, report);
    over_time(&mut html, report);
    difference(&mut html, report);
    file(&mut html, &report.rules, report);
    if let Some(against) = &report.against {
        file(&mut html, against, report);
    }
    html.push_str("</body>\n</html>\n");
    html
}

fn heading(html: &mut String, report: &SimulationReport) {
    push(html, format_args!("<h1>Simulation of {}</h1>\n", code(&report.rules.file)));
    let logs: Vec<_> = report.logs.iter().map(|log| code(log)).collect();
    let period = match (report.from, report.to) {
        (Some(from), Some(to)) => format!(", {} to {} UTC", timestamp(from), timestamp(to)),
        _ => String::new(),
    };
    push(html, format_args!("<p class=\"soft\">{}{period}</p>\n", logs.join(", ")));
    let lines = &report.lines;
    if lines.out_of_order > 0 {
        push(
            html,
            format_args!(
                "<p class=\"soft\">{} out of order, by up to {}: decided at the time of the latest line.</p>\n",
                plural(lines.out_of_order, "line", "lines"),
                coarse_duration(lines.furthest_back_seconds)
            ),
        );
    }
    if lines.unreadable > 0 {
        let unread = plural(lines.unreadable, "line", "lines");
        push(html, format_args!("<p class=\"bad\">{unread} could not be read:</p>\n<ul>\n"));
        for line in &lines.unreadable_first {
            push(html, format_args!("<li>{}</li>\n", code(&line.to_string())));
        }
        html.push_str("</ul>\n");
    }
}

fn cards(html: &mut String, report: &SimulationReport) {
    html.push_str("<div class=\"cards\">\n");
    card(html, "", &count(report.requests), if report.requests == 1 { "request" } else { "requests" });
    let mut denied = |file: &FileReport| {
        let style = if file.denied > 0 { "bad" } else { "good" };
        let words = format!("denied by {} ({})", code(&file.file), percent(file.denied_share));
        card(html, style, &count(file.denied), &words);
    };
    denied(&report.rules);
    if let Some(against) = &report.against {
        denied(against);
    }
    if let Some(difference) = &report.difference {
        card(html, "bad", &count(difference.newly_denied), "newly denied");
        card(html, "good", &count(difference.no_longer_denied), "no longer denied");
    }
    html.push_str("</div>\n");
}

/// Adds a card; `caption` is HTML.
fn card(html: &mut String, class: &str, number: &str, caption: &str) {
    push(html, format_args!("<div class=\"card\"><b class=\"{class}\">{number}</b>{caption}</div>\n"));
}

fn over_time(html: &mut String, report: &SimulationReport) {
    let series = &report.timeline;
    let every = coarse_duration(series.bucket_seconds as f64);
    push(
        html,
        format_args!(
            "<h2>Over time</h2>\n<p class=\"soft\">every {every}\
             <span class=\"key\" style=\"background:#5aa383\"></span>allowed\
             <span class=\"key\" style=\"background:#d1493f\"></span>denied</p>\n"
        ),
    );
    let columns: Vec<_> = series
        .requests
        .iter()
        .zip(&series.denied)
        .map(|(&requests, &denied)| Column { allowed: requests.saturating_sub(denied), denied })
        .collect();
    columns_over_time(html, FRAME, &columns, report);
    if let (Some(against), Some(old)) = (&report.against, &series.denied_against) {
        let most = chart::round_up(series.denied.iter().chain(old).copied().max().unwrap_or_default());
        push(
            html,
            format_args!(
                "<p class=\"soft\">denied by <span class=\"key\" style=\"background:#d1493f\"></span>{} \
                 and <span class=\"key\" style=\"background:#8c959f\"></span>{}</p>\n",
                code(&report.rules.file),
                code(&against.file)
            ),
        );
        let mut svg = String::new();
        chart::grid(&mut svg, SMALL, [&count(0), &count(most / 2), &count(most)]);
        chart::line(&mut svg, SMALL, "line old", old, most);
        chart::line(&mut svg, SMALL, "line", &series.denied, most);
        chart::x_axis(&mut svg, SMALL, &times(report));
        figure(html, SMALL, "denied over time by both rule files", &svg);
    }
}

fn columns_over_time(html: &mut String, frame: Frame, columns: &[Column], report: &SimulationReport) {
    let most = chart::round_up(
        columns.iter().map(|column| column.allowed + column.denied).max().unwrap_or_default(),
    );
    let start = report.timeline.start;
    let title = |at: usize| {
        let from = start?.checked_add(jiff::SignedDuration::from_secs(bucket(report, at))).ok()?;
        let Column { allowed, denied } = columns[at];
        let allowed = if allowed > 0 { format!("{} allowed, ", count(allowed)) } else { String::new() };
        Some(format!("{}: {allowed}{} denied", timestamp(from), count(denied)))
    };
    let mut svg = String::new();
    chart::grid(&mut svg, frame, [&count(0), &count(most / 2), &count(most)]);
    chart::columns(&mut svg, frame, columns, most, title);
    chart::x_axis(&mut svg, frame, &times(report));
    figure(html, frame, "requests over time, allowed and denied", &svg);
}

/// The start of a bucket, in seconds after the first.
fn bucket(report: &SimulationReport, at: usize) -> i64 {
    i64::try_from(at as u64 * report.timeline.bucket_seconds).unwrap_or(i64::MAX)
}

/// The time labels below a chart.
fn times(report: &SimulationReport) -> Vec<String> {
    let buckets = report.timeline.requests.len();
    let Some(start) = report.timeline.start else { return Vec::new() };
    let at = |part: usize| {
        let seconds = bucket(report, buckets) * part as i64 / (TIMES - 1) as i64;
        start.checked_add(jiff::SignedDuration::from_secs(seconds)).map(timestamp).unwrap_or_default()
    };
    (0..TIMES).map(at).collect()
}

fn figure(html: &mut String, frame: Frame, label: &str, svg: &str) {
    let height = frame.top + frame.height + 24.0;
    push(
        html,
        format_args!(
            "<div class=\"scroll\"><svg viewBox=\"0 0 {WIDTH:.0} {height:.0}\" role=\"img\" aria-label=\"{label}\">\n{svg}</svg></div>\n"
        ),
    );
}

fn difference(html: &mut String, report: &SimulationReport) {
    let (Some(difference), Some(against)) = (&report.difference, &report.against) else { return };
    push(html, format_args!("<h2>{} against {}</h2>\n", code(&report.rules.file), code(&against.file)));
    let by_both = plural(difference.denied_by_both, "request is", "requests are");
    push(html, format_args!("<p>{by_both} denied by both.</p>\n"));
    rule_differences(html, "newly denied", "bad", difference.newly_denied, &difference.newly_by_rule);
    rule_differences(
        html,
        "no longer denied",
        "good",
        difference.no_longer_denied,
        &difference.no_longer_by_rule,
    );
}

fn rule_differences(html: &mut String, what: &str, class: &str, requests: u64, rules: &[RuleDifference]) {
    push(html, format_args!("<h3><span class=\"{class}\">{}</span> {what}</h3>\n", count(requests)));
    if rules.is_empty() {
        return;
    }
    html.push_str(
        "<div class=\"scroll\"><table><tr><th>by rule<th class=\"n\">requests<th class=\"n\">keys<th>most\n",
    );
    for rule in rules {
        push(
            html,
            format_args!(
                "<tr><td>{}<td class=\"n\">{}<td class=\"n\">{}<td>{}\n",
                escaped(&rule.rule),
                count(rule.requests),
                count(rule.keys),
                worst(&rule.worst)
            ),
        );
    }
    html.push_str("</table></div>\n");
}

fn file(html: &mut String, file: &FileReport, report: &SimulationReport) {
    push(html, format_args!("<h2>Rules of {}</h2>\n<p>", code(&file.file)));
    push(
        html,
        format_args!(
            "Denies {} of {} ({}).",
            count(file.denied),
            plural(report.requests, "request", "requests"),
            percent(file.denied_share)
        ),
    );
    if file.unmatched > 0 {
        push(html, format_args!(" No rule applies to {}.", count(file.unmatched)));
    }
    if let Some(note) = file.not_simulated_note() {
        push(html, format_args!(" Rules {}.", escaped(&note)));
    }
    html.push_str(
        "</p>\n<div class=\"scroll\"><table><tr><th>rule<th>limit<th class=\"n\">matched<th class=\"n\">denied<th class=\"n\">share\
         <th class=\"n\">keys<th class=\"n\">longest lockout<th>worst hit\n",
    );
    for rule in &file.rules {
        let denials = rule.denials();
        let shadow = if rule.denied == 0 && rule.shadow_denied > 0 { " (shadow)" } else { "" };
        let lockout = rule.longest_lockout.as_ref();
        push(
            html,
            format_args!(
                "<tr><td><b>{}</b><td>{}<td class=\"n\">{}<td class=\"n {}\">{}{shadow}<td class=\"n\">{}<td class=\"n\">{}{}\
                 <td class=\"n\">{}<td>{}\n",
                escaped(&rule.rule.name),
                escaped(&limit(rule)),
                count(rule.matched),
                if rule.denied > 0 { "bad" } else { "" },
                count(denials),
                percent(share(denials, rule.matched)),
                if rule.keys_exact { "" } else { "at least " },
                count(rule.denied_keys),
                lockout.map_or("-".to_owned(), |lockout| coarse_duration(lockout.seconds)),
                worst(&rule.worst),
            ),
        );
    }
    html.push_str("</table></div>\n");
    for rule in &file.rules {
        rule_in_detail(html, rule, report);
    }
}

fn rule_in_detail(html: &mut String, rule: &RuleReport, report: &SimulationReport) {
    let is_curved = rule.curve.is_some() && rule.matched > 0;
    if rule.denials() == 0 && !is_curved {
        return;
    }
    push(html, format_args!("<h3>{}</h3>\n", escaped(&rule.rule.name)));
    if rule.denials() > 0 {
        if let Some(lockout) = &rule.longest_lockout {
            push(
                html,
                format_args!(
                    "<p>Longest lockout: {}, for {} from {} UTC.</p>\n",
                    code(&lockout.key.to_string()),
                    coarse_duration(lockout.seconds),
                    lockout.from.map(timestamp).unwrap_or_default()
                ),
            );
        }
        let denied = rule.denied_over_time.iter().map(|&denied| Column { allowed: 0, denied });
        html.push_str("<p class=\"soft\">Denied over time</p>\n");
        columns_over_time(html, SMALL, &denied.collect::<Vec<_>>(), report);
    }
    if let Some(curve) = &rule.curve
        && is_curved
    {
        self::curve(html, rule, curve);
    }
}

fn curve(html: &mut String, rule: &RuleReport, curve: &CurveReport) {
    let sampled = match curve.one_key_in {
        1 => String::new(),
        keys => format!(", estimated from one key in {keys}"),
    };
    push(
        html,
        format_args!("<p class=\"soft\">Share denied with other amounts, this rule only{sampled}</p>\n"),
    );
    let points: Vec<_> = curve.points.iter().map(|point| (point.amount, point.share)).collect();
    let mut svg = String::new();
    chart::curve(&mut svg, FRAME, &points, rule.rule.amount);
    figure(html, FRAME, "share denied by amount", &svg);
    html.push_str("<ul>\n");
    for text in curve.targets.iter().filter_map(target_text) {
        push(html, format_args!("<li>{text}</li>\n"));
    }
    html.push_str("</ul>\n");
}

fn worst(worst: &[super::rule_stats::KeyCount]) -> String {
    let one = |named: &super::rule_stats::KeyCount| {
        format!("{} ({})", code(&named.key.to_string()), count(named.requests))
    };
    worst.iter().map(one).collect::<Vec<_>>().join("<br>")
}

fn code(text: &str) -> String {
    format!("<code>{}</code>", escaped(text))
}
