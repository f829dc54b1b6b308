//! The questions of the command line, to real servers and real stores.
//!
//! * `answers`: what people and programs are told, and the exit codes
//! * `alike`: a server and a store are asked in the same way and say the same
//! * `troubles`: what goes wrong says what to do

#![expect(clippy::unwrap_used, reason = "a helper of a test fails as the test does")]

mod alike;
mod answers;
mod troubles;

use crate::{
    command::{Said, said, tollgate},
    program::{self, Home, Program},
};

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
