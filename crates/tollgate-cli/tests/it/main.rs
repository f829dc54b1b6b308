//! Integration tests of the command: each runs the real program.
//!
//! `program`, `client` and `command` are shared: a server process, an HTTP client, and the command with its output.

mod ask;
mod bench;
mod client;
mod command;
mod dashboard;
mod doctor;
mod documentation;
mod life;
mod program;
mod rules;
mod serve;
mod simulate;
