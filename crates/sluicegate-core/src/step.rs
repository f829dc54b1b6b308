//! The decision: how many of `count` identical requests pass one counter, or several counters together.
//!
//! A store decides a check over several counters in two passes, so that it charges all of them or none. The first pass computes
//! how many requests each counter admits ([`Terms::passes`]), the second one charges the requests that all of them
//! admit ([`Terms::settle`]). [`step`] is both passes for a single counter.

use std::time::Duration;

use crate::{
    algorithm::{Charge, Counter, State, with_counter},
    cost::Cost,
    decision::Retry,
    hold::{HoldAnswer, HoldOutcome},
    limit::Limit,
    time::{MAX_EXACT, MAX_WAIT_US, Timestamp},
};

/// The operation of a check on its counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operation {
    /// Decide, and charge the admitted requests.
    Check,
    /// Decide like a check, without changing anything.
    Peek,
    /// Charge regardless of the limits, for usage that becomes known only after the request.
    Charge,
    /// Refund at most the units that count now: the newest charges, or exactly the one made `at` that time.
    Refund {
        /// Store time of the charge to refund.
        at: Option<Timestamp>,
    },
}

/// The terms under which a check uses one counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Terms {
    /// The limit.
    pub limit: Limit,
    /// The cost of one request.
    pub cost: Cost,
    /// Whether the counter can deny.
    pub mode: Mode,
    /// How many units must be available for a request to pass.
    pub admission: Admission,
}

/// Whether a counter can deny a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Mode {
    /// It denies requests that exceed the limit.
    #[default]
    Enforced,
    /// It never denies. It is charged only if the request is admitted and this counter would have admitted it.
    Shadow,
}

/// How many units must be available for a request to pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Admission {
    /// Its full cost.
    #[default]
    InFull,
    /// One unit. The full cost is then charged, which may leave a debt. It has no effect on concurrency limits.
    Overdraft,
}

/// The answer of one counter to `count` identical requests, after the granted ones were charged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    /// How many of them this counter alone admits.
    pub passes: u32,
    /// How many of them passed and were charged; 0 for a charge or a refund, which are unconditional.
    pub charged: u32,
    /// Whole units that are available now; negative in debt.
    pub available: i64,
    /// When the next request would pass; absent if it would pass now or all requests have passed.
    pub retry: Option<Retry>,
    /// Microseconds until no units count any more.
    pub reset_after_us: u64,
    /// The unused part of the last of these microseconds, in units of `1 / rate.units`.
    pub spare: u64,
    /// Units of the counter that are leased, if the request is denied: a return of them may end the denial early.
    pub leased: u64,
    /// The result of a hold operation.
    pub hold: HoldAnswer,
}

/// The answer of one counter to one of the requests of an [`Answer`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// Whether this counter alone admits the request.
    pub passes: bool,
    /// Whole units that are available after this request.
    pub remaining: u64,
    /// Units that are charged beyond the capacity.
    pub debt: u64,
    /// When a retry would pass, if this counter denies.
    pub retry: Option<Retry>,
    /// Time until no units count any more.
    pub reset_after: Duration,
}

impl Share {
    /// Creates a denial for which only the wait is known.
    pub const fn denied_for(wait: Duration) -> Self {
        Self {
            passes: false,
            remaining: 0,
            debt: 0,
            retry: Some(Retry::After(wait)),
            reset_after: Duration::ZERO,
        }
    }
}

impl Terms {
    /// Creates enforced terms with admission in full.
    pub fn new(limit: Limit, cost: Cost) -> Self {
        Self { limit, cost, mode: Mode::default(), admission: Admission::default() }
    }

    /// Returns how many of `count` requests this counter alone admits now.
    pub fn passes(&self, state: &State, count: u32, now: Timestamp) -> u32 {
        self.passes_with(state.used(&self.limit, now), count)
    }

    /// Charges the granted requests and returns the resulting answer. `passes` is the result of [`Terms::passes`], `granted`
    /// the number of requests that all enforced counters admit.
    pub fn settle(&self, state: &mut State, passes: u32, granted: u32, count: u32, now: Timestamp) -> Answer {
        with_counter!(state, counter => {
            let view = counter.view(&self.limit, now.as_micros());
            self.settle_on(counter, view, passes, granted, count)
        })
    }

    /// Applies an unconditional operation.
    pub fn adjust(&self, state: &mut State, operation: Operation, count: u32, now: Timestamp) -> Answer {
        with_counter!(state, counter => self.adjust_one(counter, operation, count, now))
    }

    fn adjust_one<C: Counter>(
        &self,
        counter: &mut C,
        operation: Operation,
        count: u32,
        now: Timestamp,
    ) -> Answer {
        let units = u64::from(count).saturating_mul(self.cost.units()).min(MAX_EXACT);
        let mut view = counter.view(&self.limit, now.as_micros());
        match operation {
            // only holds change live holds
            Operation::Charge | Operation::Refund { .. } if !C::PROPERTIES.has_window => {}
            Operation::Refund { at } => {
                counter.refund(&view, &self.limit, units, at.map(Charge::at));
                view = counter.view(&self.limit, now.as_micros());
            }
            Operation::Charge if units > 0 => counter.charge(&mut view, &self.limit, units),
            Operation::Charge | Operation::Check | Operation::Peek => {}
        }
        self.answer(counter, &view, count, 0, None)
    }

    /// Decides a check or a peek of a single counter on one view: [`step`] for a known algorithm. Inlined, so that
    /// state and view stay in registers. Function calls would write them to memory and read them back in other sizes,
    /// which takes longer than the decision.
    #[inline(always)]
    pub fn check<C: Counter>(
        &self,
        counter: &mut C,
        operation: Operation,
        count: u32,
        now: Timestamp,
    ) -> Answer {
        let view = counter.view(&self.limit, now.as_micros());
        let passes = self.passes_with(C::used(&view), count);
        let granted = if operation == Operation::Check { granted(count, [(self, passes)]) } else { 0 };
        self.settle_on(counter, view, passes, granted, count)
    }

    /// Returns how many of `count` requests pass if `used` units count.
    #[inline]
    fn passes_with(&self, used: u64, count: u32) -> u32 {
        let Ok(free) = u64::try_from(self.available(used)) else { return 0 };
        if free < self.required_units() {
            return 0;
        }
        let fit = match (self.cost.units(), self.effective_admission()) {
            (0, _) => return count,
            (1, _) => free,
            (cost, Admission::InFull) => free / cost,
            (cost, Admission::Overdraft) => free.div_ceil(cost),
        };
        u32::try_from(fit).unwrap_or(u32::MAX).min(count)
    }

    #[inline(always)]
    fn settle_on<C: Counter>(
        &self,
        counter: &mut C,
        mut view: C::View,
        passes: u32,
        granted: u32,
        count: u32,
    ) -> Answer {
        // only a hold charges a counter of live holds
        let charged = if C::PROPERTIES.has_window { granted.min(passes) } else { 0 };
        let units = u64::from(charged).saturating_mul(self.cost.units());
        if units > 0 {
            counter.charge(&mut view, &self.limit, units);
        }
        let denies_next = passes < count && charged == passes;
        let retry = denies_next.then(|| self.retry(counter, &view));
        self.answer(counter, &view, passes, charged, retry)
    }

    #[inline(always)]
    fn answer<C: Counter>(
        &self,
        counter: &C,
        view: &C::View,
        passes: u32,
        charged: u32,
        retry: Option<Retry>,
    ) -> Answer {
        let reset = counter.reset(view);
        Answer {
            passes,
            charged,
            available: self.available(C::used(view)),
            retry,
            reset_after_us: reset.after_us,
            spare: reset.spare,
            leased: 0,
            hold: HoldAnswer::NONE,
        }
    }

    #[inline]
    fn available(&self, used: u64) -> i64 {
        signed(self.limit.capacity()) - signed(used)
    }

    #[inline]
    fn effective_admission(&self) -> Admission {
        match self.admission {
            Admission::Overdraft if self.limit.algorithm().properties().has_window => Admission::Overdraft,
            Admission::Overdraft | Admission::InFull => Admission::InFull,
        }
    }

    /// Returns how many units must be available for the next request to pass.
    #[inline]
    pub fn required_units(&self) -> u64 {
        match self.effective_admission() {
            Admission::InFull => self.cost.units(),
            Admission::Overdraft => self.cost.units().min(1),
        }
    }

    #[inline(always)]
    fn retry<C: Counter>(&self, counter: &C, view: &C::View) -> Retry {
        match self.limit.capacity().checked_sub(self.required_units()) {
            // two tiers of a check on one state: the other tier has just freed units
            Some(max_used) if C::used(view) <= max_used => Retry::After(Duration::from_micros(1)),
            Some(max_used) => Retry::After(Duration::from_micros(counter.wait_us(view, max_used))),
            None => Retry::Never,
        }
    }
}

impl Answer {
    /// Nothing was decided.
    pub const NONE: Self = Self {
        passes: 0,
        charged: 0,
        available: 0,
        retry: None,
        reset_after_us: 0,
        spare: 0,
        leased: 0,
        hold: HoldAnswer::NONE,
    };

    /// There is no such hold.
    pub const UNKNOWN_HOLD: Self =
        Self { hold: HoldAnswer { outcome: HoldOutcome::Unknown, ..HoldAnswer::NONE }, ..Self::NONE };

    /// Returns the answer to the request at `index` (from 0, in order of arrival) if `granted` of the requests passed all
    /// enforced counters.
    #[inline]
    pub fn share(&self, terms: &Terms, index: u32, granted: u32) -> Share {
        let passes = self.passes > index.min(granted);
        let later = self.charged.saturating_sub(index.saturating_add(1));
        let later_units = u64::from(later).saturating_mul(terms.cost.units());
        let available = self.available.saturating_add_unsigned(later_units);
        Share {
            passes,
            remaining: u64::try_from(available).unwrap_or(0),
            debt: available.min(0).unsigned_abs(),
            retry: if passes { None } else { self.retry },
            reset_after: Duration::from_micros(
                self.reset_after_us.saturating_sub(self.earlier_reset_us(terms, later_units)),
            ),
        }
    }

    /// Returns by how many microseconds the reset is earlier without `units` that were charged later.
    #[inline]
    fn earlier_reset_us(&self, terms: &Terms, units: u64) -> u64 {
        let is_bucket = terms.limit.algorithm() == crate::Algorithm::TokenBucket;
        if !is_bucket || units == 0 || self.reset_after_us >= MAX_WAIT_US {
            return 0;
        }
        let rate = terms.limit.rate();
        let parts = u128::from(units) * u128::from(rate.micros) + u128::from(self.spare);
        u64::try_from(parts / u128::from(rate.units)).unwrap_or(0)
    }
}

/// Returns how many requests pass all enforced counters.
#[inline]
pub fn granted<'a>(count: u32, tiers: impl IntoIterator<Item = (&'a Terms, u32)>) -> u32 {
    let enforced = tiers.into_iter().filter(|(terms, _)| terms.mode == Mode::Enforced);
    enforced.map(|(_, passes)| passes).fold(count, u32::min)
}

/// Applies the operation of `count` identical requests to a single counter.
///
/// ```
/// use std::time::Duration;
/// use sluicegate_core::{Algorithm, Cost, Limit, Operation, State, Terms, Timestamp, step::step};
///
/// let terms = Terms::new(Limit::sliding_log(3, Duration::from_secs(60))?, Cost::ONE);
/// let mut state = State::fresh(Algorithm::SlidingLog);
/// let now = Timestamp::from_micros(1_794_765_441_799_839);
/// let answer = step(&mut state, &terms, Operation::Check, 5, now);
/// assert_eq!((answer.passes, answer.charged, answer.available), (3, 3, 0));
/// # Ok::<(), sluicegate_core::LimitError>(())
/// ```
#[inline]
pub fn step(state: &mut State, terms: &Terms, operation: Operation, count: u32, now: Timestamp) -> Answer {
    match operation {
        Operation::Check | Operation::Peek => {
            with_counter!(state, counter => terms.check(counter, operation, count, now))
        }
        Operation::Charge | Operation::Refund { .. } => terms.adjust(state, operation, count, now),
    }
}

#[inline]
fn signed(units: u64) -> i64 {
    i64::try_from(units).expect("counts stay below 2^53")
}
