//! A [`Limit`]: amount, window and algorithm, validated on construction.

use std::{num::NonZeroU32, time::Duration};

use crate::{algorithm::Algorithm, calendar::Calendar, hold::OnExpiry, time::Timestamp};

/// The largest amount and the largest burst of every algorithm except the sliding log.
pub const MAX_AMOUNT: u64 = 1_000_000_000;
/// The largest amount of a sliding log, which stores each accepted request. In Redis, a ring of this size grows in about a
/// millisecond.
pub const MAX_LOG_AMOUNT: u64 = 200_000;
/// The maximum number of units that count in a sliding log at one time: Redis stores running totals of three bytes. A larger debt loses
/// its oldest units, which changes no decision, because the other units exceed every limit.
pub const MAX_LOG_UNITS: u64 = (1 << 24) - 1;
/// The shortest window.
pub const MIN_WINDOW: Duration = Duration::from_millis(1);
/// The longest window: ten years of 365 days.
pub const MAX_WINDOW: Duration = Duration::from_secs(10 * 365 * 24 * 60 * 60);

/// The shortest time for which a process may spend leased units.
pub const MIN_LEASE_LIFETIME: Duration = Duration::from_millis(1);
/// The longest time for which a process may spend leased units. It is also at most the window.
pub const MAX_LEASE_LIFETIME: Duration = Duration::from_secs(60 * 60);
/// The default is a tenth of the window, and at most this.
const MAX_DEFAULT_LEASE_LIFETIME: Duration = Duration::from_secs(1);

/// Why a limit is invalid. Each message names the accepted range.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LimitError {
    /// No algorithm has this name.
    #[error("unknown algorithm {0:?}: use {names}", names = Algorithm::list())]
    UnknownAlgorithm(String),
    /// The amount is zero, or more than the algorithm counts exactly.
    #[error("amount {amount} is out of range: {algorithm} accepts 1 to {max}")]
    Amount {
        /// The algorithm.
        algorithm: Algorithm,
        /// The amount.
        amount: u64,
        /// The largest amount that it accepts.
        max: u64,
    },
    /// The window is shorter than a millisecond or longer than ten years.
    #[error("window {0:?} is out of range: use 1ms to 10 years (3650 days)")]
    Window(Duration),
    /// The window has a fraction of a microsecond.
    #[error("window {0:?} has a fraction of a microsecond: use whole microseconds")]
    WindowTooFine(Duration),
    /// The algorithm has no window.
    #[error("{0} has no window: remove it")]
    WindowNotSupported(Algorithm),
    /// The burst is zero or too large.
    #[error("burst {0} is out of range: use 1 to {MAX_AMOUNT}")]
    Burst(u64),
    /// Only a token bucket has a burst.
    #[error("{0} has no burst: remove it, or use token-bucket")]
    BurstNotSupported(Algorithm),
    /// Only a fixed window has a phase.
    #[error("{0} has no phase: remove it, or use fixed-window")]
    PhaseNotSupported(Algorithm),
    /// The lease has no unit, or more than the limit.
    #[error("lease of {units} units is out of range: use 1 to {max} units of this limit")]
    Lease {
        /// The units.
        units: u64,
        /// The capacity or the amount, whichever is smaller.
        max: u64,
    },
    /// The lifetime of a lease is too short or too long, or not a whole number of milliseconds.
    #[error(
        "lease lifetime {lifetime:?} is out of range: use whole milliseconds from {MIN_LEASE_LIFETIME:?} to {max:?}"
    )]
    LeaseLifetime {
        /// The lifetime.
        lifetime: Duration,
        /// The longest lifetime for this limit.
        max: Duration,
    },
    /// The algorithm counts holds, which cannot be charged in advance.
    #[error("{0} has no lease: remove it")]
    LeaseNotSupported(Algorithm),
    /// A lease cannot be combined with holds that are released when they expire.
    #[error(
        "a limit that releases expired holds has no lease: remove the lease, or use on_expiry = \"charge\""
    )]
    LeaseWithRelease,
    /// Only a fixed window can follow the calendar.
    #[error("{0} has no calendar windows: use fixed-window, or a window such as \"30d\"")]
    CalendarNotSupported(Algorithm),
    /// The periods of a calendar start at given times.
    #[error("a calendar window has no phase: remove it, or use a window such as \"1d\"")]
    CalendarPhase,
}

/// The window of a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Window {
    /// Always of the same length.
    Length(Duration),
    /// The periods of a calendar. For fixed windows only.
    Calendar(&'static Calendar),
}

impl From<Duration> for Window {
    fn from(length: Duration) -> Self {
        Self::Length(length)
    }
}

impl From<&'static Calendar> for Window {
    fn from(calendar: &'static Calendar) -> Self {
        Self::Calendar(calendar)
    }
}

/// `amount` per `window`, counted by one algorithm.
///
/// ```
/// use std::time::Duration;
/// use sluicegate_core::Limit;
///
/// let limit = Limit::token_bucket(100, Duration::from_secs(60))?.with_burst(10)?;
/// assert_eq!(limit.capacity(), 10);
/// assert!(Limit::sliding_log(2_000_000, Duration::from_secs(60)).is_err());
/// # Ok::<(), sluicegate_core::LimitError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Limit {
    algorithm: Algorithm,
    amount: u64,
    window_us: u64,
    capacity: u64,
    phase_us: u64,
    rate: Rate,
    calendar: Option<&'static Calendar>,
    lease: Option<Lease>,
    on_expiry: OnExpiry,
    max_excess: Option<u32>,
}

/// The units of a limit that processes may charge in advance, and for how long a process may spend them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Lease {
    units: NonZeroU32,
    lifetime_ms: u32,
}

impl Lease {
    /// The most units that may be leased and unspent at one time, over all processes.
    pub const fn units(self) -> u64 {
        self.units.get() as u64
    }

    /// How long a process may spend leased units.
    pub const fn lifetime(self) -> Duration {
        Duration::from_millis(self.lifetime_ms as u64)
    }
}

/// `units` per `micros`, in lowest terms.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rate {
    /// Numerator; at most the largest amount.
    pub units: u64,
    /// Denominator; at most the longest window.
    pub micros: u64,
}

impl Rate {
    const fn reduced(amount: u64, window_us: u64) -> Self {
        let divisor = greatest_common_divisor(amount, window_us);
        Self { units: amount / divisor, micros: window_us / divisor }
    }

    /// Returns whether this rate is higher than `other`.
    pub fn is_faster_than(self, other: Self) -> bool {
        u128::from(self.units) * u128::from(other.micros) > u128::from(other.units) * u128::from(self.micros)
    }
}

/// Token buckets with numbers that are constants in the program. For other numbers use [`Limit::token_bucket`], which
/// returns an error instead of panicking.
///
/// ```
/// use sluicegate_core::Limit;
///
/// const API: Limit = Limit::per_minute(100).burst(20);
/// assert_eq!((API.amount(), API.capacity()), (100, 20));
/// ```
impl Limit {
    /// Creates a token bucket of `amount` per second.
    ///
    /// # Panics
    /// If the amount is 0 or above [`MAX_AMOUNT`]; in a constant, this is a compile error.
    #[track_caller]
    pub const fn per_second(amount: u64) -> Self {
        Self::bucket_per(amount, 1)
    }

    /// Creates a token bucket of `amount` per minute.
    ///
    /// # Panics
    /// As [`Limit::per_second`].
    #[track_caller]
    pub const fn per_minute(amount: u64) -> Self {
        Self::bucket_per(amount, 60)
    }

    /// Creates a token bucket of `amount` per hour.
    ///
    /// # Panics
    /// As [`Limit::per_second`].
    #[track_caller]
    pub const fn per_hour(amount: u64) -> Self {
        Self::bucket_per(amount, 60 * 60)
    }

    /// Creates a token bucket of `amount` per day of 24 hours.
    ///
    /// # Panics
    /// As [`Limit::per_second`].
    #[track_caller]
    pub const fn per_day(amount: u64) -> Self {
        Self::bucket_per(amount, 24 * 60 * 60)
    }

    /// Returns the same token bucket with another burst: the units that an idle caller can use at one time.
    ///
    /// # Panics
    /// If the burst is 0 or above [`MAX_AMOUNT`], or if this is not a token bucket.
    #[must_use]
    #[track_caller]
    pub const fn burst(mut self, burst: u64) -> Self {
        assert!(matches!(self.algorithm, Algorithm::TokenBucket), "only a token bucket has a burst");
        assert!(burst > 0 && burst <= MAX_AMOUNT, "a burst is 1 to 1,000,000,000");
        self.capacity = burst;
        self
    }

    #[track_caller]
    const fn bucket_per(amount: u64, seconds: u64) -> Self {
        assert!(
            amount > 0 && amount <= MAX_AMOUNT,
            "an amount is 1 to 1,000,000,000: for computed amounts, use Limit::token_bucket"
        );
        let window_us = seconds * 1_000_000;
        let rate = Rate::reduced(amount, window_us);
        Self {
            algorithm: Algorithm::TokenBucket,
            amount,
            window_us,
            capacity: amount,
            phase_us: 0,
            rate,
            calendar: None,
            lease: None,
            on_expiry: OnExpiry::Charge,
            max_excess: None,
        }
    }
}

impl Limit {
    /// Creates a limit of `amount` per `window` with the defaults of the algorithm.
    ///
    /// # Errors
    /// If the amount or the window is outside of the range in which the algorithm is exact, or if the algorithm has no calendar
    /// windows.
    pub fn new(algorithm: Algorithm, amount: u64, window: impl Into<Window>) -> Result<Self, LimitError> {
        if !algorithm.properties().has_window {
            return Err(LimitError::WindowNotSupported(algorithm));
        }
        let max = algorithm.max_amount();
        if amount == 0 || amount > max {
            return Err(LimitError::Amount { algorithm, amount, max });
        }
        let (window, calendar) = match window.into() {
            Window::Length(length) => (length, None),
            Window::Calendar(_) if !algorithm.properties().has_calendar => {
                return Err(LimitError::CalendarNotSupported(algorithm));
            }
            Window::Calendar(calendar) => (calendar.unit().longest(), Some(calendar)),
        };
        if window < MIN_WINDOW || window > MAX_WINDOW {
            return Err(LimitError::Window(window));
        }
        if !window.subsec_nanos().is_multiple_of(1_000) {
            return Err(LimitError::WindowTooFine(window));
        }
        let window_us = window.as_secs() * 1_000_000 + u64::from(window.subsec_micros());
        let rate = Rate::reduced(amount, window_us);
        let capacity = amount;
        Ok(Self {
            algorithm,
            amount,
            window_us,
            capacity,
            phase_us: 0,
            rate,
            calendar,
            lease: None,
            on_expiry: OnExpiry::Charge,
            max_excess: None,
        })
    }

    /// Creates a limit of `amount` units of live holds: with the cost 1, of `amount` requests in flight.
    ///
    /// ```
    /// use sluicegate_core::Limit;
    ///
    /// let limit = Limit::concurrency(10)?;
    /// assert_eq!(limit.capacity(), 10);
    /// # Ok::<(), sluicegate_core::LimitError>(())
    /// ```
    ///
    /// # Errors
    /// If the amount is out of range.
    pub const fn concurrency(amount: u64) -> Result<Self, LimitError> {
        let algorithm = Algorithm::Concurrency;
        if amount == 0 || amount > MAX_AMOUNT {
            return Err(LimitError::Amount { algorithm, amount, max: MAX_AMOUNT });
        }
        Ok(Self {
            algorithm,
            amount,
            window_us: 0,
            capacity: amount,
            phase_us: 0,
            rate: Rate { units: 1, micros: 1 },
            calendar: None,
            lease: None,
            on_expiry: OnExpiry::Release,
            max_excess: None,
        })
    }

    /// Returns the same limit with another setting for expired holds. A concurrency limit always releases them.
    ///
    /// # Errors
    /// If the limit has a lease and expired holds are to be released.
    pub fn with_on_expiry(mut self, on_expiry: OnExpiry) -> Result<Self, LimitError> {
        if self.lease.is_some() && on_expiry == OnExpiry::Release {
            return Err(LimitError::LeaseWithRelease);
        }
        if self.algorithm.properties().has_window {
            self.on_expiry = on_expiry;
        }
        Ok(self)
    }

    /// Returns the same limit with another bound of [`Limit::max_excess`]; more than [`MAX_AMOUNT`] counts as that.
    #[must_use]
    pub fn with_max_excess(mut self, units: u64) -> Self {
        self.max_excess = Some(u32::try_from(units.min(MAX_AMOUNT)).expect("MAX_AMOUNT fits 32 bits"));
        self
    }

    /// Returns what happens to the units of a hold that expires.
    #[inline]
    pub const fn on_expiry(&self) -> OnExpiry {
        self.on_expiry
    }

    /// Returns whether the units of a hold are refunded when it expires.
    #[inline]
    pub const fn releases_expired(&self) -> bool {
        matches!(self.on_expiry, OnExpiry::Release)
    }

    /// Returns the most units that a settlement charges beyond the estimate: the capacity, unless it was set.
    pub const fn max_excess(&self) -> u64 {
        match self.max_excess {
            Some(units) => units as u64,
            None => self.capacity,
        }
    }

    /// Returns a limit of the same kind with another amount and window, and without burst, phase or lease. An algorithm without a window
    /// keeps none.
    ///
    /// # Errors
    /// As [`Limit::new`].
    pub fn with_amount_and_window(&self, amount: u64, window: impl Into<Window>) -> Result<Self, LimitError> {
        let window = window.into();
        let limit = if window == self.window_setting() && !self.algorithm.properties().has_window {
            Self::concurrency(amount)?
        } else {
            Self::new(self.algorithm, amount, window)?
        };
        Ok(Self { on_expiry: self.on_expiry, max_excess: self.max_excess, ..limit })
    }

    /// Returns the same limit with another burst: the units that an idle caller can use at one time.
    ///
    /// # Errors
    /// If the burst is out of range or the algorithm has none.
    pub fn with_burst(mut self, burst: u64) -> Result<Self, LimitError> {
        if !self.algorithm.properties().has_burst {
            return Err(LimitError::BurstNotSupported(self.algorithm));
        }
        if burst == 0 || burst > MAX_AMOUNT {
            return Err(LimitError::Burst(burst));
        }
        self.capacity = burst;
        Ok(self)
    }

    /// Returns the same limit with shifted windows: they start `phase` after those aligned to the epoch, so that the
    /// windows of different keys end at different times. A phase beyond the window wraps around.
    ///
    /// # Errors
    /// If the algorithm has no phase, or the window is that of a calendar.
    pub fn with_phase(mut self, phase: Duration) -> Result<Self, LimitError> {
        if !self.algorithm.properties().has_phase {
            return Err(LimitError::PhaseNotSupported(self.algorithm));
        }
        if self.calendar.is_some() {
            return Err(LimitError::CalendarPhase);
        }
        let wrapped = phase.as_micros() % u128::from(self.window_us);
        self.phase_us = u64::try_from(wrapped).expect("a remainder of a u64 fits a u64");
        Ok(self)
    }

    /// Returns the same limit with a lease: processes may charge up to `units` in advance and spend them without a call to the store,
    /// each for at most `lifetime`.
    ///
    /// # Errors
    /// If there is no unit, there are more units than the limit admits, the lifetime is out of range, or the limit releases expired
    /// holds.
    pub fn with_lease(mut self, units: u64, lifetime: Duration) -> Result<Self, LimitError> {
        if !self.algorithm.properties().has_window {
            return Err(LimitError::LeaseNotSupported(self.algorithm));
        }
        if self.releases_expired() {
            return Err(LimitError::LeaseWithRelease);
        }
        let max = self.max_lease();
        let range_error = LimitError::Lease { units, max };
        let number = u32::try_from(units).ok().and_then(NonZeroU32::new);
        let number = number.filter(|_| units <= max).ok_or(range_error)?;
        let longest = self.longest_lease();
        let is_whole = lifetime.subsec_nanos().is_multiple_of(1_000_000);
        if lifetime < MIN_LEASE_LIFETIME || lifetime > longest || !is_whole {
            return Err(LimitError::LeaseLifetime { lifetime, max: longest });
        }
        let lifetime_ms = u32::try_from(lifetime.as_millis()).expect("at most MAX_LEASE_LIFETIME");
        self.lease = Some(Lease { units: number, lifetime_ms });
        Ok(self)
    }

    /// Returns the same limit with the window of a state.
    pub(crate) const fn with_window_of_state(self, window_us: u64, phase_us: u64) -> Self {
        Self { window_us, phase_us, calendar: None, ..self }
    }

    /// Returns the same limit with the rate of a state.
    pub(crate) const fn with_rate_of_state(self, rate: Rate) -> Self {
        Self { rate, ..self }
    }

    /// Returns the same limit without a lease.
    #[must_use]
    pub const fn without_lease(mut self) -> Self {
        self.lease = None;
        self
    }

    /// Returns the most units that can be leased: the amount, or the burst if that is smaller.
    pub const fn max_lease(&self) -> u64 {
        if self.capacity < self.amount { self.capacity } else { self.amount }
    }

    /// Returns the longest lifetime of a lease: the window in whole milliseconds, and at most [`MAX_LEASE_LIFETIME`].
    pub fn longest_lease(&self) -> Duration {
        Duration::from_millis(self.window_us / 1_000).min(MAX_LEASE_LIFETIME)
    }

    /// Returns the lifetime of a lease that sets none: a tenth of the window, and at most one second.
    pub fn default_lease_lifetime(&self) -> Duration {
        let tenth = Duration::from_millis(self.window_us / 10_000);
        tenth.clamp(MIN_LEASE_LIFETIME, MAX_DEFAULT_LEASE_LIFETIME)
    }

    /// Divides the limit into `count` equal parts of the same window. A part is rounded down, so that all parts together never exceed
    /// the limit, but is at least 1.
    #[must_use]
    pub fn share_of(mut self, count: u32) -> Self {
        let part = |units: u64| (units / u64::from(count.max(1))).max(1);
        (self.amount, self.capacity) = (part(self.amount), part(self.capacity));
        if self.algorithm.properties().has_window {
            self.rate = Rate::reduced(self.amount, self.window_us);
        }
        self.lease = None;
        self
    }

    /// Returns the lease, if processes may charge units in advance.
    pub const fn lease(&self) -> Option<Lease> {
        self.lease
    }

    /// Returns the algorithm.
    pub const fn algorithm(&self) -> Algorithm {
        self.algorithm
    }

    /// Returns the units per window.
    pub const fn amount(&self) -> u64 {
        self.amount
    }

    /// Returns the length of the window; of a calendar window, an upper bound of it. Zero if the algorithm has none.
    pub const fn window(&self) -> Duration {
        Duration::from_micros(self.window_us)
    }

    /// Returns the [length of the window](Limit::window) in microseconds.
    pub const fn window_us(&self) -> u64 {
        self.window_us
    }

    /// Returns the length of the window at `now`: of a calendar window, that of the period that contains it.
    pub fn window_at(&self, now: Timestamp) -> Duration {
        self.calendar.map_or(self.window(), |calendar| {
            let edges = calendar.edges_at(now);
            Duration::from_micros(edges.end_us - edges.start_us)
        })
    }

    /// Returns the window as it was set.
    pub const fn window_setting(&self) -> Window {
        match self.calendar {
            Some(calendar) => Window::Calendar(calendar),
            None => Window::Length(self.window()),
        }
    }

    /// Returns the calendar that determines the windows, if there is one.
    #[inline]
    pub const fn calendar(&self) -> Option<&'static Calendar> {
        self.calendar
    }

    /// Returns the largest number of units that can be admitted at one time: the burst of a token bucket, otherwise the
    /// amount.
    pub const fn capacity(&self) -> u64 {
        self.capacity
    }

    /// Returns the shift of the windows of a fixed window in microseconds.
    pub const fn phase_us(&self) -> u64 {
        self.phase_us
    }

    /// Returns the amount per window in lowest terms.
    pub const fn rate(&self) -> Rate {
        self.rate
    }
}

const fn greatest_common_divisor(mut a: u64, mut b: u64) -> u64 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);

    #[test]
    fn the_ends_of_each_range_are_valid_and_one_beyond_is_not() {
        for algorithm in Algorithm::WINDOWED {
            let max = algorithm.max_amount();
            for window in [MIN_WINDOW, MAX_WINDOW] {
                assert!(Limit::new(algorithm, 1, window).is_ok());
                assert!(Limit::new(algorithm, max, window).is_ok());
                assert_eq!(
                    Limit::new(algorithm, max + 1, window),
                    Err(LimitError::Amount { algorithm, amount: max + 1, max })
                );
                assert!(Limit::new(algorithm, 0, window).is_err());
            }
            for window in [MIN_WINDOW - Duration::from_nanos(1), MAX_WINDOW + Duration::from_nanos(1)] {
                assert_eq!(Limit::new(algorithm, 1, window), Err(LimitError::Window(window)));
            }
        }
        let fine = MIN_WINDOW + Duration::from_nanos(1);
        assert_eq!(Limit::fixed_window(1, fine), Err(LimitError::WindowTooFine(fine)));
    }

    #[test]
    fn only_a_token_bucket_has_a_burst_and_only_a_fixed_window_a_phase() {
        assert_eq!(Limit::token_bucket(5, MINUTE).unwrap().with_burst(9).unwrap().capacity(), 9);
        assert_eq!(Limit::token_bucket(5, MINUTE).unwrap().with_burst(0), Err(LimitError::Burst(0)));
        let log = Limit::sliding_log(5, MINUTE).unwrap();
        assert_eq!(log.with_burst(9), Err(LimitError::BurstNotSupported(Algorithm::SlidingLog)));
        assert_eq!(log.with_phase(MINUTE), Err(LimitError::PhaseNotSupported(Algorithm::SlidingLog)));
        let shifted =
            Limit::fixed_window(5, MINUTE).unwrap().with_phase(MINUTE + Duration::from_micros(7)).unwrap();
        assert_eq!(shifted.phase_us(), 7);
    }

    #[test]
    fn a_lease_has_at_most_the_units_of_the_limit_and_at_most_its_window() {
        let bucket = Limit::token_bucket(100, MINUTE).unwrap().with_burst(10).unwrap();
        let second = Duration::from_secs(1);
        let lease = bucket.with_lease(10, second).unwrap().lease().unwrap();
        assert_eq!((lease.units(), lease.lifetime()), (10, second));
        for units in [0, 11, u64::from(u32::MAX) + 2] {
            assert_eq!(bucket.with_lease(units, second), Err(LimitError::Lease { units, max: 10 }));
        }
        for lifetime in [Duration::ZERO, Duration::from_micros(1_500), MINUTE + second] {
            let error = LimitError::LeaseLifetime { lifetime, max: MINUTE };
            assert_eq!(bucket.with_lease(10, lifetime), Err(error));
        }
        assert_eq!(bucket.share_of(2).lease(), None);
    }

    #[test]
    fn by_default_a_lease_lasts_a_tenth_of_the_window_and_at_most_a_second() {
        let lifetime = |window| Limit::fixed_window(10, window).unwrap().default_lease_lifetime();
        assert_eq!(lifetime(MINUTE), Duration::from_secs(1));
        assert_eq!(lifetime(Duration::from_secs(2)), Duration::from_millis(200));
        assert_eq!(lifetime(MIN_WINDOW), Duration::from_millis(1));
    }

    #[test]
    fn limits_written_in_the_program_equal_those_that_are_validated() {
        for (limit, seconds) in [
            (Limit::per_second(7), 1),
            (Limit::per_minute(7), 60),
            (Limit::per_hour(7), 3_600),
            (Limit::per_day(7), 86_400),
        ] {
            let validated = Limit::token_bucket(7, Duration::from_secs(seconds)).unwrap();
            assert_eq!(limit, validated);
            assert_eq!(limit.burst(9), validated.with_burst(9).unwrap());
        }
    }

    #[test]
    #[should_panic(
        expected = "an amount is 1 to 1,000,000,000: for computed amounts, use Limit::token_bucket"
    )]
    fn a_limit_of_zero_panics() {
        let _ = Limit::per_second(0);
    }

    #[test]
    fn names_round_trip_and_gcra_is_an_alias() {
        for algorithm in Algorithm::ALL {
            assert_eq!(algorithm.name().parse(), Ok(algorithm));
        }
        assert_eq!("gcra".parse(), Ok(Algorithm::TokenBucket));
        let error = "leaky".parse::<Algorithm>().unwrap_err().to_string();
        let expected = "unknown algorithm \"leaky\": use fixed-window, sliding-log, sliding-counter, token-bucket or concurrency (alias gcra for token-bucket)";
        assert_eq!(error, expected);
    }

    #[test]
    fn rates_are_in_lowest_terms() {
        let rate = Limit::token_bucket(300_000, Duration::from_secs(1)).unwrap().rate();
        assert_eq!(rate, Rate { units: 3, micros: 10 });
        assert!(rate.is_faster_than(Rate { units: 1, micros: 4 }));
        assert!(!rate.is_faster_than(rate));
    }
}
