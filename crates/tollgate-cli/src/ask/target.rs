//! Who is asked: a server, or the store of a configuration. Both answer alike: a store is asked through the server's own API,
//! without a network.

use std::{error::Error, path::PathBuf, time::Duration};

use clap::Args;
use serde::{Deserialize, de::DeserializeOwned};
use tollgate::redis::URLS;
use tollgate_server::{
    config::{self, Environment, Flags, Origin, Source, StoreSettings},
    http::{HttpService, Settings, response::Answer},
    server::{self, StartError},
    store::StoreUrl,
};

use super::client::{Client, Files, SERVER_VARIABLE};
use crate::{
    doctor::reach::{self, Trouble},
    output::{self, FAINT, Form, ODD, paint},
};

/// The server that is asked when nothing else is said: where `tollgate serve` listens when nothing else is said.
const DEFAULT_SERVER: &str = "http://127.0.0.1:8080";

/// How long a store may take. Servers wait for milliseconds; here it has first to be connected to, and a person waits.
const STORE_PATIENCE: Duration = Duration::from_secs(5);

const WHERE: &str = "Where to ask";

/// Which server or store.
#[derive(Args)]
pub(super) struct Target {
    /// The server to ask, http://127.0.0.1:8080 unless set; a token is read from TOLLGATE_TOKEN [env: TOLLGATE_SERVER=]
    #[arg(long, value_name = "URL", conflicts_with_all = ["config", "store"], help_heading = WHERE)]
    server: Option<String>,

    /// Trusts this authority instead of the system's, for https://: a file of PEM
    #[arg(long, value_name = "FILE", conflicts_with_all = ["config", "store"], help_heading = WHERE)]
    ca: Option<PathBuf>,

    /// The certificate by which the server knows who asks: a file of PEM
    #[arg(long, value_name = "FILE", requires = "client_key", conflicts_with_all = ["config", "store"], help_heading = WHERE)]
    client_cert: Option<PathBuf>,

    /// Its private key: a file of PEM
    #[arg(long, value_name = "FILE", requires = "client_cert", conflicts_with_all = ["config", "store"], help_heading = WHERE)]
    client_key: Option<PathBuf>,

    /// Asks the store of this configuration directly, by its rules, without a server
    #[arg(long, value_name = "FILE", help_heading = WHERE)]
    config: Option<PathBuf>,

    // Not read by clap, which repeats what it cannot read: this may hold a password.
    #[arg(long, value_name = "URL", help_heading = WHERE, help = format!("Asks this store directly, without a server: {URLS}"))]
    store: Option<String>,
}

/// What came back.
pub(super) struct Reply {
    status: u16,
    body: Vec<u8>,
    /// Who answered, for messages.
    from: String,
    /// The store that was asked directly.
    store: Option<StoreSettings>,
}

/// What a problem of the API says.
#[derive(Deserialize)]
struct Problem {
    detail: String,
}

impl Target {
    /// Makes a call of the API.
    pub(super) async fn ask(&self, call: &str, body: Vec<u8>, form: Form) -> Result<Reply, Box<dyn Error>> {
        let path = format!("/v1/{call}");
        if self.config.is_some() || self.store.is_some() {
            return Ok(self.ask_store(&path, body, form).await?);
        }
        let environment = Environment::of_process();
        let server = self.server.clone().or_else(|| environment.get(SERVER_VARIABLE));
        let server = server.unwrap_or_else(|| DEFAULT_SERVER.to_owned());
        let files = Files { ca: &self.ca, cert: &self.client_cert, key: &self.client_key };
        let client = Client::new(&server, environment.get("TOLLGATE_TOKEN"), files)?;
        // one call, and then the process ends: nothing else waits for this thread
        let (status, body) = tokio::task::spawn_blocking(move || client.post(&path, &body)).await??;
        Ok(Reply { status, body, from: server, store: None })
    }

    async fn ask_store(&self, path: &str, body: Vec<u8>, form: Form) -> Result<Reply, StartError> {
        let flags = Flags { config: self.config.clone(), store: self.store.clone(), ..Flags::default() };
        let mut config = config::load(&Source::new(flags))?;
        config.store.deadline = STORE_PATIENCE;
        let engine = server::engine(&config)?;
        for warning in &config.warnings {
            output::note(paint(ODD, warning));
        }
        let url = config.store.url.to_string();
        if config.store.url == StoreUrl::Memory {
            let fresh = "the store memory: begins empty with each command: nothing was counted before, and nothing will be kept";
            output::note(paint(ODD, fresh));
        }
        let (status, body) = HttpService::new(engine, Settings::default()).post(path, body).await;
        if config.store.url != StoreUrl::Memory && form == Form::Text {
            output::note(paint(FAINT, format_args!("asked {url} directly, by {}", rules(&config.origin))));
        }
        Ok(Reply { status: status.as_u16(), body: body.into(), from: url, store: Some(config.store) })
    }
}

fn rules(origin: &Origin) -> String {
    match origin {
        Origin::Demo => "the rules of the demo, as there is no ./tollgate.toml".to_owned(),
        Origin::File(path) => format!("the rules of {}", path.display()),
    }
}

impl Reply {
    /// What keeps the store from deciding, where it was asked directly and did not: an answer does not say why.
    pub(super) async fn trouble(&self, answer: &Answer) -> Option<Trouble> {
        match &self.store {
            Some(store) if answer.degraded => reach::trouble(store).await,
            _ => None,
        }
    }

    /// The answer, as it came.
    pub(super) fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).trim_end().to_owned()
    }

    /// The answer; an error when it is none.
    pub(super) fn read<T: DeserializeOwned>(&self) -> Result<T, Box<dyn Error>> {
        if (200..300).contains(&self.status) {
            let read = serde_json::from_slice(&self.body);
            return read.map_err(|_| self.is_no_tollgate().into());
        }
        let Ok(Problem { detail }) = serde_json::from_slice(&self.body) else {
            return Err(self.is_no_tollgate().into());
        };
        Err(match self.status {
            401 => format!("{detail}: set TOLLGATE_TOKEN to one that {} knows", self.from),
            403 => format!("{detail}: set TOLLGATE_TOKEN to another"),
            503 => format!("{detail}: see what is wrong with the store with tollgate doctor"),
            _ => detail,
        }
        .into())
    }

    fn is_no_tollgate(&self) -> String {
        format!(
            "{} answered {} and is no tollgate server: name the HTTP address of one with --server or TOLLGATE_SERVER",
            self.from, self.status
        )
    }
}
