//! Stands between callers and a store: an answer comes by the deadline, whatever the store does.

use std::{
    future::{Future, poll_fn},
    pin::pin,
    task::Poll,
    time::Duration,
};

use tollgate_core::Algorithm;

use crate::{
    check::Check,
    key::Key,
    store::{Decided, Store, StoreError},
};

/// How long a decision may take unless another deadline is set.
pub const DEFAULT_DEADLINE: Duration = Duration::from_millis(10);

/// A store behind a deadline.
pub(crate) struct Gate<S> {
    pub(crate) store: S,
    pub(crate) deadline: Duration,
}

impl<S: Store> Gate<S> {
    pub(crate) async fn decide(&self, check: Check) -> Result<Decided, StoreError> {
        within(self.deadline, self.store.decide(&[check], None)).await
    }

    pub(crate) async fn reset(&self, counters: &[(Key, Algorithm)]) -> Result<u64, StoreError> {
        within(self.deadline, self.store.reset(counters)).await
    }
}

/// The answer of a call, or that it did not come in time: it may have run all the same.
async fn within<T>(
    deadline: Duration,
    call: impl Future<Output = Result<T, StoreError>>,
) -> Result<T, StoreError> {
    let mut call = pin!(call);
    // an answer that is there at once needs no timer, and so no runtime that has one
    let at_once = poll_fn(|context| match call.as_mut().poll(context) {
        Poll::Ready(answer) => Poll::Ready(Some(answer)),
        Poll::Pending => Poll::Ready(None),
    });
    if let Some(answer) = at_once.await {
        return answer;
    }
    match tokio::time::timeout(deadline, call).await {
        Ok(answer) => answer,
        Err(_) => Err(StoreError::Ambiguous(format!("no answer within {deadline:?}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn silence_ends_at_the_deadline() {
        let silent = std::future::pending::<Result<(), StoreError>>();
        let error = within(DEFAULT_DEADLINE, silent).await.unwrap_err();
        assert_eq!(error, StoreError::Ambiguous("no answer within 10ms".to_owned()));
    }

    #[test]
    fn an_answer_that_is_there_needs_no_runtime() {
        let mut call = pin!(within(DEFAULT_DEADLINE, async { Ok::<_, StoreError>(7) }));
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        assert_eq!(call.as_mut().poll(&mut context), Poll::Ready(Ok(7)));
    }
}
