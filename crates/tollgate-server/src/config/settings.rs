//! The settings of the server and its store as they are used: checked, with defaults, and secrets that do not print.

use std::{collections::HashMap, fmt, net::SocketAddr, time::Duration};

use ipnet::IpNet;
use sha2::{Digest as _, Sha256};
use tollgate::{
    Options, RedisSetupError, RedisStore,
    memory::{DEFAULT_MAX_MEMORY, MIN_MAX_MEMORY},
    redis::{RedisSettings, Secret, keys::DEFAULT_PREFIX},
};

use tollgate_tower::headers::Dialect;

use super::{
    error::{Place, Problem},
    files::Files,
    kinds::Words,
    read,
    reader::Field,
    source::Environment,
};
use crate::{grpc::Closed, labels::HashSecret, store::StoreUrl};

/// The shortest deadline of a decision.
pub const MIN_DEADLINE: Duration = Duration::from_millis(1);
/// The longest deadline of a decision.
pub const MAX_DEADLINE: Duration = Duration::from_secs(10);
/// The longest time for which refusals may be answered without asking the store.
pub const MAX_REFUSAL_CACHE: Duration = Duration::from_secs(60);
/// The shortest key that secret labels are hashed with, in bytes: shorter ones can be found by trying.
pub const MIN_HASH_SECRET: usize = 16;
/// The most tokens.
pub const MAX_TOKENS: usize = 1_000;

/// Where the server listens, and who may call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerSettings {
    /// JSON API, forward-auth, dashboard, metrics.
    pub http: Listen,
    /// Envoy's rate limit service.
    pub grpc: Listen,
    /// The Redis protocol.
    pub resp: Listen,
    /// Whose X-Forwarded-For and Forwarded are believed.
    pub trusted_proxies: Vec<IpNet>,
    /// The headers that tell clients their limits.
    pub headers: Dialect,
    /// Listeners may be reached from other machines although there is no token.
    pub insecure: bool,
    /// What Envoy is told when a rule that fails closed refuses.
    pub envoy_closed: Closed,
    /// Certificates; without them connections are not encrypted.
    pub tls: Option<Tls>,
    /// Who may call; without any, everybody who can reach the server.
    pub tokens: Vec<Token>,
}

/// Where one front end listens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Listen {
    /// Nowhere.
    Off,
    /// On this address; port 0 picks a free one.
    Address(SocketAddr),
}

/// The server's certificates, as PEM. The private key does not print.
#[derive(Clone, PartialEq, Eq)]
pub struct Tls {
    /// The certificate and those that lead to its authority.
    pub cert: Vec<u8>,
    /// Its private key.
    pub key: Vec<u8>,
    /// The authorities whose clients are let in; without them clients need no certificate.
    pub client_ca: Option<Vec<u8>>,
}

/// Somebody who may call. What is kept of the secret is its hash.
#[derive(Clone, PartialEq, Eq)]
pub struct Token {
    /// What it is called in the log.
    pub name: String,
    /// What it allows.
    pub may: Scopes,
    digest: Digest,
}

/// What is kept of a secret: its hash.
#[derive(Clone, PartialEq, Eq)]
pub struct Digest([u8; 32]);

/// What a token allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// To ask and to be charged: check, peek, explain, forward-auth.
    Check,
    /// To charge and refund afterwards.
    Adjust,
    /// To reset, and to see rules and top keys.
    Admin,
}

/// What a token allows: none implies another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Scopes {
    /// To ask and to be charged.
    pub check: bool,
    /// To charge and refund afterwards.
    pub adjust: bool,
    /// To reset, and to see rules and top keys.
    pub admin: bool,
}

/// Where counters are kept, and for how long that may take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreSettings {
    /// Which store.
    pub url: StoreUrl,
    /// How long a decision may take.
    pub deadline: Duration,
    /// What all keys in Redis begin with.
    pub prefix: String,
    /// The most memory that the memory store takes, in bytes.
    pub max_memory: usize,
    /// For how long at most a certain refusal is answered without asking the store.
    pub denial_cache: Duration,
    /// Passwords and certificates for Redis, read from their files.
    pub redis: RedisSettings,
}

impl Default for ServerSettings {
    fn default() -> Self {
        let local = |port| Listen::Address(SocketAddr::from(([127, 0, 0, 1], port)));
        Self {
            http: local(8080),
            grpc: local(8081),
            resp: local(6380),
            trusted_proxies: Vec::new(),
            headers: Dialect::default(),
            insecure: false,
            envoy_closed: Closed::default(),
            tls: None,
            tokens: Vec::new(),
        }
    }
}

impl Default for StoreSettings {
    fn default() -> Self {
        let Options { deadline, denial_cache } = Options::default();
        Self {
            url: StoreUrl::Memory,
            deadline,
            prefix: DEFAULT_PREFIX.to_owned(),
            max_memory: DEFAULT_MAX_MEMORY,
            denial_cache,
            redis: RedisSettings::default(),
        }
    }
}

impl StoreSettings {
    /// How the limiter treats the store.
    pub fn options(&self) -> Options {
        Options { deadline: self.deadline, denial_cache: self.denial_cache }
    }
}

impl Listen {
    /// The address, when there is one.
    pub fn address(self) -> Option<SocketAddr> {
        match self {
            Self::Off => None,
            Self::Address(address) => Some(address),
        }
    }
}

impl Digest {
    /// That of this secret.
    pub fn of(secret: &[u8]) -> Self {
        Self(Sha256::digest(secret).into())
    }
}

impl Token {
    /// A token with this secret.
    pub fn new(name: &str, secret: &[u8], may: Scopes) -> Self {
        Self { name: name.to_owned(), may, digest: Digest::of(secret) }
    }

    /// Whether both have the same secret.
    pub fn has_the_secret_of(&self, other: &Self) -> bool {
        self.accepts(&other.digest)
    }

    /// Whether this is of its secret. Takes as long for any answer: hashes are compared, and in full.
    pub fn accepts(&self, Digest(given): &Digest) -> bool {
        given.iter().zip(&self.digest.0).fold(0, |differ, (one, other)| differ | (one ^ other)) == 0
    }
}

impl Scopes {
    /// Everything.
    pub const ALL: Self = Self { check: true, adjust: true, admin: true };

    /// Whether this is allowed.
    pub fn allows(self, scope: Scope) -> bool {
        match scope {
            Scope::Check => self.check,
            Scope::Adjust => self.adjust,
            Scope::Admin => self.admin,
        }
    }

    fn with(mut self, scope: Scope) -> Self {
        match scope {
            Scope::Check => self.check = true,
            Scope::Adjust => self.adjust = true,
            Scope::Admin => self.admin = true,
        }
        self
    }
}

impl Scope {
    /// How it is written.
    pub fn name(self) -> &'static str {
        self.word()
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, may, digest: _ } = self;
        f.debug_struct("Token").field("name", name).field("may", may).finish_non_exhaustive()
    }
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Tls(…)")
    }
}

/// Turns settings as written into settings as used; what is wrong is noted and replaced by its default.
pub(super) struct Settle<'a> {
    pub(super) files: &'a mut Files,
    pub(super) environment: &'a Environment,
    pub(super) problems: &'a mut Vec<Problem>,
}

impl Settle<'_> {
    pub(super) fn server(&mut self, read: read::Server) -> ServerSettings {
        let defaults = ServerSettings::default();
        let listeners = [&read.http, &read.grpc, &read.resp].map(|field| field.place());
        let tokens = read.token.into_value().unwrap_or_default();
        let settings = ServerSettings {
            http: read.http.into_value().unwrap_or(defaults.http),
            grpc: read.grpc.into_value().unwrap_or(defaults.grpc),
            resp: read.resp.into_value().unwrap_or(defaults.resp),
            trusted_proxies: values(read.trusted_proxies).map(|network| network.0).collect(),
            headers: read.headers.into_value().map_or(defaults.headers, |word| word.0),
            insecure: read.insecure.into_value().unwrap_or(defaults.insecure),
            envoy_closed: read.envoy_closed.into_value().map_or(defaults.envoy_closed, |word| word.0),
            tls: self.tls(read.tls),
            tokens: self.tokens(&tokens),
        };
        if tokens.is_empty() && !settings.insecure {
            self.only_loopback(&settings, &listeners);
        }
        self.distinct_listeners(&settings, &listeners);
        settings
    }

    fn only_loopback(&mut self, settings: &ServerSettings, places: &[Place; 3]) {
        let listeners = [settings.http, settings.grpc, settings.resp];
        for (listener, place) in listeners.into_iter().zip(places) {
            let Some(address) = listener.address() else { continue };
            if !address.ip().to_canonical().is_loopback() {
                let message = format!(
                    "{address} can be reached from other machines, and there is no token, so everybody there could call: \
                     add a [[server.token]], or use 127.0.0.1:{port}, or set insecure = true",
                    port = address.port()
                );
                self.problems.push(Problem::new(place, message));
            }
        }
    }

    fn distinct_listeners(&mut self, settings: &ServerSettings, places: &[Place; 3]) {
        let listeners = [settings.http, settings.grpc, settings.resp];
        for (later, listener) in listeners.iter().enumerate() {
            let Some(address) = listener.address().filter(|address| address.port() != 0) else { continue };
            if let Some(earlier) = listeners[..later].iter().position(|other| other == listener) {
                // Two that were not written differ, so one of them was.
                let places = [&places[later], &places[earlier]];
                let place = places.into_iter().find(|place| **place != Place::Nowhere).unwrap_or(places[0]);
                let names = ["http", "grpc", "resp"];
                let message = format!(
                    "server.{} and server.{} are both {address}: give each an address of its own, or \"off\"",
                    names[earlier], names[later]
                );
                self.problems.push(Problem::new(place, message));
            }
        }
    }

    fn tls(&mut self, field: Field<read::Tls>) -> Option<Tls> {
        let place = field.place();
        let read = field.into_value()?;
        for (file, key) in [(&read.cert, "cert"), (&read.key, "key")] {
            if file.is_absent() {
                self.problems
                    .push(Problem::new(&place, format!("server.tls has no {key}: name the file of it")));
            }
        }
        let (cert, key) = (self.pem(&read.cert), self.pem(&read.key));
        let client_ca = self.pem(&read.client_ca);
        Some(Tls { cert: cert?, key: key?, client_ca })
    }

    /// The bytes of a file that must hold PEM.
    fn pem(&mut self, field: &Field<String>) -> Option<Vec<u8>> {
        const BEGIN: &str = "-----BEGIN ";
        let bytes = self.files.small(field, self.problems)?;
        if !bytes.windows(BEGIN.len()).any(|window| window == BEGIN.as_bytes()) {
            let name = field.get().map_or("", String::as_str);
            let message = format!("{name:?} holds no PEM: it has no line that starts with {BEGIN}");
            self.problems.push(Problem::new(&field.place(), message));
            return None;
        }
        Some(bytes)
    }

    fn tokens(&mut self, read_tokens: &[Field<read::Token>]) -> Vec<Token> {
        let mut tokens: Vec<Token> = Vec::new();
        let mut first: HashMap<String, Place> = HashMap::new();
        for (index, field) in read_tokens.iter().enumerate() {
            let Field::Given(read, place) = field else { continue };
            if index == MAX_TOKENS {
                let message = format!("{} tokens are too many: use at most {MAX_TOKENS}", read_tokens.len());
                self.problems.push(Problem::new(place, message));
                break;
            }
            let Some(token) = self.token(read, place) else { continue };
            if let Some(earlier) = first.insert(token.name.clone(), read.name.place()) {
                let message = format!("token {:?} is defined twice: give each a name of its own", token.name);
                let problem = Problem::new(&read.name.place(), message).also(&earlier, "first defined here");
                self.problems.push(problem);
            } else if let Some(same) = tokens.iter().find(|other| other.digest == token.digest) {
                let message = format!(
                    "tokens {:?} and {:?} have the same secret: give each one of its own",
                    same.name, token.name
                );
                self.problems.push(Problem::new(place, message));
            }
            tokens.push(token);
        }
        tokens
    }

    fn token(&mut self, read: &read::Token, place: &Place) -> Option<Token> {
        if read.name.is_absent() || read.name.get().is_some_and(String::is_empty) {
            let message = "a token needs a name, for the log: add for example name = \"deploy\"";
            self.problems.push(Problem::new(&read.name.place_or(place), message));
        }
        let secret = self.secret(read, place);
        let mut may = Scopes::default();
        match &read.may {
            Field::Absent => may.check = true,
            Field::Wrong(_) => {}
            Field::Given(scopes, place) if scopes.is_empty() => {
                let message = "may is empty, so the token allows nothing: use check, adjust, admin";
                self.problems.push(Problem::new(place, message));
            }
            Field::Given(scopes, _) => {
                may = scopes.iter().filter_map(Field::get).fold(may, |may, scope| may.with(scope.0));
            }
        }
        Some(Token::new(read.name.get()?, &secret?, may))
    }

    fn secret(&mut self, read: &read::Token, place: &Place) -> Option<Vec<u8>> {
        let (secret, place) = match (&read.file, &read.env) {
            (Field::Absent, Field::Absent) => {
                let message = "a token needs a secret: name its file = \"…\", or its variable env = \"…\"";
                self.problems.push(Problem::new(place, message));
                return None;
            }
            (file, Field::Absent) => (self.files.secret(file, self.problems)?, file.place()),
            (Field::Absent, env) => {
                let name = env.get()?;
                let Some(secret) = self.environment.get(name) else {
                    let message = format!("the environment has no variable {name}: set it, or use file");
                    self.problems.push(Problem::new(&env.place(), message));
                    return None;
                };
                (secret.into_bytes(), env.place())
            }
            (_, env) => {
                let message = "a token has one secret: leave out either file or env";
                self.problems.push(Problem::new(&env.place(), message));
                return None;
            }
        };
        let problem = if secret.is_empty() {
            "the token's secret is empty"
        } else if !secret.iter().all(u8::is_ascii_graphic) {
            "the token's secret has spaces or other characters that a header cannot carry"
        } else {
            return Some(secret);
        };
        let message = format!("{problem}: use visible ASCII, for example of `openssl rand -hex 32`");
        self.problems.push(Problem::new(&place, message));
        None
    }

    pub(super) fn store(&mut self, read: &read::Store, place: &Place) -> StoreSettings {
        let mut settings = StoreSettings::default();
        if let Some(url) = read.url.get() {
            settings.url = url.0.clone();
        }
        if let Some(prefix) = read.prefix.get() {
            settings.prefix.clone_from(&prefix.0);
        }
        if let Some(span) = read.deadline.get() {
            settings.deadline = span.0;
            if !(MIN_DEADLINE..=MAX_DEADLINE).contains(&span.0) {
                let message =
                    format!("store.deadline is out of range: use {MIN_DEADLINE:?} to {MAX_DEADLINE:?}");
                self.problems.push(Problem::new(&read.deadline.place(), message));
            }
        }
        if let Some(span) = read.denial_cache.get() {
            settings.denial_cache = span.0;
            if span.0 > MAX_REFUSAL_CACHE {
                let message = format!("store.denial_cache is out of range: use 0s to {MAX_REFUSAL_CACHE:?}");
                self.problems.push(Problem::new(&read.denial_cache.place(), message));
            }
        }
        if let Some(bytes) = read.max_memory.get() {
            match usize::try_from(bytes.0) {
                Ok(bytes) if bytes >= MIN_MAX_MEMORY => settings.max_memory = bytes,
                _ => {
                    let message = "store.max_memory is out of range: use at least \"1MiB\"";
                    self.problems.push(Problem::new(&read.max_memory.place(), message));
                }
            }
        }
        settings.redis = self.redis(read);
        self.check_redis(read, place, &settings);
        settings
    }

    fn redis(&mut self, read: &read::Store) -> RedisSettings {
        let mut redis = RedisSettings::default();
        if let Some(password) = self.password(&read.password_file) {
            redis = redis.password(password);
        }
        if let Some(user) = read.sentinel_user.get() {
            redis = redis.sentinel_user(user.clone());
        }
        if let Some(password) = self.password(&read.sentinel_password_file) {
            redis = redis.sentinel_password(password);
        }
        if let Some(pem) = self.pem(&read.ca) {
            redis = redis.authority(pem);
        }
        match (&read.cert, &read.key) {
            (Field::Absent, Field::Absent) => {}
            (cert, Field::Absent) => {
                let message = "store.cert needs a key: name the file of its private key as store.key";
                self.problems.push(Problem::new(&cert.place(), message));
            }
            (Field::Absent, key) => {
                let message = "store.key needs a certificate: name its file as store.cert";
                self.problems.push(Problem::new(&key.place(), message));
            }
            (cert, key) => {
                if let (Some(cert), Some(key)) = (self.pem(cert), self.pem(key)) {
                    redis = redis.client_certificate(cert, key);
                }
            }
        }
        redis
    }

    /// The key of the hash that stands for secret labels.
    pub(super) fn hash_secret(&mut self, field: &Field<String>) -> Option<HashSecret> {
        let secret = self.files.secret(field, self.problems)?;
        if secret.len() < MIN_HASH_SECRET {
            let message = format!(
                "the key in this file has {} bytes: use at least {MIN_HASH_SECRET}, for example of `openssl rand -hex 32`",
                secret.len()
            );
            self.problems.push(Problem::new(&field.place(), message));
        }
        Some(HashSecret::new(secret))
    }

    fn password(&mut self, field: &Field<String>) -> Option<Secret> {
        let bytes = self.files.secret(field, self.problems)?;
        let text = String::from_utf8(bytes).ok().filter(|text| !text.is_empty());
        if text.is_none() {
            let message = "the file holds no password: write it there as UTF-8, on one line";
            self.problems.push(Problem::new(&field.place(), message));
        }
        text.map(Secret::from)
    }

    /// Asks the library whether it could connect with these settings, and names the one it would refuse.
    fn check_redis(&mut self, read: &read::Store, place: &Place, settings: &StoreSettings) {
        let redis_only = [
            &read.password_file,
            &read.ca,
            &read.cert,
            &read.key,
            &read.sentinel_user,
            &read.sentinel_password_file,
        ];
        let StoreUrl::Redis(url) = &settings.url else {
            if let Some(field) = redis_only.into_iter().find(|field| !field.is_absent())
                && !matches!(read.url, Field::Wrong(_))
            {
                let message = "this is for Redis, and the store is memory: — leave it out, or name a Redis as store.url";
                self.problems.push(Problem::new(&field.place(), message));
            }
            return;
        };
        let Err(error) = RedisStore::connect_later_with(url, &settings.redis) else { return };
        let at = match &error {
            RedisSetupError::Tls(_) => {
                let fields = [&read.ca, &read.cert, &read.key];
                fields.into_iter().find(|field| !field.is_absent()).map(Field::place)
            }
            _ => None,
        };
        let at = at.unwrap_or_else(|| read.url.place_or(place));
        self.problems.push(Problem::new(&at, format!("store: {error}")));
    }
}

/// The elements of a list that could be read.
pub(super) fn values<T>(list: Field<Vec<Field<T>>>) -> impl Iterator<Item = T> {
    list.into_value().unwrap_or_default().into_iter().filter_map(Field::into_value)
}

/// Names what of a change takes effect only after a restart: settings that differ from those the process started with.
pub(super) fn needs_restart(
    (server, store): (&ServerSettings, &StoreSettings),
    (new_server, new_store): (&ServerSettings, &StoreSettings),
) -> Vec<String> {
    let differs = [
        ("server.http", server.http != new_server.http),
        ("server.grpc", server.grpc != new_server.grpc),
        ("server.resp", server.resp != new_server.resp),
        // Certificates are exchanged while running; whether connections are encrypted at all is not.
        ("server.tls", server.tls.is_some() != new_server.tls.is_some()),
        ("store.url", store.url != new_store.url),
        ("store.deadline", store.deadline != new_store.deadline),
        ("store.prefix", store.prefix != new_store.prefix),
        ("store.max_memory", store.max_memory != new_store.max_memory),
        ("store.denial_cache", store.denial_cache != new_store.denial_cache),
        ("the store's passwords or certificates", store.redis != new_store.redis),
    ];
    differs.into_iter().filter(|(_, differs)| *differs).map(|(name, _)| name.to_owned()).collect()
}
