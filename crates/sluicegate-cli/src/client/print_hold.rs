//! Text output of responses to calls for holds.

use jiff::Timestamp;
use sluicegate_server::http::hold_response::{HoldBody, SettledTierBody, SettlementBody};

use super::{
    print::{
        EMPTY, Response, decision_as, decision_table, no_rule_hint, print_table, rule_name, warn_uncounted,
    },
    request::RequestBody,
};
use crate::{
    format,
    output::{self, Align, Cell, DIM, SUCCESS, Table, WARNING, paint},
};

/// Prints the response to a hold.
pub(super) fn hold(response: &Response<'_>, held: &HoldBody) {
    decision_as(response, if held.expires_at_us.is_some() { "HELD" } else { "ALLOWED" });
    if held.repeated {
        output::line(paint(
            DIM,
            "a hold with this id exists: this is its first response; nothing was charged again",
        ));
    }
    no_rule_hint(response);
    print_table(decision_table(&response.answer.tiers));
    let Some(token) = held.token.as_deref() else { return };
    output::line("");
    output::line(format_args!("id       {}", format::printable(&held.id)));
    output::line(format_args!("expires  {}", expiry(held.expires_at_us)));
    output::line(format_args!("token    {token}"));
}

/// Prints the response to settling, releasing or renewing a hold.
pub(super) fn settlement(body: &RequestBody<'_>, SettlementBody { outcome, tiers }: &SettlementBody) {
    let style = if matches!(&**outcome, "settled" | "released" | "renewed") { SUCCESS } else { WARNING };
    let explanation = match &**outcome {
        "already" => "the hold was settled or released before: nothing changed",
        "late" => "the hold had expired",
        "queued" => "the store did not answer: the server repeats the call",
        "unknown" => {
            "there is no such hold: it has ended and was forgotten, was reset, or its id or labels differ"
        }
        _ if tiers.is_empty() => "no rule applies to the hold",
        _ => "",
    };
    let verdict = paint(style.bold(), outcome.to_uppercase());
    match explanation {
        "" => output::line(verdict),
        text => output::line(format_args!("{verdict}  {text}")),
    }
    if body.cost.is_some() && !tiers.is_empty() {
        // also a cost of zero: a misspelled unit would keep the estimate
        let given = body.costs();
        let counted = tiers.iter().map(|tier| &*tier.unit).collect();
        warn_uncounted(given.iter().map(|(unit, _)| *unit), counted);
    }
    print_table((!tiers.is_empty()).then(|| tiers_table(tiers)));
}

/// One row per counter.
fn tiers_table(tiers: &[SettledTierBody]) -> Table {
    let mut table = Table::new([
        ("rule", Align::Left),
        ("outcome", Align::Left),
        ("charged", Align::Right),
        ("remaining", Align::Right),
        ("unit", Align::Left),
        ("expires", Align::Left),
    ]);
    let number = |units: Option<u64>| units.map_or_else(|| EMPTY.to_owned(), |units| units.to_string());
    for tier in tiers {
        let row: [Cell; 6] = [
            rule_name(tier.rule.as_deref()).into(),
            (&tier.outcome).into(),
            number(tier.charged).into(),
            number(tier.remaining).into(),
            (&tier.unit).into(),
            expiry(tier.expires_at_us).into(),
        ];
        table.row(row);
    }
    table
}

/// Formats a time in microseconds since the epoch.
fn expiry(at_us: Option<u64>) -> String {
    let at = at_us.and_then(|at| i64::try_from(at).ok()).and_then(|at| Timestamp::from_microsecond(at).ok());
    at.map_or_else(|| EMPTY.to_owned(), format::timestamp)
}
