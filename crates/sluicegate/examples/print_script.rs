//! How do I call the script from another language?
//!
//! ```sh
//! cargo run -p sluicegate --example print_script > sluicegate.lua
//! ```
//!
//! `docs/lua.md` says what goes in and what comes out.
#![expect(clippy::print_stdout, reason = "an example shows what it does")]

fn main() {
    print!("{}", sluicegate::redis::SCRIPT);
}
