//! What a connection needs beyond the URL: passwords, certificates, a name. None of it is ever printed but the name.
//!
//! Values only: reading them from files or the environment is the caller's part.

use std::fmt;

/// The name that connections bear in `CLIENT LIST` unless another is set.
pub const DEFAULT_CLIENT_NAME: &str = "tollgate";

/// A text that is never shown.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    pub(super) fn reveal(&self) -> &str {
        &self.0
    }
}

impl From<String> for Secret {
    fn from(text: String) -> Self {
        Self(text)
    }
}

impl From<&str> for Secret {
    fn from(text: &str) -> Self {
        Self(text.to_owned())
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

/// Who a client says it is. Without a user, the password is that of the user `default`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Credentials {
    pub(super) user: Option<String>,
    pub(super) password: Option<Secret>,
}

/// A client's certificate and its key, as PEM.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Identity {
    pub(super) certificate: Vec<u8>,
    pub(super) key: Vec<u8>,
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Identity(…)")
    }
}

/// How to connect, as far as the URL does not say it; what is set here beats the URL.
///
/// ```
/// use tollgate::redis::RedisSettings;
///
/// let settings = RedisSettings::default().user("limiter").password("s3cret").client_name("gateway-1");
/// assert!(!format!("{settings:?}").contains("s3cret"));
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RedisSettings {
    pub(super) data: Credentials,
    pub(super) sentinel: Credentials,
    pub(super) database: Option<u32>,
    pub(super) client_name: Option<String>,
    pub(super) authority: Option<Vec<u8>>,
    pub(super) identity: Option<Identity>,
}

impl RedisSettings {
    /// The ACL user of the servers that hold data.
    pub fn user(mut self, user: impl Into<String>) -> Self {
        self.data.user = Some(user.into());
        self
    }

    /// The password of the servers that hold data.
    pub fn password(mut self, password: impl Into<Secret>) -> Self {
        self.data.password = Some(password.into());
        self
    }

    /// The ACL user of the sentinels.
    pub fn sentinel_user(mut self, user: impl Into<String>) -> Self {
        self.sentinel.user = Some(user.into());
        self
    }

    /// The password of the sentinels; without one, they are asked without.
    pub fn sentinel_password(mut self, password: impl Into<Secret>) -> Self {
        self.sentinel.password = Some(password.into());
        self
    }

    /// The database; a Cluster has only 0.
    pub fn database(mut self, number: u32) -> Self {
        self.database = Some(number);
        self
    }

    /// The name of the connections in `CLIENT LIST`: 1 to 64 visible ASCII characters.
    pub fn client_name(mut self, name: impl Into<String>) -> Self {
        self.client_name = Some(name.into());
        self
    }

    /// The certificates of the authorities to trust instead of the system's, as PEM.
    pub fn authority(mut self, pem: impl Into<Vec<u8>>) -> Self {
        self.authority = Some(pem.into());
        self
    }

    /// The certificate by which servers know this client, and its key, as PEM.
    pub fn client_certificate(mut self, certificate: impl Into<Vec<u8>>, key: impl Into<Vec<u8>>) -> Self {
        self.identity = Some(Identity { certificate: certificate.into(), key: key.into() });
        self
    }
}
