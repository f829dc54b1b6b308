#![doc = include_str!("../../docs/algorithms/sliding-log.md")]

use std::collections::VecDeque;

use super::{Counter, Reset, add_up_to_max, before_cut, key_time};
use crate::{
    limit::Limit,
    snapshot::{MAX_CHARGES, Snapshot, Span},
};

/// When what was charged, oldest first. Each entry carries the running total, so that how much counts
/// from any moment on is one subtraction; totals wrap round, and only their differences mean anything.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct State {
    /// The length of the window it was written under.
    pub window_us: u64,
    /// The running total before the first entry.
    pub base: u64,
    /// Times strictly ascending, totals ascending by at least one; at most `amount` entries.
    pub entries: VecDeque<Entry>,
    /// How many entries its store has room for, where that is less than `amount`.
    pub max_entries: usize,
}

impl Default for State {
    fn default() -> Self {
        Self { window_us: 0, base: 0, entries: VecDeque::new(), max_entries: usize::MAX }
    }
}

/// What was charged in one microsecond.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// When.
    pub time_us: u64,
    /// The running total after it.
    pub total: u64,
}

/// The part of the log that counts at one moment.
pub struct View {
    now: u64,
    /// The counter's own time.
    at: u64,
    /// The index of the oldest entry that counts.
    first: usize,
    used: u64,
    /// When all of it stops counting because the limit has another window now.
    cut: Option<u64>,
}

impl Counter for State {
    type View = View;

    #[inline]
    fn view(&self, limit: &Limit, now: u64) -> View {
        let none = |at| View { now, at, first: self.entries.len(), used: 0, cut: None };
        let Some(at) = key_time(self.last_us(), limit.window_us(), now) else {
            return none(now);
        };
        let changed = self.window_us != limit.window_us();
        let cut = changed.then_some(self.last_us() + limit.window_us());
        if cut.is_some_and(|cut| at >= cut) {
            return none(at);
        }
        let first = self.entries.partition_point(|entry| entry.time_us + self.window_us <= at);
        View { now, at, first, used: self.total().wrapping_sub(self.total_before(first)), cut }
    }

    #[inline]
    fn used(view: &View) -> u64 {
        view.used
    }

    #[inline]
    fn charge(&mut self, view: &mut View, limit: &Limit, units: u64) {
        let used = add_up_to_max(view.used, units);
        if view.cut.is_some() || view.used == 0 {
            self.window_us = limit.window_us();
            self.base = 0;
            self.entries.clear();
            self.push(view.at, used, limit);
        } else {
            self.base = self.total_before(view.first);
            self.entries.drain(..view.first);
            self.push(view.at, used - view.used, limit);
        }
        *view = View { first: 0, used, cut: None, ..*view };
    }

    fn wait_us(&self, view: &View, room: u64) -> u64 {
        let before = self.total_before(view.first);
        let must_go = view.used - room;
        let last_to_go = self.entries.partition_point(|entry| {
            let gone = entry.total.wrapping_sub(before);
            // entries before the first that counts lie behind `before`: their difference wraps round
            gone < must_go || gone > view.used
        });
        before_cut(self.entries[last_to_go].time_us + self.window_us, view.cut, view.now)
    }

    #[inline]
    fn reset(&self, view: &View) -> Reset {
        let ends_us = self.last_us() + self.window_us;
        Reset::after(if view.used == 0 { 0 } else { before_cut(ends_us, view.cut, view.now) })
    }

    fn refund(&mut self, view: &View, _: &Limit, units: u64, at: Option<u64>) -> bool {
        if view.used == 0 || units == 0 {
            return false;
        }
        match at {
            Some(at) => self.refund_at(view.first, units, at),
            None => {
                self.refund_newest(units.min(view.used));
                true
            }
        }
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
                until_us: view.now + before_cut(time_us + self.window_us, view.cut, view.now),
                units: total.wrapping_sub(self.total_before(index)),
            }
        });
        Snapshot::SlidingLog(charges.collect())
    }
}

impl State {
    fn last_us(&self) -> u64 {
        self.entries.back().map_or(0, |entry| entry.time_us)
    }

    fn total(&self) -> u64 {
        self.entries.back().map_or(self.base, |entry| entry.total)
    }

    /// The running total before the entry at `index`.
    fn total_before(&self, index: usize) -> u64 {
        if index == 0 { self.base } else { self.entries[index - 1].total }
    }

    /// Appends a charge. One of the same microsecond, or one that there is no room for, as a rule because
    /// the log is in debt already, joins the newest entry, which then counts from the later time.
    fn push(&mut self, now: u64, units: u64, limit: &Limit) {
        let total = self.total().wrapping_add(units);
        let room = usize::try_from(limit.amount()).unwrap_or(usize::MAX).min(self.max_entries);
        let full = self.entries.len() >= room;
        match self.entries.back_mut() {
            _ if units == 0 => {}
            Some(newest) if newest.time_us == now || full => *newest = Entry { time_us: now, total },
            _ => self.entries.push_back(Entry { time_us: now, total }),
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
        if index < first {
            return false;
        }
        let held = self.entries[index].total.wrapping_sub(self.total_before(index));
        let back = units.min(held);
        for entry in self.entries.range_mut(index..) {
            entry.total = entry.total.wrapping_sub(back);
        }
        if back == held {
            self.entries.remove(index);
        }
        true
    }

    pub(super) fn heap_bytes(&self) -> usize {
        self.entries.capacity() * size_of::<Entry>()
    }

    pub(super) fn next_growth_bytes(&self) -> Option<usize> {
        let full = self.entries.len() == self.entries.capacity();
        full.then(|| self.heap_bytes().max(4 * size_of::<Entry>()))
    }
}
