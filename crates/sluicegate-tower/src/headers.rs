//! Response headers for a decision: limit, remaining quota, and time until reset or retry.
//!
//! | dialect | headers |
//! |---|---|
//! | `draft-11` | `RateLimit-Policy: "login";q=10;w=60` and `RateLimit: "login";r=3;t=41`, one member for each rule |
//! | `draft-07` | `RateLimit-Policy: 10;w=60` and `RateLimit: limit=10, remaining=3, reset=41` |
//! | `draft-06` | `RateLimit-Policy: 10;w=60` and `RateLimit-Limit`, `-Remaining`, `-Reset` |
//! | `x-ratelimit` | `X-RateLimit-Limit`, `-Remaining`, `-Reset`: plain numbers |
//! | `github` | the same and `-Used`, `-Resource`, where `-Reset` is a Unix time |
//! | `none` | none of these |
//!
//! In every dialect, a denial has `Retry-After` unless it is permanent. Seconds are integers, rounded up. Shadow rules are
//! omitted, and so are limits that are not enforced because the store is unavailable.
//!
//! Drafts 6 and 7 and the older dialects show one limit: the deciding one.

use std::{cmp::Reverse, fmt, str::FromStr, time::Duration};

use http::{HeaderMap, HeaderName, HeaderValue, header::RETRY_AFTER};
use sluicegate::{Decision, Outcome, Retry, TierDecision, Timestamp, decision::Mode, rules::DEFAULT_UNIT};
use sluicegate_core::decision::whole_seconds_up;

/// Maximum integer of a structured field: 15 digits.
const MAX_INTEGER: u64 = 999_999_999_999_999;

/// The name of a limit without a rule.
const UNNAMED: &str = "default";

/// Typical length of a member's parameters, for preallocation.
const PARAMETERS_CAPACITY: usize = 32;

/// Maximum number of headers in draft 11.
const MAX_FIELDS: usize = 3;

/// The shortest window that headers can express.
const MIN_WINDOW: Duration = Duration::from_secs(1);

const POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");
const RATE_LIMIT: HeaderName = HeaderName::from_static("ratelimit");

/// Parameter names of draft 11.
mod parameter {
    pub(super) const QUOTA: &str = "q";
    pub(super) const QUOTA_UNIT: &str = "qu";
    pub(super) const WINDOW: &str = "w";
    pub(super) const AVAILABLE: &str = "r";
    pub(super) const EFFECTIVE_WINDOW: &str = "t";
}

/// The dialect of the rate limit headers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Dialect {
    /// draft-ietf-httpapi-ratelimit-headers-11, which has the same syntax as -10.
    #[default]
    Draft11,
    /// Version 7 of the same draft: one dictionary.
    Draft07,
    /// Version 6 of the same draft: four headers.
    Draft06,
    /// `X-RateLimit-*` with a reset in seconds from now.
    XRateLimit,
    /// `X-RateLimit-*` with a reset as Unix time, omitted if the store's time is unknown.
    GitHub,
    /// Only `Retry-After`.
    None,
}

impl Dialect {
    /// All dialects, the default first.
    pub const ALL: [Self; 6] =
        [Self::Draft11, Self::Draft07, Self::Draft06, Self::XRateLimit, Self::GitHub, Self::None];

    /// Its name in configuration.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Draft11 => "draft-11",
            Self::Draft07 => "draft-07",
            Self::Draft06 => "draft-06",
            Self::XRateLimit => "x-ratelimit",
            Self::GitHub => "github",
            Self::None => "none",
        }
    }
}

impl fmt::Display for Dialect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The dialect is unknown.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown header dialect {0:?}: use draft-11, draft-07, draft-06, x-ratelimit, github or none")]
pub struct DialectError(String);

impl FromStr for Dialect {
    type Err = DialectError;

    fn from_str(name: &str) -> Result<Self, DialectError> {
        let known = Self::ALL.into_iter().find(|dialect| dialect.name() == name);
        known.ok_or_else(|| DialectError(name.to_owned()))
    }
}

/// Returns the headers of a decision.
///
/// ```
/// # tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
/// use std::time::Duration;
/// use sluicegate::{Labels, Limit, Limiter, MemoryStore, Rule};
/// use sluicegate_tower::headers::{self, Dialect};
///
/// let rule = Rule::new("login", Limit::sliding_log(10, Duration::from_secs(60))?);
/// let limiter = Limiter::new(MemoryStore::new(), [rule])?;
/// let decision = limiter.check(&Labels::default(), 1).await?;
///
/// let fields = headers::of(&decision, Dialect::Draft11);
/// assert_eq!(fields[0].0, "ratelimit-policy");
/// assert_eq!(fields[0].1, r#""login";q=10;w=60"#);
/// assert_eq!(fields[1].1, r#""login";r=9;t=60"#);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// # }).unwrap();
/// ```
pub fn of(decision: &Decision, dialect: Dialect) -> Vec<(HeaderName, HeaderValue)> {
    let value = |text| HeaderValue::try_from(text).expect("header values are printable ASCII");
    pairs(decision, dialect).into_iter().map(|(name, text)| (name, value(text))).collect()
}

/// Returns the headers of a decision with values as strings.
pub fn pairs(decision: &Decision, dialect: Dialect) -> Vec<(HeaderName, String)> {
    let mut fields = match dialect {
        Dialect::Draft11 => draft_11(decision),
        Dialect::Draft07 => draft_07(decision),
        Dialect::Draft06 => draft_06(decision),
        Dialect::XRateLimit => x_ratelimit_headers(decision),
        Dialect::GitHub => github_headers(decision),
        Dialect::None => Vec::new(),
    };
    if let Some(wait) = decision.retry_after() {
        fields.push((RETRY_AFTER, integer(seconds(wait))));
    }
    fields
}

/// Adds the headers of a decision to a response that may already have some from an inner limiter: lists are extended, other
/// headers are kept.
pub fn add(headers: &mut HeaderMap, decision: &Decision, dialect: Dialect) {
    for (name, value) in of(decision, dialect) {
        let is_list = name == POLICY || (name == RATE_LIMIT && dialect == Dialect::Draft11);
        if is_list {
            headers.append(name, value);
        } else if !headers.contains_key(&name) {
            headers.insert(name, value);
        }
    }
}

/// Draft 11: all policies, and the state of each policy. After a denial, only the policies that deny have a state, so
/// that `Retry-After`, the longest wait, is never shorter than a `t`.
fn draft_11(decision: &Decision) -> Vec<(HeaderName, String)> {
    let policies = one_per_name(enforced(decision)).map(|tier| {
        let mut member = quoted(name(tier));
        push_number(&mut member, parameter::QUOTA, quota(tier));
        if *tier.unit != *DEFAULT_UNIT {
            push(&mut member, parameter::QUOTA_UNIT, &quoted(&tier.unit));
        }
        if let Some(seconds) = window_seconds(tier, decision.at) {
            push_number(&mut member, parameter::WINDOW, seconds);
        }
        member
    });
    let relevant = enforced(decision).filter(|tier| tier.outcome.is_allowed() == decision.is_allowed());
    let states = one_per_name(relevant).map(|tier| {
        let mut member = quoted(name(tier));
        push_number(&mut member, parameter::AVAILABLE, tier.remaining);
        if let Some(seconds) = effective_window(tier) {
            push_number(&mut member, parameter::EFFECTIVE_WINDOW, seconds);
        }
        member
    });
    let mut fields = Vec::with_capacity(MAX_FIELDS);
    fields.extend([(POLICY, list(policies)), (RATE_LIMIT, list(states))]);
    fields.retain(|(_, members)| !members.is_empty());
    fields
}

fn draft_07(decision: &Decision) -> Vec<(HeaderName, String)> {
    let Some(tier) = decision.deciding() else { return Vec::new() };
    let (limit, remaining, reset) =
        (clamped(tier.limit), clamped(tier.remaining), clamped(whole_seconds_up(until_reset(tier))));
    let mut fields = plain_policy(decision, tier);
    fields.push((RATE_LIMIT, format!("limit={limit}, remaining={remaining}, reset={reset}")));
    fields
}

fn draft_06(decision: &Decision) -> Vec<(HeaderName, String)> {
    let Some(tier) = decision.deciding() else { return Vec::new() };
    let mut fields = plain_policy(decision, tier);
    fields.extend([
        (HeaderName::from_static("ratelimit-limit"), integer(tier.limit)),
        (HeaderName::from_static("ratelimit-remaining"), integer(tier.remaining)),
        (HeaderName::from_static("ratelimit-reset"), integer(whole_seconds_up(until_reset(tier)))),
    ]);
    fields
}

/// Policies in drafts 6 and 7: a quota and a window, each quota at most once. If two policies have equal quotas, the
/// deciding one is kept.
fn plain_policy(decision: &Decision, deciding: &TierDecision) -> Vec<(HeaderName, String)> {
    let mut quotas = Vec::new();
    let members = std::iter::once(deciding).chain(enforced(decision)).filter_map(|tier| {
        let seconds = window_seconds(tier, decision.at)?;
        if quotas.contains(&quota(tier)) {
            return None;
        }
        quotas.push(quota(tier));
        Some(format!("{};{}={}", clamped(quota(tier)), parameter::WINDOW, clamped(seconds)))
    });
    let members = list(members);
    if members.is_empty() { Vec::new() } else { vec![(POLICY, members)] }
}

fn x_ratelimit_headers(decision: &Decision) -> Vec<(HeaderName, String)> {
    let Some(tier) = decision.deciding() else { return Vec::new() };
    vec![
        (HeaderName::from_static("x-ratelimit-limit"), integer(tier.limit)),
        (HeaderName::from_static("x-ratelimit-remaining"), integer(tier.remaining)),
        (HeaderName::from_static("x-ratelimit-reset"), integer(whole_seconds_up(until_reset(tier)))),
    ]
}

fn github_headers(decision: &Decision) -> Vec<(HeaderName, String)> {
    let Some(tier) = decision.deciding() else { return Vec::new() };
    let mut fields = x_ratelimit_headers(decision);
    fields.pop();
    let used = tier.limit.saturating_sub(tier.remaining);
    fields.push((HeaderName::from_static("x-ratelimit-used"), integer(used)));
    if let Some(at) = decision.at {
        let reset = unix_seconds_up(at.plus(until_reset(tier)));
        fields.push((HeaderName::from_static("x-ratelimit-reset"), integer(reset)));
    }
    fields.push((HeaderName::from_static("x-ratelimit-resource"), printable(name(tier))));
    fields
}

/// The limits that are shown to clients: those that can deny.
fn enforced(decision: &Decision) -> impl Iterator<Item = &TierDecision> + Clone {
    decision.tiers.iter().filter(|tier| tier.mode == Mode::Enforced)
}

/// For each rule name, the tier with the least quota left: a group of requests can have several counters of one rule, and clients
/// identify limits by name.
fn one_per_name<'a>(
    tiers: impl Iterator<Item = &'a TierDecision> + Clone,
) -> impl Iterator<Item = &'a TierDecision> {
    let tiers = tiers.enumerate();
    tiers.clone().filter_map(move |(place, tier)| {
        let is_before = |(other_place, other): (usize, &TierDecision)| {
            name(other) == name(tier) && (availability(other), other_place) < (availability(tier), place)
        };
        (!tiers.clone().any(is_before)).then_some(tier)
    })
}

/// Orders tiers by their remaining quota, least first.
fn availability(tier: &TierDecision) -> (bool, Reverse<Duration>, u64) {
    let wait = match tier.outcome {
        Outcome::Denied { retry: Retry::Never } => Duration::MAX,
        Outcome::Denied { retry: Retry::After(wait) } => wait,
        Outcome::Allowed => Duration::ZERO,
    };
    (tier.outcome.is_allowed(), Reverse(wait), tier.remaining)
}

/// The name of a limit in headers.
pub(crate) fn name(tier: &TierDecision) -> &str {
    tier.rule.as_deref().unwrap_or(UNNAMED)
}

/// The amount per window, independent of the burst; 0 for a rule that always denies.
fn quota(tier: &TierDecision) -> u64 {
    tier.policy.map_or(0, |limit| limit.amount())
}

/// The window in seconds, rounded up, because the same quota over a longer window is a lower rate. Of a calendar window, the length of the
/// period at the time of the decision.
fn window_seconds(tier: &TierDecision, at: Option<Timestamp>) -> Option<u64> {
    let limit = tier.policy?;
    let window = match limit.calendar() {
        Some(_) => limit.window_at(at?),
        None => limit.window(),
    };
    (window >= MIN_WINDOW).then(|| whole_seconds_up(window))
}

/// The time for which the remaining quota has to last. For a token bucket this is the time until it is full. With the
/// time until the next unit instead, clients would send far more requests than the limit allows.
fn effective_window(tier: &TierDecision) -> Option<u64> {
    if let Outcome::Denied { retry: Retry::After(wait) } = tier.outcome {
        return Some(seconds(wait));
    }
    let limit = tier.policy?;
    let properties = limit.algorithm().properties();
    if !properties.has_window {
        // slots that are free now may be used now
        return None;
    }
    if properties.has_sliding_window {
        return Some(seconds(limit.window()));
    }
    (!tier.reset_after.is_zero()).then(|| seconds(tier.reset_after))
}

/// The reset of the older dialects; for a denied request, the time until a retry.
fn until_reset(tier: &TierDecision) -> Duration {
    match tier.outcome {
        Outcome::Denied { retry: Retry::After(wait) } => wait,
        Outcome::Denied { retry: Retry::Never } | Outcome::Allowed => tier.reset_after,
    }
}

/// A wait in seconds, rounded up and never zero.
fn seconds(wait: Duration) -> u64 {
    whole_seconds_up(wait).max(1)
}

fn unix_seconds_up(moment: Timestamp) -> u64 {
    moment.as_micros().div_ceil(1_000_000)
}

fn clamped(number: u64) -> u64 {
    number.min(MAX_INTEGER)
}

fn integer(number: u64) -> String {
    clamped(number).to_string()
}

fn push(member: &mut String, key: &str, value: &str) {
    for part in [";", key, "=", value] {
        member.push_str(part);
    }
}

fn push_number(member: &mut String, key: &str, number: u64) {
    push(member, key, itoa::Buffer::new().format(clamped(number)));
}

fn list(mut members: impl Iterator<Item = String>) -> String {
    let mut text = members.next().unwrap_or_default();
    for member in members {
        text.push_str(", ");
        text.push_str(&member);
    }
    text
}

/// Quotes a string for a structured field. Rule and unit names are printable ASCII; other characters are replaced so that the
/// field stays valid.
fn quoted(text: &str) -> String {
    let mut quoted = String::with_capacity(text.len() + PARAMETERS_CAPACITY);
    quoted.push('"');
    if text.bytes().all(|byte| matches!(byte, b' '..=b'~') && !matches!(byte, b'\\' | b'"')) {
        quoted.push_str(text);
    } else {
        for c in text.chars() {
            if matches!(c, '\\' | '"') {
                quoted.push('\\');
            }
            quoted.push(printable_char(c));
        }
    }
    quoted.push('"');
    quoted
}

fn printable(text: &str) -> String {
    text.chars().map(printable_char).collect()
}

fn printable_char(c: char) -> char {
    if matches!(c, ' '..='~') { c } else { '?' }
}
