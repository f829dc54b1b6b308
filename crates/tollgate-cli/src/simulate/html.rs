//! The report as one page: no script, nothing from elsewhere, light and dark.

use super::{
    chart::{self, Column, Frame, escaped, push},
    report::{Changed, CurveReport, File, Report, RuleReport, share},
    text::{limit, target_words},
    words::{duration, percent, time},
};
use crate::output::{count, several};

const CSS: &str = include_str!("page.css");

/// How wide pictures are drawn; they are shown as wide as the page.
const WIDTH: f64 = 1_000.0;
const FRAME: Frame = Frame { left: 60.0, top: 10.0, width: 925.0, height: 180.0 };
const SMALL: Frame = Frame { height: 90.0, ..FRAME };
/// How many times stand below a chart.
const TIMES: usize = 5;

/// The whole page.
pub(super) fn page(report: &Report) -> String {
    let mut html = String::new();
    let title = format!("{} on {}", report.rules.file, report.logs.join(", "));
    push(
        &mut html,
        format_args!(
            "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
             <title>tollgate simulate: {title}</title>\n<style>\n{CSS}{style}\n</style>\n</head>\n<body>\n",
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

fn heading(html: &mut String, report: &Report) {
    push(html, format_args!("<h1>What {} would have done</h1>\n", code(&report.rules.file)));
    let logs: Vec<_> = report.logs.iter().map(|log| code(log)).collect();
    let period = match (report.from, report.to) {
        (Some(from), Some(to)) => format!(", {} to {} UTC", time(from), time(to)),
        _ => String::new(),
    };
    push(html, format_args!("<p class=\"soft\">{}{period}</p>\n", logs.join(", ")));
    let lines = &report.lines;
    if lines.out_of_order > 0 {
        push(
            html,
            format_args!(
                "<p class=\"soft\">{} out of order, by up to {}: the clock waited.</p>\n",
                several(lines.out_of_order, "line", "lines"),
                duration(lines.furthest_back_seconds)
            ),
        );
    }
    if lines.unreadable > 0 {
        let unread = several(lines.unreadable, "line", "lines");
        push(html, format_args!("<p class=\"bad\">{unread} could not be read:</p>\n<ul>\n"));
        for line in &lines.unreadable_first {
            push(html, format_args!("<li>{}</li>\n", code(&line.to_string())));
        }
        html.push_str("</ul>\n");
    }
}

fn cards(html: &mut String, report: &Report) {
    html.push_str("<div class=\"cards\">\n");
    card(html, "", &count(report.requests), if report.requests == 1 { "request" } else { "requests" });
    let mut refused = |file: &File| {
        let style = if file.refused > 0 { "bad" } else { "good" };
        let words = format!("refused by {} ({})", code(&file.file), percent(file.refused_share));
        card(html, style, &count(file.refused), &words);
    };
    refused(&report.rules);
    if let Some(against) = &report.against {
        refused(against);
    }
    if let Some(difference) = &report.difference {
        card(html, "bad", &count(difference.newly_refused), "newly refused");
        card(html, "good", &count(difference.no_longer_refused), "no longer refused");
    }
    html.push_str("</div>\n");
}

/// `words` are markup.
fn card(html: &mut String, class: &str, number: &str, words: &str) {
    push(html, format_args!("<div class=\"card\"><b class=\"{class}\">{number}</b>{words}</div>\n"));
}

fn over_time(html: &mut String, report: &Report) {
    let series = &report.timeline;
    let every = duration(series.bucket_seconds as f64);
    push(
        html,
        format_args!(
            "<h2>Over time</h2>\n<p class=\"soft\">every {every}\
             <span class=\"key\" style=\"background:#5aa383\"></span>allowed\
             <span class=\"key\" style=\"background:#d1493f\"></span>refused</p>\n"
        ),
    );
    let columns: Vec<_> = series
        .requests
        .iter()
        .zip(&series.refused)
        .map(|(&requests, &refused)| Column { allowed: requests.saturating_sub(refused), refused })
        .collect();
    columns_over_time(html, FRAME, &columns, report);
    if let (Some(against), Some(old)) = (&report.against, &series.refused_against) {
        let most = chart::nice(series.refused.iter().chain(old).copied().max().unwrap_or_default());
        push(
            html,
            format_args!(
                "<p class=\"soft\">refused by <span class=\"key\" style=\"background:#d1493f\"></span>{} \
                 and <span class=\"key\" style=\"background:#8c959f\"></span>{}</p>\n",
                code(&report.rules.file),
                code(&against.file)
            ),
        );
        let mut svg = String::new();
        chart::grid(&mut svg, SMALL, [&count(0), &count(most / 2), &count(most)]);
        chart::line(&mut svg, SMALL, "line old", old, most);
        chart::line(&mut svg, SMALL, "line", &series.refused, most);
        chart::below(&mut svg, SMALL, &times(report));
        picture(html, SMALL, "refused over time by both rule files", &svg);
    }
}

fn columns_over_time(html: &mut String, frame: Frame, columns: &[Column], report: &Report) {
    let most =
        chart::nice(columns.iter().map(|column| column.allowed + column.refused).max().unwrap_or_default());
    let start = report.timeline.start;
    let title = |at: usize| {
        let from = start?.checked_add(jiff::SignedDuration::from_secs(bucket(report, at))).ok()?;
        let Column { allowed, refused } = columns[at];
        let allowed = if allowed > 0 { format!("{} allowed, ", count(allowed)) } else { String::new() };
        Some(format!("{}: {allowed}{} refused", time(from), count(refused)))
    };
    let mut svg = String::new();
    chart::grid(&mut svg, frame, [&count(0), &count(most / 2), &count(most)]);
    chart::columns(&mut svg, frame, columns, most, title);
    chart::below(&mut svg, frame, &times(report));
    picture(html, frame, "requests over time, allowed and refused", &svg);
}

/// When a bucket begins, in seconds after the first.
fn bucket(report: &Report, at: usize) -> i64 {
    i64::try_from(at as u64 * report.timeline.bucket_seconds).unwrap_or(i64::MAX)
}

/// The times that stand below a chart.
fn times(report: &Report) -> Vec<String> {
    let buckets = report.timeline.requests.len();
    let Some(start) = report.timeline.start else { return Vec::new() };
    let at = |part: usize| {
        let seconds = bucket(report, buckets) * part as i64 / (TIMES - 1) as i64;
        start.checked_add(jiff::SignedDuration::from_secs(seconds)).map(time).unwrap_or_default()
    };
    (0..TIMES).map(at).collect()
}

fn picture(html: &mut String, frame: Frame, words: &str, svg: &str) {
    let height = frame.top + frame.height + 24.0;
    push(
        html,
        format_args!(
            "<div class=\"scroll\"><svg viewBox=\"0 0 {WIDTH:.0} {height:.0}\" role=\"img\" aria-label=\"{words}\">\n{svg}</svg></div>\n"
        ),
    );
}

fn difference(html: &mut String, report: &Report) {
    let (Some(difference), Some(against)) = (&report.difference, &report.against) else { return };
    push(html, format_args!("<h2>{} against {}</h2>\n", code(&report.rules.file), code(&against.file)));
    let by_both = several(difference.refused_by_both, "request is", "requests are");
    push(html, format_args!("<p>{by_both} refused by both.</p>\n"));
    changed(html, "newly refused", "bad", difference.newly_refused, &difference.newly_by_rule);
    changed(html, "no longer refused", "good", difference.no_longer_refused, &difference.no_longer_by_rule);
}

fn changed(html: &mut String, what: &str, class: &str, requests: u64, rules: &[Changed]) {
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

fn file(html: &mut String, file: &File, report: &Report) {
    push(html, format_args!("<h2>The rules of {}</h2>\n<p>", code(&file.file)));
    push(
        html,
        format_args!(
            "Refuses {} of {} ({}).",
            count(file.refused),
            several(report.requests, "request", "requests"),
            percent(file.refused_share)
        ),
    );
    if file.unmatched > 0 {
        push(html, format_args!(" No rule applies to {}.", count(file.unmatched)));
    }
    html.push_str(
        "</p>\n<div class=\"scroll\"><table><tr><th>rule<th>limit<th class=\"n\">matched<th class=\"n\">refused<th class=\"n\">share\
         <th class=\"n\">keys<th class=\"n\">longest lockout<th>worst hit\n",
    );
    for rule in &file.rules {
        let turned_away = rule.turned_away();
        let shadow = if rule.refused == 0 && rule.shadow_refused > 0 { " (shadow)" } else { "" };
        let lockout = rule.longest_lockout.as_ref();
        push(
            html,
            format_args!(
                "<tr><td><b>{}</b><td>{}<td class=\"n\">{}<td class=\"n {}\">{}{shadow}<td class=\"n\">{}<td class=\"n\">{}{}\
                 <td class=\"n\">{}<td>{}\n",
                escaped(&rule.rule.name),
                escaped(&limit(rule)),
                count(rule.matched),
                if rule.refused > 0 { "bad" } else { "" },
                count(turned_away),
                percent(share(turned_away, rule.matched)),
                if rule.keys_exact { "" } else { "at least " },
                count(rule.keys_refused),
                lockout.map_or("-".to_owned(), |lockout| duration(lockout.seconds)),
                worst(&rule.worst),
            ),
        );
    }
    html.push_str("</table></div>\n");
    for rule in &file.rules {
        rule_in_detail(html, rule, report);
    }
}

fn rule_in_detail(html: &mut String, rule: &RuleReport, report: &Report) {
    let is_curved = rule.curve.is_some() && rule.matched > 0;
    if rule.turned_away() == 0 && !is_curved {
        return;
    }
    push(html, format_args!("<h3>{}</h3>\n", escaped(&rule.rule.name)));
    if rule.turned_away() > 0 {
        if let Some(lockout) = &rule.longest_lockout {
            push(
                html,
                format_args!(
                    "<p>Refused in a row for the longest time: {}, {} from {} UTC on.</p>\n",
                    code(&lockout.key.to_string()),
                    duration(lockout.seconds),
                    lockout.from.map(time).unwrap_or_default()
                ),
            );
        }
        let refused = rule.refused_over_time.iter().map(|&refused| Column { allowed: 0, refused });
        html.push_str("<p class=\"soft\">Refused over time</p>\n");
        columns_over_time(html, SMALL, &refused.collect::<Vec<_>>(), report);
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
        format_args!("<p class=\"soft\">Share refused with other amounts, the rule by itself{sampled}</p>\n"),
    );
    let points: Vec<_> = curve.points.iter().map(|point| (point.amount, point.share)).collect();
    let mut svg = String::new();
    chart::curve(&mut svg, FRAME, &points, rule.rule.amount);
    picture(html, FRAME, "share refused over the amount", &svg);
    html.push_str("<ul>\n");
    for words in curve.targets.iter().filter_map(target_words) {
        push(html, format_args!("<li>{words}</li>\n"));
    }
    html.push_str("</ul>\n");
}

fn worst(worst: &[super::tally::Named]) -> String {
    let one =
        |named: &super::tally::Named| format!("{} ({})", code(&named.key.to_string()), count(named.requests));
    worst.iter().map(one).collect::<Vec<_>>().join("<br>")
}

fn code(text: &str) -> String {
    format!("<code>{}</code>", escaped(text))
}
