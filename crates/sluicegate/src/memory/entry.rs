//! One counter in a shard: its identity, its limit class and three numbers, in 48 bytes.
//!
//! Every state except a log is three numbers, read at the [`Scale`](sluicegate_core::Scale) of the limit class. A log varies in size and is stored
//! as it is.

use sluicegate_core::{Algorithm, State};

use super::budget::allocated;
use crate::key::Key;

/// The longest identity that is stored inline.
const MAX_SHORT: usize = 18;

// most of the memory per key is the size of its counter
const _: () = assert!(size_of::<Entry>() == 48);

/// One counter.
pub(super) enum Entry {
    /// At most [`MAX_SHORT`] bytes of identity; those beyond `len` are unused.
    Short { len: u8, identity: [u8; MAX_SHORT], class: u32, numbers: [u64; 3] },
    /// A longer identity.
    Long { identity: Box<[u8]>, class: u32, numbers: [u64; 3] },
    /// A state that does not fit three numbers.
    Log(Box<Log>),
}

/// A counter whose state is a log.
pub(super) struct Log {
    pub(super) key: Key,
    pub(super) state: State,
}

/// Bytes of a log without entries.
const LOG_BYTES: usize = allocated(size_of::<Log>());
/// Bytes of the first entries of a log.
const FIRST_LOG_ENTRIES_BYTES: usize = allocated(64);

impl Entry {
    /// Creates a counter of a limit class.
    pub(super) fn new(identity: &[u8], class: u32, numbers: [u64; 3]) -> Self {
        let mut short = [0; MAX_SHORT];
        match (short.get_mut(..identity.len()), u8::try_from(identity.len())) {
            (Some(inline), Ok(len)) => {
                inline.copy_from_slice(identity);
                Self::Short { len, identity: short, class, numbers }
            }
            _ => Self::Long { identity: identity.into(), class, numbers },
        }
    }

    pub(super) fn identity(&self) -> &[u8] {
        match self {
            Self::Short { len, identity, .. } => &identity[..usize::from(*len)],
            Self::Long { identity, .. } => identity,
            Self::Log(log) => log.key.identity_bytes(),
        }
    }

    /// Returns the bytes outside of the 48 bytes of the entry.
    pub(super) fn heap_bytes(&self) -> usize {
        match self {
            Self::Short { .. } => 0,
            Self::Long { identity, .. } => allocated(identity.len()),
            Self::Log(log) => LOG_BYTES + log.key.heap_bytes().map_or(0, allocated) + log.state.heap_bytes(),
        }
    }

    /// Returns the most that a new counter uses outside of its 48 bytes.
    pub(super) fn initial_heap_bytes(key: &Key, algorithm: Algorithm) -> usize {
        let len = key.identity_bytes().len();
        let identity = if len > MAX_SHORT { allocated(len) } else { 0 };
        if algorithm.properties().is_log { LOG_BYTES + FIRST_LOG_ENTRIES_BYTES + identity } else { identity }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identities_of_any_length_are_stored_completely() {
        for len in 0..=64 {
            let identity = vec![b'x'; len];
            let entry = Entry::new(&identity, 0, [0; 3]);
            assert_eq!(entry.identity(), identity);
            assert_eq!(entry.heap_bytes() > 0, len > MAX_SHORT);
        }
    }
}
