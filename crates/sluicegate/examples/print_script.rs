//! Prints the Lua script, to call it from another language.
//!
//! ```sh
//! cargo run -p sluicegate --example print_script > sluicegate.lua
//! ```
//!
//! `docs/lua.md` documents its arguments and its reply.
#![expect(clippy::print_stdout, reason = "an example prints its results")]

fn main() {
    print!("{}", sluicegate::redis::SCRIPT);
}
