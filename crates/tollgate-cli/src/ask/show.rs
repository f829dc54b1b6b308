//! Answers for people: the verdict first, then a row for each rule.

use tollgate_core::limit::MAX_WINDOW;
use tollgate_server::http::{
    explain::{Applying, Explanation, Other, Terms},
    response::{Answer, Reset, Tier},
};

use super::question::Body;
use crate::{
    doctor::reach::Trouble,
    output::{
        self, Align, BAD, Cell, FAINT, GOOD, ODD, TITLE, Table, paint,
        wait::{in_short, in_words},
    },
};

/// What stands where there is nothing to say.
const NOTHING: &str = "-";

/// An answer, what was asked, and what kept the store from answering where that is known.
pub(super) struct Asked<'a> {
    pub(super) body: &'a Body<'a>,
    pub(super) answer: &'a Answer,
    pub(super) trouble: Option<Trouble>,
}

/// The answer to a check.
pub(super) fn check(asked: &Asked<'_>) {
    peek(asked);
    if asked.answer.allowed && asked.is_counted(|tier| tier.allowed) {
        how_to_take_back(asked.answer);
    }
}

/// The answer to a peek.
pub(super) fn peek(asked: &Asked<'_>) {
    verdict(asked);
    why_not(asked);
    rows(decided(&asked.answer.tiers));
}

/// The answer to a charge.
pub(super) fn charge(asked: &Asked<'_>) {
    let is_counted = asked.is_counted(|_| true);
    let done = if is_counted { "CHARGED" } else { "NOTHING CHARGED" };
    output::line(format_args!("{}  {}", paint(GOOD.bold(), done), left(asked.answer)));
    uncounted(asked);
    why_not(asked);
    rows(adjusted(&asked.answer.tiers));
    if is_counted {
        how_to_take_back(asked.answer);
    }
}

/// The answer to a refund, which does not tell how much there was to take back.
pub(super) fn refund(asked: &Asked<'_>) {
    let left = left(asked.answer);
    if !asked.is_counted(|_| true) {
        output::line(format_args!("{}  {left}", paint(GOOD.bold(), "NOTHING REFUNDED")));
    } else if let Some(at) = asked.long_ago() {
        output::line(format_args!(
            "{}  {at} is too long ago, no window reaches back to it: --at takes the at_us of the answer that counted it, in \
             microseconds",
            paint(ODD.bold(), "NOTHING REFUNDED")
        ));
    } else {
        let done = paint(GOOD.bold(), "REFUNDED");
        output::line(format_args!("{done}  as far as it still counted: {left}"));
    }
    uncounted(asked);
    why_not(asked);
    rows(adjusted(&asked.answer.tiers));
}

impl Asked<'_> {
    /// Whether a rule for which `is_meant` counts something of what was asked.
    fn is_counted(&self, is_meant: impl Fn(&Tier) -> bool) -> bool {
        let mut units = self.body.costs().into_iter().filter(|(_, number)| *number > 0);
        let tiers = &self.answer.tiers;
        units.any(|(unit, _)| tiers.iter().any(|tier| tier.unit == unit && is_meant(tier)))
    }

    /// The moment that a refund names, if no window reaches back to it.
    fn long_ago(&self) -> Option<u64> {
        let (at, now) = (self.body.at_us?, self.answer.at_us?);
        (u128::from(now.saturating_sub(at)) > MAX_WINDOW.as_micros()).then_some(at)
    }
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
pub(super) fn explanation(asked: &Asked<'_>, explained: &Explanation) {
    let Explanation { applies, others, more_others, .. } = explained;
    verdict(asked);
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

fn verdict(asked: &Asked<'_>) {
    let answer = asked.answer;
    if answer.allowed {
        output::line(format_args!("{}  {}", paint(GOOD.bold(), "ALLOWED"), left(answer)));
        degraded(asked);
        uncounted(asked);
        return;
    }
    let by = answer.rule.as_ref().map(|rule| format!("by {rule}: ")).unwrap_or_default();
    let wait = match answer.retry_after_ms {
        Some(wait) => format!("try again in {}", in_words(wait)),
        None => "waiting does not help".to_owned(),
    };
    output::line(format_args!("{}  {by}{wait}", paint(BAD.bold(), "DENIED")));
    degraded(asked);
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

/// What decided where the store did not, and why it did not.
fn degraded(Asked { answer, trouble, .. }: &Asked<'_>) {
    let policy = match &*answer.source {
        "fallback" => "this process's share of the limit decided, as the rules say (local)",
        "open" => "it passes, as the rules say (open)",
        "closed" => "it is refused, as a rule says (closed)",
        "local" if !answer.allowed => {
            let why = match answer.limit {
                Some(0) => "the rule refuses without counting: tollgate explain says why",
                _ => "refused by what the server remembers of an earlier refusal",
            };
            output::line(paint(FAINT, why));
            return;
        }
        _ => return,
    };
    let name = paint(ODD.bold(), "DEGRADED");
    match trouble {
        Some(trouble) => {
            output::line(format_args!("{name}  the store did not answer: {policy}"));
            output::line(format_args!("{}  {trouble}", paint(ODD.bold(), "WHY")));
        }
        None => output::line(format_args!(
            "{name}  the store did not answer: {policy}; tollgate doctor says what is wrong with it"
        )),
    }
}

/// Where to find out why no rule applies, though somebody asked.
fn why_not(Asked { body, answer, .. }: &Asked<'_>) {
    if answer.degraded || !answer.tiers.is_empty() {
        return;
    }
    match body.joined() {
        Some(word) => output::line(paint(
            ODD,
            format_args!(
                "{word:?} is one label: write each as a word of its own, as in route=login ip=203.0.113.9"
            ),
        )),
        None => output::line(paint(FAINT, "tollgate explain with the same words says why")),
    }
}

/// What was asked in units that nothing counts. Where the store did not decide, not all rules have been heard.
fn uncounted(asked: &Asked<'_>) {
    let tiers = &asked.answer.tiers;
    if tiers.is_empty() || asked.answer.source != "store" {
        return;
    }
    let costs = asked.body.costs();
    let missing = |unit: &str| tiers.iter().all(|tier| tier.unit != unit);
    let idle: Vec<_> =
        costs.iter().filter(|(unit, number)| *number > 0 && missing(unit)).map(|(unit, _)| *unit).collect();
    if idle.is_empty() {
        return;
    }
    let mut counted: Vec<_> = tiers.iter().map(|tier| &*tier.unit).collect();
    counted.sort_unstable();
    counted.dedup();
    output::line(format_args!(
        "{}  {}: the rules that apply count {}; correct --cost, or a rule's unit",
        paint(ODD.bold(), "NOT COUNTED"),
        idle.join(", "),
        counted.join(", ")
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
            None if tier.never => "never".to_owned(),
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
    let free = match tier.reset_after_ms {
        0 => NOTHING.to_owned(),
        wait => in_short(wait),
    };
    [
        format_args!("{name}{shadow}").into(),
        tier.remaining.into(),
        tier.limit.into(),
        (&tier.unit).into(),
        free.into(),
    ]
}
