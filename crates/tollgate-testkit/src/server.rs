//! Real Redis and Valkey processes, one per [`Server`], each with a directory, a unix socket and a loopback port
//! of its own.
//!
//! A server that is dropped is first asked for keys that would never expire: a test that leaves one behind fails,
//! without having to say so. This module installs nothing (`scripts/servers` does), keeps no server between
//! tests and knows nothing of tollgate's keys or scripts.

use std::fmt::{self, Display};
use std::fs::{self, File};
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, UdpSocket};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use redis::RedisResult;
use tempfile::TempDir;

/// Bounds each wait for an answer of a server that runs.
const ANSWER_DEADLINE: Duration = Duration::from_secs(5);

/// Time between two looks at a server that is starting.
const POLL_INTERVAL: Duration = Duration::from_millis(2);

/// Bounds the start of a server: 10 s of polling and more on a busy machine.
const MAX_POLLS: u32 = 5_000;

/// Bounds the search for a free port.
const MAX_STARTS: u32 = 20;

/// Where ports are drawn from: below the range the kernel gives to outgoing connections, or a client could sit on
/// a server's port between its stop and its restart. A cluster's bus port, 10,000 higher, is valid too.
const PORTS: std::ops::Range<u16> = 10_000..30_000;

/// The servers tollgate is tested against.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Flavor {
    /// Redis 6.2, the oldest supported: no functions, no `EVAL_RO`.
    Redis6,
    /// Redis 7, as Debian packages it.
    Redis7,
    /// Valkey 9.
    Valkey9,
}

impl Flavor {
    /// Every flavor, oldest first.
    pub const ALL: [Flavor; 3] = [Flavor::Redis6, Flavor::Redis7, Flavor::Valkey9];

    /// Names the program: a path, or a name to look up in `PATH`.
    fn program(self) -> PathBuf {
        let servers = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.servers");
        match self {
            Flavor::Redis6 => servers.join("redis-6.2/redis-server"),
            Flavor::Redis7 => PathBuf::from("redis-server"),
            Flavor::Valkey9 => servers.join("valkey-9.1/valkey-server"),
        }
    }
}

impl Display for Flavor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Flavor::Redis6 => "Redis 6.2",
            Flavor::Redis7 => "Redis 7",
            Flavor::Valkey9 => "Valkey 9",
        })
    }
}

/// A server process that this test alone uses; it ends when the value is dropped.
///
/// Dropping a running server calls [`Server::assert_every_key_expires`], unless the thread is panicking already. A
/// test that ends with a server unable to answer (suspended, locked by a password) either makes it answer again
/// or ends it with [`Server::stop_hard`].
#[derive(Debug)]
pub struct Server {
    flavor: Flavor,
    extra_args: Vec<String>,
    port: u16,
    /// Keeps the number from other tests while the server is down: UDP, so it leaves the TCP port to the server, and
    /// the kernel releases it however the test ends.
    claim: Option<UdpSocket>,
    /// `None` once stopped.
    child: Option<Child>,
    /// Holds the socket, the log and whatever the server writes; removed on drop.
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
        Server::start_with(flavor, &[])
    }

    /// Starts a server with further command line arguments, such as `["--maxmemory", "2mb"]`.
    ///
    /// # Panics
    ///
    /// When the program is missing or does not start.
    #[must_use]
    pub fn start_with(flavor: Flavor, extra_args: &[&str]) -> Server {
        let dir = tempfile::Builder::new().prefix("tollgate-").tempdir().expect("a temporary directory");
        let extra_args = extra_args.iter().map(ToString::to_string).collect();
        let mut server = Server { flavor, extra_args, port: 0, claim: None, child: None, dir };

        // Whether a port is free is known only once the server holds it: any earlier probe races with others.
        let mut failure = String::from("every port drawn belongs to another test");
        for _ in 0..MAX_STARTS {
            server.port = rand::random_range(PORTS);
            server.claim = UdpSocket::bind((Ipv4Addr::LOCALHOST, server.port)).ok();
            if server.claim.is_none() {
                continue;
            }
            match server.launch() {
                Ok(()) => return server,
                Err(reason) => failure = reason,
            }
        }
        panic!("{flavor} did not start on any of {MAX_STARTS} ports; the last attempt: {failure}");
    }

    /// Returns which server this is.
    #[must_use]
    pub fn flavor(&self) -> Flavor {
        self.flavor
    }

    /// Returns the loopback TCP port, which a restart keeps.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Returns the address as clients want it, `redis://127.0.0.1:port`.
    #[must_use]
    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
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

    /// Opens a new blocking connection whose calls fail after 5 s without an answer.
    ///
    /// # Panics
    ///
    /// When the server does not answer.
    #[must_use]
    pub fn connection(&self) -> redis::Connection {
        self.try_connection().unwrap_or_else(|error| panic!("{self} does not answer: {error}"))
    }

    /// Kills the process with SIGKILL and waits until it is gone; what it held in memory is lost.
    pub fn stop_hard(&mut self) {
        if let Some(mut child) = self.child.take() {
            // An error means that it is gone already, which is what was wanted.
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Starts the server again, killing it before if it runs: same port, socket, directory and arguments.
    ///
    /// # Panics
    ///
    /// When it does not start.
    pub fn restart(&mut self) {
        self.stop_hard();
        self.launch().unwrap_or_else(|failure| panic!("{self} did not restart: {failure}"));
    }

    /// Asserts that each key, in every database, has a time to live.
    ///
    /// # Panics
    ///
    /// When some have none (the message lists them), or the server does not answer.
    pub fn assert_every_key_expires(&self) {
        self.check_every_key_expires().unwrap_or_else(|complaint| panic!("{complaint}"));
    }

    fn check_every_key_expires(&self) -> Result<(), String> {
        let keys = self.keys_without_ttl().map_err(|error| {
            format!(
                "{self} could not be asked for keys without a TTL: {error}; \
                 let it answer again before the test ends, or end it with stop_hard()"
            )
        })?;
        if keys.is_empty() {
            return Ok(());
        }
        Err(format!("{self} holds {} keys without a TTL: {}", keys.len(), keys.join(", ")))
    }

    fn keys_without_ttl(&self) -> RedisResult<Vec<String>> {
        let mut connection = self.try_connection()?;
        let keyspace: String = redis::cmd("INFO").arg("keyspace").query(&mut connection)?;
        // A line per database that is not empty: `db0:keys=1,expires=0,avg_ttl=0`.
        let databases = keyspace.lines().filter_map(|line| line.strip_prefix("db")?.split(':').next());

        let mut offenders = Vec::new();
        for database in databases {
            if database != "0" {
                redis::cmd("SELECT").arg(database).exec(&mut connection)?;
            }
            for key in scan(&mut connection)? {
                let ttl_millis: i64 = redis::cmd("PTTL").arg(&key).query(&mut connection)?;
                // -1 means no TTL. -2 is a key that has expired since the scan, 0 one in its last millisecond.
                if ttl_millis == -1 {
                    offenders.push(format!("{:?} in database {database}", String::from_utf8_lossy(&key)));
                }
            }
        }
        Ok(offenders)
    }

    fn try_connection(&self) -> RedisResult<redis::Connection> {
        let connection = redis::Client::open(self.url())?.get_connection_with_timeout(ANSWER_DEADLINE)?;
        connection.set_read_timeout(Some(ANSWER_DEADLINE))?;
        connection.set_write_timeout(Some(ANSWER_DEADLINE))?;
        Ok(connection)
    }

    /// Starts the process on `self.port` and waits until it answers, or says why it did not.
    fn launch(&mut self) -> Result<(), String> {
        let program = self.flavor.program();
        let log_path = self.dir.path().join("log");
        let log = File::create(&log_path).expect("a log file in the server's directory");
        let socket = self.socket();
        // What is left of a killed server: its own socket would refuse, but must not be taken for the new one.
        let _ = fs::remove_file(&socket);

        let child = Command::new(&program)
            .args(["--port", &self.port.to_string(), "--bind", "127.0.0.1"])
            .arg("--unixsocket")
            .arg(&socket)
            .arg("--dir")
            .arg(self.dir.path())
            .args(["--save", "", "--appendonly", "no"])
            .args(&self.extra_args)
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("a second handle of the log"))
            .stderr(log)
            .spawn()
            .unwrap_or_else(|error| match error.kind() {
                ErrorKind::NotFound => {
                    panic!("{} is missing ({}): run scripts/servers", self.flavor, program.display())
                }
                _ => panic!("{} cannot be run ({}): {error}", self.flavor, program.display()),
            });

        let outcome = wait_until_ready(self.child.insert(child), &socket);
        outcome.map_err(|reason| {
            self.stop_hard();
            let log = fs::read(&log_path).unwrap_or_default();
            format!("{reason}; its log:\n{}", String::from_utf8_lossy(&log))
        })
    }
}

/// Names the server as messages do: `Redis 7 on port 12345`.
impl Display for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} on port {}", self.flavor, self.port)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let alive = self.child.as_mut().is_some_and(|child| matches!(child.try_wait(), Ok(None)));
        let verdict = if alive && !thread::panicking() { self.check_every_key_expires() } else { Ok(()) };
        // First the process, then the panic: a failed check leaves nothing running.
        self.stop_hard();
        verdict.unwrap_or_else(|complaint| panic!("{complaint}"));
    }
}

/// Polls until the server answers on its socket. It opens the socket only after the port, so an answer means that
/// the port is its own, whereas an answer on the port might come from somebody else's server.
#[expect(clippy::disallowed_methods, reason = "another process starts in real time, and does not tell when")]
fn wait_until_ready(child: &mut Child, socket: &Path) -> Result<(), String> {
    for _ in 0..MAX_POLLS {
        if let Ok(Some(status)) = child.try_wait() {
            return Err(format!("it ended with {status}"));
        }
        if answers(socket) {
            return Ok(());
        }
        thread::sleep(POLL_INTERVAL);
    }
    Err(format!("it did not answer in {MAX_POLLS} polls"))
}

/// Tells whether a server is ready behind the socket. One that wants a password first is; one that is still
/// loading its data is not.
fn answers(socket: &Path) -> bool {
    let ping = || -> std::io::Result<[u8; 5]> {
        let mut stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(ANSWER_DEADLINE))?;
        stream.write_all(b"PING\r\n")?;
        let mut reply = [0; 5];
        stream.read_exact(&mut reply)?;
        Ok(reply)
    };
    ping().is_ok_and(|reply| &reply == b"+PONG" || &reply == b"-NOAU")
}

/// Lists every key of the selected database; some twice, as SCAN does.
fn scan(connection: &mut redis::Connection) -> RedisResult<Vec<Vec<u8>>> {
    let mut keys = Vec::new();
    let mut cursor = 0_u64;
    loop {
        let (next, page): (u64, Vec<Vec<u8>>) =
            redis::cmd("SCAN").arg(cursor).arg("COUNT").arg(1_000).query(connection)?;
        keys.extend(page);
        if next == 0 {
            return Ok(keys);
        }
        cursor = next;
    }
}
