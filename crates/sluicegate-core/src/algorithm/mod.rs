//! The algorithms. Each is a small state with pure functions of limit, cost and time.
//!
//! A decision reads the state once: a *view* is the state at one moment under one limit. From the view, an algorithm
//! computes how many units count now, when the count falls to a given number, when it reaches zero, and the state and
//! view after a charge. The rest of the decision ([`crate::step`]) is the same for every algorithm.
//!
//! Two rules hold for every algorithm:
//!
//! * **A counter's time never runs backwards.** If the time of a state is ahead of the clock, the state is read at its
//!   own time. A state more than one window ahead counts as absent.
//! * **A changed limit keeps the used units.** A state records the window or rate it was written under. Under another
//!   window, units count as before until the next charge, but for at most one new window after the last charge; the
//!   next charge converts them as if they had been charged at that time. A token bucket drains at the faster of the two
//!   rates instead. In a fixed window, units also count until the end of the new window that contains the last charge.
//!
//! To add an algorithm, write its documentation page, a module with its [`Counter`] and its Lua files, and add one row to
//! the table in this file. The configuration, the stores, the headers and the tools read the table.

pub mod concurrency;
pub mod fixed_window;
pub mod sliding_counter;
pub mod sliding_log;
pub mod token_bucket;

use std::{fmt, str::FromStr, time::Duration};

use crate::{
    limit::{Lease, Limit, LimitError, Rate},
    snapshot::Snapshot,
    time::{MAX_EXACT, MAX_WAIT_US, Timestamp},
};

/// Defines [`Algorithm`], [`State`] and the dispatch macros from the table of algorithms.
macro_rules! register {
    ($d:tt $($(#[$doc:meta])+ $variant:ident = $name:literal $(| $alias:literal)* => $module:ident,)+) => {
        /// The counting algorithms.
        ///
        /// ```
        /// use sluicegate_core::Algorithm;
        ///
        /// assert_eq!("sliding-log".parse(), Ok(Algorithm::SlidingLog));
        /// assert_eq!("gcra".parse(), Ok(Algorithm::TokenBucket));
        /// assert_eq!(Algorithm::TokenBucket.to_string(), "token-bucket");
        /// ```
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Algorithm {
            $($(#[$doc])+ $variant,)+
        }

        impl Algorithm {
            /// Every algorithm, in the order of the documentation.
            pub const ALL: [Self; [$($name),+].len()] = [$(Self::$variant),+];

            /// Every accepted name with its algorithm, aliases included.
            pub const NAMES: &'static [(&'static str, Self)] =
                &[$(($name, Self::$variant), $(($alias, Self::$variant),)*)+];

            /// Returns the name used in configuration, keys and messages.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)+
                }
            }

            /// Returns the fixed properties of the algorithm.
            pub const fn properties(self) -> &'static Properties {
                match self {
                    $(Self::$variant => &<$module::State as Counter>::PROPERTIES,)+
                }
            }
        }

        /// The stored state of one counter.
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub enum State {
            $(#[doc = concat!("State of a ", $name, " counter.")] $variant($module::State),)+
        }

        impl State {
            /// Returns the state of an unused counter.
            pub fn fresh(algorithm: Algorithm) -> Self {
                match algorithm {
                    $(Algorithm::$variant => Self::$variant($module::State::default()),)+
                }
            }

            /// Returns the algorithm that the state belongs to.
            pub const fn algorithm(&self) -> Algorithm {
                match self {
                    $(Self::$variant(_) => Algorithm::$variant,)+
                }
            }
        }

        $(impl From<$module::State> for State {
            fn from(state: $module::State) -> Self {
                Self::$variant(state)
            }
        })+

        /// Evaluates an expression on the counter inside a [`State`]. One branch, then monomorphic code.
        macro_rules! with_counter {
            ($d state:expr, $d counter:ident => $d body:expr) => {
                match $d state {
                    $($crate::State::$variant($d counter) => $d body,)+
                }
            };
        }

        /// Evaluates an expression with a type alias for the counter of an [`Algorithm`].
        macro_rules! with_counter_type {
            ($d algorithm:expr, $d counter:ident => $d body:expr) => {
                match $d algorithm {
                    $($crate::Algorithm::$variant => {
                        type $d counter = $crate::algorithm::$module::State;
                        $d body
                    })+
                }
            };
        }
    };
}

// The table of algorithms: description, variant, name with aliases, module.
register! { $
    /// One counter per window of the clock.
    FixedWindow = "fixed-window" => fixed_window,
    /// The exact times of the accepted requests.
    SlidingLog = "sliding-log" => sliding_log,
    /// Two counters; the weight of the older one decreases over time.
    SlidingCounter = "sliding-counter" => sliding_counter,
    /// A level that drains at a steady rate.
    TokenBucket = "token-bucket" | "gcra" => token_bucket,
    /// The units of live holds. It has no window: units count until their hold ends.
    Concurrency = "concurrency" => concurrency,
}
pub(crate) use with_counter;
pub(crate) use with_counter_type;

/// The fixed properties of an algorithm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Properties {
    /// The largest amount that it counts exactly.
    pub max_amount: u64,
    /// Whether units count for a window. Otherwise they count until their [hold](crate::hold) ends.
    pub has_window: bool,
    /// Whether its limits have a burst.
    pub has_burst: bool,
    /// Whether its limits have a phase.
    pub has_phase: bool,
    /// Whether its limits can have calendar windows.
    pub has_calendar: bool,
    /// Whether the limit applies to the window that ends now, instead of to the time until a reset.
    pub has_sliding_window: bool,
    /// Whether its state is a list of entries instead of a fixed set of numbers.
    pub is_log: bool,
    /// Its number in the Redis script.
    pub script_code: u8,
}

/// The maximum that a limit admits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// At most `most` units in any interval of length `window`.
    Window {
        /// Units.
        most: u64,
        /// Length of the interval.
        window: Duration,
    },
    /// At most `burst` units, plus `amount` per `window` of the elapsed time.
    Bucket {
        /// Units that can be admitted at one time.
        burst: u64,
        /// Units per window.
        amount: u64,
        /// Length of the window.
        window: Duration,
    },
    /// At most `most` units at any moment.
    Live {
        /// Units.
        most: u64,
    },
}

impl Algorithm {
    /// The algorithms whose units count for a window.
    pub const WINDOWED: [Self; 4] =
        [Self::FixedWindow, Self::SlidingLog, Self::SlidingCounter, Self::TokenBucket];

    /// Returns the largest amount that this algorithm counts exactly.
    pub const fn max_amount(self) -> u64 {
        self.properties().max_amount
    }

    /// Returns all names in one phrase, for error messages.
    pub(crate) fn list() -> String {
        let names = Self::ALL.map(Self::name);
        let [others @ .., last] = &names;
        let aliases = Self::NAMES.iter().filter(|(name, _)| !names.contains(name));
        let aliases: Vec<_> = aliases.map(|(name, algorithm)| format!("{name} for {algorithm}")).collect();
        format!("{} or {last} (alias {})", others.join(", "), aliases.join(", "))
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Algorithm {
    type Err = LimitError;

    fn from_str(name: &str) -> Result<Self, LimitError> {
        let found = Self::NAMES.iter().find(|(known, _)| *known == name);
        found.map(|(_, algorithm)| *algorithm).ok_or_else(|| LimitError::UnknownAlgorithm(name.to_owned()))
    }
}

/// When no units count any more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reset {
    /// Microseconds from now; 0 when no units count.
    pub after_us: u64,
    /// The unused part of the last microsecond, in units of `1 / limit.rate().units`. Only a token bucket empties within
    /// a microsecond.
    pub spare: u64,
}

impl Reset {
    fn after(after_us: u64) -> Self {
        Self { after_us, spare: 0 }
    }
}

/// A charge to refund.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Charge {
    /// When it was made.
    pub at_us: u64,
    /// The rate of the limit under which it was made, if that is known. The limit may have changed since.
    pub rate: Option<Rate>,
}

impl Charge {
    /// Returns a charge that was made `at` that moment.
    pub fn at(at: Timestamp) -> Self {
        Self { at_us: at.as_micros(), rate: None }
    }

    /// Returns a charge that was made `at` that moment under `limit`.
    pub fn under(limit: &Limit, at: Timestamp) -> Self {
        Self { at_us: at.as_micros(), rate: Some(limit.rate()) }
    }
}

/// A counter as the Redis script stores it.
#[derive(Clone, Copy, Debug)]
pub struct StoredState<'a> {
    /// The stored numbers; for a log, those of its header.
    pub numbers: &'a [u64],
    /// The newest entries of a log, at most [`MAX_CHARGES`](crate::snapshot::MAX_CHARGES) + 1; otherwise empty.
    pub entries: &'a [u8],
}

/// The state of one algorithm. Times are microseconds since the epoch. A view is created once per decision, and a charge
/// updates it in place.
pub trait Counter: Default {
    /// The fixed properties of the algorithm.
    const PROPERTIES: Properties;
    /// The state at one moment under one limit.
    type View;

    /// Returns the view at `now`.
    fn view(&self, limit: &Limit, now: u64) -> Self::View;
    /// Returns how many units count, rounded up.
    fn used(view: &Self::View) -> u64;
    /// Adds `units`, regardless of the limit.
    fn charge(&mut self, view: &mut Self::View, limit: &Limit, units: u64);
    /// Returns the microseconds until at most `max_used` units count, which is fewer than count now.
    fn wait_us(&self, view: &Self::View, max_used: u64) -> u64;
    /// Returns when no units count any more.
    fn reset(&self, view: &Self::View) -> Reset;
    /// Refunds up to `units`: the newest ones, or those of one charge. Returns whether the state changed. The view is stale afterwards.
    fn refund(&mut self, view: &Self::View, limit: &Limit, units: u64, charge: Option<Charge>) -> bool;
    /// Returns the limit with the window or rate under which the state was last charged.
    fn own_limit(&self, limit: &Limit) -> Limit;
    /// Returns when this state equals a fresh one under every limit.
    fn expires_at_us(&self) -> u64;
    /// Returns what counts, for display.
    fn snapshot(&self, view: &Self::View, limit: &Limit) -> Snapshot;
    /// Returns the maximum that a limit admits.
    fn bound(limit: &Limit) -> Bound;
    /// Reads a state that the Redis script stored. Returns `None` if the script cannot have stored it: the arithmetic of
    /// views relies on these checks.
    fn from_stored(stored: &StoredState<'_>) -> Option<Self>;

    /// Returns whether the Redis script can have stored these numbers; for a log, those of its header.
    fn are_stored_numbers(numbers: &[u64]) -> bool {
        Self::from_stored(&StoredState { numbers, entries: &[] }).is_some()
    }

    /// Returns a state that holds `level` at `at`, as the Redis script reports it: in parts of a unit for a token
    /// bucket, otherwise in units charged at `at`.
    fn from_level(limit: &Limit, at: u64, level: u64) -> Self {
        let mut state = Self::default();
        if level > 0 {
            let mut view = state.view(limit, at);
            state.charge(&mut view, limit, level);
        }
        state
    }

    /// Returns the scale of a state that this limit has charged. `None` for a log.
    fn scale(limit: &Limit) -> Option<[u64; 2]>;
    /// Returns the scale and the numbers of the state. `None` for a log.
    fn pack(&self) -> Option<([u64; 2], [u64; 3])>;
    /// Returns the state that was packed into `numbers` at `scale`.
    fn unpack(scale: [u64; 2], numbers: [u64; 3]) -> Self;

    /// Returns the heap memory of the state in bytes.
    fn heap_bytes(&self) -> usize {
        0
    }

    /// Returns how many bytes the next charge may add, if it may add any.
    fn next_growth_bytes(&self) -> Option<usize> {
        None
    }

    /// Returns the number of entries of a log.
    fn entries(&self) -> usize {
        0
    }

    /// Limits the number of entries of a log, in addition to its amount.
    fn set_max_entries(&mut self, _max_entries: usize) {}
}

impl State {
    /// Returns how many units count against `limit` at `now`, rounded up.
    pub fn used(&self, limit: &Limit, now: Timestamp) -> u64 {
        fn of<C: Counter>(counter: &C, limit: &Limit, now: u64) -> u64 {
            C::used(&counter.view(limit, now))
        }
        with_counter!(self, counter => of(counter, limit, now.as_micros()))
    }

    /// Returns when no units count any more.
    pub fn reset(&self, limit: &Limit, now: Timestamp) -> Reset {
        with_counter!(self, counter => counter.reset(&counter.view(limit, now.as_micros())))
    }

    /// Adds `units`, regardless of the limit. The total never exceeds 2^53 - 1.
    pub fn charge(&mut self, limit: &Limit, now: Timestamp, units: u64) {
        with_counter!(self, counter => counter.charge(&mut counter.view(limit, now.as_micros()), limit, units));
    }

    /// Refunds up to `units`: the newest ones, or exactly those charged `at` that moment. Returns whether the state
    /// changed.
    pub fn refund(&mut self, limit: &Limit, now: Timestamp, units: u64, at: Option<Timestamp>) -> bool {
        let charge = at.map(Charge::at);
        with_counter!(self, counter => counter.refund(&counter.view(limit, now.as_micros()), limit, units, charge))
    }

    /// Refunds up to `units` that were charged `at` that moment under `limit`, without converting other units. Returns whether the state
    /// changed.
    pub(crate) fn refund_correction(
        &mut self,
        limit: &Limit,
        now: Timestamp,
        units: u64,
        at: Timestamp,
    ) -> bool {
        let (own, charge) = (self.correction_limit(limit, now), Some(Charge::under(limit, at)));
        with_counter!(self, counter => counter.refund(&counter.view(&own, now.as_micros()), &own, units, charge))
    }

    /// Returns the limit under which units that were charged under `limit` are corrected: if other units count, with the window or rate
    /// under which they were charged, so that the correction does not convert them.
    pub(crate) fn correction_limit(&self, limit: &Limit, now: Timestamp) -> Limit {
        let own = with_counter!(self, counter => counter.own_limit(limit));
        if own != *limit && self.used(&own, now) > 0 { own } else { *limit }
    }

    /// Returns when this state equals a fresh one under every limit.
    pub fn expires_at(&self) -> Timestamp {
        Timestamp::from_micros(with_counter!(self, counter => counter.expires_at_us()))
    }

    /// Returns what counts against `limit` at `now`, for display.
    pub fn snapshot(&self, limit: &Limit, now: Timestamp) -> Snapshot {
        with_counter!(self, counter => counter.snapshot(&counter.view(limit, now.as_micros()), limit))
    }

    /// Reads a state that the Redis script stored. Returns `None` if the script cannot have stored it.
    pub fn from_stored(algorithm: Algorithm, stored: &StoredState<'_>) -> Option<Self> {
        with_counter_type!(algorithm, C => C::from_stored(stored).map(Self::from))
    }

    /// Returns whether the Redis script can have stored these numbers; for a log, those of its header.
    pub fn are_stored_numbers(algorithm: Algorithm, numbers: &[u64]) -> bool {
        with_counter_type!(algorithm, C => C::are_stored_numbers(numbers))
    }

    /// Returns a state that holds `level` at `at`, as the Redis script reports it.
    pub fn from_level(limit: &Limit, at: Timestamp, level: u64) -> Self {
        with_counter_type!(limit.algorithm(), C => C::from_level(limit, at.as_micros(), level).into())
    }

    /// Returns the heap memory of this state in bytes.
    pub fn heap_bytes(&self) -> usize {
        with_counter!(self, counter => counter.heap_bytes())
    }

    /// Returns how many bytes the next charge may add, if it may add any.
    pub fn next_growth_bytes(&self) -> Option<usize> {
        with_counter!(self, counter => counter.next_growth_bytes())
    }

    /// Returns the number of entries of a log, otherwise 0.
    pub fn entries(&self) -> usize {
        with_counter!(self, counter => counter.entries())
    }

    /// Limits the number of entries of a log, in addition to its amount.
    pub fn set_max_entries(&mut self, max_entries: usize) {
        with_counter!(self, counter => counter.set_max_entries(max_entries));
    }
}

impl Limit {
    /// Returns the most that this limit admits: the bound of its algorithm, and its lease, because leased units are spent after they were
    /// charged.
    pub fn bound(&self) -> Bound {
        let lease = self.lease().map_or(0, Lease::units);
        match with_counter_type!(self.algorithm(), C => C::bound(self)) {
            Bound::Window { most, window } => Bound::Window { most: most + lease, window },
            Bound::Bucket { burst, amount, window } => Bound::Bucket { burst: burst + lease, amount, window },
            Bound::Live { most } => Bound::Live { most },
        }
    }
}

/// Returns the time at which a state with the last charge at `last` is read: `last` if the clock is behind it, `None`
/// if the clock is more than one window behind, because it has been set back.
#[inline]
fn effective_time(last: u64, window: u64, now: u64) -> Option<u64> {
    (last <= now + window).then(|| last.max(now))
}

/// Adds `units` to `used`, up to the largest count.
#[inline]
fn add_capped(used: u64, units: u64) -> u64 {
    used + units.min(MAX_EXACT - used)
}

/// Returns `a * b / divisor` and the remainder, without intermediate overflow. The quotient saturates.
#[inline]
fn multiply_divide(a: u64, b: u64, divisor: u64) -> (u64, u64) {
    match a.checked_mul(b) {
        // a divisor of 1 is common, and a division is slow
        Some(product) if divisor == 1 => return (product, 0),
        Some(product) => return (product / divisor, product % divisor),
        None => {}
    }
    let (product, divisor) = (u128::from(a) * u128::from(b), u128::from(divisor));
    let quotient = product / divisor;
    // not a second division: in 128 bits it is a function call
    let remainder = product - quotient * divisor;
    let remainder = u64::try_from(remainder).expect("a remainder is below its u64 divisor");
    (u64::try_from(quotient).unwrap_or(u64::MAX), remainder)
}

/// Returns the wait from `now` until `time`, or until `cutoff` if that is sooner. All units stop counting at the cutoff, because
/// the limit has another window now.
#[inline]
fn wait_until(time: u64, cutoff: Option<u64>, now: u64) -> u64 {
    cap_wait(cutoff.map_or(time, |cutoff| cutoff.min(time)) - now)
}

/// Limits a wait to the longest representable one.
#[inline]
fn cap_wait(wait_us: u64) -> u64 {
    wait_us.min(MAX_WAIT_US)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn each_algorithm_has_its_own_bound() {
        let bound = |algorithm| Limit::new(algorithm, 10, SECOND).unwrap().bound();
        assert_eq!(bound(Algorithm::SlidingLog), Bound::Window { most: 10, window: SECOND });
        assert_eq!(bound(Algorithm::FixedWindow), Bound::Window { most: 20, window: SECOND });
        assert_eq!(bound(Algorithm::SlidingCounter), Bound::Window { most: 19, window: SECOND });
        assert_eq!(bound(Algorithm::TokenBucket), Bound::Bucket { burst: 10, amount: 10, window: SECOND });
        let leased = Limit::sliding_log(10, SECOND).unwrap().with_lease(3, SECOND).unwrap();
        assert_eq!(leased.bound(), Bound::Window { most: 13, window: SECOND });
    }

    #[test]
    fn names_and_script_codes_are_unique() {
        let names: std::collections::HashSet<_> = Algorithm::NAMES.iter().map(|(name, _)| name).collect();
        assert_eq!(names.len(), Algorithm::NAMES.len());
        let mut codes = Algorithm::ALL.map(|algorithm| algorithm.properties().script_code);
        codes.sort_unstable();
        assert_eq!(codes, [1, 2, 3, 4, 6]);
    }

    #[test]
    fn the_windowed_algorithms_are_those_with_a_window() {
        let windowed: Vec<_> =
            Algorithm::ALL.into_iter().filter(|algorithm| algorithm.properties().has_window).collect();
        assert_eq!(windowed, Algorithm::WINDOWED);
        assert_eq!(Limit::concurrency(10).unwrap().bound(), Bound::Live { most: 10 });
    }
}
