//! `sluicegate serve`: runs the server.

use std::{net::SocketAddr, path::PathBuf};

use clap::{Args, ValueEnum};
use serde::Serialize;
use sluicegate::{OnStoreFailure, Rule, redis::URLS};
use sluicegate_server::{
    config::{Config, Flags, Origin, Source, StoreSettings},
    demo,
    observe::{
        logs::{self, Logs},
        otlp::Collector,
    },
    server::{Addresses, Server, Signals},
};

use crate::{
    CommandResult, ExitStatus,
    doctor::connectivity,
    format,
    output::{self, OutputFormat},
    value_parsers::share,
};

/// Run the rate limit server: HTTP, gRPC and the Redis protocol
///
/// Reads its rules from --config or ./sluicegate.toml; without a file, it uses demo rules. Reloads them when the file changes and on
/// SIGHUP. Flags override the environment, which overrides the file. On SIGTERM, requests in flight are completed.
#[derive(Args)]
pub(crate) struct Serve {
    /// Configuration file: rules, addresses, store [env: SLUICEGATE_CONFIG=]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,

    // Not parsed by clap: its error messages quote the value, which may contain a password.
    #[arg(long, value_name = "URL", help = format!("Store of the counters: memory: (this process), {URLS} [env: SLUICEGATE_STORE_URL=]"))]
    store: Option<String>,

    /// Address of the JSON API, forward-auth and metrics; port 0 picks a free port, "off" disables it [env: SLUICEGATE_HTTP=]
    #[arg(long, value_name = "ADDRESS")]
    http: Option<String>,

    /// Address of Envoy's rate limit service [env: SLUICEGATE_GRPC=]
    #[arg(long, value_name = "ADDRESS")]
    grpc: Option<String>,

    /// Address of the Redis protocol [env: SLUICEGATE_RESP=]
    #[arg(long, value_name = "ADDRESS")]
    resp: Option<String>,

    /// Log filter: error, warn, info, debug, or for example "info,sluicegate=debug"
    #[arg(long, value_name = "FILTER", env = "SLUICEGATE_LOG", value_parser = filter)]
    log: Option<String>,

    /// Format of log lines
    #[arg(long, value_name = "FORMAT", env = "SLUICEGATE_LOG_FORMAT", default_value = "text")]
    log_format: LogLineFormat,

    /// OpenTelemetry collector to send traces to, for example http://127.0.0.1:4317
    #[arg(long, value_name = "URL", env = "SLUICEGATE_OTLP")]
    otlp: Option<String>,

    /// Sampling ratio of traces that start at this server, from 0 to 1
    #[arg(long, value_name = "SHARE", env = "SLUICEGATE_OTLP_SHARE", default_value_t = 1.0, value_parser = share, allow_negative_numbers = true)]
    otlp_share: f64,
}

const LOG_LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];

#[derive(Clone, Copy, ValueEnum)]
enum LogLineFormat {
    Text,
    Json,
}

/// Parses a log filter. A single word must be a level: as a module name it would silence all other modules.
fn filter(text: &str) -> Result<String, String> {
    let is_word = !text.is_empty() && text.chars().all(char::is_alphabetic);
    let is_level = LOG_LEVELS.iter().any(|level| text.eq_ignore_ascii_case(level));
    if is_word && !is_level {
        return Err(format!("use {}, or for example \"info,sluicegate=debug\"", LOG_LEVELS.join(", ")));
    }
    Ok(text.to_owned())
}

impl Serve {
    pub(crate) async fn run(self, format: OutputFormat) -> CommandResult {
        let logs = Logs::start(&self.logs())?;
        let signals = Signals::listen()?;
        let server = Server::start(Source::new(self.flags())).await?;
        match format {
            OutputFormat::Text => announce(server.addresses(), server.config()),
            OutputFormat::Json => output::json(&StartupReport::new(server.addresses(), server.config()))?,
        }
        let Config { store, rules, .. } = server.config();
        tokio::spawn(warn_if_unreachable(store.clone(), policy_summary(rules)));
        server.run(signals).await;
        if format == OutputFormat::Text {
            output::line("stopped");
        }
        logs.stop();
        Ok(ExitStatus::Success)
    }

    fn flags(&self) -> Flags {
        Flags {
            config: self.config.clone(),
            store: self.store.clone(),
            http: self.http.clone(),
            grpc: self.grpc.clone(),
            resp: self.resp.clone(),
        }
    }

    fn logs(&self) -> logs::Settings {
        logs::Settings {
            format: match self.log_format {
                LogLineFormat::Text => logs::Format::Text,
                LogLineFormat::Json => logs::Format::Json,
            },
            filter: self.log.clone(),
            otlp: self.otlp.clone().map(|endpoint| Collector { endpoint, share: self.otlp_share }),
        }
    }
}

/// The JSON document printed at startup.
#[derive(Serialize)]
struct StartupReport {
    http: Option<SocketAddr>,
    grpc: Option<SocketAddr>,
    resp: Option<SocketAddr>,
    store: String,
    rules: usize,
}

impl StartupReport {
    fn new(Addresses { http, grpc, resp }: Addresses, config: &Config) -> Self {
        Self { http, grpc, resp, store: config.store.url.to_string(), rules: config.rules.len() }
    }
}

/// Logs a warning if the store is unreachable: the server starts anyway, and the first request may arrive much later.
async fn warn_if_unreachable(store: StoreSettings, policies: String) {
    if let Some(problem) = connectivity::diagnose(&store).await {
        tracing::warn!(
            "store {} is unreachable: {problem}; {policies}; run sluicegate doctor for details",
            store.url
        );
    }
}

/// Summarizes the rules' failure policies.
fn policy_summary(rules: &[Rule]) -> String {
    let with_policy = |policy| rules.iter().filter(|rule| rule.on_store_failure == policy).count() as u64;
    let (open, closed, local) = (
        with_policy(OnStoreFailure::Open),
        with_policy(OnStoreFailure::Closed),
        with_policy(OnStoreFailure::Local),
    );
    let effects = [
        (open, format::plural(open, "rule allows", "rules allow"), "every request (open)"),
        (closed, format::plural(closed, "rule denies", "rules deny"), "every request (closed)"),
        (
            local,
            format::plural(local, "rule enforces", "rules enforce"),
            "this process's share of the limit (local)",
        ),
    ];
    let effects = effects
        .into_iter()
        .filter(|(count, ..)| *count > 0)
        .map(|(_, rules, effect)| format!("{rules} {effect}"));
    match effects.collect::<Vec<_>>().join(", ") {
        none if none.is_empty() => "until it recovers, requests with their own limit are allowed".to_owned(),
        effects => format!("until it recovers, {effects}"),
    }
}

/// Prints the addresses, the store and the rules; with the demo rules, also a command to try.
fn announce(addresses: Addresses, config: &Config) {
    let scheme = if config.server.tls.is_some() { "https" } else { "http" };
    if let Some(http) = addresses.http {
        output::line(format_args!("sluicegate listening on {scheme}://{http}"));
    }
    if let Some(grpc) = addresses.grpc {
        output::line(format_args!("grpc   {grpc} (Envoy's rate limit service)"));
    }
    if let Some(resp) = addresses.resp {
        output::line(format_args!("resp   {resp} (Redis protocol)"));
    }
    output::line(format_args!("store  {}", config.store.url));
    match &config.origin {
        Origin::File(path) => {
            output::line(format_args!("rules  {} from {}", config.rules.len(), path.display()));
        }
        Origin::Demo => {
            output::line("rules  demo; write your own to ./sluicegate.toml");
            for rule in &config.rules {
                output::line(format_args!("rule   {}", demo::summary(rule)));
            }
            if let Some(http) = addresses.http {
                output::line("");
                output::line(format_args!(
                    "Run this {} times within a minute; the last request is denied:",
                    demo::LOGINS_PER_MINUTE + 1
                ));
                output::line(format_args!("  curl -w '\\n' {scheme}://{http}/v1/check -d '{}'", demo::LOGIN));
            }
        }
    }
}
