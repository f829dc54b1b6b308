//! Which processes ask this store: each puts itself into one sorted set, by when it is to be forgotten.

use std::{sync::LazyLock, time::Duration};

use super::{RedisStore, classified};
use crate::store::StoreError;

/// KEYS: the set. ARGV: the process, and for how many milliseconds it is known. Replies with how many are known.
const ANNOUNCE: &str = "\
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZADD', KEYS[1], string.format('%.0f', now + ARGV[2]), ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', string.format('%.0f', now))
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return redis.call('ZCARD', KEYS[1])
";

static SCRIPT: LazyLock<redis::Script> = LazyLock::new(|| redis::Script::new(ANNOUNCE));

impl RedisStore {
    pub(super) async fn announce_in(
        &self,
        key: &str,
        instance: u64,
        lifetime: Duration,
    ) -> Result<u32, StoreError> {
        let millis = u64::try_from(lifetime.as_millis()).unwrap_or(u64::MAX);
        let mut call = SCRIPT.key(key);
        call.arg(format!("{instance:016x}")).arg(millis);
        call.invoke_async(&mut self.link.connection()).await.map_err(classified)
    }
}
