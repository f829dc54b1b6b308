//! The keys of the limiter, page by page: their kind, and whether they have a TTL.

use std::time::Duration;

use redis::{FromRedisValue, Value};

use super::InspectedServer;
use crate::{
    Algorithm,
    redis::keys::{Name, parse, pattern},
    store::StoreError,
};

/// ServerInfo how many keys of any kind a server looks at for one page.
pub const PAGE: u32 = 250;

/// KEYS: a key. ARGV: a TTL in milliseconds, which is set if the key has none. Returns 1 if it was set.
const SET_TTL: &str = "\
if redis.call('PTTL', KEYS[1]) ~= -1 then return 0 end
return redis.call('PEXPIRE', KEYS[1], ARGV[1])
";

/// Some of the keys with the prefix.
#[derive(Clone, Debug)]
pub struct Page {
    /// Cursor of the next page; absent after the last one.
    pub next: Option<u64>,
    /// The keys of this page. A key may occur twice.
    pub keys: Vec<FoundKey>,
}

/// A key with the prefix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundKey {
    /// Its name.
    pub name: Vec<u8>,
    /// Whether it has no TTL.
    pub has_no_ttl: bool,
    /// Its kind; absent for a key of another application with the same prefix.
    pub meaning: Option<KeyKind>,
}

/// The kind of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeyKind {
    /// A counter of this rule, as [`encoded_rule`](crate::key::encoded_rule) writes it.
    Counter {
        /// The rule; a name that starts with `!` is not a rule.
        rule: String,
        /// The algorithm.
        algorithm: Algorithm,
    },
    /// The set of processes that use this store.
    Instances,
}

impl InspectedServer {
    /// Returns the number of keys of the database.
    ///
    /// # Errors
    /// If the command fails.
    pub async fn size(&self) -> Result<u64, StoreError> {
        let reply = self.ask(&redis::cmd("DBSIZE")).await?;
        u64::from_redis_value(reply).map_err(|_| self.unexpected_reply("DBSIZE"))
    }

    /// Returns one page of the keys with the prefix; the first cursor is 0. A page takes the server a fraction of a millisecond; a caller
    /// that reads all pages should pause in between.
    ///
    /// # Errors
    /// If the command fails.
    pub async fn page(&self, cursor: u64) -> Result<Page, StoreError> {
        let mut scan = redis::cmd("SCAN");
        scan.arg(cursor).arg("MATCH").arg(pattern(&self.prefix)).arg("COUNT").arg(PAGE);
        let reply = self.ask(&scan).await?;
        let (next, names) =
            <(u64, Vec<Vec<u8>>)>::from_redis_value(reply).map_err(|_| self.unexpected_reply("SCAN"))?;
        let lifetimes = self.of_each("PTTL", &names).await?;
        let found = |(name, lifetime): (Vec<u8>, Value)| {
            let has_no_ttl = i64::from_redis_value(lifetime) == Ok(-1);
            let meaning = parse(&self.prefix, &name).map(|name| match name {
                Name::Counter { rule, algorithm } => KeyKind::Counter { rule: rule.to_owned(), algorithm },
                Name::Instances => KeyKind::Instances,
            });
            FoundKey { name, has_no_ttl, meaning }
        };
        let keys = names.into_iter().zip(lifetimes).map(found).collect();
        Ok(Page { next: (next != 0).then_some(next), keys })
    }

    /// Returns the memory of each of these keys in bytes, without keys that no longer exist.
    ///
    /// # Errors
    /// If the command fails.
    pub async fn bytes(&self, names: &[Vec<u8>]) -> Result<Vec<u64>, StoreError> {
        let mut questions = redis::pipe();
        for name in names {
            questions.cmd("MEMORY").arg("USAGE").arg(name);
        }
        let replies = self.replies(&questions, names.len()).await?;
        Ok(replies.into_iter().filter_map(|reply| u64::from_redis_value(reply).ok()).collect())
    }

    /// Removes keys, and returns how many existed.
    ///
    /// # Errors
    /// If a command is rejected or has no reply; some keys may have been removed.
    pub async fn remove(&self, names: &[Vec<u8>]) -> Result<u64, StoreError> {
        Ok(count(self.of_each("UNLINK", names).await?))
    }

    /// Sets a TTL on those of these keys that have none, and returns how many there were. Their counts stay.
    ///
    /// # Errors
    /// If a command is rejected or has no reply; some keys may have a TTL then.
    pub async fn set_ttl(&self, names: &[Vec<u8>], after: Duration) -> Result<u64, StoreError> {
        let millis = u64::try_from(after.as_millis()).unwrap_or(u64::MAX).max(1);
        let mut requests = redis::pipe();
        for name in names {
            requests.cmd("EVAL").arg(SET_TTL).arg(1).arg(name).arg(millis);
        }
        Ok(count(self.replies(&requests, names.len()).await?))
    }

    /// Sends one command per key: on a Cluster, keys of several slots cannot share a command.
    async fn of_each(&self, command: &str, names: &[Vec<u8>]) -> Result<Vec<Value>, StoreError> {
        let mut requests = redis::pipe();
        for name in names {
            requests.cmd(command).arg(name);
        }
        self.replies(&requests, names.len()).await
    }

    /// Returns the replies to several requests, or the first error.
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
