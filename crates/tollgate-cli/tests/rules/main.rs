//! What is output of rules, and of the command itself, without a server.
//!
//! * `files`: checked, explained, described
//! * `import`: others' rules, read by a real server and asked by gRPC
//! * `manual`: completions, pages, help

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
