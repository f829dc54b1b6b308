//! Whom callers ask, and how: a store through the limiter, as the server does, or a server by HTTP, each caller on a connection
//! of its own that stays open.

use std::{error::Error, sync::Arc, time::Duration};

use serde::{Deserialize, Serialize};
use tokio::{
    task::{JoinSet, spawn_blocking, yield_now},
    time::{Instant, sleep},
};
use tollgate::{Cost, Decision, Limit, Limiter, Source as DecidedBy};
use tollgate_server::{
    config::{self, Environment, Flags, Source, StoreSettings},
    server::StartError,
    store,
};

use super::{
    Bench,
    keys::Keys,
    load::{Caller, Load, Notes, Outcome},
};
use crate::{
    ask::client::{Client, Files},
    doctor::reach,
};

/// How long a store may take to be reached before the load begins.
const STORE_PATIENCE: Duration = Duration::from_secs(5);
/// The pause between two attempts.
const STORE_PAUSE: Duration = Duration::from_millis(50);

/// Whom callers ask.
pub(super) enum Target {
    Store { limiter: Arc<Limiter>, shown: String, limit: Limit, cost: Cost },
    Server { clients: Vec<Client>, shown: String, question: Question },
}

/// What a server is asked, without its key.
#[derive(Clone, Serialize)]
pub(super) struct Question {
    limit: LimitText,
    cost: u64,
}

#[derive(Clone, Serialize)]
struct LimitText {
    algorithm: String,
    amount: u64,
    window: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    burst: Option<u64>,
}

#[derive(Serialize)]
struct Body<'a> {
    key: &'a str,
    #[serde(flatten)]
    question: &'a Question,
}

/// What matters of a server's answer.
#[derive(Deserialize)]
struct Answer {
    allowed: bool,
    degraded: bool,
    source: String,
}

/// What a server says when it has no answer.
#[derive(Deserialize)]
struct Problem {
    detail: String,
}

impl Target {
    /// Makes sure that there is somebody to ask, too.
    pub(super) async fn of(
        bench: &Bench,
        keys: &Keys,
        limit: Limit,
        cost: Cost,
    ) -> Result<Self, Box<dyn Error>> {
        match bench.server_named() {
            Some(server) => Self::server(bench, &server, keys).await,
            None if bench.ca.is_some() || bench.client_cert.is_some() => {
                Err("certificates are for a server: name it with --server or TOLLGATE_SERVER".into())
            }
            None => Self::store(bench, keys, limit, cost).await,
        }
    }

    async fn store(bench: &Bench, keys: &Keys, limit: Limit, cost: Cost) -> Result<Self, Box<dyn Error>> {
        let settings = if bench.store.is_none() && bench.config.is_none() {
            // nothing else is read: a store that happens to be configured here is not meant
            StoreSettings::default()
        } else {
            let flags =
                Flags { config: bench.config.clone(), store: bench.store.clone(), ..Flags::default() };
            config::load(&Source::new(flags)).map_err(StartError::Config)?.store
        };
        let store = store::open(&settings).map_err(StartError::Store)?;
        let limiter = Arc::new(Limiter::with_options(store, [], settings.options())?);
        let shown = settings.url.to_string();
        let begun = Instant::now();
        loop {
            let peeked = limiter.peek_key(keys.name(0), &limit, cost).await?;
            if !peeked.is_degraded() {
                break;
            }
            if begun.elapsed() >= STORE_PATIENCE {
                let why = match reach::trouble(&settings).await {
                    Some(trouble) => format!(": {trouble}"),
                    None => peeked.failure.map_or_else(String::new, |failure| format!(": {failure}")),
                };
                return Err(format!("store {shown} does not answer{why}; see tollgate doctor").into());
            }
            sleep(STORE_PAUSE).await;
        }
        Ok(Self::Store { limiter, shown, limit, cost })
    }

    async fn server(bench: &Bench, server: &str, keys: &Keys) -> Result<Self, Box<dyn Error>> {
        let token = Environment::of_process().get("TOLLGATE_TOKEN");
        let client = || {
            let files = Files { ca: &bench.ca, cert: &bench.client_cert, key: &bench.client_key };
            Client::new(server, token.clone(), files)
        };
        let clients = (0..bench.concurrency).map(|_| client()).collect::<Result<Vec<_>, _>>()?;
        let question = Question {
            limit: LimitText {
                algorithm: bench.algorithm.clone(),
                amount: bench.limit.amount,
                window: bench.limit.window.clone(),
                burst: bench.burst,
            },
            cost: bench.cost,
        };
        let (first, body) = (client()?, body(&question, &keys.name(0)));
        let tried = spawn_blocking(move || ask_server(&first, "/v1/peek", &body)).await?;
        if let Outcome::Failed(reason) = tried {
            return Err(reason.into());
        }
        Ok(Self::Server { clients, shown: server.to_owned(), question })
    }

    /// Who is asked, for people.
    pub(super) fn shown(&self) -> &str {
        match self {
            Self::Store { shown, .. } | Self::Server { shown, .. } => shown,
        }
    }

    /// Has callers ask until the load ends; what all of them noted.
    pub(super) async fn callers(&self, load: &Arc<Load>, count: u16) -> Notes {
        let mut callers = JoinSet::new();
        let names = Arc::new(Names::of(load));
        match self {
            Self::Store { limiter, limit, cost, .. } => {
                for _ in 0..count {
                    let caller = Caller::new(Arc::clone(load));
                    callers.spawn(of_store(caller, Arc::clone(&names), Arc::clone(limiter), *limit, *cost));
                }
            }
            Self::Server { clients, question, .. } => {
                for client in clients {
                    let caller = Caller::new(Arc::clone(load));
                    let (names, client, question) = (Arc::clone(&names), client.clone(), question.clone());
                    callers.spawn_blocking(move || of_server(caller, &names, &client, &question));
                }
            }
        }
        let mut all = Notes::none();
        while let Some(notes) = callers.join_next().await {
            match notes {
                Ok(notes) => all.join(notes),
                Err(error) => {
                    all.counts.failed += 1;
                    all.counts.first_failure.get_or_insert_with(|| error.to_string());
                }
            }
        }
        all
    }
}

async fn of_store(
    mut caller: Caller,
    names: Arc<Names>,
    limiter: Arc<Limiter>,
    limit: Limit,
    cost: Cost,
) -> Notes {
    while let Some((key, sent)) = caller.next() {
        let decision = limiter.check_key(names.name(key), &limit, cost).await;
        let outcome =
            decision.map_or_else(|error| Outcome::Failed(error.to_string()), |decision| of(&decision));
        // a decision from memory waits for nothing, and would leave nobody else a turn
        if caller.note(key, sent, outcome) {
            yield_now().await;
        }
    }
    caller.finish()
}

fn of(decision: &Decision) -> Outcome {
    match (decision.is_degraded(), decision.is_allowed()) {
        (true, _) => Outcome::Degraded,
        (false, true) => Outcome::Allowed,
        (false, false) if decision.source == DecidedBy::Cache => Outcome::RefusedHere,
        (false, false) => Outcome::Refused,
    }
}

fn of_server(mut caller: Caller, names: &Names, client: &Client, question: &Question) -> Notes {
    while let Some((key, sent)) = caller.next() {
        let outcome = ask_server(client, "/v1/check", &body(question, names.name(key)));
        caller.note(key, sent, outcome);
    }
    caller.finish()
}

fn body(question: &Question, key: &str) -> Vec<u8> {
    serde_json::to_vec(&Body { key, question }).expect("texts and numbers are JSON")
}

fn ask_server(client: &Client, path: &str, body: &[u8]) -> Outcome {
    let (status, answer) = match client.post(path, body) {
        Ok(answer) => answer,
        Err(reason) => return Outcome::Failed(reason),
    };
    match serde_json::from_slice::<Answer>(&answer) {
        Ok(Answer { degraded: true, .. }) => Outcome::Degraded,
        Ok(Answer { allowed: true, .. }) => Outcome::Allowed,
        Ok(Answer { source, .. }) if source == DecidedBy::Cache.name() => Outcome::RefusedHere,
        Ok(_) => Outcome::Refused,
        Err(_) => Outcome::Failed(match serde_json::from_slice::<Problem>(&answer) {
            Ok(Problem { detail }) if status == 401 || status == 403 => {
                format!("{detail}: set TOLLGATE_TOKEN to one that may check")
            }
            Ok(Problem { detail }) => detail,
            Err(_) => format!("the server answered {status} and is no tollgate server: correct --server"),
        }),
    }
}

/// The names of keys, made before the load: a caller is to measure decisions, not the making of texts.
struct Names(Vec<String>);

impl Names {
    fn of(load: &Load) -> Self {
        Self((0..load.keys.count()).map(|key| load.keys.name(key)).collect())
    }

    fn name(&self, key: u32) -> &str {
        &self.0[key as usize]
    }
}
