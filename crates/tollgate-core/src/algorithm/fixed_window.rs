#![doc = include_str!("../../docs/algorithms/fixed-window.md")]

use super::{Counter, Reset, add_up_to_max, capped, key_time};
use crate::{
    limit::Limit,
    snapshot::{Snapshot, Span},
};

/// One counter and the window it belongs to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct State {
    /// When it was last charged.
    pub last_us: u64,
    /// When its window ends.
    pub end_us: u64,
    /// How much was charged in that window.
    pub used: u64,
    /// The length of the window it was written under.
    pub window_us: u64,
}

/// What counts at one moment, and until when.
pub struct View {
    now: u64,
    /// The counter's own time.
    at: u64,
    /// The end of the limit's own window then.
    end: u64,
    used: u64,
    until: u64,
}

impl Counter for State {
    type View = View;

    #[inline]
    fn view(&self, limit: &Limit, now: u64) -> View {
        let window = limit.window_us();
        let Some(at) = key_time(self.last_us, window, now) else {
            return Self::default().view(limit, now);
        };
        let end = window_end(limit, at);
        let until = if self.window_us == window && self.end_us == end {
            end
        } else {
            self.end_us.min(self.last_us + window)
        };
        View { now, at, end, used: if at < until { self.used } else { 0 }, until }
    }

    #[inline]
    fn used(view: &View) -> u64 {
        view.used
    }

    #[inline]
    fn charge(&mut self, view: &mut View, limit: &Limit, units: u64) {
        view.used = add_up_to_max(view.used, units);
        view.until = view.end;
        *self = Self { last_us: view.at, end_us: view.end, used: view.used, window_us: limit.window_us() };
    }

    #[inline]
    fn wait_us(&self, view: &View, _room: u64) -> u64 {
        capped(view.until - view.now)
    }

    #[inline]
    fn reset(&self, view: &View) -> Reset {
        Reset::after(if view.used == 0 { 0 } else { capped(view.until - view.now) })
    }

    fn refund(&mut self, view: &View, _: &Limit, units: u64, at: Option<u64>) -> bool {
        let counted = self.end_us.saturating_sub(self.window_us)..self.end_us;
        if at.is_some_and(|at| !counted.contains(&at)) {
            return false;
        }
        let back = units.min(view.used);
        self.used -= back;
        back > 0
    }

    fn expires_at_us(&self) -> u64 {
        self.end_us
    }

    fn snapshot(&self, view: &View, limit: &Limit) -> Snapshot {
        let (from_us, until_us) = if view.used == 0 {
            (view.end - limit.window_us(), view.end)
        } else {
            (self.end_us.saturating_sub(self.window_us), view.until)
        };
        Snapshot::FixedWindow(Span { from_us, until_us, units: view.used })
    }
}

#[inline]
fn window_end(limit: &Limit, now: u64) -> u64 {
    let window = limit.window_us();
    let elapsed = (now + window - limit.phase_us()) % window;
    now + window - elapsed
}
