//! The settings of the middleware: sources of labels, costs, and responses to denied requests.

use std::{
    borrow::Cow,
    fmt,
    net::IpAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use bytes::Bytes;
use http::{HeaderName, Response, request::Parts};
#[cfg(feature = "toml")]
use sluicegate::label_policy::LabelPolicy;
use sluicegate::{Cost, Costs, Decision, Limiter, rules::Absent};
use tower_layer::Layer;

use crate::{
    client::ClientAddress,
    denial::CheckError,
    headers::Dialect,
    labels::{LabelSource, LabelSpec},
    service::RateLimit,
};

type CostOf = Arc<dyn Fn(&Parts) -> Costs + Send + Sync>;
type Skip = Arc<dyn Fn(&Parts) -> bool + Send + Sync>;
type DenialResponse = Arc<dyn Fn(&Parts, &Decision) -> Response<Bytes> + Send + Sync>;

/// Puts a [`Limiter`] in front of a service. Cheap to clone.
///
/// Every request is checked with the configured labels. A label without a value is absent, which the rule's `absent` setting
/// handles; the client's address is never absent. The last source configured for a label is used. A rule with a label that the layer
/// does not set applies to no request, and is logged as an error.
///
/// ```
/// use axum::{Router, routing::post};
/// use sluicegate::{Cost, Limit, Limiter, MemoryStore, Rule};
/// use sluicegate_tower::{RateLimitLayer, client::ClientAddress, headers::Dialect};
///
/// let rules = [
///     Rule::new("per-ip", Limit::per_minute(100)).per(["ip"]),
///     Rule::new("per-key", Limit::per_minute(1_000)).per(["api_key"]),
/// ];
/// let layer = RateLimitLayer::new(Limiter::new(MemoryStore::new(), rules)?)
///     .client_ip_behind(ClientAddress::trusting(["10.0.0.0/8"])?)
///     .header("api_key", "x-api-key")
///     .skip(|request| request.uri.path() == "/healthz")
///     .cost(|request| if request.uri.path() == "/import" { Cost::from(10_u32) } else { Cost::ONE })
///     .dialect(Dialect::XRateLimit);
/// let app: Router = Router::new().route("/import", post(|| async { "done" })).layer(layer);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct RateLimitLayer {
    settings: Arc<LayerSettings>,
}

pub(crate) struct LayerSettings {
    pub(crate) limiter: Limiter,
    pub(crate) labels: Vec<LabelSpec>,
    #[cfg(feature = "toml")]
    pub(crate) label_policy: Option<Arc<LabelPolicy>>,
    pub(crate) cost: Option<CostOf>,
    /// Whether `cost` is an estimate, so that every request is held.
    pub(crate) has_estimate: bool,
    skip: Option<Skip>,
    pub(crate) dialect: Dialect,
    pub(crate) denial_response: Option<DenialResponse>,
    /// Whether a configuration error was logged.
    has_logged_500: Arc<AtomicBool>,
    /// Whether it was logged that there are too many holds.
    has_logged_503: Arc<AtomicBool>,
    /// Whether the rules were compared with the labels.
    has_compared_rules: Arc<AtomicBool>,
}

impl RateLimitLayer {
    /// Checks every request with this limiter: no labels, a cost of one, draft 11 headers, problem+json.
    pub fn new(limiter: Limiter) -> Self {
        let settings = LayerSettings {
            limiter,
            labels: Vec::new(),
            #[cfg(feature = "toml")]
            label_policy: None,
            cost: None,
            has_estimate: false,
            skip: None,
            dialect: Dialect::default(),
            denial_response: None,
            has_logged_500: Arc::default(),
            has_logged_503: Arc::default(),
            has_compared_rules: Arc::default(),
        };
        Self { settings: Arc::new(settings) }
    }

    /// Adds the label `ip`: the peer address of the connection, with IPv6 addresses truncated to their /64 network. For
    /// axum, which has to serve `into_make_service_with_connect_info::<SocketAddr>()`. Otherwise the address is
    /// unknown, and requests get 500, because limits per address would not apply to them; the first one is logged.
    #[cfg(feature = "axum")]
    #[must_use]
    pub fn client_ip(self) -> Self {
        self.client_ip_behind(ClientAddress::default())
    }

    /// As [`RateLimitLayer::client_ip`], for a service behind trusted proxies.
    #[cfg(feature = "axum")]
    #[must_use]
    pub fn client_ip_behind(self, client: ClientAddress) -> Self {
        self.client_ip_from(client, |request| {
            let peer = request.extensions.get::<axum::extract::ConnectInfo<std::net::SocketAddr>>();
            peer.map(|peer| peer.0.ip())
        })
    }

    /// Adds the label `ip`, the client's address, for servers other than axum. `peer` returns the peer address of the connection. tonic:
    /// `|request| request.extensions.get::<TcpConnectInfo>()?.remote_addr().map(|peer| peer.ip())`
    ///
    /// A request without a peer address is answered with 500, because limits per address would not apply to it, and the first one is
    /// logged.
    #[must_use]
    pub fn client_ip_from(
        self,
        client: ClientAddress,
        peer: impl Fn(&Parts) -> Option<IpAddr> + Send + Sync + 'static,
    ) -> Self {
        self.with_label("ip".into(), LabelSource::ClientIp { client, peer: Arc::new(peer) })
    }

    /// Adds a label from a header, unchanged. A request that repeats the header is answered with 400.
    ///
    /// # Panics
    /// If this is not the name of a header.
    #[must_use]
    pub fn header(self, label: impl Into<Cow<'static, str>>, header: impl AsRef<str>) -> Self {
        let name = header.as_ref();
        let header =
            HeaderName::try_from(name).unwrap_or_else(|_| panic!("{name:?} is not the name of a header"));
        self.with_label(label.into(), LabelSource::Header(header))
    }

    /// Forwards some requests without a check, for example health checks.
    #[must_use]
    pub fn skip(self, is_skipped: impl Fn(&Parts) -> bool + Send + Sync + 'static) -> Self {
        self.with(|settings| settings.skip = Some(Arc::new(is_skipped)))
    }

    /// Adds the label `method`.
    #[must_use]
    pub fn method(self) -> Self {
        self.with_label("method".into(), LabelSource::Method)
    }

    /// Adds the label `path` as the client wrote it, without the query: `/users/7`. To limit a route, use its template instead,
    /// which has a single form; see [`RateLimitLayer::matched_path`]. A long path is [truncated](crate::target::truncate).
    #[must_use]
    pub fn path(self) -> Self {
        self.with_label("path".into(), LabelSource::Path)
    }

    /// Adds the label `host`, in lower case and without port.
    #[must_use]
    pub fn host(self) -> Self {
        self.with_label("host".into(), LabelSource::Host)
    }

    /// Adds a label with axum's route template: `/users/{id}` for `/users/7` and `/users/8`.
    ///
    /// ```
    /// use axum::{Router, routing::get};
    /// # use std::time::Duration;
    /// # use sluicegate::{Limit, Limiter, MemoryStore, Rule};
    /// # use sluicegate_tower::RateLimitLayer;
    ///
    /// # let limit = Limit::token_bucket(100, Duration::from_secs(60))?;
    /// let rules = [Rule::new("users", limit).when("route", "/users/{id}")];
    /// let layer = RateLimitLayer::new(Limiter::new(MemoryStore::new(), rules)?).matched_path("route");
    /// let app: Router = Router::new().route("/users/{id}", get(|| async { "a user" })).layer(layer);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// The label is absent if no route matches, and always if the layer wraps the router: use `Router::layer`, as here. Supports
    /// axum 0.8 only.
    #[cfg(feature = "axum")]
    #[must_use]
    pub fn matched_path(self, label: impl Into<Cow<'static, str>>) -> Self {
        self.label(label, |request| {
            request.extensions.get::<axum::extract::MatchedPath>().map(|path| path.as_str().to_owned())
        })
    }

    /// Adds a label from any part of a request's head, for example from an extension set by authentication:
    ///
    /// ```
    /// # use sluicegate::{Limiter, MemoryStore};
    /// # use sluicegate_tower::RateLimitLayer;
    /// #[derive(Clone)]
    /// struct Tenant(String);
    ///
    /// # let limiter = Limiter::new(MemoryStore::new(), [])?;
    /// let layer = RateLimitLayer::new(limiter)
    ///     .label("tenant", |request| request.extensions.get::<Tenant>().map(|tenant| tenant.0.clone()));
    /// # Ok::<(), sluicegate::rules::RulesError>(())
    /// ```
    #[must_use]
    pub fn label<V: Into<Vec<u8>>>(
        self,
        label: impl Into<Cow<'static, str>>,
        value: impl Fn(&Parts) -> Option<V> + Send + Sync + 'static,
    ) -> Self {
        let read = move |request: &Parts| value(request).map(Into::into);
        self.with_label(label.into(), LabelSource::Custom(Arc::new(read)))
    }

    /// Normalizes labels as the server does that uses the same configuration file, so that both share counters: secret labels are
    /// hashed, and addresses are truncated. Without it, header values are used unchanged.
    ///
    /// ```
    /// use sluicegate::{Limiter, MemoryStore, config::RulesFile};
    /// use sluicegate_tower::RateLimitLayer;
    ///
    /// let file = RulesFile::parse("[labels]\napi_key = { secret = true }")?; // or RulesFile::read("sluicegate.toml")?
    /// let layer = RateLimitLayer::new(Limiter::new(MemoryStore::new(), file.rules)?)
    ///     .header("api_key", "x-api-key")
    ///     .label_policy(file.labels);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[cfg(feature = "toml")]
    #[must_use]
    pub fn label_policy(self, policy: LabelPolicy) -> Self {
        self.with(|settings| settings.label_policy = Some(Arc::new(policy)))
    }

    /// Sets the cost of a request; the default is one.
    #[must_use]
    pub fn cost<C: Into<Costs>>(self, cost: impl Fn(&Parts) -> C + Send + Sync + 'static) -> Self {
        self.with_cost(cost, false)
    }

    /// Sets the estimated cost of a request, in place of [`RateLimitLayer::cost`]. The layer holds every request that a rule matches, and
    /// settles the hold with the [`ActualCosts`](crate::ActualCosts) when the response ends.
    ///
    /// Without an estimate, only requests that match an in-flight limit are held.
    #[must_use]
    pub fn estimate<C: Into<Costs>>(self, cost: impl Fn(&Parts) -> C + Send + Sync + 'static) -> Self {
        self.with_cost(cost, true)
    }

    /// Sets the dialect of the rate limit headers.
    #[must_use]
    pub fn dialect(self, dialect: Dialect) -> Self {
        self.with(|settings| settings.dialect = dialect)
    }

    /// Sets the response to denied requests, instead of problem+json or the gRPC status. The headers of the dialect are added to
    /// it.
    ///
    /// ```
    /// use bytes::Bytes;
    /// use http::{Response, StatusCode};
    /// use sluicegate::{Limiter, MemoryStore};
    /// use sluicegate_tower::RateLimitLayer;
    ///
    /// let layer = RateLimitLayer::new(Limiter::new(MemoryStore::new(), [])?).on_denial(|_request, decision| {
    ///     let text = format!("slow down: {} is exhausted", decision.rule().unwrap_or("your limit"));
    ///     let mut response = Response::new(Bytes::from(text));
    ///     *response.status_mut() = StatusCode::TOO_MANY_REQUESTS;
    ///     response
    /// });
    /// # Ok::<(), sluicegate::rules::RulesError>(())
    /// ```
    #[must_use]
    pub fn on_denial(
        self,
        response: impl Fn(&Parts, &Decision) -> Response<Bytes> + Send + Sync + 'static,
    ) -> Self {
        self.with(|settings| settings.denial_response = Some(Arc::new(response)))
    }

    fn with_cost<C: Into<Costs>>(
        self,
        cost: impl Fn(&Parts) -> C + Send + Sync + 'static,
        is_estimate: bool,
    ) -> Self {
        self.with(|settings| {
            settings.cost = Some(Arc::new(move |request| cost(request).into()));
            settings.has_estimate = is_estimate;
        })
    }

    fn with_label(self, name: Cow<'static, str>, source: LabelSource) -> Self {
        self.with(|settings| {
            settings.labels.retain(|label| label.name != name);
            settings.labels.push(LabelSpec { name, source });
        })
    }

    fn with(mut self, change: impl FnOnce(&mut LayerSettings)) -> Self {
        change(Arc::make_mut(&mut self.settings));
        self
    }
}

/// The call that sets a label.
fn setter(label: &str) -> String {
    match label {
        "ip" => ".client_ip()".to_owned(),
        "method" | "path" | "host" => format!(".{label}()"),
        "route" => ".matched_path(\"route\")".to_owned(),
        other => format!(".header({other:?}, …) or .label({other:?}, …)"),
    }
}

impl LayerSettings {
    pub(crate) fn skips(&self, request: &Parts) -> bool {
        self.skip.as_ref().is_some_and(|is_skipped| is_skipped(request))
    }

    /// Logs the rules that apply to no request because the layer does not set their labels, once.
    fn log_rules_without_labels(&self) {
        if self.has_compared_rules.swap(true, Ordering::Relaxed) {
            return;
        }
        let is_set = |name: &str| self.labels.iter().any(|label| label.name == name);
        for rule in self.limiter.rules().rules() {
            let conditions = rule.when.pairs().map(|(label, _)| label);
            let counted = if rule.absent == Absent::Skip { &rule.per[..] } else { &[] };
            let mut needed = conditions.chain(counted.iter().map(|label| &**label));
            if let Some(missing) = needed.find(|name| !is_set(name)) {
                tracing::error!(
                    "rule {:?} applies to no request: the layer does not set label {missing:?}; add {}",
                    rule.name,
                    setter(missing)
                );
            }
        }
    }

    /// Logs the first error of each kind that the operator has to fix.
    pub(crate) fn log_once(&self, error: &CheckError) {
        let (has_logged, status, problem) = match error {
            CheckError::BadRequest(_) => return,
            CheckError::Misconfigured(problem) => (&self.has_logged_500, 500, problem),
            CheckError::Unavailable(problem) => (&self.has_logged_503, 503, problem),
        };
        if !has_logged.swap(true, Ordering::Relaxed) {
            tracing::error!("requests are answered with {status}: {problem}");
        }
    }

    pub(crate) fn cost(&self, request: &Parts) -> Costs {
        self.cost.as_ref().map_or_else(|| Cost::ONE.into(), |cost| cost(request))
    }
}

// Not derived, because that would require the store to implement `Clone` and `Debug`.

impl Clone for RateLimitLayer {
    fn clone(&self) -> Self {
        Self { settings: Arc::clone(&self.settings) }
    }
}

impl Clone for LayerSettings {
    fn clone(&self) -> Self {
        Self {
            limiter: self.limiter.clone(),
            labels: self.labels.clone(),
            #[cfg(feature = "toml")]
            label_policy: self.label_policy.clone(),
            cost: self.cost.clone(),
            has_estimate: self.has_estimate,
            skip: self.skip.clone(),
            dialect: self.dialect,
            denial_response: self.denial_response.clone(),
            has_logged_500: Arc::clone(&self.has_logged_500),
            has_logged_503: Arc::clone(&self.has_logged_503),
            has_compared_rules: Arc::clone(&self.has_compared_rules),
        }
    }
}

impl fmt::Debug for RateLimitLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.settings.fmt(f)
    }
}

impl fmt::Debug for LayerSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let labels: Vec<_> = self.labels.iter().map(|label| &label.name).collect();
        f.debug_struct("RateLimit")
            .field("labels", &labels)
            .field("dialect", &self.dialect)
            .finish_non_exhaustive()
    }
}

impl<I> Layer<I> for RateLimitLayer {
    type Service = RateLimit<I>;

    fn layer(&self, inner: I) -> RateLimit<I> {
        self.settings.log_rules_without_labels();
        RateLimit { inner, settings: Arc::clone(&self.settings) }
    }
}
