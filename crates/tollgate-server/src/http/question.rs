//! What a call asks, as it is used: one of the two forms, with limits and costs that can be.

use std::time::Duration;

use axum::http::StatusCode;
use tollgate::{Algorithm, Cost, Costs, Limit, Operation, Store, Timestamp};

use super::{
    body::{self, Body, Object, Whole},
    problem::Problem,
};
use crate::{
    desk::{Desk, Subject},
    duration, observe,
};

/// The algorithm of a limit that names none.
const DEFAULT_ALGORITHM: Algorithm = Algorithm::TokenBucket;

/// The most checks of one call.
pub const MAX_CHECKS: usize = 1_000;

/// The largest body of a call that asks one thing, in bytes.
pub const MAX_BODY: usize = 64 << 10;

/// The calls that ask about counters.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Call {
    Check,
    Peek,
    Charge,
    Refund,
    Reset,
    Explain,
}

impl Call {
    /// The call of a path, if it is one of these.
    pub(super) fn at(path: &str) -> Option<Self> {
        Some(match path {
            "/v1/check" | "/v1/auth" => Self::Check,
            "/v1/peek" => Self::Peek,
            "/v1/charge" => Self::Charge,
            "/v1/refund" => Self::Refund,
            "/v1/reset" => Self::Reset,
            "/v1/explain" => Self::Explain,
            _ => return None,
        })
    }
}

impl From<Call> for observe::Call {
    /// What it counts as.
    fn from(call: Call) -> Self {
        match call {
            Call::Check => Self::CHECK,
            Call::Peek | Call::Explain => Self::Decide(Operation::Peek),
            Call::Charge => Self::Decide(Operation::Charge),
            Call::Refund => Self::Decide(Operation::Refund { at: None }),
            Call::Reset => Self::Reset,
        }
    }
}

/// What a call asks.
pub(super) struct Question {
    pub(super) subject: Subject,
    /// Which charge a refund takes back.
    pub(super) at: Option<Timestamp>,
    /// How long the caller waits.
    pub(super) budget: Option<Duration>,
}

/// What a check asks: once, or several times independently.
pub(super) enum Questions {
    One(Question),
    Several(Vec<Question>),
}

impl Questions {
    /// Reads a body of either form. If one of several cannot be asked, none is.
    pub(super) fn read<S: Store>(desk: &Desk<S>, bytes: &[u8]) -> Result<Self, Problem> {
        let body = Body::read(bytes)?;
        let Body {
            checks: Some(checks),
            labels: None,
            key: None,
            limit: None,
            cost: None,
            rules: None,
            at_us: None,
            deadline_ms,
        } = body
        else {
            if body.checks.is_some() {
                return Err(Problem::bad_request(
                    "\"checks\" stands alone, or with \"deadline_ms\": put the rest into its members",
                ));
            }
            within_bound(bytes)?;
            return Question::of(desk, Call::Check, body).map(Self::One);
        };
        if checks.len() > MAX_CHECKS {
            let count = checks.len();
            return Err(Problem::bad_request(format_args!(
                "{count} checks are too many: send at most {MAX_CHECKS}"
            )));
        }
        let budget = deadline_ms.map(budget).transpose()?;
        let read = |(place, check): (usize, Object<Body>)| {
            let question = match check.0 {
                Body { deadline_ms: Some(_), .. } => {
                    Err(Problem::bad_request("\"deadline_ms\" belongs beside \"checks\", for all of them"))
                }
                Body { checks: Some(_), .. } => {
                    Err(Problem::bad_request("\"checks\" are not for a check within others"))
                }
                check => Question::of(desk, Call::Check, check),
            };
            let question = question.map_err(|problem| problem.within(format_args!("checks[{place}]")))?;
            Ok(Question { budget, ..question })
        };
        checks.into_iter().enumerate().map(read).collect::<Result<_, _>>().map(Self::Several)
    }
}

fn within_bound(bytes: &[u8]) -> Result<(), Problem> {
    if bytes.len() > MAX_BODY {
        let detail = format!("the body is too large: send at most {MAX_BODY} bytes");
        return Err(Problem::new(StatusCode::PAYLOAD_TOO_LARGE, detail));
    }
    Ok(())
}

fn budget(deadline_ms: Whole) -> Result<Duration, Problem> {
    match deadline_ms.0 {
        0 => Err(Problem::bad_request("\"deadline_ms\" is 0: use at least 1, or leave it out")),
        millis => Ok(Duration::from_millis(millis)),
    }
}

impl Question {
    pub(super) fn read<S: Store>(desk: &Desk<S>, call: Call, bytes: &[u8]) -> Result<Self, Problem> {
        Self::of(desk, call, Body::read(bytes)?)
    }

    fn of<S: Store>(desk: &Desk<S>, call: Call, body: Body) -> Result<Self, Problem> {
        refuse_fields_of_other_calls(call, &body)?;
        let at = body.at_us.map(|at| Timestamp::from_micros(at.0));
        let budget = body.deadline_ms.map(budget).transpose()?;
        let subject = match body {
            Body { labels: Some(labels), key: None, limit: None, cost, rules, .. } => {
                let labels = desk.labels(labels.0).map_err(Problem::bad_request)?;
                Ok(Subject::Rules { labels, costs: costs(cost)?, only: named(rules)? })
            }
            Body { labels: None, key: Some(key), limit: Some(limit), cost, rules: None, .. } => {
                tollgate::Key::without_rule(key.as_bytes()).map_err(Problem::bad_request)?;
                let (key, limit) = (key.into_bytes(), read_limit(&limit)?);
                Ok(Subject::Key { key, limit, cost: cost_of_key(cost)? })
            }
            Body { labels: None, key: Some(_), limit: Some(_), .. } => Err(Problem::bad_request(
                "\"rules\" are given together with \"key\", which no rule counts: leave \"rules\" out, \
                 or send \"labels\" in place of \"key\" and \"limit\"",
            )),
            _ => Err(Problem::bad_request(
                "the body has to be of one of two forms: send \"labels\" to ask the rules, \
                 or \"key\" and \"limit\" to ask without rules",
            )),
        };
        Ok(Self { subject: subject?, at, budget })
    }
}

fn refuse_fields_of_other_calls(call: Call, body: &Body) -> Result<(), Problem> {
    let adjusts = matches!(call, Call::Charge | Call::Refund);
    let fields = [
        ("cost", body.cost.is_some(), call != Call::Reset, "a reset forgets whole counters"),
        (
            "rules",
            body.rules.is_some(),
            adjusts || call == Call::Reset,
            "all rules that match decide together",
        ),
        ("at_us", body.at_us.is_some(), call == Call::Refund, "only a refund names an earlier charge"),
        ("checks", body.checks.is_some(), false, "only a check may ask several things at once"),
    ];
    match fields.iter().find(|(_, is_given, is_taken, _)| *is_given && !is_taken) {
        Some((field, .., why)) => Err(Problem::bad_request(format_args!(
            "{field:?} has no place in this call: {why}, leave it out"
        ))),
        None => Ok(()),
    }
}

fn named(rules: Option<Vec<String>>) -> Result<Option<Vec<String>>, Problem> {
    match rules.as_deref() {
        Some([]) => Err(Problem::bad_request(
            "\"rules\" is empty: name at least one rule, or leave it out for all that match",
        )),
        _ => Ok(rules),
    }
}

fn costs(cost: Option<body::Cost>) -> Result<Costs, Problem> {
    match cost {
        None => Ok(Cost::ONE.into()),
        Some(body::Cost::Requests(number)) => Ok(units(number)?.into()),
        Some(body::Cost::Units(pairs)) => {
            let pairs: Result<Vec<_>, Problem> =
                pairs.0.into_iter().map(|(unit, number)| Ok((unit, units(number)?))).collect();
            Costs::new(pairs?).map_err(Problem::bad_request)
        }
    }
}

fn cost_of_key(cost: Option<body::Cost>) -> Result<Cost, Problem> {
    match cost {
        None => Ok(Cost::ONE),
        Some(body::Cost::Requests(number)) => units(number),
        Some(body::Cost::Units(_)) => Err(Problem::bad_request(
            "the cost of a key has no units, which belong to rules: use a whole number, for example \"cost\":1",
        )),
    }
}

fn units(number: Whole) -> Result<Cost, Problem> {
    Cost::new(number.0).map_err(Problem::bad_request)
}

fn read_limit(limit: &body::Limit) -> Result<Limit, Problem> {
    let in_limit = |error: &dyn std::error::Error| Problem::bad_request(format_args!("limit: {error}"));
    let algorithm = match &limit.algorithm {
        Some(name) => name.parse().map_err(|error| in_limit(&error))?,
        None => DEFAULT_ALGORITHM,
    };
    let window = duration::parse(&limit.window).map_err(|error| in_limit(&error))?;
    let read = Limit::new(algorithm, limit.amount.0, window).map_err(|error| in_limit(&error))?;
    match limit.burst {
        Some(burst) => read.with_burst(burst.0).map_err(|error| in_limit(&error)),
        None => Ok(read),
    }
}
