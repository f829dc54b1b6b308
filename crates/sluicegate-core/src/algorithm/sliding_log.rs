#![doc = include_str!("../../docs/algorithms/sliding-log.md")]

use std::{collections::VecDeque, time::Duration};

use super::{Algorithm, Bound, Charge, Counter, Properties, Reset, StoredState, effective_time, wait_until};
use crate::{
    limit::{Limit, LimitError, MAX_LOG_AMOUNT, MAX_LOG_UNITS},
    snapshot::{MAX_CHARGES, Snapshot, Span},
};

/// How many of the newest entries a refund with a time can reach. It changes the totals of all later entries.
pub const REFUND_REACH: usize = 1_000;

/// The charges with their times, oldest first. Each entry holds the running total, so that the units charged since any
/// moment are one subtraction. Totals wrap around; only their differences are meaningful.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct State {
    /// Length of the window that the state was written under.
    pub window_us: u64,
    /// Running total before the first entry.
    pub base: u64,
    /// Times are strictly ascending, totals ascend by at least one. At most `amount` entries.
    pub entries: VecDeque<Entry>,
    /// Largest number of entries that the store allows, if less than `amount`.
    pub max_entries: usize,
}

impl Default for State {
    fn default() -> Self {
        Self { window_us: 0, base: 0, entries: VecDeque::new(), max_entries: usize::MAX }
    }
}

/// The units charged in one microsecond.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Time of the charge.
    pub time_us: u64,
    /// Running total after the charge.
    pub total: u64,
}

/// The part of the log that counts at one moment.
pub struct View {
    now: u64,
    /// Effective time of the counter.
    at: u64,
    /// Index of the oldest entry that counts.
    first: usize,
    used: u64,
    /// When all units stop counting, because the limit has another window now.
    cutoff: Option<u64>,
}

impl Counter for State {
    const PROPERTIES: Properties = Properties {
        max_amount: MAX_LOG_AMOUNT,
        has_window: true,
        has_burst: false,
        has_phase: false,
        has_calendar: false,
        has_sliding_window: true,
        is_log: true,
        script_code: 4,
    };
    type View = View;

    #[inline]
    fn view(&self, limit: &Limit, now: u64) -> View {
        let none = |at| View { now, at, first: self.entries.len(), used: 0, cutoff: None };
        let Some(at) = effective_time(self.last_us(), limit.window_us(), now) else {
            return none(now);
        };
        let changed = self.window_us != limit.window_us();
        let cutoff = changed.then_some(self.last_us() + limit.window_us());
        if cutoff.is_some_and(|cutoff| at >= cutoff) {
            return none(at);
        }
        let first = self.entries.partition_point(|entry| entry.time_us + self.window_us <= at);
        View { now, at, first, used: self.total().wrapping_sub(self.total_before(first)), cutoff }
    }

    #[inline]
    fn used(view: &View) -> u64 {
        view.used
    }

    #[inline]
    fn charge(&mut self, view: &mut View, limit: &Limit, units: u64) {
        let added = units.min(MAX_LOG_UNITS);
        let used = (view.used + added).min(MAX_LOG_UNITS);
        if view.cutoff.is_some() || view.used == 0 {
            self.window_us = limit.window_us();
            self.base = 0;
            self.entries.clear();
            self.push(view.at, used, limit);
        } else {
            self.base = self.total_before(view.first);
            self.entries.drain(..view.first);
            self.drop_oldest(view.used + added - used);
            self.push(view.at, added, limit);
        }
        *view = View { first: 0, used, cutoff: None, ..*view };
    }

    fn wait_us(&self, view: &View, max_used: u64) -> u64 {
        let before = self.total_before(view.first);
        let to_expire = view.used - max_used;
        let last_to_expire = self.entries.partition_point(|entry| {
            let expired = entry.total.wrapping_sub(before);
            // for entries before the first one that counts, the difference wraps around
            expired < to_expire || expired > view.used
        });
        wait_until(self.entries[last_to_expire].time_us + self.window_us, view.cutoff, view.now)
    }

    #[inline]
    fn reset(&self, view: &View) -> Reset {
        let ends_us = self.last_us() + self.window_us;
        Reset::after(if view.used == 0 { 0 } else { wait_until(ends_us, view.cutoff, view.now) })
    }

    fn refund(&mut self, view: &View, _: &Limit, units: u64, charge: Option<Charge>) -> bool {
        if view.used == 0 || units == 0 {
            return false;
        }
        match charge {
            Some(charge) => self.refund_at(view.first, units, charge.at_us),
            None => {
                self.refund_newest(units.min(view.used));
                true
            }
        }
    }

    fn own_limit(&self, limit: &Limit) -> Limit {
        if self.window_us == 0 || self.window_us == limit.window_us() {
            return *limit;
        }
        limit.with_window_of_state(self.window_us, 0)
    }

    fn expires_at_us(&self) -> u64 {
        self.last_us() + self.window_us
    }

    fn snapshot(&self, view: &View, _: &Limit) -> Snapshot {
        let first = view.first.max(self.entries.len().saturating_sub(MAX_CHARGES));
        let charges = (first..self.entries.len()).map(|index| {
            let Entry { time_us, total } = self.entries[index];
            Span {
                from_us: time_us,
                until_us: view.now + wait_until(time_us + self.window_us, view.cutoff, view.now),
                units: total.wrapping_sub(self.total_before(index)),
            }
        });
        Snapshot::SlidingLog(charges.collect())
    }

    fn bound(limit: &Limit) -> Bound {
        Bound::Window { most: limit.amount(), window: limit.window() }
    }

    fn from_stored(stored: &StoredState<'_>) -> Option<Self> {
        match *stored.numbers {
            [_last, base, _total, _oldest, _head, length, _ttl, window_us, _capacity] => {
                let is_valid = Self::are_stored_numbers(stored.numbers);
                let entries = is_valid.then(|| StoredEntries { base, length }.read(stored.entries))??;
                Some(Self { window_us, entries, ..Self::default() })
            }
            _ => None,
        }
    }

    fn are_stored_numbers(numbers: &[u64]) -> bool {
        match *numbers {
            [_last, base, total, _oldest, head, length, _ttl, window_us, capacity] => {
                let has_valid_ring = length <= capacity && head < capacity;
                window_us > 0 && base <= MAX_LOG_UNITS && total <= MAX_LOG_UNITS && has_valid_ring
            }
            _ => false,
        }
    }

    fn scale(_: &Limit) -> Option<[u64; 2]> {
        None
    }

    fn pack(&self) -> Option<([u64; 2], [u64; 3])> {
        None
    }

    fn unpack(_: [u64; 2], _: [u64; 3]) -> Self {
        unreachable!("a log has no scale")
    }

    fn heap_bytes(&self) -> usize {
        self.entries.capacity() * size_of::<Entry>()
    }

    fn next_growth_bytes(&self) -> Option<usize> {
        let is_full = self.entries.len() == self.entries.capacity();
        is_full.then(|| self.heap_bytes().max(4 * size_of::<Entry>()))
    }

    fn entries(&self) -> usize {
        self.entries.len()
    }

    fn set_max_entries(&mut self, max_entries: usize) {
        self.max_entries = max_entries;
    }
}

impl State {
    fn last_us(&self) -> u64 {
        self.entries.back().map_or(0, |entry| entry.time_us)
    }

    fn total(&self) -> u64 {
        self.entries.back().map_or(self.base, |entry| entry.total)
    }

    /// Returns the running total before the entry at `index`.
    fn total_before(&self, index: usize) -> u64 {
        if index == 0 { self.base } else { self.entries[index - 1].total }
    }

    /// Appends a charge. A charge in the same microsecond, or one that does not fit (usually because the log is already in
    /// debt), is added to the newest entry, which then counts from the later time.
    fn push(&mut self, now: u64, units: u64, limit: &Limit) {
        let total = self.total().wrapping_add(units);
        let max_entries = usize::try_from(limit.amount()).unwrap_or(usize::MAX).min(self.max_entries);
        let is_full = self.entries.len() >= max_entries;
        match self.entries.back_mut() {
            _ if units == 0 => {}
            Some(newest) if newest.time_us == now || is_full => *newest = Entry { time_us: now, total },
            _ => self.entries.push_back(Entry { time_us: now, total }),
        }
    }

    /// Drops the oldest units of a debt.
    fn drop_oldest(&mut self, units: u64) {
        let base = self.base;
        let dropped = self.entries.partition_point(|entry| entry.total.wrapping_sub(base) <= units);
        if units > 0 {
            self.entries.drain(..dropped);
            self.base = base.wrapping_add(units);
        }
    }

    fn refund_newest(&mut self, units: u64) {
        let total = self.total().wrapping_sub(units);
        let mut left = units;
        while left > 0 {
            let index = self.entries.len() - 1;
            let held = self.entries[index].total.wrapping_sub(self.total_before(index));
            if held > left {
                self.entries[index].total = total;
                return;
            }
            left -= held;
            self.entries.pop_back();
        }
    }

    fn refund_at(&mut self, first: usize, units: u64, at: u64) -> bool {
        let Ok(index) = self.entries.binary_search_by_key(&at, |entry| entry.time_us) else {
            return false;
        };
        if index < first.max(self.entries.len().saturating_sub(REFUND_REACH)) {
            return false;
        }
        let held = self.entries[index].total.wrapping_sub(self.total_before(index));
        let refunded = units.min(held);
        for entry in self.entries.range_mut(index..) {
            entry.total = entry.total.wrapping_sub(refunded);
        }
        if refunded == held {
            self.entries.remove(index);
        }
        true
    }
}

/// The header fields that describe the stored entries of a log.
struct StoredEntries {
    base: u64,
    length: u64,
}

impl StoredEntries {
    /// Bytes of the time of an entry.
    const TIME_BYTES: usize = 7;
    /// Bytes of a running total.
    const TOTAL_BYTES: usize = 3;

    /// Reads the newest entries. Stored totals wrap around; the returned ones do not.
    fn read(&self, entries: &[u8]) -> Option<VecDeque<Entry>> {
        let wrap = MAX_LOG_UNITS + 1;
        let stored = entries.chunks_exact(Self::TIME_BYTES + Self::TOTAL_BYTES);
        let fetched = self.length.min(MAX_CHARGES as u64 + 1);
        if stored.len() as u64 != fetched || !stored.remainder().is_empty() {
            return None;
        }
        let mut stored = stored.map(|entry| {
            let (time, total) = entry.split_at(Self::TIME_BYTES);
            (little_endian(time), little_endian(total))
        });
        let has_more = self.length > MAX_CHARGES as u64;
        let mut before = if has_more { stored.next()?.1 } else { self.base };
        let (mut read, mut last_us, mut total) = (VecDeque::new(), 0, 0);
        for (time_us, after) in stored {
            if time_us < last_us {
                return None;
            }
            total += (after + wrap - before) % wrap;
            (last_us, before) = (time_us, after);
            read.push_back(Entry { time_us, total });
        }
        Some(read)
    }
}

fn little_endian(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

impl Limit {
    /// Creates a limit: at most `amount` in any window, exactly.
    ///
    /// # Errors
    /// As [`Limit::new`].
    pub fn sliding_log(amount: u64, window: Duration) -> Result<Self, LimitError> {
        Self::new(Algorithm::SlidingLog, amount, window)
    }
}
