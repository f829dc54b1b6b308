//! From the decisions to Envoy's response.

use std::time::Duration;

use sluicegate::{Decision, Limit, Outcome, Retry, TierDecision, calendar::CalendarUnit};
use sluicegate_core::decision::whole_seconds_up;
use sluicegate_tower::headers::{self, Dialect};

use super::{
    messages::{Code, DescriptorStatus, HeaderValue, RateLimit, RateLimitResponse, Unit},
    request::{MAX_DESCRIPTORS, SETTLE_KEY, SETTLE_VALUE},
};

/// Creates the response. Its statuses are in the order of the descriptors.
pub(super) fn new(overall: &Decision, each: &[Decision], dialect: Dialect) -> RateLimitResponse {
    RateLimitResponse {
        overall_code: code(overall).into(),
        statuses: each.iter().map(status).collect(),
        response_headers_to_add: response_headers(overall, dialect),
        ..RateLimitResponse::default()
    }
}

/// Creates the response to a request with this many descriptors that is denied without a decision.
pub(super) fn denied(descriptors: usize) -> RateLimitResponse {
    let code = Code::OverLimit.into();
    let status = DescriptorStatus { code, ..DescriptorStatus::default() };
    // beyond the bound, no status is sent for each descriptor
    let statuses = if descriptors > MAX_DESCRIPTORS { 0 } else { descriptors };
    RateLimitResponse { overall_code: code, statuses: vec![status; statuses], ..RateLimitResponse::default() }
}

/// Creates the response to a call of this many descriptors that settles holds.
pub(super) fn settled(descriptors: usize) -> RateLimitResponse {
    let code = Code::Ok.into();
    let statuses = vec![settled_status(); descriptors];
    RateLimitResponse { overall_code: code, statuses, ..RateLimitResponse::default() }
}

/// Adds the statuses of descriptors that settle holds, at these ascending positions.
pub(super) fn insert_settled(response: &mut RateLimitResponse, positions: &[usize]) {
    for position in positions {
        response.statuses.insert((*position).min(response.statuses.len()), settled_status());
    }
}

/// Returns the dynamic metadata of a request that is held: the settle entry, which Envoy copies into the call at the end of the stream.
/// Responses to other requests do not have it.
pub(super) fn settle_metadata() -> prost_types::Struct {
    let value =
        prost_types::Value { kind: Some(prost_types::value::Kind::StringValue(SETTLE_VALUE.to_owned())) };
    prost_types::Struct { fields: [(SETTLE_KEY.to_owned(), value)].into() }
}

fn settled_status() -> DescriptorStatus {
    DescriptorStatus { code: Code::Ok.into(), ..DescriptorStatus::default() }
}

fn status(decision: &Decision) -> DescriptorStatus {
    let code = code(decision).into();
    let Some(tier) = decision.deciding() else {
        return DescriptorStatus { code, ..DescriptorStatus::default() };
    };
    DescriptorStatus {
        code,
        current_limit: tier.policy.map(|limit| current_limit(tier, &limit)),
        limit_remaining: u32::try_from(tier.remaining).unwrap_or(u32::MAX),
        duration_until_reset: until_reset(tier).map(whole_seconds),
        quota: None,
    }
}

fn code(decision: &Decision) -> Code {
    if decision.is_allowed() { Code::Ok } else { Code::OverLimit }
}

fn current_limit(tier: &TierDecision, limit: &Limit) -> RateLimit {
    RateLimit {
        name: tier.rule.as_deref().unwrap_or_default().to_owned(),
        requests_per_unit: u32::try_from(limit.amount()).unwrap_or(u32::MAX),
        unit: unit(limit).into(),
    }
}

/// Returns the unit of a window. Other windows are `Unknown` in Envoy's message; the rate limit headers state them.
fn unit(limit: &Limit) -> Unit {
    if let Some(calendar) = limit.calendar() {
        return match calendar.unit() {
            CalendarUnit::Day => Unit::Day,
            CalendarUnit::Week => Unit::Week,
            CalendarUnit::Month => Unit::Month,
            CalendarUnit::Quarter => Unit::Unknown,
            CalendarUnit::Year => Unit::Year,
        };
    }
    const DAY: u64 = 24 * 60 * 60;
    const UNITS: [(u64, Unit); 7] = [
        (1, Unit::Second),
        (60, Unit::Minute),
        (60 * 60, Unit::Hour),
        (DAY, Unit::Day),
        (7 * DAY, Unit::Week),
        (30 * DAY, Unit::Month),
        (365 * DAY, Unit::Year),
    ];
    let of_length = UNITS.iter().find(|(seconds, _)| Duration::from_secs(*seconds) == limit.window());
    of_length.map_or(Unit::Unknown, |(_, unit)| *unit)
}

/// The wait of a denied request; otherwise the time until the counter is empty.
fn until_reset(tier: &TierDecision) -> Option<Duration> {
    match tier.outcome {
        Outcome::Denied { retry: Retry::After(wait) } => Some(wait),
        Outcome::Denied { retry: Retry::Never } => None,
        Outcome::Allowed => Some(tier.reset_after),
    }
}

/// Rounds up, since Envoy truncates fractions.
fn whole_seconds(wait: Duration) -> prost_types::Duration {
    prost_types::Duration { seconds: i64::try_from(whole_seconds_up(wait)).unwrap_or(i64::MAX), nanos: 0 }
}

fn response_headers(decision: &Decision, dialect: Dialect) -> Vec<HeaderValue> {
    let header = |(name, value): (http::HeaderName, String)| HeaderValue {
        key: name.as_str().to_owned(),
        value,
        raw_value: Vec::new(),
    };
    headers::pairs(decision, dialect).into_iter().map(header).collect()
}

#[cfg(test)]
mod tests {
    use sluicegate::calendar::Zone;

    use super::*;

    fn per(window: Duration) -> Limit {
        Limit::fixed_window(1, window).unwrap()
    }

    #[test]
    fn a_window_has_the_unit_of_its_length_or_none() {
        let table = [
            (1, Unit::Second),
            (60, Unit::Minute),
            (3_600, Unit::Hour),
            (86_400, Unit::Day),
            (604_800, Unit::Week),
            (2_592_000, Unit::Month),
            (31_536_000, Unit::Year),
            (10, Unit::Unknown),
            (61, Unit::Unknown),
        ];
        for (seconds, expected) in table {
            assert_eq!(unit(&per(Duration::from_secs(seconds))), expected, "{seconds} s");
        }
        assert_eq!(unit(&per(Duration::from_millis(1))), Unit::Unknown);
        assert_eq!(unit(&per(Duration::from_millis(1_001))), Unit::Unknown);
        let calendar = |unit| Limit::fixed_window(1, Zone::utc().calendar(unit, None).unwrap()).unwrap();
        assert_eq!(unit(&calendar(CalendarUnit::Day)), Unit::Day);
        assert_eq!(unit(&calendar(CalendarUnit::Week)), Unit::Week);
        assert_eq!(unit(&calendar(CalendarUnit::Month)), Unit::Month);
        assert_eq!(unit(&calendar(CalendarUnit::Quarter)), Unit::Unknown);
        assert_eq!(unit(&calendar(CalendarUnit::Year)), Unit::Year);
    }
}
