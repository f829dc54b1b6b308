//! Where every front end asks: labels are read the same way, and the limiter decides within the caller's own time.

use std::{sync::Arc, time::Duration};

use tollgate::{
    Cost, Costs, Decision, Error, LabelError, Labels, Limit, Limiter, Operation, Request, Store, Together,
};

/// The one way from a front end to a decision. Cheap to clone.
pub struct Desk<S> {
    inner: Arc<Inner<S>>,
}

struct Inner<S> {
    limiter: Limiter<S>,
}

/// Who asks, and how long they wait for the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caller {
    /// Which front end they came to.
    pub transport: Transport,
    /// How long they wait, if they said so; a decision never takes longer than the store's deadline.
    pub budget: Option<Duration>,
}

/// The front ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Transport {
    /// The JSON API.
    Http,
    /// A proxy's question before it passes a request on.
    ForwardAuth,
    /// Envoy's rate limit service.
    Grpc,
    /// The Redis protocol.
    Resp,
}

/// What is asked about.
#[derive(Clone, Debug)]
pub enum Subject {
    /// The rules that match these labels; an adjustment may be for some of them only.
    Rules {
        /// What the request says about itself.
        labels: Labels,
        /// What it costs.
        costs: Costs,
        /// The rules that are meant, where not all that match are.
        only: Option<Vec<String>>,
    },
    /// One key, by a limit of its own.
    Key {
        /// The key.
        key: Vec<u8>,
        /// Its limit.
        limit: Limit,
        /// What is asked for.
        cost: Cost,
    },
}

impl Caller {
    /// A caller who waits for as long as a decision may take.
    pub const fn at(transport: Transport) -> Self {
        Self { transport, budget: None }
    }
}

impl<S> Clone for Desk<S> {
    fn clone(&self) -> Self {
        Self { inner: Arc::clone(&self.inner) }
    }
}

impl<S: Store> Desk<S> {
    /// A desk in front of a limiter.
    pub fn new(limiter: Limiter<S>) -> Self {
        Self { inner: Arc::new(Inner { limiter }) }
    }

    /// What decides.
    pub fn limiter(&self) -> &Limiter<S> {
        &self.inner.limiter
    }

    /// What a request says about itself, as rules see it.
    ///
    /// # Errors
    /// When a label cannot be used.
    pub fn labels<N, V>(&self, pairs: impl IntoIterator<Item = (N, V)>) -> Result<Labels, LabelError>
    where
        N: AsRef<str>,
        V: AsRef<[u8]>,
    {
        Labels::new(pairs)
    }

    /// Checks, peeks, charges or refunds.
    ///
    /// # Errors
    /// As the limiter's methods of those names.
    pub async fn decide(
        &self,
        caller: Caller,
        operation: Operation,
        subject: &Subject,
    ) -> Result<Decision, Error> {
        let limiter = self.within(caller);
        match subject {
            Subject::Rules { labels, costs, only } => {
                let (costs, only) = (costs.clone(), names(only));
                match operation {
                    Operation::Check => limiter.check(labels, costs).await,
                    Operation::Peek => limiter.peek(labels, costs).await,
                    Operation::Charge => limiter.charge(labels, costs, only.as_deref()).await,
                    Operation::Refund { at } => limiter.refund(labels, costs, at, only.as_deref()).await,
                }
            }
            Subject::Key { key, limit, cost } => match operation {
                Operation::Check => limiter.check_key(key, limit, *cost).await,
                Operation::Peek => limiter.peek_key(key, limit, *cost).await,
                Operation::Charge => limiter.charge_key(key, limit, *cost).await,
                Operation::Refund { at } => limiter.refund_key(key, limit, *cost, at).await,
            },
        }
    }

    /// Decides several requests together, all or none.
    ///
    /// # Errors
    /// As [`Limiter::check_together`].
    pub async fn decide_together(&self, caller: Caller, requests: &[Request]) -> Result<Together, Error> {
        self.within(caller).check_together(requests).await
    }

    /// Forgets counters. How many there were.
    ///
    /// # Errors
    /// As [`Limiter::reset`].
    pub async fn reset(&self, caller: Caller, subject: &Subject) -> Result<u64, Error> {
        let limiter = self.within(caller);
        match subject {
            Subject::Rules { labels, only, .. } => limiter.reset(labels, names(only).as_deref()).await,
            Subject::Key { key, limit, .. } => limiter.reset_key(key, limit).await.map(u64::from),
        }
    }

    fn within(&self, caller: Caller) -> Limiter<S> {
        match caller.budget {
            Some(budget) => self.inner.limiter.within(budget),
            None => self.inner.limiter.clone(),
        }
    }
}

fn names(only: &Option<Vec<String>>) -> Option<Vec<&str>> {
    only.as_ref().map(|names| names.iter().map(String::as_str).collect())
}
