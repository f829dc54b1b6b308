//! HTTP client of a server. Its error messages state the fix.

use std::{
    error::Error,
    io::ErrorKind,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use sluicegate_server::{config::read_flag_file, server::StartError};
use ureq::{
    Agent, Body,
    http::{Response, Uri},
    tls::{Certificate, ClientCert, PemItem, PrivateKey, RootCerts, TlsConfig, parse_pem},
};

/// The environment variable that sets the server, unless a flag does.
pub(crate) const SERVER_VARIABLE: &str = "SLUICEGATE_SERVER";

/// Timeout of a call, including connecting.
const TIMEOUT: Duration = Duration::from_secs(10);

/// The largest accepted response in bytes. Explanations of many rules are the largest.
const MAX_RESPONSE_BYTES: u64 = 16 << 20;

const CLIENT_CERT_HINT: &str =
    "if the server requires a client certificate, set --client-cert and --client-key";
const HTTP_ADDRESS_HINT: &str =
    "use the address of a sluicegate server's HTTP front end, with https:// if it uses TLS";

/// A client of one server. Clones share their connections.
#[derive(Clone)]
pub(crate) struct HttpClient {
    server: String,
    token: Option<String>,
    agent: Agent,
}

/// Paths of the certificates.
pub(crate) struct TlsFiles<'a> {
    pub(crate) ca: &'a Option<PathBuf>,
    pub(crate) cert: &'a Option<PathBuf>,
    pub(crate) key: &'a Option<PathBuf>,
}

impl HttpClient {
    pub(crate) fn new(
        server: &str,
        token: Option<String>,
        files: TlsFiles<'_>,
    ) -> Result<Self, Box<dyn Error>> {
        let server = server.trim_end_matches('/').to_owned();
        let is_encrypted = match server.parse::<Uri>().ok().as_ref().and_then(Uri::scheme_str) {
            Some("http") => false,
            Some("https") => true,
            _ => {
                return Err(
                    format!("{server:?} is not a server URL: use for example http://127.0.0.1:8080").into()
                );
            }
        };
        if !is_encrypted && (files.ca.is_some() || files.cert.is_some()) {
            return Err(
                format!("{server} does not use TLS: use https://, or remove the certificate flags").into()
            );
        }
        let mut config = Agent::config_builder()
            .timeout_global(Some(TIMEOUT))
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            // proxies are not taken from the environment
            .proxy(None)
            .user_agent(concat!("sluicegate/", env!("CARGO_PKG_VERSION")));
        if is_encrypted {
            config = config.tls_config(files.tls()?);
        }
        Ok(Self { server, token, agent: config.build().into() })
    }

    /// Posts a body; returns the status and body of the response.
    pub(crate) fn post(&self, path: &str, body: &[u8]) -> Result<(u16, Vec<u8>), String> {
        self.try_post(path, body).map_err(|error| self.error_message(&error))
    }

    fn try_post(&self, path: &str, body: &[u8]) -> Result<(u16, Vec<u8>), ureq::Error> {
        let mut request = self.agent.post(format!("{}{path}", self.server)).content_type("application/json");
        if let Some(token) = &self.token {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        read(request.send(body)?)
    }

    /// Gets a path that needs no token; returns the status and body of the response.
    pub(crate) fn get(&self, path: &str) -> Result<(u16, Vec<u8>), String> {
        let response = self.agent.get(format!("{}{path}", self.server)).call();
        response.and_then(read).map_err(|error| self.error_message(&error))
    }

    fn error_message(&self, error: &ureq::Error) -> String {
        let server = &self.server;
        match error {
            ureq::Error::Io(io) if io.kind() == ErrorKind::ConnectionRefused => format!(
                "connection to {server} refused: start a server with sluicegate serve, set another with --server or \
                 SLUICEGATE_SERVER, or call a store directly with --config or --store"
            ),
            error if is_unknown_host(error) => {
                format!("cannot resolve the host of {server}: correct --server or SLUICEGATE_SERVER")
            }
            ureq::Error::Timeout(_) => format!(
                "no response from {server} within {} s: check that it is a sluicegate server's HTTP address, and its log",
                TIMEOUT.as_secs()
            ),
            ureq::Error::Http(_) if self.token.is_some() => {
                "SLUICEGATE_TOKEN contains characters that are not valid in a header: correct it".to_owned()
            }
            ureq::Error::Rustls(tls) => tls_error(server, tls),
            ureq::Error::Io(io) => match io.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>())
            {
                Some(tls) => tls_error(server, tls),
                // the alert about a missing client certificate follows the handshake; the connection may be closed before
                None if server.starts_with("https") => {
                    format!("{server} closed the connection: {io}: {CLIENT_CERT_HINT}")
                }
                None => format!("{server}: {io}: {HTTP_ADDRESS_HINT}"),
            },
            ureq::Error::Protocol(_) => format!("{server} did not respond with HTTP: {HTTP_ADDRESS_HINT}"),
            other => format!("{server}: {other}"),
        }
    }
}

fn read(mut response: Response<Body>) -> Result<(u16, Vec<u8>), ureq::Error> {
    let body = response.body_mut().with_config().limit(MAX_RESPONSE_BYTES).read_to_vec()?;
    Ok((response.status().as_u16(), body))
}

/// The standard library has no error kind for failed name resolution.
fn is_unknown_host(error: &ureq::Error) -> bool {
    match error {
        ureq::Error::HostNotFound => true,
        ureq::Error::Io(io) => io.to_string().starts_with("failed to lookup address"),
        _ => false,
    }
}

fn tls_error(server: &str, error: &rustls::Error) -> String {
    let remedy = match error {
        rustls::Error::InvalidCertificate(_) => "set --ca to the authority of its certificate",
        rustls::Error::AlertReceived(_) => CLIENT_CERT_HINT,
        _ => "use http:// if the server does not use TLS",
    };
    format!("TLS connection to {server} failed: {error}: {remedy}")
}

impl TlsFiles<'_> {
    fn tls(&self) -> Result<TlsConfig, Box<dyn Error>> {
        let authorities = match self.ca {
            Some(path) => certificates("--ca", path)?,
            None => system_authorities()?,
        };
        let client_cert = match (self.cert, self.key) {
            (Some(cert), Some(key)) => {
                Some(ClientCert::new_with_certs(&certificates("--client-cert", cert)?, private_key(key)?))
            }
            _ => None,
        };
        Ok(TlsConfig::builder()
            .root_certs(RootCerts::new_with_certs(&authorities))
            .client_cert(client_cert)
            .unversioned_rustls_crypto_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .build())
    }
}

/// The authorities that the system trusts; unreadable ones are skipped.
fn system_authorities() -> Result<Vec<Certificate<'static>>, Box<dyn Error>> {
    let found = rustls_native_certs::load_native_certs().certs;
    if found.is_empty() {
        return Err("this system has no trusted certificate authorities: set --ca".into());
    }
    Ok(found.iter().map(|certificate| Certificate::from_der(certificate).to_owned()).collect())
}

fn certificates(flag: &'static str, path: &Path) -> Result<Vec<Certificate<'static>>, Box<dyn Error>> {
    let certificates = pem_items(flag, path)?.into_iter().filter_map(|item| match item {
        PemItem::Certificate(certificate) => Some(certificate),
        _ => None,
    });
    let certificates: Vec<_> = certificates.collect();
    if certificates.is_empty() {
        return Err(format!("{flag}: {} contains no certificate: use a PEM file", path.display()).into());
    }
    Ok(certificates)
}

fn private_key(path: &Path) -> Result<PrivateKey<'static>, Box<dyn Error>> {
    let key = pem_items("--client-key", path)?.into_iter().find_map(|item| match item {
        PemItem::PrivateKey(key) => Some(key),
        _ => None,
    });
    Ok(key
        .ok_or_else(|| format!("--client-key: {} contains no private key: use a PEM file", path.display()))?)
}

fn pem_items(flag: &'static str, path: &Path) -> Result<Vec<PemItem<'static>>, Box<dyn Error>> {
    let pem = read_flag_file(flag, path).map_err(StartError::from)?;
    let items: Result<Vec<_>, _> = parse_pem(&pem).collect();
    items.map_err(|error| format!("{flag}: {}: {error}", path.display()).into())
}
