//! Connection settings beyond the URL: passwords, certificates, a client name. Secrets are never printed.
//!
//! These are values only; the caller reads them from files or the environment.

use std::fmt;

/// The default name of connections in `CLIENT LIST`.
pub const DEFAULT_CLIENT_NAME: &str = "sluicegate";

/// A string that is never printed.
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

/// User and password. Without a user, the password is that of the user `default`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Credentials {
    pub(super) user: Option<String>,
    pub(super) password: Option<Secret>,
}

/// A client certificate and its key, as PEM.
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

/// Connection settings. They take precedence over the URL.
///
/// ```
/// use sluicegate::redis::RedisSettings;
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
    /// Sets the ACL user of the data servers.
    pub fn user(mut self, user: impl Into<String>) -> Self {
        self.data.user = Some(user.into());
        self
    }

    /// Sets the password of the data servers.
    pub fn password(mut self, password: impl Into<Secret>) -> Self {
        self.data.password = Some(password.into());
        self
    }

    /// Sets the ACL user of the sentinels.
    pub fn sentinel_user(mut self, user: impl Into<String>) -> Self {
        self.sentinel.user = Some(user.into());
        self
    }

    /// Sets the password of the sentinels. By default they are used without one.
    pub fn sentinel_password(mut self, password: impl Into<Secret>) -> Self {
        self.sentinel.password = Some(password.into());
        self
    }

    /// Sets the database; a Cluster has only 0.
    pub fn database(mut self, number: u32) -> Self {
        self.database = Some(number);
        self
    }

    /// Sets the name of the connections in `CLIENT LIST`: 1 to 64 visible ASCII characters.
    pub fn client_name(mut self, name: impl Into<String>) -> Self {
        self.client_name = Some(name.into());
        self
    }

    /// Sets the trusted certificate authorities, instead of the system's, as PEM.
    pub fn authority(mut self, pem: impl Into<Vec<u8>>) -> Self {
        self.authority = Some(pem.into());
        self
    }

    /// Sets the client certificate and its key, as PEM.
    pub fn client_certificate(mut self, certificate: impl Into<Vec<u8>>, key: impl Into<Vec<u8>>) -> Self {
        self.identity = Some(Identity { certificate: certificate.into(), key: key.into() });
        self
    }
}
