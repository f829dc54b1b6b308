//! The answers to calls for holds as JSON. The command line deserializes them into the same types.

use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use sluicegate::limiter::{SettledTier, Settlement};

use super::{json::Json, response::DecisionBody};

/// The response to a hold.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HoldBody {
    /// The decision.
    #[serde(flatten)]
    pub decision: DecisionBody,
    /// The id of the hold.
    pub id: String,
    /// The token with which the hold is settled, released or renewed; `None` if it was denied.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token: Option<String>,
    /// The time at which the hold expires, on the store's clock; `None` if it was denied or no store recorded it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_at_us: Option<u64>,
    /// Whether the hold existed already: this is the first response, and nothing was charged again.
    pub repeated: bool,
}

/// The response to settling, releasing or renewing a hold.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SettlementBody {
    /// The worst of the outcomes of all counters: `settled`, `released`, `renewed`, `already`, `late`, `queued` or `unknown`.
    pub outcome: String,
    /// The outcome of each counter.
    pub tiers: Vec<SettledTierBody>,
}

/// The outcome of settling, releasing or renewing a hold on one counter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SettledTierBody {
    /// The name of the rule; `None` for a key.
    pub rule: Option<String>,
    /// The unit that is counted.
    pub unit: String,
    /// The outcome.
    pub outcome: String,
    /// The units that the hold has charged in total; `None` if the hold is unknown.
    pub charged: Option<u64>,
    /// The units available now, if the operation changed the hold.
    pub remaining: Option<u64>,
    /// The time at which the hold expires, on the store's clock; `None` if the hold is unknown.
    pub expires_at_us: Option<u64>,
}

impl From<Settlement> for SettlementBody {
    fn from(settlement: Settlement) -> Self {
        Self {
            outcome: settlement.outcome.name().to_owned(),
            tiers: settlement.tiers.into_iter().map(SettledTierBody::from).collect(),
        }
    }
}

impl From<SettledTier> for SettledTierBody {
    fn from(tier: SettledTier) -> Self {
        Self {
            rule: tier.rule.as_deref().map(str::to_owned),
            unit: tier.unit.to_string(),
            outcome: tier.outcome.name().to_owned(),
            charged: tier.charged,
            remaining: tier.remaining,
            expires_at_us: tier.expires_at.map(|at| at.as_micros()),
        }
    }
}

impl IntoResponse for HoldBody {
    fn into_response(self) -> Response {
        Json(self).into_response()
    }
}

impl IntoResponse for SettlementBody {
    fn into_response(self) -> Response {
        Json(self).into_response()
    }
}
