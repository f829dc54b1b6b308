//! The decision itself: how many of `count` identical requests may pass one counter, or several at once.
//!
//! A store that keeps several counters decides a check in two passes over its tiers, so that all are
//! charged or none: ask each how many would pass ([`Terms::passes`]), then charge each what all of
//! them grant ([`Terms::settle`]). [`step`] is both passes for a single counter.

use std::time::Duration;

use crate::{
    algorithm::{Counter, State, each},
    cost::Cost,
    decision::Retry,
    limit::Limit,
    time::{MAX_EXACT, MAX_WAIT_US, Timestamp},
};

/// What is done to the counters of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operation {
    /// Decide, and charge what passes.
    Check,
    /// Decide as if checking, and change nothing.
    Peek,
    /// Charge, whatever the limits say: usage that is known only afterwards.
    Charge,
    /// Take back at most what counts now: the newest charges, or exactly the one made `at` that time.
    Refund {
        /// The store time of the charge to take back.
        at: Option<Timestamp>,
    },
}

/// What one check asks of one counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Terms {
    /// How much and how fast.
    pub limit: Limit,
    /// What one request takes.
    pub cost: Cost,
    /// Whether this counter can refuse.
    pub mode: Mode,
    /// What must be free for a request to pass.
    pub admission: Admission,
}

/// Whether a counter can refuse a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Mode {
    /// It refuses what does not fit.
    #[default]
    Enforced,
    /// It never refuses. It is charged only when the request is admitted and it would have admitted it.
    Shadow,
}

/// What must be free for a request to pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Admission {
    /// All that it costs.
    #[default]
    InFull,
    /// One unit: it is then charged in full, into debt.
    Overdraft,
}

/// What one counter says to `count` identical requests, after those that were granted were charged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    /// How many of them this counter alone would let pass.
    pub passes: u32,
    /// How many of them passed and were charged to it; 0 for a charge or a refund, which nobody has to pass.
    pub charged: u32,
    /// Whole units free now; below zero is debt.
    pub available: i64,
    /// When the next one would pass; absent when it would pass now or nobody is left to ask.
    pub retry: Option<Retry>,
    /// Microseconds until nothing counts any more.
    pub reset_after_us: u64,
    /// How much of the last of those microseconds is surplus, in parts of `1 / rate.units`.
    pub spare: u64,
}

/// What one counter says to one of the requests that an [`Answer`] is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// Whether this counter alone would have let it pass.
    pub passes: bool,
    /// Whole units free now, as this request saw it.
    pub remaining: u64,
    /// When to come back, if this counter refuses.
    pub retry: Option<Retry>,
    /// Until nothing counts any more.
    pub reset_after: Duration,
}

impl Share {
    /// A refusal by somebody who knows no more than when to come back.
    pub const fn denied_for(wait: Duration) -> Self {
        Self { passes: false, remaining: 0, retry: Some(Retry::After(wait)), reset_after: Duration::ZERO }
    }
}

impl Terms {
    /// Enforced and in full.
    pub fn new(limit: Limit, cost: Cost) -> Self {
        Self { limit, cost, mode: Mode::default(), admission: Admission::default() }
    }

    /// How many of `count` requests this counter alone would let pass now.
    pub fn passes(&self, state: &State, count: u32, now: Timestamp) -> u32 {
        self.passes_beside(state.used(&self.limit, now), count)
    }

    /// Charges what was granted, and says what the counter is like then. `passes` is what
    /// [`Terms::passes`] said, `granted` how many requests passed all counters that can refuse.
    pub fn settle(&self, state: &mut State, passes: u32, granted: u32, count: u32, now: Timestamp) -> Answer {
        each!(state, counter => {
            let view = counter.view(&self.limit, now.as_micros());
            self.settle_on(counter, view, passes, granted, count)
        })
    }

    /// Applies an unconditional operation.
    pub fn adjust(&self, state: &mut State, operation: Operation, count: u32, now: Timestamp) -> Answer {
        each!(state, counter => self.adjust_one(counter, operation, count, now))
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
            Operation::Refund { at } => {
                counter.refund(&view, &self.limit, units, at.map(Timestamp::as_micros));
                view = counter.view(&self.limit, now.as_micros());
            }
            Operation::Charge if units > 0 => counter.charge(&mut view, &self.limit, units),
            Operation::Charge | Operation::Check | Operation::Peek => {}
        }
        self.answer(counter, &view, count, 0, None)
    }

    /// Both passes over a single counter, on one view of it: [`step`] for a check or a peek, where the algorithm is
    /// known. Inlined with all that it needs, its state and its view are a few registers; behind calls they would be
    /// written to memory and read back in other sizes, which takes longer than the decision.
    #[inline(always)]
    pub fn check<C: Counter>(
        &self,
        counter: &mut C,
        operation: Operation,
        count: u32,
        now: Timestamp,
    ) -> Answer {
        let view = counter.view(&self.limit, now.as_micros());
        let passes = self.passes_beside(C::used(&view), count);
        let granted = if operation == Operation::Check { granted(count, [(self, passes)]) } else { 0 };
        self.settle_on(counter, view, passes, granted, count)
    }

    /// How many of `count` requests pass where `used` units count.
    #[inline]
    fn passes_beside(&self, used: u64, count: u32) -> u32 {
        let Ok(free) = u64::try_from(self.available(used)) else { return 0 };
        if free < self.must_be_free() {
            return 0;
        }
        let fit = match (self.cost.units(), self.admission) {
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
        let charged = granted.min(passes);
        let units = u64::from(charged).saturating_mul(self.cost.units());
        if units > 0 {
            counter.charge(&mut view, &self.limit, units);
        }
        let refuses_next = passes < count && charged == passes;
        let retry = refuses_next.then(|| self.retry(counter, &view));
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
        }
    }

    #[inline]
    fn available(&self, used: u64) -> i64 {
        signed(self.limit.capacity()) - signed(used)
    }

    /// What must be free for the next request to pass.
    #[inline]
    fn must_be_free(&self) -> u64 {
        match self.admission {
            Admission::InFull => self.cost.units(),
            Admission::Overdraft => self.cost.units().min(1),
        }
    }

    #[inline(always)]
    fn retry<C: Counter>(&self, counter: &C, view: &C::View) -> Retry {
        match self.limit.capacity().checked_sub(self.must_be_free()) {
            // two tiers of a check on one state: the other has just made room
            Some(room) if C::used(view) <= room => Retry::After(Duration::from_micros(1)),
            Some(room) => Retry::After(Duration::from_micros(counter.wait_us(view, room))),
            None => Retry::Never,
        }
    }
}

impl Answer {
    /// What this counter says to the request in place `index` (from 0, first come first served) when
    /// `granted` of them passed all counters that can refuse.
    #[inline]
    pub fn share(&self, terms: &Terms, index: u32, granted: u32) -> Share {
        let passes = self.passes > index.min(granted);
        let later = self.charged.saturating_sub(index.saturating_add(1));
        let later_units = u64::from(later).saturating_mul(terms.cost.units());
        let remaining = u64::try_from(self.available.saturating_add_unsigned(later_units)).unwrap_or(0);
        Share {
            passes,
            remaining,
            retry: if passes { None } else { self.retry },
            reset_after: Duration::from_micros(
                self.reset_after_us.saturating_sub(self.drained_by(terms, later_units)),
            ),
        }
    }

    /// By how many microseconds the reset comes sooner without `units` that were charged later.
    #[inline]
    fn drained_by(&self, terms: &Terms, units: u64) -> u64 {
        let by_level = terms.limit.algorithm() == crate::Algorithm::TokenBucket;
        if !by_level || units == 0 || self.reset_after_us >= MAX_WAIT_US {
            return 0;
        }
        let rate = terms.limit.rate();
        let parts = u128::from(units) * u128::from(rate.micros) + u128::from(self.spare);
        u64::try_from(parts / u128::from(rate.units)).unwrap_or(0)
    }
}

/// How many requests pass all counters that can refuse.
#[inline]
pub fn granted<'a>(count: u32, tiers: impl IntoIterator<Item = (&'a Terms, u32)>) -> u32 {
    let enforced = tiers.into_iter().filter(|(terms, _)| terms.mode == Mode::Enforced);
    enforced.map(|(_, passes)| passes).fold(count, u32::min)
}

/// One operation of `count` identical requests on a single counter.
///
/// ```
/// use std::time::Duration;
/// use tollgate_core::{Algorithm, Cost, Limit, Operation, State, Terms, Timestamp, step::step};
///
/// let terms = Terms::new(Limit::sliding_log(3, Duration::from_secs(60))?, Cost::ONE);
/// let mut state = State::fresh(Algorithm::SlidingLog);
/// let now = Timestamp::from_micros(1_794_765_441_799_839);
/// let answer = step(&mut state, &terms, Operation::Check, 5, now);
/// assert_eq!((answer.passes, answer.charged, answer.available), (3, 3, 0));
/// # Ok::<(), tollgate_core::LimitError>(())
/// ```
#[inline]
pub fn step(state: &mut State, terms: &Terms, operation: Operation, count: u32, now: Timestamp) -> Answer {
    match operation {
        Operation::Check | Operation::Peek => {
            each!(state, counter => terms.check(counter, operation, count, now))
        }
        Operation::Charge | Operation::Refund { .. } => terms.adjust(state, operation, count, now),
    }
}

#[inline]
fn signed(units: u64) -> i64 {
    i64::try_from(units).expect("counts stay below 2^53")
}
