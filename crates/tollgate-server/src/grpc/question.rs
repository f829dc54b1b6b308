//! A request of Envoy's as requests that are decided together.

use std::{fmt::Display, time::Duration};

use tollgate::{Cost, Hits, Numbers, Request, Store};
use tonic::Status;

use super::messages::{
    RateLimitDescriptor, RateLimitRequest, RateLimitUnit, rate_limit_descriptor::RateLimitOverride,
};
use crate::desk::Desk;

/// The most descriptors of one request.
pub(super) const MAX_DESCRIPTORS: usize = 64;

/// The label that a request's domain becomes.
const DOMAIN: &str = "domain";

/// What a request costs that says nothing about it.
const DEFAULT_HITS: u64 = 1;

/// The requests that the descriptors stand for, in their order.
pub(super) fn read<S: Store>(desk: &Desk<S>, request: &RateLimitRequest) -> Result<Vec<Request>, Status> {
    if request.domain.is_empty() {
        return Err(invalid("domain is empty: set the filter's domain, for example \"edge\""));
    }
    match request.descriptors.len() {
        0 => return Err(invalid("there are no descriptors: send at least one")),
        1..=MAX_DESCRIPTORS => {}
        count => {
            return Err(invalid(format_args!(
                "{count} descriptors are too many: send at most {MAX_DESCRIPTORS}"
            )));
        }
    }
    let described = request.descriptors.iter().enumerate();
    described
        .map(|(place, descriptor)| {
            one(desk, request, descriptor)
                .map_err(|problem| invalid(format_args!("descriptors[{place}]: {problem}")))
        })
        .collect()
}

fn one<S: Store>(
    desk: &Desk<S>,
    request: &RateLimitRequest,
    descriptor: &RateLimitDescriptor,
) -> Result<Request, String> {
    if descriptor.entries.is_empty() {
        return Err("there are no entries: send at least one".to_owned());
    }
    let entries = descriptor.entries.iter().map(|entry| (&*entry.key, &*entry.value));
    let labels = desk.labels(entries.chain([(DOMAIN, request.domain.as_bytes())])).map_err(text)?;
    let hits = match (descriptor.hits_addend, request.hits_addend) {
        (Some(own), _) => own,
        (None, 0) => DEFAULT_HITS,
        (None, of_all) => of_all.into(),
    };
    let costs = Cost::new(hits).map_err(|error| format!("hits_addend: {error}"))?.into();
    let hits = if descriptor.is_negative_hits { Hits::GivenBack } else { Hits::Taken };
    let numbers = descriptor.limit.as_ref().map(numbers).transpose()?;
    Ok(Request { labels, costs, hits, numbers })
}

fn numbers(limit: &RateLimitOverride) -> Result<Numbers, String> {
    const DAY: u64 = 24 * 60 * 60;
    let seconds = match RateLimitUnit::try_from(limit.unit) {
        Ok(RateLimitUnit::Second) => 1,
        Ok(RateLimitUnit::Minute) => 60,
        Ok(RateLimitUnit::Hour) => 60 * 60,
        Ok(RateLimitUnit::Day) => DAY,
        Ok(RateLimitUnit::Month) => 30 * DAY,
        Ok(RateLimitUnit::Year) => 365 * DAY,
        Ok(RateLimitUnit::Unknown) | Err(_) => {
            return Err(format!(
                "limit: unit {} is not known: use SECOND, MINUTE, HOUR, DAY, MONTH or YEAR (1 to 6)",
                limit.unit
            ));
        }
    };
    Ok(Numbers { amount: limit.requests_per_unit.into(), window: Duration::from_secs(seconds) })
}

fn text(error: impl Display) -> String {
    error.to_string()
}

fn invalid(problem: impl Display) -> Status {
    Status::invalid_argument(problem.to_string())
}
