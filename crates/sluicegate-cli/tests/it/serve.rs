//! `sluicegate serve` as a process: start, requests, errors, shutdown.

#![expect(clippy::unwrap_used, reason = "a failing helper fails the test")]

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    process::{Child, ChildStdout, Command, Output, Stdio},
    sync::mpsc,
    thread,
    time::Duration,
};

/// Timeout of each wait for the process.
const PATIENCE: Duration = Duration::from_secs(30);

/// A server process that is killed at the end of the test.
struct Server {
    process: Child,
    output: BufReader<ChildStdout>,
    address: String,
    welcome: Vec<String>,
}

fn sluicegate(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sluicegate"));
    command.args(arguments).env("SLUICEGATE_GRPC", "127.0.0.1:0").env("SLUICEGATE_RESP", "127.0.0.1:0");
    for other in ["SLUICEGATE_CONFIG", "SLUICEGATE_HTTP", "SLUICEGATE_STORE_URL", "SLUICEGATE_LOG"] {
        command.env_remove(other);
    }
    // a directory without a configuration
    command.current_dir(env!("CARGO_TARGET_TMPDIR"));
    command
}

impl Server {
    fn start(command: &mut Command) -> Self {
        let mut process = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut output = BufReader::new(process.stdout.take().unwrap());
        let mut welcome = Vec::new();
        while welcome.last().is_none_or(|line: &String| !line.contains("curl")) {
            let mut line = String::new();
            assert_ne!(output.read_line(&mut line).unwrap(), 0, "it ended: {welcome:?}");
            welcome.push(line.trim_end().to_owned());
        }
        let address = welcome[0].strip_prefix("sluicegate listening on http://").unwrap().to_owned();
        Self { process, output, address, welcome }
    }

    /// The response to the check that is suggested at startup.
    fn check(&self) -> String {
        let body = self.welcome.last().unwrap().split('\'').rev().nth(1).unwrap();
        let mut stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        write!(
            stream,
            "POST /v1/check HTTP/1.1\r\nhost: {}\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
            self.address,
            body.len()
        )
        .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
        answer.split_once("\r\n\r\n").unwrap().1.to_owned()
    }

    /// Sends a signal; returns the remaining output and the exit code.
    fn stop(mut self, signal: &str) -> (String, Option<i32>) {
        let id = self.process.id().to_string();
        assert!(Command::new("kill").args([signal, &id]).status().unwrap().success());
        let (done, ended) = mpsc::channel();
        thread::scope(|scope| {
            let output = &mut self.output;
            scope.spawn(move || {
                let mut last_words = String::new();
                output.read_to_string(&mut last_words).unwrap();
                done.send(last_words).unwrap();
            });
            let last_words = ended.recv_timeout(PATIENCE);
            if last_words.is_err() {
                self.process.kill().unwrap();
            }
            (last_words.expect("it does not stop"), self.process.wait().unwrap().code())
        })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // fails if it has already ended
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn start_error(command: &mut Command) -> String {
    let Output { status, stdout, stderr } = command.output().unwrap();
    assert_eq!((status.code(), &*stdout), (Some(2), &b""[..]));
    String::from_utf8(stderr).unwrap()
}

#[test]
fn the_sixth_login_is_denied_and_a_signal_shuts_down_gracefully() {
    for signal in ["-TERM", "-INT"] {
        let server = Server::start(&mut sluicegate(&["serve", "--http", "127.0.0.1:0"]));
        assert!(!server.address.ends_with(":0"), "{}", server.address);
        for _ in 0..5 {
            let answer = server.check();
            assert!(answer.starts_with(r#"{"allowed":true,"rule":"login-per-ip","limit":5,"#), "{answer}");
        }
        let answer = server.check();
        assert!(answer.starts_with(r#"{"allowed":false,"rule":"login-per-ip","limit":5,"#), "{answer}");
        assert_eq!(server.stop(signal), ("stopped\n".to_owned(), Some(0)));
    }
}

/// Returns the port in a line of the startup output.
fn port(line: &str) -> u16 {
    let address = line.split_whitespace().nth(1).unwrap();
    address.rsplit(':').next().unwrap().parse().unwrap()
}

#[test]
fn the_startup_output_has_addresses_store_rules_and_an_example() {
    let server = Server::start(&mut sluicegate(&["serve", "--http", "[::1]:0"]));
    let address = &server.address;
    assert_eq!(
        server.welcome,
        [
            &*format!("sluicegate listening on http://{address}"),
            &*format!("grpc   127.0.0.1:{} (Envoy's rate limit service)", port(&server.welcome[1])),
            &*format!("resp   127.0.0.1:{} (Redis protocol)", port(&server.welcome[2])),
            "store  memory:",
            "rules  demo; write your own to ./sluicegate.toml",
            "rule   login-per-ip: 5 per 60s per ip when route=login (sliding-log)",
            "rule   api-per-user: 10 per 1s, burst 20, per user (token-bucket)",
            "",
            "Run this 6 times within a minute; the last request is denied:",
            &*format!(
                r#"  curl -w '\n' http://{address}/v1/check -d '{{"labels":{{"route":"login","ip":"203.0.113.9"}}}}'"#
            ),
        ]
    );
}

#[test]
fn flags_override_the_environment() {
    let mut command = sluicegate(&["serve", "--http", "127.0.0.1:0", "--store", "memory:"]);
    let server =
        Server::start(command.env("SLUICEGATE_HTTP", "0.0.0.0:0").env("SLUICEGATE_STORE_URL", "nowhere:"));
    assert!(server.welcome.contains(&"store  memory:".to_owned()), "{:?}", server.welcome);
    let error = start_error(sluicegate(&["serve"]).env("SLUICEGATE_HTTP", "0.0.0.0:0"));
    assert!(
        error.starts_with("sluicegate: SLUICEGATE_HTTP: 0.0.0.0:0 is reachable from other machines"),
        "{error}"
    );
}

#[test]
fn a_low_soft_limit_of_open_files_is_raised() {
    let program = sluicegate(&["serve", "--http", "127.0.0.1:0"]);
    let mut few_files = Command::new("sh");
    few_files.args(["-c", "ulimit -Sn 64 && exec \"$@\"", "sh"]);
    few_files.arg(program.get_program()).args(program.get_args());
    for (name, value) in program.get_envs() {
        match value {
            Some(value) => few_files.env(name, value),
            None => few_files.env_remove(name),
        };
    }
    few_files.env("TOKIO_WORKER_THREADS", "64").current_dir(env!("CARGO_TARGET_TMPDIR"));
    assert!(Server::start(&mut few_files).check().contains(r#""allowed":true"#));
}

#[test]
fn start_errors_are_one_line_with_exit_code_2() {
    let server = Server::start(&mut sluicegate(&["serve", "--http", "127.0.0.1:0"]));
    let table = [
        (["--http", "0.0.0.0:0"], "use 127.0.0.1:0, or set insecure = true\n"),
        (["--http", &server.address], "--grpc or --resp (port 0 picks a free port)\n"),
        (["--store", "postgres://me:s3cret@host"], "each with rediss for TLS\n"),
    ];
    for (flag, remedy) in table {
        let error = start_error(sluicegate(&["serve"]).args(flag));
        assert!(error.starts_with("sluicegate: ") && error.ends_with(remedy), "{error}");
        assert!(error.lines().count() == 1 && !error.contains("s3cret"), "{error}");
    }
    let error = start_error(&mut sluicegate(&["serve", "--http", "localhost:8080"]));
    assert!(error.contains("for example \"127.0.0.1:8080\""), "{error}");
}

#[test]
fn help_shows_no_password_from_the_environment() {
    let mut command = sluicegate(&["serve", "--help"]);
    let help = command.env("SLUICEGATE_STORE_URL", "redis://:s3cret@host").output().unwrap();
    let help = String::from_utf8(help.stdout).unwrap();
    assert!(help.contains("SLUICEGATE_STORE_URL") && !help.contains("s3cret"), "{help}");
}
