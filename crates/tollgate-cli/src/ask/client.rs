//! The way to a server: one call over HTTP. Whatever goes wrong says what to do about it.

use std::{
    error::Error,
    io::ErrorKind,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use tollgate_server::{config::read_flag_file, server::StartError};
use ureq::{
    Agent,
    http::Uri,
    tls::{Certificate, ClientCert, PemItem, PrivateKey, RootCerts, TlsConfig, parse_pem},
};

/// The variable that names the server, where no flag does.
pub(crate) const SERVER_VARIABLE: &str = "TOLLGATE_SERVER";

/// How long a server may take for everything.
const PATIENCE: Duration = Duration::from_secs(10);

/// The largest answer, in bytes: an explanation of many rules.
const MAX_ANSWER: u64 = 16 << 20;

const SHOW_ONE: &str = "if it asks for a certificate, show one with --client-cert and --client-key";
const USE_HTTP: &str =
    "name the address of a tollgate server's HTTP front end, with https:// if it has certificates";

/// A server, and how to show oneself to it. Clones share their connections.
#[derive(Clone)]
pub(crate) struct Client {
    server: String,
    token: Option<String>,
    agent: Agent,
}

/// Where certificates are.
pub(crate) struct Files<'a> {
    pub(crate) ca: &'a Option<PathBuf>,
    pub(crate) cert: &'a Option<PathBuf>,
    pub(crate) key: &'a Option<PathBuf>,
}

impl Client {
    pub(crate) fn new(server: &str, token: Option<String>, files: Files<'_>) -> Result<Self, Box<dyn Error>> {
        let server = server.trim_end_matches('/').to_owned();
        let is_encrypted = match server.parse::<Uri>().ok().as_ref().and_then(Uri::scheme_str) {
            Some("http") => false,
            Some("https") => true,
            _ => {
                return Err(format!(
                    "{server:?} is no server's URL: write for example http://127.0.0.1:8080"
                )
                .into());
            }
        };
        if !is_encrypted && (files.ca.is_some() || files.cert.is_some()) {
            return Err(
                format!("{server} is not encrypted: use https://, or leave the certificates out").into()
            );
        }
        let mut config = Agent::config_builder()
            .timeout_global(Some(PATIENCE))
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            // the environment is not read here
            .proxy(None)
            .user_agent(concat!("tollgate/", env!("CARGO_PKG_VERSION")));
        if is_encrypted {
            config = config.tls_config(files.tls()?);
        }
        Ok(Self { server, token, agent: config.build().into() })
    }

    /// Sends a body; status and body of the answer.
    pub(crate) fn post(&self, path: &str, body: &[u8]) -> Result<(u16, Vec<u8>), String> {
        self.try_post(path, body).map_err(|error| self.remedy(&error))
    }

    fn try_post(&self, path: &str, body: &[u8]) -> Result<(u16, Vec<u8>), ureq::Error> {
        let mut request = self.agent.post(format!("{}{path}", self.server)).content_type("application/json");
        if let Some(token) = &self.token {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        let mut response = request.send(body)?;
        let body = response.body_mut().with_config().limit(MAX_ANSWER).read_to_vec()?;
        Ok((response.status().as_u16(), body))
    }

    fn remedy(&self, error: &ureq::Error) -> String {
        let server = &self.server;
        match error {
            ureq::Error::Io(io) if io.kind() == ErrorKind::ConnectionRefused => format!(
                "nothing listens at {server}: start a server with tollgate serve, name another with --server or \
                 TOLLGATE_SERVER, or ask a store directly with --config or --store"
            ),
            error if is_unknown_host(error) => {
                format!("the host of {server} is not known: correct --server or TOLLGATE_SERVER")
            }
            ureq::Error::Timeout(_) => format!(
                "no answer from {server} within {} s: see that it is a tollgate server's HTTP address, and its log",
                PATIENCE.as_secs()
            ),
            ureq::Error::Http(_) if self.token.is_some() => {
                "the token in TOLLGATE_TOKEN has characters that no header may have: correct it".to_owned()
            }
            ureq::Error::Rustls(tls) => untrusted(server, tls),
            ureq::Error::Io(io) => match io.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>())
            {
                Some(tls) => untrusted(server, tls),
                // a server that misses a certificate says so only after the handshake, and may hang up first
                None if server.starts_with("https") => format!("{server} broke off: {io}: {SHOW_ONE}"),
                None => format!("{server}: {io}: {USE_HTTP}"),
            },
            ureq::Error::Protocol(_) => format!("{server} does not speak HTTP as it was asked: {USE_HTTP}"),
            other => format!("{server}: {other}"),
        }
    }
}

/// What does not resolve comes as an error of the system, which has no kind of its own for it.
fn is_unknown_host(error: &ureq::Error) -> bool {
    match error {
        ureq::Error::HostNotFound => true,
        ureq::Error::Io(io) => io.to_string().starts_with("failed to lookup address"),
        _ => false,
    }
}

fn untrusted(server: &str, error: &rustls::Error) -> String {
    let remedy = match error {
        rustls::Error::InvalidCertificate(_) => "name the authority of its certificate with --ca",
        rustls::Error::AlertReceived(_) => SHOW_ONE,
        _ => "use http:// if it has no certificates",
    };
    format!("no encrypted connection to {server}: {error}: {remedy}")
}

impl Files<'_> {
    fn tls(&self) -> Result<TlsConfig, Box<dyn Error>> {
        let authorities = match self.ca {
            Some(path) => certificates("--ca", path)?,
            None => of_system()?,
        };
        let shown = match (self.cert, self.key) {
            (Some(cert), Some(key)) => {
                Some(ClientCert::new_with_certs(&certificates("--client-cert", cert)?, private_key(key)?))
            }
            _ => None,
        };
        Ok(TlsConfig::builder()
            .root_certs(RootCerts::new_with_certs(&authorities))
            .client_cert(shown)
            .unversioned_rustls_crypto_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .build())
    }
}

/// The authorities that the system trusts; those that cannot be read are left out, as others do.
fn of_system() -> Result<Vec<Certificate<'static>>, Box<dyn Error>> {
    let found = rustls_native_certs::load_native_certs().certs;
    if found.is_empty() {
        return Err("this system trusts no authority: name one with --ca".into());
    }
    Ok(found.iter().map(|certificate| Certificate::from_der(certificate).to_owned()).collect())
}

fn certificates(flag: &'static str, path: &Path) -> Result<Vec<Certificate<'static>>, Box<dyn Error>> {
    let certificates = items(flag, path)?.into_iter().filter_map(|item| match item {
        PemItem::Certificate(certificate) => Some(certificate),
        _ => None,
    });
    let certificates: Vec<_> = certificates.collect();
    if certificates.is_empty() {
        return Err(format!("{flag}: {} has no certificate: name a file of PEM", path.display()).into());
    }
    Ok(certificates)
}

fn private_key(path: &Path) -> Result<PrivateKey<'static>, Box<dyn Error>> {
    let key = items("--client-key", path)?.into_iter().find_map(|item| match item {
        PemItem::PrivateKey(key) => Some(key),
        _ => None,
    });
    Ok(key
        .ok_or_else(|| format!("--client-key: {} has no private key: name a file of PEM", path.display()))?)
}

fn items(flag: &'static str, path: &Path) -> Result<Vec<PemItem<'static>>, Box<dyn Error>> {
    let pem = read_flag_file(flag, path).map_err(StartError::from)?;
    let items: Result<Vec<_>, _> = parse_pem(&pem).collect();
    items.map_err(|error| format!("{flag}: {}: {error}", path.display()).into())
}
