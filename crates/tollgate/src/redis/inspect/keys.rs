//! Our keys, a page at a time: what they are, and whether they end.

use std::time::Duration;

use redis::{FromRedisValue, Value};

use super::InspectedServer;
use crate::{
    Algorithm,
    redis::keys::{Name, pattern, read},
    store::StoreError,
};

/// ServerInfo how many keys of any kind a server looks at for one page.
pub const PAGE: u32 = 250;

/// KEYS: a key. ARGV: for how many milliseconds it is to live, if it would live for ever. Replies with 1 if it would have.
const SET_TTL: &str = "\
if redis.call('PTTL', KEYS[1]) ~= -1 then return 0 end
return redis.call('PEXPIRE', KEYS[1], ARGV[1])
";

/// Some of the keys that have our prefix.
#[derive(Clone, Debug)]
pub struct Page {
    /// Where the next page begins; none after the last.
    pub next: Option<u64>,
    /// What is on this one. A key may come twice.
    pub keys: Vec<FoundKey>,
}

/// A key that has our prefix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundKey {
    /// Its name.
    pub name: Vec<u8>,
    /// Whether it lives for ever.
    pub has_no_ttl: bool,
    /// What it is, if it is ours: one that is not is somebody else's who has the same prefix.
    pub meaning: Option<KeyKind>,
}

/// What a key of ours is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeyKind {
    /// A counter of this rule, as [`encoded_rule`](crate::key::encoded_rule) writes it.
    Counter {
        /// The rule; one that begins with `!` belongs to none.
        rule: String,
        /// How it counts.
        algorithm: Algorithm,
    },
    /// The processes that ask this store.
    Instances,
}

impl InspectedServer {
    /// How many keys of all kinds the database has.
    ///
    /// # Errors
    /// When the server does not tell.
    pub async fn size(&self) -> Result<u64, StoreError> {
        let reply = self.ask(&redis::cmd("DBSIZE")).await?;
        u64::from_redis_value(reply).map_err(|_| self.unexpected_reply("DBSIZE"))
    }

    /// One page of the keys that have our prefix, beginning at 0. The server is kept busy for a fraction of a millisecond;
    /// a caller who asks for all of them pauses in between.
    ///
    /// # Errors
    /// When the server does not tell.
    pub async fn page(&self, cursor: u64) -> Result<Page, StoreError> {
        let mut scan = redis::cmd("SCAN");
        scan.arg(cursor).arg("MATCH").arg(pattern(&self.prefix)).arg("COUNT").arg(PAGE);
        let reply = self.ask(&scan).await?;
        let (next, names) =
            <(u64, Vec<Vec<u8>>)>::from_redis_value(reply).map_err(|_| self.unexpected_reply("SCAN"))?;
        let lifetimes = self.of_each("PTTL", &names).await?;
        let found = |(name, lifetime): (Vec<u8>, Value)| {
            let has_no_ttl = i64::from_redis_value(lifetime) == Ok(-1);
            let meaning = read(&self.prefix, &name).map(|name| match name {
                Name::Counter { rule, algorithm } => KeyKind::Counter { rule: rule.to_owned(), algorithm },
                Name::Instances => KeyKind::Instances,
            });
            FoundKey { name, has_no_ttl, meaning }
        };
        let keys = names.into_iter().zip(lifetimes).map(found).collect();
        Ok(Page { next: (next != 0).then_some(next), keys })
    }

    /// How many bytes each of these keys takes; those that are gone are left out.
    ///
    /// # Errors
    /// When the server does not tell.
    pub async fn bytes(&self, names: &[Vec<u8>]) -> Result<Vec<u64>, StoreError> {
        let mut questions = redis::pipe();
        for name in names {
            questions.cmd("MEMORY").arg("USAGE").arg(name);
        }
        let replies = self.replies(&questions, names.len()).await?;
        Ok(replies.into_iter().filter_map(|reply| u64::from_redis_value(reply).ok()).collect())
    }

    /// Removes keys; how many there were.
    ///
    /// # Errors
    /// When the server refuses, or there is no answer; some may be gone then.
    pub async fn remove(&self, names: &[Vec<u8>]) -> Result<u64, StoreError> {
        Ok(count(self.of_each("UNLINK", names).await?))
    }

    /// Gives an end to those of these keys that would live for ever; how many there were. What they count stays.
    ///
    /// # Errors
    /// When the server refuses, or there is no answer; some may have their end then.
    pub async fn set_ttl(&self, names: &[Vec<u8>], after: Duration) -> Result<u64, StoreError> {
        let millis = u64::try_from(after.as_millis()).unwrap_or(u64::MAX).max(1);
        let mut requests = redis::pipe();
        for name in names {
            requests.cmd("EVAL").arg(SET_TTL).arg(1).arg(name).arg(millis);
        }
        Ok(count(self.replies(&requests, names.len()).await?))
    }

    /// One command for each key: on a Cluster, those of several slots cannot share one.
    async fn of_each(&self, command: &str, names: &[Vec<u8>]) -> Result<Vec<Value>, StoreError> {
        let mut requests = redis::pipe();
        for name in names {
            requests.cmd(command).arg(name);
        }
        self.replies(&requests, names.len()).await
    }

    /// The replies to several requests, unless one is refused.
    async fn replies(&self, requests: &redis::Pipeline, count: usize) -> Result<Vec<Value>, StoreError> {
        if count == 0 {
            return Ok(Vec::new());
        }
        let replies = self.ask_all(requests, count).await?;
        replies
            .into_iter()
            .map(|reply| reply.extract_error().map_err(|error| super::failed(&self.node, &error)))
            .collect()
    }
}

fn count(replies: Vec<Value>) -> u64 {
    replies.into_iter().filter_map(|reply| u64::from_redis_value(reply).ok()).sum()
}
