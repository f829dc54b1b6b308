#![doc = include_str!("../../docs/algorithms/sliding-counter.md")]

use super::{Reset, add_up_to_max, capped, key_time, multiply_divide};
use crate::limit::Limit;

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
#[derive(Clone, Copy)]
struct View {
    now: u64,
    window: u64,
    start: u64,
    current: u64,
    previous: u64,
    /// When all of it stops counting because the limit has another window now.
    cut: Option<u64>,
}

impl View {
    fn used(&self) -> u64 {
        let left = self.start + self.window - self.now;
        let (whole, part) = multiply_divide(self.previous, left, self.window);
        self.current + whole + u64::from(part > 0)
    }

    /// Microseconds from the view's moment until at most `room` units count.
    fn wait(&self, room: u64) -> u64 {
        let elapsed = self.now - self.start;
        let faded = |count: u64, room: u64| self.window - multiply_divide(room, self.window, count).0;
        if self.current <= room {
            faded(self.previous, room - self.current) - elapsed
        } else {
            self.window - elapsed + faded(self.current, room)
        }
    }

    fn empty(limit: &Limit, now: u64) -> Self {
        let window = limit.window_us();
        Self { now, window, start: now - now % window, current: 0, previous: 0, cut: None }
    }
}

impl State {
    fn view(&self, limit: &Limit, now: u64) -> View {
        let Some(now) = key_time(self.last_us, limit.window_us(), now) else {
            return View::empty(limit, now);
        };
        let changed = self.window_us != limit.window_us();
        let cut = changed.then_some(self.last_us + limit.window_us());
        if self.window_us == 0 || cut.is_some_and(|cut| now >= cut) {
            return View::empty(limit, now);
        }
        let window = self.window_us;
        let start = now - now % window;
        let (current, previous) = match start - self.start_us {
            0 => (self.current, self.previous),
            rolled if rolled == window => (0, self.current),
            _ => (0, 0),
        };
        View { now, window, start, current, previous, cut }
    }

    pub(super) fn used(&self, limit: &Limit, now: u64) -> u64 {
        self.view(limit, now).used()
    }

    pub(super) fn wait_us(&self, limit: &Limit, now: u64, room: u64) -> u64 {
        let view = self.view(limit, now);
        view.before_cut(view.now + view.wait(room), now)
    }

    pub(super) fn reset(&self, limit: &Limit, now: u64) -> Reset {
        let view = self.view(limit, now);
        let windows = match (view.current, view.previous) {
            (0, 0) => return Reset::default(),
            (0, _) => 1,
            _ => 2,
        };
        Reset::after(view.before_cut(view.start + windows * view.window, now))
    }

    pub(super) fn charge(&mut self, limit: &Limit, now: u64, units: u64) {
        let mut view = self.view(limit, now);
        let added = add_up_to_max(view.used(), units) - view.used();
        if view.cut.is_some() {
            let carried = view.used();
            view = View { current: carried, ..View::empty(limit, view.now) };
        }
        *self = Self {
            last_us: view.now,
            start_us: view.start,
            current: view.current + added,
            previous: view.previous,
            window_us: view.window,
        };
    }

    pub(super) fn refund(&mut self, limit: &Limit, now: u64, units: u64, at: Option<u64>) -> bool {
        let view = self.view(limit, now);
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

    pub(super) fn expires_at_us(&self) -> u64 {
        self.start_us + 2 * self.window_us
    }
}

impl View {
    /// The wait from `now` until `moment`, or until everything stops counting if that is sooner.
    fn before_cut(&self, moment: u64, now: u64) -> u64 {
        capped(self.cut.map_or(moment, |cut| cut.min(moment)) - now)
    }
}
