//! From Envoy's request to a group of requests, and to the holds that it settles.
//!
//! Envoy allows a request if the call fails with a gRPC error. So only errors of Envoy's configuration are gRPC errors: an empty domain,
//! or no descriptors. For input that an end client controls, values are shortened and numbers clamped; a request that still cannot be
//! decided is denied.

use std::{fmt::Display, time::Duration};

use sluicegate::{
    Cost, Labels,
    label_policy::CleanError,
    limiter::{LimitOverride, OnConcurrency, Operation, Request},
    store::HoldId,
};

use super::messages::{
    RateLimitDescriptor, RateLimitRequest, RateLimitUnit,
    rate_limit_descriptor::{Entry, RateLimitOverride},
};
use crate::engine::Engine;

/// The most descriptors of one request.
pub(super) const MAX_DESCRIPTORS: usize = 64;

/// The label of the request's domain.
const DOMAIN: &str = "domain";

/// The cost of a request without `hits_addend`.
const DEFAULT_HITS: u64 = 1;

/// The settle entry: a descriptor with it settles a hold at the end of a stream. It is not a label.
pub(super) const SETTLE_KEY: &str = "sluicegate";
pub(super) const SETTLE_VALUE: &str = "settle";

/// The contents of a call.
#[derive(Debug, Default)]
pub(super) struct RateLimitCall {
    /// The descriptors that are decided, in order.
    pub(super) requests: Vec<Request<'static>>,
    /// The id under which they are held, if one of them contains an id and none has the settle entry.
    pub(super) hold: Option<HoldId>,
    /// The descriptors with the settle entry.
    pub(super) ends: Vec<StreamEnd>,
    /// Their positions among all descriptors, and those of such descriptors that are invalid.
    pub(super) end_positions: Vec<usize>,
    /// Why a descriptor with the settle entry is invalid.
    pub(super) problem: Option<String>,
}

impl RateLimitCall {
    /// Adds a descriptor with the settle entry. If several have the same labels, the largest cost is used: a descriptor without a cost is for
    /// streams that end before Envoy has received the cost.
    fn add_end(&mut self, end: StreamEnd) {
        match self.ends.iter_mut().find(|other| other.labels == end.labels) {
            Some(known) => known.actual = known.actual.max(end.actual),
            None => self.ends.push(end),
        }
    }
}

/// A descriptor with the settle entry.
#[derive(Debug)]
pub(super) struct StreamEnd {
    /// Its labels, without the settle entry.
    pub(super) labels: Labels,
    /// The actual cost, if Envoy reported it.
    pub(super) actual: Option<Cost>,
}

/// Why a request has no decision.
#[derive(Debug)]
pub(super) enum Problem {
    /// Envoy's configuration is invalid.
    Configuration(&'static str),
    /// The request cannot be decided, possibly because of an end client: it is denied.
    Undecidable(String),
}

/// Reads the descriptors.
pub(super) fn read(engine: &Engine, request: &RateLimitRequest) -> Result<RateLimitCall, Problem> {
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
    let mut call = RateLimitCall::default();
    let has_end = request.descriptors.iter().any(has_settle_entry);
    for (index, descriptor) in request.descriptors.iter().enumerate() {
        let problem = |problem: &dyn Display| format!("descriptors[{index}]: {problem}");
        let labels = labels(engine, request, descriptor);
        if has_settle_entry(descriptor) {
            call.end_positions.push(index);
            match labels {
                Ok(labels) => call.add_end(StreamEnd { labels, actual: hits(request, descriptor).map(cost) }),
                Err(error) => call.problem = Some(problem(&error)),
            }
            continue;
        }
        let undecidable = |error: &dyn Display| Problem::Undecidable(problem(error));
        let labels = labels.map_err(|error| undecidable(&error))?;
        let held =
            if has_end || descriptor.is_negative_hits { None } else { engine.limiter().label_hold(&labels) };
        let hits = cost(hits(request, descriptor).unwrap_or(DEFAULT_HITS));
        let Some(held) = held else {
            call.requests.push(read_descriptor(
                descriptor,
                Request::new(labels, hits).on_concurrency(OnConcurrency::Skip),
            ));
            continue;
        };
        if call.hold.as_ref().is_some_and(|id| id != held.id()) {
            return Err(undecidable(
                &"the hold id differs from that of other descriptors: use one id for all rules with hold",
            ));
        }
        let costs = held.costs(hits).map_err(|error| undecidable(&error))?;
        call.requests.push(read_descriptor(descriptor, Request::new(labels, costs)));
        call.hold = Some(held.id().clone());
    }
    Ok(call)
}

/// Whether a descriptor has the settle entry.
fn has_settle_entry(descriptor: &RateLimitDescriptor) -> bool {
    descriptor.entries.iter().any(is_settle_entry)
}

fn is_settle_entry(entry: &Entry) -> bool {
    entry.key == SETTLE_KEY && entry.value == SETTLE_VALUE.as_bytes()
}

/// Returns the labels of a descriptor. Envoy sends one without entries if all its headers are absent; then the domain is the only label.
fn labels(
    engine: &Engine,
    request: &RateLimitRequest,
    descriptor: &RateLimitDescriptor,
) -> Result<Labels, CleanError> {
    let entries = descriptor.entries.iter().filter(|entry| !is_settle_entry(entry));
    let entries = entries.map(|entry| (&*entry.key, &*entry.value));
    engine.labels_shortened(entries.chain([(DOMAIN, request.domain.as_bytes())]))
}

/// Returns the addend of a descriptor, if it or the request has one.
fn hits(request: &RateLimitRequest, descriptor: &RateLimitDescriptor) -> Option<u64> {
    let of_all = (request.hits_addend > 0).then(|| request.hits_addend.into());
    descriptor.hits_addend.or(of_all)
}

/// The largest cost exceeds every limit.
fn cost(hits: u64) -> Cost {
    Cost::new(hits).unwrap_or(Cost::MAX)
}

/// Adds the operation and the limit of a descriptor.
fn read_descriptor(descriptor: &RateLimitDescriptor, request: Request<'static>) -> Request<'static> {
    let operation =
        if descriptor.is_negative_hits { Operation::Refund { at: None } } else { Operation::Check };
    request.operation(operation).limit(descriptor.limit.as_ref().and_then(limit_override))
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
