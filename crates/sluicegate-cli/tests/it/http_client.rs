//! An HTTP client with one persistent connection and no retries.

#![expect(clippy::unwrap_used, reason = "a failing helper fails the test")]

use std::{
    fs,
    io::{self, BufRead, BufReader, ErrorKind, Read, Write},
    net::TcpStream,
    path::Path,
    sync::Arc,
};

use rustls::{
    ClientConfig, ClientConnection, RootCertStore, StreamOwned,
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject},
};
use serde_json::Value;
use sluicegate_testkit::{tls::Certificates, wait::PATIENCE};

trait Stream: Read + Write + Send {}
impl<T: Read + Write + Send> Stream for T {}

pub(crate) struct Client {
    stream: BufReader<Box<dyn Stream>>,
    host: String,
}

pub(crate) struct HttpResponse {
    pub(crate) status: u16,
    /// In lower case.
    pub(crate) head: String,
    pub(crate) body: String,
}

impl HttpResponse {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.body))
    }

    /// Whether the server closes the connection.
    pub(crate) fn closes_connection(&self) -> bool {
        self.head.contains("connection: close")
    }
}

impl Client {
    pub(crate) fn connect(address: &str) -> io::Result<Self> {
        Ok(Self::over(address, Box::new(connect(address)?)))
    }

    /// Connects with TLS. Trusts the authority at this path, and uses the client certificate, if any.
    pub(crate) fn connect_tls(
        address: &str,
        authority: &Path,
        client: Option<&Certificates>,
    ) -> io::Result<Self> {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_file(authority).unwrap()).unwrap();
        let builder = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots);
        let config = match client {
            None => builder.with_no_client_auth(),
            Some(files) => {
                let chain = vec![CertificateDer::from_pem_file(&files.client_certificate).unwrap()];
                let key = PrivateKeyDer::from_pem_slice(&fs::read(&files.client_key).unwrap()).unwrap();
                builder.with_client_auth_cert(chain, key).unwrap()
            }
        };
        let connection =
            ClientConnection::new(Arc::new(config), ServerName::try_from("localhost").unwrap()).unwrap();
        Ok(Self::over(address, Box::new(StreamOwned::new(connection, connect(address)?))))
    }

    fn over(address: &str, stream: Box<dyn Stream>) -> Self {
        Self { stream: BufReader::new(stream), host: address.to_owned() }
    }

    pub(crate) fn get(&mut self, path: &str) -> io::Result<HttpResponse> {
        self.call(&format!("GET {path}"), &[], "")
    }

    pub(crate) fn post(&mut self, path: &str, body: &str) -> io::Result<HttpResponse> {
        self.call(&format!("POST {path}"), &[], body)
    }

    /// Sends a request with these headers and reads the response.
    pub(crate) fn call(
        &mut self,
        target: &str,
        headers: &[(&str, &str)],
        body: &str,
    ) -> io::Result<HttpResponse> {
        let mut request = format!("{target} HTTP/1.1\r\ncontent-length: {}\r\n", body.len());
        if !headers.iter().any(|(name, _)| *name == "host") {
            request.push_str(&format!("host: {}\r\n", self.host));
        }
        for (name, value) in headers {
            request.push_str(&format!("{name}: {value}\r\n"));
        }
        request.push_str(&format!("\r\n{body}"));
        self.send(request.as_bytes())?;
        self.read_response()
    }

    pub(crate) fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.get_mut().write_all(bytes)?;
        self.stream.get_mut().flush()
    }

    pub(crate) fn read_response(&mut self) -> io::Result<HttpResponse> {
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            if self.stream.read_line(&mut head)? == 0 {
                return Err(io::Error::new(
                    ErrorKind::UnexpectedEof,
                    format!("connection closed after {head:?}"),
                ));
            }
        }
        let head = head.to_ascii_lowercase();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
        let mut body = vec![0; length.unwrap_or("0").parse().unwrap()];
        self.stream.read_exact(&mut body)?;
        Ok(HttpResponse { status, head, body: String::from_utf8(body).unwrap() })
    }
}

fn connect(address: &str) -> io::Result<TcpStream> {
    let stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    stream.set_nodelay(true)?;
    Ok(stream)
}
