//! Several requests that pass together or not at all: one call of a client that is described in several ways.
//!
//! Each request meets rules by itself. All counters that they reach are then one check, where a counter that several
//! requests reach is charged once, with the largest cost. What requests give back is given back after that, in one
//! step of its own, and only if the others pass: a call that is refused changes nothing.

use std::{sync::Arc, time::Duration};

use tokio::time::Instant;
use tollgate_core::{Algorithm, Limit, LimitError, Operation, Outcome, Retry, Terms, step::Mode};

use super::{
    Error, Limiter,
    asking::{Asked, Met, Settled, mode},
};
use crate::{
    check::{Check, CheckError, MAX_TIERS, Tier},
    decision::{Decision, Source, TierDecision},
    key::Key,
    labels::Labels,
    rules::{Applied, Costs, DEFAULT_UNIT, Effect, OnStoreFailure, RuleSet, Unit},
    store::Store,
};

/// One of several requests that are decided together.
#[derive(Clone, Debug)]
pub struct Request {
    /// What it says about itself.
    pub labels: Labels,
    /// What it costs; nothing: it only asks, and is refused in debt.
    pub costs: Costs,
    /// Whether that is taken or given back.
    pub hits: Hits,
    /// Other numbers for every rule that it meets. When it meets none, a counter of its own, for exactly its labels,
    /// counts by them in fixed windows.
    pub numbers: Option<Numbers>,
}

/// Which way a cost goes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Hits {
    /// It is asked for, and taken if all may pass.
    #[default]
    Taken,
    /// It is given back, at most what counts now.
    GivenBack,
}

/// How much and how fast, by the algorithm of whichever rule; a burst follows the amount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Numbers {
    /// How much in a window; 0 denies everything, and more than the algorithm can count is the most it can.
    pub amount: u64,
    /// The window.
    pub window: Duration,
}

/// The answer to several requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Together {
    /// Whether they may pass. Its tiers are those of all requests that take something, each counter once.
    pub overall: Decision,
    /// What the tiers of each request say to it, in order. When they may not pass, those that are not to blame say
    /// allowed, and are not charged.
    pub each: Vec<Decision>,
}

impl<S: Store> Limiter<S> {
    /// Decides several requests by all rules that match any of them, all or none, and charges them if they may
    /// pass. Where a counter is reached twice under different limits, the stricter one holds.
    ///
    /// # Errors
    /// When a request is invalid; nothing is charged.
    ///
    /// # Examples
    /// ```
    /// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
    /// use std::time::Duration;
    /// use tollgate::{Cost, Hits, Labels, Limit, Limiter, MemoryStore, Request, Rule};
    ///
    /// let minute = Duration::from_secs(60);
    /// let rules = [
    ///     Rule::new("per-ip", Limit::sliding_log(100, minute)?).per(["ip"]),
    ///     Rule::new("per-user", Limit::sliding_log(1, minute)?).per(["user"]),
    /// ];
    /// let limiter = Limiter::new(MemoryStore::new(), rules)?;
    /// let request = |name, value| {
    ///     let labels = Labels::new([(name, value)])?;
    ///     Ok::<_, tollgate::LabelError>(Request { labels, costs: Cost::ONE.into(), hits: Hits::Taken, numbers: None })
    /// };
    /// let both = [request("ip", "203.0.113.9")?, request("user", "42")?];
    /// assert!(limiter.check_together(&both).await?.overall.is_allowed());
    /// let refused = limiter.check_together(&both).await?;
    /// assert_eq!(refused.overall.rule(), Some("per-user"));
    /// assert_eq!(refused.each[0].remaining(), Some(99)); // the other one was not charged
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// # }).unwrap();
    /// ```
    pub async fn check_together(&self, requests: &[Request]) -> Result<Together, Error> {
        let rules = self.rules();
        let (mut taken, mut given_back) = (Joint::default(), Joint::default());
        for (place, request) in requests.iter().enumerate() {
            match request.hits {
                Hits::Taken => taken.add(&rules, place, request)?,
                Hits::GivenBack => given_back.add(&rules, place, request)?,
            }
        }
        given_back.refusing.clear();
        if given_back.tiers.is_empty() {
            let said = self.settle_joint(Operation::Check, &mut taken).await?;
            return Ok(said.together(&taken, requests.len()));
        }
        let begun = Instant::now();
        let said = self.settle_joint(Operation::Check, &mut taken).await?;
        let is_answered = said.settled.failure.is_none();
        let mut answer = said.together(&taken, requests.len());
        if answer.overall.is_allowed() {
            let left = self.inner.gate.deadline(self.budget).saturating_sub(begun.elapsed());
            let limiter = if is_answered { self.within(left) } else { self.within(Duration::ZERO) };
            let said = match limiter.settle_joint(Operation::Refund { at: None }, &mut given_back).await {
                // what was taken is taken: that something could not be given back refuses nobody
                Err(Error::Store(failure)) => {
                    let settled = Settled { at: None, source: Source::Open, failure: Some(failure) };
                    Said { settled, tiers: vec![None; given_back.asked.len()] }
                }
                said => said?,
            };
            for (place, _) in
                requests.iter().enumerate().filter(|(_, request)| request.hits == Hits::GivenBack)
            {
                answer.each[place] = said.to(&given_back, place);
            }
        }
        Ok(answer)
    }

    /// Asks about all counters at once, unless a rule refuses outright.
    async fn settle_joint(&self, operation: Operation, joint: &mut Joint) -> Result<Said, Error> {
        let mut tiers = vec![None; joint.tiers.len()];
        let is_refused = joint.refusing.iter().any(|(_, tier)| tier.mode == Mode::Enforced);
        if is_refused || tiers.is_empty() {
            let settled = Settled { at: None, source: Source::Local, failure: None };
            return Ok(Said { settled, tiers });
        }
        let check = Check::new(operation, std::mem::take(&mut joint.tiers))?;
        let settled = self.settle(&mut joint.asked, &check, |place, tier| tiers[place] = Some(tier)).await?;
        Ok(Said { settled, tiers })
    }
}

/// What several requests ask, each counter once.
#[derive(Default)]
struct Joint {
    asked: Vec<Asked>,
    tiers: Vec<Tier>,
    /// Which request meets which counter.
    met: Vec<(usize, usize)>,
    /// Which request meets a rule that refuses outright.
    refusing: Vec<(usize, TierDecision)>,
}

impl Joint {
    fn add(&mut self, rules: &RuleSet, request: usize, asks: &Request) -> Result<(), Error> {
        let applied = rules.matching(&asks.labels, &asks.costs)?;
        if let (Some(numbers), []) = (asks.numbers, &*applied) {
            return self.meet(request, numbers.without_rule(asks)?);
        }
        for mut applied in applied {
            let met = match asks.numbers {
                Some(numbers) => numbers.replace_in(&mut applied)?,
                None => None,
            };
            self.meet(request, met.unwrap_or_else(|| applied.into()))?;
        }
        Ok(())
    }

    fn meet(&mut self, request: usize, met: Met) -> Result<(), Error> {
        let (by, tier) = match met {
            Met::Counter(by, tier) => (by, tier),
            Met::Refusal(tier) => {
                self.refusing.push((request, tier));
                return Ok(());
            }
        };
        let known = self.tiers.iter().position(|other| other.same_counter(&tier));
        let place = known.unwrap_or(self.tiers.len());
        if known.is_some() {
            let (asked, other) = (&mut self.asked[place], &mut self.tiers[place].terms);
            asked.on_store_failure = safer(asked.on_store_failure, by.on_store_failure);
            *other = merged(other, &tier.terms);
        } else if place == MAX_TIERS {
            return Err(CheckError::Tiers(MAX_TIERS + 1).into());
        } else {
            self.asked.push(by);
            self.tiers.push(tier);
        }
        self.met.push((request, place));
        Ok(())
    }
}

/// What the counters of a joint check say.
struct Said {
    settled: Settled,
    tiers: Vec<Option<TierDecision>>,
}

impl Said {
    fn together(self, joint: &Joint, count: usize) -> Together {
        let each = (0..count).map(|request| self.to(joint, request)).collect();
        let refusing = joint.refusing.iter().map(|(_, tier)| tier.clone());
        let tiers = self.tiers.into_iter().flatten().chain(refusing).collect();
        Together { overall: self.settled.decision(tiers), each }
    }

    /// What they say to one of the requests.
    fn to(&self, joint: &Joint, request: usize) -> Decision {
        let of_request = |(other, place): &(usize, usize)| (*other == request).then_some(*place);
        let counters = joint.met.iter().filter_map(of_request);
        let counters = counters.filter_map(|place| self.tiers[place].clone());
        let refusing = joint.refusing.iter().filter(|(other, _)| *other == request);
        let tiers = counters.chain(refusing.map(|(_, tier)| tier.clone())).collect();
        self.settled.clone().decision(tiers)
    }
}

impl Numbers {
    /// Replaces the limit of a rule, or says that nothing may pass it.
    fn replace_in(self, applied: &mut Applied<'_>) -> Result<Option<Met>, LimitError> {
        let rule = applied.rule;
        let Effect::Limit { limit, shadow, .. } = &mut applied.effect else { return Ok(None) };
        if self.amount == 0 {
            let mode = mode(*shadow);
            return Ok(Some(nothing(Some(Arc::clone(&rule.name)), rule.unit.clone(), mode)));
        }
        let phase = Duration::from_micros(limit.phase_us());
        *limit = self.limit(limit.algorithm())?;
        if !phase.is_zero() {
            *limit = limit.with_phase(phase)?;
        }
        Ok(None)
    }

    fn limit(self, algorithm: Algorithm) -> Result<Limit, LimitError> {
        Limit::new(algorithm, self.amount.min(algorithm.max_amount()), self.window)
    }

    /// A counter for exactly the labels of a request.
    fn without_rule(self, asks: &Request) -> Result<Met, LimitError> {
        let unit = Unit::default();
        if self.amount == 0 {
            return Ok(nothing(None, unit, Mode::Enforced));
        }
        let limit = self.limit(Algorithm::FixedWindow)?;
        let tier =
            Tier { key: Key::of_labels(&asks.labels), terms: Terms::new(limit, asks.costs.of(DEFAULT_UNIT)) };
        let on_store_failure = OnStoreFailure::default();
        Ok(Met::Counter(Asked { rule: None, unit, on_store_failure }, tier))
    }
}

/// A limit of nothing at all.
fn nothing(rule: Option<Arc<str>>, unit: Unit, mode: Mode) -> Met {
    Met::Refusal(TierDecision {
        rule,
        unit,
        mode,
        outcome: Outcome::Denied { retry: Retry::Never },
        policy: None,
        limit: 0,
        remaining: 0,
        reset_after: Duration::ZERO,
    })
}

/// What two requests ask of one counter: the larger cost, under the stricter limit.
fn merged(one: &Terms, other: &Terms) -> Terms {
    let less = other.limit.capacity() < one.limit.capacity();
    let slower = one.limit.rate().is_faster_than(other.limit.rate());
    let is_stricter = less || (slower && other.limit.capacity() == one.limit.capacity());
    let is_enforced = one.mode == Mode::Enforced || other.mode == Mode::Enforced;
    Terms {
        limit: if is_stricter { other.limit } else { one.limit },
        cost: one.cost.max(other.cost),
        mode: mode(!is_enforced),
        admission: one.admission,
    }
}

fn safer(one: OnStoreFailure, other: OnStoreFailure) -> OnStoreFailure {
    match (one, other) {
        (OnStoreFailure::Closed, _) | (_, OnStoreFailure::Closed) => OnStoreFailure::Closed,
        (OnStoreFailure::Local, _) | (_, OnStoreFailure::Local) => OnStoreFailure::Local,
        (OnStoreFailure::Open, OnStoreFailure::Open) => OnStoreFailure::Open,
    }
}
