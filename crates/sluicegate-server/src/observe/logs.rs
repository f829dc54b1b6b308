//! Logging: one line per event to standard error, as text or JSON, and optionally spans to an OpenTelemetry collector.
//!
//! A thread writes the lines from a [bounded queue](super::log_queue): a stalled reader of standard error delays no decision.
//!
//! Labels and keys of requests are logged only for calls that adjust or administer, and at level `debug`. Secret labels are
//! always hashed.

use std::{
    fmt,
    io::{self, IsTerminal},
    net::SocketAddr,
    str::FromStr,
    sync::OnceLock,
};

use sluicegate::store::StoreError;
use tracing::{Subscriber, level_filters::LevelFilter};
use tracing_subscriber::{
    EnvFilter, Layer, Registry, fmt::MakeWriter, layer::SubscriberExt, registry::LookupSpan,
    util::SubscriberInitExt,
};

use super::log_queue::{LineCounts, LogQueue};

/// The target of audit lines, which no filter drops.
pub const AUDIT: &str = "audit";

/// The default filter.
pub const DEFAULT_FILTER: &str = "info";

/// The format of a log line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Format {
    /// Text, in color on a terminal.
    #[default]
    Text,
    /// A JSON object.
    Json,
}

/// Settings for logging.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// The format of a log line.
    pub format: Format,
    /// The filter, such as `info` or `info,sluicegate=debug`; [`DEFAULT_FILTER`] if unset.
    pub filter: Option<String>,
    /// The collector of spans, if any.
    #[cfg(feature = "otlp")]
    pub otlp: Option<super::otlp::Collector>,
}

/// Logging could not be started.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LogsError {
    /// The filter is invalid.
    #[error(
        "log filter {0:?} is invalid: use error, warn, info, debug or trace, or for example \"info,sluicegate=debug\""
    )]
    Filter(String),
    /// Logging has already been started.
    #[error("logging has already been started")]
    Started,
    /// The operating system does not grant the thread that writes the lines.
    #[error("cannot start the thread that writes the log: {0}; raise ulimit -u")]
    Thread(io::Error),
    /// The address of the collector is invalid.
    #[cfg(feature = "otlp")]
    #[error(transparent)]
    Otlp(#[from] super::otlp::CollectorError),
}

/// The queue of the lines of this process, once logging has been started.
static QUEUE: OnceLock<LogQueue> = OnceLock::new();

/// Active logging. Dropping it sends the remaining spans and writes the remaining lines, within a bounded time.
#[must_use = "logging ends when it is dropped"]
#[derive(Default)]
pub struct Logs {
    #[cfg(feature = "otlp")]
    spans: Option<super::otlp::Exporting>,
    queue: Option<LogQueue>,
}

/// An administrative action or a configuration change.
#[derive(Clone, Copy)]
pub struct Audit<'a> {
    /// The name of the token, or the part of the server that acted.
    pub who: &'a str,
    /// The caller's address, if the action came from a connection.
    pub from: Option<SocketAddr>,
    /// The action: `charge`, `reset`, `reload`, …
    pub action: &'a str,
    /// The subject of the action; empty if it was not evaluated.
    pub subject: &'a dyn fmt::Display,
    /// The result.
    pub result: AuditResult<'a>,
}

/// The result of an audited action.
#[derive(Clone, Copy)]
pub enum AuditResult<'a> {
    /// It was executed.
    Done,
    /// It was rejected, with this reason, and had no effect.
    Rejected(&'a dyn fmt::Display),
    /// It failed, with this reason, and may have been applied completely, partially or not.
    Failed(&'a dyn fmt::Display),
}

impl Logs {
    /// Starts logging for the whole process.
    ///
    /// # Errors
    /// If the settings are invalid, or logging has already been started.
    pub fn start(settings: &Settings) -> Result<Self, LogsError> {
        let queue = LogQueue::start(io::stderr()).map_err(LogsError::Thread)?;
        let (subscriber, mut logs) = Self::subscriber(settings, queue.clone())?;
        subscriber.try_init().map_err(|_| LogsError::Started)?;
        logs.queue = Some(QUEUE.get_or_init(|| queue).clone());
        Ok(logs)
    }

    /// Creates a subscriber that logs to this writer.
    ///
    /// # Errors
    /// If the settings are invalid.
    pub fn subscriber<W>(
        settings: &Settings,
        writer: W,
    ) -> Result<(impl Subscriber + for<'a> LookupSpan<'a> + Send + Sync + 'static, Self), LogsError>
    where
        W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
    {
        let lines = lines(settings.format, writer).with_filter(filter(settings.filter.as_deref())?);
        #[cfg(feature = "otlp")]
        {
            let (spans, exporting) = match &settings.otlp {
                Some(collector) => {
                    let exporting = super::otlp::Exporting::to(collector)?;
                    (Some(exporting.layer().with_filter(super::otlp::requests())), Some(exporting))
                }
                None => (None, None),
            };
            Ok((Registry::default().with(lines).with(spans), Self { spans: exporting, queue: None }))
        }
        #[cfg(not(feature = "otlp"))]
        Ok((Registry::default().with(lines), Self::default()))
    }

    /// Sends the remaining spans and writes the remaining lines, as dropping it does.
    pub fn stop(self) {}
}

impl Drop for Logs {
    fn drop(&mut self) {
        #[cfg(feature = "otlp")]
        if let Some(spans) = self.spans.take() {
            spans.stop();
        }
        if let Some(queue) = &self.queue {
            queue.flush();
        }
    }
}

/// The number of lines that were dropped because standard error was not read in time.
pub fn dropped_lines() -> LineCounts {
    QUEUE.get().map(LogQueue::dropped).unwrap_or_default()
}

/// Writes an audit line.
pub fn audit(event: &Audit<'_>) {
    let Audit { who, from, action, subject, result } = event;
    let (from, subject) = (from.map(tracing::field::display), subject.to_string());
    let (result, error) = match result {
        AuditResult::Done => ("done", None),
        AuditResult::Rejected(error) => ("rejected", Some(error.to_string())),
        AuditResult::Failed(error) => ("failed", Some(error.to_string())),
    };
    tracing::info!(target: AUDIT, who, from, action, subject, result, error, "audit");
}

impl<'a> AuditResult<'a> {
    /// The result of one call that a limiter has executed.
    pub fn of<T>(outcome: &'a Result<T, sluicegate::Error>) -> Self {
        match outcome {
            Err(error) if is_without_effect(error) => Self::Rejected(error),
            outcome => Self::of_group(outcome),
        }
    }

    /// The result of a group of calls. If a later step of the group was not sent, an earlier one may have been applied.
    pub fn of_group<T>(outcome: &'a Result<T, sluicegate::Error>) -> Self {
        match outcome {
            Ok(_) => Self::Done,
            Err(error @ (sluicegate::Error::Store(_) | sluicegate::Error::PartialReset { .. })) => {
                Self::Failed(error)
            }
            Err(error) => Self::Rejected(error),
        }
    }
}

/// Whether the error proves that a call changed nothing in the store.
pub(crate) fn is_without_effect(error: &sluicegate::Error) -> bool {
    match error {
        sluicegate::Error::Store(StoreError::Ambiguous(_)) | sluicegate::Error::PartialReset { .. } => false,
        sluicegate::Error::Store(_) => true,
        _ => false,
    }
}

fn lines<S, W>(format: Format, writer: W) -> Box<dyn Layer<S> + Send + Sync>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    let layer = tracing_subscriber::fmt::layer().with_writer(writer);
    match format {
        Format::Text => layer.with_ansi(io::stderr().is_terminal()).boxed(),
        Format::Json => {
            layer.json().flatten_event(true).with_current_span(true).with_span_list(false).boxed()
        }
    }
}

fn filter(directives: Option<&str>) -> Result<EnvFilter, LogsError> {
    let directives = directives.unwrap_or(DEFAULT_FILTER);
    let filter = EnvFilter::builder()
        .with_default_directive(LevelFilter::INFO.into())
        .parse(directives)
        .map_err(|_| LogsError::Filter(directives.to_owned()))?;
    let audit = format!("{AUDIT}=info").parse().expect("a target and a level are a directive");
    Ok(filter.add_directive(audit))
}

impl FromStr for Format {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "text" => Ok(Self::Text),
            "json" => Ok(Self::Json),
            other => Err(format!("log format {other:?} is unknown: use text or json")),
        }
    }
}
