//! Converts a JSON body to requests, and validates costs.

use std::time::Duration;

use axum::http::StatusCode;
use sluicegate::{
    Cost, Costs, Timestamp,
    limiter::{Operation, Request, RuleSelection},
};

use super::{
    body::{self, Body, Object, Whole},
    limit::read_limit,
    problem::Problem,
};
use crate::{engine::Engine, observe};

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
    Hold,
    Settle,
    Release,
    Renew,
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
            "/v1/hold" => Self::Hold,
            "/v1/settle" => Self::Settle,
            "/v1/release" => Self::Release,
            "/v1/renew" => Self::Renew,
            _ => return None,
        })
    }

    /// The limiter's operation. For a reset, and to settle, release or renew a hold, requests only select counters.
    fn operation(self, at: Option<Timestamp>) -> Operation {
        match self {
            Self::Check | Self::Reset | Self::Hold | Self::Settle | Self::Release | Self::Renew => {
                Operation::Check
            }
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
            ApiCall::Hold => Self::Hold,
            ApiCall::Settle => Self::Settle,
            ApiCall::Release => Self::Release,
            ApiCall::Renew => Self::Renew,
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
            id: None,
            token: None,
            ttl_ms: None,
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

pub(super) fn deadline(deadline_ms: Whole) -> Result<Duration, Problem> {
    match deadline_ms.0 {
        0 => Err(Problem::bad_request("\"deadline_ms\" is 0: use at least 1, or leave it out")),
        millis => Ok(Duration::from_millis(millis)),
    }
}

/// Reads the request of a call.
pub(super) fn read(engine: &Engine, call: ApiCall, bytes: &[u8]) -> Result<ApiRequest, Problem> {
    from_body(engine, call, Body::read(bytes)?)
}

pub(super) fn from_body(engine: &Engine, call: ApiCall, body: Body) -> Result<ApiRequest, Problem> {
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

pub(super) fn reject_fields_of_other_calls(call: ApiCall, body: &Body) -> Result<(), Problem> {
    let adjusts = matches!(call, ApiCall::Charge | ApiCall::Refund);
    let no_cost = match call {
        ApiCall::Reset => Some("a reset deletes whole counters"),
        ApiCall::Release => Some("a release refunds the whole estimate"),
        ApiCall::Renew => Some("a renewal charges nothing"),
        _ => None,
    };
    let fields = [
        ("cost", body.cost.is_some(), no_cost.is_none(), no_cost.unwrap_or_default()),
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
            matches!(call, ApiCall::Check | ApiCall::Peek | ApiCall::Hold),
            "only a check, a peek and a hold decide about a response",
        ),
        ("checks", body.checks.is_some(), false, "only a check may be sent in batches"),
        ("id", body.id.is_some(), false, "only holds have one"),
        ("token", body.token.is_some(), false, "only an existing hold has one"),
        ("ttl_ms", body.ttl_ms.is_some(), false, "only a hold and a renewal set an expiry"),
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

pub(super) fn costs(cost: Option<body::Cost>) -> Result<Costs, Problem> {
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

pub(super) fn cost_of_key(cost: Option<body::Cost>) -> Result<Cost, Problem> {
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
