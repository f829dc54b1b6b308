//! A probe: an empty write to an unused key within a script. It fails for the same reasons as a decision (replica, out of memory, no
//! permission, …) and changes nothing.

use super::keys::probe_key;

/// KEYS: a key that does not exist, before or after.
const WRITE_NOTHING: &str = "return redis.call('SETRANGE', KEYS[1], 0, '')";

/// Returns the probe command for the slot of this tag.
pub(super) fn probe(prefix: &str, tag: &str) -> redis::Cmd {
    let mut request = redis::cmd("EVAL");
    request.arg(WRITE_NOTHING).arg(1).arg(probe_key(prefix, tag));
    request
}
