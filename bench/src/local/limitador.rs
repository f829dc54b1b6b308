//! limitador's library in memory, as its server uses it: a rule with a variable, and a context per request.

use std::collections::HashMap;

use anyhow::{Result, anyhow};
use limitador::{
    RateLimiter,
    limit::{Context, Limit, Namespace},
};

use super::child::Decider;

const NAMESPACE: &str = "bench";
const USER: &str = "user";
/// Its cache starts to drop counters before it reaches its bound, so the bound is this many times the number of keys.
const ROOM: usize = 2;

pub struct Limitador {
    limiter: RateLimiter,
    namespace: Namespace,
    prepared: Vec<String>,
}

impl Limitador {
    pub fn new(amount: u32, window_s: u64, keys: usize, prepared: Vec<String>) -> Result<Self> {
        let limiter = RateLimiter::new((keys * ROOM) as u64);
        let user = USER.try_into().map_err(|error| anyhow!("{USER} is no expression: {error:?}"))?;
        limiter.add_limit(Limit::new(NAMESPACE, u64::from(amount), window_s, [], [user]));
        Ok(Self { limiter, namespace: NAMESPACE.into(), prepared })
    }
}

impl Decider for Limitador {
    fn by_text(&self, text: &String) -> bool {
        let context = Context::from(HashMap::from([(USER.to_owned(), text.clone())]));
        let checked = self.limiter.check_rate_limited_and_update(&self.namespace, &context, 1);
        checked.is_ok_and(|checked| !checked.limited)
    }

    fn by_place(&self, place: usize) -> bool {
        self.by_text(&self.prepared[place])
    }
}
