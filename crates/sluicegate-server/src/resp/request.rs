//! From a command to a request, and from its decision to a reply.
//!
//! A number consists of digits only: no sign, no fraction, no exponent, no space.

use std::time::Duration;

use sluicegate::{
    Algorithm, Cost, Costs, Decision, Labels, Limit,
    limiter::{Operation, Request, Reset, RuleSelection, Subject},
};
use sluicegate_core::decision::{whole_millis_up, whole_seconds_up};
use smallvec::SmallVec;

use super::{
    codec::Command,
    commands::Verb,
    error::{Error, shown},
    response::Replies,
};
use crate::{engine::Engine, observe::Call};

/// A command about counters.
#[derive(Debug)]
pub(super) struct CommandRequest<'a> {
    pub(super) call: Call,
    pub(super) request: Request<'a>,
    form: ReplyForm,
}

/// The limit of a connection's last `CL.THROTTLE`, and its arguments as sent. Most clients send the same limit every time, and comparing
/// bytes is faster than parsing and validating it.
#[derive(Debug)]
pub(super) struct LastLimit {
    /// Empty if nothing is cached.
    sent: SmallVec<[u8; MAX_SENT]>,
    limit: Limit,
}

/// The most bytes of a limit that are cached: more than its three numbers need.
const MAX_SENT: usize = 64;

/// The form of a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ReplyForm {
    /// As redis-cell replies.
    Cell,
    /// As `SG.CHECK` replies.
    Sluicegate,
}

impl<'a> CommandRequest<'a> {
    /// Reads a command, if it concerns counters.
    pub(super) fn read(
        engine: &Engine,
        verb: Verb,
        command: &Command<'a>,
        last: &mut LastLimit,
    ) -> Option<Result<Self, Error>> {
        let call = verb.call()?;
        Some(match verb {
            Verb::Throttle => throttle(command, last),
            Verb::Peek => by_rules(engine, call, None, command, 1),
            Verb::ResetCounters => reset(engine, call, command),
            _ => by_rules(engine, call, command.get(1), command, 2),
        })
    }

    /// Copies the command out of the input buffer.
    pub(super) fn to_owned(&self) -> CommandRequest<'static> {
        CommandRequest { call: self.call, request: self.request.clone().into_owned(), form: self.form }
    }

    /// Whether both concern the same key or the same labels.
    pub(super) fn has_same_subject(&self, other: &CommandRequest<'_>) -> bool {
        match (&self.request.subject, &other.request.subject) {
            (Subject::Key { key, .. }, Subject::Key { key: other, .. }) => key == other,
            (Subject::Labels { labels, .. }, Subject::Labels { labels: other, .. }) => labels == other,
            _ => false,
        }
    }

    /// Whether both are the same request.
    pub(super) fn is_equal(&self, other: &CommandRequest<'_>) -> bool {
        let same_cost = match (&self.request.subject, &other.request.subject) {
            (Subject::Key { limit, cost, .. }, Subject::Key { limit: other, cost: other_cost, .. }) => {
                (limit, cost) == (other, other_cost)
            }
            (Subject::Labels { costs, .. }, Subject::Labels { costs: other, .. }) => costs == other,
            _ => false,
        };
        same_cost && self.call == other.call && self.form == other.form && self.has_same_subject(other)
    }

    /// Writes the reply.
    pub(super) fn reply(&self, decision: &Decision, replies: &mut Replies) {
        match (self.form, &self.request.subject) {
            (ReplyForm::Cell, Subject::Key { limit, .. }) => cell_reply(limit, decision, replies),
            _ => sluicegate_reply(decision, replies),
        }
    }
}

/// `CL.THROTTLE key max_burst count period [quantity]`.
fn throttle<'a>(command: &Command<'a>, last: &mut LastLimit) -> Result<CommandRequest<'a>, Error> {
    let (Some(key), 5..=6) = (command.get(1), command.len()) else {
        return Err(Error::cell(
            "Usage: cl.throttle <key> <max_burst> <count per period> <period> [<quantity>]",
        ));
    };
    let limit = *last.of(command)?;
    let cost = match command.get(5) {
        Some(quantity) => Cost::new(cell_number("quantity", quantity)?).map_err(Error::invalid)?,
        None => Cost::ONE,
    };
    let request = Request::for_key(key, limit, cost);
    Ok(CommandRequest { call: Call::CHECK, request, form: ReplyForm::Cell })
}

impl Default for LastLimit {
    fn default() -> Self {
        let limit = Limit::token_bucket(1, Duration::from_secs(1)).expect("one a second is a limit");
        Self { sent: SmallVec::new(), limit }
    }
}

impl LastLimit {
    /// The limit of a command: its arguments from the second on.
    #[inline]
    fn of(&mut self, command: &Command<'_>) -> Result<&Limit, Error> {
        if command.sent(2..=4).is_none_or(|sent| sent != &*self.sent) {
            self.read(command)?;
        }
        Ok(&self.limit)
    }

    fn read(&mut self, command: &Command<'_>) -> Result<(), Error> {
        self.limit = cell_limit([2, 3, 4].map(|place| command.get(place).unwrap_or_default()))?;
        self.sent.clear();
        let sent = command.sent(2..=4).filter(|sent| sent.len() <= MAX_SENT);
        self.sent.extend_from_slice(sent.unwrap_or_default());
        Ok(())
    }
}

fn cell_limit([max_burst, count, period]: [&[u8]; 3]) -> Result<Limit, Error> {
    let max_burst = cell_number("max_burst", max_burst)?;
    let count = cell_number("count per period", count)?;
    let period = cell_number("period", period)?;
    if count == 0 || period == 0 {
        return Err(Error::cell("Zero rates are not supported"));
    }
    Limit::new(Algorithm::TokenBucket, count, Duration::from_secs(period))
        .and_then(|limit| limit.with_burst(max_burst.saturating_add(1)))
        .map_err(Error::invalid)
}

/// Parses a number of redis-cell, which accepts a sign. Negative numbers are rejected here.
fn cell_number(name: &str, text: &[u8]) -> Result<u64, Error> {
    if let Some(number) = parse_whole(text) {
        return Ok(number);
    }
    match text {
        [b'-', digits @ ..] if parse_whole(digits).is_some() => {
            Err(Error::invalid(format_args!("{name} {} is negative: use 0 or more", shown(text))))
        }
        _ => Err(Error::cell(format_args!("Couldn't parse as integer: {}", shown(text)))),
    }
}

/// `SG.RESET [ALL | RULES=name,...] label value [label value ...]`. Labels come in pairs, so an odd number of arguments starts with the
/// selection.
fn reset(engine: &Engine, call: Call, command: &Command<'_>) -> Result<CommandRequest<'static>, Error> {
    let (selection, first_label) = match command.get(1) {
        Some(argument) if command.len().is_multiple_of(2) => (selection(argument)?, 2),
        _ => (RuleSelection::Keyed, 1),
    };
    let CommandRequest { call, request, form } = by_rules(engine, call, None, command, first_label)?;
    Ok(CommandRequest { call, request: request.rules(selection), form })
}

/// `ALL`, or `RULES=login-per-ip,api-total`.
fn selection(argument: &[u8]) -> Result<RuleSelection, Error> {
    if argument.eq_ignore_ascii_case(b"ALL") {
        return Ok(RuleSelection::All);
    }
    let names = argument.split_at_checked(RULES.len()).filter(|(head, _)| head.eq_ignore_ascii_case(RULES));
    match names.map(|(_, names)| str::from_utf8(names)) {
        Some(Ok(names)) => Ok(RuleSelection::Named(names.split(',').map(str::to_owned).collect())),
        _ => Err(Error::invalid(format_args!(
            "'{}' is neither ALL nor RULES=name,...: send label value [label value ...], after one of these if needed",
            shown(argument)
        ))),
    }
}

/// The start of an argument that names rules.
const RULES: &[u8] = b"RULES=";

/// `[deleted, rule, key, rule, key, ...]`; the rule of each deleted counter, and its key as stored.
pub(super) fn reset_reply(reset: &Reset, replies: &mut Replies) {
    let deleted = reset.deleted.len();
    replies.array(1 + 2 * deleted);
    replies.count(deleted as u64);
    for counter in &reset.deleted {
        replies.bulk(counter.rule.as_deref().unwrap_or_default().as_bytes());
        replies.bulk(counter.key.to_string().as_bytes());
    }
}

/// Reads a request whose labels and values start at an argument.
fn by_rules(
    engine: &Engine,
    call: Call,
    cost: Option<&[u8]>,
    command: &Command<'_>,
    first_label: usize,
) -> Result<CommandRequest<'static>, Error> {
    let costs = match cost {
        Some(text) => costs(text)?,
        None => Cost::ONE.into(),
    };
    let labels = labels(engine, command, first_label)?;
    // the request of a reset only names counters
    let operation = if let Call::Decide(operation) = call { operation } else { Operation::Check };
    let request = Request::new(labels, costs).operation(operation);
    Ok(CommandRequest { call, request, form: ReplyForm::Sluicegate })
}

/// Reads labels and values from an argument on.
pub(super) fn labels(engine: &Engine, command: &Command<'_>, first_label: usize) -> Result<Labels, Error> {
    let count = command.len() - first_label;
    if !count.is_multiple_of(2) {
        return Err(Error::invalid("a label has no value: send label value [label value ...]"));
    }
    let mut names = command.from(first_label).step_by(2);
    if let Some(name) = names.find(|name| str::from_utf8(name).is_err()) {
        let text = format_args!("label name '{}' is not UTF-8: use UTF-8 text", name.escape_ascii());
        return Err(Error::invalid(text));
    }
    let names = command.from(first_label).step_by(2).map(|name| str::from_utf8(name).unwrap_or_default());
    let values = command.from(first_label + 1).step_by(2);
    engine.labels(names.zip(values)).map_err(Error::invalid)
}

/// `1`, or `requests=1,tokens=850`.
pub(super) fn costs(text: &[u8]) -> Result<Costs, Error> {
    if !text.contains(&b'=') {
        return Ok(cost(text)?.into());
    }
    let pairs: Result<Vec<_>, Error> = text
        .split(|&byte| byte == b',')
        .map(|pair| {
            let equals = pair.iter().position(|&byte| byte == b'=').ok_or_else(|| invalid_cost(text))?;
            let unit = str::from_utf8(&pair[..equals]).map_err(|_| invalid_cost(text))?;
            Ok((unit, cost(&pair[equals + 1..])?))
        })
        .collect();
    Costs::new(pairs?).map_err(Error::invalid)
}

fn cost(text: &[u8]) -> Result<Cost, Error> {
    let units = parse_whole(text).ok_or_else(|| invalid_cost(text))?;
    Cost::new(units).map_err(Error::invalid)
}

fn invalid_cost(text: &[u8]) -> Error {
    Error::invalid(format_args!(
        "cost '{}' is not a whole number from 0 to {}: use for example 1, or requests=1,tokens=850",
        shown(text),
        Cost::MAX.units()
    ))
}

/// Parses a number of decimal digits that fits into 64 bits.
pub(super) fn parse_whole(text: &[u8]) -> Option<u64> {
    if text.is_empty() {
        return None;
    }
    let always_fits = text.len() <= ALWAYS_FIT;
    let mut number = 0_u64;
    for &byte in text {
        let digit = u64::from(byte.wrapping_sub(b'0'));
        if digit > 9 {
            return None;
        }
        number = if always_fits {
            number.wrapping_mul(10).wrapping_add(digit)
        } else {
            number.checked_mul(10)?.checked_add(digit)?
        };
    }
    Some(number)
}

/// Numbers of this many digits always fit into 64 bits.
const ALWAYS_FIT: usize = 19;

/// `[limited 0|1, limit, remaining, retry_after_s (-1 none), reset_after_s]`.
fn cell_reply(limit: &Limit, decision: &Decision, replies: &mut Replies) {
    replies.counts([
        Some(u64::from(!decision.is_allowed())),
        Some(limit.capacity()),
        // if a failure policy allowed the request, nothing is known to be used
        Some(decision.remaining().unwrap_or(limit.capacity())),
        decision.retry_after().map(whole_seconds_up),
        Some(whole_seconds_up(decision.reset_after().unwrap_or_default())),
    ]);
}

/// `[allowed 0|1, limit, remaining, retry_after_ms (-1 none), reset_after_ms, rule, degraded 0|1, at_us]`; -1 and null
/// for absent values.
fn sluicegate_reply(decision: &Decision, replies: &mut Replies) {
    replies.array(8);
    write_decision(decision, replies);
}

/// Writes these eight elements.
pub(super) fn write_decision(decision: &Decision, replies: &mut Replies) {
    replies.integer(i64::from(decision.is_allowed()));
    replies.count_or_none(decision.limit());
    replies.count_or_none(decision.remaining());
    replies.count_or_none(decision.retry_after().map(whole_millis_up));
    replies.count_or_none(decision.reset_after().map(whole_millis_up));
    match decision.rule() {
        Some(rule) => replies.bulk(rule.as_bytes()),
        None => replies.null(),
    }
    replies.integer(i64::from(decision.is_degraded()));
    replies.count_or_none(decision.at.map(|at| at.as_micros()));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resp::codec::{Decoded, Decoder};

    /// Valid and invalid commands as arrays and lines, in all orders.
    #[test]
    fn the_cached_limit_is_always_that_of_the_command() {
        let array = |numbers: &str| {
            let words: Vec<_> = ["CL.THROTTLE", "k"].into_iter().chain(numbers.split(' ')).collect();
            let bulk = |word: &&str| format!("${}\r\n{word}\r\n", word.len());
            format!("*{}\r\n{}", words.len(), words.iter().map(bulk).collect::<String>())
        };
        let line = |numbers: &str| format!("CL.THROTTLE k {numbers}\r\n");
        let long = format!("{}1 1 1", "0".repeat(2 * MAX_SENT));
        let numbers = ["1 2 3", "12 3 3", "1 23 3", "1 2 33", "1 x 3", "1 2 0", &long, "1 2 3 4"];
        let commands: Vec<_> = numbers.iter().flat_map(|numbers| [array(numbers), line(numbers)]).collect();
        let (mut last, mut decoder) = (LastLimit::default(), Decoder::default());
        for pair in commands.iter().flat_map(|one| commands.iter().map(move |other| [one, other])) {
            for text in pair.into_iter().chain(pair) {
                let Ok(Decoded::Command(command, _)) = decoder.decode(text.as_bytes()) else {
                    panic!("{text:?}")
                };
                let fresh = LastLimit::default().of(&command).copied().map_err(|error| error.to_string());
                let limit = last.of(&command).copied().map_err(|error| error.to_string());
                assert_eq!(limit, fresh, "{text:?} in {pair:?}");
            }
        }
    }

    #[test]
    fn only_decimal_digits_are_a_number() {
        for (text, number) in [("0", 0), ("1", 1), ("007", 7), ("18446744073709551615", u64::MAX)] {
            assert_eq!(parse_whole(text.as_bytes()), Some(number), "{text}");
        }
        for text in
            ["", "-1", "+1", "1.5", "1e3", "NaN", "inf", "0x10", " 1", "1 ", "1_000", "18446744073709551616"]
        {
            assert_eq!(parse_whole(text.as_bytes()), None, "{text}");
        }
    }

    #[test]
    fn a_cost_is_a_number_or_has_units() {
        let read = |text: &str| costs(text.as_bytes()).map_err(|error| error.to_string());
        assert_eq!(read("3"), Ok(Cost::from(3).into()));
        assert_eq!(read("requests=3"), Ok(Cost::from(3).into()));
        let both = Costs::new([("requests", Cost::ONE), ("tokens", Cost::from(850))]).unwrap();
        assert_eq!(read("requests=1,tokens=850"), Ok(both));
        for bad in [
            "requests=",
            "=1",
            "requests=1,",
            "requests=1,tokens",
            "requests=1,requests=1",
            "a=-1",
            "a=1.5",
            "a==1",
            "a=1 ,b=2",
            "1,2",
            ",",
            "9007199254740992",
            "a=9007199254740992",
        ] {
            assert!(read(bad).is_err_and(|error| error.starts_with("ERR ")), "{bad}");
        }
    }
}
