//! A shell in its own network namespace, where every port is free, for the unchanged commands of a page.
//!
//! `sluicegate` is the program of this build. `sluicegate serve` continues in the background, as in another terminal, until it
//! is started again or the session ends.

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
use sluicegate_testkit::wait;
use tempfile::TempDir;

use super::markdown::root;

/// The time limit of one command, long enough for a busy machine.
const PATIENCE: Duration = Duration::from_secs(120);

/// The Python packages of the pages, relative to the root: a Redis client, the Python client, and the web frameworks.
const PYTHON_PACKAGES: [&str; 3] = [".servers/redis-py", "clients/python/src", ".servers/python-client"];
/// The Node client, relative to the root.
const NODE_MODULES: &str = ".servers/ioredis/node_modules";

/// The directories of the repository that pages may use.
const CHECKED_OUT: &[&str] = &["docs", "deploy"];

pub(crate) struct Session {
    shell: Child,
    input: ChildStdin,
    done: Receiver<String>,
    /// `work` is the working directory, `bin` contains the stubs, `state` the state of running programs.
    directory: TempDir,
}

/// The result of a script.
pub(crate) struct ScriptResult {
    pub(crate) status: i32,
    /// The first command that failed.
    pub(crate) failed: Option<String>,
    /// Standard output and standard error.
    pub(crate) output: String,
}

impl Session {
    pub(crate) fn start() -> Self {
        let directory = tempfile::tempdir().unwrap();
        for name in ["work", "bin", "state"] {
            fs::create_dir(directory.path().join(name)).unwrap();
        }
        install_stub(directory.path(), "sluicegate", include_str!("stubs/sluicegate"));
        install_stub(directory.path(), "cargo", include_str!("stubs/cargo"));
        install_stub(directory.path(), "redis-cli", include_str!("stubs/redis-cli"));
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
            if name.to_string_lossy().starts_with("SLUICEGATE_") {
                command.env_remove(name);
            }
        }
        let path = std::env::var("PATH").unwrap();
        command.env("PATH", format!("{}:{path}:/usr/sbin:/sbin", directory.path().join("bin").display()));
        command.env("OTHERS", path).env("ROOT", root().canonicalize().unwrap());
        command.env("STATE", directory.path().join("state"));
        command.env("REAL", env!("CARGO_BIN_EXE_sluicegate"));
        let packages = PYTHON_PACKAGES.map(|path| {
            let found = root().join(path).canonicalize();
            let found = found.unwrap_or_else(|error| panic!("{path}: {error}; run scripts/servers"));
            found.display().to_string()
        });
        command.env("PYTHONPATH", packages.join(":"));
        command.env("PYTHONDONTWRITEBYTECODE", "1");
        // on a machine that is busy with tests, a shorter deadline would apply failure policies
        command.env("SLUICEGATE_STORE_DEADLINE", "5s");
        for name in ["XDG_CONFIG_HOME", "XDG_DATA_HOME"] {
            command.env(name, directory.path().join("state"));
        }
        // modules are resolved from the working directory, not from the targets of links
        command.env("NODE_OPTIONS", "--preserve-symlinks --preserve-symlinks-main");
        // its process group is killed with it
        command.process_group(0).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut shell = command.spawn().expect("unshare is missing: install util-linux");

        let input = shell.stdin.take().unwrap();
        let lines = BufReader::new(shell.stdout.take().unwrap());
        let (sender, done) = mpsc::channel();
        thread::spawn(move || lines.lines().map_while(Result::ok).try_for_each(|line| sender.send(line)));
        let mut session = Self { shell, input, done, directory };
        let ran = session.run("ip link set lo up");
        assert_eq!(ran.status, 0, "cannot create a network namespace (are you root?): {}", ran.output);
        session
    }

    /// Returns the working directory.
    pub(crate) fn work(&self) -> PathBuf {
        self.directory.path().join("work")
    }

    /// Writes a file to the working directory.
    pub(crate) fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.work().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, text).unwrap();
        path
    }

    /// Runs commands in the shell, which keeps variables and functions.
    pub(crate) fn run(&mut self, script: &str) -> ScriptResult {
        let state = self.directory.path().join("state");
        let of_state = |name: &str| fs::read_to_string(state.join(name)).unwrap_or_default();
        fs::write(state.join("step"), script).unwrap();
        fs::write(state.join("failed"), "").unwrap();
        let line = "set -E; trap 'printf \"%s\\n\" \"$BASH_COMMAND\" >>\"$STATE/failed\"' ERR; \
                    . \"$STATE/step\" >\"$STATE/output\" 2>&1 </dev/null; echo $?; trap - ERR\n";
        self.input.write_all(line.as_bytes()).unwrap();
        self.input.flush().unwrap();
        let status = self.done.recv_timeout(PATIENCE).unwrap_or_else(|_| {
            panic!("the script does not end, or ends the shell:\n{script}\noutput:\n{}", of_state("output"))
        });
        let failed = of_state("failed").lines().next().map(str::to_owned);
        ScriptResult { status: status.parse().unwrap(), failed, output: of_state("output") }
    }

    /// Runs a script that must succeed.
    fn prepare(&mut self, script: &str) {
        let ran = self.run(script);
        assert_eq!(ran.status, 0, "{script}: {}", ran.output);
    }

    /// Starts a server with the configuration of the page, if none runs.
    pub(crate) fn need_server(&mut self) {
        self.prepare("[ -n \"$(ls \"$STATE\"/*.serving 2>/dev/null)\" ] || sluicegate serve");
    }

    /// Starts a Redis on its default port, if none runs.
    pub(crate) fn need_redis(&mut self) {
        self.prepare(
            "redis-cli ping >/dev/null 2>&1 || {
                redis-server --port 6379 --save '' --appendonly no --dir \"$STATE\" >\"$STATE/redis\" 2>&1 &
                for _ in $(seq 500); do redis-cli ping >/dev/null 2>&1 && break; sleep 0.02; done
                redis-cli ping
            }",
        );
    }

    /// Returns the reload metrics of the server at the default address; `None` if none runs.
    pub(crate) fn reloads(&mut self) -> Option<String> {
        let ran =
            self.run("curl -s 127.0.0.1:8080/metrics | grep '^sluicegate_config_reloads_total' || true");
        Some(ran.output).filter(|output| !output.is_empty())
    }

    /// Waits until the reload metrics change.
    pub(crate) fn await_reload(&mut self, before: &str) {
        wait::until("the server has read its changed configuration", PATIENCE, || {
            self.reloads().is_some_and(|now| now != before)
        });
    }

    /// Waits until each port in a background command accepts connections.
    pub(crate) fn await_background(&mut self, script: &str) {
        static PORT: LazyLock<Regex> = LazyLock::new(|| Regex::new(r"\b\d{4,5}\b").unwrap());
        for line in script.lines().filter(|line| line.trim_end().ends_with('&')) {
            for port in PORT.find_iter(line) {
                let connect = format!("(exec 3<>/dev/tcp/127.0.0.1/{}) 2>/dev/null || false", port.as_str());
                wait::until(format_args!("`{line}` listens"), PATIENCE, || self.run(&connect).status == 0);
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

/// Installs a script that replaces a program.
fn install_stub(directory: &Path, name: &str, text: &str) {
    let path = directory.join("bin").join(name);
    fs::write(&path, text).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
}
