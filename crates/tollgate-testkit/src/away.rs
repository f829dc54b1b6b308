//! A store that is away, whatever it is asked.

use std::time::Duration;

use tollgate::{Algorithm, Check, Deadline, Decided, Key, Store, StoreError};

/// Says this to everybody.
#[derive(Clone, Debug)]
pub struct Away(pub StoreError);

impl Away {
    /// One that was never reached.
    pub fn unreached() -> Self {
        Self(StoreError::NotRun("away".to_owned()))
    }

    /// One that was asked and did not answer.
    pub fn unanswered() -> Self {
        Self(StoreError::Ambiguous("away".to_owned()))
    }
}

impl Store for Away {
    async fn decide(&self, _: &[Check], _: Option<Deadline>) -> Result<Decided, StoreError> {
        Err(self.0.clone())
    }

    fn lane(&self, _: &Check) -> u64 {
        0
    }

    fn is_remote(&self) -> bool {
        true
    }

    async fn probe(&self, _: u64) -> Result<(), StoreError> {
        Err(self.0.clone())
    }

    async fn announce(&self, _: u64, _: Duration) -> Result<u32, StoreError> {
        Err(self.0.clone())
    }

    async fn reset(&self, _: &[(Key, Algorithm)]) -> Result<u64, StoreError> {
        Err(self.0.clone())
    }
}
