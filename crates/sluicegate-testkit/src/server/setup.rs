//! Which server to start, and its configuration.

use std::fmt::{self, Display};
use std::path::{Path, PathBuf};

use super::Server;
use crate::namespace::Side;
use crate::tls::{Certificates, ClientCertificates};

/// The servers sluicegate is tested against.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Flavor {
    /// Redis 6.2, the oldest supported: no functions, no `EVAL_RO`.
    Redis6,
    /// Redis 7, as Debian packages it.
    Redis7,
    /// Valkey 9.
    Valkey9,
}

impl Flavor {
    /// Every flavor, oldest first.
    pub const ALL: [Flavor; 3] = [Flavor::Redis6, Flavor::Redis7, Flavor::Valkey9];

    /// Returns the program: a path, or a name to look up in `PATH`.
    pub(super) fn program(self) -> PathBuf {
        let servers = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.servers");
        match self {
            Flavor::Redis6 => servers.join("redis-6.2/redis-server"),
            Flavor::Redis7 => PathBuf::from("redis-server"),
            Flavor::Valkey9 => servers.join("valkey-9.1/valkey-server"),
        }
    }
}

impl Display for Flavor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Flavor::Redis6 => "Redis 6.2",
            Flavor::Redis7 => "Redis 7",
            Flavor::Valkey9 => "Valkey 9",
        })
    }
}

/// The configuration of a server.
///
/// ```no_run
/// # use sluicegate_testkit::server::{Flavor, Setup};
/// let server = Setup::new(Flavor::Redis7).password("secret").args(&["--maxmemory", "2mb"]).start();
/// ```
#[derive(Clone, Debug)]
pub struct Setup {
    pub(super) flavor: Flavor,
    pub(super) args: Vec<String>,
    pub(super) password: Option<String>,
    pub(super) tls: Option<ClientCertificates>,
    /// Shared certificates of a group of servers.
    pub(super) certificates: Option<Certificates>,
    pub(super) side: Option<Side>,
    pub(super) role: Role,
}

/// The role of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Role {
    Store,
    ClusterNode,
    /// With the text of its configuration file, which the sentinel rewrites.
    Sentinel(String),
}

impl Setup {
    /// Returns a configuration without persistence, TLS and authentication.
    #[must_use]
    pub fn new(flavor: Flavor) -> Setup {
        Setup {
            flavor,
            args: Vec::new(),
            password: None,
            tls: None,
            certificates: None,
            side: None,
            role: Role::Store,
        }
    }

    /// Adds command line arguments, such as `["--maxmemory", "2mb"]`.
    #[must_use]
    pub fn args(mut self, args: &[&str]) -> Setup {
        self.args.extend(args.iter().map(ToString::to_string));
        self
    }

    /// Requires this password of every client. [`Server::connection`] uses it; [`Server::url`] does not contain it.
    #[must_use]
    pub fn password(mut self, password: &str) -> Setup {
        self.password = Some(password.to_string());
        self
    }

    /// Makes the port accept only TLS, with certificates of the server's own authority (see [`Server::tls`]). Requires
    /// Redis 7.
    #[must_use]
    pub fn tls(mut self, client_certificates: ClientCertificates) -> Setup {
        self.tls = Some(client_certificates);
        self
    }

    /// Makes the port accept only TLS, with certificates that a group of servers shares. Requires Redis 7.
    pub(crate) fn group_tls(mut self, certificates: &Certificates) -> Setup {
        self.tls = Some(ClientCertificates::Ignored);
        self.certificates = Some(certificates.clone());
        self.args(&["--tls-replication", "yes"])
    }

    /// Runs the server in a network namespace. Its address is that of the side.
    #[must_use]
    pub fn inside(mut self, side: &Side) -> Setup {
        self.side = Some(side.clone());
        self
    }

    /// Makes it a cluster node.
    pub(crate) fn cluster_node(mut self) -> Setup {
        self.role = Role::ClusterNode;
        self
    }

    /// Makes it a sentinel with this configuration.
    pub(crate) fn sentinel(mut self, config: String) -> Setup {
        self.role = Role::Sentinel(config);
        self
    }

    /// Starts the server, and returns when it answers.
    ///
    /// # Panics
    ///
    /// When the program is missing, does not start, or does not support the configuration.
    #[must_use]
    pub fn start(self) -> Server {
        Server::from_setup(self)
    }
}
