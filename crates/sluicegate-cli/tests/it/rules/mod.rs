//! `sluicegate rules`, and the command line itself.
//!
//! * `files`: rules check, explain and schema
//! * `import`: imported rules, used by a real server over gRPC
//! * `command_line`: completions, manual pages, help

#![expect(clippy::unwrap_used, reason = "a failing helper fails the test")]

mod command_line;
mod files;
mod import;
