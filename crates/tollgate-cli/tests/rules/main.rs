//! `tollgate rules`, and the command line itself.
//!
//! * `files`: rules check, explain and schema
//! * `import`: imported rules, used by a real server over gRPC
//! * `command_line`: completions, manual pages, help

#![expect(clippy::unwrap_used, reason = "a failing helper fails the test")]

#[path = "../client/command.rs"]
mod command;
mod command_line;
mod files;
#[allow(dead_code, reason = "the lifecycle tests use all of it")]
#[path = "../lifecycle/http_client.rs"]
mod http_client;
mod import;
#[allow(dead_code, reason = "the lifecycle tests use all of it")]
#[path = "../lifecycle/server_process.rs"]
mod server_process;
