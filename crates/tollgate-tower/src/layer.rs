//! What the middleware is told: where labels come from, what requests cost, how refusals look.

use std::{borrow::Cow, fmt, net::IpAddr, sync::Arc};

use bytes::Bytes;
use http::{HeaderName, Response, request::Parts};
use tollgate::{Cost, Costs, Decision, Limiter};
use tower_layer::Layer;

use crate::{
    client::ClientAddress,
    headers::Dialect,
    labels::{Label, Source},
    service::RateLimit,
};

type CostOf = Arc<dyn Fn(&Parts) -> Costs + Send + Sync>;
type Refuse = Arc<dyn Fn(&Parts, &Decision) -> Response<Bytes> + Send + Sync>;

/// Puts a [`Limiter`] in front of a service. Cheap to clone.
///
/// Every request is asked about with the labels that are named here; what the rules say decides. A label whose source
/// the request does not have is absent, and the rule's `absent` says what that means; the client's address is never
/// absent. Of two sources for one label the later counts.
///
/// ```
/// use std::{net::SocketAddr, time::Duration};
/// use axum::{Router, extract::ConnectInfo, http::HeaderName, routing::post};
/// use tollgate::{Cost, Limit, Limiter, MemoryStore, Rule};
/// use tollgate_tower::{RateLimitLayer, client::ClientAddress, headers::Dialect};
///
/// let minute = Duration::from_secs(60);
/// let rules = [
///     Rule::new("per-ip", Limit::token_bucket(100, minute)?).per(["ip"]),
///     Rule::new("per-key", Limit::sliding_log(1_000, minute)?).per(["api_key"]),
/// ];
/// let layer = RateLimitLayer::new(Limiter::new(MemoryStore::new(), rules)?)
///     .client_ip(ClientAddress::default(), |request| {
///         request.extensions.get::<ConnectInfo<SocketAddr>>().map(|info| info.0.ip())
///     })
///     .header("api_key", HeaderName::from_static("x-api-key"))
///     .cost(|request| if request.uri.path() == "/import" { Cost::from(10_u32) } else { Cost::ONE })
///     .dialect(Dialect::XRateLimit);
/// let app: Router = Router::new().route("/import", post(|| async { "done" })).layer(layer);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct RateLimitLayer {
    settings: Arc<Settings>,
}

pub(crate) struct Settings {
    pub(crate) limiter: Limiter,
    pub(crate) labels: Vec<Label>,
    pub(crate) cost: Option<CostOf>,
    pub(crate) dialect: Dialect,
    pub(crate) refuse: Option<Refuse>,
}

impl RateLimitLayer {
    /// Asks this limiter about every request: no labels yet, each costs one, draft 11 fields, problem+json.
    pub fn new(limiter: Limiter) -> Self {
        let settings =
            Settings { limiter, labels: Vec::new(), cost: None, dialect: Dialect::default(), refuse: None };
        Self { settings: Arc::new(settings) }
    }

    /// Label `ip`: the client's address. `peer` finds the address that connected, which is where each server
    /// puts it:
    ///
    /// * axum: `|request| request.extensions.get::<ConnectInfo<SocketAddr>>().map(|info| info.0.ip())`, and serve with
    ///   `into_make_service_with_connect_info::<SocketAddr>()`
    /// * tonic: `|request| request.extensions.get::<TcpConnectInfo>()?.remote_addr().map(|peer| peer.ip())`
    ///
    /// When there is none, the request is answered with 500: a limit for each address would otherwise apply
    /// to nobody.
    #[must_use]
    pub fn client_ip(
        self,
        client: ClientAddress,
        peer: impl Fn(&Parts) -> Option<IpAddr> + Send + Sync + 'static,
    ) -> Self {
        self.with_label("ip".into(), Source::ClientIp { client, peer: Arc::new(peer) })
    }

    /// A label from a header, byte for byte. A request that has the header twice is answered with 400.
    #[must_use]
    pub fn header(self, label: impl Into<Cow<'static, str>>, header: HeaderName) -> Self {
        self.with_label(label.into(), Source::Header(header))
    }

    /// Label `method`.
    #[must_use]
    pub fn method(self) -> Self {
        self.with_label("method".into(), Source::Method)
    }

    /// Label `path`, as the client wrote it: `/users/7`, without the query. To limit what a route serves, label requests by
    /// its template instead, which has one spelling; see [`RateLimitLayer::matched_path`]. A long one is [cut](crate::asked::cut).
    #[must_use]
    pub fn path(self) -> Self {
        self.with_label("path".into(), Source::Path)
    }

    /// Label `host`: the host that is asked for, in lower case and without port.
    #[must_use]
    pub fn host(self) -> Self {
        self.with_label("host".into(), Source::Host)
    }

    /// A label from the template of the route that axum has for a request: `/users/{id}` for `/users/7` and `/users/8`.
    ///
    /// ```
    /// use axum::{Router, routing::get};
    /// # use std::time::Duration;
    /// # use tollgate::{Limit, Limiter, MemoryStore, Rule};
    /// # use tollgate_tower::RateLimitLayer;
    ///
    /// # let limit = Limit::token_bucket(100, Duration::from_secs(60))?;
    /// let rules = [Rule::new("users", limit).when("route", "/users/{id}")];
    /// let layer = RateLimitLayer::new(Limiter::new(MemoryStore::new(), rules)?).matched_path("route");
    /// let app: Router = Router::new().route("/users/{id}", get(|| async { "a user" })).layer(layer);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// Absent where no route is, and everywhere unless the layer is one of the router, as here: around it, nothing is matched yet.
    /// Only axum 0.8 is understood.
    #[cfg(feature = "axum")]
    #[must_use]
    pub fn matched_path(self, label: impl Into<Cow<'static, str>>) -> Self {
        self.label(label, |request| {
            request.extensions.get::<axum::extract::MatchedPath>().map(|path| path.as_str().to_owned())
        })
    }

    /// A label from anything in the head of a request, for example what authentication left there:
    ///
    /// ```
    /// # use tollgate::{Limiter, MemoryStore};
    /// # use tollgate_tower::RateLimitLayer;
    /// #[derive(Clone)]
    /// struct Tenant(String);
    ///
    /// # let limiter = Limiter::new(MemoryStore::new(), [])?;
    /// let layer = RateLimitLayer::new(limiter)
    ///     .label("tenant", |request| request.extensions.get::<Tenant>().map(|tenant| tenant.0.clone()));
    /// # Ok::<(), tollgate::RulesError>(())
    /// ```
    #[must_use]
    pub fn label<V: Into<Vec<u8>>>(
        self,
        label: impl Into<Cow<'static, str>>,
        value: impl Fn(&Parts) -> Option<V> + Send + Sync + 'static,
    ) -> Self {
        let read = move |request: &Parts| value(request).map(Into::into);
        self.with_label(label.into(), Source::Custom(Arc::new(read)))
    }

    /// What a request costs; one, unless this says otherwise.
    #[must_use]
    pub fn cost<C: Into<Costs>>(self, cost: impl Fn(&Parts) -> C + Send + Sync + 'static) -> Self {
        self.with(|settings| settings.cost = Some(Arc::new(move |request| cost(request).into())))
    }

    /// How limits are told to clients.
    #[must_use]
    pub fn dialect(self, dialect: Dialect) -> Self {
        self.with(|settings| settings.dialect = dialect)
    }

    /// Another response to those who are refused, instead of problem+json or the gRPC status. The fields of
    /// the dialect are added to it.
    ///
    /// ```
    /// use bytes::Bytes;
    /// use http::{Response, StatusCode};
    /// use tollgate::{Limiter, MemoryStore};
    /// use tollgate_tower::RateLimitLayer;
    ///
    /// let layer = RateLimitLayer::new(Limiter::new(MemoryStore::new(), [])?).on_refusal(|_request, decision| {
    ///     let text = format!("slow down: {} is used up", decision.rule().unwrap_or("your limit"));
    ///     let mut response = Response::new(Bytes::from(text));
    ///     *response.status_mut() = StatusCode::TOO_MANY_REQUESTS;
    ///     response
    /// });
    /// # Ok::<(), tollgate::RulesError>(())
    /// ```
    #[must_use]
    pub fn on_refusal(
        self,
        response: impl Fn(&Parts, &Decision) -> Response<Bytes> + Send + Sync + 'static,
    ) -> Self {
        self.with(|settings| settings.refuse = Some(Arc::new(response)))
    }

    fn with_label(self, name: Cow<'static, str>, source: Source) -> Self {
        self.with(|settings| {
            settings.labels.retain(|label| label.name != name);
            settings.labels.push(Label { name, source });
        })
    }

    fn with(mut self, change: impl FnOnce(&mut Settings)) -> Self {
        change(Arc::make_mut(&mut self.settings));
        self
    }
}

impl Settings {
    pub(crate) fn cost(&self, request: &Parts) -> Costs {
        self.cost.as_ref().map_or_else(|| Cost::ONE.into(), |cost| cost(request))
    }
}

// by hand: the store need not be cloned, nor shown

impl Clone for RateLimitLayer {
    fn clone(&self) -> Self {
        Self { settings: Arc::clone(&self.settings) }
    }
}

impl Clone for Settings {
    fn clone(&self) -> Self {
        Self {
            limiter: self.limiter.clone(),
            labels: self.labels.clone(),
            cost: self.cost.clone(),
            dialect: self.dialect,
            refuse: self.refuse.clone(),
        }
    }
}

impl fmt::Debug for RateLimitLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.settings.fmt(f)
    }
}

impl fmt::Debug for Settings {
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
        RateLimit { inner, settings: Arc::clone(&self.settings) }
    }
}
