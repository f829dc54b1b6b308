//! What is said of rules, and of the command itself, without a server.
//!
//! * `files`: checked, explained, described
//! * `import`: others' rules, read by a real server and asked by gRPC
//! * `manual`: completions, pages, help

#![expect(clippy::unwrap_used, reason = "a helper of a test fails as the test does")]

#[allow(dead_code, reason = "the tests of a server's life use all of it")]
#[path = "../life/client.rs"]
mod client;
#[path = "../ask/command.rs"]
mod command;
mod files;
mod import;
mod manual;
#[allow(dead_code, reason = "the tests of a server's life use all of it")]
#[path = "../life/program.rs"]
mod program;
