//! The destination of a request: a server, or the store of a configuration. A store is called through the server's own API, without
//! a network, so that both give the same response.

use std::{error::Error, path::PathBuf, time::Duration};

use clap::Args;
use serde::{Deserialize, de::DeserializeOwned};
use sluicegate::redis::URLS;
use sluicegate_server::{
    config::{self, Environment, Flags, Origin, Source, StoreSettings},
    http::{HttpService, Settings, response::DecisionBody},
    server::{self, StartError},
    store::StoreUrl,
};

use super::http_client::{HttpClient, SERVER_VARIABLE, TlsFiles};
use crate::{
    doctor::connectivity::{self, ConnectionProblem},
    output::{self, DIM, OutputFormat, WARNING, paint},
};

/// The default address of `sluicegate serve`.
const DEFAULT_SERVER: &str = "http://127.0.0.1:8080";

/// Deadline of a direct call to a store. Longer than a server's, because it includes connecting.
const STORE_DEADLINE: Duration = Duration::from_secs(5);
/// How long the process waits for releases that a call runs in the background.
const MAX_FLUSH: Duration = Duration::from_millis(500);

const TARGET_HEADING: &str = "Target";

/// Arguments that select a server or a store.
#[derive(Args)]
pub(super) struct TargetArgs {
    #[command(flatten)]
    server: ServerArgs,

    /// Call the store of this configuration directly, without a server, and decide by its rules
    #[arg(long, value_name = "FILE", conflicts_with_all = SERVER_FLAGS, help_heading = TARGET_HEADING)]
    config: Option<PathBuf>,

    // Not parsed by clap: its error messages quote the value, which may contain a password.
    #[arg(long, value_name = "URL", conflicts_with_all = SERVER_FLAGS, help_heading = TARGET_HEADING, help = format!("Call this store directly, without a server: {URLS}"))]
    store: Option<String>,
}

/// The names of the arguments in [`ServerArgs`].
const SERVER_FLAGS: [&str; 4] = ["server", "ca", "client_cert", "client_key"];

/// Arguments that select a server.
#[derive(Args)]
pub(super) struct ServerArgs {
    /// Server URL; the token is read from SLUICEGATE_TOKEN [default: http://127.0.0.1:8080] [env: SLUICEGATE_SERVER=]
    #[arg(long, value_name = "URL", help_heading = TARGET_HEADING)]
    server: Option<String>,

    /// CA certificates to trust instead of the system's, for https:// (PEM file)
    #[arg(long, value_name = "FILE", help_heading = TARGET_HEADING)]
    ca: Option<PathBuf>,

    /// Client certificate (PEM file)
    #[arg(long, value_name = "FILE", requires = "client_key", help_heading = TARGET_HEADING)]
    client_cert: Option<PathBuf>,

    /// Private key of the client certificate (PEM file)
    #[arg(long, value_name = "FILE", requires = "client_cert", help_heading = TARGET_HEADING)]
    client_key: Option<PathBuf>,
}

impl ServerArgs {
    /// Returns the URL of the server and a client for it.
    pub(super) fn client(&self) -> Result<(String, HttpClient), Box<dyn Error>> {
        let environment = Environment::of_process();
        let url = self.server.clone().or_else(|| environment.get(SERVER_VARIABLE));
        let url = url.unwrap_or_else(|| DEFAULT_SERVER.to_owned());
        let files = TlsFiles { ca: &self.ca, cert: &self.client_cert, key: &self.client_key };
        let client = HttpClient::new(&url, environment.get("SLUICEGATE_TOKEN"), files)?;
        Ok((url, client))
    }
}

/// A response as it was received.
pub(super) struct RawResponse {
    status: u16,
    body: Vec<u8>,
    /// URL of the server or store, for messages.
    url: String,
    /// The store, if it was called directly.
    store: Option<StoreSettings>,
}

/// An error response of the API.
#[derive(Deserialize)]
struct ApiError {
    detail: String,
}

impl TargetArgs {
    /// Calls the API.
    pub(super) async fn send(
        &self,
        call: &str,
        body: Vec<u8>,
        format: OutputFormat,
    ) -> Result<RawResponse, Box<dyn Error>> {
        let path = format!("/v1/{call}");
        if self.config.is_some() || self.store.is_some() {
            return Ok(self.send_to_store(&path, body, format).await?);
        }
        let (url, client) = self.server.client()?;
        // a blocking thread is fine: the process makes one call and ends
        let (status, body) = tokio::task::spawn_blocking(move || client.post(&path, &body)).await??;
        Ok(RawResponse { status, body, url, store: None })
    }

    async fn send_to_store(
        &self,
        path: &str,
        body: Vec<u8>,
        format: OutputFormat,
    ) -> Result<RawResponse, StartError> {
        let flags = Flags { config: self.config.clone(), store: self.store.clone(), ..Flags::default() };
        let mut config = config::load(&Source::new(flags))?;
        config.store.deadline = STORE_DEADLINE;
        let engine = server::engine(&config)?;
        for warning in &config.warnings {
            output::note(paint(WARNING, warning));
        }
        let url = config.store.url.to_string();
        if config.store.url == StoreUrl::Memory {
            let empty = "the store memory: is empty at the start of each command and discarded at its end";
            output::note(paint(WARNING, empty));
        }
        let limiter = engine.limiter().clone();
        let (status, body) = HttpService::new(engine, Settings::default()).post(path, body).await;
        limiter.flush_settlements(MAX_FLUSH).await;
        if config.store.url != StoreUrl::Memory && format == OutputFormat::Text {
            output::note(paint(DIM, format_args!("called {url} directly, with {}", rules(&config.origin))));
        }
        Ok(RawResponse { status: status.as_u16(), body: body.into(), url, store: Some(config.store) })
    }
}

fn rules(origin: &Origin) -> String {
    match origin {
        Origin::Demo => "the demo rules (./sluicegate.toml does not exist)".to_owned(),
        Origin::File(path) => format!("the rules of {}", path.display()),
    }
}

impl RawResponse {
    /// Diagnoses a store that was called directly and did not decide, because the response does not contain the reason.
    pub(super) async fn store_problem(&self, answer: &DecisionBody) -> Option<ConnectionProblem> {
        match &self.store {
            Some(store) if answer.degraded => connectivity::diagnose(store).await,
            _ => None,
        }
    }

    /// Whether a store was called directly, by this process.
    pub(super) fn is_direct(&self) -> bool {
        self.store.is_some()
    }

    /// The body, unchanged.
    pub(super) fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).trim_end().to_owned()
    }

    /// Parses the body; an error response becomes an error.
    pub(super) fn parse<T: DeserializeOwned>(&self) -> Result<T, Box<dyn Error>> {
        if (200..300).contains(&self.status) {
            let parsed = serde_json::from_slice(&self.body);
            return parsed.map_err(|_| self.not_a_server().into());
        }
        let Ok(ApiError { detail }) = serde_json::from_slice(&self.body) else {
            return Err(self.not_a_server().into());
        };
        Err(match self.status {
            401 => format!("{detail}: set SLUICEGATE_TOKEN to a token of {}", self.url),
            403 => format!("{detail}: set SLUICEGATE_TOKEN to another token"),
            503 => format!("{detail}: run sluicegate doctor to diagnose the store"),
            _ => detail,
        }
        .into())
    }

    fn not_a_server(&self) -> String {
        not_a_server(&self.url, self.status)
    }
}

/// The error message for a response that is not of the API.
pub(super) fn not_a_server(url: &str, status: u16) -> String {
    format!(
        "{url} responded with status {status} and is not a sluicegate server: set --server or SLUICEGATE_SERVER to the HTTP address of one"
    )
}
