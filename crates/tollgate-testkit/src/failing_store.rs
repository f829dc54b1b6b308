//! A store that is away, whatever it is asked.

use std::{future::ready, time::Duration};

use tollgate::{Algorithm, Answered, BoxFuture, Check, Deadline, Key, RemoteStore, StoreError};

/// Says this to everybody.
#[derive(Clone, Debug)]
pub struct FailingStore(pub StoreError);

impl FailingStore {
    /// One that was never reached.
    pub fn not_run() -> Self {
        Self(StoreError::NotRun("away".to_owned()))
    }

    /// One that was asked and did not answer.
    pub fn ambiguous() -> Self {
        Self(StoreError::Ambiguous("away".to_owned()))
    }
}

impl RemoteStore for FailingStore {
    fn decide<'a>(
        &'a self,
        checks: &'a [Check],
        _: Option<Deadline>,
    ) -> BoxFuture<'a, Vec<Result<Answered, StoreError>>> {
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
