//! The processes that use this store. Each adds itself to one sorted set, with its expiry time as the score.

use std::time::Duration;

/// KEYS: the set. ARGV: the process and its lifetime in milliseconds. Returns the number of registered processes.
const ANNOUNCE: &str = "\
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZADD', KEYS[1], string.format('%.0f', now + ARGV[2]), ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', string.format('%.0f', now))
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return redis.call('ZCARD', KEYS[1])
";

/// Returns the command that registers a process and counts all of them.
pub(super) fn announcement(key: &str, instance: u64, lifetime: Duration) -> redis::Cmd {
    let millis = u64::try_from(lifetime.as_millis()).unwrap_or(u64::MAX);
    let mut request = redis::cmd("EVAL");
    request.arg(ANNOUNCE).arg(1).arg(key).arg(format!("{instance:016x}")).arg(millis);
    request
}
