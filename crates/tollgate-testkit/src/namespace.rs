//! Two network namespaces with a switch between them: [`Link::down`] is a real partition, in which packets vanish and
//! nobody is told.
//!
//! A server moves in with [`Setup::inside`](crate::server::Setup::inside). A client does with [`Side::run`], which takes
//! its sockets, its threads and the processes it starts along; the rest of the test stays where it is. The host's
//! own network is not touched. All of this needs root, and `ip` from iproute2.

use std::fs::File;
use std::io;
use std::net::Ipv4Addr;
use std::os::fd::AsFd;
use std::process::{self, Command};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// A pair of namespaces and what lies between them; removed on drop, also by a panic.
///
/// A mere pair of virtual devices would not do: the kernel of an interface that goes down tells its programs
/// (`ENETUNREACH`), and that of the other end sees that its cable is loose. So both lead into a namespace of the switch.
#[derive(Debug)]
pub struct Link {
    left: Side,
    right: Side,
    switch: String,
}

/// One side of a [`Link`]: a network namespace that reaches itself, on loopback too, and the other side.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Side {
    namespace: String,
    ip: Ipv4Addr,
}

/// The names of the devices: that of a side, and the one that joins both.
const CABLE: &str = "cable";
const SWITCH: &str = "switch";

/// The addresses of both sides; namespaces share nothing, so each pair has the same.
const LEFT: Ipv4Addr = Ipv4Addr::new(10, 99, 0, 1);
const RIGHT: Ipv4Addr = Ipv4Addr::new(10, 99, 0, 2);

/// Makes names unique within the process.
static LINKS: AtomicU32 = AtomicU32::new(0);

impl Link {
    /// Creates both sides, connected.
    ///
    /// # Errors
    ///
    /// When this process may not (it needs root), or `ip` is missing: a sentence that says so.
    pub fn create() -> Result<Link, String> {
        let number = LINKS.fetch_add(1, Ordering::Relaxed);
        let name = |part: &str| format!("tollgate-{}-{number}-{part}", process::id());
        // From here on its drop removes whatever there is.
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
            // Created inside, with the far end in the switch: the host never sees either.
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

    /// Turns the switch off: packets are lost in both directions from now on, connections stay as they are.
    ///
    /// # Panics
    ///
    /// When the kernel refuses.
    pub fn down(&self) {
        self.set("down");
    }

    /// Turns the switch on again. What the kernels still have to send follows when they next try, which is up to as long after
    /// as the cut has lasted.
    ///
    /// # Panics
    ///
    /// When the kernel refuses.
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
            // Fails where `create` had not got so far. Devices go with their namespace.
            let _ = ip(&["netns", "delete", namespace]);
        }
    }
}

impl Side {
    /// Returns its address.
    #[must_use]
    pub fn ip(&self) -> Ipv4Addr {
        self.ip
    }

    /// Runs a closure on a thread within the namespace, and returns what it returns. Sockets opened there, threads and
    /// runtimes started there and processes spawned there belong to the namespace for good.
    ///
    /// # Panics
    ///
    /// When the closure does, or the namespace is gone.
    pub fn run<T: Send>(&self, action: impl FnOnce() -> T + Send) -> T {
        let inside = || {
            self.enter().unwrap_or_else(|error| panic!("cannot enter {}: {error}", self.namespace));
            action()
        };
        let outcome = thread::scope(|scope| scope.spawn(inside).join());
        outcome.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }

    /// Moves the calling thread into the namespace, for good.
    fn enter(&self) -> io::Result<()> {
        let namespace = File::open(format!("/run/netns/{}", self.namespace))?;
        Ok(move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?)
    }
}

/// Runs `ip`, or says why that is not possible.
fn ip(args: &[&str]) -> Result<(), String> {
    let line = || format!("ip {}", args.join(" "));
    match Command::new("ip").args(args).output() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            Err(String::from("network namespaces need the program ip: run scripts/servers"))
        }
        Err(error) => Err(format!("{}: {error}", line())),
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => {
            let reason = String::from_utf8_lossy(&output.stderr);
            Err(format!("network namespaces need root, and `{}` failed: {}", line(), reason.trim()))
        }
    }
}
