//! The limiters that are compared. All set `TCP_NODELAY`, and both peers run the same scripts.

use std::{sync::Arc, time::Duration};

use anyhow::{Result, bail};
use fred::prelude::{Builder, ClientLike, Config, LuaInterface, Pool, TcpConfig};
use redis::{
    AsyncConnectionConfig, Client, IntoConnectionInfo, Script, aio::MultiplexedConnection,
    io::tcp::TcpSettings,
};
use sluicegate::{Cost, Limit, Limiter, Options, RedisStore, Source};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    sync::Mutex,
};

use super::workload::{Algorithm, Workload};
use crate::drive::Contestant;

const GCRA: &str = include_str!("../remote/lua/gcra_one.lua");
const SLIDING_LOG: &str = include_str!("../remote/lua/log.lua");

/// Long enough that no run ends in timeouts or failure policies, for every contestant.
const DEADLINE: Duration = Duration::from_secs(5);

/// Connections of fred's pool.
const FRED_CONNECTIONS: usize = 4;

/// A contestant's kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Kind {
    HandWritten,
    Fred,
    Sluicegate,
}

impl Kind {
    /// All of them; the peers first.
    pub const ALL: [Self; 3] = [Self::HandWritten, Self::Fred, Self::Sluicegate];

    pub fn name(self) -> &'static str {
        match self {
            Self::HandWritten => "hand-written",
            Self::Fred => "fred",
            Self::Sluicegate => "sluicegate",
        }
    }

    /// Connects a contestant of this kind.
    pub async fn connect(self, url: &str, workload: Workload) -> Result<Connected> {
        Ok(match self {
            Self::HandWritten => Connected::HandWritten(HandWritten::connect(url, workload).await?),
            Self::Fred => Connected::Fred(FredPool::connect(url, workload).await?),
            Self::Sluicegate => Connected::Sluicegate(Sluicegate::connect(url, workload).await?),
        })
    }
}

/// A contestant with open connections.
#[derive(Clone)]
pub enum Connected {
    HandWritten(HandWritten),
    Fred(FredPool),
    Sluicegate(Sluicegate),
    Ping(Ping),
}

impl Contestant for Connected {
    async fn decide(&self, random: u64) -> Result<bool> {
        match self {
            Self::HandWritten(hand_written) => hand_written.decide(random).await,
            Self::Fred(fred) => fred.decide(random).await,
            Self::Sluicegate(sluicegate) => sluicegate.decide(random).await,
            Self::Ping(ping) => ping.decide().await,
        }
    }
}

/// The script and its arguments, as both peers call it.
#[derive(Clone)]
struct ScriptCall {
    workload: Workload,
    prefix: &'static str,
}

impl ScriptCall {
    fn source(&self) -> &'static str {
        match self.workload.algorithm {
            Algorithm::TokenBucket => GCRA,
            Algorithm::SlidingLog => SLIDING_LOG,
        }
    }

    fn key(&self, random: u64) -> String {
        format!("{}:{}", self.prefix, self.workload.keys.name(random))
    }

    fn arguments(&self, random: u64) -> Vec<String> {
        let bound = self.workload.bound();
        match self.workload.algorithm {
            Algorithm::TokenBucket => vec![bound.interval_us().to_string(), bound.amount.to_string()],
            // The random number is a member that no other call uses.
            Algorithm::SlidingLog => {
                vec![bound.amount.to_string(), bound.window.as_micros().to_string(), format!("{random:x}")]
            }
        }
    }
}

/// redis-rs: one multiplexed connection and a plain script called by its digest.
#[derive(Clone)]
pub struct HandWritten {
    connection: MultiplexedConnection,
    script: Arc<Script>,
    call: ScriptCall,
}

impl HandWritten {
    async fn connect(url: &str, workload: Workload) -> Result<Self> {
        let call = ScriptCall { workload, prefix: "hand" };
        let info = url.into_connection_info()?.set_tcp_settings(TcpSettings::default().set_nodelay(true));
        let config = AsyncConnectionConfig::new().set_response_timeout(Some(DEADLINE));
        let mut connection =
            Client::open(info)?.get_multiplexed_async_connection_with_config(&config).await?;
        let script = Script::new(call.source());
        script.load_async(&mut connection).await?;
        Ok(Self { connection, script: Arc::new(script), call })
    }

    async fn decide(&self, random: u64) -> Result<bool> {
        let mut invocation = self.script.key(self.call.key(random));
        for argument in self.call.arguments(random) {
            invocation.arg(argument);
        }
        let (passes, _): (u8, i64) = invocation.invoke_async(&mut self.connection.clone()).await?;
        Ok(passes == 1)
    }
}

/// fred: a pool of connections and the same script.
#[derive(Clone)]
pub struct FredPool {
    pool: Pool,
    digest: String,
    call: ScriptCall,
}

impl FredPool {
    async fn connect(url: &str, workload: Workload) -> Result<Self> {
        let call = ScriptCall { workload, prefix: "fred" };
        let mut builder = Builder::from_config(Config::from_url(url)?);
        builder.with_connection_config(|config| {
            config.tcp = TcpConfig { nodelay: Some(true), ..TcpConfig::default() };
        });
        builder.with_performance_config(|config| config.default_command_timeout = DEADLINE);
        let pool = builder.build_pool(FRED_CONNECTIONS)?;
        pool.init().await?;
        let digest = pool.script_load(call.source()).await?;
        Ok(Self { pool, digest, call })
    }

    async fn decide(&self, random: u64) -> Result<bool> {
        let (key, arguments) = (self.call.key(random), self.call.arguments(random));
        let (passes, _): (u8, i64) = self.pool.evalsha(self.digest.as_str(), key, arguments).await?;
        Ok(passes == 1)
    }
}

/// sluicegate as an application uses it, with default options except for the deadline.
#[derive(Clone)]
pub struct Sluicegate {
    limiter: Limiter,
    workload: Workload,
    limit: Limit,
}

impl Sluicegate {
    async fn connect(url: &str, workload: Workload) -> Result<Self> {
        let options = Options::default().deadline(DEADLINE);
        let limiter =
            Limiter::builder().store(RedisStore::connect(url).await?).rules([]).options(options).build()?;
        Ok(Self { limiter, workload, limit: workload.limit()? })
    }

    async fn decide(&self, random: u64) -> Result<bool> {
        let name = self.workload.keys.name(random);
        let decision = self.limiter.check_key(name, &self.limit, Cost::ONE).await?;
        match decision.source {
            Source::Store | Source::Cache => Ok(decision.is_allowed()),
            _ => bail!("sluicegate decided without the store: {:?}", decision.failure),
        }
    }
}

/// The raw round trip: one connection, one `PING` at a time.
#[derive(Clone)]
pub struct Ping(Arc<Mutex<TcpStream>>);

impl Ping {
    /// Connects to a URL of the form `redis://address`.
    pub async fn connect(url: &str) -> Result<Self> {
        let stream = TcpStream::connect(url.trim_start_matches("redis://")).await?;
        stream.set_nodelay(true)?;
        Ok(Self(Arc::new(Mutex::new(stream))))
    }

    async fn decide(&self) -> Result<bool> {
        const REPLY: &[u8] = b"+PONG\r\n";
        let mut stream = self.0.lock().await;
        stream.write_all(b"PING\r\n").await?;
        let mut reply = [0; REPLY.len()];
        stream.read_exact(&mut reply).await?;
        Ok(reply == REPLY)
    }
}
