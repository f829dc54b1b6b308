//! How much and how fast: a [`Limit`], checked once when it is built and trusted ever after.

use std::{fmt, str::FromStr, time::Duration};

/// The largest amount, and the largest burst, of every algorithm but the sliding log.
pub const MAX_AMOUNT: u64 = 1_000_000_000;
/// The largest amount of a sliding log, which remembers each accepted request.
pub const MAX_LOG_AMOUNT: u64 = 1_000_000;
/// The shortest window.
pub const MIN_WINDOW: Duration = Duration::from_millis(1);
/// The longest window: ten years of 365 days.
pub const MAX_WINDOW: Duration = Duration::from_secs(10 * 365 * 24 * 60 * 60);

/// The ways to count.
///
/// ```
/// use tollgate_core::Algorithm;
///
/// assert_eq!("sliding-log".parse(), Ok(Algorithm::SlidingLog));
/// assert_eq!("gcra".parse(), Ok(Algorithm::TokenBucket));
/// assert_eq!(Algorithm::TokenBucket.to_string(), "token-bucket");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Algorithm {
    /// One counter per window of the clock.
    FixedWindow,
    /// The exact times of what was accepted.
    SlidingLog,
    /// Two counters, the older one fading out.
    SlidingCounter,
    /// A level that drains at a steady rate.
    TokenBucket,
}

impl Algorithm {
    /// Every algorithm, in the order of the documentation.
    pub const ALL: [Self; 4] = [Self::FixedWindow, Self::SlidingLog, Self::SlidingCounter, Self::TokenBucket];

    /// The name used in configuration, keys and messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::FixedWindow => "fixed-window",
            Self::SlidingLog => "sliding-log",
            Self::SlidingCounter => "sliding-counter",
            Self::TokenBucket => "token-bucket",
        }
    }

    /// The largest amount this algorithm counts exactly.
    pub const fn max_amount(self) -> u64 {
        match self {
            Self::SlidingLog => MAX_LOG_AMOUNT,
            Self::FixedWindow | Self::SlidingCounter | Self::TokenBucket => MAX_AMOUNT,
        }
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
        match name {
            "gcra" => Ok(Self::TokenBucket),
            _ => Self::ALL
                .into_iter()
                .find(|algorithm| algorithm.name() == name)
                .ok_or_else(|| LimitError::UnknownAlgorithm(name.to_owned())),
        }
    }
}

/// Why a limit cannot be built; each message says what would be right.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LimitError {
    /// No algorithm has this name.
    #[error(
        "unknown algorithm {0:?}: use fixed-window, sliding-log, sliding-counter or token-bucket (alias gcra)"
    )]
    UnknownAlgorithm(String),
    /// The amount is zero, or more than the algorithm counts exactly.
    #[error("amount {amount} is out of range: {algorithm} takes 1 to {max}")]
    Amount {
        /// The algorithm asked for.
        algorithm: Algorithm,
        /// The amount asked for.
        amount: u64,
        /// The largest amount it takes.
        max: u64,
    },
    /// The window is shorter than a millisecond or longer than ten years.
    #[error("window {0:?} is out of range: use 1ms to 10 years (3650 days)")]
    Window(Duration),
    /// The window has a fraction of a microsecond.
    #[error("window {0:?} is too fine: use whole microseconds")]
    WindowTooFine(Duration),
    /// The burst is zero or too large.
    #[error("burst {0} is out of range: use 1 to {MAX_AMOUNT}")]
    Burst(u64),
    /// Only a token bucket has a burst.
    #[error("{0} has no burst: only token-bucket does, leave it out")]
    BurstNotSupported(Algorithm),
    /// Only a fixed window has a phase.
    #[error("{0} has no phase: only fixed-window does, leave it out")]
    PhaseNotSupported(Algorithm),
}

/// `amount` per `window`, counted by one algorithm.
///
/// ```
/// use std::time::Duration;
/// use tollgate_core::Limit;
///
/// let limit = Limit::token_bucket(100, Duration::from_secs(60))?.with_burst(10)?;
/// assert_eq!(limit.capacity(), 10);
/// assert!(Limit::sliding_log(2_000_000, Duration::from_secs(60)).is_err());
/// # Ok::<(), tollgate_core::LimitError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Limit {
    algorithm: Algorithm,
    amount: u64,
    window_us: u64,
    capacity: u64,
    phase_us: u64,
    rate: Rate,
}

/// `units` per `micros`, in lowest terms.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rate {
    /// Numerator: at most the largest amount.
    pub units: u64,
    /// Denominator: at most the longest window.
    pub micros: u64,
}

impl Rate {
    fn reduced(amount: u64, window_us: u64) -> Self {
        let divisor = greatest_common_divisor(amount, window_us);
        Self { units: amount / divisor, micros: window_us / divisor }
    }

    /// Whether this rate gives more per time than `other`.
    pub fn is_faster_than(self, other: Self) -> bool {
        u128::from(self.units) * u128::from(other.micros) > u128::from(other.units) * u128::from(self.micros)
    }
}

impl Limit {
    /// `amount` per `window`, counted by `algorithm`, with its defaults.
    ///
    /// # Errors
    /// When the amount or the window is out of the range in which the algorithm is exact.
    pub fn new(algorithm: Algorithm, amount: u64, window: Duration) -> Result<Self, LimitError> {
        let max = algorithm.max_amount();
        if amount == 0 || amount > max {
            return Err(LimitError::Amount { algorithm, amount, max });
        }
        if window < MIN_WINDOW || window > MAX_WINDOW {
            return Err(LimitError::Window(window));
        }
        if !window.subsec_nanos().is_multiple_of(1_000) {
            return Err(LimitError::WindowTooFine(window));
        }
        let window_us = window.as_secs() * 1_000_000 + u64::from(window.subsec_micros());
        let rate = Rate::reduced(amount, window_us);
        Ok(Self { algorithm, amount, window_us, capacity: amount, phase_us: 0, rate })
    }

    /// At most `amount` in each window of the clock, and so up to twice that across an edge.
    ///
    /// # Errors
    /// As [`Limit::new`].
    pub fn fixed_window(amount: u64, window: Duration) -> Result<Self, LimitError> {
        Self::new(Algorithm::FixedWindow, amount, window)
    }

    /// At most `amount` in any window, exactly.
    ///
    /// # Errors
    /// As [`Limit::new`].
    pub fn sliding_log(amount: u64, window: Duration) -> Result<Self, LimitError> {
        Self::new(Algorithm::SlidingLog, amount, window)
    }

    /// About `amount` in any window, in constant memory.
    ///
    /// # Errors
    /// As [`Limit::new`].
    pub fn sliding_counter(amount: u64, window: Duration) -> Result<Self, LimitError> {
        Self::new(Algorithm::SlidingCounter, amount, window)
    }

    /// A steady `amount` per `window`, with a burst of as much at once.
    ///
    /// # Errors
    /// As [`Limit::new`].
    pub fn token_bucket(amount: u64, window: Duration) -> Result<Self, LimitError> {
        Self::new(Algorithm::TokenBucket, amount, window)
    }

    /// The same limit with another burst: how much a rested caller may take at once.
    ///
    /// # Errors
    /// When the burst is out of range or the algorithm has none.
    pub fn with_burst(mut self, burst: u64) -> Result<Self, LimitError> {
        if self.algorithm != Algorithm::TokenBucket {
            return Err(LimitError::BurstNotSupported(self.algorithm));
        }
        if burst == 0 || burst > MAX_AMOUNT {
            return Err(LimitError::Burst(burst));
        }
        self.capacity = burst;
        Ok(self)
    }

    /// The same limit with its windows moved: they begin `phase` after those of the epoch, so that not
    /// everybody's window ends in the same instant. A phase beyond the window wraps round.
    ///
    /// # Errors
    /// When the algorithm is not a fixed window.
    pub fn with_phase(mut self, phase: Duration) -> Result<Self, LimitError> {
        if self.algorithm != Algorithm::FixedWindow {
            return Err(LimitError::PhaseNotSupported(self.algorithm));
        }
        let wrapped = phase.as_micros() % u128::from(self.window_us);
        self.phase_us = u64::try_from(wrapped).expect("a remainder of a u64 fits a u64");
        Ok(self)
    }

    /// An equal part of it for each of `count`, in the same window: rounded down, so that all parts together
    /// never exceed it, but at least 1.
    #[must_use]
    pub fn share_of(mut self, count: u32) -> Self {
        let part = |units: u64| (units / u64::from(count.max(1))).max(1);
        (self.amount, self.capacity) = (part(self.amount), part(self.capacity));
        self.rate = Rate::reduced(self.amount, self.window_us);
        self
    }

    /// How it counts.
    pub const fn algorithm(&self) -> Algorithm {
        self.algorithm
    }

    /// How much per window.
    pub const fn amount(&self) -> u64 {
        self.amount
    }

    /// The window.
    pub const fn window(&self) -> Duration {
        Duration::from_micros(self.window_us)
    }

    /// The window in microseconds.
    pub const fn window_us(&self) -> u64 {
        self.window_us
    }

    /// The most that can pass at once: the burst of a bucket, else the amount.
    pub const fn capacity(&self) -> u64 {
        self.capacity
    }

    /// Where the windows of a fixed window begin, in microseconds after those of the epoch.
    pub const fn phase_us(&self) -> u64 {
        self.phase_us
    }

    /// Amount per window in lowest terms.
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
    fn the_ends_of_the_range_can_be_built_and_one_beyond_cannot() {
        for algorithm in Algorithm::ALL {
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
    fn a_burst_belongs_to_a_bucket_and_a_phase_to_a_fixed_window() {
        assert_eq!(Limit::token_bucket(5, MINUTE).unwrap().with_burst(9).unwrap().capacity(), 9);
        assert_eq!(Limit::token_bucket(5, MINUTE).unwrap().with_burst(0), Err(LimitError::Burst(0)));
        let log = Limit::sliding_log(5, MINUTE).unwrap();
        assert_eq!(log.with_burst(9), Err(LimitError::BurstNotSupported(Algorithm::SlidingLog)));
        assert_eq!(log.with_phase(MINUTE), Err(LimitError::PhaseNotSupported(Algorithm::SlidingLog)));
        let moved =
            Limit::fixed_window(5, MINUTE).unwrap().with_phase(MINUTE + Duration::from_micros(7)).unwrap();
        assert_eq!(moved.phase_us(), 7);
    }

    #[test]
    fn names_are_read_back_and_gcra_is_an_alias() {
        for algorithm in Algorithm::ALL {
            assert_eq!(algorithm.name().parse(), Ok(algorithm));
        }
        assert_eq!("gcra".parse(), Ok(Algorithm::TokenBucket));
        let error = "leaky".parse::<Algorithm>().unwrap_err().to_string();
        assert!(error.contains("leaky") && error.contains("sliding-log"), "{error}");
    }

    #[test]
    fn rates_are_in_lowest_terms() {
        let rate = Limit::token_bucket(300_000, Duration::from_secs(1)).unwrap().rate();
        assert_eq!(rate, Rate { units: 3, micros: 10 });
        assert!(rate.is_faster_than(Rate { units: 1, micros: 4 }));
        assert!(!rate.is_faster_than(rate));
    }
}
