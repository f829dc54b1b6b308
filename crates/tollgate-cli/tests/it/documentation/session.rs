//! A shell in a network of its own, where every port is free: commands run there as the page has them.
//!
//! `tollgate` is the program of this build. As a reader would have it in another terminal, `tollgate serve` goes on in
//! the background once it serves, and ends when it is started again or the session ends.

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    os::unix::{
        fs::{PermissionsExt, symlink},
        process::CommandExt,
    },
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, Stdio},
    sync::{
        LazyLock,
        mpsc::{self, Receiver},
    },
    thread,
    time::Duration,
};

use regex::Regex;
use tempfile::TempDir;
use tollgate_testkit::wait;

use super::markdown::root;

/// How long one command may take, also on a busy machine.
const PATIENCE: Duration = Duration::from_secs(120);

/// What clients in Python and Node are found by, below the root.
const REDIS_PY: &str = ".servers/redis-py";
const NODE_MODULES: &str = ".servers/ioredis/node_modules";

/// What a page may take from the repository.
const CHECKED_OUT: &[&str] = &["docs", "deploy"];

pub(crate) struct Session {
    shell: Child,
    input: ChildStdin,
    done: Receiver<String>,
    /// `work` is where commands run; `bin` has what stands in for programs, `state` what is running.
    directory: TempDir,
}

/// What became of a command.
pub(crate) struct Ran {
    pub(crate) status: i32,
    /// The first command that failed.
    pub(crate) failed: Option<String>,
    /// Both outputs.
    pub(crate) said: String,
}

impl Session {
    pub(crate) fn start() -> Self {
        let directory = tempfile::tempdir().unwrap();
        for name in ["work", "bin", "state"] {
            fs::create_dir(directory.path().join(name)).unwrap();
        }
        stand_in(directory.path(), "tollgate", include_str!("stubs/tollgate"));
        stand_in(directory.path(), "cargo", include_str!("stubs/cargo"));
        stand_in(directory.path(), "redis-cli", include_str!("stubs/redis-cli"));
        let modules = root().join(NODE_MODULES).canonicalize();
        let modules = modules.unwrap_or_else(|error| panic!("{NODE_MODULES}: {error}; run scripts/servers"));
        symlink(modules, directory.path().join("work/node_modules")).unwrap();
        for name in CHECKED_OUT {
            symlink(root().canonicalize().unwrap().join(name), directory.path().join("work").join(name))
                .unwrap();
        }

        let mut command = Command::new("unshare");
        command.args(["--net", "--map-root-user", "bash", "--noprofile", "--norc"]);
        command.current_dir(directory.path().join("work"));
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("TOLLGATE_") {
                command.env_remove(name);
            }
        }
        let path = std::env::var("PATH").unwrap();
        command.env("PATH", format!("{}:{path}:/usr/sbin:/sbin", directory.path().join("bin").display()));
        command.env("OTHERS", path).env("ROOT", root().canonicalize().unwrap());
        command.env("STATE", directory.path().join("state"));
        command.env("REAL", env!("CARGO_BIN_EXE_tollgate"));
        command.env("PYTHONPATH", root().join(REDIS_PY).canonicalize().unwrap());
        command.env("PYTHONDONTWRITEBYTECODE", "1");
        // a machine that tests keep busy takes longer than 50 ms now and then, and policies would answer
        command.env("TOLLGATE_STORE_DEADLINE", "5s");
        for name in ["XDG_CONFIG_HOME", "XDG_DATA_HOME"] {
            command.env(name, directory.path().join("state"));
        }
        // modules are looked for where commands run, not where the links lead
        command.env("NODE_OPTIONS", "--preserve-symlinks --preserve-symlinks-main");
        // all that it starts ends with it
        command.process_group(0).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut shell = command.spawn().expect("unshare, of the package util-linux");

        let input = shell.stdin.take().unwrap();
        let output = BufReader::new(shell.stdout.take().unwrap());
        let (said, done) = mpsc::channel();
        thread::spawn(move || output.lines().map_while(Result::ok).try_for_each(|line| said.send(line)));
        let mut session = Self { shell, input, done, directory };
        let ran = session.run("ip link set lo up");
        assert_eq!(ran.status, 0, "no network of its own (are you root?): {}", ran.said);
        session
    }

    /// Where commands run.
    pub(crate) fn work(&self) -> PathBuf {
        self.directory.path().join("work")
    }

    /// Writes a file where commands run.
    pub(crate) fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.work().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, text).unwrap();
        path
    }

    /// Runs commands in the shell, which remembers what they set.
    pub(crate) fn run(&mut self, script: &str) -> Ran {
        let state = self.directory.path().join("state");
        let of_state = |name: &str| fs::read_to_string(state.join(name)).unwrap_or_default();
        fs::write(state.join("step"), script).unwrap();
        fs::write(state.join("failed"), "").unwrap();
        let line = "set -E; trap 'printf \"%s\\n\" \"$BASH_COMMAND\" >>\"$STATE/failed\"' ERR; \
                    . \"$STATE/step\" >\"$STATE/said\" 2>&1 </dev/null; echo $?; trap - ERR\n";
        self.input.write_all(line.as_bytes()).unwrap();
        self.input.flush().unwrap();
        let status = self.done.recv_timeout(PATIENCE).unwrap_or_else(|_| {
            panic!("this does not end, or ends the shell:\n{script}\nit said:\n{}", of_state("said"))
        });
        let failed = of_state("failed").lines().next().map(str::to_owned);
        Ran { status: status.parse().unwrap(), failed, said: of_state("said") }
    }

    /// Runs what the page takes for granted.
    fn prepare(&mut self, script: &str) {
        let ran = self.run(script);
        assert_eq!(ran.status, 0, "{script}: {}", ran.said);
    }

    /// Makes sure that a server is there, as the page's own configuration has it, if it has one.
    pub(crate) fn need_server(&mut self) {
        self.prepare("[ -n \"$(ls \"$STATE\"/*.serving 2>/dev/null)\" ] || tollgate serve");
    }

    /// Makes sure that there is a Redis at its usual port.
    pub(crate) fn need_redis(&mut self) {
        self.prepare(
            "redis-cli ping >/dev/null 2>&1 || {
                redis-server --port 6379 --save '' --appendonly no --dir \"$STATE\" >\"$STATE/redis\" 2>&1 &
                for _ in $(seq 500); do redis-cli ping >/dev/null 2>&1 && break; sleep 0.02; done
                redis-cli ping
            }",
        );
    }

    /// How often the server at the usual address has read its configuration again; `None` where none runs.
    pub(crate) fn reloads(&mut self) -> Option<String> {
        let ran = self.run("curl -s 127.0.0.1:8080/metrics | grep '^tollgate_config_reloads_total' || true");
        Some(ran.said).filter(|said| !said.is_empty())
    }

    /// Waits until the server has read its configuration again since.
    pub(crate) fn await_reload(&mut self, before: &str) {
        wait::until("the server has read its changed configuration", PATIENCE, || {
            self.reloads().is_some_and(|now| now != before)
        });
    }

    /// Waits until something listens at each port that commands which go on in the background name.
    pub(crate) fn await_background(&mut self, script: &str) {
        static PORT: LazyLock<Regex> = LazyLock::new(|| Regex::new(r"\b\d{4,5}\b").unwrap());
        for line in script.lines().filter(|line| line.trim_end().ends_with('&')) {
            for port in PORT.find_iter(line) {
                let ask = format!("(exec 3<>/dev/tcp/127.0.0.1/{}) 2>/dev/null || false", port.as_str());
                wait::until(format_args!("`{line}` listens"), PATIENCE, || self.run(&ask).status == 0);
            }
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let group = format!("-{}", self.shell.id());
        let _ = Command::new("kill").args(["-KILL", "--", &group]).status();
        let _ = self.shell.wait();
    }
}

/// Puts a script in the place of a program.
fn stand_in(directory: &Path, name: &str, text: &str) {
    let path = directory.join("bin").join(name);
    fs::write(&path, text).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
}
