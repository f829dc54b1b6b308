//! Faults of a running [`Server`], caused by signals and commands. A fault is in effect when its method returns, and most faults have
//! a method that ends them.
//!
//! For network faults, see [`crate::proxy`] and [`crate::namespace`].

use std::fmt::Display;
use std::fs;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};

use crate::server::Server;
use crate::wait;

/// The commands that [`Server::pause_clients`] pauses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PausedCommands {
    /// Every command, including the one that ends the pause.
    All,
    /// Commands that may write.
    Writes,
}

/// Number of keys that [`Server::restart_into_loading`] adds, and load time of each in microseconds: 25 s in total.
const FILLER_KEYS: u32 = 5_000;
const FILLER_LOAD_MICROS: u32 = 5_000;

impl Server {
    /// Stops the process with SIGSTOP: the kernel still accepts connections and bytes, but the server does not answer.
    ///
    /// # Panics
    ///
    /// When it does not run.
    pub fn suspend(&self) {
        self.signal(Signal::STOP);
        // The signal takes effect when the process is next scheduled; until then it could answer.
        let stopped = waitid(WaitId::Pid(self.process()), WaitIdOptions::STOPPED | WaitIdOptions::NOWAIT);
        stopped.unwrap_or_else(|error| panic!("{self} cannot be watched: {error}"));
    }

    /// Resumes a suspended process with SIGCONT. It then executes the requests that have arrived.
    ///
    /// # Panics
    ///
    /// When it does not run.
    pub fn resume(&self) {
        self.signal(Signal::CONT);
    }

    fn signal(&self, signal: Signal) {
        let sent = kill_process(self.process(), signal);
        sent.unwrap_or_else(|error| panic!("{self} cannot be sent {signal:?}: {error}"));
    }

    fn process(&self) -> Pid {
        let pid = i32::try_from(self.pid()).ok().and_then(Pid::from_raw);
        pid.expect("a process id of the kernel")
    }

    /// Pauses commands of clients with `CLIENT PAUSE`. A pause of all commands cannot be ended early.
    pub fn pause_clients(&self, lasting: Duration, paused: PausedCommands) {
        let mut command = redis::cmd("CLIENT");
        command.arg("PAUSE").arg(u64::try_from(lasting.as_millis()).unwrap_or(u64::MAX));
        self.query::<()>(command.arg(paused.name()));
    }

    /// Ends a pause of writes, or waits for the end of a pause of all commands.
    pub fn unpause_clients(&self) {
        self.query::<()>(redis::cmd("CLIENT").arg("UNPAUSE"));
    }

    /// Closes the connections of all clients, including subscribers, and returns their number.
    pub fn kill_clients(&self) -> u64 {
        let mut killed = 0;
        for kind in ["normal", "pubsub"] {
            let mut command = redis::cmd("CLIENT");
            killed += self.query::<u64>(command.arg("KILL").arg("TYPE").arg(kind));
        }
        killed
    }

    /// Changes a setting, such as `maxmemory` or `min-replicas-to-write`.
    ///
    /// # Panics
    ///
    /// When the server rejects it.
    pub fn config_set(&self, name: &str, value: impl Display) {
        self.query::<()>(redis::cmd("CONFIG").arg("SET").arg(name).arg(value.to_string()));
    }

    /// Returns a setting.
    ///
    /// # Panics
    ///
    /// When the server has no such setting.
    #[must_use]
    pub fn config_get(&self, name: &str) -> String {
        let answer: Vec<String> = self.query(redis::cmd("CONFIG").arg("GET").arg(name));
        answer.into_iter().nth(1).unwrap_or_else(|| panic!("{self} has no setting {name}"))
    }

    /// Returns a field of `INFO`, such as `run_id` or `evicted_keys`.
    ///
    /// # Panics
    ///
    /// When the server has no such field.
    #[must_use]
    pub fn info(&self, field: &str) -> String {
        let info: String = self.query(redis::cmd("INFO").arg("all"));
        info_field(&info, field).unwrap_or_else(|| panic!("{self} has no field {field}"))
    }

    /// Returns a field of `INFO`, or `None` if the server does not answer or has no such field.
    pub(crate) fn try_info(&self, field: &str) -> Option<String> {
        let info: String = self.try_query(redis::cmd("INFO").arg("all")).ok()?;
        info_field(&info, field)
    }

    /// Creates or changes a user by the rules of `ACL SETUSER`, such as `["on", ">secret", "~sg1:*", "+get"]`.
    ///
    /// # Panics
    ///
    /// When the server rejects the rules.
    pub fn set_user(&self, name: &str, rules: &[&str]) {
        self.query::<()>(redis::cmd("ACL").arg("SETUSER").arg(name).arg(rules));
    }

    /// Makes the server a replica, and returns when it is synchronized with its primary.
    ///
    /// # Panics
    ///
    /// When replication does not start.
    pub fn replicate(&self, primary: &Server) {
        // By default the primary waits 5 s for other replicas to join the transfer.
        primary.config_set("repl-diskless-sync-delay", 0);
        let addr = primary.addr();
        self.query::<()>(redis::cmd("REPLICAOF").arg(addr.ip().to_string()).arg(addr.port()));
        self.wait_for_link();
    }

    /// Waits until a replica is synchronized with its primary.
    pub(crate) fn wait_for_link(&self) {
        wait::until(format!("{self} is synchronized with its primary"), wait::PATIENCE, || {
            self.try_info("master_link_status").is_some_and(|status| status == "up")
        });
    }

    /// Makes a replica a primary.
    pub fn promote(&self) {
        self.query::<()>(redis::cmd("REPLICAOF").arg("NO").arg("ONE"));
    }

    /// Returns whether the server reports the role of a primary; `false` if it does not answer.
    #[must_use]
    pub fn is_primary(&self) -> bool {
        self.try_info("role").is_some_and(|role| role == "master")
    }

    /// Removes all cached scripts.
    pub fn flush_scripts(&self) {
        self.query::<()>(redis::cmd("SCRIPT").arg("FLUSH"));
    }

    /// Runs an endless script: every other command is answered with `BUSY`.
    ///
    /// # Panics
    ///
    /// When the server requires a password or does not become busy.
    pub fn make_busy(&self) {
        // The old name of the setting, which all flavors accept.
        self.config_set("lua-time-limit", 1);
        let sent = UnixStream::connect(self.socket())
            .and_then(|mut stream| stream.write_all(b"EVAL \"while true do end\" 0\r\n").map(|()| stream));
        // The script continues after its client disconnects.
        drop(sent.unwrap_or_else(|error| panic!("{self} cannot be reached: {error}")));
        wait::until(format!("{self} is busy"), wait::PATIENCE, || self.replies_with_error("BUSY"));
    }

    /// Ends the script of [`Server::make_busy`].
    pub fn end_busy(&self) {
        self.query::<()>(redis::cmd("SCRIPT").arg("KILL"));
        wait::until(format!("{self} is no longer busy"), wait::PATIENCE, || !self.replies_with_error("BUSY"));
    }

    /// Makes saving fail, so that the server rejects every write with `MISCONF`.
    ///
    /// # Panics
    ///
    /// When saving still succeeds.
    pub fn break_saving(&self) {
        // A file cannot be renamed over a directory, not even by root.
        fs::create_dir(self.snapshot()).expect("a directory in the place of the snapshot");
        // `MISCONF` requires periodic saving to be configured.
        self.config_set("save", "3600 1");
        self.query::<()>(&redis::cmd("BGSAVE"));
        wait::until(format!("{self} fails to save"), wait::PATIENCE, || {
            self.info("rdb_last_bgsave_status") == "err"
        });
    }

    /// Makes saving and writes succeed again.
    pub fn restore_saving(&self) {
        fs::remove_dir(self.snapshot()).expect("saving was broken before");
        self.config_set("save", "");
        self.save();
    }

    /// Restarts the server with its data, and returns while it is loading: it answers `LOADING` for up to 25 s or until
    /// [`Server::finish_loading`]. Adds keys to load, which expire within an hour.
    ///
    /// # Panics
    ///
    /// When the server does not answer, or cannot load slowly (Redis 6.2).
    pub fn restart_into_loading(&mut self) {
        let mut fill = redis::pipe();
        for number in 0..FILLER_KEYS {
            let key = format!("sluicegate-testkit:filler:{number}");
            fill.cmd("SET").arg(key).arg("x".repeat(1_024)).arg("EX").arg(3_600).ignore();
        }
        let filled = fill.exec(&mut self.connection());
        filled.unwrap_or_else(|error| panic!("{self} cannot be filled: {error}"));
        self.save();
        self.relaunch_into_loading(&[
            "--key-load-delay",
            &FILLER_LOAD_MICROS.to_string(),
            // While loading, it handles clients only after this many bytes. The filler compresses well.
            "--loading-process-events-interval-bytes",
            "1024",
        ]);
    }

    /// Ends the slow loading of [`Server::restart_into_loading`].
    pub fn finish_loading(&self) {
        self.config_set("key-load-delay", 0);
        wait::until(format!("{self} has loaded its data"), wait::PATIENCE, || {
            !self.replies_with_error("LOADING")
        });
    }

    /// Returns whether a read-only command is answered with this error.
    fn replies_with_error(&self, code: &str) -> bool {
        let answer = self.try_query::<u64>(&redis::cmd("DBSIZE"));
        answer.is_err_and(|error| error.code() == Some(code))
    }
}

impl PausedCommands {
    fn name(self) -> &'static str {
        match self {
            PausedCommands::All => "ALL",
            PausedCommands::Writes => "WRITE",
        }
    }
}

pub(crate) fn info_field(info: &str, field: &str) -> Option<String> {
    let mut fields = info.lines().filter_map(|line| line.split_once(':'));
    fields.find(|(name, _)| *name == field).map(|(_, value)| value.to_string())
}
