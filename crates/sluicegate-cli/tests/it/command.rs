//! Runs the command and captures its output.

#![expect(clippy::unwrap_used, reason = "a failing helper fails the test")]

use std::process::Command;

use serde_json::Value;

/// The exit code and output of a command.
#[derive(Debug)]
pub(crate) struct CommandOutput {
    pub(crate) code: Option<i32>,
    pub(crate) out: String,
    pub(crate) err: String,
}

/// The command, in a directory without a configuration and without SLUICEGATE_ variables.
pub(crate) fn sluicegate(words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sluicegate"));
    command.args(words).current_dir(env!("CARGO_TARGET_TMPDIR")).env_remove("NO_COLOR");
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("SLUICEGATE_") {
            command.env_remove(name);
        }
    }
    command
}

pub(crate) fn run(command: &mut Command) -> CommandOutput {
    let output = command.output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    CommandOutput { code: output.status.code(), out: text(output.stdout), err: text(output.stderr) }
}

impl CommandOutput {
    /// The exit code and the JSON document.
    pub(crate) fn json(&self) -> (Option<i32>, Value) {
        assert_eq!(self.out.lines().count(), 1, "{self:?}");
        (self.code, serde_json::from_str(&self.out).unwrap())
    }

    /// The lines of stdout.
    pub(crate) fn lines(&self) -> Vec<&str> {
        self.out.lines().collect()
    }
}
