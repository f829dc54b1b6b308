//! limitador's library over Redis, as its server uses it: rules with variables, one multiplexed connection. The check
//! and the charge are two script calls: two round trips, and not atomic.

use std::{collections::HashMap, sync::Arc};

use anyhow::{Result, anyhow};
use limitador::{
    AsyncRateLimiter,
    limit::{Context, Limit, Namespace},
    storage::redis::AsyncRedisStorage,
};

use super::{bounds::Bound, keys::Keys};

const NAMESPACE: &str = "bench";
const USER: &str = "user";

#[derive(Clone)]
pub struct Limitador {
    limiter: Arc<AsyncRateLimiter>,
    namespace: Namespace,
    keys: Keys,
}

impl Limitador {
    /// A fixed window, the only algorithm that it supports.
    pub async fn window(url: &str, keys: Keys, bound: Bound) -> Result<Self> {
        let limiter = AsyncRateLimiter::new_with_storage(Box::new(AsyncRedisStorage::new(url).await?));
        let user = USER.try_into().map_err(|error| anyhow!("{USER} is no expression: {error:?}"))?;
        limiter.add_limit(Limit::new(NAMESPACE, bound.amount, bound.window.as_secs(), [], [user]));
        Ok(Self { limiter: Arc::new(limiter), namespace: NAMESPACE.into(), keys })
    }

    /// Returns whether the request is allowed.
    pub async fn decide(&self, random: u64) -> Result<bool> {
        let values = HashMap::from([(USER.to_owned(), self.keys.name(random))]);
        let context = Context::from(values);
        let checked = self.limiter.check_rate_limited_and_update(&self.namespace, &context, 1).await;
        Ok(!checked.map_err(|error| anyhow!("limitador: {error}"))?.limited)
    }
}
