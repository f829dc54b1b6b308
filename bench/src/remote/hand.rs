//! A hand-written limiter: redis-rs, one multiplexed connection that reconnects, and a plain Lua script called by its
//! digest.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use anyhow::Result;
use redis::{IntoConnectionInfo, Script, aio::ConnectionManager, io::tcp::TcpSettings};

use super::{bounds::Bound, keys::Keys};

const GCRA: &str = include_str!("lua/gcra_one.lua");
const GCRA_ALL: &str = include_str!("lua/gcra_all.lua");
const LOG: &str = include_str!("lua/log.lua");
const GLOBAL_KEY: &str = "hand:global";

/// The hand-written limiter, in one of its forms.
#[derive(Clone)]
pub struct Hand {
    connection: ConnectionManager,
    script: Arc<Script>,
    form: Form,
}

#[derive(Clone)]
enum Form {
    Gcra { keys: Keys, bound: Bound },
    TwoCalls { users: Keys, all: Bound, each: Bound },
    OneCall { users: Keys, all: Bound, each: Bound },
    Log { keys: Keys, bound: Bound, members: Arc<Members> },
}

/// Members of sorted sets, unique across processes: `5f3a9c01-17`.
struct Members {
    process: u32,
    count: AtomicU64,
}

impl Members {
    fn new() -> Self {
        Self { process: fastrand::u32(..), count: AtomicU64::new(0) }
    }

    fn next(&self) -> String {
        format!("{:08x}-{}", self.process, self.count.fetch_add(1, Ordering::Relaxed))
    }
}

impl Hand {
    /// A token bucket.
    pub async fn gcra(url: &str, keys: Keys, bound: Bound) -> Result<Self> {
        Self::new(url, GCRA, Form::Gcra { keys, bound }).await
    }

    /// A limit for all users and one per user, in two calls.
    pub async fn two_calls(url: &str, users: Keys, all: Bound, each: Bound) -> Result<Self> {
        Self::new(url, GCRA, Form::TwoCalls { users, all, each }).await
    }

    /// The same in one call of a script for several keys.
    pub async fn one_call(url: &str, users: Keys, all: Bound, each: Bound) -> Result<Self> {
        Self::new(url, GCRA_ALL, Form::OneCall { users, all, each }).await
    }

    /// A sliding log in a sorted set.
    pub async fn log(url: &str, keys: Keys, bound: Bound) -> Result<Self> {
        Self::new(url, LOG, Form::Log { keys, bound, members: Arc::new(Members::new()) }).await
    }

    async fn new(url: &str, source: &str, form: Form) -> Result<Self> {
        let connection = connect(url).await?;
        let script = Script::new(source);
        script.load_async(&mut connection.clone()).await?;
        Ok(Self { connection, script: Arc::new(script), form })
    }

    /// Returns whether the request is allowed.
    pub async fn decide(&self, random: u64) -> Result<bool> {
        match &self.form {
            Form::Gcra { keys, bound } => self.gcra_call(&hand_key(*keys, random), bound).await,
            Form::TwoCalls { users, all, each } => Ok(self.gcra_call(GLOBAL_KEY, all).await?
                && self.gcra_call(&hand_key(*users, random), each).await?),
            Form::OneCall { users, all, each } => {
                let mut call = self.script.key(GLOBAL_KEY);
                call.key(hand_key(*users, random));
                call.arg(all.interval_us()).arg(all.amount).arg(each.interval_us()).arg(each.amount);
                self.reply(&call).await
            }
            Form::Log { keys, bound, members } => {
                let mut call = self.script.key(hand_key(*keys, random));
                call.arg(bound.amount).arg(bound.window.as_micros() as u64).arg(members.next());
                self.reply(&call).await
            }
        }
    }

    async fn gcra_call(&self, key: &str, bound: &Bound) -> Result<bool> {
        let mut call = self.script.key(key);
        call.arg(bound.interval_us()).arg(bound.amount);
        self.reply(&call).await
    }

    async fn reply(&self, call: &redis::ScriptInvocation<'_>) -> Result<bool> {
        let (passes, _wait): (u8, i64) = call.invoke_async(&mut self.connection.clone()).await?;
        Ok(passes == 1)
    }
}

/// Opens a multiplexed connection that reconnects.
pub async fn connect(url: &str) -> Result<ConnectionManager> {
    let tcp = TcpSettings::default().set_nodelay(true);
    let info = url.into_connection_info()?.set_tcp_settings(tcp);
    Ok(redis::Client::open(info)?.get_connection_manager().await?)
}

/// Returns the Redis key of the hand-written limiter.
pub fn hand_key(keys: Keys, random: u64) -> String {
    format!("hand:{}", keys.name(random))
}
