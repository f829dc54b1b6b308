//! Would a server decide now? A write within a script, of nothing, to a key that nobody uses: it is refused for whatever a
//! decision would be refused for (a replica, no memory, no rights, …), and changes nothing.

use super::keys::probe_key;

/// KEYS: one that does not exist. It does not afterwards either.
const WRITE_NOTHING: &str = "return redis.call('SETRANGE', KEYS[1], 0, '')";

/// The command that tries it, on the slot of this tag.
pub(super) fn probe(prefix: &str, tag: &str) -> redis::Cmd {
    let mut request = redis::cmd("EVAL");
    request.arg(WRITE_NOTHING).arg(1).arg(probe_key(prefix, tag));
    request
}
