//! How one request is asked about: what it meets becomes one check; a store in this process decides it at once, any other within the
//! deadline; and where there is no answer, the rules' own policies stand in.

use std::{mem, sync::Arc, time::Duration};

use smallvec::{SmallVec, smallvec};
use tollgate_core::{
    Operation, Outcome, Retry, Terms, Timestamp,
    step::{Admission, Mode, Share},
};

use super::{Error, Limiter, is_meant, known};
use crate::{
    check::{Check, Tier, Tiers},
    decision::{Decision, Source, TierDecision},
    gate::Told,
    key::Key,
    labels::Labels,
    rules::{Applied, Costs, Effect, OnStoreFailure, Rule, Unit},
    store::{Store, StoreError},
};

/// When a caller refused because the store is away is asked to come back.
const CLOSED_RETRY: Duration = Duration::from_secs(1);

/// What is to be said of a tier when its answer comes, once.
#[derive(Default)]
pub(super) struct Asked {
    pub(super) rule: Option<Arc<str>>,
    pub(super) unit: Unit,
    pub(super) on_store_failure: OnStoreFailure,
}

/// What a request asks of the store, and what is to be said of its answer.
pub(super) struct Question {
    check: Check,
    /// For each tier of the check.
    asked: SmallVec<[Asked; 1]>,
    /// Rules that would refuse without counting, were they no shadows.
    refusing: Vec<TierDecision>,
}

/// How far a request comes without waiting.
pub(super) enum Begun {
    Decided(Decision),
    Waits(Box<Question>),
}

/// What a rule that a request meets comes to.
pub(super) enum Met {
    /// A counter to ask.
    Counter(Asked, Tier),
    /// A refusal, whatever is counted.
    Refusal(TierDecision),
}

/// When and where the tiers of a check were decided.
#[derive(Clone)]
pub(super) struct Settled {
    pub(super) at: Option<Timestamp>,
    pub(super) source: Source,
    pub(super) failure: Option<StoreError>,
}

impl<S: Store> Limiter<S> {
    pub(super) async fn by_limit(
        &self,
        operation: Operation,
        key: &[u8],
        terms: Terms,
    ) -> Result<Decision, Error> {
        let begun = self.begin_by_limit(operation, key, terms)?;
        self.finish(begun).await
    }

    #[inline]
    pub(super) fn begin_by_limit(
        &self,
        operation: Operation,
        key: &[u8],
        terms: Terms,
    ) -> Result<Begun, Error> {
        let tier = Tier { key: Key::without_rule(key)?, terms };
        Ok(self.begin_by_one(operation, tier, Asked::default()))
    }

    /// A request that meets one counter, as most do: where the store is in this process, nothing is made for it but the
    /// decision.
    #[inline]
    fn begin_by_one(&self, operation: Operation, tier: Tier, mut asked: Asked) -> Begun {
        match self.inner.gate.decide_one_here(operation, &tier) {
            Some((at, share)) => {
                Begun::Decided(Decision::of_one(asked.decision(&tier.terms, share), at, Source::Store))
            }
            None => self.begin(Check::of_one(operation, tier), smallvec![asked], Vec::new()),
        }
    }

    /// Decides what needs no waiting: without a future, which would have to be made and moved for nothing.
    fn begin(&self, check: Check, mut asked: SmallVec<[Asked; 1]>, mut refusing: Vec<TierDecision>) -> Begun {
        let mut said = Vec::with_capacity(asked.len() + refusing.len());
        match self.settle_here(&mut asked, &check, |_, tier| said.push(tier)) {
            Some(settled) => {
                said.append(&mut refusing);
                Begun::Decided(settled.decision(said))
            }
            None => Begun::Waits(Box::new(Question { check, asked, refusing })),
        }
    }

    pub(super) async fn by_rules(
        &self,
        operation: Operation,
        labels: &Labels,
        costs: &Costs,
        only: Option<&[&str]>,
    ) -> Result<Decision, Error> {
        let begun = self.begin_by_rules(operation, labels, costs, only)?;
        self.finish(begun).await
    }

    pub(super) fn begin_by_rules(
        &self,
        operation: Operation,
        labels: &Labels,
        costs: &Costs,
        only: Option<&[&str]>,
    ) -> Result<Begun, Error> {
        let (mut asked, mut tiers) = (SmallVec::<[Asked; 1]>::new(), Tiers::new());
        let mut refusing = Vec::new();
        let rules = self.inner.rules.load();
        known(&rules, only)?;
        for applied in rules.matching(labels, costs)? {
            if !is_meant(applied.rule, only) {
                continue;
            }
            match Met::from(applied) {
                Met::Counter(by, tier) => {
                    asked.push(by);
                    tiers.push(tier);
                }
                Met::Refusal(tier) => refusing.push(tier),
            }
        }
        drop(rules);
        if matches!(operation, Operation::Charge | Operation::Refund { .. }) {
            refusing.clear();
        }
        let is_refused = refusing.iter().any(|tier| tier.mode == Mode::Enforced);
        if is_refused || tiers.is_empty() {
            return Ok(Begun::Decided(Decision::of_tiers(refusing, None, Source::Local)));
        }
        if refusing.is_empty()
            && tiers.len() == 1
            && let (Some(tier), Some(asked)) = (tiers.pop(), asked.pop())
        {
            return Ok(self.begin_by_one(operation, tier, asked));
        }
        Ok(self.begin(Check::of(operation, tiers)?, asked, refusing))
    }

    async fn finish(&self, begun: Begun) -> Result<Decision, Error> {
        match begun {
            Begun::Decided(decision) => Ok(decision),
            // boxed, so that who is answered at once does not make room for those who wait
            Begun::Waits(question) => Box::pin(self.ask_store(*question)).await,
        }
    }

    async fn ask_store(&self, question: Question) -> Result<Decision, Error> {
        let Question { check, mut asked, refusing } = question;
        let mut said = Vec::with_capacity(asked.len() + refusing.len());
        let settled = self.settle_by_store(&mut asked, &check, |_, tier| said.push(tier)).await?;
        if settled.failure.is_none() {
            said.extend(refusing);
        }
        Ok(settled.decision(said))
    }

    /// Asks the store, or whoever stands in for it, and tells what each tier says, by its place in the check. Not
    /// all of them have something to say.
    pub(super) async fn settle(
        &self,
        asked: &mut [Asked],
        check: &Check,
        mut tell: impl FnMut(usize, TierDecision),
    ) -> Result<Settled, Error> {
        match self.settle_here(asked, check, &mut tell) {
            Some(settled) => Ok(settled),
            None => Box::pin(self.settle_by_store(asked, check, tell)).await,
        }
    }

    /// The same, if it needs no waiting.
    #[inline]
    fn settle_here(
        &self,
        asked: &mut [Asked],
        check: &Check,
        mut tell: impl FnMut(usize, TierDecision),
    ) -> Option<Settled> {
        let Told { at } = self.inner.gate.decide_at_once(check, |place, share| {
            tell(place, asked[place].decision(&check.tiers()[place].terms, share));
        })?;
        Some(Settled::by_store(at))
    }

    async fn settle_by_store(
        &self,
        asked: &mut [Asked],
        check: &Check,
        mut tell: impl FnMut(usize, TierDecision),
    ) -> Result<Settled, Error> {
        if asked.iter().any(|asked| asked.on_store_failure == OnStoreFailure::Local) {
            self.inner.gate.prepare_fallback();
        }
        match self.inner.gate.ask_store(check, self.budget).await {
            Ok(verdict) => {
                for (place, share) in verdict.shares {
                    tell(place, asked[place].decision(&check.tiers()[place].terms, share));
                }
                Ok(Settled::by_store(verdict.at))
            }
            Err(failure) => match check.operation() {
                Operation::Check | Operation::Peek => {
                    let source = self.without_store(asked, check, tell);
                    Ok(Settled { at: None, source, failure: Some(failure) })
                }
                // a policy can answer a question, but not stand in for a charge
                Operation::Charge | Operation::Refund { .. } => Err(Error::Store(failure)),
            },
        }
    }

    /// The rules' own policies: refused as soon as one that can refuse says `closed`; else those that say `local`
    /// decide by this process's share, all or none; else let through.
    fn without_store(
        &self,
        asked: &mut [Asked],
        check: &Check,
        mut tell: impl FnMut(usize, TierDecision),
    ) -> Source {
        let tiers = check.tiers();
        let of_policy = |asked: &[Asked], policy| -> Vec<usize> {
            let places = 0..tiers.len();
            places.filter(|&place| asked[place].on_store_failure == policy).collect()
        };
        let mut source = Source::Open;
        for place in of_policy(asked, OnStoreFailure::Closed) {
            let terms = &tiers[place].terms;
            if terms.mode == Mode::Enforced {
                tell(place, asked[place].decision(terms, Share::denied_for(CLOSED_RETRY)));
                source = Source::Closed;
            }
        }
        let places = of_policy(asked, OnStoreFailure::Local);
        if source == Source::Open && !places.is_empty() {
            let own = places.iter().map(|&place| tiers[place].clone()).collect();
            let own = Check::new(check.operation(), own).expect("some tiers of a valid check are one");
            let (verdict, own) = self.inner.gate.decide_without_store(&own);
            for (at, share) in verdict.shares {
                tell(places[at], asked[places[at]].decision(&own[at].terms, share));
            }
            source = Source::Fallback;
        }
        self.inner.gate.tally().stood_in(source);
        source
    }
}

/// What was decided without waiting, if it was.
#[inline]
pub(super) fn decided_here(begun: Result<Begun, Error>) -> Option<Result<Decision, Error>> {
    match begun {
        Ok(Begun::Decided(decision)) => Some(Ok(decision)),
        Ok(Begun::Waits(_)) => None,
        Err(error) => Some(Err(error)),
    }
}

impl Settled {
    /// The store decided, or is known to refuse.
    fn by_store(at: Option<Timestamp>) -> Self {
        let source = if at.is_some() { Source::Store } else { Source::Local };
        Self { at, source, failure: None }
    }

    #[inline]
    pub(super) fn decision(self, tiers: Vec<TierDecision>) -> Decision {
        let mut decision = Decision::of_tiers(tiers, self.at, self.source);
        decision.failure = self.failure;
        decision
    }
}

impl From<Applied<'_>> for Met {
    fn from(applied: Applied<'_>) -> Self {
        let rule = applied.rule;
        match applied.effect {
            Effect::Limit { key, limit, cost, shadow, overdraft, on_store_failure } => {
                let admission = if overdraft { Admission::Overdraft } else { Admission::InFull };
                let terms = Terms { limit, cost, mode: mode(shadow), admission };
                let (rule, unit) = (Some(Arc::clone(&rule.name)), rule.unit.clone());
                Self::Counter(Asked { rule, unit, on_store_failure }, Tier { key, terms })
            }
            Effect::Deny { shadow, .. } => Self::Refusal(refusing_tier(rule, shadow)),
        }
    }
}

impl Asked {
    #[inline]
    fn decision(&mut self, terms: &Terms, share: Share) -> TierDecision {
        let outcome = match share.retry {
            _ if share.passes => Outcome::Allowed,
            Some(retry) => Outcome::Denied { retry },
            None => Outcome::Denied { retry: Retry::Never },
        };
        TierDecision {
            rule: self.rule.take(),
            unit: mem::take(&mut self.unit),
            mode: terms.mode,
            outcome,
            policy: Some(terms.limit),
            limit: terms.limit.capacity(),
            remaining: share.remaining,
            reset_after: share.reset_after,
        }
    }
}

/// A rule that refuses without counting, as a tier: nothing ever fits.
fn refusing_tier(rule: &Rule, shadow: bool) -> TierDecision {
    TierDecision {
        rule: Some(Arc::clone(&rule.name)),
        unit: rule.unit.clone(),
        mode: mode(shadow),
        outcome: Outcome::Denied { retry: Retry::Never },
        policy: None,
        limit: 0,
        remaining: 0,
        reset_after: Duration::ZERO,
    }
}

pub(super) fn mode(shadow: bool) -> Mode {
    if shadow { Mode::Shadow } else { Mode::Enforced }
}
