//! What happens, as it happens: a stream of server-sent events, which the dashboard draws.
//!
//! | event | has |
//! |---|---|
//! | `hello` | who the server is, and what the listener may see; first |
//! | `seconds` | seconds of the [history], oldest first: at first all that are kept, then each as it passes |
//! | `rules` | the rules in force, at first and when others are: as `GET /v1/rules`, for who may ask that |
//! | `top` | the heaviest keys, every [`TOP_INTERVAL`]: as `GET /v1/top`, for who may ask that |
//!
//! The id of an event names a server's run and a second of it. Whoever comes back with it (`Last-Event-ID`) is told what
//! happened since; after a restart, everything again.
//!
//! A listener costs one task and a few events of memory, and has a place for as long as the connection lasts, which one who does
//! not read loses. One whose token is taken back is let go, and all are when the server is about to stop.

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
use sluicegate::RuleSet;
use tokio::{
    sync::{Semaphore, mpsc},
    time::Instant,
};

use super::{
    Api, guard,
    problem::Problem,
    status::{Rules, rules_word, store_word},
};
use crate::{
    auth::Identity,
    config::Scope,
    observe::{
        heavy_hitters::{self, HeavyHitterSnapshot},
        history::{self, Second},
        logs::{Audit, audit},
    },
};

/// The most listeners at a time: few of the connections, so that none is missing for decisions.
pub const MAX_LISTENERS: usize = 64;

/// How many seconds of the past one event tells at most.
pub const MAX_SECONDS: usize = 120;

/// How often the heaviest keys are told.
pub const TOP_INTERVAL: Duration = Duration::from_secs(2);

/// How many events wait for a listener.
const WAITING_EVENTS: usize = 1;

/// The places of listeners. Cheap to clone; all clones have the same.
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
    /// Which run of a server this is.
    run: &'a str,
    /// The name of the listener's token.
    name: &'a str,
    /// Whether there are tokens at all.
    open: bool,
    /// What the listener may do.
    may: Vec<&'static str>,
    /// How many seconds are kept.
    seconds: usize,
    /// Whether counters are elsewhere, so that asking takes time.
    remote_store: bool,
}

#[derive(Serialize)]
struct Seconds<'a> {
    seconds: &'a [Arc<Second>],
    /// As in `/readyz`.
    store: &'static str,
    /// As in `/readyz`.
    rules: &'static str,
    /// When the rules were last read, in seconds of the epoch.
    rules_read_s: u64,
}

/// Somebody who listens.
struct Listener {
    api: Api,
    authorization: Option<HeaderValue>,
    granted: Identity,
    /// How often the tokens had changed before that was found out.
    tokens: u64,
    events: mpsc::Sender<Event>,
}

/// Why there is nothing more to tell.
struct Gone;

pub(super) async fn live(
    listeners: Listeners,
    State(api): State<Api>,
    request: Request,
) -> Result<Response, Problem> {
    let unavailable = |detail: String| Problem::new(StatusCode::SERVICE_UNAVAILABLE, detail);
    if api.settings.shutdown.is_draining() {
        return Err(unavailable("the server is about to stop: connect elsewhere, or again later".to_owned()));
    }
    let place = listeners.0.try_acquire_owned().map_err(|_| {
        unavailable(format!("{MAX_LISTENERS} others listen already, which is all there may be: try later"))
    })?;
    let headers = request.headers();
    let last = headers.get("last-event-id").and_then(|id| id.to_str().ok()).map(str::to_owned);
    let authorization = headers.get(header::AUTHORIZATION).cloned();
    let tokens = api.settings.access.changes();
    let granted = granted(&api, authorization.as_ref()).ok_or_else(|| {
        Problem::new(StatusCode::FORBIDDEN, "the token has been taken back a moment ago: use another")
    })?;
    if granted.may().allows(Scope::Admin) {
        let (who, from) = (granted.name(), guard::peer(&request));
        audit(&Audit { who, from, action: "live", subject: &"", result: Ok(()) });
    }
    let (events, mut waiting) = mpsc::channel(WAITING_EVENTS);
    let listener = Listener { api, authorization, granted, tokens, events };
    tokio::spawn(listener.listen(last));
    let events = stream::poll_fn(move |context| {
        let _until_the_stream_ends = &place;
        waiting.poll_recv(context).map(|event| event.map(Ok::<_, Infallible>))
    });
    let mut response = Sse::new(events).into_response();
    // proxies that collect answers before they pass them on would pass nothing on
    response.headers_mut().insert("x-accel-buffering", HeaderValue::from_static("no"));
    Ok(response)
}

fn granted(api: &Api, authorization: Option<&HeaderValue>) -> Option<Identity> {
    api.settings.access.check(authorization.map(HeaderValue::as_bytes), Scope::Check).ok()
}

impl Listener {
    async fn listen(mut self, last: Option<String>) {
        let (shutdown, events) = (self.api.settings.shutdown.clone(), self.events.clone());
        tokio::select! {
            Err(Gone) | Ok::<Infallible, _>(_) = self.tell(last) => {}
            () = events.closed() => {}
            () = shutdown.draining() => {}
        }
    }

    /// Tells everything, until nobody reads it or may know it.
    async fn tell(&mut self, last: Option<String>) -> Result<Infallible, Gone> {
        let engine = self.api.engine.clone();
        let history = engine.observer().history();
        let run = history.run().to_owned();
        let mut second = last.as_deref().and_then(|id| of_run(id, &run)).unwrap_or(0);
        let mut follow = history.follow();
        let mut rules: Option<Arc<RuleSet>> = None;
        let mut top_told: Option<Instant> = None;
        self.send("hello", &self.hello(&run)).await?;
        loop {
            let changes = self.api.settings.access.changes();
            if changes != self.tokens {
                self.tokens = changes;
                self.granted = granted(&self.api, self.authorization.as_ref()).ok_or(Gone)?;
                self.send("hello", &self.hello(&run)).await?;
                (rules, top_told) = (None, None);
            }
            if self.granted.may().allows(Scope::Admin) {
                let in_force = engine.limiter().rules();
                if !rules.as_ref().is_some_and(|told| Arc::ptr_eq(told, &in_force)) {
                    self.send("rules", &Rules::of(&in_force)).await?;
                    rules = Some(in_force);
                }
                if top_told.is_none_or(|told| told.elapsed() >= TOP_INTERVAL) {
                    let top: HeavyHitterSnapshot = engine.observer().top(heavy_hitters::MAX_KEYS);
                    self.send("top", &top).await?;
                    top_told = Some(Instant::now());
                }
            }
            follow.borrow_and_update();
            for seconds in history.since(second).chunks(MAX_SECONDS) {
                second = seconds.last().map_or(second, |last| last.number);
                self.send_seconds(&run, second, seconds).await?;
            }
            // who keeps the history may end before its listeners do
            if follow.changed().await.is_err() {
                return Err(Gone);
            }
        }
    }

    fn hello<'a>(&'a self, run: &'a str) -> Hello<'a> {
        let may = self.granted.may();
        let scopes = [Scope::Check, Scope::Adjust, Scope::Admin].into_iter();
        Hello {
            version: env!("CARGO_PKG_VERSION"),
            run,
            name: self.granted.name(),
            open: self.api.settings.access.is_open(),
            may: scopes.filter(|scope| may.allows(*scope)).map(Scope::name).collect(),
            seconds: history::SECONDS,
            remote_store: self.api.engine.limiter().is_remote(),
        }
    }

    async fn send_seconds(&self, run: &str, last: u64, seconds: &[Arc<Second>]) -> Result<(), Gone> {
        let engine = &self.api.engine;
        let body = Seconds {
            seconds,
            store: store_word(&self.api),
            rules: rules_word(engine),
            rules_read_s: engine.observer().reloads().last_success(),
        };
        let event = event("seconds", &body).id(format!("{run}-{last}"));
        self.pass_on(event).await
    }

    async fn send(&self, name: &str, body: &impl Serialize) -> Result<(), Gone> {
        self.pass_on(event(name, body)).await
    }

    async fn pass_on(&self, event: Event) -> Result<(), Gone> {
        self.events.send(event).await.map_err(|_| Gone)
    }
}

fn event(name: &str, body: &impl Serialize) -> Event {
    Event::default().event(name).json_data(body).expect("these are numbers and texts, in one line")
}

/// The second that an id names, if it is one of this run.
fn of_run(id: &str, run: &str) -> Option<u64> {
    let (of, second) = id.split_once('-')?;
    (of == run).then(|| second.parse().ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_of_one_run() {
        assert_eq!(of_run("ab-12", "ab"), Some(12));
        for other in ["cd-12", "ab-", "ab", "", "-12", "ab-x"] {
            assert_eq!(of_run(other, "ab"), None, "{other}");
        }
    }
}
