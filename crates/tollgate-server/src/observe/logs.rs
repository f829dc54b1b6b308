//! What is logged, and where it goes: one line for each event, to standard error or as JSON; spans of requests to an
//! OpenTelemetry collector, by option.
//!
//! Nothing that a request names is logged unless it adjusts or administers, or somebody asks for `debug`; secret labels are hashed also then.

use std::{fmt, io::IsTerminal, net::SocketAddr, str::FromStr};

use tracing::{Subscriber, level_filters::LevelFilter};
use tracing_subscriber::{
    EnvFilter, Layer, Registry, fmt::MakeWriter, layer::SubscriberExt, registry::LookupSpan,
    util::SubscriberInitExt,
};

/// Where audit lines come from. They are always logged.
pub const AUDIT: &str = "audit";

/// What is logged unless something else is asked for.
pub const DEFAULT_FILTER: &str = "info";

/// How a line looks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Format {
    /// For people; in color on a terminal.
    #[default]
    Text,
    /// An object.
    Json,
}

/// What to log, and where.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// How a line looks.
    pub format: Format,
    /// What is logged, as `info` or `info,tollgate=debug`; [`DEFAULT_FILTER`] if not said.
    pub filter: Option<String>,
    /// Where spans go, if anywhere.
    #[cfg(feature = "otlp")]
    pub otlp: Option<super::otlp::Collector>,
}

/// Why nothing can be logged as asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LogsError {
    /// The filter cannot be read.
    #[error(
        "log filter {0:?} is not usable: use error, warn, info, debug or trace, or for example \"info,tollgate=debug\""
    )]
    Filter(String),
    /// The process logs already.
    #[error("the process logs already")]
    Started,
    /// The collector's address cannot be used.
    #[cfg(feature = "otlp")]
    #[error(transparent)]
    Otlp(#[from] super::otlp::CollectorError),
}

/// Logging that goes on; what was not sent yet is sent by [`Logs::stop`].
#[must_use = "spans that were not sent yet are lost unless it is stopped"]
#[derive(Default)]
pub struct Logs {
    #[cfg(feature = "otlp")]
    spans: Option<super::otlp::Exporting>,
}

/// Something an administrator did, or that changed what is in force.
#[derive(Clone, Copy)]
pub struct Audit<'a> {
    /// Who did it: the name of a token, or what in the server.
    pub who: &'a str,
    /// From where, if not in the server.
    pub from: Option<SocketAddr>,
    /// What was done: `charge`, `reset`, `reload`, …
    pub action: &'a str,
    /// What it was done to; empty if that was not looked at.
    pub subject: &'a dyn fmt::Display,
    /// How it went.
    pub result: Result<(), &'a dyn fmt::Display>,
}

impl Logs {
    /// Logs from now on, for the whole process.
    ///
    /// # Errors
    /// When the settings cannot be used, or the process logs already.
    pub fn start(settings: &Settings) -> Result<Self, LogsError> {
        let (subscriber, logs) = Self::subscriber(settings, std::io::stderr)?;
        subscriber.try_init().map_err(|_| LogsError::Started)?;
        Ok(logs)
    }

    /// What logs as these settings say, to this writer.
    ///
    /// # Errors
    /// When the settings cannot be used.
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
            Ok((Registry::default().with(lines).with(spans), Self { spans: exporting }))
        }
        #[cfg(not(feature = "otlp"))]
        Ok((Registry::default().with(lines), Self {}))
    }

    /// Sends what was not sent yet, and ends.
    pub fn stop(self) {
        #[cfg(feature = "otlp")]
        if let Some(spans) = self.spans {
            spans.stop();
        }
    }
}

/// One line for something an administrator did.
pub fn audit(event: &Audit<'_>) {
    let Audit { who, from, action, subject, result } = event;
    let (from, subject) = (from.map(tracing::field::display), subject.to_string());
    match result {
        Ok(()) => tracing::info!(target: AUDIT, who, from, action, subject, result = "done", "audit"),
        Err(error) => {
            let error = error.to_string();
            tracing::info!(target: AUDIT, who, from, action, subject, result = "refused", error, "audit");
        }
    }
}

fn lines<S, W>(format: Format, writer: W) -> Box<dyn Layer<S> + Send + Sync>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    let layer = tracing_subscriber::fmt::layer().with_writer(writer);
    match format {
        Format::Text => layer.with_ansi(std::io::stderr().is_terminal()).boxed(),
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
