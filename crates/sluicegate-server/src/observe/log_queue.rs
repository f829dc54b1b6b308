//! The bounded queue between log lines and their output, and the thread that writes them.
//!
//! Writing to a pipe blocks if its reader stalls. Only the writer thread writes, so a stalled reader does not delay
//! decisions. Lines that do not fit in the queue are dropped and counted; an audit line is dropped only after all other
//! lines.

use std::{
    collections::VecDeque,
    io::{self, Write},
    mem,
    sync::Arc,
    thread,
    time::Duration,
};

use parking_lot::{Condvar, Mutex};
use tracing::Metadata;
use tracing_subscriber::fmt::MakeWriter;

use super::logs::AUDIT;

/// The capacity of the queue in bytes: several thousand lines.
pub const MAX_QUEUED: usize = 1 << 20;

/// The writer thread takes lines from the queue until it has this many bytes, and writes them together.
const MAX_WRITE: usize = 16 << 10;

/// How long the process waits for the writer thread when it exits.
pub const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);

/// The kinds of log lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LineKind {
    /// A line that documents an administrative action.
    Audit,
    /// Any other line.
    Ordinary,
}

/// A number of lines of each kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LineCounts {
    /// Audit lines.
    pub audit: u64,
    /// All other lines.
    pub ordinary: u64,
}

/// A queue of log lines. Cheap to clone; all clones share it.
#[derive(Clone)]
pub(super) struct LogQueue(Arc<Shared>);

struct Shared {
    state: Mutex<State>,
    /// Signalled when a line is added.
    added: Condvar,
    /// Signalled when all lines are written.
    drained: Condvar,
}

#[derive(Default)]
struct State {
    audit: VecDeque<Line>,
    ordinary: VecDeque<Line>,
    /// The length of all queued lines, in bytes: at most [`MAX_QUEUED`].
    queued: usize,
    next_number: u64,
    /// Whether the writer thread has taken lines and not finished with them.
    is_writing: bool,
    dropped: LineCounts,
    /// Lines dropped since the last report.
    unreported: u64,
}

struct Line {
    /// Increases with every line, so that lines of both kinds are written in order.
    number: u64,
    text: Box<[u8]>,
}

impl LogQueue {
    /// Starts a thread that writes the lines of a new queue.
    ///
    /// # Errors
    /// When the operating system does not grant the thread.
    pub(super) fn start(output: impl Write + Send + 'static) -> io::Result<Self> {
        let queue = Self::new();
        let writer = queue.clone();
        thread::Builder::new().name("sluicegate-logs".to_owned()).spawn(move || writer.write_all(output))?;
        Ok(queue)
    }

    fn new() -> Self {
        Self(Arc::new(Shared { state: Mutex::default(), added: Condvar::new(), drained: Condvar::new() }))
    }

    /// Adds a line, or drops it if the queue is full.
    fn push(&self, kind: LineKind, text: &[u8]) {
        self.0.state.lock().push(kind, text);
        self.0.added.notify_one();
    }

    /// The number of lines dropped so far.
    pub(super) fn dropped(&self) -> LineCounts {
        self.0.state.lock().dropped
    }

    /// Waits until all lines are written, for at most [`FLUSH_TIMEOUT`].
    pub(super) fn flush(&self) {
        let mut state = self.0.state.lock();
        let _drained_or_late =
            self.0.drained.wait_while_for(&mut state, |state| !state.is_drained(), FLUSH_TIMEOUT);
    }

    /// Writes lines for as long as the process runs.
    fn write_all(&self, mut output: impl Write) {
        loop {
            let (text, lines) = self.take();
            let written = output.write_all(&text).and_then(|()| output.flush());
            let unreported = self.finish_write(written.is_ok(), lines);
            if unreported > 0 {
                tracing::warn!("dropped {unreported} log lines: standard error was not read in time");
            }
        }
    }

    /// Waits for lines, and takes the oldest. Returns their text and how many there are of each kind.
    fn take(&self) -> (Vec<u8>, LineCounts) {
        let mut state = self.0.state.lock();
        state.is_writing = false;
        if state.is_drained() {
            self.0.drained.notify_all();
        }
        self.0.added.wait_while(&mut state, |state| state.is_empty());
        state.is_writing = true;
        state.take(MAX_WRITE)
    }

    /// Records the result of a write; lines that were not written count as dropped. Once the output works and the queue is empty, returns
    /// the number of dropped lines that were not reported yet.
    fn finish_write(&self, is_written: bool, lines: LineCounts) -> u64 {
        let mut state = self.0.state.lock();
        if !is_written {
            state.dropped.audit += lines.audit;
            state.dropped.ordinary += lines.ordinary;
            state.unreported += lines.audit + lines.ordinary;
            return 0;
        }
        if state.is_empty() { mem::take(&mut state.unreported) } else { 0 }
    }
}

impl State {
    fn is_empty(&self) -> bool {
        self.audit.is_empty() && self.ordinary.is_empty()
    }

    fn is_drained(&self) -> bool {
        self.is_empty() && !self.is_writing
    }

    fn push(&mut self, kind: LineKind, text: &[u8]) {
        if kind == LineKind::Audit {
            while self.queued + text.len() > MAX_QUEUED
                && let Some(displaced) = self.ordinary.pop_front()
            {
                self.queued -= displaced.text.len();
                self.count_dropped(LineKind::Ordinary);
            }
        }
        if self.queued + text.len() > MAX_QUEUED {
            self.count_dropped(kind);
            return;
        }
        self.queued += text.len();
        let line = Line { number: self.next_number, text: text.into() };
        self.next_number += 1;
        match kind {
            LineKind::Audit => self.audit.push_back(line),
            LineKind::Ordinary => self.ordinary.push_back(line),
        }
    }

    fn count_dropped(&mut self, kind: LineKind) {
        self.unreported += 1;
        match kind {
            LineKind::Audit => self.dropped.audit += 1,
            LineKind::Ordinary => self.dropped.ordinary += 1,
        }
    }

    /// Takes the oldest lines: at least one, and more until there are `max` bytes.
    fn take(&mut self, max: usize) -> (Vec<u8>, LineCounts) {
        let (mut text, mut lines) = (Vec::new(), LineCounts::default());
        while text.len() < max {
            let number = |queue: &VecDeque<Line>| queue.front().map_or(u64::MAX, |line| line.number);
            let (queue, count) = if number(&self.audit) < number(&self.ordinary) {
                (&mut self.audit, &mut lines.audit)
            } else {
                (&mut self.ordinary, &mut lines.ordinary)
            };
            let Some(line) = queue.pop_front() else { break };
            *count += 1;
            self.queued -= line.text.len();
            text.extend_from_slice(&line.text);
        }
        (text, lines)
    }
}

/// Adds what is written to the queue. A subscriber writes each line at once.
pub(super) struct LineWriter<'a> {
    queue: &'a LogQueue,
    kind: LineKind,
}

impl<'a> MakeWriter<'a> for LogQueue {
    type Writer = LineWriter<'a>;

    fn make_writer(&'a self) -> LineWriter<'a> {
        LineWriter { queue: self, kind: LineKind::Ordinary }
    }

    fn make_writer_for(&'a self, metadata: &Metadata<'_>) -> LineWriter<'a> {
        let kind = if metadata.target() == AUDIT { LineKind::Audit } else { LineKind::Ordinary };
        LineWriter { queue: self, kind }
    }
}

impl Write for LineWriter<'_> {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.queue.push(self.kind, line);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    const LINE: [u8; 1024] = [b'x'; 1024];

    fn take_all(queue: &LogQueue) -> (Vec<u8>, LineCounts) {
        queue.0.state.lock().take(usize::MAX)
    }

    #[test]
    fn lines_of_both_kinds_are_written_in_order() {
        let queue = LogQueue::new();
        for (kind, line) in [
            (LineKind::Ordinary, b"a"),
            (LineKind::Audit, b"b"),
            (LineKind::Audit, b"c"),
            (LineKind::Ordinary, b"d"),
        ] {
            queue.push(kind, line);
        }
        assert_eq!(queue.0.state.lock().take(1).0, b"a");
        assert_eq!(take_all(&queue), (b"bcd".to_vec(), LineCounts { audit: 2, ordinary: 1 }));
        assert_eq!(queue.0.state.lock().queued, 0);
    }

    #[test]
    fn the_queue_is_bounded_and_audit_lines_displace_all_others() {
        let (queue, fitting) = (LogQueue::new(), (MAX_QUEUED / LINE.len()) as u64);
        for _ in 0..fitting + 3 {
            queue.push(LineKind::Ordinary, &LINE);
        }
        assert_eq!(queue.dropped(), LineCounts { audit: 0, ordinary: 3 });
        for _ in 0..fitting {
            queue.push(LineKind::Audit, &LINE);
        }
        assert_eq!(queue.dropped(), LineCounts { audit: 0, ordinary: fitting + 3 });
        queue.push(LineKind::Audit, &LINE);
        queue.push(LineKind::Ordinary, &LINE);
        assert_eq!(queue.dropped(), LineCounts { audit: 1, ordinary: fitting + 4 });
        assert_eq!(queue.0.state.lock().queued, MAX_QUEUED);
        let (text, lines) = take_all(&queue);
        assert_eq!((text.len(), lines), (MAX_QUEUED, LineCounts { audit: fitting, ordinary: 0 }));
    }

    /// An output whose reader is stalled until a message arrives.
    struct StalledOutput {
        resumed: mpsc::Receiver<()>,
        written: Arc<Mutex<Vec<u8>>>,
    }

    impl Write for StalledOutput {
        fn write(&mut self, text: &[u8]) -> io::Result<usize> {
            self.resumed.recv().expect("the test resumes the output");
            self.written.lock().extend_from_slice(text);
            Ok(text.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_flush_waits_for_all_lines_but_not_for_a_stalled_output() {
        let (resume, resumed) = mpsc::channel();
        let written = Arc::<Mutex<Vec<u8>>>::default();
        let queue = LogQueue::start(StalledOutput { resumed, written: Arc::clone(&written) }).unwrap();
        queue.flush();
        queue.push(LineKind::Ordinary, b"late\n");
        queue.flush();
        assert!(written.lock().is_empty(), "the output is stalled");
        resume.send(()).unwrap();
        queue.flush();
        assert_eq!(&**written.lock(), b"late\n");
    }

    #[test]
    fn lines_that_cannot_be_written_are_counted() {
        struct BrokenOutput;

        impl Write for BrokenOutput {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                Err(io::ErrorKind::BrokenPipe.into())
            }

            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }

        let queue = LogQueue::start(BrokenOutput).unwrap();
        queue.push(LineKind::Audit, b"a");
        queue.push(LineKind::Ordinary, b"b");
        queue.flush();
        assert_eq!(queue.dropped(), LineCounts { audit: 1, ordinary: 1 });
    }
}
