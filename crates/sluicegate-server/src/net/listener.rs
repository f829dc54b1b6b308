//! Binding addresses, and the process's limit on open files.

use std::{io, net::SocketAddr};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::net::{TcpListener, TcpSocket};

/// Why the server cannot listen.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ListenError {
    /// The address is in use, or does not belong to this machine.
    #[error(
        "cannot listen on {address}: {reason}; stop the process that uses it, or choose another address with --http, --grpc or \
         --resp (port 0 picks a free port)"
    )]
    Bind {
        /// The address.
        address: SocketAddr,
        /// The error of the operating system.
        reason: io::Error,
    },
    /// A certificate or key is invalid.
    #[error("server.tls: {0}")]
    Certificates(String),
}

/// Raises the soft limit on open files to the hard limit, because every connection is one file. Returns the
/// resulting limit.
pub fn raise_open_files_limit() -> u64 {
    let mut files = getrlimit(Resource::Nofile);
    if files.current != files.maximum {
        let raised = Rlimit { current: files.maximum, ..files };
        if setrlimit(Resource::Nofile, raised).is_ok() {
            files = raised;
        }
    }
    files.current.unwrap_or(u64::MAX)
}

/// How many connections the system may hold until they are accepted. Connections beyond it are retried by the client after a second.
const BACKLOG: u32 = 4_096;

/// Binds an address; port 0 picks a free port. Returns the listener and the address with its actual port.
///
/// # Errors
/// When the address is in use, or does not belong to this machine.
pub async fn bind(address: SocketAddr) -> Result<(TcpListener, SocketAddr), ListenError> {
    let bound = async {
        let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
        // As `TcpListener::bind` does: a restarted server binds at once.
        socket.set_reuseaddr(true)?;
        socket.bind(address)?;
        let listener = socket.listen(BACKLOG)?;
        let address = listener.local_addr()?;
        Ok((listener, address))
    };
    bound.await.map_err(|reason| ListenError::Bind { address, reason })
}
