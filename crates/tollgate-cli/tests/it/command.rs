//! The command, and what it says.

#![expect(clippy::unwrap_used, reason = "a helper of a test fails as the test does")]

use std::process::Command;

use serde_json::Value;

/// How a command ended, and what it said.
#[derive(Debug)]
pub(crate) struct Said {
    pub(crate) code: Option<i32>,
    pub(crate) out: String,
    pub(crate) err: String,
}

/// The command, where no configuration is and without any setting of the environment.
pub(crate) fn tollgate(words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tollgate"));
    command.args(words).current_dir(env!("CARGO_TARGET_TMPDIR")).env_remove("NO_COLOR");
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("TOLLGATE_") {
            command.env_remove(name);
        }
    }
    command
}

pub(crate) fn said(command: &mut Command) -> Said {
    let output = command.output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Said { code: output.status.code(), out: text(output.stdout), err: text(output.stderr) }
}

impl Said {
    /// What a program reads, and the exit code.
    pub(crate) fn json(&self) -> (Option<i32>, Value) {
        assert_eq!(self.out.lines().count(), 1, "{self:?}");
        (self.code, serde_json::from_str(&self.out).unwrap())
    }

    /// The lines for people.
    pub(crate) fn lines(&self) -> Vec<&str> {
        self.out.lines().collect()
    }
}
