//! Validates the settings of the server and the store.

use std::{collections::HashMap, num::NonZeroUsize, ops::RangeInclusive};

use sluicegate::{
    RedisStore,
    config::{
        error::{Location, Problem},
        files::Files,
        toml_reader::Field,
    },
    duration,
    memory::MIN_MAX_MEMORY,
    redis::{RedisSettings, RedisSetupError, Secret},
};

use super::{
    schema,
    settings::{
        CONNECTIONS, MAX_DEADLINE, MAX_DENIAL_CACHE, MAX_INSTANCES, MAX_KEY_SCAN_INTERVAL, MAX_TOKENS,
        MIN_DEADLINE, MIN_KEY_SCAN_INTERVAL, Scopes, ServerSettings, StoreSettings, Tls, Token,
    },
    source::Environment,
};
use crate::store::StoreUrl;

/// The length of a token's secret below which a warning is reported.
const MIN_GOOD_SECRET: usize = 16;

/// Validates settings. An invalid value is reported and replaced by its default.
pub(super) struct Validator<'a> {
    pub(super) files: &'a mut Files,
    pub(super) environment: &'a Environment,
    pub(super) problems: &'a mut Vec<Problem>,
    pub(super) warnings: &'a mut Vec<String>,
}

impl Validator<'_> {
    pub(super) fn server(&mut self, read: schema::Server) -> ServerSettings {
        let defaults = ServerSettings::default();
        let listeners = [&read.http, &read.grpc, &read.resp].map(|field| field.location());
        let tokens = read.token.into_value().unwrap_or_default();
        let settings = ServerSettings {
            http: read.http.into_value().unwrap_or(defaults.http),
            grpc: read.grpc.into_value().unwrap_or(defaults.grpc),
            resp: read.resp.into_value().unwrap_or(defaults.resp),
            trusted_proxies: values(read.trusted_proxies).map(|network| network.0).collect(),
            headers: read.headers.into_value().map_or(defaults.headers, |word| word.0.0),
            insecure: read.insecure.into_value().unwrap_or(defaults.insecure),
            max_connections: self.connections(&read.max_connections, "max_connections", CONNECTIONS),
            max_connections_per_address: self.connections(
                &read.max_connections_per_address,
                "max_connections_per_address",
                1..=*CONNECTIONS.end(),
            ),
            envoy_closed: read.envoy_closed.into_value().map_or(defaults.envoy_closed, |word| word.0),
            tls: self.tls(read.tls),
            tokens: self.tokens(&tokens),
        };
        if tokens.is_empty() && !settings.insecure {
            self.require_loopback(&settings, &listeners);
        }
        self.require_distinct_listeners(&settings, &listeners);
        settings
    }

    fn connections(
        &mut self,
        field: &Field<u64>,
        key: &str,
        valid: RangeInclusive<u64>,
    ) -> Option<NonZeroUsize> {
        let Field::Given(count, location) = field else { return None };
        if !valid.contains(count) {
            let message =
                format!("server.{key}: {count} is out of range: use {} to {}", valid.start(), valid.end());
            self.problems.push(Problem::new(location, message));
        }
        usize::try_from(*count).ok().and_then(NonZeroUsize::new)
    }

    fn require_loopback(&mut self, settings: &ServerSettings, locations: &[Location; 3]) {
        let listeners = [settings.http, settings.grpc, settings.resp];
        for (listener, location) in listeners.into_iter().zip(locations) {
            let Some(address) = listener.address() else { continue };
            if !address.ip().to_canonical().is_loopback() {
                let message = format!(
                    "{address} is reachable from other machines but no token is configured: \
                    add a [[server.token]], use 127.0.0.1:{port}, or set insecure = true",
                    port = address.port()
                );
                self.problems.push(Problem::new(location, message));
            }
        }
    }

    fn require_distinct_listeners(&mut self, settings: &ServerSettings, locations: &[Location; 3]) {
        let listeners = [settings.http, settings.grpc, settings.resp];
        for (later, listener) in listeners.iter().enumerate() {
            let Some(address) = listener.address().filter(|address| address.port() != 0) else { continue };
            if let Some(earlier) = listeners[..later].iter().position(|other| other == listener) {
                // The defaults differ, so at least one of the two is in the file.
                let locations = [&locations[later], &locations[earlier]];
                let location = locations
                    .into_iter()
                    .find(|location| **location != Location::Default)
                    .unwrap_or(locations[0]);
                let names = ["http", "grpc", "resp"];
                let message = format!(
                    "server.{} and server.{} are both {address}: use different addresses, or \"off\"",
                    names[earlier], names[later]
                );
                self.problems.push(Problem::new(location, message));
            }
        }
    }

    fn tls(&mut self, field: Field<schema::Tls>) -> Option<Tls> {
        let location = field.location();
        let read = field.into_value()?;
        for (file, key) in [(&read.cert, "cert"), (&read.key, "key")] {
            if file.is_absent() {
                self.problems.push(Problem::new(
                    &location,
                    format!("server.tls has no {key}: add the path of its file"),
                ));
            }
        }
        let (cert, key) = (self.pem(&read.cert), self.pem(&read.key));
        let client_ca = self.pem(&read.client_ca);
        Some(Tls { cert: cert?, key: key?, client_ca })
    }

    /// Reads a file that must contain PEM.
    fn pem(&mut self, field: &Field<String>) -> Option<Vec<u8>> {
        const BEGIN: &str = "-----BEGIN ";
        let bytes = self.files.small(field, self.problems)?;
        if !bytes.windows(BEGIN.len()).any(|window| window == BEGIN.as_bytes()) {
            let name = field.get().map_or("", String::as_str);
            let message = format!("{name:?} is not PEM: it has no line that starts with {BEGIN}");
            self.problems.push(Problem::new(&field.location(), message));
            return None;
        }
        Some(bytes)
    }

    fn tokens(&mut self, read_tokens: &[Field<schema::Token>]) -> Vec<Token> {
        let mut tokens: Vec<Token> = Vec::new();
        let mut first: HashMap<String, Location> = HashMap::new();
        for (index, field) in read_tokens.iter().enumerate() {
            let Field::Given(read, location) = field else { continue };
            if index == MAX_TOKENS {
                let message = format!("{} tokens are too many: use at most {MAX_TOKENS}", read_tokens.len());
                self.problems.push(Problem::new(location, message));
                break;
            }
            let Some(token) = self.token(read, location) else { continue };
            if let Some(earlier) = first.insert(token.name.clone(), read.name.location()) {
                let message = format!("token {:?} is defined twice: use a unique name", token.name);
                let problem =
                    Problem::new(&read.name.location(), message).also(&earlier, "first defined here");
                self.problems.push(problem);
            } else if let Some(same) = tokens.iter().find(|other| other.has_same_secret(&token)) {
                let message = format!(
                    "tokens {:?} and {:?} have the same secret: use different secrets",
                    same.name, token.name
                );
                self.problems.push(Problem::new(location, message));
            }
            tokens.push(token);
        }
        tokens
    }

    fn token(&mut self, read: &schema::Token, location: &Location) -> Option<Token> {
        if read.name.is_absent() || read.name.get().is_some_and(String::is_empty) {
            let message = "the token has no name: add for example name = \"deploy\"";
            self.problems.push(Problem::new(&read.name.location_or(location), message));
        }
        let secret = self.secret(read, location);
        let mut may = Scopes::default();
        match &read.may {
            Field::Absent => may.check = true,
            Field::Wrong(_) => {}
            Field::Given(scopes, location) if scopes.is_empty() => {
                let message = "may is empty, so the token allows nothing: use check, adjust or admin";
                self.problems.push(Problem::new(location, message));
            }
            Field::Given(scopes, _) => {
                may = scopes.iter().filter_map(Field::get).fold(may, |may, scope| may.with(scope.0));
            }
        }
        let (name, secret) = (read.name.get()?, secret?);
        if secret.len() < MIN_GOOD_SECRET {
            self.warnings.push(format!(
                "the secret of token {name:?} has only {} characters: use at least {MIN_GOOD_SECRET}, for example the output of \
                 `openssl rand -hex 32`",
                secret.len()
            ));
        }
        Some(Token::new(name, &secret, may))
    }

    fn secret(&mut self, read: &schema::Token, location: &Location) -> Option<Vec<u8>> {
        let (secret, location) = match (&read.file, &read.env) {
            (Field::Absent, Field::Absent) => {
                let message = "the token has no secret: add file = \"…\" or env = \"…\"";
                self.problems.push(Problem::new(location, message));
                return None;
            }
            (file, Field::Absent) => (self.files.secret(file, self.problems)?, file.location()),
            (Field::Absent, env) => {
                let name = env.get()?;
                let Some(secret) = self.environment.get(name) else {
                    let message = format!("environment variable {name} is not set: set it, or use file");
                    self.problems.push(Problem::new(&env.location(), message));
                    return None;
                };
                (secret.into_bytes(), env.location())
            }
            (_, env) => {
                let message = "the token has two secrets: remove file or env";
                self.problems.push(Problem::new(&env.location(), message));
                return None;
            }
        };
        let problem = if secret.is_empty() {
            "the secret of the token is empty"
        } else if !secret.iter().all(u8::is_ascii_graphic) {
            "the secret of the token has characters that a header cannot carry"
        } else {
            return Some(secret);
        };
        let message = format!(
            "{problem}: use visible ASCII without spaces, for example the output of `openssl rand -hex 32`"
        );
        self.problems.push(Problem::new(&location, message));
        None
    }

    pub(super) fn store(&mut self, read: &schema::Store, location: &Location) -> StoreSettings {
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
                self.problems.push(Problem::new(&read.deadline.location(), message));
            }
        }
        if let Some(span) = read.denial_cache.get() {
            settings.denial_cache = span.0;
            if span.0 > MAX_DENIAL_CACHE {
                let message = format!("store.denial_cache is out of range: use 0s to {MAX_DENIAL_CACHE:?}");
                self.problems.push(Problem::new(&read.denial_cache.location(), message));
            }
        }
        if let Some(count) = read.instances.get() {
            match u32::try_from(*count) {
                Ok(count @ 1..=MAX_INSTANCES) => settings.instances = count,
                _ => {
                    let message =
                        format!("store.instances {count} is out of range: use 1 to {MAX_INSTANCES}");
                    self.problems.push(Problem::new(&read.instances.location(), message));
                }
            }
        }
        if let Some(span) = read.key_scan_interval.get() {
            settings.key_scan_interval = Some(span.0);
            if !(MIN_KEY_SCAN_INTERVAL..=MAX_KEY_SCAN_INTERVAL).contains(&span.0) {
                let message = format!(
                    "store.key_scan_interval is out of range: use {} to {}, or remove it to disable the scan",
                    duration::text(MIN_KEY_SCAN_INTERVAL),
                    duration::text(MAX_KEY_SCAN_INTERVAL)
                );
                self.problems.push(Problem::new(&read.key_scan_interval.location(), message));
            }
        }
        if let Some(bytes) = read.max_memory.get() {
            match usize::try_from(bytes.0) {
                Ok(bytes) if bytes >= MIN_MAX_MEMORY => settings.max_memory = bytes,
                _ => {
                    let message = "store.max_memory is out of range: use at least \"1MiB\"";
                    self.problems.push(Problem::new(&read.max_memory.location(), message));
                }
            }
        }
        settings.redis = self.redis(read);
        self.check_redis(read, location, &settings);
        settings
    }

    fn redis(&mut self, read: &schema::Store) -> RedisSettings {
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
                let message = "store.cert has no private key: set store.key to its file";
                self.problems.push(Problem::new(&cert.location(), message));
            }
            (Field::Absent, key) => {
                let message = "store.key has no certificate: set store.cert to its file";
                self.problems.push(Problem::new(&key.location(), message));
            }
            (cert, key) => {
                if let (Some(cert), Some(key)) = (self.pem(cert), self.pem(key)) {
                    redis = redis.client_certificate(cert, key);
                }
            }
        }
        redis
    }

    fn password(&mut self, field: &Field<String>) -> Option<Secret> {
        let bytes = self.files.secret(field, self.problems)?;
        let text = String::from_utf8(bytes).ok().filter(|text| !text.is_empty());
        if text.is_none() {
            let message = "the file has no password: write it as UTF-8 on one line";
            self.problems.push(Problem::new(&field.location(), message));
        }
        text.map(Secret::from)
    }

    /// Reports settings that the Redis store would reject.
    fn check_redis(&mut self, read: &schema::Store, location: &Location, settings: &StoreSettings) {
        let redis_only = [
            &read.password_file,
            &read.ca,
            &read.cert,
            &read.key,
            &read.sentinel_user,
            &read.sentinel_password_file,
        ];
        let redis_only = redis_only.map(|field| (field.is_absent(), field.location()));
        let scan = (read.key_scan_interval.is_absent(), read.key_scan_interval.location());
        let StoreUrl::Redis(url) = &settings.url else {
            if let Some((_, location)) =
                redis_only.into_iter().chain([scan]).find(|(is_absent, _)| !is_absent)
                && !matches!(read.url, Field::Wrong(_))
            {
                let message = "this setting needs Redis but store.url is \"memory:\": remove it, or set store.url to a Redis";
                self.problems.push(Problem::new(&location, message));
            }
            return;
        };
        let Err(error) = RedisStore::connect_later_with(url, &settings.redis) else { return };
        let at = match &error {
            RedisSetupError::Tls(_) => {
                let fields = [&read.ca, &read.cert, &read.key];
                fields.into_iter().find(|field| !field.is_absent()).map(Field::location)
            }
            _ => None,
        };
        let at = at.unwrap_or_else(|| read.url.location_or(location));
        self.problems.push(Problem::new(&at, format!("store: {error}")));
    }
}

/// The valid elements of a list.
fn values<T>(list: Field<Vec<Field<T>>>) -> impl Iterator<Item = T> {
    list.into_value().unwrap_or_default().into_iter().filter_map(Field::into_value)
}

/// Lists the settings that differ from those at startup and take effect only after a restart.
pub(super) fn needs_restart(
    (server, store): (&ServerSettings, &StoreSettings),
    (new_server, new_store): (&ServerSettings, &StoreSettings),
) -> Vec<String> {
    let differs = [
        ("server.http", server.http != new_server.http),
        ("server.grpc", server.grpc != new_server.grpc),
        ("server.resp", server.resp != new_server.resp),
        // Certificates are reloaded; enabling or disabling TLS needs a restart.
        ("server.tls", server.tls.is_some() != new_server.tls.is_some()),
        ("server.max_connections", server.max_connections != new_server.max_connections),
        (
            "server.max_connections_per_address",
            server.max_connections_per_address != new_server.max_connections_per_address,
        ),
        ("store.url", store.url != new_store.url),
        ("store.deadline", store.deadline != new_store.deadline),
        ("store.prefix", store.prefix != new_store.prefix),
        ("store.max_memory", store.max_memory != new_store.max_memory),
        ("store.instances", store.instances != new_store.instances),
        ("store.denial_cache", store.denial_cache != new_store.denial_cache),
        ("store.key_scan_interval", store.key_scan_interval != new_store.key_scan_interval),
        ("the store's passwords or certificates", store.redis != new_store.redis),
    ];
    differs.into_iter().filter(|(_, differs)| *differs).map(|(name, _)| name.to_owned()).collect()
}
