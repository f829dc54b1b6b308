//! TLS to the servers: the certificate authority, and the client certificate.

use std::{io, sync::Arc};

use rustls::{
    ClientConfig, RootCertStore,
    pki_types::{
        CertificateDer, PrivateKeyDer, ServerName,
        pem::{self, PemObject},
    },
};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use super::{RedisSetupError, connector::Stream, settings::RedisSettings};

/// Opens TLS connections.
pub(super) struct TlsDialer(TlsConnector);

impl TlsDialer {
    /// Returns `None` without TLS.
    pub(super) fn new(is_tls: bool, settings: &RedisSettings) -> Result<Option<Self>, RedisSetupError> {
        if is_tls {
            return Ok(Some(Self(connector(settings)?)));
        }
        match (&settings.authority, &settings.identity) {
            (None, None) => Ok(None),
            _ => Err(invalid("certificates are set, but the URL does not use TLS")),
        }
    }

    /// Performs the handshake with the server of this name.
    pub(super) async fn connect(&self, host: &str, stream: TcpStream) -> io::Result<Stream> {
        let name = ServerName::try_from(host.to_owned()).map_err(io::Error::other)?;
        Ok(Box::new(self.0.connect(name, stream).await?))
    }
}

fn connector(settings: &RedisSettings) -> Result<TlsConnector, RedisSetupError> {
    let RedisSettings { authority, identity, .. } = settings;
    // fails if the application has installed a provider, which then stays in use
    let _ = rustls::crypto::ring::default_provider().install_default();
    let roots = match authority {
        Some(pem) => roots_of(pem)?,
        None => system_roots()?,
    };
    let config = ClientConfig::builder().with_root_certificates(roots);
    let config = match identity {
        None => config.with_no_client_auth(),
        Some(identity) => {
            let chain = certificates(&identity.certificate, "client certificate")?;
            let key = PrivateKeyDer::from_pem_slice(&identity.key)
                .map_err(|error| invalid(&format!("the client key is not a PEM private key: {error}")))?;
            config.with_client_auth_cert(chain, key).map_err(|error| invalid(&error.to_string()))?
        }
    };
    Ok(TlsConnector::from(Arc::new(config)))
}

fn roots_of(pem: &[u8]) -> Result<RootCertStore, RedisSetupError> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(pem, "certificate authority")? {
        roots.add(certificate).map_err(|error| invalid(&error.to_string()))?;
    }
    Ok(roots)
}

/// Returns the certificate authorities that this machine trusts.
fn system_roots() -> Result<RootCertStore, RedisSetupError> {
    let loaded = rustls_native_certs::load_native_certs();
    let mut roots = RootCertStore::empty();
    if roots.add_parsable_certificates(loaded.certs).0 == 0 {
        let reasons: Vec<String> = loaded.errors.iter().map(ToString::to_string).collect();
        return Err(invalid(&format!(
            "this machine has no trusted certificate authorities ({}): set one",
            reasons.join("; ")
        )));
    }
    Ok(roots)
}

fn certificates(pem: &[u8], what: &str) -> Result<Vec<CertificateDer<'static>>, RedisSetupError> {
    let read: Result<Vec<_>, pem::Error> = CertificateDer::pem_slice_iter(pem).collect();
    match read {
        Ok(certificates) if certificates.is_empty() => {
            Err(invalid(&format!("the PEM of the {what} contains no certificate")))
        }
        Ok(certificates) => Ok(certificates),
        Err(error) => Err(invalid(&format!("the PEM of the {what} is invalid: {error}"))),
    }
}

fn invalid(reason: &str) -> RedisSetupError {
    RedisSetupError::Tls(reason.to_owned())
}
