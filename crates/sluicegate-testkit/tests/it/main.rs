//! Tests of the testkit itself, and tests of the whole workspace.

mod architecture;
mod cluster;
mod delay_proxy;
mod dependencies;
mod envoy_messages;
mod faults;
mod hold_processes;
mod memory_only;
mod namespace;
mod processes;
mod proxy;
mod sentinel;
mod server;
mod threads;
mod wording;
