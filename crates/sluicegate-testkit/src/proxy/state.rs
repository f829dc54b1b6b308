//! State shared by the handle of the proxy and its connections.

use std::collections::BTreeSet;

use tokio::time::Instant;

use super::{AfterDrop, Counters, Direction, DropReplies, MAX_CONNECTIONS, Mode, Occurrence};

/// State shared by the handle and the connections, behind one lock. Only a change of mode wakes the connections, not a
/// changed counter.
#[derive(Debug)]
pub(super) struct ProxyState {
    pub(super) mode: Mode,
    /// Matching requests since [`Mode::DropReplies`] was set.
    pub(super) matched: u64,
    /// Connections with a lower id are to be reset.
    pub(super) reset_below: u64,
    /// Connections with a lower id have this direction closed.
    pub(super) ended_below: [u64; 2],
    pub(super) next_id: u64,
    pub(super) open: BTreeSet<u64>,
    pub(super) listening: bool,
    pub(super) counters: Counters,
}

impl ProxyState {
    pub(super) fn new() -> ProxyState {
        ProxyState {
            mode: Mode::Pass,
            matched: 0,
            reset_below: 0,
            ended_below: [0; 2],
            next_id: 0,
            open: BTreeSet::new(),
            listening: true,
            counters: Counters::default(),
        }
    }

    /// Registers a connection and returns its id, or `None` if it must be reset.
    pub(super) fn open(&mut self) -> Option<u64> {
        self.counters.accepted += 1;
        if self.mode.closes_connections() {
            return None;
        }
        if self.open.len() >= MAX_CONNECTIONS {
            self.counters.rejected += 1;
            return None;
        }
        let id = self.next_id;
        self.next_id += 1;
        self.open.insert(id);
        Some(id)
    }

    /// Counts a reply to the named request. Returns whether it is dropped, and whether that changed the mode.
    pub(super) fn reply(&mut self, name: &str) -> (Option<AfterDrop>, bool) {
        if let Mode::DropReplies(DropReplies { requests, occurrence, after }) = self.mode
            && requests.matches(name)
        {
            self.matched += 1;
            let is_dropped = match occurrence {
                Occurrence::Next => true,
                Occurrence::Every(n) => self.matched.is_multiple_of(n),
            };
            if is_dropped {
                self.counters.dropped_replies += 1;
                if occurrence == Occurrence::Next {
                    self.mode = Mode::Pass;
                }
                return (Some(after), occurrence == Occurrence::Next);
            }
        }
        self.counters.replies += 1;
        (None, false)
    }
}

impl Mode {
    /// Returns whether the mode closes all connections.
    pub(super) fn closes_connections(self) -> bool {
        matches!(self, Mode::Cut | Mode::Refuse)
    }

    /// Returns when bytes that arrived at the given time may be forwarded; `None` means not in this mode.
    pub(super) fn release_time(self, direction: Direction, arrived: Instant) -> Option<Instant> {
        match (self, direction) {
            (Mode::Stall | Mode::Cut | Mode::Refuse, _) => None,
            (Mode::Delay { requests, .. }, Direction::Requests) => arrived.checked_add(requests),
            (Mode::Delay { replies, .. }, Direction::Replies) => arrived.checked_add(replies),
            (Mode::Pass | Mode::Trickle { .. } | Mode::DropReplies(_), _) => Some(arrived),
        }
    }
}
