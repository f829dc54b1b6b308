//! Answers for people: the verdict first, then a row for each rule.

use tollgate_server::http::{
    answer::{Answer, Reset, Tier},
    explain::{Applying, Explanation, Other, Terms},
};

use crate::output::{
    self, Align, BAD, Cell, FAINT, GOOD, ODD, TITLE, Table, paint,
    wait::{in_short, in_words},
};

/// What stands where there is nothing to say.
const NOTHING: &str = "-";

/// The answer to a check.
pub(super) fn check(answer: &Answer) {
    peek(answer);
    if answer.allowed {
        how_to_take_back(answer);
    }
}

/// The answer to a peek.
pub(super) fn peek(answer: &Answer) {
    verdict(answer);
    degraded(answer);
    rows(decided(&answer.tiers));
}

/// The answer to a charge.
pub(super) fn charge(answer: &Answer) {
    let done = if answer.tiers.is_empty() { "NOTHING CHARGED" } else { "CHARGED" };
    output::line(format_args!("{}  {}", paint(GOOD.bold(), done), left(answer)));
    rows(adjusted(&answer.tiers));
    how_to_take_back(answer);
}

/// The answer to a refund.
pub(super) fn refund(answer: &Answer) {
    let done = if answer.tiers.is_empty() { "NOTHING REFUNDED" } else { "REFUNDED" };
    output::line(format_args!("{}  {}", paint(GOOD.bold(), done), left(answer)));
    rows(adjusted(&answer.tiers));
}

/// The answer to a reset.
pub(super) fn reset(Reset { reset }: Reset) {
    let counters = match reset {
        0 => "nothing was counted".to_owned(),
        1 => "1 counter is forgotten".to_owned(),
        several => format!("{several} counters are forgotten"),
    };
    output::line(format_args!("{}  {counters}", paint(GOOD.bold(), "RESET")));
}

/// Why a request would pass or not.
pub(super) fn explanation(explained: &Explanation) {
    let Explanation { decision, applies, others, more_others } = explained;
    verdict(decision);
    degraded(decision);
    if !applies.is_empty() {
        heading("Rules that apply");
    }
    for applying in applies {
        let Applying { rule, key, limit, arithmetic, .. } = applying;
        let name = paint(TITLE, rule.as_deref().unwrap_or("this key"));
        match limit {
            Some(limit) => output::line(format_args!("  {name}: {}", terms(limit))),
            None => output::line(format_args!("  {name}")),
        }
        output::line(format_args!("    {arithmetic}"));
        if let Some(key) = key {
            output::line(format_args!("    {}", paint(FAINT, format_args!("counter {key}"))));
        }
    }
    reasons(others);
    match (others.is_empty(), more_others) {
        (_, 0) => {}
        (false, more) => output::line(format_args!("  and {more} more")),
        (true, count) => {
            heading(&format!("{count} more do not apply: a token that may admin is told which, and why"));
        }
    }
}

/// Why the other rules do not apply.
pub(crate) fn reasons(others: &[Other]) {
    if !others.is_empty() {
        heading("Rules that do not");
    }
    let width = others.iter().map(|other| other.rule.chars().count()).max().unwrap_or_default();
    for other in others {
        output::line(format_args!("  {:width$}  {}", other.rule, other.because));
    }
}

/// A paragraph's title.
pub(crate) fn heading(title: &str) {
    output::line("");
    output::line(paint(FAINT, title));
}

/// A limit in words.
pub(crate) fn terms(Terms { algorithm, amount, window, capacity, shadow }: &Terms) -> String {
    let at_once = if capacity == amount { String::new() } else { format!(", {capacity} at once") };
    let shadow = if *shadow { ", never refuses (shadow)" } else { "" };
    format!("{amount} per {window}{at_once} by {algorithm}{shadow}")
}

fn verdict(answer: &Answer) {
    if answer.allowed {
        output::line(format_args!("{}  {}", paint(GOOD.bold(), "ALLOWED"), left(answer)));
        return;
    }
    let by = answer.rule.as_ref().map(|rule| format!("by {rule}: ")).unwrap_or_default();
    let wait = match answer.retry_after_ms {
        Some(wait) => format!("try again in {}", in_words(wait)),
        None => "waiting does not help".to_owned(),
    };
    output::line(format_args!("{}  {by}{wait}", paint(BAD.bold(), "DENIED")));
}

/// What is left by the rule that decided.
fn left(answer: &Answer) -> String {
    match (&answer.rule, answer.remaining, answer.limit) {
        (Some(rule), Some(remaining), Some(limit)) => format!("{remaining} of {limit} left by {rule}"),
        (None, Some(remaining), Some(limit)) => format!("{remaining} of {limit} left"),
        _ if answer.degraded => "by what the rules say for a store that does not answer".to_owned(),
        _ if answer.tiers.is_empty() => "no rule applies".to_owned(),
        _ => "no rule applies that could refuse".to_owned(),
    }
}

fn how_to_take_back(answer: &Answer) {
    if let (Some(at), false) = (answer.at_us, answer.tiers.is_empty()) {
        output::line("");
        output::line(paint(FAINT, format_args!("tollgate refund with --at {at} takes exactly this back")));
    }
}

/// What decided where the store did not.
fn degraded(answer: &Answer) {
    let why = match &*answer.source {
        "fallback" => "this process's share of the limit decided, as the rules say (local)",
        "open" => "it passes, as the rules say (open)",
        "closed" => "it is refused, as a rule says (closed)",
        "local" if !answer.allowed => {
            output::line(paint(FAINT, "refused by what the server remembers of an earlier refusal"));
            return;
        }
        _ => return,
    };
    output::line(format_args!(
        "{}  the store did not answer: {why}; tollgate doctor says what is wrong with it",
        paint(ODD.bold(), "DEGRADED")
    ));
}

fn rows(table: Option<Table>) {
    if let Some(table) = table {
        output::line("");
        output::line(table);
    }
}

/// What each rule says of a request.
fn decided(tiers: &[Tier]) -> Option<Table> {
    let mut table = Table::new([
        ("rule", Align::Left),
        ("says", Align::Left),
        ("left", Align::Right),
        ("of", Align::Right),
        ("unit", Align::Left),
        ("wait", Align::Right),
        ("all free in", Align::Right),
    ]);
    for tier in tiers {
        let says = match (tier.allowed, tier.shadow) {
            (true, _) => Cell::painted(GOOD, "allowed"),
            (false, false) => Cell::painted(BAD, "denied"),
            (false, true) => Cell::painted(ODD, "would deny"),
        };
        let wait = match tier.retry_after_ms {
            Some(wait) => in_short(wait),
            None if tier.never => "for ever".to_owned(),
            None => NOTHING.to_owned(),
        };
        let [rule, left, of, unit, free] = cells(tier);
        table.row([rule, says, left, of, unit, wait.into(), free]);
    }
    (!tiers.is_empty()).then_some(table)
}

/// What is left by each rule.
fn adjusted(tiers: &[Tier]) -> Option<Table> {
    let mut table = Table::new([
        ("rule", Align::Left),
        ("left", Align::Right),
        ("of", Align::Right),
        ("unit", Align::Left),
        ("all free in", Align::Right),
    ]);
    for tier in tiers {
        table.row(cells(tier));
    }
    (!tiers.is_empty()).then_some(table)
}

fn cells(tier: &Tier) -> [Cell; 5] {
    let name = tier.rule.as_deref().unwrap_or("this key");
    let shadow = if tier.shadow { " (shadow)" } else { "" };
    [
        format_args!("{name}{shadow}").into(),
        tier.remaining.into(),
        tier.limit.into(),
        (&tier.unit).into(),
        in_short(tier.reset_after_ms).into(),
    ]
}
