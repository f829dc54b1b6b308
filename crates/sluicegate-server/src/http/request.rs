//! Converts a JSON body to requests, and validates limits and costs.

use std::time::Duration;

use axum::http::StatusCode;
use sluicegate::{
    Algorithm, Cost, Costs, Limit, Timestamp, Window,
    calendar::{Calendar, CalendarError, CalendarUnit, Zone},
    duration,
    limiter::{Operation, Request, RuleSelection},
    rules::LeaseSize,
    window::{self, WrittenWindow},
};

use super::{
    body::{self, Body, Object, Whole},
    problem::Problem,
};
use crate::{engine::Engine, observe};

/// The algorithm of a limit that does not name one.
const DEFAULT_ALGORITHM: Algorithm = Algorithm::TokenBucket;

/// The maximum number of checks in one batch.
pub const MAX_CHECKS: usize = 1_000;

/// The largest body of a single request, in bytes.
pub const MAX_BODY: usize = 64 << 10;

/// The calls that concern counters.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum ApiCall {
    Check,
    Peek,
    Charge,
    Refund,
    Reset,
    Explain,
}

impl ApiCall {
    /// Returns the call of a path.
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

    /// The limiter's operation. A reset is none; its request only names counters.
    fn operation(self, at: Option<Timestamp>) -> Operation {
        match self {
            Self::Check | Self::Reset => Operation::Check,
            Self::Peek | Self::Explain => Operation::Peek,
            Self::Charge => Operation::Charge,
            Self::Refund => Operation::Refund { at },
        }
    }
}

impl From<ApiCall> for observe::Call {
    /// The call, as counted in metrics.
    fn from(call: ApiCall) -> Self {
        match call {
            ApiCall::Reset => Self::Reset,
            other => Self::Decide(other.operation(None)),
        }
    }
}

/// A request, and what its response contains.
pub(super) struct ApiRequest {
    pub(super) request: Request<'static>,
    /// Whether the response contains rate limit headers for the caller's own response.
    pub(super) wants_headers: bool,
}

/// The body of a check: one request, or several independent ones.
pub(super) enum CheckBody {
    One(ApiRequest),
    Batch(Vec<ApiRequest>),
}

impl CheckBody {
    /// Reads a body of either form. If one request of a batch is invalid, the whole batch is.
    pub(super) fn read(engine: &Engine, bytes: &[u8]) -> Result<Self, Problem> {
        let body = Body::read(bytes)?;
        let Body {
            checks: Some(checks),
            labels: None,
            key: None,
            limit: None,
            cost: None,
            rules: None,
            all: None,
            at_us: None,
            headers: None,
            deadline_ms,
        } = body
        else {
            if body.checks.is_some() {
                return Err(Problem::bad_request(
                    "\"checks\" can only be combined with \"deadline_ms\": move the other fields into its members",
                ));
            }
            if bytes.len() > MAX_BODY {
                let detail = format!("the body is too large: send at most {MAX_BODY} bytes");
                return Err(Problem::new(StatusCode::PAYLOAD_TOO_LARGE, detail));
            }
            return from_body(engine, ApiCall::Check, body).map(Self::One);
        };
        if checks.len() > MAX_CHECKS {
            let count = checks.len();
            return Err(Problem::bad_request(format_args!(
                "{count} checks are too many: send at most {MAX_CHECKS}"
            )));
        }
        let deadline = deadline_ms.map(deadline).transpose()?;
        let read = |(index, check): (usize, Object<Body>)| {
            let request = match check.0 {
                Body { deadline_ms: Some(_), .. } => Err(Problem::bad_request(
                    "\"deadline_ms\" applies to all checks: move it next to \"checks\"",
                )),
                Body { checks: Some(_), .. } => {
                    Err(Problem::bad_request("\"checks\" cannot be nested: list all checks in one array"))
                }
                check => from_body(engine, ApiCall::Check, check),
            };
            let mut read = request.map_err(|problem| problem.within(format_args!("checks[{index}]")))?;
            read.request.deadline = deadline;
            Ok(read)
        };
        checks.into_iter().enumerate().map(read).collect::<Result<_, _>>().map(Self::Batch)
    }
}

fn deadline(deadline_ms: Whole) -> Result<Duration, Problem> {
    match deadline_ms.0 {
        0 => Err(Problem::bad_request("\"deadline_ms\" is 0: use at least 1, or leave it out")),
        millis => Ok(Duration::from_millis(millis)),
    }
}

/// Reads the request of a call.
pub(super) fn read(engine: &Engine, call: ApiCall, bytes: &[u8]) -> Result<ApiRequest, Problem> {
    from_body(engine, call, Body::read(bytes)?)
}

fn from_body(engine: &Engine, call: ApiCall, body: Body) -> Result<ApiRequest, Problem> {
    reject_fields_of_other_calls(call, &body)?;
    let wants_headers = body.headers.unwrap_or_default();
    let at = body.at_us.map(|at| Timestamp::from_micros(at.0));
    let deadline = body.deadline_ms.map(deadline).transpose()?;
    let request = match body {
        Body { labels: Some(labels), key: None, limit: None, cost, rules, all, .. } => {
            let labels = engine.labels(labels.0).map_err(Problem::bad_request)?;
            Request::new(labels, costs(cost)?).rules(selection(call, rules, all)?)
        }
        Body { labels: None, key: Some(key), limit: Some(limit), cost, rules: None, all: None, .. } => {
            sluicegate::store::Key::without_rule(key.as_bytes()).map_err(Problem::bad_request)?;
            Request::for_key(key.into_bytes(), read_limit(&limit)?, cost_of_key(cost)?)
        }
        Body { labels: None, key: Some(_), limit: Some(_), .. } => {
            return Err(Problem::bad_request(
                "\"rules\" and \"all\" do not apply to \"key\", which no rule counts: remove them, \
                 or send \"labels\" instead of \"key\" and \"limit\"",
            ));
        }
        _ => {
            return Err(Problem::bad_request(
                "the body has neither of the two valid forms: send \"labels\" to check by rules, \
                 or \"key\" and \"limit\" to check without rules",
            ));
        }
    };
    Ok(ApiRequest { request: request.operation(call.operation(at)).deadline(deadline), wants_headers })
}

fn reject_fields_of_other_calls(call: ApiCall, body: &Body) -> Result<(), Problem> {
    let adjusts = matches!(call, ApiCall::Charge | ApiCall::Refund);
    let fields = [
        ("cost", body.cost.is_some(), call != ApiCall::Reset, "a reset deletes whole counters"),
        (
            "rules",
            body.rules.is_some(),
            adjusts || call == ApiCall::Reset,
            "all rules that match decide together",
        ),
        ("all", body.all.is_some(), call == ApiCall::Reset, "all rules that match are used already"),
        ("at_us", body.at_us.is_some(), call == ApiCall::Refund, "only a refund refers to an earlier charge"),
        (
            "headers",
            body.headers.is_some(),
            matches!(call, ApiCall::Check | ApiCall::Peek),
            "only a check and a peek decide about a response",
        ),
        ("checks", body.checks.is_some(), false, "only a check may be sent in batches"),
    ];
    match fields.iter().find(|(_, is_given, is_allowed, _)| *is_given && !is_allowed) {
        Some((field, .., why)) => {
            Err(Problem::bad_request(format_args!("{field:?} is not allowed in this call: {why}; remove it")))
        }
        None => Ok(()),
    }
}

/// Returns which rules a call uses. Without a selection, a reset keeps counters that other requests share.
fn selection(call: ApiCall, names: Option<Vec<String>>, all: Option<bool>) -> Result<RuleSelection, Problem> {
    match (names, all) {
        (Some(_), Some(true)) => {
            Err(Problem::bad_request("\"rules\" and \"all\" exclude each other: remove one of them"))
        }
        (Some(names), _) if names.is_empty() => Err(Problem::bad_request(
            "\"rules\" is empty: name at least one rule, or remove it to use the rules that match",
        )),
        (Some(names), _) => Ok(RuleSelection::Named(names)),
        (None, None | Some(false)) if call == ApiCall::Reset => Ok(RuleSelection::Keyed),
        (None, _) => Ok(RuleSelection::All),
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
            "the cost of a key has no units: use a whole number, for example \"cost\":1",
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
    let window = match window::parse(&limit.window).map_err(|error| in_limit(&error))? {
        WrittenWindow::Length(length) => length.into(),
        WrittenWindow::Calendar(unit) => read_calendar(limit, unit).map_err(|error| in_limit(&error))?.into(),
    };
    for (is_given, field) in [(limit.zone.is_some(), "zone"), (limit.anchor.is_some(), "anchor")] {
        if is_given && matches!(window, Window::Length(_)) {
            return Err(Problem::bad_request(format_args!(
                "limit: {field} needs a calendar window: use {}, or remove {field}",
                CalendarUnit::list()
            )));
        }
    }
    let read = Limit::new(algorithm, limit.amount.0, window).map_err(|error| in_limit(&error))?;
    let read = match limit.burst {
        Some(burst) => read.with_burst(burst.0).map_err(|error| in_limit(&error))?,
        None => read,
    };
    read_lease(limit, read)
}

fn read_lease(limit: &body::Limit, read: Limit) -> Result<Limit, Problem> {
    let in_limit = |error: &dyn std::error::Error| Problem::bad_request(format_args!("limit: {error}"));
    let size = limit.lease.as_ref().map_or(LeaseSize::NONE, |lease| lease.0);
    if size.is_none() {
        return match limit.lease_for {
            Some(_) => Err(Problem::bad_request("limit: lease_for has no effect without lease: add it")),
            None => Ok(read),
        };
    }
    let lifetime = match &limit.lease_for {
        Some(text) => duration::parse(text).map_err(|error| in_limit(&error))?,
        None => read.default_lease_lifetime(),
    };
    read.with_lease(size.units_of(read.amount()), lifetime).map_err(|error| in_limit(&error))
}

fn read_calendar(limit: &body::Limit, unit: CalendarUnit) -> Result<&'static Calendar, CalendarError> {
    let zone = limit.zone.as_deref().map_or_else(|| Ok(Zone::utc()), Zone::named)?;
    zone.calendar(unit, limit.anchor.as_ref().map(|anchor| anchor.0))
}
