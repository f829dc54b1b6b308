#![doc = include_str!("../../docs/algorithms/token-bucket.md")]

use std::time::Duration;

use super::{
    Algorithm, Bound, Charge, Counter, Properties, Reset, StoredState, cap_wait, effective_time,
    multiply_divide,
};
use crate::{
    limit::{Limit, LimitError, MAX_AMOUNT, Rate},
    snapshot::Snapshot,
    time::{MAX_EXACT, MAX_WAIT_US},
};

/// The level of the bucket at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct State {
    /// Time of the level.
    pub last_us: u64,
    /// The charged units that have not drained yet.
    pub level: Level,
}

impl Default for State {
    fn default() -> Self {
        Self { last_us: 0, level: Level::empty(Rate { units: 1, micros: 1 }) }
    }
}

/// `whole + part / rate.micros` units, which drain at `rate`. Exact: nothing is rounded while the rate stays the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Level {
    /// Whole units.
    pub whole: u64,
    /// The fraction, in parts of a unit; below `rate.micros`.
    pub part: u64,
    /// The rate at which it drains.
    pub rate: Rate,
}

impl Level {
    #[inline]
    const fn empty(rate: Rate) -> Self {
        Self { whole: 0, part: 0, rate }
    }

    #[inline]
    fn units_rounded_up(&self) -> u64 {
        self.whole + u64::from(self.part > 0)
    }

    #[inline(always)]
    fn drain(self, elapsed_us: u64) -> Self {
        if elapsed_us == 0 {
            return self;
        }
        let (whole, part) = multiply_divide(elapsed_us, self.rate.units, self.rate.micros);
        if whole > self.whole {
            return Self::empty(self.rate);
        }
        self.minus(Self { whole, part, rate: self.rate })
    }

    /// Subtracts another level of the same rate, down to zero.
    #[inline(always)]
    fn minus(self, other: Self) -> Self {
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

    /// Returns the same level in parts of another rate, rounded up.
    #[inline(always)]
    fn convert_to(self, rate: Rate) -> Self {
        let (carry, part) = convert_part(self.part, self.rate, rate);
        Self { whole: self.whole + carry, part, rate }
    }

    /// Returns the microseconds until the level has drained, and the unused parts of the last one.
    #[inline(always)]
    fn drain_time(self) -> (u64, u64) {
        let (micros, rest) = multiply_divide(self.whole, self.rate.micros, self.rate.units);
        let rest = rest + self.part;
        let last = if self.rate.units == 1 { rest } else { rest.div_ceil(self.rate.units) };
        let micros = micros.saturating_add(last);
        if micros > MAX_WAIT_US { (MAX_WAIT_US, 0) } else { (micros, last * self.rate.units - rest) }
    }
}

/// Converts a part of a unit to parts of another rate, rounded up. Returns the carried unit and the part.
// A separate function of numbers: a level passed by reference would be kept in memory wherever it is used.
#[cold]
fn convert_part(part: u64, from: Rate, to: Rate) -> (u64, u64) {
    let (part, rest) = multiply_divide(part, to.micros, from.micros);
    let part = part + u64::from(rest > 0);
    if part == to.micros { (1, 0) } else { (0, part) }
}

/// The level at one moment. It drains at the faster of the old and the new rate.
pub struct View {
    now: u64,
    /// Effective time of the counter.
    at: u64,
    level: Level,
}

impl Counter for State {
    const PROPERTIES: Properties = Properties {
        max_amount: MAX_AMOUNT,
        has_window: true,
        has_burst: true,
        has_phase: false,
        has_calendar: false,
        has_sliding_window: false,
        is_log: false,
        script_code: 3,
    };
    type View = View;

    #[inline(always)]
    fn view(&self, limit: &Limit, now: u64) -> View {
        let Some(at) = effective_time(self.last_us, limit.window_us(), now) else {
            return View { now, at: now, level: Level::empty(limit.rate()) };
        };
        let mut level = self.level;
        if level.rate != limit.rate() && limit.rate().is_faster_than(level.rate) {
            level = level.convert_to(limit.rate());
        }
        View { now, at, level: level.drain(at - self.last_us) }
    }

    #[inline]
    fn used(view: &View) -> u64 {
        view.level.units_rounded_up()
    }

    #[inline(always)]
    fn charge(&mut self, view: &mut View, limit: &Limit, units: u64) {
        if view.level.rate != limit.rate() {
            view.level = view.level.convert_to(limit.rate());
        }
        view.level.whole += units.min(MAX_EXACT - view.level.units_rounded_up());
        *self = Self { last_us: view.at, level: view.level };
    }

    #[inline(always)]
    fn wait_us(&self, view: &View, max_used: u64) -> u64 {
        let excess = Level { whole: view.level.whole - max_used, ..view.level };
        cap_wait(view.at - view.now + excess.drain_time().0)
    }

    #[inline(always)]
    fn reset(&self, view: &View) -> Reset {
        if view.level.units_rounded_up() == 0 {
            return Reset::default();
        }
        let (wait, spare) = view.level.drain_time();
        Reset { after_us: cap_wait(view.at - view.now + wait), spare }
    }

    fn refund(&mut self, view: &View, limit: &Limit, units: u64, charge: Option<Charge>) -> bool {
        let charged = Level { whole: units, part: 0, rate: view.level.rate };
        let refund = match charge {
            None => charged,
            Some(Charge { at_us, .. }) if at_us > view.at => return false,
            // at a faster rate than now, more of it may have drained
            Some(Charge { at_us, rate })
                if rate != Some(view.level.rate) && view.at - at_us >= limit.window_us() =>
            {
                return false;
            }
            // what is left of that charge if it was the only one: at least as much of it still counts
            Some(Charge { at_us, .. }) => charged.drain(view.at - at_us),
        };
        if view.level.units_rounded_up() == 0 || refund.units_rounded_up() == 0 {
            return false;
        }
        *self = Self { last_us: view.at, level: view.level.minus(refund) };
        true
    }

    fn own_limit(&self, limit: &Limit) -> Limit {
        limit.with_rate_of_state(self.level.rate)
    }

    fn expires_at_us(&self) -> u64 {
        self.last_us.saturating_add(self.level.drain_time().0)
    }

    fn snapshot(&self, view: &View, _: &Limit) -> Snapshot {
        Snapshot::TokenBucket(view.level)
    }

    fn bound(limit: &Limit) -> Bound {
        Bound::Bucket { burst: limit.capacity(), amount: limit.amount(), window: limit.window() }
    }

    fn from_stored(stored: &StoredState<'_>) -> Option<Self> {
        match *stored.numbers {
            [last_us, whole, part, units, micros, _ttl] if units > 0 && part < micros => {
                Some(Self { last_us, level: Level { whole, part, rate: Rate { units, micros } } })
            }
            _ => None,
        }
    }

    fn from_level(limit: &Limit, at: u64, level: u64) -> Self {
        let rate = limit.rate();
        Self { last_us: at, level: Level { whole: level / rate.micros, part: level % rate.micros, rate } }
    }

    #[inline(always)]
    fn scale(limit: &Limit) -> Option<[u64; 2]> {
        Some([limit.rate().units, limit.rate().micros])
    }

    #[inline(always)]
    fn pack(&self) -> Option<([u64; 2], [u64; 3])> {
        let Level { whole, part, rate } = self.level;
        Some(([rate.units, rate.micros], [self.last_us, whole, part]))
    }

    #[inline(always)]
    fn unpack([units, micros]: [u64; 2], [last_us, whole, part]: [u64; 3]) -> Self {
        Self { last_us, level: Level { whole, part, rate: Rate { units, micros } } }
    }
}

impl Limit {
    /// Creates a limit: a steady `amount` per `window`, with a burst of the same size.
    ///
    /// # Errors
    /// As [`Limit::new`].
    pub fn token_bucket(amount: u64, window: Duration) -> Result<Self, LimitError> {
        Self::new(Algorithm::TokenBucket, amount, window)
    }
}
