//! The questions of the command line, to real servers and real stores.
//!
//! * `answers`: what people and programs are told, and the exit codes
//! * `alike`: a server and a store are asked in the same way and say the same
//! * `troubles`: what goes wrong says what to do
//! * `program`, `client`: servers as processes, shared with the tests of their life

#![expect(clippy::unwrap_used, reason = "a helper of a test fails as the test does")]

mod alike;
mod answers;
#[allow(dead_code, reason = "the tests of a server's life use all of it")]
#[path = "../life/client.rs"]
mod client;
#[allow(dead_code, reason = "the tests of a server's life use all of it")]
#[path = "../life/program.rs"]
mod program;
mod troubles;

use std::process::Command;

use program::{Home, Program};
use serde_json::Value;

/// Five logins a minute for each address, and 10 requests a second for each user.
const RULES: &str = r#"
[[rule]]
name = "login-per-ip"
when = { route = "login" }
per = ["ip"]
algorithm = "sliding-log"
amount = 5
window = "1m"

[[rule]]
name = "tokens-per-user"
per = ["user"]
algorithm = "fixed-window"
amount = 1000
window = "1d"
unit = "tokens"
"#;

/// How a command ended, and what it said.
#[derive(Debug)]
struct Said {
    code: Option<i32>,
    out: String,
    err: String,
}

/// The command, where no configuration is and without any setting of the environment.
fn tollgate(words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tollgate"));
    command.args(words).current_dir(env!("CARGO_TARGET_TMPDIR")).env_remove("NO_COLOR");
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("TOLLGATE_") {
            command.env_remove(name);
        }
    }
    command
}

fn said(command: &mut Command) -> Said {
    let output = command.output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Said { code: output.status.code(), out: text(output.stdout), err: text(output.stderr) }
}

/// A server with [`RULES`] in memory, and the command that asks it.
fn server() -> (Home, Program) {
    let home = Home::with(&format!("{}{RULES}", program::ANY_PORTS));
    let server = home.start();
    (home, server)
}

impl Program {
    fn ask(&self, words: &[&str]) -> Said {
        said(tollgate(words).env("TOLLGATE_SERVER", format!("http://{}", self.http)))
    }
}

impl Said {
    /// What a program reads, and the exit code.
    fn json(&self) -> (Option<i32>, Value) {
        assert_eq!(self.out.lines().count(), 1, "{self:?}");
        (self.code, serde_json::from_str(&self.out).unwrap())
    }

    /// The lines for people.
    fn lines(&self) -> Vec<&str> {
        self.out.lines().collect()
    }
}
