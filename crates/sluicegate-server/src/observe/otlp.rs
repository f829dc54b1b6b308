//! Exports spans to an OpenTelemetry collector with OTLP over gRPC.
//!
//! A dedicated thread sends them. Spans that the collector does not accept in time are dropped; requests never wait.

use std::{fmt, time::Duration};

use http::HeaderMap;
use opentelemetry::{
    propagation::{Extractor, TextMapPropagator},
    trace::TracerProvider,
};
use opentelemetry_otlp::{ExporterBuildError, SpanExporter, WithExportConfig};
use opentelemetry_sdk::{
    Resource,
    propagation::TraceContextPropagator,
    trace::{Sampler, SdkTracer, SdkTracerProvider},
};
use tracing::{Level, Span, Subscriber};
use tracing_opentelemetry::{OpenTelemetryLayer, OpenTelemetrySpanExt};
use tracing_subscriber::{filter::Targets, registry::LookupSpan};

use super::trace;

/// The service name in traces.
pub const SERVICE: &str = "sluicegate";

/// Timeout for one batch of spans.
const EXPORT_TIMEOUT: Duration = Duration::from_secs(5);

/// The collector and the sampling ratio.
#[derive(Clone, Debug, PartialEq)]
pub struct Collector {
    /// Its address, for example `http://127.0.0.1:4317`.
    pub endpoint: String,
    /// Sampling ratio of traces that start at this server, from 0 to 1. Traces from callers keep the caller's sampling
    /// decision.
    pub share: f64,
}

/// The address of the collector is invalid.
#[derive(Debug, thiserror::Error)]
#[error("cannot send spans to {endpoint:?}: {reason}; use for example \"http://127.0.0.1:4317\"")]
pub struct CollectorError {
    endpoint: String,
    reason: ExporterBuildError,
}

/// The running exporter.
pub(super) struct Exporting(SdkTracerProvider);

impl Exporting {
    pub(super) fn to(collector: &Collector) -> Result<Self, CollectorError> {
        let Collector { endpoint, share } = collector;
        let exporter = SpanExporter::builder()
            .with_tonic()
            .with_endpoint(endpoint)
            .with_timeout(EXPORT_TIMEOUT)
            .build()
            .map_err(|reason| CollectorError { endpoint: endpoint.clone(), reason })?;
        let sampler = Sampler::ParentBased(Box::new(Sampler::TraceIdRatioBased(*share)));
        let resource = Resource::builder().with_service_name(SERVICE).build();
        Ok(Self(
            SdkTracerProvider::builder()
                .with_batch_exporter(exporter)
                .with_sampler(sampler)
                .with_resource(resource)
                .build(),
        ))
    }

    pub(super) fn layer<S>(&self) -> OpenTelemetryLayer<S, SdkTracer>
    where
        S: Subscriber + for<'a> LookupSpan<'a>,
    {
        tracing_opentelemetry::layer()
            .with_tracer(self.0.tracer(SERVICE))
            .with_location(false)
            .with_threads(false)
            .with_tracked_inactivity(false)
    }

    /// Sends the remaining spans. Blocks for at most [`EXPORT_TIMEOUT`].
    pub(super) fn stop(self) {
        if let Err(error) = self.0.shutdown_with_timeout(EXPORT_TIMEOUT) {
            tracing::warn!(%error, "shutdown of the span exporter failed; the last spans may be lost");
        }
    }
}

impl fmt::Debug for Exporting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Exporting")
    }
}

/// The spans that are exported, independently of the log filter.
pub(super) fn requests() -> Targets {
    Targets::new().with_target(trace::TARGET, Level::DEBUG)
}

/// Makes the span a child of the span in the request's headers.
pub(super) fn join(span: &Span, headers: &HeaderMap) {
    let parent = TraceContextPropagator::new().extract(&Fields(headers));
    // Fails only if no OpenTelemetry layer is installed.
    let _joined = span.set_parent(parent);
}

struct Fields<'a>(&'a HeaderMap);

impl Extractor for Fields<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key)?.to_str().ok()
    }

    fn keys(&self) -> Vec<&str> {
        self.0.keys().map(|name| name.as_str()).collect()
    }
}
