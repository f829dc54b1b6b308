//! A server process with a directory for its configuration. It is killed at the end of the test.

#![expect(clippy::unwrap_used, reason = "a failing helper fails the test")]

use std::{
    fs,
    io::{BufRead, BufReader, Read},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    thread,
};

use sluicegate_testkit::wait::{self, PATIENCE};
use tempfile::TempDir;

use crate::http_client::Client;

/// Every front end on a free port.
pub(crate) const ANY_PORTS: &str =
    "[server]\nhttp = \"127.0.0.1:0\"\ngrpc = \"127.0.0.1:0\"\nresp = \"127.0.0.1:0\"\n";

/// A directory with a configuration.
pub(crate) struct ConfigDir {
    directory: TempDir,
    writes: AtomicU64,
}

/// A running server.
pub(crate) struct ServerProcess {
    process: Child,
    stdout: Arc<Mutex<String>>,
    log: Arc<Mutex<String>>,
    pub(crate) http: String,
    pub(crate) grpc: String,
    pub(crate) resp: String,
}

impl ConfigDir {
    pub(crate) fn new(configuration: &str) -> Self {
        let home = Self { directory: tempfile::tempdir().unwrap(), writes: AtomicU64::new(0) };
        home.write("sluicegate.toml", configuration);
        home
    }

    pub(crate) fn path(&self) -> &Path {
        self.directory.path()
    }

    /// Replaces a file by renaming, as editors and tools do.
    pub(crate) fn write(&self, name: &str, text: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path().join(name);
        let new = self.path().join(format!("{name}.new{}", self.writes.fetch_add(1, Ordering::Relaxed)));
        fs::write(&new, text).unwrap();
        fs::rename(new, &path).unwrap();
        path
    }

    /// The command that starts a server here.
    pub(crate) fn serve(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_sluicegate"));
        command.arg("serve").current_dir(self.path());
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("SLUICEGATE_") {
                command.env_remove(name);
            }
        }
        command
    }

    pub(crate) fn start(&self) -> ServerProcess {
        ServerProcess::start(&mut self.serve())
    }
}

impl ServerProcess {
    /// Starts the server and waits until it listens.
    pub(crate) fn start(command: &mut Command) -> Self {
        let mut program = Self::start_with_unread_log(command);
        program.read_log();
        program
    }

    /// Starts the server and does not read its log until [`Self::read_log`].
    pub(crate) fn start_with_unread_log(command: &mut Command) -> Self {
        let mut process = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let stdout = collect(process.stdout.take().unwrap());
        wait::until("the server prints its addresses", PATIENCE, || {
            if let Some(status) = process.try_wait().unwrap() {
                let log = std::io::read_to_string(process.stderr.take().unwrap()).unwrap();
                panic!("the server ended with {status}: {log}");
            }
            stdout.lock().unwrap().contains("\nrules  ")
        });
        let startup = stdout.lock().unwrap().clone();
        let address = |start: &str| {
            let rest = startup.lines().find_map(|line| line.strip_prefix(start)).unwrap_or_default();
            rest.split_whitespace().next().unwrap_or_default().rsplit('/').next().unwrap().to_owned()
        };
        let (http, grpc, resp) = (address("sluicegate listening on "), address("grpc "), address("resp "));
        Self { process, stdout, log: Arc::default(), http, grpc, resp }
    }

    /// Starts to read the log.
    pub(crate) fn read_log(&mut self) {
        self.log = collect(self.process.stderr.take().unwrap());
    }

    /// A new connection to the HTTP front end.
    pub(crate) fn client(&self) -> Client {
        Client::connect(&self.http).unwrap()
    }

    /// Returns the response to a `GET`, on a new connection.
    pub(crate) fn get(&self, path: &str) -> (u16, String) {
        let response = self.client().get(path).unwrap();
        (response.status, response.body)
    }

    pub(crate) fn metric(&self, start: &str) -> String {
        let metrics = self.get("/metrics").1;
        let line = metrics.lines().find_map(|line| line.strip_prefix(start));
        line.unwrap_or_else(|| panic!("no {start} in {metrics}")).trim().to_owned()
    }

    pub(crate) fn signal(&self, signal: &str) {
        let id = self.process.id().to_string();
        assert!(Command::new("kill").args([signal, &id]).status().unwrap().success());
    }

    /// Returns the complete log.
    pub(crate) fn log(&self) -> String {
        self.log.lock().unwrap().clone()
    }

    pub(crate) fn wait_for_log(&self, part: &str) {
        wait::until(format_args!("{part:?} is logged"), PATIENCE, || self.log().contains(part));
    }

    /// Returns the first log line that contains both parts.
    pub(crate) fn wait_for_line(&self, one: &str, other: &str) -> String {
        wait::for_some(format_args!("{one:?} is logged with {other:?}"), PATIENCE, || {
            self.log().lines().find(|line| line.contains(one) && line.contains(other)).map(str::to_owned)
        })
    }

    /// Returns the standard output and the log.
    pub(crate) fn output(&self) -> String {
        format!("{}{}", self.stdout.lock().unwrap(), self.log())
    }

    /// Returns the peak memory of the process, in bytes.
    pub(crate) fn peak_memory(&self) -> usize {
        self.memory_status("VmHWM:")
    }

    /// Returns the resident memory of the process, in bytes.
    pub(crate) fn memory(&self) -> usize {
        self.memory_status("VmRSS:")
    }

    fn memory_status(&self, name: &str) -> usize {
        let status = fs::read_to_string(format!("/proc/{}/status", self.process.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        line.split_whitespace().next().unwrap().parse::<usize>().unwrap() << 10
    }

    /// Waits until the process ends.
    pub(crate) fn wait_for_exit(&mut self) -> ExitStatus {
        wait::for_some("the server ends", 2 * PATIENCE, || self.process.try_wait().unwrap())
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        // fails if it has already ended
        let _ = self.process.kill();
        let _ = self.process.wait();
        if thread::panicking() {
            eprintln!("{}", self.output());
        }
    }
}

/// Collects the lines of a pipe in the background.
fn collect(pipe: impl Read + Send + 'static) -> Arc<Mutex<String>> {
    let collected = Arc::<Mutex<String>>::default();
    let shared = Arc::clone(&collected);
    thread::spawn(move || {
        for line in BufReader::new(pipe).lines().map_while(Result::ok) {
            let mut text = shared.lock().unwrap();
            text.push_str(&line);
            text.push('\n');
        }
    });
    collected
}
