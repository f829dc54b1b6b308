//! `POST /v1/hold`, `/v1/settle`, `/v1/release` and `/v1/renew`: a check whose cost is corrected later.

use std::time::Duration;

use axum::{
    extract::{Request, State},
    http::HeaderMap,
};
use sluicegate::{Costs, limiter::HoldToken, store::HoldId};

use super::{
    Api, MAX_BODY,
    body::{Body, Whole},
    guard,
    hold_response::{HoldBody, SettlementBody},
    problem::Problem,
    receive,
    request::{self, ApiCall, ApiRequest},
};
use crate::{
    config::Scope,
    engine::{Engine, Excess, HoldAdjustment, Transport},
};

/// A hold to make.
struct ParsedHold {
    request: ApiRequest,
    /// The id as the caller sent it, and as it is stored.
    id: Option<(String, HoldId)>,
    ttl: Option<Duration>,
}

/// An operation on a hold that was made before.
struct ParsedAdjustment {
    token: HoldToken,
    deadline: Option<Duration>,
    adjustment: HoldAdjustment,
}

pub(super) async fn hold(State(api): State<Api>, request: Request) -> Result<HoldBody, Problem> {
    let hold = read(&api, ApiCall::Hold, request, ParsedHold::read).await?;
    let ParsedHold { request: ApiRequest { request, wants_headers }, id, ttl } = hold;
    let (sent_id, id) = id.unzip();
    let held = api.engine.hold(Transport::Http, &request, id, ttl).await?;
    Ok(HoldBody {
        id: sent_id.unwrap_or_else(|| generated_id(held.token.as_ref())),
        decision: api.decision_body(held.decision, wants_headers),
        token: held.token.map(|token| token.to_string()),
        expires_at_us: held.expires_at.map(|at| at.as_micros()),
        repeated: held.is_repeated,
    })
}

/// Returns the generated id of a hold. For a denied hold, returns a new id, with which the caller can retry.
fn generated_id(token: Option<&HoldToken>) -> String {
    token.map_or_else(|| HoldId::random().to_string(), |token| token.id().to_string())
}

pub(super) async fn settle(State(api): State<Api>, request: Request) -> Result<SettlementBody, Problem> {
    let excess = excess(&api, request.headers());
    adjust(&api, ApiCall::Settle, request, |body| {
        let costs = match (body.cost.take(), &body.key) {
            // no unit is named: all keep their estimates
            (None, _) => Costs::new::<&str>([]).expect("no units are valid"),
            (cost, Some(_)) => request::cost_of_key(cost)?.into(),
            (cost, None) => request::costs(cost)?,
        };
        Ok(HoldAdjustment::Settle { costs, excess })
    })
    .await
}

pub(super) async fn release(State(api): State<Api>, request: Request) -> Result<SettlementBody, Problem> {
    adjust(&api, ApiCall::Release, request, |_| Ok(HoldAdjustment::Release)).await
}

pub(super) async fn renew(State(api): State<Api>, request: Request) -> Result<SettlementBody, Problem> {
    adjust(&api, ApiCall::Renew, request, |body| match body.ttl_ms.take() {
        Some(ttl) => Ok(HoldAdjustment::Renew(ttl_of(ttl))),
        None => {
            Err(Problem::bad_request("\"ttl_ms\" is missing: send the time from now until the hold expires"))
        }
    })
    .await
}

/// Returns how much a caller may charge beyond the estimate.
fn excess(api: &Api, headers: &HeaderMap) -> Excess {
    match guard::identify(&api.settings.access, headers, Scope::Adjust) {
        Ok(_) => Excess::Unbounded,
        Err(_) => Excess::Bounded,
    }
}

async fn adjust(
    api: &Api,
    call: ApiCall,
    request: Request,
    operation: impl FnOnce(&mut Body) -> Result<HoldAdjustment, Problem>,
) -> Result<SettlementBody, Problem> {
    let read = read(api, call, request, |engine, body| ParsedAdjustment::read(engine, call, body, operation));
    let ParsedAdjustment { token, deadline, adjustment } = read.await?;
    Ok(api.engine.adjust_hold(Transport::Http, token, adjustment, deadline).await?.into())
}

/// Receives and reads the body of a call.
async fn read<T>(
    api: &Api,
    call: ApiCall,
    request: Request,
    read: impl FnOnce(&Engine, Body) -> Result<T, Problem>,
) -> Result<T, Problem> {
    let body = receive(request.into_body(), MAX_BODY).await;
    let read = body.and_then(|bytes| read(&api.engine, Body::read(&bytes)?));
    read.inspect_err(|_| api.engine.observer().invalid(call.into()))
}

impl ParsedHold {
    fn read(engine: &Engine, mut body: Body) -> Result<Self, Problem> {
        let (id, ttl) = (body.id.take(), body.ttl_ms.take());
        let request = request::from_body(engine, ApiCall::Hold, body)?;
        let id = match id {
            Some(sent) => Some((sent.clone(), HoldId::new(sent).map_err(Problem::bad_request)?)),
            None => None,
        };
        Ok(Self { request, id, ttl: ttl.map(ttl_of) })
    }
}

impl ParsedAdjustment {
    /// Reads the hold, which is identified by its token, or by its id and the request that made it.
    fn read(
        engine: &Engine,
        call: ApiCall,
        mut body: Body,
        operation: impl FnOnce(&mut Body) -> Result<HoldAdjustment, Problem>,
    ) -> Result<Self, Problem> {
        let (token, id) = (body.token.take(), body.id.take());
        let adjustment = operation(&mut body)?;
        match (token, id) {
            (Some(token), None) => {
                let deadline = deadline_beside_token(call, body)?;
                let token = token.parse::<HoldToken>().map_err(Problem::bad_request)?;
                Ok(Self { token, deadline, adjustment })
            }
            (None, Some(id)) => {
                let id = HoldId::new(id).map_err(Problem::bad_request)?;
                let ApiRequest { request, .. } = request::from_body(engine, call, body)?;
                let token = engine.limiter().hold_token(&request, id)?;
                Ok(Self { token, deadline: request.deadline, adjustment })
            }
            (Some(_), Some(_)) => Err(Problem::bad_request(
                "\"token\" and \"id\" exclude each other: the token contains the id; remove \"id\"",
            )),
            (None, None) => Err(Problem::bad_request(
                "the hold is missing: send \"token\", or \"id\" with the labels of the hold, or \"id\" with its key and limit",
            )),
        }
    }
}

/// Returns the caller's deadline, if the body has no field that a token replaces.
fn deadline_beside_token(call: ApiCall, body: Body) -> Result<Option<Duration>, Problem> {
    let fields =
        [("labels", body.labels.is_some()), ("key", body.key.is_some()), ("limit", body.limit.is_some())];
    if let Some((field, _)) = fields.into_iter().find(|(_, is_given)| *is_given) {
        return Err(Problem::bad_request(format_args!(
            "{field:?} is not allowed with \"token\", which names the counters of the hold: remove it"
        )));
    }
    request::reject_fields_of_other_calls(call, &body)?;
    body.deadline_ms.map(request::deadline).transpose()
}

fn ttl_of(Whole(millis): Whole) -> Duration {
    Duration::from_millis(millis)
}
