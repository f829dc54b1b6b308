//! The token of a hold: its id and the counters that it charged, as text.
//!
//! Settling needs no rules: the store recorded the limit with the hold. A reload of the rules between hold and settle therefore changes
//! nothing, and a forged token has no effect without the id of a hold.

use std::{fmt, str::FromStr, sync::Arc};

use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use sluicegate_core::{Algorithm, Cost};

use crate::{
    check::MAX_TIERS,
    key::{HoldId, Key, decoded_rule, encoded_rule},
    rules::Unit,
};

/// The longest token, in bytes: longer than that of a hold with [`MAX_TIERS`] tiers and the longest names.
const MAX_TOKEN: usize = 56 * 1024;
/// The version of the format, and whether the hold is confirmed.
const CONFIRMED: &str = "1";
const UNCONFIRMED: &str = "1u";
/// The fields of a tier.
const TIER_FIELDS: usize = 6;

/// The token of a hold, with which it is settled, released or renewed. Its text form is opaque.
///
/// ```
/// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
/// use sluicegate::{Cost, Labels, Limit, Limiter, Rule, limiter::{HoldToken, SettleOutcome}};
///
/// let limiter = Limiter::in_memory([Rule::new("in-flight", Limit::concurrency(1)?)])?;
/// let text = limiter.hold(&Labels::default(), Cost::ONE).await?.into_token().to_string();
///
/// let token: HoldToken = text.parse()?; // in another process, after a restart, …
/// assert_eq!(limiter.release(&token).await?.outcome, SettleOutcome::Released);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// # }).unwrap();
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HoldToken {
    pub(super) id: HoldId,
    pub(super) tiers: Vec<HeldTier>,
    /// Whether the store has recorded the hold for each of these tiers. Otherwise some may not have it: the store did not answer, or the
    /// tiers are those of the current rules.
    pub(super) is_confirmed: bool,
}

/// A counter that a hold charged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct HeldTier {
    pub(super) key: Key,
    pub(super) algorithm: Algorithm,
    pub(super) unit: Unit,
    /// The factor of the caller's cost.
    pub(super) factor: Cost,
}

impl HeldTier {
    /// The name of the rule; `None` for a limit that was given with the request.
    pub(super) fn rule(&self) -> Option<Arc<str>> {
        self.key.shared_rule().map(|rule| decoded_rule(rule))
    }
}

/// A text that is not the token of a hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid token: use the token from the answer to the hold, unchanged")]
pub struct HoldTokenError;

impl HoldToken {
    /// The id of the hold, encoded.
    pub fn id(&self) -> &HoldId {
        &self.id
    }

    /// Whether the hold has no counter: no rule matched, or the store was unavailable and the failure policy `open` decided.
    pub fn is_empty(&self) -> bool {
        self.tiers.is_empty()
    }
}

impl fmt::Display for HoldToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = format!("{}:{}", if self.is_confirmed { CONFIRMED } else { UNCONFIRMED }, self.id);
        for HeldTier { key, algorithm, unit, factor } in &self.tiers {
            let tag = key.co_located().map(|tag| format!("{tag:x}")).unwrap_or_default();
            let unit = encoded_rule(unit);
            let (factor, rule, identity) = (factor.units(), key.rule(), key.identity());
            text.push_str(&format!(":{algorithm}:{unit}:{factor}:{tag}:{rule}:{identity}"));
        }
        f.write_str(&URL_SAFE_NO_PAD.encode(text))
    }
}

impl FromStr for HoldToken {
    type Err = HoldTokenError;

    fn from_str(text: &str) -> Result<Self, HoldTokenError> {
        parse(text).ok_or(HoldTokenError)
    }
}

fn parse(text: &str) -> Option<HoldToken> {
    if text.len() > MAX_TOKEN {
        return None;
    }
    let text = String::from_utf8(URL_SAFE_NO_PAD.decode(text).ok()?).ok()?;
    let fields: Vec<&str> = text.split(':').collect();
    let [version @ (CONFIRMED | UNCONFIRMED), id, tiers @ ..] = &*fields else { return None };
    let (tiers, []) = tiers.as_chunks::<TIER_FIELDS>() else { return None };
    if tiers.len() > MAX_TIERS {
        return None;
    }
    let tier = |[algorithm, unit, factor, tag, rule, identity]: &[&str; TIER_FIELDS]| {
        let tag = if tag.is_empty() { None } else { Some(u32::from_str_radix(tag, 16).ok()?) };
        Some(HeldTier {
            key: Key::from_encoded(rule, identity, tag)?,
            algorithm: Algorithm::ALL.into_iter().find(|known| known.name() == *algorithm)?,
            unit: (&*decoded_rule(unit)).into(),
            factor: Cost::new(factor.parse().ok()?).ok()?,
        })
    };
    let tiers: Vec<HeldTier> = tiers.iter().map(tier).collect::<Option<_>>()?;
    let is_repeated = |(index, tier): (usize, &HeldTier)| {
        tiers[..index].iter().any(|other| other.key == tier.key && other.algorithm == tier.algorithm)
    };
    if tiers.iter().enumerate().any(is_repeated) {
        return None;
    }
    Some(HoldToken { id: HoldId::from_encoded(id)?, tiers, is_confirmed: *version == CONFIRMED })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::{MAX_RULE_NAME, MAX_UNIT_NAME};
    use sluicegate_core::hold::MAX_HOLD_ID;

    fn token() -> HoldToken {
        let rule = encoded_rule("tokens: a/b");
        let tier = |key, algorithm| HeldTier {
            key,
            algorithm,
            unit: "tokens".into(),
            factor: Cost::new(3).unwrap(),
        };
        let tiers = vec![
            tier(Key::of_rule(&rule, &[Some(b"acme"), None], Some(&[Some(b"acme")])), Algorithm::FixedWindow),
            tier(Key::without_rule("user:42").unwrap(), Algorithm::Concurrency),
        ];
        HoldToken { id: HoldId::new("request 1").unwrap(), tiers, is_confirmed: true }
    }

    #[test]
    fn a_token_survives_its_text_form() {
        let token = token();
        assert_eq!(token.to_string().parse(), Ok(token.clone()));
        assert_eq!(token.tiers[0].rule().as_deref(), Some("tokens: a/b"));
        assert_eq!(token.tiers[1].rule(), None);
        let empty = HoldToken { tiers: Vec::new(), is_confirmed: false, ..token };
        assert_eq!(empty.to_string().parse(), Ok(empty));
    }

    #[test]
    fn the_longest_token_survives_its_text_form() {
        let name = "%".repeat(MAX_RULE_NAME);
        let key = |number: usize| {
            let rule = encoded_rule(&format!("{}{number:02}", &name[2..]));
            Key::of_rule(&rule, &[Some(&[0xFF; 200])], Some(&[Some(b"acme")]))
        };
        let tier = |number| HeldTier {
            key: key(number),
            algorithm: Algorithm::SlidingCounter,
            unit: "u".repeat(MAX_UNIT_NAME).as_str().into(),
            factor: Cost::MAX,
        };
        let id = HoldId::new([0xFF; MAX_HOLD_ID]).unwrap();
        let token = HoldToken { id, tiers: (0..MAX_TIERS).map(tier).collect(), is_confirmed: true };
        assert_eq!(token.to_string().parse(), Ok(token));
    }

    #[test]
    fn other_texts_are_rejected() {
        let encode = |text: &str| URL_SAFE_NO_PAD.encode(text);
        let tier = "fixed-window:tokens:1::rule:a";
        for text in [
            String::new(),
            "%".to_owned(),
            encode(""),
            encode("1"),
            encode("1:"),
            encode("2:a"),
            encode("1:a:fixed-window"),
            encode("1:a:leaky:tokens:1::rule:a"),
            encode("1:a:fixed-window:tokens:-1::rule:a"),
            encode("1:a:fixed-window:tokens:1:x:rule:a"),
            encode("1:a:fixed-window:tokens:1::ru{e:a"),
            encode("1:a:fixed-window:tokens:1::rule:"),
            encode(&format!("1:a:{tier}:{tier}")),
            encode(&format!("1:{}", "a".repeat(1_000))),
            "x".repeat(MAX_TOKEN + 1),
        ] {
            assert_eq!(text.parse::<HoldToken>(), Err(HoldTokenError), "{text}");
        }
    }
}
