#![doc = include_str!("../../docs/algorithms/token-bucket.md")]

use super::{Counter, Reset, capped, key_time, multiply_divide};
use crate::{
    limit::{Limit, Rate},
    snapshot::Snapshot,
    time::{MAX_EXACT, MAX_WAIT_US},
};

/// How full the bucket is, and when that was so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct State {
    /// When the level was taken.
    pub last_us: u64,
    /// The level: what has been charged and has not drained yet.
    pub level: Level,
}

impl Default for State {
    fn default() -> Self {
        Self { last_us: 0, level: Level::empty(Rate { units: 1, micros: 1 }) }
    }
}

/// `whole + part / rate.micros` units, which drain at `rate`. Exact: nothing is ever rounded while the
/// rate stays the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Level {
    /// Whole units.
    pub whole: u64,
    /// The rest, in parts of a unit; below `rate.micros`.
    pub part: u64,
    /// How fast it drains.
    pub rate: Rate,
}

impl Level {
    #[inline]
    const fn empty(rate: Rate) -> Self {
        Self { whole: 0, part: 0, rate }
    }

    #[inline]
    fn units_up(&self) -> u64 {
        self.whole + u64::from(self.part > 0)
    }

    #[inline(always)]
    fn drained(self, elapsed_us: u64) -> Self {
        if elapsed_us == 0 {
            return self;
        }
        let (whole, part) = multiply_divide(elapsed_us, self.rate.units, self.rate.micros);
        if whole > self.whole {
            return Self::empty(self.rate);
        }
        self.without(Self { whole, part, rate: self.rate })
    }

    /// This level without another one of the same rate.
    #[inline(always)]
    fn without(self, other: Self) -> Self {
        let borrow = other.part > self.part;
        if other.whole + u64::from(borrow) > self.whole {
            return Self::empty(self.rate);
        }
        Self {
            whole: self.whole - other.whole - u64::from(borrow),
            part: if borrow { self.part + self.rate.micros - other.part } else { self.part - other.part },
            rate: self.rate,
        }
    }

    /// The same level in parts of another rate, the last part rounded up.
    #[inline(always)]
    fn at_rate(self, rate: Rate) -> Self {
        let (carry, part) = part_at_rate(self.part, self.rate, rate);
        Self { whole: self.whole + carry, part, rate }
    }

    /// Microseconds until all of it has drained, and how many parts of the last one are left over.
    #[inline(always)]
    fn drain_time(self) -> (u64, u64) {
        let (micros, rest) = multiply_divide(self.whole, self.rate.micros, self.rate.units);
        let rest = rest + self.part;
        let last = if self.rate.units == 1 { rest } else { rest.div_ceil(self.rate.units) };
        let micros = micros.saturating_add(last);
        if micros > MAX_WAIT_US { (MAX_WAIT_US, 0) } else { (micros, last * self.rate.units - rest) }
    }
}

/// Part of a unit in parts of another rate, rounded up, and the whole unit that it may have become.
// apart, and by number: a level that is passed by reference would be kept in memory wherever it is used
#[cold]
fn part_at_rate(part: u64, from: Rate, to: Rate) -> (u64, u64) {
    let (part, rest) = multiply_divide(part, to.micros, from.micros);
    let part = part + u64::from(rest > 0);
    if part == to.micros { (1, 0) } else { (0, part) }
}

/// The level at one moment, draining at the faster of the old rate and the new.
pub struct View {
    now: u64,
    /// The counter's own time.
    at: u64,
    level: Level,
}

impl Counter for State {
    type View = View;

    #[inline(always)]
    fn view(&self, limit: &Limit, now: u64) -> View {
        let Some(at) = key_time(self.last_us, limit.window_us(), now) else {
            return View { now, at: now, level: Level::empty(limit.rate()) };
        };
        let mut level = self.level;
        if level.rate != limit.rate() && limit.rate().is_faster_than(level.rate) {
            level = level.at_rate(limit.rate());
        }
        View { now, at, level: level.drained(at - self.last_us) }
    }

    #[inline]
    fn used(view: &View) -> u64 {
        view.level.units_up()
    }

    #[inline(always)]
    fn charge(&mut self, view: &mut View, limit: &Limit, units: u64) {
        if view.level.rate != limit.rate() {
            view.level = view.level.at_rate(limit.rate());
        }
        view.level.whole += units.min(MAX_EXACT - view.level.units_up());
        *self = Self { last_us: view.at, level: view.level };
    }

    #[inline(always)]
    fn wait_us(&self, view: &View, room: u64) -> u64 {
        let excess = Level { whole: view.level.whole - room, ..view.level };
        capped(view.at - view.now + excess.drain_time().0)
    }

    #[inline(always)]
    fn reset(&self, view: &View) -> Reset {
        if view.level.units_up() == 0 {
            return Reset::default();
        }
        let (wait, spare) = view.level.drain_time();
        Reset { after_us: capped(view.at - view.now + wait), spare }
    }

    fn refund(&mut self, view: &View, limit: &Limit, units: u64, at: Option<u64>) -> bool {
        let charge = Level { whole: units, part: 0, rate: view.level.rate };
        let back = match at {
            None => charge,
            Some(at) if at > view.at || view.at - at >= limit.window_us() => return false,
            // what would be left of that charge, had it been the only one: no more of it can still count
            Some(at) => charge.drained(view.at - at),
        };
        if view.level.units_up() == 0 || back.units_up() == 0 {
            return false;
        }
        *self = Self { last_us: view.at, level: view.level.without(back) };
        true
    }

    fn expires_at_us(&self) -> u64 {
        self.last_us.saturating_add(self.level.drain_time().0)
    }

    fn snapshot(&self, view: &View, _: &Limit) -> Snapshot {
        Snapshot::TokenBucket(view.level)
    }
}
