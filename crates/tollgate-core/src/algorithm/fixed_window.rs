#![doc = include_str!("../../docs/algorithms/fixed-window.md")]

use super::{Reset, add_up_to_max, capped, key_time};
use crate::limit::Limit;

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
struct View {
    now: u64,
    /// The end of the limit's own window at `now`.
    end: u64,
    used: u64,
    until: u64,
}

impl State {
    fn view(&self, limit: &Limit, now: u64) -> View {
        let window = limit.window_us();
        let Some(now) = key_time(self.last_us, window, now) else {
            return Self::default().view(limit, now);
        };
        let end = window_end(limit, now);
        let until = if self.window_us == window && self.end_us == end {
            end
        } else {
            self.end_us.min(self.last_us + window)
        };
        View { now, end, used: if now < until { self.used } else { 0 }, until }
    }

    pub(super) fn used(&self, limit: &Limit, now: u64) -> u64 {
        self.view(limit, now).used
    }

    pub(super) fn wait_us(&self, limit: &Limit, now: u64, _room: u64) -> u64 {
        capped(self.view(limit, now).until - now)
    }

    pub(super) fn reset(&self, limit: &Limit, now: u64) -> Reset {
        let view = self.view(limit, now);
        Reset::after(if view.used == 0 { 0 } else { capped(view.until - now) })
    }

    pub(super) fn charge(&mut self, limit: &Limit, now: u64, units: u64) {
        let view = self.view(limit, now);
        *self = Self {
            last_us: view.now,
            end_us: view.end,
            used: add_up_to_max(view.used, units),
            window_us: limit.window_us(),
        };
    }

    pub(super) fn refund(&mut self, limit: &Limit, now: u64, units: u64, at: Option<u64>) -> bool {
        let counted = self.end_us.saturating_sub(self.window_us)..self.end_us;
        if at.is_some_and(|at| !counted.contains(&at)) {
            return false;
        }
        let back = units.min(self.view(limit, now).used);
        self.used -= back;
        back > 0
    }

    pub(super) fn expires_at_us(&self) -> u64 {
        self.end_us
    }
}

fn window_end(limit: &Limit, now: u64) -> u64 {
    let window = limit.window_us();
    let elapsed = (now + window - limit.phase_us()) % window;
    now + window - elapsed
}
