//! Processes with a skewed clock, by libfaketime.

use std::path::Path;
use std::process::Command;

/// A skewed clock of one process. Its reported times are on that clock, except for the times of the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SkewedClock {
    /// Offset in seconds.
    pub offset_seconds: i64,
    /// Number of its seconds in ten real seconds.
    pub seconds_in_ten: u32,
}

impl SkewedClock {
    /// Returns the setting of libfaketime.
    fn setting(&self) -> String {
        let SkewedClock { offset_seconds, seconds_in_ten } = self;
        format!("{offset_seconds:+} x{}.{}", seconds_in_ten / 10, seconds_in_ten % 10)
    }

    pub(super) fn text(&self) -> String {
        format!("{}:{}", self.offset_seconds, self.seconds_in_ten)
    }

    pub(super) fn parse(text: &str) -> Option<SkewedClock> {
        let (offset, speed) = text.split_once(':')?;
        Some(SkewedClock { offset_seconds: offset.parse().ok()?, seconds_in_ten: speed.parse().ok()? })
    }

    /// Runs a process with this clock.
    ///
    /// # Panics
    ///
    /// When libfaketime is missing.
    pub fn apply_to(&self, command: &mut Command) {
        let libraries = Path::new("/usr/lib").read_dir().into_iter().flatten().flatten();
        let mut libraries = libraries.map(|entry| entry.path().join("faketime/libfaketimeMT.so.1"));
        let library = libraries.find(|path| path.exists());
        let library = library.unwrap_or_else(|| panic!("libfaketime is missing: run scripts/servers"));
        command.env("LD_PRELOAD", library).env("FAKETIME", self.setting());
    }
}
