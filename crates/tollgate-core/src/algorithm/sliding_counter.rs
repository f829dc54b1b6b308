#![doc = include_str!("../../docs/algorithms/sliding-counter.md")]

use super::{Counter, Reset, add_up_to_max, before_cut, key_time, multiply_divide};
use crate::{
    limit::Limit,
    snapshot::{Snapshot, Span},
};

/// Two counters, of the window that is under way and of the one before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct State {
    /// When it was last charged.
    pub last_us: u64,
    /// When the current window began.
    pub start_us: u64,
    /// How much was charged in the current window.
    pub current: u64,
    /// How much was charged in the window before.
    pub previous: u64,
    /// The length of the window it was written under.
    pub window_us: u64,
}

/// Both counters rolled forward to one moment, in the window they were written under.
pub struct View {
    now: u64,
    /// The counter's own time.
    at: u64,
    window: u64,
    start: u64,
    current: u64,
    previous: u64,
    used: u64,
    /// When all of it stops counting because the limit has another window now.
    cut: Option<u64>,
}

impl View {
    fn empty(limit: &Limit, now: u64, at: u64) -> Self {
        let window = limit.window_us();
        Self { now, at, window, start: at - at % window, current: 0, previous: 0, used: 0, cut: None }
    }
}

impl Counter for State {
    type View = View;

    #[inline]
    fn view(&self, limit: &Limit, now: u64) -> View {
        let Some(at) = key_time(self.last_us, limit.window_us(), now) else {
            return View::empty(limit, now, now);
        };
        let changed = self.window_us != limit.window_us();
        let cut = changed.then_some(self.last_us + limit.window_us());
        if self.window_us == 0 || cut.is_some_and(|cut| at >= cut) {
            return View::empty(limit, now, at);
        }
        let window = self.window_us;
        let start = at - at % window;
        let (current, previous) = match start - self.start_us {
            0 => (self.current, self.previous),
            rolled if rolled == window => (0, self.current),
            _ => (0, 0),
        };
        let (whole, part) = multiply_divide(previous, start + window - at, window);
        let used = current + whole + u64::from(part > 0);
        View { now, at, window, start, current, previous, used, cut }
    }

    #[inline]
    fn used(view: &View) -> u64 {
        view.used
    }

    #[inline]
    fn charge(&mut self, view: &mut View, limit: &Limit, units: u64) {
        let used = add_up_to_max(view.used, units);
        if view.cut.is_some() {
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
    fn wait_us(&self, view: &View, room: u64) -> u64 {
        let faded = |count: u64, room: u64| view.window - multiply_divide(room, view.window, count).0;
        let moment = if view.current <= room {
            view.start + faded(view.previous, room - view.current)
        } else {
            view.start + view.window + faded(view.current, room)
        };
        before_cut(moment, view.cut, view.now)
    }

    #[inline]
    fn reset(&self, view: &View) -> Reset {
        let windows = match (view.current, view.previous) {
            (0, 0) => return Reset::default(),
            (0, _) => 1,
            _ => 2,
        };
        Reset::after(before_cut(view.start + windows * view.window, view.cut, view.now))
    }

    fn refund(&mut self, view: &View, _: &Limit, units: u64, at: Option<u64>) -> bool {
        let current = view.start..view.start + view.window;
        let previous = view.start.saturating_sub(view.window)..view.start;
        let from_current = match at {
            Some(at) if !current.contains(&at) => 0,
            _ => units.min(view.current),
        };
        let from_previous = match at {
            Some(at) if !previous.contains(&at) => 0,
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
}
