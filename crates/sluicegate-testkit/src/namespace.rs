//! Two network namespaces connected by a bridge. [`Link::down`] is a real network partition: packets are lost without an error.
//!
//! A server runs inside with [`Setup::inside`](crate::server::Setup::inside), a client with [`Side::run`], whose sockets, threads
//! and child processes belong to the namespace. The network of the host does not change. Namespaces require root and `ip` from
//! iproute2.

use std::fs::File;
use std::io;
use std::net::Ipv4Addr;
use std::os::fd::AsFd;
use std::process::{self, Command};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// A pair of namespaces and the bridge between them; removed on drop, even after a panic.
///
/// A plain veth pair is not enough: when one end goes down, both kernels report it (`ENETUNREACH`, no carrier). Therefore both ends
/// lead into a third namespace with the bridge.
#[derive(Debug)]
pub struct Link {
    left: Side,
    right: Side,
    switch: String,
}

/// One side of a [`Link`]: a network namespace with loopback and a route to the other side.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Side {
    namespace: String,
    ip: Ipv4Addr,
}

/// Names of the devices: the interface of each side, and the bridge.
const CABLE: &str = "cable";
const SWITCH: &str = "switch";

/// The addresses of both sides, the same for every pair: namespaces are isolated.
const LEFT: Ipv4Addr = Ipv4Addr::new(10, 99, 0, 1);
const RIGHT: Ipv4Addr = Ipv4Addr::new(10, 99, 0, 2);

/// Number of the next pair, which makes names unique within the process.
static LINKS: AtomicU32 = AtomicU32::new(0);

impl Link {
    /// Creates both sides, connected.
    ///
    /// # Errors
    ///
    /// When the process is not root or `ip` is missing.
    pub fn create() -> Result<Link, String> {
        let number = LINKS.fetch_add(1, Ordering::Relaxed);
        let name = |part: &str| format!("sluicegate-{}-{number}-{part}", process::id());
        // From here on, drop removes everything that was created.
        let link = Link {
            left: Side { namespace: name("left"), ip: LEFT },
            right: Side { namespace: name("right"), ip: RIGHT },
            switch: name("switch"),
        };
        let switch = &link.switch;
        ip(&["netns", "add", switch])?;
        ip(&["-n", switch, "link", "add", "name", SWITCH, "type", "bridge"])?;
        ip(&["-n", switch, "link", "set", SWITCH, "up"])?;
        for (side, port) in [(&link.left, "left"), (&link.right, "right")] {
            let Side { namespace, ip: address } = side;
            ip(&["netns", "add", namespace])?;
            // Created inside, with the far end in the switch, so neither appears on the host.
            let far_end = ["peer", "name", port, "netns", switch];
            ip(&[&["-n", namespace, "link", "add", "name", CABLE, "type", "veth"], &far_end[..]].concat())?;
            ip(&["-n", switch, "link", "set", port, "master", SWITCH, "up"])?;
            ip(&["-n", namespace, "address", "add", &format!("{address}/30"), "dev", CABLE])?;
            ip(&["-n", namespace, "link", "set", CABLE, "up"])?;
            ip(&["-n", namespace, "link", "set", "lo", "up"])?;
        }
        Ok(link)
    }

    /// Returns one side.
    #[must_use]
    pub fn left(&self) -> &Side {
        &self.left
    }

    /// Returns the other side.
    #[must_use]
    pub fn right(&self) -> &Side {
        &self.right
    }

    /// Returns the names of the namespaces it consists of.
    #[must_use]
    pub fn namespaces(&self) -> [&str; 3] {
        [&self.left.namespace, &self.right.namespace, &self.switch]
    }

    /// Starts a partition: packets are lost in both directions, and connections stay open.
    ///
    /// # Panics
    ///
    /// When `ip` fails.
    pub fn down(&self) {
        self.set("down");
    }

    /// Ends the partition. Pending data follows with the next retransmission, which may take as long as the partition lasted.
    ///
    /// # Panics
    ///
    /// When `ip` fails.
    pub fn up(&self) {
        self.set("up");
    }

    fn set(&self, state: &str) {
        let outcome = ip(&["-n", &self.switch, "link", "set", SWITCH, state]);
        outcome.unwrap_or_else(|message| panic!("{message}"));
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        for namespace in self.namespaces() {
            // Fails for a namespace that was not created. Devices are removed with their namespace.
            let _ = ip(&["netns", "delete", namespace]);
        }
    }
}

impl Side {
    /// Returns the address of this side.
    #[must_use]
    pub fn ip(&self) -> Ipv4Addr {
        self.ip
    }

    /// Runs a closure on a thread inside the namespace and returns its result. Sockets, threads and processes that it creates stay
    /// in the namespace.
    ///
    /// # Panics
    ///
    /// When the closure panics or the namespace does not exist.
    pub fn run<T: Send>(&self, action: impl FnOnce() -> T + Send) -> T {
        let inside = || {
            self.enter().unwrap_or_else(|error| panic!("cannot enter {}: {error}", self.namespace));
            action()
        };
        let outcome = thread::scope(|scope| scope.spawn(inside).join());
        outcome.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }

    /// Moves the calling thread into the namespace permanently.
    fn enter(&self) -> io::Result<()> {
        let namespace = File::open(format!("/run/netns/{}", self.namespace))?;
        Ok(move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?)
    }
}

/// Runs `ip`.
fn ip(args: &[&str]) -> Result<(), String> {
    let line = || format!("ip {}", args.join(" "));
    match Command::new("ip").args(args).output() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            Err(String::from("ip is missing, which network namespaces require: run scripts/servers"))
        }
        Err(error) => Err(format!("{}: {error}", line())),
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => {
            let reason = String::from_utf8_lossy(&output.stderr);
            Err(format!("network namespaces require root: `{}` failed: {}", line(), reason.trim()))
        }
    }
}
