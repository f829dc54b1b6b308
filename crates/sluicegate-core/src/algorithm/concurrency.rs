#![doc = include_str!("../../docs/algorithms/concurrency.md")]

use super::{Bound, Charge, Counter, Properties, Reset, StoredState, add_capped};
use crate::{
    limit::{Limit, MAX_AMOUNT},
    snapshot::{Snapshot, Span},
};

/// The units of live holds, and when holds expire. [`Holds`](crate::hold::Holds) contains the holds themselves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct State {
    /// The units of all holds that are not released yet.
    pub live: u64,
    /// The time at which the first of them expires.
    pub first_expiry_us: u64,
    /// The time at which the last of them expires.
    pub last_expiry_us: u64,
}

/// The units that count at one time.
pub struct View {
    now: u64,
    live: u64,
}

impl Counter for State {
    const PROPERTIES: Properties = Properties {
        max_amount: MAX_AMOUNT,
        has_window: false,
        has_burst: false,
        has_phase: false,
        has_calendar: false,
        has_sliding_window: false,
        is_log: false,
        script_code: 6,
    };
    type View = View;

    #[inline]
    fn view(&self, _limit: &Limit, now: u64) -> View {
        View { now, live: self.live }
    }

    #[inline]
    fn used(view: &View) -> u64 {
        view.live
    }

    fn charge(&mut self, view: &mut View, _limit: &Limit, units: u64) {
        view.live = add_capped(view.live, units);
        self.live = view.live;
    }

    /// An upper bound: a hold that is settled earlier frees its units at once. Expired holds are released by the next check.
    fn wait_us(&self, view: &View, _max_used: u64) -> u64 {
        self.first_expiry_us.saturating_sub(view.now).max(1)
    }

    fn reset(&self, view: &View) -> Reset {
        Reset::after(if view.live == 0 { 0 } else { self.last_expiry_us.saturating_sub(view.now).max(1) })
    }

    fn refund(&mut self, view: &View, _limit: &Limit, units: u64, _charge: Option<Charge>) -> bool {
        self.live = view.live - units.min(view.live);
        self.live < view.live
    }

    fn own_limit(&self, limit: &Limit) -> Limit {
        *limit
    }

    fn expires_at_us(&self) -> u64 {
        self.last_expiry_us
    }

    fn snapshot(&self, view: &View, _limit: &Limit) -> Snapshot {
        let (from_us, until_us) = (self.first_expiry_us, self.last_expiry_us);
        Snapshot::Concurrency(Span { from_us, until_us, units: view.live })
    }

    fn bound(limit: &Limit) -> Bound {
        Bound::Live { most: limit.amount() }
    }

    /// The script stores live holds in a sorted set, not as numbers.
    fn from_stored(_stored: &StoredState<'_>) -> Option<Self> {
        None
    }

    #[inline(always)]
    fn scale(_limit: &Limit) -> Option<[u64; 2]> {
        Some([0, 0])
    }

    #[inline(always)]
    fn pack(&self) -> Option<([u64; 2], [u64; 3])> {
        Some(([0, 0], [self.live, self.first_expiry_us, self.last_expiry_us]))
    }

    #[inline(always)]
    fn unpack(_scale: [u64; 2], [live, first_expiry_us, last_expiry_us]: [u64; 3]) -> Self {
        Self { live, first_expiry_us, last_expiry_us }
    }
}
