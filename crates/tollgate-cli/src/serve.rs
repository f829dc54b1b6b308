//! `tollgate serve`: the server.

use std::{net::SocketAddr, path::PathBuf};

use clap::{Args, ValueEnum};
use serde::Serialize;
use tollgate::{OnStoreFailure, Rule, redis::URLS};
use tollgate_server::{
    config::{Config, Flags, Origin, Source, StoreSettings},
    demo,
    observe::{
        logs::{self, Logs},
        otlp::Collector,
    },
    server::{Addresses, Server, Signals},
};

use crate::{
    Done, Verdict,
    doctor::reach,
    numbers::share,
    output::{self, Form},
};

/// Answer "may this request pass?" over HTTP, gRPC and the Redis protocol
///
/// Reads its rules from --config, else from ./tollgate.toml, else decides by a small set of demo rules; reads them again when
/// they change and on SIGHUP. Flags beat the environment, which beats the file. SIGTERM lets requests in flight finish.
#[derive(Args)]
pub(crate) struct Serve {
    /// The configuration: rules, addresses, store [env: TOLLGATE_CONFIG=]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,

    // Not read by clap, which repeats what it cannot read: this may hold a password.
    #[arg(long, value_name = "URL", help = format!("Where counters are kept: memory: (this process), {URLS} [env: TOLLGATE_STORE_URL=]"))]
    store: Option<String>,

    /// Address of the JSON API, forward-auth and metrics; port 0 picks a free one, "off" turns it off [env: TOLLGATE_HTTP=]
    #[arg(long, value_name = "ADDRESS")]
    http: Option<String>,

    /// Address of Envoy's rate limit service [env: TOLLGATE_GRPC=]
    #[arg(long, value_name = "ADDRESS")]
    grpc: Option<String>,

    /// Address of the Redis protocol [env: TOLLGATE_RESP=]
    #[arg(long, value_name = "ADDRESS")]
    resp: Option<String>,

    /// What is logged: error, warn, info, debug, or for example "info,tollgate=debug"
    #[arg(long, value_name = "FILTER", env = "TOLLGATE_LOG", value_parser = filter)]
    log: Option<String>,

    /// How log lines look
    #[arg(long, value_name = "FORMAT", env = "TOLLGATE_LOG_FORMAT", default_value = "text")]
    log_format: Format,

    /// Sends traces to this OpenTelemetry collector, for example http://127.0.0.1:4317
    #[arg(long, value_name = "URL", env = "TOLLGATE_OTLP")]
    otlp: Option<String>,

    /// Which share of the traces that begin here is sent, from 0 to 1
    #[arg(long, value_name = "SHARE", env = "TOLLGATE_OTLP_SHARE", default_value_t = 1.0, value_parser = share, allow_negative_numbers = true)]
    otlp_share: f64,
}

/// How much is logged.
const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];

#[derive(Clone, Copy, ValueEnum)]
enum Format {
    Text,
    Json,
}

/// A single word is a level: as the name of a part of the program, which it could be too, it would silence all others.
fn filter(text: &str) -> Result<String, String> {
    let is_word = !text.is_empty() && text.chars().all(char::is_alphabetic);
    let is_level = LEVELS.iter().any(|level| text.eq_ignore_ascii_case(level));
    if is_word && !is_level {
        return Err(format!("use {}, or for example \"info,tollgate=debug\"", LEVELS.join(", ")));
    }
    Ok(text.to_owned())
}

impl Serve {
    pub(crate) async fn run(self, form: Form) -> Done {
        let logs = Logs::start(&self.logs())?;
        let signals = Signals::listen()?;
        let server = Server::start(Source::new(self.flags())).await?;
        match form {
            Form::Text => announce(server.addresses(), server.config()),
            Form::Json => output::json(&Started::of(server.addresses(), server.config()))?,
        }
        let Config { store, rules, .. } = server.config();
        tokio::spawn(look_at(store.clone(), meanwhile(rules)));
        server.run(signals).await;
        if form == Form::Text {
            output::line("stopped");
        }
        logs.stop();
        Ok(Verdict::Fine)
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
                Format::Text => logs::Format::Text,
                Format::Json => logs::Format::Json,
            },
            filter: self.log.clone(),
            otlp: self.otlp.clone().map(|endpoint| Collector { endpoint, share: self.otlp_share }),
        }
    }
}

/// What a program that starts a server wants to know.
#[derive(Serialize)]
struct Started {
    http: Option<SocketAddr>,
    grpc: Option<SocketAddr>,
    resp: Option<SocketAddr>,
    store: String,
    rules: usize,
}

impl Started {
    fn of(Addresses { http, grpc, resp }: Addresses, config: &Config) -> Self {
        Self { http, grpc, resp, store: config.store.url.to_string(), rules: config.rules.len() }
    }
}

/// Says so when the store cannot be reached: the server starts all the same, and nobody may ask it for a while.
async fn look_at(store: StoreSettings, meanwhile: String) {
    if let Some(trouble) = reach::trouble(&store).await {
        tracing::warn!(
            "the store {} cannot be reached: {trouble}; {meanwhile}; see tollgate doctor",
            store.url
        );
    }
}

/// What rules do without their store.
fn meanwhile(rules: &[Rule]) -> String {
    let of = |policy| rules.iter().filter(|rule| rule.on_store_failure == policy).count() as u64;
    let (open, closed, local) =
        (of(OnStoreFailure::Open), of(OnStoreFailure::Closed), of(OnStoreFailure::Local));
    let words = [
        (open, output::several(open, "rule lets", "rules let"), "everything pass (open)"),
        (closed, output::several(closed, "rule refuses", "rules refuse"), "everything (closed)"),
        (
            local,
            output::several(local, "rule enforces", "rules enforce"),
            "this process's share of the limit (local)",
        ),
    ];
    let words =
        words.into_iter().filter(|(count, ..)| *count > 0).map(|(_, who, what)| format!("{who} {what}"));
    match words.collect::<Vec<_>>().join(", ") {
        none if none.is_empty() => "until it can, requests that bring their limit pass".to_owned(),
        words => format!("until it can, {words}"),
    }
}

/// Says where it listens and what it decides by; to somebody who has configured nothing, also what to try.
fn announce(addresses: Addresses, config: &Config) {
    let scheme = if config.server.tls.is_some() { "https" } else { "http" };
    if let Some(http) = addresses.http {
        output::line(format_args!("tollgate listens on {scheme}://{http}"));
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
            output::line("rules  for a first look; write your own into ./tollgate.toml");
            for rule in &config.rules {
                output::line(format_args!("rule   {}", demo::summary(rule)));
            }
            if let Some(http) = addresses.http {
                output::line("");
                output::line(format_args!(
                    "Try this {} times within a minute; the last one is refused:",
                    demo::LOGINS_PER_MINUTE + 1
                ));
                output::line(format_args!("  curl -w '\\n' {scheme}://{http}/v1/check -d '{}'", demo::LOGIN));
            }
        }
    }
}
