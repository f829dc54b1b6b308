//! `sluicegate health`: the health check of images that contain no other program.

use clap::Args;
use serde::Deserialize;

use super::target::{self, ServerArgs};
use crate::{
    CommandResult, ExitStatus,
    output::{self, OutputFormat},
};

/// Arguments of `health`.
#[derive(Args)]
pub(crate) struct Health {
    #[command(flatten)]
    server: ServerArgs,
}

/// The response of `/readyz`.
#[derive(Deserialize)]
struct Readiness {
    ready: bool,
    store: String,
    rules: String,
}

impl Health {
    pub(crate) async fn run(self, format: OutputFormat) -> CommandResult {
        let (url, client) = self.server.client()?;
        // a blocking thread is fine: the process makes one call and ends
        let (status, body) = tokio::task::spawn_blocking(move || client.get("/readyz")).await??;
        let Ok(Readiness { ready, store, rules }) = serde_json::from_slice(&body) else {
            return Err(target::not_a_server(&url, status).into());
        };
        match format {
            OutputFormat::Json => output::line(String::from_utf8_lossy(&body).trim_end()),
            OutputFormat::Text => {
                let state = if ready { "READY" } else { "NOT READY" };
                output::line(format_args!("{state}  store {store}, rules {rules}"));
            }
        }
        Ok(if ready { ExitStatus::Success } else { ExitStatus::Negative })
    }
}
