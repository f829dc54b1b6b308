//! The client commands, with real servers and stores.
//!
//! * `responses`: text and JSON output, and exit codes
//! * `server_and_store`: a server and a store give the same responses
//! * `errors`: error messages state the fix
//! * `health`: the readiness of a server
//! * `holds`: holds are made, settled, released and renewed

#![expect(clippy::unwrap_used, reason = "a failing helper fails the test")]

mod errors;
mod health;
mod holds;
mod responses;
mod server_and_store;

use crate::{
    command::{CommandOutput, run, sluicegate},
    server_process::{self, ConfigDir, ServerProcess},
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

/// A server with [`RULES`] and a memory store.
fn server() -> (ConfigDir, ServerProcess) {
    let home = ConfigDir::new(&format!("{}{RULES}", server_process::ANY_PORTS));
    let server = home.start();
    (home, server)
}

impl ServerProcess {
    fn run(&self, words: &[&str]) -> CommandOutput {
        run(sluicegate(words).env("SLUICEGATE_SERVER", format!("http://{}", self.http)))
    }
}
