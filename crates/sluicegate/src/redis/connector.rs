//! Opens connections to the servers of a deployment: TCP or TLS, authentication, client name.
//!
//! The stream is opened here and not by the client library, because a connection must report that it was closed, and
//! whether a failed request was written.

use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use redis::{
    AsyncConnectionConfig, Cmd, Pipeline, RedisConnectionInfo, RedisFuture, RedisResult, Value,
    aio::{ConnectionLike, MultiplexedConnection, PubSub},
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
    sync::watch,
    task::AbortHandle,
    time::timeout,
};

use super::{
    RedisSetupError,
    health::HealthCounters,
    settings::{Credentials, DEFAULT_CLIENT_NAME, RedisSettings},
    tls::TlsDialer,
    url::Node,
};

/// How long one attempt to connect may take.
pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// How long the client waits for a reply; callers give up sooner.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(5);
/// The longest client name.
const MAX_CLIENT_NAME: usize = 64;

/// Connects to any server of a deployment.
pub(super) struct Connector {
    tls: Option<TlsDialer>,
    redis: RedisConnectionInfo,
    client_name: String,
    health: HealthCounters,
}

impl Connector {
    pub(super) fn new(
        is_tls: bool,
        credentials: &Credentials,
        database: u32,
        settings: &RedisSettings,
    ) -> Result<Self, RedisSetupError> {
        let client_name = settings.client_name.clone().unwrap_or_else(|| DEFAULT_CLIENT_NAME.to_owned());
        let is_visible = client_name.bytes().all(|byte| byte.is_ascii_graphic());
        if client_name.is_empty() || client_name.len() > MAX_CLIENT_NAME || !is_visible {
            return Err(RedisSetupError::ClientName(client_name));
        }
        let mut redis = RedisConnectionInfo::default()
            .set_db(database.into())
            .set_lib_name("sluicegate", env!("CARGO_PKG_VERSION"));
        if let Some(password) = &credentials.password {
            redis = redis.set_password(password.reveal());
            if let Some(user) = &credentials.user {
                redis = redis.set_username(user);
            }
        } else if credentials.user.is_some() {
            return Err(RedisSetupError::Credentials);
        }
        let tls = TlsDialer::new(is_tls, settings)?;
        Ok(Self { tls, redis, client_name, health: HealthCounters::default() })
    }

    /// Returns the health counters of the servers.
    pub(super) fn health(&self) -> &HealthCounters {
        &self.health
    }

    /// Connects, and returns once the server has answered a command.
    pub(super) async fn connect(&self, node: &Node) -> Result<Connection, String> {
        let is_open = AtomicBool::new(false);
        let connected = timeout(CONNECT_TIMEOUT, async {
            let stream = self.open(node).await?;
            is_open.store(true, Ordering::Relaxed);
            let mut connection = Connection::start(&self.redis, stream).await?;
            let mut name = redis::cmd("CLIENT");
            match name.arg("SETNAME").arg(&self.client_name).exec_async(&mut connection).await {
                // the name is optional, and the user may lack the permission
                Err(error) if error.code().is_none_or(|code| code == "NOAUTH") => Err(error),
                _ => Ok(connection),
            }
        });
        match connected.await {
            Ok(Ok(connection)) => Ok(connection),
            Ok(Err(error)) => Err(format!("cannot connect to {node}: {error}")),
            Err(_) if is_open.load(Ordering::Relaxed) => {
                Err(format!("connected to {node}, but no reply within {CONNECT_TIMEOUT:?}"))
            }
            Err(_) => Err(format!("cannot connect to {node}: no answer within {CONNECT_TIMEOUT:?}")),
        }
    }

    /// Connects for subscriptions.
    pub(super) async fn subscribe(&self, node: &Node) -> RedisResult<PubSub> {
        PubSub::new(&self.redis, self.open(node).await?).await
    }

    async fn open(&self, node: &Node) -> RedisResult<Stream> {
        let stream = TcpStream::connect((node.host.as_str(), node.port)).await?;
        // Nagle's algorithm would delay a call until the previous reply has arrived
        stream.set_nodelay(true)?;
        match &self.tls {
            None => Ok(Box::new(stream)),
            Some(tls) => Ok(tls.connect(&node.host, stream).await?),
        }
    }
}

/// A connection, encrypted or not.
pub(super) type Stream = Box<dyn ReadWrite>;

pub(super) trait ReadWrite: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> ReadWrite for S {}

/// A connection that all clones share. It is closed when the last clone is dropped.
#[derive(Clone)]
pub(super) struct Connection {
    requests: MultiplexedConnection,
    driver: Arc<Driver>,
    writes: Arc<AtomicU64>,
}

/// The task that reads and writes. It ends with the stream.
struct Driver {
    task: AbortHandle,
    /// Closed when the task ends.
    is_running: watch::Receiver<()>,
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Connection {
    async fn start(info: &RedisConnectionInfo, stream: Stream) -> RedisResult<Self> {
        let writes = Arc::<AtomicU64>::default();
        let stream = CountedStream { stream, writes: Arc::clone(&writes) };
        let config = AsyncConnectionConfig::new().set_response_timeout(Some(RESPONSE_TIMEOUT));
        let (requests, driver) = MultiplexedConnection::new_with_config(info, stream, config).await?;
        let (running, is_running) = watch::channel(());
        let task = tokio::spawn(async move {
            let _running = running;
            driver.await;
        });
        let driver = Arc::new(Driver { task: task.abort_handle(), is_running });
        Ok(Self { requests, driver, writes })
    }

    /// Closes the connection, which ends all requests in flight.
    pub(super) fn close(&self) {
        self.driver.task.abort();
    }

    /// Returns a future that is ready once the connection has ended. It does not keep the connection open.
    pub(super) fn ended(&self) -> impl Future<Output = ()> + use<> {
        let mut is_running = self.driver.is_running.clone();
        async move { while is_running.changed().await.is_ok() {} }
    }

    /// Returns how often the stream was written to. A request that failed was not written if the number is the same as before it.
    pub(super) fn writes(&self) -> u64 {
        self.writes.load(Ordering::Acquire)
    }
}

impl ConnectionLike for Connection {
    fn req_packed_command<'a>(&'a mut self, command: &'a Cmd) -> RedisFuture<'a, Value> {
        self.requests.req_packed_command(command)
    }

    fn req_packed_commands<'a>(
        &'a mut self,
        commands: &'a Pipeline,
        offset: usize,
        count: usize,
    ) -> RedisFuture<'a, Vec<Value>> {
        self.requests.req_packed_commands(commands, offset, count)
    }

    fn get_db(&self) -> i64 {
        self.requests.get_db()
    }
}

/// A stream that counts writes.
struct CountedStream {
    stream: Stream,
    writes: Arc<AtomicU64>,
}

impl AsyncRead for CountedStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for CountedStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<std::io::Result<usize>> {
        // a write that fails may have sent some bytes
        self.writes.fetch_add(1, Ordering::AcqRel);
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
