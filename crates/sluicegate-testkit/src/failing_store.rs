//! A store whose every call fails.

use std::{future::ready, time::Duration};

use sluicegate::{
    Algorithm, StoreError,
    store::{BoxFuture, Check, CheckAnswer, Deadline, Key, RemoteStore},
};

/// Returns this error from every call.
#[derive(Clone, Debug)]
pub struct FailingStore(pub StoreError);

impl FailingStore {
    /// Returns a store whose calls are known not to have run.
    pub fn not_run() -> Self {
        Self(StoreError::NotRun("away".to_owned()))
    }

    /// Returns a store whose calls may or may not have run.
    pub fn ambiguous() -> Self {
        Self(StoreError::Ambiguous("away".to_owned()))
    }
}

impl RemoteStore for FailingStore {
    fn decide<'a>(
        &'a self,
        checks: &'a [Check],
        _: Option<Deadline>,
    ) -> BoxFuture<'a, Vec<Result<CheckAnswer, StoreError>>> {
        Box::pin(ready(vec![Err(self.0.clone()); checks.len()]))
    }

    fn probe(&self, _: u64) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(ready(Err(self.0.clone())))
    }

    fn announce(&self, _: u64, _: Duration) -> BoxFuture<'_, Result<u32, StoreError>> {
        Box::pin(ready(Err(self.0.clone())))
    }

    fn reset<'a>(&'a self, _: &'a [(Key, Algorithm)]) -> BoxFuture<'a, Result<u64, StoreError>> {
        Box::pin(ready(Err(self.0.clone())))
    }
}
