//! Certificates for tests: a private authority, a server certificate and a client certificate.
//!
//! Each call creates new keys, so the authority of one server is not trusted by another.

use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};

/// Whether a server requests client certificates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClientCertificates {
    /// Client certificates are ignored.
    Ignored,
    /// A certificate that is sent must be issued by the authority.
    Optional,
    /// A certificate issued by the authority is required.
    Required,
}

impl ClientCertificates {
    /// Returns the value of Redis's `tls-auth-clients`.
    pub(crate) fn setting(self) -> &'static str {
        match self {
            ClientCertificates::Ignored => "no",
            ClientCertificates::Optional => "optional",
            ClientCertificates::Required => "yes",
        }
    }
}

/// Paths of the PEM files of one authority. They are deleted with the directory they were issued in.
#[derive(Clone, Debug)]
pub struct Certificates {
    /// The certificate of the authority, which both sides trust.
    pub authority: PathBuf,
    /// The server's certificate: for `localhost` and its address.
    pub server_certificate: PathBuf,
    /// The server's key.
    pub server_key: PathBuf,
    /// A client's certificate.
    pub client_certificate: PathBuf,
    /// The client's key.
    pub client_key: PathBuf,
}

impl Certificates {
    /// Creates an authority and issues certificates into the directory, for a server with this address and for a client.
    ///
    /// # Panics
    ///
    /// When the directory cannot be written.
    #[must_use]
    pub fn issue(dir: &Path, server: IpAddr) -> Certificates {
        let file = |name: &str, text: String| {
            let path = dir.join(name);
            fs::write(&path, text).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            path
        };
        let (authority, issuer) = create_authority();
        let names = [String::from("localhost"), server.to_string()];
        let (server_certificate, server_key) = sign(&issuer, &names, ExtendedKeyUsagePurpose::ServerAuth);
        let (client_certificate, client_key) = sign(&issuer, &[], ExtendedKeyUsagePurpose::ClientAuth);
        Certificates {
            authority: file("authority.pem", authority),
            server_certificate: file("server.pem", server_certificate),
            server_key: file("server.key", server_key),
            client_certificate: file("client.pem", client_certificate),
            client_key: file("client.key", client_key),
        }
    }
}

fn create_authority() -> (String, Issuer<'static, KeyPair>) {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params.distinguished_name.push(DnType::CommonName, "sluicegate test authority");
    let key = KeyPair::generate().expect("a key pair");
    let certificate = params.self_signed(&key).expect("a self-signed certificate");
    (certificate.pem(), Issuer::new(params, key))
}

/// Returns a certificate and its key.
fn sign(
    issuer: &Issuer<'_, KeyPair>,
    names: &[String],
    purpose: ExtendedKeyUsagePurpose,
) -> (String, String) {
    let mut params = CertificateParams::new(names).expect("valid certificate names");
    params.extended_key_usages = vec![purpose];
    params.use_authority_key_identifier_extension = true;
    params.distinguished_name.push(DnType::CommonName, names.first().map_or("client", String::as_str));
    let key = KeyPair::generate().expect("a key pair");
    let certificate = params.signed_by(&key, issuer).expect("a signed certificate");
    (certificate.pem(), key.serialize_pem())
}
