//! A reader of the log that does not read: decisions continue, and audit lines are kept as long as possible.

use sluicegate_server::observe::log_queue::MAX_QUEUED;

use super::reload::by_grpc;
use crate::server_process::{ANY_PORTS, ConfigDir, ServerProcess};

/// The capacity of a pipe on Linux, in bytes.
const PIPE: usize = 64 << 10;

/// A lower bound of what a gRPC call logs at level `trace`, in bytes.
const LOGGED_PER_CALL: usize = 2 << 10;

const AUDITED: usize = 100;

/// Starts a server whose log is not read, and makes it log more than the pipe and the queue hold.
fn start_and_fill_log() -> (ConfigDir, ServerProcess) {
    let home = ConfigDir::new(ANY_PORTS);
    let program = ServerProcess::start_with_unread_log(home.serve().args(["--log", "trace"]));
    let mut check = by_grpc(&program);
    for _ in 0..(PIPE + MAX_QUEUED) / LOGGED_PER_CALL {
        check();
    }
    (home, program)
}

fn dropped(program: &ServerProcess, kind: &str) -> u64 {
    program.metric(&format!("sluicegate_log_lines_dropped_total{{kind=\"{kind}\"}}")).parse().unwrap()
}

#[test]
fn a_stalled_log_reader_delays_no_decision_and_audit_lines_are_kept() {
    let (_home, mut program) = start_and_fill_log();
    let mut client = program.client();
    for number in 0..AUDITED {
        let body = format!(r#"{{"labels":{{"user":"audited-{number}"}}}}"#);
        assert_eq!(client.post("/v1/reset", &body).unwrap().status, 200);
    }
    assert!(dropped(&program, "other") > 0);
    assert_eq!(dropped(&program, "audit"), 0);
    program.read_log();
    program.wait_for_log("standard error was not read in time");
    let log = program.log();
    for number in 0..AUDITED {
        let subject = format!("subject=\"user=audited-{number}\"");
        assert!(log.contains(&subject), "{subject} is missing");
    }
    let reports: Vec<_> =
        log.lines().filter(|line| line.contains("WARN") && line.contains("dropped ")).collect();
    assert_eq!(reports.len(), 1, "{reports:?}");
}

#[test]
fn a_stalled_log_reader_does_not_prevent_a_shutdown() {
    let (_home, mut program) = start_and_fill_log();
    program.signal("-INT");
    assert!(program.wait_for_exit().success());
}
