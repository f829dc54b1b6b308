//! What is said of rules, and of the command itself, without a server.
//!
//! * `files`: checked, explained, described
//! * `import`: others' rules, read by a real server and asked by gRPC
//! * `manual`: completions, pages, help

#![expect(clippy::unwrap_used, reason = "a helper of a test fails as the test does")]

mod files;
mod import;
mod manual;
