#![doc = include_str!("../../docs/algorithms/sliding-counter.md")]

use std::time::Duration;

use super::{
    Algorithm, Bound, Charge, Counter, Properties, Reset, StoredState, add_capped, effective_time,
    multiply_divide, wait_until,
};
use crate::{
    limit::{Limit, LimitError, MAX_AMOUNT},
    snapshot::{Snapshot, Span},
};

/// Two counters: one of the current window, one of the previous window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct State {
    /// Time of the last charge.
    pub last_us: u64,
    /// Start of the current window.
    pub start_us: u64,
    /// Units charged in the current window.
    pub current: u64,
    /// Units charged in the previous window.
    pub previous: u64,
    /// Length of the window that the state was written under.
    pub window_us: u64,
}

/// Both counters advanced to one moment, in the window that they were written under.
pub struct View {
    now: u64,
    /// Effective time of the counter.
    at: u64,
    window: u64,
    start: u64,
    current: u64,
    previous: u64,
    used: u64,
    /// When all units stop counting, because the limit has another window now.
    cutoff: Option<u64>,
}

impl View {
    fn empty(limit: &Limit, now: u64, at: u64) -> Self {
        let window = limit.window_us();
        Self { now, at, window, start: at - at % window, current: 0, previous: 0, used: 0, cutoff: None }
    }
}

impl Counter for State {
    const PROPERTIES: Properties = Properties {
        max_amount: MAX_AMOUNT,
        has_window: true,
        has_burst: false,
        has_phase: false,
        has_calendar: false,
        has_sliding_window: true,
        is_log: false,
        script_code: 2,
    };
    type View = View;

    #[inline]
    fn view(&self, limit: &Limit, now: u64) -> View {
        let Some(at) = effective_time(self.last_us, limit.window_us(), now) else {
            return View::empty(limit, now, now);
        };
        let changed = self.window_us != limit.window_us();
        let cutoff = changed.then_some(self.last_us + limit.window_us());
        if self.window_us == 0 || cutoff.is_some_and(|cutoff| at >= cutoff) {
            return View::empty(limit, now, at);
        }
        let window = self.window_us;
        let start = at - at % window;
        let (current, previous) = match start - self.start_us {
            0 => (self.current, self.previous),
            advanced if advanced == window => (0, self.current),
            _ => (0, 0),
        };
        let (whole, part) = multiply_divide(previous, start + window - at, window);
        let used = current + whole + u64::from(part > 0);
        View { now, at, window, start, current, previous, used, cutoff }
    }

    #[inline]
    fn used(view: &View) -> u64 {
        view.used
    }

    #[inline]
    fn charge(&mut self, view: &mut View, limit: &Limit, units: u64) {
        let used = add_capped(view.used, units);
        if view.cutoff.is_some() {
            *view = View { current: view.used, used: view.used, ..View::empty(limit, view.now, view.at) };
        }
        view.current += used - view.used;
        view.used = used;
        *self = Self {
            last_us: view.at,
            start_us: view.start,
            current: view.current,
            previous: view.previous,
            window_us: view.window,
        };
    }

    #[inline]
    fn wait_us(&self, view: &View, max_used: u64) -> u64 {
        let faded = |count: u64, left: u64| view.window - multiply_divide(left, view.window, count).0;
        let time = if view.current <= max_used {
            view.start + faded(view.previous, max_used - view.current)
        } else {
            view.start + view.window + faded(view.current, max_used)
        };
        wait_until(time, view.cutoff, view.now)
    }

    #[inline]
    fn reset(&self, view: &View) -> Reset {
        let windows = match (view.current, view.previous) {
            (0, 0) => return Reset::default(),
            (0, _) => 1,
            _ => 2,
        };
        Reset::after(wait_until(view.start + windows * view.window, view.cutoff, view.now))
    }

    fn refund(&mut self, view: &View, _: &Limit, units: u64, charge: Option<Charge>) -> bool {
        let current = view.start..view.start + view.window;
        let previous = view.start.saturating_sub(view.window)..view.start;
        let from_current = match charge {
            Some(charge) if !current.contains(&charge.at_us) => 0,
            _ => units.min(view.current),
        };
        let from_previous = match charge {
            Some(charge) if !previous.contains(&charge.at_us) => 0,
            _ => (units - from_current).min(view.previous),
        };
        if view.start == self.start_us {
            self.current -= from_current;
            self.previous -= from_previous;
        } else {
            self.current -= from_previous;
        }
        from_current + from_previous > 0
    }

    fn own_limit(&self, limit: &Limit) -> Limit {
        if self.window_us == 0 || self.window_us == limit.window_us() {
            return *limit;
        }
        limit.with_window_of_state(self.window_us, 0)
    }

    fn expires_at_us(&self) -> u64 {
        self.start_us + 2 * self.window_us
    }

    fn snapshot(&self, view: &View, _: &Limit) -> Snapshot {
        let end = view.start + view.window;
        let ends_us = if view.used == 0 { 0 } else { view.now + self.reset(view).after_us };
        Snapshot::SlidingCounter {
            previous: Span {
                from_us: view.start.saturating_sub(view.window),
                until_us: view.start,
                units: view.previous,
            },
            current: Span { from_us: view.start, until_us: end, units: view.current },
            ends_us,
        }
    }

    fn bound(limit: &Limit) -> Bound {
        // the previous window spent in its last instant, then all but the unit by which the faded part is rounded up
        Bound::Window { most: 2 * limit.amount() - 1, window: limit.window() }
    }

    fn from_stored(stored: &StoredState<'_>) -> Option<Self> {
        match *stored.numbers {
            [last_us, start_us, current, previous, window_us, _ttl]
                if window_us > 0 && start_us <= last_us && start_us.is_multiple_of(window_us) =>
            {
                Some(Self { last_us, start_us, current, previous, window_us })
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
        debug_assert_eq!(self.start_us, window_start(self.last_us, self.window_us));
        Some(([self.window_us, 0], [self.last_us, self.current, self.previous]))
    }

    /// The start of the window follows from the last charge, which is inside it.
    #[inline(always)]
    fn unpack([window_us, _]: [u64; 2], [last_us, current, previous]: [u64; 3]) -> Self {
        Self { last_us, start_us: window_start(last_us, window_us), current, previous, window_us }
    }
}

fn window_start(last_us: u64, window_us: u64) -> u64 {
    last_us - last_us.checked_rem(window_us).unwrap_or(0)
}

impl Limit {
    /// Creates a limit: about `amount` in any window, in constant memory.
    ///
    /// # Errors
    /// As [`Limit::new`].
    pub fn sliding_counter(amount: u64, window: Duration) -> Result<Self, LimitError> {
        Self::new(Algorithm::SlidingCounter, amount, window)
    }
}
