//! The destination of a load: a store through the limiter, as in a server, or a server over HTTP, with one persistent connection per
//! caller.

use std::{error::Error, sync::Arc, time::Duration};

use serde::{Deserialize, Serialize};
use sluicegate::{Cost, Decision, Limit, Limiter, Source as DecidedBy};
use sluicegate_server::{
    config::{self, Environment, Flags, Source, StoreSettings},
    server::StartError,
    store,
};
use tokio::{
    task::{JoinSet, spawn_blocking, yield_now},
    time::{Instant, sleep},
};

use super::{
    Bench,
    keys::KeySpace,
    load::{CallOutcome, Caller, Load, LoadResult},
};
use crate::{
    client::http_client::{HttpClient, TlsFiles},
    doctor::connectivity,
};

/// Time limit for connecting to the store before the load starts.
const STORE_CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// The interval between connection attempts.
const STORE_RETRY_INTERVAL: Duration = Duration::from_millis(50);

/// The destination of a load.
pub(super) enum Target {
    Store { limiter: Arc<Limiter>, url: String, limit: Limit, cost: Cost },
    Server { clients: Vec<HttpClient>, url: String, template: CheckTemplate },
}

/// The body of a check, without the key.
#[derive(Clone, Serialize)]
pub(super) struct CheckTemplate {
    limit: LimitTemplate,
    cost: u64,
}

#[derive(Clone, Serialize)]
struct LimitTemplate {
    algorithm: String,
    amount: u64,
    window: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    burst: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    lease: Option<String>,
}

#[derive(Serialize)]
struct CheckBody<'a> {
    key: &'a str,
    #[serde(flatten)]
    template: &'a CheckTemplate,
}

/// The fields of a decision that are evaluated.
#[derive(Deserialize)]
struct DecisionFields {
    allowed: bool,
    degraded: bool,
    source: String,
}

/// An error response of the API.
#[derive(Deserialize)]
struct ErrorFields {
    detail: String,
}

impl Target {
    /// Connects to the target and makes a first call.
    pub(super) async fn connect(
        bench: &Bench,
        keys: &KeySpace,
        limit: Limit,
        cost: Cost,
    ) -> Result<Self, Box<dyn Error>> {
        match bench.server_url() {
            Some(server) => Self::server(bench, &server, keys).await,
            None if bench.ca.is_some() || bench.client_cert.is_some() => {
                Err("certificate flags need a server: set --server or SLUICEGATE_SERVER".into())
            }
            None => Self::store(bench, keys, limit, cost).await,
        }
    }

    async fn store(bench: &Bench, keys: &KeySpace, limit: Limit, cost: Cost) -> Result<Self, Box<dyn Error>> {
        let settings = if bench.store.is_none() && bench.config.is_none() {
            // a configuration in the current directory is ignored
            StoreSettings::default()
        } else {
            let flags =
                Flags { config: bench.config.clone(), store: bench.store.clone(), ..Flags::default() };
            config::load(&Source::new(flags)).map_err(StartError::Config)?.store
        };
        let store = store::open(&settings).map_err(StartError::Store)?;
        let limiter =
            Arc::new(Limiter::builder().store(store).rules([]).options(settings.options()).build()?);
        let url = settings.url.to_string();
        let started = Instant::now();
        loop {
            let peeked = limiter.peek_key(keys.name(0), &limit, cost).await?;
            if !peeked.is_degraded() {
                break;
            }
            if started.elapsed() >= STORE_CONNECT_TIMEOUT {
                let reason = match connectivity::diagnose(&settings).await {
                    Some(problem) => format!(": {problem}"),
                    None => peeked.failure.map_or_else(String::new, |failure| format!(": {failure}")),
                };
                return Err(
                    format!("store {url} is unavailable{reason}; run sluicegate doctor for details").into()
                );
            }
            sleep(STORE_RETRY_INTERVAL).await;
        }
        Ok(Self::Store { limiter, url, limit, cost })
    }

    async fn server(bench: &Bench, server: &str, keys: &KeySpace) -> Result<Self, Box<dyn Error>> {
        let token = Environment::of_process().get("SLUICEGATE_TOKEN");
        let client = || {
            let files = TlsFiles { ca: &bench.ca, cert: &bench.client_cert, key: &bench.client_key };
            HttpClient::new(server, token.clone(), files)
        };
        let clients = (0..bench.concurrency).map(|_| client()).collect::<Result<Vec<_>, _>>()?;
        let template = CheckTemplate {
            limit: LimitTemplate {
                algorithm: bench.algorithm.clone(),
                amount: bench.limit.amount,
                window: bench.limit.window.clone(),
                burst: bench.burst,
                lease: bench.lease.map(|lease| lease.to_string()),
            },
            cost: bench.cost,
        };
        let (first, body) = (client()?, body(&template, &keys.name(0)));
        let outcome = spawn_blocking(move || call_server(&first, "/v1/peek", &body)).await?;
        if let CallOutcome::Failed(reason) = outcome {
            return Err(reason.into());
        }
        Ok(Self::Server { clients, url: server.to_owned(), template })
    }

    /// The URL, without user and password.
    pub(super) fn url(&self) -> &str {
        match self {
            Self::Store { url, .. } | Self::Server { url, .. } => url,
        }
    }

    /// Runs the callers until the load ends; returns their merged statistics.
    pub(super) async fn callers(&self, load: &Arc<Load>, count: u16) -> LoadResult {
        let mut callers = JoinSet::new();
        let names = Arc::new(KeyNames::new(load));
        match self {
            Self::Store { limiter, limit, cost, .. } => {
                for _ in 0..count {
                    let caller = Caller::new(Arc::clone(load));
                    callers.spawn(run_store_caller(
                        caller,
                        Arc::clone(&names),
                        Arc::clone(limiter),
                        *limit,
                        *cost,
                    ));
                }
            }
            Self::Server { clients, template, .. } => {
                for client in clients {
                    let caller = Caller::new(Arc::clone(load));
                    let (names, client, template) = (Arc::clone(&names), client.clone(), template.clone());
                    callers.spawn_blocking(move || run_server_caller(caller, &names, &client, &template));
                }
            }
        }
        let mut all = LoadResult::empty();
        while let Some(result) = callers.join_next().await {
            match result {
                Ok(result) => all.merge(result),
                Err(error) => {
                    all.counts.failed += 1;
                    all.counts.first_failure.get_or_insert_with(|| error.to_string());
                }
            }
        }
        all
    }
}

async fn run_store_caller(
    mut caller: Caller,
    names: Arc<KeyNames>,
    limiter: Arc<Limiter>,
    limit: Limit,
    cost: Cost,
) -> LoadResult {
    while let Some((key, sent)) = caller.next() {
        let decision = limiter.check_key(names.name(key), &limit, cost).await;
        let outcome = decision
            .map_or_else(|error| CallOutcome::Failed(error.to_string()), |decision| outcome_of(&decision));
        // a memory store never suspends this task
        if caller.record(key, sent, outcome) {
            yield_now().await;
        }
    }
    caller.finish()
}

fn outcome_of(decision: &Decision) -> CallOutcome {
    match (decision.is_degraded(), decision.is_allowed()) {
        (true, _) => CallOutcome::Degraded,
        (false, true) => CallOutcome::Allowed,
        (false, false) if decision.source == DecidedBy::Cache => CallOutcome::DeniedLocally,
        (false, false) => CallOutcome::Denied,
    }
}

fn run_server_caller(
    mut caller: Caller,
    names: &KeyNames,
    client: &HttpClient,
    template: &CheckTemplate,
) -> LoadResult {
    while let Some((key, sent)) = caller.next() {
        let outcome = call_server(client, "/v1/check", &body(template, names.name(key)));
        caller.record(key, sent, outcome);
    }
    caller.finish()
}

fn body(template: &CheckTemplate, key: &str) -> Vec<u8> {
    serde_json::to_vec(&CheckBody { key, template }).expect("the body is serializable")
}

fn call_server(client: &HttpClient, path: &str, body: &[u8]) -> CallOutcome {
    let (status, answer) = match client.post(path, body) {
        Ok(answer) => answer,
        Err(reason) => return CallOutcome::Failed(reason),
    };
    match serde_json::from_slice::<DecisionFields>(&answer) {
        Ok(DecisionFields { degraded: true, .. }) => CallOutcome::Degraded,
        Ok(DecisionFields { allowed: true, .. }) => CallOutcome::Allowed,
        Ok(DecisionFields { source, .. }) if source == DecidedBy::Cache.name() => CallOutcome::DeniedLocally,
        Ok(_) => CallOutcome::Denied,
        Err(_) => CallOutcome::Failed(match serde_json::from_slice::<ErrorFields>(&answer) {
            Ok(ErrorFields { detail }) if status == 401 || status == 403 => {
                format!("{detail}: set SLUICEGATE_TOKEN to a token with \"check\"")
            }
            Ok(ErrorFields { detail }) => detail,
            Err(_) => format!(
                "the server responded with status {status} and is not a sluicegate server: correct --server"
            ),
        }),
    }
}

/// The names of all keys, formatted before the load so that formatting is not measured.
struct KeyNames(Vec<String>);

impl KeyNames {
    fn new(load: &Load) -> Self {
        Self((0..load.keys.count()).map(|key| load.keys.name(key)).collect())
    }

    fn name(&self, key: u32) -> &str {
        &self.0[key as usize]
    }
}
