#![doc = include_str!("../../docs/algorithms/fixed-window.md")]

use super::{
    Algorithm, Bound, Charge, Counter, Properties, Reset, StoredState, add_capped, cap_wait, effective_time,
};
use crate::{
    calendar::PeriodEdges,
    limit::{Limit, LimitError, MAX_AMOUNT, Window},
    snapshot::{Snapshot, Span},
    time::Timestamp,
};

/// One counter and its window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct State {
    /// Time of the last charge.
    pub last_us: u64,
    /// End of the window; later than that if instances use several windows.
    pub end_us: u64,
    /// Units charged until now.
    pub used: u64,
    /// Length of the window that the state was written under; of a calendar window, an upper bound of it.
    pub window_us: u64,
}

/// The units that count at one moment, and until when.
pub struct View {
    now: u64,
    /// Effective time of the counter.
    at: u64,
    /// Start of the limit's window at that time.
    start: u64,
    /// Its end.
    end: u64,
    used: u64,
    until: u64,
}

impl Counter for State {
    const PROPERTIES: Properties = Properties {
        max_amount: MAX_AMOUNT,
        has_window: true,
        has_burst: false,
        has_phase: true,
        has_calendar: true,
        has_sliding_window: false,
        is_log: false,
        script_code: 1,
    };
    type View = View;

    #[inline]
    fn view(&self, limit: &Limit, now: u64) -> View {
        match limit.calendar() {
            None => self.view_in(&Aligned::of(limit), limit, now),
            Some(calendar) => {
                let edges = calendar.edges_at(Timestamp::from_micros(now));
                self.view_in(&edges, limit, now)
            }
        }
    }

    #[inline]
    fn used(view: &View) -> u64 {
        view.used
    }

    #[inline]
    fn charge(&mut self, view: &mut View, limit: &Limit, units: u64) {
        // units that were carried over from another window keep their end
        view.until = if view.used == 0 { view.end } else { view.end.max(view.until) };
        view.used = add_capped(view.used, units);
        *self = Self { last_us: view.at, end_us: view.until, used: view.used, window_us: limit.window_us() };
    }

    #[inline]
    fn wait_us(&self, view: &View, _max_used: u64) -> u64 {
        cap_wait(view.until - view.now)
    }

    #[inline]
    fn reset(&self, view: &View) -> Reset {
        Reset::after(if view.used == 0 { 0 } else { cap_wait(view.until - view.now) })
    }

    fn refund(&mut self, view: &View, limit: &Limit, units: u64, charge: Option<Charge>) -> bool {
        let counted = self.start_us(view, limit)..self.end_us;
        if charge.is_some_and(|charge| !counted.contains(&charge.at_us)) {
            return false;
        }
        let refunded = units.min(view.used);
        self.used -= refunded;
        refunded > 0
    }

    fn own_limit(&self, limit: &Limit) -> Limit {
        if self.window_us == 0 || self.window_us == limit.window_us() {
            return *limit;
        }
        limit.with_window_of_state(self.window_us, self.end_us % self.window_us)
    }

    fn expires_at_us(&self) -> u64 {
        // under another limit, the units may count beyond the end of their own window
        self.last_us + self.window_us
    }

    fn snapshot(&self, view: &View, limit: &Limit) -> Snapshot {
        let (from_us, until_us) =
            if view.used == 0 { (view.start, view.end) } else { (self.start_us(view, limit), view.until) };
        Snapshot::FixedWindow(Span { from_us, until_us, units: view.used })
    }

    fn bound(limit: &Limit) -> Bound {
        // all of one window at its end, all of the next one at its start
        let window = limit.calendar().map_or(limit.window(), |calendar| calendar.unit().shortest());
        Bound::Window { most: 2 * limit.amount(), window }
    }

    fn from_stored(stored: &StoredState<'_>) -> Option<Self> {
        match *stored.numbers {
            [last_us, end_us, used, window_us, _ttl] if window_us > 0 => {
                Some(Self { last_us, end_us, used, window_us })
            }
            _ => None,
        }
    }

    #[inline(always)]
    fn scale(limit: &Limit) -> Option<[u64; 2]> {
        Some([limit.window_us(), 0])
    }

    #[inline(always)]
    fn pack(&self) -> Option<([u64; 2], [u64; 3])> {
        Some(([self.window_us, 0], [self.last_us, self.end_us, self.used]))
    }

    #[inline(always)]
    fn unpack([window_us, _]: [u64; 2], [last_us, end_us, used]: [u64; 3]) -> Self {
        Self { last_us, end_us, used, window_us }
    }
}

impl Limit {
    /// Creates a limit: at most `amount` per window of the clock or period of a calendar, and therefore up to twice that across a
    /// window boundary.
    ///
    /// # Errors
    /// As [`Limit::new`].
    pub fn fixed_window(amount: u64, window: impl Into<Window>) -> Result<Self, LimitError> {
        Self::new(Algorithm::FixedWindow, amount, window)
    }
}

/// The windows of a limit around the present.
trait Windows {
    /// Returns the time at which a state with the last charge at `last` is read: `last` if the clock is behind it, `None` if
    /// the clock is so far behind that it has been set back.
    fn effective_time(&self, last: u64, now: u64) -> Option<u64>;
    /// Returns start and end of the window that contains `time`, which is not before the current one.
    fn containing(&self, time: u64) -> (u64, u64);
    /// Returns the end of the window that contains `time`. For a time before the current window, any time until the current
    /// one starts.
    fn end_of(&self, time: u64) -> u64;
}

/// Windows of equal length.
struct Aligned {
    window: u64,
    phase: u64,
}

impl Aligned {
    #[inline]
    fn of(limit: &Limit) -> Self {
        Self { window: limit.window_us(), phase: limit.phase_us() }
    }
}

impl Windows for Aligned {
    #[inline]
    fn effective_time(&self, last: u64, now: u64) -> Option<u64> {
        effective_time(last, self.window, now)
    }

    #[inline]
    fn containing(&self, time: u64) -> (u64, u64) {
        let end = self.end_of(time);
        (end.saturating_sub(self.window), end)
    }

    #[inline]
    fn end_of(&self, time: u64) -> u64 {
        let elapsed = (time + self.window - self.phase) % self.window;
        time + self.window - elapsed
    }
}

impl Windows for PeriodEdges {
    fn effective_time(&self, last: u64, now: u64) -> Option<u64> {
        (last < self.next_end_us).then(|| last.max(now))
    }

    fn containing(&self, time: u64) -> (u64, u64) {
        if time < self.end_us { (self.start_us, self.end_us) } else { (self.end_us, self.next_end_us) }
    }

    fn end_of(&self, time: u64) -> u64 {
        if time < self.start_us { self.start_us } else { self.containing(time).1 }
    }
}

impl State {
    #[inline(always)]
    fn view_in(&self, windows: &impl Windows, limit: &Limit, now: u64) -> View {
        let Some(at) = windows.effective_time(self.last_us, now) else {
            return Self::default().view_in(windows, limit, now);
        };
        let (start, end) = windows.containing(at);
        let until = if self.window_us == limit.window_us() && self.end_us == end {
            end
        } else {
            self.counts_until(windows, limit)
        };
        View { now, at, start, end, used: if at < until { self.used } else { 0 }, until }
    }

    /// Returns how long the units count under a limit whose window differs from the one that they were charged under,
    /// for example while instances with two versions of a rule share a counter. The end of one version's window must
    /// not release units that still count in the other's. Therefore units count until the end of the window that they
    /// were charged under or of the limit's window that contains the last charge, whichever is later, but for at most
    /// one window after the last charge.
    fn counts_until(&self, windows: &impl Windows, limit: &Limit) -> u64 {
        let own_end = self.end_us.min(self.last_us + limit.window_us());
        let end_under_limit = windows.end_of(self.last_us).min(self.last_us + self.window_us);
        own_end.max(end_under_limit)
    }

    /// Returns the start of the window that the units were charged in. The window of a calendar state is an upper bound, so its
    /// start is not before that of the limit's period.
    fn start_us(&self, view: &View, limit: &Limit) -> u64 {
        let earliest = self.end_us.saturating_sub(self.window_us);
        if limit.calendar().is_some() { earliest.max(view.start) } else { earliest }
    }
}
