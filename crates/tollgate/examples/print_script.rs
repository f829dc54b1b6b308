//! How do I call the script from another language?
//!
//! ```sh
//! cargo run -p tollgate --example print_script > tollgate.lua
//! ```
//!
//! `docs/lua.md` says what goes in and what comes out.
#![expect(clippy::print_stdout, reason = "an example shows what it does")]

fn main() {
    print!("{}", tollgate::redis::SCRIPT);
}
