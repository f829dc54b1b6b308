//! Certificates and the TLS handshake.

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

/// How long a TLS handshake may take.
pub const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// The application protocol of a listener, negotiated by ALPN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// HTTP/1.1.
    Http1,
    /// HTTP/2, for gRPC.
    Http2,
    /// The Redis protocol, which has no ALPN name.
    Redis,
}

/// Performs TLS handshakes, or none if TLS is off. Cheap to clone; all clones share the certificates.
#[derive(Clone, Default)]
pub struct TlsAcceptor(Option<Arc<ArcSwap<Certificates>>>);

/// One set of certificates, with a configuration for each protocol.
pub struct Certificates {
    http1: Arc<ServerConfig>,
    http2: Arc<ServerConfig>,
    redis: Arc<ServerConfig>,
}

impl TlsAcceptor {
    /// Uses these certificates, or turns TLS off.
    ///
    /// # Errors
    /// When a certificate or key is invalid.
    pub fn new(tls: Option<&Tls>) -> Result<Self, ListenError> {
        let certificates = tls.map(Certificates::parse).transpose()?;
        Ok(Self(certificates.map(|certificates| Arc::new(ArcSwap::from_pointee(certificates)))))
    }

    /// Replaces the certificates for new connections. Does nothing if TLS is off.
    pub fn replace(&self, certificates: Certificates) {
        if let Some(current) = &self.0 {
            current.store(Arc::new(certificates));
        }
    }

    /// Performs the handshake of one connection.
    ///
    /// # Errors
    /// When the handshake fails or takes longer than [`HANDSHAKE_TIMEOUT`].
    pub async fn accept(&self, stream: TcpStream, protocol: Protocol) -> io::Result<Stream> {
        let stream = stream::plain(stream);
        let Some(certificates) = &self.0 else { return Ok(Either::Left(stream)) };
        let config = certificates.load().for_protocol(protocol);
        // Boxed to keep the tasks of connections without TLS small.
        let handshake = Box::pin(tokio_rustls::TlsAcceptor::from(config).accept(stream));
        timeout(HANDSHAKE_TIMEOUT, handshake).await?.map(|stream| Either::Right(Box::new(stream)))
    }
}

impl Certificates {
    /// Parses certificates and key.
    ///
    /// # Errors
    /// When one is invalid.
    pub fn parse(tls: &Tls) -> Result<Self, ListenError> {
        let invalid = |what: &str, error: &dyn std::fmt::Display| {
            ListenError::Certificates(format!("{what} cannot be used: {error}"))
        };
        // Fails if the application has installed a provider, which is then used.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let chain: Vec<_> = CertificateDer::pem_slice_iter(&tls.cert)
            .collect::<Result<_, _>>()
            .map_err(|error| invalid("cert", &error))?;
        let key = PrivateKeyDer::from_pem_slice(&tls.key).map_err(|error| invalid("key", &error))?;
        let builder = match &tls.client_ca {
            None => ServerConfig::builder().with_no_client_auth(),
            Some(authorities) => {
                let mut roots = RootCertStore::empty();
                for certificate in CertificateDer::pem_slice_iter(authorities) {
                    let certificate = certificate.map_err(|error| invalid("client_ca", &error))?;
                    roots.add(certificate).map_err(|error| invalid("client_ca", &error))?;
                }
                let verifier = WebPkiClientVerifier::builder(Arc::new(roots))
                    .build()
                    .map_err(|error| invalid("client_ca", &error))?;
                ServerConfig::builder().with_client_cert_verifier(verifier)
            }
        };
        let config = builder.with_single_cert(chain, key).map_err(|error| invalid("cert and key", &error))?;
        let with_alpn = |protocols: &[&[u8]]| {
            let mut config = config.clone();
            config.alpn_protocols = protocols.iter().map(|name| name.to_vec()).collect();
            Arc::new(config)
        };
        Ok(Self { http1: with_alpn(&[b"http/1.1"]), http2: with_alpn(&[b"h2"]), redis: with_alpn(&[]) })
    }

    fn for_protocol(&self, protocol: Protocol) -> Arc<ServerConfig> {
        Arc::clone(match protocol {
            Protocol::Http1 => &self.http1,
            Protocol::Http2 => &self.http2,
            Protocol::Redis => &self.redis,
        })
    }
}
