//! The build without the feature `tls`: connections are not encrypted, and a URL that requires TLS is an error.

use std::io;

use tokio::net::TcpStream;

use super::{RedisSetupError, connector::Stream, settings::RedisSettings};

/// Never exists.
pub(super) enum TlsDialer {}

impl TlsDialer {
    pub(super) fn new(is_tls: bool, settings: &RedisSettings) -> Result<Option<Self>, RedisSetupError> {
        if is_tls || settings.authority.is_some() || settings.identity.is_some() {
            return Err(RedisSetupError::Tls("this build has no TLS: enable the feature `tls`".to_owned()));
        }
        Ok(None)
    }

    pub(super) async fn connect(&self, _: &str, _: TcpStream) -> io::Result<Stream> {
        match *self {}
    }
}
