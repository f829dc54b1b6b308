//! Operations that run to completion even if their caller is dropped.
//!
//! A front end drops a call when its client disconnects. An operation that was sent to the store takes effect nevertheless, and must
//! write its audit line.

use std::{
    future::{Future, pending, poll_fn},
    panic::resume_unwind,
    task::Poll,
};

use tracing::Instrument;

/// Runs an operation to completion, in a separate task unless it completes on its first poll. The number of tasks is bounded by the
/// number of callers within the operation's own deadline.
pub(crate) async fn run_to_completion<T: Send + 'static>(
    operation: impl Future<Output = T> + Send + 'static,
) -> T {
    let mut operation = Box::pin(operation);
    let first_poll = poll_fn(|context| Poll::Ready(operation.as_mut().poll(context))).await;
    if let Poll::Ready(output) = first_poll {
        return output;
    }
    match tokio::spawn(operation.in_current_span()).await {
        Ok(output) => output,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => resume_unwind(panic),
            // The runtime shuts down, and this task with it.
            Err(_) => pending().await,
        },
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::oneshot;

    use super::*;

    #[tokio::test]
    async fn an_operation_completes_after_its_caller_was_dropped() {
        let (reply, replied) = oneshot::channel::<()>();
        let (report, completed) = oneshot::channel();
        let caller = tokio::spawn(run_to_completion(async move {
            replied.await.unwrap();
            report.send(()).unwrap();
        }));
        tokio::task::yield_now().await;
        caller.abort();
        assert!(caller.await.unwrap_err().is_cancelled());
        reply.send(()).unwrap();
        completed.await.unwrap();
    }

    #[tokio::test]
    async fn an_operation_returns_its_output_at_once_or_later() {
        assert_eq!(run_to_completion(async { 1 }).await, 1);
        let later = run_to_completion(async {
            tokio::task::yield_now().await;
            2
        });
        assert_eq!(later.await, 2);
    }
}
