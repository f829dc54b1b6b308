//! Live updates for the dashboard, as server-sent events.
//!
//! | event | contents |
//! |---|---|
//! | `hello` | version and run of the server, and the scopes of the listener; sent first |
//! | `seconds` | seconds of the [history], oldest first: initially all that are kept, then each new one |
//! | `rules` | the active rules, initially and after each change: as `GET /v1/rules`, for tokens with the scope `admin` |
//! | `top` | the heavy hitters, every [`TOP_INTERVAL`]: as `GET /v1/top`, for tokens with the scope `admin` |
//!
//! The id of an event names a run of the server and a second of it. A client that reconnects with it (`Last-Event-ID`) receives only
//! later seconds; after a restart of the server, all of them.
//!
//! A listener takes one task and memory for a few events. It is disconnected if it does not read, if its token is revoked, and when
//! the server drains.

use std::{convert::Infallible, sync::Arc, time::Duration};

use axum::{
    extract::{Request, State},
    http::{HeaderValue, StatusCode, header},
    response::{
        IntoResponse, Response,
        sse::{Event, Sse},
    },
};
use futures_util::stream;
use serde::Serialize;
use sluicegate::rules::RuleSet;
use tokio::{
    sync::{Semaphore, mpsc},
    time::Instant,
};

use super::{
    Api, guard,
    problem::Problem,
    status::{Rules, rules_state, store_state},
};
use crate::{
    auth::Identity,
    config::Scope,
    observe::{
        heavy_hitters::{self, HeavyHitterSnapshot},
        history::{self, Second},
        logs::{Audit, AuditResult, audit},
    },
};

/// The maximum number of listeners: a small part of the connections, so that enough remain for decisions.
pub const MAX_LISTENERS: usize = 64;

/// The most seconds of one event.
pub const MAX_SECONDS: usize = 120;

/// The interval between events with heavy hitters.
pub const TOP_INTERVAL: Duration = Duration::from_secs(2);

/// The most events queued for a listener.
const MAX_QUEUED_EVENTS: usize = 1;

/// Permits for listeners. Cheap to clone; all clones share them.
#[derive(Clone)]
pub(super) struct Listeners(Arc<Semaphore>);

impl Default for Listeners {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(MAX_LISTENERS)))
    }
}

#[derive(Serialize)]
struct Hello<'a> {
    version: &'static str,
    /// The identifier of this run of the server.
    run: &'a str,
    /// The name of the listener's token.
    name: &'a str,
    /// Whether the server has no tokens.
    open: bool,
    /// The scopes of the listener.
    may: Vec<&'static str>,
    /// The number of seconds in the history.
    seconds: usize,
    /// Whether the store is remote, so that a decision takes a round trip.
    remote_store: bool,
    /// The memory that the memory store can use, in bytes; 0 if the store is remote.
    store_max_bytes: u64,
}

#[derive(Serialize)]
struct Seconds<'a> {
    seconds: &'a [Arc<Second>],
    /// As in `/readyz`.
    store: &'static str,
    /// As in `/readyz`.
    rules: &'static str,
    /// The time of the last successful reload, in seconds since 1970.
    rules_read_s: u64,
}

/// One connected listener.
struct Listener {
    api: Api,
    authorization: Option<HeaderValue>,
    identity: Identity,
    /// The number of token changes at the time of authentication.
    token_changes: u64,
    events: mpsc::Sender<Event>,
}

/// The end of a stream of events.
struct Closed;

pub(super) async fn live(
    listeners: Listeners,
    State(api): State<Api>,
    request: Request,
) -> Result<Response, Problem> {
    let unavailable = |detail: String| Problem::new(StatusCode::SERVICE_UNAVAILABLE, detail);
    if api.settings.shutdown.is_draining() {
        return Err(unavailable(
            "the server is shutting down: connect to another instance, or retry later".to_owned(),
        ));
    }
    let permit = listeners.0.try_acquire_owned().map_err(|_| {
        unavailable(format!("the limit of {MAX_LISTENERS} listeners is reached: retry later"))
    })?;
    let headers = request.headers();
    let last = headers.get("last-event-id").and_then(|id| id.to_str().ok()).map(str::to_owned);
    let authorization = headers.get(header::AUTHORIZATION).cloned();
    let token_changes = api.settings.access.changes();
    let identity = authenticate(&api, authorization.as_ref()).ok_or_else(|| {
        Problem::new(StatusCode::FORBIDDEN, "the token has just been revoked: use another one")
    })?;
    if identity.may().allows(Scope::Admin) {
        let (who, from) = (identity.name(), guard::peer(&request));
        audit(&Audit { who, from, action: "live", subject: &"", result: AuditResult::Done });
    }
    let (events, mut queued) = mpsc::channel(MAX_QUEUED_EVENTS);
    let listener = Listener { api, authorization, identity, token_changes, events };
    tokio::spawn(listener.run(last));
    let events = stream::poll_fn(move |context| {
        let _held_until_the_stream_ends = &permit;
        queued.poll_recv(context).map(|event| event.map(Ok::<_, Infallible>))
    });
    let mut response = Sse::new(events).into_response();
    // nginx would buffer the response, which never ends
    response.headers_mut().insert("x-accel-buffering", HeaderValue::from_static("no"));
    Ok(response)
}

fn authenticate(api: &Api, authorization: Option<&HeaderValue>) -> Option<Identity> {
    api.settings.access.check(authorization.map(HeaderValue::as_bytes), Scope::Check).ok()
}

impl Listener {
    async fn run(mut self, last: Option<String>) {
        let (shutdown, events) = (self.api.settings.shutdown.clone(), self.events.clone());
        tokio::select! {
            Err(Closed) | Ok::<Infallible, _>(_) = self.send_events(last) => {}
            () = events.closed() => {}
            () = shutdown.draining() => {}
        }
    }

    /// Sends events until the client disconnects or is no longer authorized.
    async fn send_events(&mut self, last: Option<String>) -> Result<Infallible, Closed> {
        let engine = self.api.engine.clone();
        let history = engine.observer().history();
        let run = history.run().to_owned();
        let mut second = last.as_deref().and_then(|id| second_of_run(id, &run)).unwrap_or(0);
        let mut updates = history.subscribe();
        let mut rules: Option<Arc<RuleSet>> = None;
        let mut top_sent: Option<Instant> = None;
        self.send("hello", &self.hello(&run)).await?;
        loop {
            let changes = self.api.settings.access.changes();
            if changes != self.token_changes {
                self.token_changes = changes;
                self.identity = authenticate(&self.api, self.authorization.as_ref()).ok_or(Closed)?;
                self.send("hello", &self.hello(&run)).await?;
                (rules, top_sent) = (None, None);
            }
            if self.identity.may().allows(Scope::Admin) {
                let active = engine.limiter().rules();
                if !rules.as_ref().is_some_and(|sent| Arc::ptr_eq(sent, &active)) {
                    self.send("rules", &Rules::new(&active)).await?;
                    rules = Some(active);
                }
                if top_sent.is_none_or(|sent| sent.elapsed() >= TOP_INTERVAL) {
                    let top: HeavyHitterSnapshot = engine.observer().top(heavy_hitters::MAX_KEYS);
                    self.send("top", &top).await?;
                    top_sent = Some(Instant::now());
                }
            }
            updates.borrow_and_update();
            for seconds in history.since(second).chunks(MAX_SECONDS) {
                second = seconds.last().map_or(second, |last| last.number);
                self.send_seconds(&run, second, seconds).await?;
            }
            // the task that records the history may end before its listeners
            if updates.changed().await.is_err() {
                return Err(Closed);
            }
        }
    }

    fn hello<'a>(&'a self, run: &'a str) -> Hello<'a> {
        let may = self.identity.may();
        let scopes = [Scope::Check, Scope::Adjust, Scope::Admin].into_iter();
        Hello {
            version: env!("CARGO_PKG_VERSION"),
            run,
            name: self.identity.name(),
            open: self.api.settings.access.is_open(),
            may: scopes.filter(|scope| may.allows(*scope)).map(Scope::name).collect(),
            seconds: history::SECONDS,
            remote_store: self.api.engine.limiter().is_remote(),
            store_max_bytes: self.api.engine.limiter().stats().store.max_bytes,
        }
    }

    async fn send_seconds(&self, run: &str, last: u64, seconds: &[Arc<Second>]) -> Result<(), Closed> {
        let engine = &self.api.engine;
        let body = Seconds {
            seconds,
            store: store_state(&self.api),
            rules: rules_state(engine),
            rules_read_s: engine.observer().reloads().last_success(),
        };
        let event = event("seconds", &body).id(format!("{run}-{last}"));
        self.send_event(event).await
    }

    async fn send(&self, name: &str, body: &impl Serialize) -> Result<(), Closed> {
        self.send_event(event(name, body)).await
    }

    async fn send_event(&self, event: Event) -> Result<(), Closed> {
        self.events.send(event).await.map_err(|_| Closed)
    }
}

fn event(name: &str, body: &impl Serialize) -> Event {
    Event::default().event(name).json_data(body).expect("numbers and strings serialize to one line")
}

/// Returns the second that an event id names, if the id is from this run.
fn second_of_run(id: &str, run: &str) -> Option<u64> {
    let (id_run, second) = id.split_once('-')?;
    (id_run == run).then(|| second.parse().ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_id_is_valid_only_in_its_own_run() {
        assert_eq!(second_of_run("ab-12", "ab"), Some(12));
        for other in ["cd-12", "ab-", "ab", "", "-12", "ab-x"] {
            assert_eq!(second_of_run(other, "ab"), None, "{other}");
        }
    }
}
