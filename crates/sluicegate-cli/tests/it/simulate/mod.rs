//! `sluicegate simulate` with generated logs and known results.

#![expect(clippy::unwrap_used, reason = "a failing helper fails the test")]

mod decisions;
mod logs;
mod reports;

use std::{
    fs,
    io::Write,
    path::PathBuf,
    process::{Command, Output, Stdio},
};

use serde_json::Value;
use tempfile::TempDir;

/// A directory with logs and rules, in which the program runs.
struct TestDir {
    directory: TempDir,
}

impl TestDir {
    fn new() -> Self {
        Self { directory: TempDir::new().unwrap() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn write(&self, name: &str, content: impl AsRef<[u8]>) -> &Self {
        fs::write(self.path(name), content).unwrap();
        self
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_sluicegate"));
        command.arg("simulate").args(arguments).current_dir(self.directory.path());
        command.env_remove("SLUICEGATE_CONFIG");
        command
    }

    fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().unwrap()
    }

    /// Returns the text output.
    fn text(&self, arguments: &[&str]) -> String {
        printed(&self.run(arguments))
    }

    /// Returns the JSON output.
    fn json(&self, arguments: &[&str]) -> Value {
        let arguments: Vec<_> = arguments.iter().copied().chain(["--json"]).collect();
        serde_json::from_str(&self.text(&arguments)).unwrap()
    }

    /// Returns the JSON output, with data on the standard input.
    fn json_from_stdin(&self, arguments: &[&str], input: &[u8]) -> Value {
        let mut command = self.command(arguments);
        command.arg("--json").stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = command.spawn().unwrap();
        process.stdin.take().unwrap().write_all(input).unwrap();
        serde_json::from_str(&printed(&process.wait_with_output().unwrap())).unwrap()
    }

    /// Runs a failing simulation; returns the error message.
    fn error(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        String::from_utf8(output.stderr).unwrap()
    }
}

fn printed(output: &Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// One request of a generated log.
#[derive(Clone, Debug)]
struct Hit {
    second: u64,
    ip: String,
    path: String,
}

impl Hit {
    fn new(second: u64, ip: &str, path: &str) -> Self {
        Self { second, ip: ip.to_owned(), path: path.to_owned() }
    }

    fn combined(&self) -> String {
        let Self { ip, path, .. } = self;
        let time = self.time("%d/%b/%Y:%H:%M:%S +0000");
        format!("{ip} - - [{time}] \"GET {path}?q=1 HTTP/1.1\" 200 12 \"-\" \"test\"\n")
    }

    fn time(&self, format: &str) -> String {
        let at = jiff::Timestamp::from_second(i64::try_from(START + self.second).unwrap()).unwrap();
        at.strftime(format).to_string()
    }
}

/// The start of generated logs, at a full minute.
const START: u64 = 1_794_804_840;

fn combined(hits: &[Hit]) -> String {
    hits.iter().map(Hit::combined).collect()
}

/// A reproducible pseudorandom sequence.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }
}

/// Generates bursty traffic of a few addresses on a few paths.
fn traffic(seed: u64, count: usize) -> Vec<Hit> {
    let mut random = Random(seed);
    let mut second = 0;
    let hit = |_| {
        if random.below(4) == 0 {
            second += random.below(5);
        }
        let ip = format!("203.0.113.{}", random.below(6));
        let path = ["/login", "/search", "/static/logo.svg"][random.below(3) as usize];
        Hit::new(second, &ip, path)
    };
    (0..count).map(hit).collect()
}

/// Returns the report of a rule.
fn rule<'v>(file: &'v Value, name: &str) -> &'v Value {
    let rules = file["rules"].as_array().unwrap();
    rules.iter().find(|rule| rule["name"] == name).unwrap_or_else(|| panic!("no rule {name} in {file}"))
}
