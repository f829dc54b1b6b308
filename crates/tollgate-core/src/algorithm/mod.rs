//! The four algorithms: each a small state and what it does with a charge, as pure functions of time.
//!
//! Every algorithm reads its state once per decision: a *view* is what counts at one moment under one
//! limit. On it, it answers the same questions: how much counts now, when no more than so much will, when
//! nothing will, and what state and view are after a charge. The rest of the decision ([`crate::step`])
//! is the same for all.
//!
//! Two rules hold for all of them:
//!
//! * **A counter's time never runs backwards.** A state dated ahead of the clock is read at its own
//!   date; one dated more than a window ahead counts as absent.
//! * **A changed limit keeps what was used.** A state remembers the window or rate it was written
//!   under. Under another one, it counts as before until the next charge, which carries it over as if it
//!   had been charged then; but never longer than one new window after the last charge (a bucket
//!   drains at the faster of the two rates instead).

pub mod fixed_window;
pub mod sliding_counter;
pub mod sliding_log;
pub mod token_bucket;

use crate::{
    limit::{Algorithm, Limit},
    snapshot::Snapshot,
    time::{MAX_EXACT, MAX_WAIT_US, Timestamp},
};

/// What a store keeps of one counter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// Of a fixed window.
    FixedWindow(fixed_window::State),
    /// Of a sliding log.
    SlidingLog(sliding_log::State),
    /// Of a sliding counter.
    SlidingCounter(sliding_counter::State),
    /// Of a token bucket.
    TokenBucket(token_bucket::State),
}

/// When nothing counts any more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reset {
    /// Microseconds from now; 0 when nothing counts.
    pub after_us: u64,
    /// By how much the last of them is too long, in parts of it: one part is `1 / limit.rate().units`. Only a
    /// bucket empties within a microsecond.
    pub spare: u64,
}

impl Reset {
    fn after(after_us: u64) -> Self {
        Self { after_us, spare: 0 }
    }
}

/// The state of one algorithm: times are microseconds since the epoch. A view is made once per decision; a charge keeps
/// it as if it had been made again.
pub trait Counter {
    /// The state read at one moment, under one limit.
    type View;
    /// What counts at `now`.
    fn view(&self, limit: &Limit, now: u64) -> Self::View;
    /// How many units count, a started one as a whole.
    fn used(view: &Self::View) -> u64;
    /// Counts `units` more, whatever the limit says.
    fn charge(&mut self, view: &mut Self::View, limit: &Limit, units: u64);
    /// Microseconds until at most `room` units count, which is less than what counts now.
    fn wait_us(&self, view: &Self::View, room: u64) -> u64;
    /// When nothing counts any more.
    fn reset(&self, view: &Self::View) -> Reset;
    /// Takes up to `units` back. Whether anything was; the view is to be made again.
    fn refund(&mut self, view: &Self::View, limit: &Limit, units: u64, at: Option<u64>) -> bool;
    /// From when on this state equals a fresh one under every limit.
    fn expires_at_us(&self) -> u64;
    /// What counts, for people to look at.
    fn snapshot(&self, view: &Self::View, limit: &Limit) -> Snapshot;
}

/// The same for the state of whichever algorithm: one branch, then straight on.
macro_rules! each {
    ($state:expr, $inner:ident => $body:expr) => {
        match $state {
            $crate::State::FixedWindow($inner) => $body,
            $crate::State::SlidingLog($inner) => $body,
            $crate::State::SlidingCounter($inner) => $body,
            $crate::State::TokenBucket($inner) => $body,
        }
    };
}
pub(crate) use each;

impl State {
    /// A counter that nobody has used.
    pub fn fresh(algorithm: Algorithm) -> Self {
        match algorithm {
            Algorithm::FixedWindow => Self::FixedWindow(fixed_window::State::default()),
            Algorithm::SlidingLog => Self::SlidingLog(sliding_log::State::default()),
            Algorithm::SlidingCounter => Self::SlidingCounter(sliding_counter::State::default()),
            Algorithm::TokenBucket => Self::TokenBucket(token_bucket::State::default()),
        }
    }

    /// Which algorithm it belongs to.
    pub const fn algorithm(&self) -> Algorithm {
        match self {
            Self::FixedWindow(_) => Algorithm::FixedWindow,
            Self::SlidingLog(_) => Algorithm::SlidingLog,
            Self::SlidingCounter(_) => Algorithm::SlidingCounter,
            Self::TokenBucket(_) => Algorithm::TokenBucket,
        }
    }

    /// How many units count against `limit` at `now`, a started one as a whole.
    pub fn used(&self, limit: &Limit, now: Timestamp) -> u64 {
        fn of<C: Counter>(counter: &C, limit: &Limit, now: u64) -> u64 {
            C::used(&counter.view(limit, now))
        }
        each!(self, counter => of(counter, limit, now.as_micros()))
    }

    /// When nothing counts any more.
    pub fn reset(&self, limit: &Limit, now: Timestamp) -> Reset {
        each!(self, counter => counter.reset(&counter.view(limit, now.as_micros())))
    }

    /// Counts `units` more, whatever the limit says: the caller has decided, or reports what happened.
    /// What counts never exceeds 2^53 - 1.
    pub fn charge(&mut self, limit: &Limit, now: Timestamp, units: u64) {
        each!(self, counter => counter.charge(&mut counter.view(limit, now.as_micros()), limit, units));
    }

    /// Takes up to `units` back: the newest ones, or exactly those charged `at` that moment. Whether
    /// anything was taken back.
    pub fn refund(&mut self, limit: &Limit, now: Timestamp, units: u64, at: Option<Timestamp>) -> bool {
        let at = at.map(Timestamp::as_micros);
        each!(self, counter => counter.refund(&counter.view(limit, now.as_micros()), limit, units, at))
    }

    /// From when on this state equals a fresh one under every limit.
    pub fn expires_at(&self) -> Timestamp {
        Timestamp::from_micros(each!(self, counter => counter.expires_at_us()))
    }

    /// What counts against `limit` at `now`, for people to look at.
    pub fn snapshot(&self, limit: &Limit, now: Timestamp) -> Snapshot {
        each!(self, counter => counter.snapshot(&counter.view(limit, now.as_micros()), limit))
    }

    /// Bytes this state holds beyond its own size.
    pub fn heap_bytes(&self) -> usize {
        self.log().map_or(0, sliding_log::State::heap_bytes)
    }

    /// How many bytes the next charge may add, when it may add any.
    pub fn next_growth_bytes(&self) -> Option<usize> {
        self.log().and_then(sliding_log::State::next_growth_bytes)
    }

    /// How many entries a log holds.
    pub fn entries(&self) -> usize {
        self.log().map_or(0, |log| log.entries.len())
    }

    /// Lets a log hold at most so many entries from now on, whatever its limit is.
    pub fn limit_entries(&mut self, entries: usize) {
        if let Self::SlidingLog(log) = self {
            log.max_entries = entries;
        }
    }

    fn log(&self) -> Option<&sliding_log::State> {
        match self {
            Self::SlidingLog(log) => Some(log),
            Self::FixedWindow(_) | Self::SlidingCounter(_) | Self::TokenBucket(_) => None,
        }
    }
}

/// The moment at which a state dated `last` is read: its own date if the clock is behind it; nothing when
/// it is dated more than a window ahead, because then the clock has been set back.
#[inline]
fn key_time(last: u64, window: u64, now: u64) -> Option<u64> {
    (last <= now + window).then(|| last.max(now))
}

/// `used` and `units` more, as far as a counter can hold.
#[inline]
fn add_up_to_max(used: u64, units: u64) -> u64 {
    used + units.min(MAX_EXACT - used)
}

/// `a * b / divisor` and its remainder, without overflow on the way. The quotient saturates.
#[inline]
fn multiply_divide(a: u64, b: u64, divisor: u64) -> (u64, u64) {
    match a.checked_mul(b) {
        // many divisors are one, and a division takes its time
        Some(product) if divisor == 1 => return (product, 0),
        Some(product) => return (product / divisor, product % divisor),
        None => {}
    }
    let (product, divisor) = (u128::from(a) * u128::from(b), u128::from(divisor));
    let quotient = product / divisor;
    // not a second division: in 128 bits it is a call
    let remainder = product - quotient * divisor;
    let remainder = u64::try_from(remainder).expect("a remainder is below its u64 divisor");
    (u64::try_from(quotient).unwrap_or(u64::MAX), remainder)
}

/// The wait from `now` until `moment`, or until `cut` if that is sooner: when all stops counting because the
/// limit has another window now.
#[inline]
fn before_cut(moment: u64, cut: Option<u64>, now: u64) -> u64 {
    capped(cut.map_or(moment, |cut| cut.min(moment)) - now)
}

/// A wait, as far as it can be told apart.
#[inline]
fn capped(wait_us: u64) -> u64 {
    wait_us.min(MAX_WAIT_US)
}
