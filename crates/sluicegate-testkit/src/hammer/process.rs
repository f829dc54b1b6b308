//! A process that reports in lines.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use super::system_time;

/// Timeout of a process: several times what the slowest test needs on a busy machine.
const PROCESS_DEADLINE: Duration = Duration::from_secs(60);

/// The line that a process prints when it is connected and waits for the end of its input.
const READY: &str = "ready";

/// A running process, killed on drop.
#[derive(Debug)]
pub(super) struct ReportingProcess {
    child: Child,
    lines: Receiver<String>,
    deadline: Duration,
}

impl ReportingProcess {
    pub(super) fn spawn(mut command: Command) -> ReportingProcess {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap_or_else(|error| panic!("{command:?} cannot be run: {error}"));
        let output = BufReader::new(child.stdout.take().expect("the output is a pipe"));
        let (sender, lines) = channel();
        // A read has no timeout, but a channel has. The thread ends with the process.
        thread::spawn(move || output.lines().map_while(Result::ok).try_for_each(|line| sender.send(line)));
        ReportingProcess { child, lines, deadline: system_time() + PROCESS_DEADLINE }
    }

    /// Waits until the process is connected.
    pub(super) fn wait_until_ready(&mut self) {
        assert_eq!(self.next_line().as_deref(), Some(READY), "a hammer does not start");
    }

    /// Lets the process begin.
    pub(super) fn begin(&mut self) {
        drop(self.child.stdin.take());
    }

    /// Returns the next line; `None` at the end.
    pub(super) fn next_line(&mut self) -> Option<String> {
        match self.lines.recv_timeout(self.deadline.saturating_sub(system_time())) {
            Ok(line) => Some(line),
            Err(RecvTimeoutError::Disconnected) => None,
            Err(RecvTimeoutError::Timeout) => panic!("a hammer did not end within {PROCESS_DEADLINE:?}"),
        }
    }

    /// Kills the process with SIGKILL. The lines that it has written can still be read.
    pub(super) fn kill(&mut self) {
        // An error means that the process has ended already.
        let _ = self.child.kill();
    }

    pub(super) fn wait(&mut self) -> ExitStatus {
        self.child.wait().expect("a child can be waited for")
    }
}

impl Drop for ReportingProcess {
    fn drop(&mut self) {
        self.kill();
        let _ = self.child.wait();
    }
}
