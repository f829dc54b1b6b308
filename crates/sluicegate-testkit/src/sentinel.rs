//! A primary, its replicas and three sentinels: real processes that have discovered each other when [`Setup::start`] returns.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use tempfile::TempDir;

use crate::namespace::{Link, Side};
use crate::server::{self, Flavor, Server};
use crate::tls::Certificates;
use crate::wait;

/// The name of the primary in the configuration of the sentinels.
pub const NAME: &str = "sluicegate";

/// Number of sentinels.
pub const SENTINELS: usize = 3;

/// Number of sentinels that must agree that the primary is down.
const QUORUM: usize = 2;

/// How often sentinels announce themselves and query the servers, in milliseconds: during discovery, and the defaults of Redis.
const FAST_PERIODS: [(&str, u32); 2] = [("publish-period", 50), ("info-period", 50)];
const DEFAULT_PERIODS: [(&str, u32); 2] = [("publish-period", 2_000), ("info-period", 10_000)];

/// The configuration of a primary with sentinels.
#[derive(Clone, Debug)]
pub struct Setup {
    flavor: Flavor,
    replicas: usize,
    down_after: Duration,
    failover_timeout: Duration,
    password: Option<String>,
    sentinel_password: Option<String>,
    sides: Option<(Side, Side)>,
    args: Vec<String>,
    sentinel_lines: Vec<String>,
    is_encrypted: bool,
}

impl Setup {
    /// Returns a configuration with one replica, which takes over when the primary is silent for 500 ms.
    #[must_use]
    pub fn new(flavor: Flavor) -> Setup {
        Setup {
            flavor,
            replicas: 1,
            down_after: Duration::from_millis(500),
            failover_timeout: Duration::from_secs(2),
            password: None,
            sentinel_password: None,
            sides: None,
            args: Vec::new(),
            sentinel_lines: Vec::new(),
            is_encrypted: false,
        }
    }

    /// Sets the number of replicas.
    #[must_use]
    pub fn replicas(mut self, count: usize) -> Setup {
        self.replicas = count;
        self
    }

    /// Sets the time after which a silent primary counts as down.
    #[must_use]
    pub fn down_after(mut self, silence: Duration) -> Setup {
        self.down_after = silence;
        self
    }

    /// Sets the password of the data servers.
    #[must_use]
    pub fn password(mut self, password: &str) -> Setup {
        self.password = Some(password.to_string());
        self
    }

    /// Sets the password of the sentinels. Users of the sentinels are created with [`Server::set_user`].
    #[must_use]
    pub fn sentinel_password(mut self, password: &str) -> Setup {
        self.sentinel_password = Some(password.to_string());
        self
    }

    /// Runs the primary and one sentinel on the left side of a link, and everything else on the right side.
    #[must_use]
    pub fn across(mut self, link: &Link) -> Setup {
        self.sides = Some((link.left().clone(), link.right().clone()));
        self
    }

    /// Adds command line arguments to each data server, such as `["--min-replicas-to-write", "1"]`.
    #[must_use]
    pub fn args(mut self, args: &[&str]) -> Setup {
        self.args.extend(args.iter().map(ToString::to_string));
        self
    }

    /// Adds a line to the configuration of each sentinel, such as `sentinel resolve-hostnames yes`.
    #[must_use]
    pub fn sentinel_line(mut self, line: &str) -> Setup {
        self.sentinel_lines.push(line.to_string());
        self
    }

    /// Makes every port accept only TLS, on loopback, with certificates of one authority (see [`Server::tls`]). Requires Redis 7.
    #[must_use]
    pub fn tls(mut self) -> Setup {
        self.is_encrypted = true;
        self
    }

    /// Starts all processes, and returns when each sentinel has discovered the replicas and the other sentinels.
    ///
    /// # Panics
    ///
    /// When a process does not start, or discovery does not complete.
    #[must_use]
    pub fn start(self) -> Sentinels {
        let dir = self.is_encrypted.then(|| tempfile::tempdir().expect("a temporary directory"));
        let certificates =
            dir.as_ref().map(|dir| Certificates::issue(dir.path(), Ipv4Addr::LOCALHOST.into()));
        let certificates = certificates.as_ref();
        let nodes: Vec<Server> = (0..=self.replicas).map(|number| self.node(number, certificates)).collect();
        // Before the sentinels start: they query the replicas of a primary immediately, and then only after ten
        // seconds.
        nodes[1..].iter().for_each(|replica| replica.replicate(&nodes[0]));
        let config = self.config(nodes[0].addr());
        let sentinels = (0..SENTINELS).map(|number| self.sentinel(number, &config, certificates)).collect();
        let sentinels = Sentinels { nodes, sentinels, _certificates: dir };
        sentinels.wait_for_discovery();
        sentinels
    }

    fn node(&self, number: usize, certificates: Option<&Certificates>) -> Server {
        let args: Vec<&str> = self.args.iter().map(String::as_str).collect();
        let mut setup =
            server::Setup::new(self.flavor).args(&["--repl-diskless-sync-delay", "0"]).args(&args);
        if let Some(password) = &self.password {
            setup = setup.password(password).args(&["--masterauth", password]);
        }
        if let Some(certificates) = certificates {
            setup = setup.group_tls(certificates);
        }
        self.in_namespace(setup, number).start()
    }

    fn sentinel(&self, number: usize, config: &str, certificates: Option<&Certificates>) -> Server {
        let mut setup = server::Setup::new(self.flavor).sentinel(config.to_string());
        if let Some(password) = &self.sentinel_password {
            setup = setup.password(password);
        }
        if let Some(certificates) = certificates {
            setup = setup.group_tls(certificates);
        }
        self.in_namespace(setup, number).start()
    }

    fn in_namespace(&self, setup: server::Setup, number: usize) -> server::Setup {
        match &self.sides {
            None => setup,
            Some((left, _)) if number == 0 => setup.inside(left),
            Some((_, right)) => setup.inside(right),
        }
    }

    fn config(&self, primary: SocketAddr) -> String {
        let mut lines = vec![
            format!("sentinel monitor {NAME} {} {} {QUORUM}", primary.ip(), primary.port()),
            format!("sentinel down-after-milliseconds {NAME} {}", self.down_after.as_millis()),
            format!("sentinel failover-timeout {NAME} {}", self.failover_timeout.as_millis()),
            format!("sentinel parallel-syncs {NAME} 1"),
        ];
        if let Some(password) = &self.password {
            lines.push(format!("sentinel auth-pass {NAME} {password}"));
        }
        lines.extend(self.sentinel_lines.iter().cloned());
        lines.join("\n") + "\n"
    }
}

/// A primary with sentinels; all processes end on drop.
#[derive(Debug)]
pub struct Sentinels {
    nodes: Vec<Server>,
    sentinels: Vec<Server>,
    /// The directory of the shared certificates, if any; removed on drop.
    _certificates: Option<TempDir>,
}

impl Sentinels {
    /// Starts a primary with one replica and three sentinels.
    ///
    /// # Panics
    ///
    /// When a process does not start, or discovery does not complete.
    #[must_use]
    pub fn start(flavor: Flavor) -> Sentinels {
        Setup::new(flavor).start()
    }

    /// Returns the data servers. The first one starts as the primary.
    #[must_use]
    pub fn nodes(&self) -> &[Server] {
        &self.nodes
    }

    /// Returns a data server, to stop or restart it.
    pub fn node_mut(&mut self, node: usize) -> &mut Server {
        &mut self.nodes[node]
    }

    /// Returns the sentinels.
    #[must_use]
    pub fn sentinels(&self) -> &[Server] {
        &self.sentinels
    }

    /// Returns a sentinel, to stop or restart it.
    pub fn sentinel_mut(&mut self, sentinel: usize) -> &mut Server {
        &mut self.sentinels[sentinel]
    }

    /// Returns the URLs of the sentinels.
    #[must_use]
    pub fn urls(&self) -> Vec<String> {
        self.sentinels.iter().map(Server::url).collect()
    }

    /// Returns the primary according to the majority of the sentinels that answer (`SENTINEL get-master-addr-by-name`).
    ///
    /// # Panics
    ///
    /// When they do not agree in time.
    #[must_use]
    pub fn primary(&self) -> usize {
        wait::for_some("the sentinels agree on a primary", wait::PATIENCE, || self.majority())
    }

    /// Kills the primary, and returns which node it was. [`Sentinels::wait_for_other_primary`] waits for its replacement.
    ///
    /// # Panics
    ///
    /// When the sentinels report no primary.
    pub fn kill_primary(&mut self) -> usize {
        let primary = self.primary();
        self.nodes[primary].kill();
        primary
    }

    /// Waits until the majority of the sentinels reports another primary, which has assumed the role, and returns it.
    ///
    /// # Panics
    ///
    /// When that does not happen.
    pub fn wait_for_other_primary(&self, than: usize) -> usize {
        wait::for_some(format!("another node than {than} is the primary"), wait::PATIENCE, || {
            let primary = self.majority()?;
            (primary != than && self.nodes[primary].is_primary()).then_some(primary)
        })
    }

    /// Starts a planned failover (`SENTINEL FAILOVER`), and returns the new primary. The old one may remain a primary and accept
    /// writes for another ten seconds.
    ///
    /// # Panics
    ///
    /// When no replica takes over.
    pub fn failover(&self) -> usize {
        let old = self.primary();
        wait::until("a sentinel begins the failover", wait::PATIENCE, || {
            // Rejected while another failover is in progress.
            let outcome = self.sentinels[SENTINELS - 1]
                .try_query::<()>(redis::cmd("SENTINEL").arg("FAILOVER").arg(NAME));
            outcome.is_ok()
        });
        self.wait_for_other_primary(old)
    }

    fn majority(&self) -> Option<usize> {
        let answers: Vec<usize> =
            self.sentinels.iter().filter_map(|sentinel| self.primary_according_to(sentinel)).collect();
        let votes = |node: usize| answers.iter().filter(|answer| **answer == node).count();
        (0..self.nodes.len()).find(|node| votes(*node) > answers.len() / 2)
    }

    fn primary_according_to(&self, sentinel: &Server) -> Option<usize> {
        if !sentinel.is_running() {
            return None;
        }
        let mut command = redis::cmd("SENTINEL");
        let answer =
            sentinel.try_query::<Option<(String, u16)>>(command.arg("get-master-addr-by-name").arg(NAME));
        let (_, port) = answer.ok()??;
        self.nodes.iter().position(|node| node.port() == port)
    }

    /// Waits until discovery is complete. Sentinels discover each other by messages that they publish every 2 s; versions that support
    /// it publish more often until then.
    fn wait_for_discovery(&self) {
        self.set_periods(FAST_PERIODS);
        wait::until("the sentinels have discovered each other and the replicas", wait::PATIENCE, || {
            self.sentinels.iter().all(|sentinel| self.has_discovered_all(sentinel))
        });
        self.set_periods(DEFAULT_PERIODS);
    }

    fn set_periods(&self, periods: [(&str, u32); 2]) {
        for sentinel in &self.sentinels {
            for (name, millis) in periods {
                // Redis 6.2 does not support it.
                let _ = sentinel.try_query::<()>(redis::cmd("SENTINEL").arg("DEBUG").arg(name).arg(millis));
            }
        }
    }

    fn has_discovered_all(&self, sentinel: &Server) -> bool {
        let list = |what: &str| -> Vec<std::collections::HashMap<String, String>> {
            sentinel.try_query(redis::cmd("SENTINEL").arg(what).arg(NAME)).unwrap_or_default()
        };
        let (replicas, others) = (list("REPLICAS"), list("SENTINELS"));
        replicas.len() == self.nodes.len() - 1
            && others.len() == SENTINELS - 1
            && replicas
                .iter()
                .all(|replica| replica["flags"] == "slave" && replica["master-link-status"] == "ok")
            && others.iter().all(|other| other["flags"] == "sentinel")
    }
}
