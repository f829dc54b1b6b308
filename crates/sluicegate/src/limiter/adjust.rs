//! Charges and refunds: requests that are made when they are awaited.

use std::{future::IntoFuture, pin::Pin};

use sluicegate_core::{Operation, Timestamp};

use super::{Error, Limiter, Request, RuleSelection};
use crate::decision::Decision;

/// The future of a charge or a refund.
type Adjusting<'a> = Pin<Box<dyn Future<Output = Result<Decision, Error>> + Send + 'a>>;

/// A charge, made when it is awaited. See [`Limiter::charge`].
#[derive(Clone, Debug)]
#[must_use = "a charge is made when it is awaited"]
pub struct Charge<'a> {
    pub(super) limiter: &'a Limiter,
    pub(super) request: Request<'a>,
}

/// A refund, made when it is awaited. See [`Limiter::refund`].
#[derive(Clone, Debug)]
#[must_use = "a refund is made when it is awaited"]
pub struct Refund<'a> {
    pub(super) limiter: &'a Limiter,
    pub(super) request: Request<'a>,
}

impl Charge<'_> {
    /// Charges only the rules of these names.
    pub fn rules<N: Into<String>>(mut self, names: impl IntoIterator<Item = N>) -> Self {
        self.request = self.request.rules(RuleSelection::named(names));
        self
    }
}

impl Refund<'_> {
    /// Refunds only the rules of these names. No effect on the refund of a key.
    pub fn rules<N: Into<String>>(mut self, names: impl IntoIterator<Item = N>) -> Self {
        self.request = self.request.rules(RuleSelection::named(names));
        self
    }

    /// Refunds exactly the charge made at this time: [`Decision::at`] of the earlier decision.
    pub fn at(mut self, at: impl Into<Option<Timestamp>>) -> Self {
        self.request = self.request.operation(Operation::Refund { at: at.into() });
        self
    }
}

impl<'a> IntoFuture for Charge<'a> {
    type Output = Result<Decision, Error>;
    type IntoFuture = Adjusting<'a>;

    fn into_future(self) -> Adjusting<'a> {
        Box::pin(adjust(self.limiter, self.request))
    }
}

impl<'a> IntoFuture for Refund<'a> {
    type Output = Result<Decision, Error>;
    type IntoFuture = Adjusting<'a>;

    fn into_future(self) -> Adjusting<'a> {
        Box::pin(adjust(self.limiter, self.request))
    }
}

async fn adjust(limiter: &Limiter, request: Request<'_>) -> Result<Decision, Error> {
    limiter.start(&request)?.decision().await
}
