//! Integration tests of the command: each runs the real program.
//!
//! `command`, `server_process` and `http_client` are shared: a command with its output, a server process, and an HTTP client.

mod bench;
mod client;
mod command;
mod dashboard;
mod deploy;
mod doctor;
mod documentation;
mod http_client;
mod lifecycle;
mod rules;
mod serve;
mod server_process;
mod simulate;
