//! Text output of responses: the decision first, then a row for each rule.

use std::time::Duration;

use sluicegate::duration;
use sluicegate_core::limit::MAX_WINDOW;
use sluicegate_server::{
    config::window_text,
    http::{
        explain::{AppliedRule, CounterView, Explanation, LimitView, LiveHoldsView, OtherRule},
        response::{DecisionBody, ResetBody, TierBody},
    },
};

use super::request::RequestBody;
use crate::{
    doctor::connectivity::ConnectionProblem,
    format,
    output::{self, Align, Cell, DIM, ERROR, HEADING, SUCCESS, Table, WARNING, paint},
};

/// The text of a limit that has no window.
pub(crate) const AT_ONE_TIME: &str = "at one time";
/// The text of an empty cell.
pub(super) const EMPTY: &str = "-";

/// A response, with its request and, where known, the reason why the store did not decide.
pub(super) struct Response<'a> {
    pub(super) body: &'a RequestBody<'a>,
    pub(super) answer: &'a DecisionBody,
    pub(super) store_problem: Option<ConnectionProblem>,
}

/// Prints the response to a check.
pub(super) fn check(response: &Response<'_>) {
    peek(response);
    if response.answer.allowed && response.is_counted(|tier| tier.allowed) {
        refund_hint(response.answer);
    }
}

/// Prints the response to a peek.
pub(super) fn peek(response: &Response<'_>) {
    decision(response);
    if response.answer.source == "rule" {
        output::line(paint(DIM, "the rule denies without counting; run sluicegate explain for the reason"));
    }
    no_rule_hint(response);
    print_table(decision_table(&response.answer.tiers));
}

/// Prints the response to a charge.
pub(super) fn charge(response: &Response<'_>) {
    let is_counted = response.is_counted(|_| true);
    let done = if is_counted { "CHARGED" } else { "NOTHING CHARGED" };
    output::line(format_args!("{}  {}", paint(SUCCESS.bold(), done), remaining(response.answer)));
    warn_uncounted_units(response);
    no_rule_hint(response);
    print_table(adjustment_table(&response.answer.tiers));
    if is_counted {
        refund_hint(response.answer);
    }
}

/// Prints the response to a refund, which does not contain how much was refunded.
pub(super) fn refund(response: &Response<'_>) {
    let remaining = remaining(response.answer);
    if !response.is_counted(|_| true) {
        output::line(format_args!("{}  {remaining}", paint(SUCCESS.bold(), "NOTHING REFUNDED")));
    } else if let Some(at) = response.refund_before_every_window() {
        output::line(format_args!(
            "{}  {at} is older than every window: set --at to the at_us of the response that counted it, in microseconds",
            paint(WARNING.bold(), "NOTHING REFUNDED")
        ));
    } else {
        let done = paint(SUCCESS.bold(), "REFUNDED");
        output::line(format_args!("{done}  as far as it still counted: {remaining}"));
    }
    warn_uncounted_units(response);
    no_rule_hint(response);
    print_table(adjustment_table(&response.answer.tiers));
}

impl Response<'_> {
    /// Whether any tier that matches `filter` counts a unit of the request.
    fn is_counted(&self, filter: impl Fn(&TierBody) -> bool) -> bool {
        let mut units = self.body.costs().into_iter().filter(|(_, number)| *number > 0);
        let tiers = &self.answer.tiers;
        units.any(|(unit, _)| tiers.iter().any(|tier| tier.unit == unit && filter(tier)))
    }

    /// The time of a refund, if it is older than the longest possible window.
    fn refund_before_every_window(&self) -> Option<u64> {
        let (at, now) = (self.body.at_us?, self.answer.at_us?);
        (u128::from(now.saturating_sub(at)) > MAX_WINDOW.as_micros()).then_some(at)
    }
}

/// Prints the response to a reset.
pub(super) fn reset(body: &ResetBody) {
    let ResetBody { reset, counters, kept, selected, unmatched, denial_cache_ms } = body;
    if *selected == 0 {
        let verdict = paint(WARNING.bold(), "NOTHING RESET");
        output::line(format_args!("{verdict}  no rule counts by these labels"));
    } else {
        let count = match reset {
            0 => "no counters found".to_owned(),
            1 => "1 counter reset".to_owned(),
            count => format!("{count} counters reset"),
        };
        output::line(format_args!("{}  {count}", paint(SUCCESS.bold(), "RESET")));
    }
    for rule in unmatched {
        output::line(format_args!("{} needs {}", rule.rule, rule.needs.join(" ")));
    }
    let mut table = Table::new([("rule", Align::Left), ("counter", Align::Left)]);
    for counter in counters {
        table.row([rule_name(counter.rule.as_deref()).into(), (&counter.key).into()]);
    }
    print_table((!counters.is_empty()).then_some(table));
    if !kept.is_empty() {
        output::line("");
        output::line(format_args!("rules not reset: {}; select them with --rules or --all", kept.join(", ")));
    }
    if *reset > 0 && *denial_cache_ms > 0 {
        let longest = duration::text(Duration::from_millis(*denial_cache_ms));
        output::line("");
        output::line(format_args!(
            "other instances may repeat a cached denial for up to {longest} (store.denial_cache)"
        ));
    }
}

/// Returns the name of a rule, or what a check without rules is shown as.
pub(super) fn rule_name(rule: Option<&str>) -> &str {
    rule.unwrap_or("this key")
}

/// Prints an explanation.
pub(super) fn explanation(response: &Response<'_>, explained: &Explanation) {
    let Explanation { applies, others, more_others, .. } = explained;
    decision(response);
    if !applies.is_empty() {
        heading("Rules that apply");
    }
    for applying in applies {
        let AppliedRule { rule, key, limit, state, arithmetic, snapshot, .. } = applying;
        let name = paint(HEADING, rule_name(rule.as_deref()));
        match limit {
            Some(limit) => output::line(format_args!("  {name}: {}", limit_terms(limit))),
            None => output::line(format_args!("  {name}")),
        }
        output::line(format_args!("    {arithmetic}"));
        if let Some(CounterView { leased, .. }) = state.filter(|state| state.leased > 0) {
            output::line(format_args!(
                "    {leased} of them are leased: charged in advance and not spent yet"
            ));
        }
        if let (Some(CounterView { holds: Some(holds), .. }), Some(snapshot)) = (state, snapshot) {
            output::line(format_args!("    {}", live_holds(holds, snapshot.at_us)));
        }
        if let Some(key) = key {
            output::line(format_args!("    {}", paint(DIM, format_args!("counter {key}"))));
        }
    }
    print_other_rules(others);
    match (others.is_empty(), more_others) {
        (_, 0) => {}
        (false, more) => output::line(format_args!("  and {more} more")),
        (true, count) => {
            heading(&format!("{count} other rules do not apply; their names require a token with \"admin\""));
        }
    }
}

/// Describes the live holds of a counter: `2 live holds of 700 units, the oldest made 3m ago`.
fn live_holds(LiveHoldsView { count, units, oldest_us, partial }: &LiveHoldsView, now_us: u64) -> String {
    let holds = format::plural(*count, "live hold", "live holds");
    let units = format::plural(*units, "unit", "units");
    let age = format::short_wait(now_us.saturating_sub(*oldest_us) / 1_000);
    let bound = if *partial { "at least " } else { "" };
    format!("{holds} of {bound}{units}, the oldest made {bound}{age} ago")
}

/// Prints the rules that do not apply, with the reasons.
pub(crate) fn print_other_rules(others: &[OtherRule]) {
    if !others.is_empty() {
        heading("Rules that do not apply");
    }
    let width = others.iter().map(|other| other.rule.chars().count()).max().unwrap_or_default();
    for other in others {
        output::line(format_args!("  {:width$}  {}", other.rule, other.because));
    }
}

/// Prints the heading of a section.
pub(crate) fn heading(title: &str) {
    output::line("");
    output::line(paint(DIM, title));
}

/// Formats a limit: `5 per 1m, burst 10 (token-bucket)`, or `5 at one time (concurrency)`.
pub(crate) fn limit_terms(limit: &LimitView) -> String {
    let LimitView { algorithm, amount, window, zone, anchor, capacity, shadow } = limit;
    let window = match window {
        Some(window) => format!("per {}", window_text(window, zone.as_deref(), anchor.as_ref())),
        None => AT_ONE_TIME.to_owned(),
    };
    let burst = if capacity == amount { String::new() } else { format!(", burst {capacity}") };
    let shadow = if *shadow { ", shadow mode" } else { "" };
    format!("{amount} {window}{burst} ({algorithm}){shadow}")
}

fn decision(response: &Response<'_>) {
    decision_as(response, "ALLOWED");
}

/// Prints a decision; an admitted request is shown as `allowed`.
pub(super) fn decision_as(response: &Response<'_>, allowed: &str) {
    let answer = response.answer;
    if answer.allowed {
        output::line(format_args!("{}  {}", paint(SUCCESS.bold(), allowed), remaining(answer)));
        print_source(response);
        warn_uncounted_units(response);
        return;
    }
    let by = answer.rule.as_ref().map(|rule| format!("by {rule}: ")).unwrap_or_default();
    let wait = match answer.retry_after_ms {
        Some(wait) => format!("retry in {}", format::wait_in_words(wait)),
        None => "never allowed, retrying does not help".to_owned(),
    };
    output::line(format_args!("{}  {by}{wait}", paint(ERROR.bold(), "DENIED")));
    print_source(response);
}

/// Formats what remains of the deciding rule.
fn remaining(answer: &DecisionBody) -> String {
    match (&answer.rule, answer.remaining, answer.limit) {
        (Some(rule), Some(remaining), Some(limit)) => format!("{remaining} of {limit} remaining ({rule})"),
        (None, Some(remaining), Some(limit)) => format!("{remaining} of {limit} remaining"),
        _ if answer.degraded => "by failure policy".to_owned(),
        _ if answer.tiers.is_empty() => "no rule applies".to_owned(),
        _ => "no enforcing rule applies".to_owned(),
    }
}

fn refund_hint(answer: &DecisionBody) {
    if let (Some(at), false) = (answer.at_us, answer.tiers.is_empty()) {
        output::line("");
        output::line(paint(
            DIM,
            format_args!("to refund exactly this, use sluicegate refund with --at {at}"),
        ));
    }
}

/// Prints what decided if the store did not, and why it did not.
fn print_source(Response { answer, store_problem, .. }: &Response<'_>) {
    let policy = match &*answer.source {
        "fallback" => "decided by this process's share of the limit (failure policy local)",
        "open" => "allowed by failure policy open",
        "closed" => "denied by failure policy closed",
        "cache" => return output::line(paint(DIM, "denied from the server's denial cache")),
        "lease" => {
            let message = "allowed by units that the server had charged in advance";
            return output::line(paint(DIM, message));
        }
        _ => return,
    };
    let name = paint(WARNING.bold(), "DEGRADED");
    match store_problem {
        Some(problem) => {
            output::line(format_args!("{name}  store unavailable: {policy}"));
            output::line(format_args!("{}  {problem}", paint(WARNING.bold(), "WHY")));
        }
        None => output::line(format_args!(
            "{name}  store unavailable: {policy}; run sluicegate doctor to diagnose it"
        )),
    }
}

/// Prints a hint if no rule applies.
pub(super) fn no_rule_hint(Response { body, answer, .. }: &Response<'_>) {
    if answer.degraded || !answer.tiers.is_empty() {
        return;
    }
    match body.joined_labels() {
        Some(argument) => output::line(paint(
            WARNING,
            format_args!(
                "{argument:?} is one label: separate labels by spaces, as in route=login ip=203.0.113.9"
            ),
        )),
        None => output::line(paint(DIM, "run sluicegate explain with the same arguments for the reason")),
    }
}

/// Warns about units of the request that no rule counts. Only after a decision of a store: otherwise `tiers` may be incomplete.
fn warn_uncounted_units(response: &Response<'_>) {
    let tiers = &response.answer.tiers;
    if tiers.is_empty() || !matches!(&*response.answer.source, "store" | "memory") {
        return;
    }
    let costs = response.body.costs();
    let given = costs.iter().filter(|(_, number)| *number > 0).map(|(unit, _)| *unit);
    warn_uncounted(given, tiers.iter().map(|tier| &*tier.unit).collect());
}

/// Warns about units of a cost that are not among those that the rules count.
pub(super) fn warn_uncounted<'a>(given: impl Iterator<Item = &'a str>, mut counted: Vec<&str>) {
    let uncounted: Vec<_> = given.filter(|unit| !counted.contains(unit)).collect();
    if uncounted.is_empty() {
        return;
    }
    counted.sort_unstable();
    counted.dedup();
    output::line(format_args!(
        "{}  {}: the rules that apply count {}; correct --cost or the unit of a rule",
        paint(WARNING.bold(), "NOT COUNTED"),
        uncounted.join(", "),
        counted.join(", ")
    ));
}

pub(super) fn print_table(table: Option<Table>) {
    if let Some(table) = table {
        output::line("");
        output::line(table);
    }
}

/// One row per tier: decision, remaining units, wait times.
pub(super) fn decision_table(tiers: &[TierBody]) -> Option<Table> {
    let mut table = Table::new([
        ("rule", Align::Left),
        ("decision", Align::Left),
        ("remaining", Align::Right),
        ("limit", Align::Right),
        ("unit", Align::Left),
        ("retry after", Align::Right),
        ("reset after", Align::Right),
    ]);
    for tier in tiers {
        let decision = match (tier.allowed, tier.shadow) {
            (true, _) => Cell::painted(SUCCESS, "allowed"),
            (false, false) => Cell::painted(ERROR, "denied"),
            (false, true) => Cell::painted(WARNING, "would deny"),
        };
        let retry = match tier.retry_after_ms {
            Some(wait) => format::short_wait(wait),
            None if tier.never => "never".to_owned(),
            None => EMPTY.to_owned(),
        };
        let [rule, remaining, limit, unit, reset] = cells(tier);
        table.row([rule, decision, remaining, limit, unit, retry.into(), reset]);
    }
    (!tiers.is_empty()).then_some(table)
}

/// One row per tier: remaining units.
fn adjustment_table(tiers: &[TierBody]) -> Option<Table> {
    let mut table = Table::new([
        ("rule", Align::Left),
        ("remaining", Align::Right),
        ("limit", Align::Right),
        ("unit", Align::Left),
        ("reset after", Align::Right),
    ]);
    for tier in tiers {
        table.row(cells(tier));
    }
    (!tiers.is_empty()).then_some(table)
}

fn cells(tier: &TierBody) -> [Cell; 5] {
    let name = rule_name(tier.rule.as_deref());
    let shadow = if tier.shadow { " (shadow)" } else { "" };
    let reset = match tier.reset_after_ms {
        0 => EMPTY.to_owned(),
        wait => format::short_wait(wait),
    };
    [
        format_args!("{name}{shadow}").into(),
        tier.remaining.into(),
        tier.limit.into(),
        (&tier.unit).into(),
        reset.into(),
    ]
}
