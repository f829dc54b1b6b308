//! One direction of a connection: the bytes held, and when they are due.

use std::collections::VecDeque;
use std::io::{ErrorKind, IoSlice, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

use super::MAX_HELD_LEN;

/// Maximum number of bytes per read.
pub(super) const MAX_READ_LEN: usize = 64 * 1024;

/// One direction of a connection, from a source socket to a destination socket.
#[derive(Debug, Default)]
pub(super) struct Pipe {
    held: VecDeque<u8>,
    /// What was read, in order. Delivery times never decrease.
    schedule: VecDeque<Scheduled>,
    /// Leading bytes of `held` that are due and wait for the destination to accept them.
    due_len: usize,
    /// Whether the source may have something to read. Readiness is edge-triggered, so it is remembered here.
    is_readable: bool,
    /// Whether the source has signalled its end, so that a short read does not mean that nothing follows.
    is_ending: bool,
    /// Whether the end of the source was read.
    is_ended: bool,
    /// Whether the last write would have blocked.
    is_blocked: bool,
    /// Whether the event loop has a timer for this pipe.
    pub(super) has_timer: bool,
    /// Whether the end was delivered.
    pub(super) is_finished: bool,
}

#[derive(Clone, Copy, Debug)]
struct Scheduled {
    due: Instant,
    what: Item,
}

#[derive(Clone, Copy, Debug)]
enum Item {
    Bytes(usize),
    /// The source was closed or half-closed.
    End,
    /// The source was reset.
    Reset,
}

/// One of the sockets was reset: both must be.
#[derive(Debug)]
pub(super) struct ConnectionReset;

impl Pipe {
    /// Records that the source became readable.
    pub(super) fn mark_readable(&mut self) {
        self.is_readable = true;
    }

    /// Records that the source was closed, half-closed or reset.
    pub(super) fn mark_ending(&mut self) {
        self.is_readable = true;
        self.is_ending = true;
    }

    /// Records that the destination became writable, and returns whether this pipe was waiting for that.
    pub(super) fn unblock(&mut self) -> bool {
        std::mem::replace(&mut self.is_blocked, false)
    }

    /// Returns when the next bytes are due, if no earlier ones are waiting for the destination.
    pub(super) fn next_due(&self) -> Option<Instant> {
        if self.due_len > 0 { None } else { self.schedule.front().map(|scheduled| scheduled.due) }
    }

    /// Delivers the bytes that are due, and reads as many as the buffer can hold.
    pub(super) fn advance(
        &mut self,
        source: &TcpStream,
        destination: &TcpStream,
        one_way: Duration,
        buffer: &mut [u8],
    ) -> Result<(), ConnectionReset> {
        loop {
            self.deliver(destination)?;
            if !self.receive(source, one_way, buffer) {
                return Ok(());
            }
        }
    }

    /// Reads once, and returns whether something was scheduled.
    fn receive(&mut self, mut source: &TcpStream, one_way: Duration, buffer: &mut [u8]) -> bool {
        let room = (MAX_HELD_LEN - self.held.len()).min(buffer.len());
        if !self.is_readable || self.is_ended || room == 0 {
            return false;
        }
        let what = match source.read(&mut buffer[..room]) {
            Ok(0) => Item::End,
            Ok(len) => {
                self.held.extend(&buffer[..len]);
                self.is_readable = len == room || self.is_ending;
                Item::Bytes(len)
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => return true,
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                self.is_readable = false;
                return false;
            }
            Err(_) => Item::Reset,
        };
        self.is_ended = !matches!(what, Item::Bytes(_));
        self.schedule(what, one_way);
        true
    }

    fn schedule(&mut self, what: Item, one_way: Duration) {
        // Read after the bytes, so that they are never delivered too early.
        let mut due = now() + one_way;
        if let Some(last) = self.schedule.back() {
            due = due.max(last.due);
        }
        self.schedule.push_back(Scheduled { due, what });
    }

    /// Writes the bytes that are due, together, and passes on an end that is due.
    fn deliver(&mut self, mut destination: &TcpStream) -> Result<(), ConnectionReset> {
        let mut end = None;
        if let Some(first) = self.schedule.front() {
            let now = now();
            if first.due <= now {
                end = self.collect_due(now);
            }
        }
        while self.due_len > 0 && !self.is_blocked {
            let (head, tail) = self.held.as_slices();
            let head = &head[..head.len().min(self.due_len)];
            let tail = &tail[..self.due_len - head.len()];
            match destination.write_vectored(&[IoSlice::new(head), IoSlice::new(tail)]) {
                Ok(len) => {
                    self.held.drain(..len);
                    self.due_len -= len;
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => self.is_blocked = true,
                Err(_) => return Err(ConnectionReset),
            }
        }
        match end {
            Some(Item::Reset) => Err(ConnectionReset),
            Some(_) if self.due_len == 0 => {
                self.schedule.clear();
                self.is_finished = true;
                // Fails if the destination is closed, which its own direction reports.
                let _ = destination.shutdown(Shutdown::Write);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Moves all bytes due by `now` from the schedule to `due_len`. Returns an end that is due, and leaves it scheduled.
    fn collect_due(&mut self, now: Instant) -> Option<Item> {
        while let Some(&Scheduled { due, what }) = self.schedule.front() {
            match what {
                _ if due > now => return None,
                Item::Bytes(len) => self.due_len += len,
                Item::End | Item::Reset => return Some(what),
            }
            self.schedule.pop_front();
        }
        None
    }
}

#[expect(clippy::disallowed_methods, reason = "the proxy delays real traffic in real time")]
pub(super) fn now() -> Instant {
    Instant::now()
}
