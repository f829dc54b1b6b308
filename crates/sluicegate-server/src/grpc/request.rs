//! From Envoy's request to a group of requests.
//!
//! Envoy allows a request if the call fails with a gRPC error. So only errors of Envoy's configuration are gRPC errors: an empty domain,
//! or no descriptors. For input that an end client controls, values are shortened and numbers clamped; a request that still cannot be
//! decided is denied.

use std::{fmt::Display, time::Duration};

use sluicegate::{
    Cost,
    limiter::{LimitOverride, Operation, Request},
};

use super::messages::{
    RateLimitDescriptor, RateLimitRequest, RateLimitUnit, rate_limit_descriptor::RateLimitOverride,
};
use crate::engine::Engine;

/// The most descriptors of one request.
pub(super) const MAX_DESCRIPTORS: usize = 64;

/// The label of the request's domain.
const DOMAIN: &str = "domain";

/// The cost of a request without `hits_addend`.
const DEFAULT_HITS: u64 = 1;

/// Why a request has no decision.
#[derive(Debug)]
pub(super) enum Problem {
    /// Envoy's configuration is invalid.
    Configuration(&'static str),
    /// The request cannot be decided, possibly because of an end client: it is denied.
    Undecidable(String),
}

/// Returns one request per descriptor, in order.
pub(super) fn read(engine: &Engine, request: &RateLimitRequest) -> Result<Vec<Request<'static>>, Problem> {
    if request.domain.is_empty() {
        return Err(Problem::Configuration("domain is empty: set the filter's domain, for example \"edge\""));
    }
    match request.descriptors.len() {
        0 => return Err(Problem::Configuration("descriptors is empty: send at least one")),
        1..=MAX_DESCRIPTORS => {}
        // the number of descriptors may depend on the headers of an end client
        count => {
            return Err(Problem::Undecidable(format!(
                "{count} descriptors are too many: send at most {MAX_DESCRIPTORS}"
            )));
        }
    }
    let descriptors = request.descriptors.iter().enumerate();
    descriptors
        .map(|(index, descriptor)| {
            read_descriptor(engine, request, descriptor)
                .map_err(|problem| Problem::Undecidable(format!("descriptors[{index}]: {problem}")))
        })
        .collect()
}

/// Reads one descriptor. Envoy sends one without entries if all its headers are absent; then the domain is the only label.
fn read_descriptor(
    engine: &Engine,
    request: &RateLimitRequest,
    descriptor: &RateLimitDescriptor,
) -> Result<Request<'static>, impl Display> {
    let entries = descriptor.entries.iter().map(|entry| (&*entry.key, &*entry.value));
    let labels = engine.labels_shortened(entries.chain([(DOMAIN, request.domain.as_bytes())]));
    let hits = match (descriptor.hits_addend, request.hits_addend) {
        (Some(own), _) => own,
        (None, 0) => DEFAULT_HITS,
        (None, of_all) => of_all.into(),
    };
    // the largest cost exceeds every limit
    let cost = Cost::new(hits).unwrap_or(Cost::MAX);
    let operation =
        if descriptor.is_negative_hits { Operation::Refund { at: None } } else { Operation::Check };
    let limit = descriptor.limit.as_ref().and_then(limit_override);
    labels.map(|labels| Request::new(labels, cost).operation(operation).limit(limit))
}

/// Reads the limit of a descriptor. A limit of an unknown unit is ignored, and the limits of the rules apply.
fn limit_override(limit: &RateLimitOverride) -> Option<LimitOverride> {
    const DAY: u64 = 24 * 60 * 60;
    let seconds = match RateLimitUnit::try_from(limit.unit) {
        Ok(RateLimitUnit::Second) => 1,
        Ok(RateLimitUnit::Minute) => 60,
        Ok(RateLimitUnit::Hour) => 60 * 60,
        Ok(RateLimitUnit::Day) => DAY,
        Ok(RateLimitUnit::Month) => 30 * DAY,
        Ok(RateLimitUnit::Year) => 365 * DAY,
        Ok(RateLimitUnit::Unknown) | Err(_) => return None,
    };
    Some(LimitOverride { amount: limit.requests_per_unit.into(), window: Duration::from_secs(seconds) })
}
