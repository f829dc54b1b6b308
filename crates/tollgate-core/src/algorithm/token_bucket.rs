#![doc = include_str!("../../docs/algorithms/token-bucket.md")]

use super::{Reset, capped, key_time, multiply_divide};
use crate::{
    limit::{Limit, Rate},
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
    const fn empty(rate: Rate) -> Self {
        Self { whole: 0, part: 0, rate }
    }

    fn units_up(&self) -> u64 {
        self.whole + u64::from(self.part > 0)
    }

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
    fn at_rate(self, rate: Rate) -> Self {
        if rate == self.rate {
            return self;
        }
        let (part, rest) = multiply_divide(self.part, rate.micros, self.rate.micros);
        let part = part + u64::from(rest > 0);
        if part == rate.micros {
            Self { whole: self.whole + 1, part: 0, rate }
        } else {
            Self { whole: self.whole, part, rate }
        }
    }

    /// Microseconds until all of it has drained, and how many parts of the last one are left over.
    fn drain_time(self) -> (u64, u64) {
        let (micros, rest) = multiply_divide(self.whole, self.rate.micros, self.rate.units);
        let rest = rest + self.part;
        let micros = micros.saturating_add(rest.div_ceil(self.rate.units));
        if micros > MAX_WAIT_US {
            return (MAX_WAIT_US, 0);
        }
        (micros, rest.next_multiple_of(self.rate.units) - rest)
    }
}

impl State {
    /// The key's own time and the level then, draining at the faster of the old rate and the new.
    fn view(&self, limit: &Limit, now: u64) -> (u64, Level) {
        let Some(now) = key_time(self.last_us, limit.window_us(), now) else {
            return (now, Level::empty(limit.rate()));
        };
        let level = if limit.rate().is_faster_than(self.level.rate) {
            self.level.at_rate(limit.rate())
        } else {
            self.level
        };
        (now, level.drained(now - self.last_us))
    }

    pub(super) fn used(&self, limit: &Limit, now: u64) -> u64 {
        self.view(limit, now).1.units_up()
    }

    pub(super) fn wait_us(&self, limit: &Limit, now: u64, room: u64) -> u64 {
        let (key_now, level) = self.view(limit, now);
        let excess = Level { whole: level.whole - room, ..level };
        capped(key_now - now + excess.drain_time().0)
    }

    pub(super) fn reset(&self, limit: &Limit, now: u64) -> Reset {
        let (key_now, level) = self.view(limit, now);
        if level.units_up() == 0 {
            return Reset::default();
        }
        let (wait, spare) = level.drain_time();
        Reset { after_us: capped(key_now - now + wait), spare }
    }

    pub(super) fn charge(&mut self, limit: &Limit, now: u64, units: u64) {
        let (now, level) = self.view(limit, now);
        let mut level = level.at_rate(limit.rate());
        level.whole += units.min(MAX_EXACT - level.units_up());
        *self = Self { last_us: now, level };
    }

    pub(super) fn refund(&mut self, limit: &Limit, now: u64, units: u64, at: Option<u64>) -> bool {
        let (key_now, level) = self.view(limit, now);
        let charge = Level { whole: units, part: 0, rate: level.rate };
        let back = match at {
            None => charge,
            Some(at) if at > key_now || key_now - at >= limit.window_us() => return false,
            // what would be left of that charge, had it been the only one: no more of it can still count
            Some(at) => charge.drained(key_now - at),
        };
        if level.units_up() == 0 || back.units_up() == 0 {
            return false;
        }
        *self = Self { last_us: key_now, level: level.without(back) };
        true
    }

    pub(super) fn expires_at_us(&self) -> u64 {
        self.last_us.saturating_add(self.level.drain_time().0)
    }
}
