//! A request of Envoy's as requests that are decided together.
//!
//! Envoy lets a request pass when the call ends in a gRPC error. So only what Envoy's configuration alone decides is one: an empty
//! domain, or no descriptors. Whatever an end client can influence is decided, by values that are shortened and numbers that are
//! clamped, or else denied.

use std::{fmt::Display, time::Duration};

use sluicegate::{Cost, LimitOverride, Operation, Request};

use super::messages::{
    RateLimitDescriptor, RateLimitRequest, RateLimitUnit, rate_limit_descriptor::RateLimitOverride,
};
use crate::engine::Engine;

/// The most descriptors of one request.
pub(super) const MAX_DESCRIPTORS: usize = 64;

/// The label that a request's domain becomes.
const DOMAIN: &str = "domain";

/// What a request costs that says nothing about it.
const DEFAULT_HITS: u64 = 1;

/// Why a request has no decision.
#[derive(Debug)]
pub(super) enum Problem {
    /// Envoy's configuration is wrong, whatever its clients send.
    Configuration(&'static str),
    /// It cannot be decided, which may be due to what an end client sent: it is denied.
    Undecidable(String),
}

/// The requests that the descriptors stand for, in their order.
pub(super) fn read(engine: &Engine, request: &RateLimitRequest) -> Result<Vec<Request<'static>>, Problem> {
    if request.domain.is_empty() {
        return Err(Problem::Configuration("domain is empty: set the filter's domain, for example \"edge\""));
    }
    match request.descriptors.len() {
        0 => return Err(Problem::Configuration("there are no descriptors: send at least one")),
        1..=MAX_DESCRIPTORS => {}
        // a client may add headers, and with each another descriptor
        count => {
            return Err(Problem::Undecidable(format!(
                "{count} descriptors are too many: send at most {MAX_DESCRIPTORS}"
            )));
        }
    }
    let described = request.descriptors.iter().enumerate();
    described
        .map(|(place, descriptor)| {
            one(engine, request, descriptor)
                .map_err(|problem| Problem::Undecidable(format!("descriptors[{place}]: {problem}")))
        })
        .collect()
}

/// Without entries, only the domain is a label: Envoy sends that when it skips all headers that are absent.
fn one(
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

/// A limit of an unknown unit is ignored: those of the rules apply.
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
