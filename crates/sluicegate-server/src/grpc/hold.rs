//! Holds: the request-phase call makes them, and the call at the end of the stream settles them.

use std::time::Duration;

use futures_util::future::join_all;
use sluicegate::{
    Error, Limiter,
    limiter::{GroupHoldDecision, OnConcurrency, Operation, Request},
    store::HoldId,
};
use tracing::Instrument;

use super::request::StreamEnd;
use crate::{
    engine::{Engine, Excess, Transport},
    observe::{Call, trace},
};

/// Decides the requests of a call, all or none, as a hold.
pub(super) async fn hold(
    engine: &Engine,
    requests: &[Request<'_>],
    id: HoldId,
    deadline: Option<Duration>,
) -> Result<GroupHoldDecision, Error> {
    let observation = engine.observer().begin(Transport::Grpc);
    let span = trace::decision_span(Transport::Grpc, Call::Hold);
    let decided = limiter(engine, deadline).hold_group(requests, id).instrument(span.clone()).await;
    match &decided {
        Ok(GroupHoldDecision { group, .. }) => {
            trace::record(&span, &group.overall);
            observation.decided_group(Call::Hold, requests, group, || engine.limiter().rules());
        }
        Err(error) => observation.failed(Call::Hold, error),
    }
    decided
}

/// Releases the hold that these requests made, in the background: their call was cancelled before it was answered, so Envoy sends no call at the
/// end of the stream.
pub(super) fn release(engine: &Engine, requests: &[Request<'_>], id: &HoldId) {
    let limiter = engine.limiter();
    let held = requests.iter().filter(|request| request.operation == Operation::Check);
    for request in held.filter(|request| request.on_concurrency != OnConcurrency::Skip) {
        match limiter.hold_token(request, id.clone()) {
            Ok(token) => limiter.release_later(token),
            Err(error) => tracing::warn!("hold not released; it will expire: {error}"),
        }
    }
}

/// Settles the holds of the descriptors that mark the end of a stream.
///
/// # Errors
/// The first one, after all others were settled.
pub(super) async fn settle(
    engine: Engine,
    ends: Vec<StreamEnd>,
    excess: Excess,
    deadline: Option<Duration>,
) -> Result<(), Error> {
    let observation = engine.observer().begin(Transport::Grpc);
    let limiter = limiter(&engine, deadline);
    let settled = ends.iter().map(async |StreamEnd { labels, actual }| {
        let span = trace::decision_span(Transport::Grpc, Call::Settle);
        let settled = async {
            match excess {
                Excess::Bounded => limiter.settle_labels_bounded(labels, *actual).await,
                Excess::Unbounded => limiter.settle_labels(labels, *actual).await,
            }
        };
        let settled = settled.instrument(span.clone()).await;
        match &settled {
            Ok(settlement) => {
                trace::record_settlement(&span, settlement);
                observation.done(Call::Settle);
            }
            Err(error) => observation.failed(Call::Settle, error),
        }
        settled.map(drop)
    });
    join_all(settled).await.into_iter().collect()
}

fn limiter(engine: &Engine, deadline: Option<Duration>) -> Limiter {
    match deadline {
        Some(deadline) => engine.limiter().with_deadline(deadline),
        None => engine.limiter().clone(),
    }
}
