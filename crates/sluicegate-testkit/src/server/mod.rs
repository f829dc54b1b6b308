//! Real Redis and Valkey processes, one per [`Server`], each with its own directory, unix socket and loopback port.
//!
//! Dropping a server checks that all of its keys expire, so a test that leaves a key without TTL fails. Faults are in
//! [`crate::faults`]. This module does not install servers (`scripts/servers` does) and does not depend on the key
//! layout of sluicegate.

mod key_expiry;
mod setup;

use std::fmt::{self, Display};
use std::fs::{self, File};
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use redis::{ConnectionAddr, FromRedisValue, IntoConnectionInfo, RedisConnectionInfo, RedisResult};
use tempfile::TempDir;

pub use self::setup::{Flavor, Setup};

use self::setup::Role;
use crate::namespace::Side;
use crate::tls::Certificates;

/// Timeout of each call to a running server.
const ANSWER_DEADLINE: Duration = Duration::from_secs(5);

/// The time between two polls of a starting server.
const POLL_INTERVAL: Duration = Duration::from_millis(2);

/// Maximum number of polls of a starting server: 10 s, and more on a busy machine.
const MAX_POLLS: u32 = 5_000;

/// Maximum number of ports tried.
const MAX_STARTS: u32 = 20;

/// Ports are drawn below the range of outgoing connections, so that no client occupies the port of a server while it
/// restarts.
const PORTS: std::ops::Range<u16> = 10_000..30_000;

/// The ports of cluster nodes: low enough that the bus, [`BUS_OFFSET`] higher, is within [`PORTS`] too.
const NODE_PORTS: std::ops::Range<u16> = 10_000..20_000;

/// Offset of the cluster bus port from the port of a node.
const BUS_OFFSET: u16 = 10_000;

/// Files that a server may write: snapshots, and append-only files of either layout.
const DATA_FILES: [&str; 3] = ["dump.rdb", "appendonly.aof", "appendonlydir"];

/// A server process used by one test. It ends on drop, even after a panic.
///
/// Dropping a running server calls [`Server::assert_every_key_expires`], unless the thread is panicking. A suspended
/// server is resumed for that. A test that ends with a server that cannot answer (paused, locked by a password) either
/// makes it answer again or ends it with [`Server::kill`].
#[derive(Debug)]
pub struct Server {
    setup: Setup,
    port: u16,
    /// Reserve the port numbers while the server is down. They are UDP sockets, so the TCP ports stay free for the
    /// server, and the kernel releases them no matter how the test ends.
    reservations: Vec<UdpSocket>,
    /// `None` once stopped.
    child: Option<Child>,
    certificates: Option<Certificates>,
    /// Contains the socket, the log and all files of the server; removed on drop.
    dir: TempDir,
}

impl Server {
    /// Starts a server that writes nothing to disk, and returns when it answers.
    ///
    /// # Panics
    ///
    /// When the program is missing or does not start.
    #[must_use]
    pub fn start(flavor: Flavor) -> Server {
        Setup::new(flavor).start()
    }

    /// Starts a server with additional command line arguments, such as `["--maxmemory", "2mb"]`.
    ///
    /// # Panics
    ///
    /// When the program is missing or does not start.
    #[must_use]
    pub fn start_with(flavor: Flavor, extra_args: &[&str]) -> Server {
        Setup::new(flavor).args(extra_args).start()
    }

    fn from_setup(setup: Setup) -> Server {
        let flavor = setup.flavor;
        let dir = tempfile::Builder::new().prefix("sluicegate-").tempdir().expect("a temporary directory");
        let certificates = setup.tls.map(|_| {
            assert_eq!(flavor, Flavor::Redis7, "{flavor} is built without TLS: use {}", Flavor::Redis7);
            let shared = setup.certificates.clone();
            shared.unwrap_or_else(|| Certificates::issue(dir.path(), ip(setup.side.as_ref()).into()))
        });
        if let Role::Sentinel(config) = &setup.role {
            fs::write(dir.path().join("config"), config)
                .expect("a configuration file in the server's directory");
        }
        let mut server = Server { setup, port: 0, reservations: Vec::new(), child: None, certificates, dir };

        // A port is known to be free only once the server has bound it; any earlier probe would be a race.
        let mut failure = String::from("every drawn port is reserved by another test");
        for _ in 0..MAX_STARTS {
            if server.reserve_ports().is_err() {
                continue;
            }
            match server.launch(&[], READY) {
                Ok(()) => return server,
                Err(reason) => failure = reason,
            }
        }
        panic!("{flavor} did not start on any of {MAX_STARTS} ports; the last attempt: {failure}");
    }

    /// Draws the port of the server and reserves it against other tests.
    fn reserve_ports(&mut self) -> std::io::Result<()> {
        let is_node = self.setup.role == Role::ClusterNode;
        self.reservations.clear();
        self.port = rand::random_range(if is_node { NODE_PORTS } else { PORTS });
        self.reservations.push(UdpSocket::bind((Ipv4Addr::LOCALHOST, self.port))?);
        if is_node {
            self.reservations.push(UdpSocket::bind((Ipv4Addr::LOCALHOST, self.port + BUS_OFFSET))?);
        }
        Ok(())
    }

    /// Returns the flavor of the server.
    #[must_use]
    pub fn flavor(&self) -> Flavor {
        self.setup.flavor
    }

    /// Returns the TCP port, which does not change on restart.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Returns the TCP address, which does not change on restart: on loopback, or in the namespace of the server.
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        SocketAddr::from((ip(self.setup.side.as_ref()), self.port))
    }

    /// Returns the URL, `redis://127.0.0.1:port`, or `rediss` if the port uses TLS.
    #[must_use]
    pub fn url(&self) -> String {
        let scheme = if self.certificates.is_some() { "rediss" } else { "redis" };
        format!("{scheme}://{}", self.addr())
    }

    /// Returns the files that a client needs to connect with TLS.
    ///
    /// # Panics
    ///
    /// When the server was started without [`Setup::tls`].
    #[must_use]
    pub fn tls(&self) -> &Certificates {
        self.certificates.as_ref().expect("a server that was started with TLS")
    }

    /// Returns the path of the unix socket.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("s")
    }

    /// Returns the process id, for signals.
    ///
    /// # Panics
    ///
    /// When the server was stopped.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.as_ref().expect("a stopped server has no process").id()
    }

    /// Returns whether the process exists, even if it cannot answer.
    #[must_use]
    pub fn is_running(&self) -> bool {
        self.child.is_some()
    }

    /// Opens a blocking connection whose calls time out after 5 s. It uses the unix socket, which no network fault and
    /// no certificate affects.
    ///
    /// # Panics
    ///
    /// When the server does not answer.
    #[must_use]
    pub fn connection(&self) -> redis::Connection {
        self.try_connection().unwrap_or_else(|error| panic!("{self} does not answer: {error}"))
    }

    /// Opens such a connection to a server that may not answer.
    ///
    /// # Errors
    ///
    /// The error of the client.
    pub fn try_connection(&self) -> RedisResult<redis::Connection> {
        let mut settings = RedisConnectionInfo::default();
        if let Some(password) = &self.setup.password {
            settings = settings.set_password(password);
        }
        let info = ConnectionAddr::Unix(self.socket()).into_connection_info()?.set_redis_settings(settings);
        let connection = redis::Client::open(info)?.get_connection_with_timeout(ANSWER_DEADLINE)?;
        connection.set_read_timeout(Some(ANSWER_DEADLINE))?;
        connection.set_write_timeout(Some(ANSWER_DEADLINE))?;
        Ok(connection)
    }

    /// Kills the process with SIGKILL and waits until it has ended. Data in memory is lost.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            // An error means that the process has ended already.
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Restarts the server without data, with the same port, socket, directory and arguments, and kills it first if it
    /// runs. Cluster nodes and sentinels keep their configuration files.
    ///
    /// # Panics
    ///
    /// When it does not start.
    pub fn restart(&mut self) {
        self.kill();
        for name in DATA_FILES {
            let path = self.dir.path().join(name);
            // Most of them do not exist.
            let _ = fs::remove_file(&path).or_else(|_| fs::remove_dir_all(&path));
        }
        self.relaunch(&[], READY);
    }

    /// Writes a snapshot of all data, for [`Server::restart_with_data`].
    ///
    /// # Panics
    ///
    /// When the server does not answer.
    pub fn save(&self) {
        self.query::<()>(&redis::cmd("SAVE"));
    }

    /// Returns the path that [`Server::save`] writes to.
    pub(crate) fn snapshot(&self) -> PathBuf {
        self.dir.path().join(DATA_FILES[0])
    }

    /// Restarts the server with the data of the last [`Server::save`], and kills it first if it runs.
    ///
    /// # Panics
    ///
    /// When it does not start.
    pub fn restart_with_data(&mut self) {
        self.relaunch(&[], READY);
    }

    /// Restarts the server with its saved data, and returns when it has begun to load. The arguments apply to this
    /// start only.
    pub(crate) fn relaunch_into_loading(&mut self, once: &[&str]) {
        self.relaunch(once, LOADING);
    }

    fn relaunch(&mut self, once: &[&str], awaited: &[&Answer]) {
        self.kill();
        self.launch(once, awaited).unwrap_or_else(|failure| panic!("{self} did not restart: {failure}"));
    }

    /// Sends one command, and returns its reply.
    ///
    /// # Panics
    ///
    /// When the server does not answer or replies with an error.
    pub(crate) fn query<T: FromRedisValue>(&self, command: &redis::Cmd) -> T {
        let reply = command.query(&mut self.connection());
        reply.unwrap_or_else(|error| panic!("{self} replied with an error: {error}"))
    }

    /// Sends one command, and returns the result.
    pub(crate) fn try_query<T: FromRedisValue>(&self, command: &redis::Cmd) -> RedisResult<T> {
        command.query(&mut self.try_connection()?)
    }

    /// Starts the process on `self.port` and waits for the expected answer. An error contains the log.
    fn launch(&mut self, once: &[&str], awaited: &[&Answer]) -> Result<(), String> {
        let program = self.setup.flavor.program();
        let log_path = self.dir.path().join("log");
        let log = File::create(&log_path).expect("a log file in the server's directory");
        let socket = self.socket();
        // A socket left by a killed server refuses connections, and must not be mistaken for the new one.
        let _ = fs::remove_file(&socket);

        let mut command = Command::new(&program);
        command
            .args(self.arguments())
            .args(once)
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("a second handle of the log"))
            .stderr(log);
        let spawned = match &self.setup.side {
            None => command.spawn(),
            Some(side) => side.run(move || command.spawn()),
        };
        let child = spawned.unwrap_or_else(|error| match error.kind() {
            ErrorKind::NotFound => {
                panic!("{} is missing ({}): run scripts/servers", self.setup.flavor, program.display())
            }
            _ => panic!("{} cannot be run ({}): {error}", self.setup.flavor, program.display()),
        });

        let outcome = wait_for_answer(self.child.insert(child), &socket, awaited);
        outcome.map_err(|reason| {
            self.kill();
            let log = fs::read(&log_path).unwrap_or_default();
            format!("{reason}; its log:\n{}", String::from_utf8_lossy(&log))
        })
    }

    fn arguments(&self) -> Vec<String> {
        let Setup { args, password, tls, side, role, .. } = &self.setup;
        let mut line: Vec<String> = Vec::new();
        let mut add = |words: &[&str]| line.extend(words.iter().map(ToString::to_string));
        let path = |name: &str| self.dir.path().join(name).display().to_string();
        let port = self.port.to_string();

        match role {
            Role::Sentinel(_) => add(&[&path("config"), "--sentinel"]),
            Role::ClusterNode => add(&["--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf"]),
            Role::Store => {}
        }
        match (tls, &self.certificates) {
            (Some(clients), Some(files)) => {
                add(&["--port", "0", "--tls-port", &port]);
                add(&["--tls-ca-cert-file", &files.authority.display().to_string()]);
                add(&["--tls-cert-file", &files.server_certificate.display().to_string()]);
                add(&["--tls-key-file", &files.server_key.display().to_string()]);
                // For connections to other servers.
                add(&["--tls-client-cert-file", &files.client_certificate.display().to_string()]);
                add(&["--tls-client-key-file", &files.client_key.display().to_string()]);
                add(&["--tls-auth-clients", clients.setting()]);
            }
            _ => add(&["--port", &port]),
        }
        match side {
            None => add(&["--bind", "127.0.0.1"]),
            // Only the other side of the link can reach it.
            Some(side) => add(&["--bind", "127.0.0.1", &side.ip().to_string(), "--protected-mode", "no"]),
        }
        add(&["--unixsocket", &path("s"), "--dir", &path("")]);
        if !matches!(role, Role::Sentinel(_)) {
            add(&["--save", "", "--appendonly", "no"]);
        }
        if let Some(password) = password {
            add(&["--requirepass", password]);
        }
        line.extend(args.iter().cloned());
        line
    }
}

/// Formats the server for messages: `Redis 7 on port 12345`.
impl Display for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let role = match self.setup.role {
            Role::Sentinel(_) => " sentinel",
            Role::Store | Role::ClusterNode => "",
        };
        write!(f, "{}{role} on port {}", self.setup.flavor, self.port)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let alive = self.child.as_mut().is_some_and(|child| matches!(child.try_wait(), Ok(None)));
        let holds_keys = !matches!(self.setup.role, Role::Sentinel(_));
        let verdict = if alive && holds_keys && !thread::panicking() {
            self.resume();
            self.check_every_key_expires()
        } else {
            Ok(())
        };
        // The process ends before the panic, so a failed check leaves nothing running.
        self.kill();
        verdict.unwrap_or_else(|message| panic!("{message}"));
    }
}

/// Returns the address of a server on this side, or on loopback.
fn ip(side: Option<&Side>) -> Ipv4Addr {
    side.map_or(Ipv4Addr::LOCALHOST, Side::ip)
}

/// The first bytes of the answer to `PING`.
type Answer = [u8; 5];

/// Answers of a server that is ready; it may require a password.
const READY: &[&Answer] = &[b"+PONG", b"-NOAU"];

/// Answers of a server that is loading its data.
const LOADING: &[&Answer] = &[b"-LOAD"];

/// Polls until the server answers on its socket. It opens the socket after the port, so an answer means that the port
/// is its own. An answer on the port might come from another server.
#[expect(
    clippy::disallowed_methods,
    reason = "another process starts in real time and sends no notification"
)]
fn wait_for_answer(child: &mut Child, socket: &Path, awaited: &[&Answer]) -> Result<(), String> {
    for _ in 0..MAX_POLLS {
        if let Ok(Some(status)) = child.try_wait() {
            return Err(format!("it ended with {status}"));
        }
        if ping(socket).is_ok_and(|answer| awaited.contains(&&answer)) {
            return Ok(());
        }
        thread::sleep(POLL_INTERVAL);
    }
    Err(format!("it did not answer in {MAX_POLLS} polls"))
}

fn ping(socket: &Path) -> std::io::Result<Answer> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(ANSWER_DEADLINE))?;
    stream.write_all(b"PING\r\n")?;
    let mut answer = [0; 5];
    stream.read_exact(&mut answer)?;
    Ok(answer)
}
