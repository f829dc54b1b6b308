//! Where connections come in: an address, and the certificates that its connections are secured with.

use std::{io, sync::Arc, time::Duration};

use arc_swap::ArcSwap;
use rustls::{
    RootCertStore, ServerConfig,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
    server::WebPkiClientVerifier,
};
use tokio::{net::TcpStream, time::timeout};
use tokio_util::either::Either;

use super::{
    listener::ListenError,
    stream::{self, Stream},
};
use crate::config::Tls;

/// How long a client may take to agree on encryption.
pub const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// What is spoken on an address, which clients and server agree on when they encrypt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// HTTP/1.1.
    Http1,
    /// HTTP/2, for gRPC.
    Http2,
    /// The Redis protocol, which has no name there.
    Redis,
}

/// What connections are secured with: nothing, or certificates that can be exchanged. Cheap to clone; all clones change
/// together.
#[derive(Clone, Default)]
pub struct TlsAcceptor(Option<Arc<ArcSwap<Certificates>>>);

/// One set of certificates, ready for each protocol.
pub struct Certificates {
    http1: Arc<ServerConfig>,
    http2: Arc<ServerConfig>,
    redis: Arc<ServerConfig>,
}

impl TlsAcceptor {
    /// Secures connections with these certificates, or not at all.
    ///
    /// # Errors
    /// When they cannot be used.
    pub fn new(tls: Option<&Tls>) -> Result<Self, ListenError> {
        let certificates = tls.map(Certificates::read).transpose()?;
        Ok(Self(certificates.map(|certificates| Arc::new(ArcSwap::from_pointee(certificates)))))
    }

    /// Whether connections are encrypted.
    pub fn is_encrypted(&self) -> bool {
        self.0.is_some()
    }

    /// Secures new connections with these certificates from now on. Whether they are encrypted at all does not change.
    pub fn replace(&self, certificates: Certificates) {
        if let Some(current) = &self.0 {
            current.store(Arc::new(certificates));
        }
    }

    /// Agrees with a client on encryption, if there is any.
    ///
    /// # Errors
    /// When the client does not, or not in time.
    pub async fn accept(&self, stream: TcpStream, protocol: Protocol) -> io::Result<Stream> {
        let stream = stream::plain(stream);
        let Some(certificates) = &self.0 else { return Ok(Either::Left(stream)) };
        let config = certificates.load().for_protocol(protocol);
        timeout(HANDSHAKE_TIMEOUT, tokio_rustls::TlsAcceptor::from(config).accept(stream))
            .await?
            .map(Either::Right)
    }
}

impl Certificates {
    /// Makes them ready.
    ///
    /// # Errors
    /// When they cannot be used.
    pub fn read(tls: &Tls) -> Result<Self, ListenError> {
        let wrong = |what: &str, error: &dyn std::fmt::Display| {
            ListenError::Certificates(format!("{what} cannot be used: {error}"))
        };
        // the first to choose wins, which is the application, if it did
        let _ = rustls::crypto::ring::default_provider().install_default();
        let chain: Vec<_> = CertificateDer::pem_slice_iter(&tls.cert)
            .collect::<Result<_, _>>()
            .map_err(|error| wrong("cert", &error))?;
        let key = PrivateKeyDer::from_pem_slice(&tls.key).map_err(|error| wrong("key", &error))?;
        let builder = match &tls.client_ca {
            None => ServerConfig::builder().with_no_client_auth(),
            Some(authorities) => {
                let mut roots = RootCertStore::empty();
                for certificate in CertificateDer::pem_slice_iter(authorities) {
                    let certificate = certificate.map_err(|error| wrong("client_ca", &error))?;
                    roots.add(certificate).map_err(|error| wrong("client_ca", &error))?;
                }
                let verifier = WebPkiClientVerifier::builder(Arc::new(roots))
                    .build()
                    .map_err(|error| wrong("client_ca", &error))?;
                ServerConfig::builder().with_client_cert_verifier(verifier)
            }
        };
        let config = builder.with_single_cert(chain, key).map_err(|error| wrong("cert and key", &error))?;
        let speaking = |protocols: &[&[u8]]| {
            let mut config = config.clone();
            config.alpn_protocols = protocols.iter().map(|name| name.to_vec()).collect();
            Arc::new(config)
        };
        Ok(Self { http1: speaking(&[b"http/1.1"]), http2: speaking(&[b"h2"]), redis: speaking(&[]) })
    }

    fn for_protocol(&self, protocol: Protocol) -> Arc<ServerConfig> {
        Arc::clone(match protocol {
            Protocol::Http1 => &self.http1,
            Protocol::Http2 => &self.http2,
            Protocol::Redis => &self.redis,
        })
    }
}
