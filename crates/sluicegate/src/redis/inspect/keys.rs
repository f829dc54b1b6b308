//! The keys of the limiter, page by page: their kind, and whether they have a TTL.

use std::time::Duration;

use redis::{FromRedisValue, Value};
use tokio::time::sleep;

use super::InspectedServer;
use crate::{
    Algorithm,
    redis::{
        keys::{Name, parse, pattern},
        snapshot::{self, HEADER_BYTES, StoredCounter, is_readable},
    },
    store::StoreError,
};

/// How many keys of any kind a server examines for one page.
pub const PAGE: u32 = 250;

/// The pause before each page but the first, which limits a scan to fifty thousand keys per second.
const PAUSE: Duration = Duration::from_millis(5);

/// KEYS: a key. ARGV: a TTL in milliseconds, which is set if the key has none. Returns 1 if it was set.
const SET_TTL: &str = "\
if redis.call('PTTL', KEYS[1]) ~= -1 then return 0 end
return redis.call('PEXPIRE', KEYS[1], ARGV[1])
";

/// KEYS: a counter. ARGV: the start of its value. Removes the counter if it still starts like this, and returns 1 then.
const REMOVE_UNCHANGED: &str = "\
if redis.call('GETRANGE', KEYS[1], 0, #ARGV[1] - 1) ~= ARGV[1] then return 0 end
return redis.call('UNLINK', KEYS[1])
";

/// A scan of the keys with the prefix on one server. It puts little load on production servers: one page at a time, with a pause in
/// between. A page takes the server a fraction of a millisecond.
#[derive(Debug)]
pub struct KeyPages<'a> {
    server: &'a InspectedServer,
    /// Cursor of the next page; absent after the last one.
    cursor: Option<u64>,
}

/// A key with the prefix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundKey {
    /// Its name.
    pub name: Vec<u8>,
    /// Whether it has no TTL.
    pub has_no_ttl: bool,
    /// Whether it is a counter that the limiter cannot have written: of another type, or with another content.
    pub is_unreadable: bool,
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
    /// The leases of a counter of this rule.
    Lease {
        /// The rule, as in a counter.
        rule: String,
    },
    /// The index of the holds of a counter of this rule.
    Holds {
        /// The rule, as in a counter.
        rule: String,
    },
    /// The record of a hold.
    Hold {
        /// The rule, as in a counter.
        rule: String,
    },
    /// The set of processes that use this store.
    Instances,
}

/// The first bytes of a key.
enum Header {
    Bytes(Vec<u8>),
    /// The key is not a string.
    OtherType,
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

    /// Starts a scan of the keys with the prefix.
    pub fn key_pages(&self) -> KeyPages<'_> {
        KeyPages { server: self, cursor: Some(0) }
    }

    /// Returns the cursor of the next page, which is 0 after the last one, and the keys of this page.
    async fn page(&self, cursor: u64) -> Result<(u64, Vec<FoundKey>), StoreError> {
        let mut scan = redis::cmd("SCAN");
        scan.arg(cursor).arg("MATCH").arg(pattern(&self.prefix)).arg("COUNT").arg(PAGE);
        let reply = self.ask(&scan).await?;
        let (next, names) =
            <(u64, Vec<Vec<u8>>)>::from_redis_value(reply).map_err(|_| self.unexpected_reply("SCAN"))?;
        let lifetimes = self.of_each("PTTL", &names).await?;
        let headers = self.headers(&names).await?;
        let found = |((name, lifetime), header): ((Vec<u8>, Value), Header)| {
            let has_no_ttl = i64::from_redis_value(lifetime) == Ok(-1);
            let meaning = parse(&self.prefix, &name).map(|name| match name {
                Name::Counter { rule, algorithm } => KeyKind::Counter { rule: rule.to_owned(), algorithm },
                Name::Lease { rule } => KeyKind::Lease { rule: rule.to_owned() },
                Name::Holds { rule } => KeyKind::Holds { rule: rule.to_owned() },
                Name::Hold { rule } => KeyKind::Hold { rule: rule.to_owned() },
                Name::Instances => KeyKind::Instances,
            });
            let is_unreadable = match (&meaning, header) {
                (Some(KeyKind::Counter { algorithm, .. }), Header::OtherType) => is_string(*algorithm),
                (Some(KeyKind::Counter { algorithm, .. }), Header::Bytes(bytes))
                    if !is_string(*algorithm) =>
                {
                    !bytes.is_empty()
                }
                // a key that has expired since then is empty
                (Some(KeyKind::Counter { algorithm, .. }), Header::Bytes(bytes)) => {
                    !bytes.is_empty() && !is_readable(*algorithm, &bytes)
                }
                _ => false,
            };
            FoundKey { name, has_no_ttl, is_unreadable, meaning }
        };
        let keys = names.into_iter().zip(lifetimes).zip(headers).map(found).collect();
        Ok((next, keys))
    }

    /// Returns the first bytes of each of these keys.
    async fn headers(&self, names: &[Vec<u8>]) -> Result<Vec<Header>, StoreError> {
        if names.is_empty() {
            return Ok(Vec::new());
        }
        let mut requests = redis::pipe();
        for name in names {
            requests.cmd("GETRANGE").arg(name).arg(0).arg(HEADER_BYTES - 1);
        }
        let replies = self.ask_all(&requests, names.len()).await?;
        let header = |reply: Value| match reply.extract_error() {
            Ok(reply) => match Vec::from_redis_value(reply) {
                Ok(bytes) => Ok(Header::Bytes(bytes)),
                Err(_) => Err(self.unexpected_reply("GETRANGE")),
            },
            Err(error) if error.code() == Some("WRONGTYPE") => Ok(Header::OtherType),
            Err(error) => Err(super::failed(&self.node, &error)),
        };
        replies.into_iter().map(header).collect()
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

    /// Removes those of these counters that no longer count, that is, equal a fresh counter under every limit. Returns how many were
    /// removed. Counters that were not written by the limiter are kept.
    ///
    /// # Errors
    /// If a command is rejected or has no reply; some counters may have been removed.
    pub async fn remove_expired(&self, names: &[Vec<u8>]) -> Result<u64, StoreError> {
        let counters: Vec<(&Vec<u8>, Algorithm)> = names
            .iter()
            .filter_map(|name| match parse(&self.prefix, name)? {
                Name::Counter { algorithm, .. } if is_string(algorithm) => Some((name, algorithm)),
                // the script removes holds that have ended
                Name::Counter { .. }
                | Name::Lease { .. }
                | Name::Holds { .. }
                | Name::Hold { .. }
                | Name::Instances => None,
            })
            .collect();
        let mut reads = redis::pipe();
        for (name, algorithm) in &counters {
            reads.add_command(snapshot::request(name, *algorithm));
        }
        let stored = self.outcomes(&reads, counters.len()).await?;
        let mut removals = redis::pipe();
        for ((name, algorithm), reply) in counters.into_iter().zip(stored) {
            // a value of another type is an error reply
            let counter =
                reply.extract_error().ok().and_then(|reply| snapshot::decode(reply, algorithm).ok());
            if let Some(StoredCounter { at, bytes, state: Some(state) }) = counter
                && !bytes.is_empty()
                && state.expires_at() <= at
            {
                removals.cmd("EVAL").arg(REMOVE_UNCHANGED).arg(1).arg(name).arg(bytes);
            }
        }
        let removed = removals.cmd_iter().count();
        Ok(count(self.replies(&removals, removed).await?))
    }

    /// Sets a TTL on those of these keys that have none, and returns how many there were. Their usage is kept.
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
    pub(super) async fn of_each(&self, command: &str, names: &[Vec<u8>]) -> Result<Vec<Value>, StoreError> {
        let mut requests = redis::pipe();
        for name in names {
            requests.cmd(command).arg(name);
        }
        self.replies(&requests, names.len()).await
    }

    /// Returns the replies to several requests, or the first error.
    pub(super) async fn replies(
        &self,
        requests: &redis::Pipeline,
        count: usize,
    ) -> Result<Vec<Value>, StoreError> {
        let replies = self.outcomes(requests, count).await?;
        replies
            .into_iter()
            .map(|reply| reply.extract_error().map_err(|error| super::failed(&self.node, &error)))
            .collect()
    }

    /// Returns the replies to several requests, including error replies.
    async fn outcomes(&self, requests: &redis::Pipeline, count: usize) -> Result<Vec<Value>, StoreError> {
        if count == 0 {
            return Ok(Vec::new());
        }
        self.ask_all(requests, count).await
    }
}

impl KeyPages<'_> {
    /// Returns whether all pages have been read.
    pub fn is_complete(&self) -> bool {
        self.cursor.is_none()
    }

    /// Returns the keys of the next page, for which the server examines about [`PAGE`] keys of any kind; `None` after the last page. A key
    /// may occur twice in a scan.
    ///
    /// # Errors
    /// If a command fails.
    pub async fn next(&mut self) -> Result<Option<Vec<FoundKey>>, StoreError> {
        let Some(cursor) = self.cursor else { return Ok(None) };
        if cursor != 0 {
            sleep(PAUSE).await;
        }
        let (next, keys) = self.server.page(cursor).await?;
        self.cursor = (next != 0).then_some(next);
        Ok(Some(keys))
    }
}

/// Whether the counters of an algorithm are strings. Those without a window are sorted sets of holds.
fn is_string(algorithm: Algorithm) -> bool {
    algorithm.properties().has_window
}

fn count(replies: Vec<Value>) -> u64 {
    replies.into_iter().filter_map(|reply| u64::from_redis_value(reply).ok()).sum()
}
