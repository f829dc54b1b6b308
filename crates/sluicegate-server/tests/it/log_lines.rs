//! Log lines of one test.

#![expect(clippy::unwrap_used, reason = "a failing helper fails the test")]

use std::{
    io::{self, Write},
    sync::{Arc, Once},
};

use parking_lot::Mutex;
use serde_json::Value;
use sluicegate_server::observe::logs::{Logs, Settings};
use tracing::{
    Subscriber,
    subscriber::{set_global_default, with_default},
};
use tracing_subscriber::fmt::MakeWriter;

/// A log writer in memory.
#[derive(Clone, Default)]
pub(crate) struct Lines(pub(crate) Arc<Mutex<Vec<u8>>>);

impl Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Lines {
    pub(crate) fn text(&self) -> String {
        String::from_utf8(self.0.lock().clone()).unwrap()
    }

    pub(crate) fn json(&self) -> Vec<Value> {
        self.text().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}

/// A subscriber for one test, and its writer.
///
/// The process needs a second subscriber: with a single one, tracing decides about a call site in the thread that reaches it
/// first, and a concurrent test without a subscriber would disable the call site for this one.
pub(crate) fn subscriber<W>(settings: &Settings, writer: W) -> (impl Subscriber + Send + Sync, Logs)
where
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    static SECOND: Once = Once::new();
    SECOND.call_once(|| set_global_default(tracing_subscriber::registry()).unwrap());
    Logs::subscriber(settings, writer).unwrap()
}

pub(crate) fn logged(settings: &Settings, act: impl FnOnce()) -> Lines {
    let lines = Lines::default();
    let writer = lines.clone();
    let (subscriber, logs) = subscriber(settings, move || writer.clone());
    with_default(subscriber, act);
    logs.stop();
    lines
}
