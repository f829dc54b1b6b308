//! Where connections come in: an address, and the certificates that its connections are secured with.

use std::{io, net::SocketAddr, pin::Pin, sync::Arc, time::Duration};

use arc_swap::ArcSwap;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustls::{
    RootCertStore, ServerConfig,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
    server::WebPkiClientVerifier,
};
use tokio::{
    net::{TcpListener, TcpStream},
    time::timeout,
};
use tokio_io_timeout::TimeoutWriter;
use tokio_rustls::{TlsAcceptor, server::TlsStream};
use tokio_util::either::Either;

use crate::config::Tls;

/// How long a client may take to agree on encryption.
pub const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// How long a client may read nothing of what is sent to it; then the connection is broken off. Of what the system holds for it, Linux
/// notices a third at a time: with megabytes waiting, a client that reads less than that in this time reads nothing.
pub const WRITE_TIMEOUT: Duration = Duration::from_secs(10);

/// A connection, encrypted or not. Writing to a client that does not read is an error after [`WRITE_TIMEOUT`].
pub type Stream = Either<Patient, TlsStream<Patient>>;

/// What is sent as it is. There is a timer only while the system takes no more.
type Patient = Pin<Box<TimeoutWriter<TcpStream>>>;

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

/// Why a server cannot listen.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ListenError {
    /// The address is taken or not this machine's.
    #[error(
        "cannot listen on {address}: {reason}; end what listens there, or use --http, --grpc or --resp for another address, whose \
         port may be 0 for any"
    )]
    Bind {
        /// The address.
        address: SocketAddr,
        /// What the system says.
        reason: io::Error,
    },
    /// A certificate or key cannot be used.
    #[error("server.tls: {0}")]
    Certificates(String),
}

/// Lets the process open as many files as the system permits: each connection is one. How many that is.
pub fn allow_open_files() -> u64 {
    let mut files = getrlimit(Resource::Nofile);
    if files.current != files.maximum {
        let asked = Rlimit { current: files.maximum, ..files };
        if setrlimit(Resource::Nofile, asked).is_ok() {
            files = asked;
        }
    }
    files.current.unwrap_or(u64::MAX)
}

/// Takes an address; with port 0, any free port of it. The address that it is.
///
/// # Errors
/// When the address is taken or not this machine's.
pub async fn bind(address: SocketAddr) -> Result<(TcpListener, SocketAddr), ListenError> {
    let bound = async {
        let listener = TcpListener::bind(address).await?;
        let address = listener.local_addr()?;
        Ok((listener, address))
    };
    bound.await.map_err(|reason| ListenError::Bind { address, reason })
}

/// What connections are secured with: nothing, or certificates that can be exchanged. Cheap to clone; all clones change
/// together.
#[derive(Clone, Default)]
pub struct Security(Option<Arc<ArcSwap<Certificates>>>);

/// One set of certificates, ready for each protocol.
pub struct Certificates {
    http1: Arc<ServerConfig>,
    http2: Arc<ServerConfig>,
    redis: Arc<ServerConfig>,
}

impl Security {
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
    pub async fn secure(&self, stream: TcpStream, protocol: Protocol) -> io::Result<Stream> {
        // Answers are small and waited for. Where this cannot be set, they are only slower.
        let _set = stream.set_nodelay(true);
        let mut stream = Box::pin(TimeoutWriter::new(stream));
        stream.as_mut().set_timeout_pinned(Some(WRITE_TIMEOUT));
        let Some(certificates) = &self.0 else { return Ok(Either::Left(stream)) };
        let config = certificates.load().for_protocol(protocol);
        timeout(HANDSHAKE_TIMEOUT, TlsAcceptor::from(config).accept(stream)).await?.map(Either::Right)
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
