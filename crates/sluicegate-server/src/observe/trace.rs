//! A span for each request with a child span for its decision, as part of the caller's trace.
//!
//! Spans have the level `debug` and cost almost nothing while neither a log filter nor a collector enables them.

use std::task::{Context, Poll};

use http::{HeaderMap, Request};
use sluicegate::{Decision, Retry, limiter::Settlement};
use sluicegate_core::decision::whole_millis_up;
use tower_layer::Layer;
use tower_service::Service;
use tracing::{
    Span, debug_span,
    field::Empty,
    instrument::{Instrument, Instrumented},
};

use super::Call;
use crate::engine::Transport;

/// The target of the spans.
pub const TARGET: &str = "sluicegate::request";

/// The header with the trace context, as <https://www.w3.org/TR/trace-context/> defines it.
const TRACE_PARENT: &str = "traceparent";

/// A layer that creates a span for each request of an HTTP front end.
#[derive(Clone, Copy, Debug)]
pub struct RequestSpans(pub Transport);

/// The service of [`RequestSpans`].
#[derive(Clone, Debug)]
pub struct WithSpans<S> {
    inner: S,
    transport: Transport,
}

impl<S> Layer<S> for RequestSpans {
    type Service = WithSpans<S>;

    fn layer(&self, inner: S) -> WithSpans<S> {
        WithSpans { inner, transport: self.0 }
    }
}

impl<S, B> Service<Request<B>> for WithSpans<S>
where
    S: Service<Request<B>>,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = Instrumented<S::Future>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> Instrumented<S::Future> {
        let span = request_span(self.transport, &request);
        let call = span.in_scope(|| self.inner.call(request));
        call.instrument(span)
    }
}

/// Creates the span of an HTTP or gRPC request.
pub(crate) fn request_span<B>(transport: Transport, request: &Request<B>) -> Span {
    let path = request.uri().path();
    let span = debug_span!(
        target: TARGET,
        "request",
        otel.name = %format_args!("{} {path}", request.method()),
        otel.kind = "server",
        transport = transport.name(),
        http.request.method = %request.method(),
        url.path = path,
        trace_id = Empty,
    );
    if !span.is_disabled() {
        join(&span, request.headers());
    }
    span
}

/// Adds the span to the trace in the request's headers.
fn join(span: &Span, headers: &HeaderMap) {
    let Some(id) = headers.get(TRACE_PARENT).and_then(|value| trace_id(value.to_str().ok()?)) else {
        return;
    };
    span.record("trace_id", id);
    #[cfg(feature = "otlp")]
    super::otlp::join(span, headers);
}

/// Returns the trace id of a `traceparent` header of any version.
fn trace_id(parent: &str) -> Option<&str> {
    let mut fields = parent.split('-');
    let (version, trace, span, flags) = (fields.next()?, fields.next()?, fields.next()?, fields.next()?);
    let is_hex = |text: &str, digits: usize| {
        text.len() == digits && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
    };
    let is_zero = |text: &str| text.bytes().all(|byte| byte == b'0');
    let is_valid = is_hex(version, 2) && version != "ff" && is_hex(flags, 2);
    let is_valid = is_valid && is_hex(trace, 32) && !is_zero(trace) && is_hex(span, 16) && !is_zero(span);
    is_valid.then_some(trace)
}

/// Creates the span of a decision.
pub(crate) fn decision_span(transport: Transport, call: Call) -> Span {
    debug_span!(
        target: TARGET,
        "decide",
        transport = transport.name(),
        sluicegate.operation = call.name(),
        sluicegate.outcome = Empty,
        sluicegate.rule = Empty,
        sluicegate.remaining = Empty,
        sluicegate.retry_after_ms = Empty,
        sluicegate.source = Empty,
    )
}

/// Records the settlement, release or renewal of a hold in its span.
pub(crate) fn record_settlement(span: &Span, settlement: &Settlement) {
    span.record("sluicegate.outcome", settlement.outcome.name());
}

/// Records a decision in its span.
pub(crate) fn record(span: &Span, decision: &Decision) {
    if span.is_disabled() {
        return;
    }
    span.record("sluicegate.outcome", if decision.is_allowed() { "allowed" } else { "denied" });
    span.record("sluicegate.source", decision.source.name());
    if let Some(rule) = decision.rule() {
        span.record("sluicegate.rule", rule);
    }
    if let Some(remaining) = decision.remaining() {
        span.record("sluicegate.remaining", remaining);
    }
    if let sluicegate::Outcome::Denied { retry: Retry::After(wait) } = decision.outcome {
        span.record("sluicegate.retry_after_ms", whole_millis_up(wait));
    }
    if let Some(failure) = &decision.failure {
        tracing::debug!(target: TARGET, %failure, "decided without the store");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_valid_traceparent_has_a_trace_id() {
        let trace = "4bf92f3577b34da6a3ce929d0e0e4736";
        let parent = |text: &str| text.replace('T', trace).replace('S', "00f067aa0ba902b7");
        for text in ["00-T-S-01", "00-T-S-00", "cc-T-S-01-what-comes-later"] {
            assert_eq!(trace_id(&parent(text)), Some(trace), "{text}");
        }
        for text in [
            "",
            "00",
            "00-T-S",
            "ff-T-S-01",
            "00-T-S-1",
            "00-S-T-01",
            "0-T-S-01",
            "00-T-0000000000000000-01",
            "00-00000000000000000000000000000000-S-01",
            "00-TT-S-01",
            "00-T-S-0g",
            "00-4BF92F3577B34DA6A3CE929D0E0E4736-S-01",
        ] {
            assert_eq!(trace_id(&parent(text)), None, "{text}");
        }
    }
}
