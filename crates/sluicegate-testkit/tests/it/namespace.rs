//! Namespaces of the testkit are real networks: they connect, lose packets without an error, and are removed. The tests require root
//! and `ip`.

use std::io::ErrorKind;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::Path;
use std::time::Duration;

use sluicegate_testkit::namespace::Link;
use sluicegate_testkit::proxy::Proxy;
use sluicegate_testkit::server::{Flavor, Server, Setup};
use sluicegate_testkit::wait;

/// Long enough to observe that nothing arrives.
const SILENCE: Duration = Duration::from_millis(300);

/// Returns how many of these namespaces exist.
fn existing(names: &[String]) -> usize {
    names.iter().filter(|name| Path::new("/run/netns").join(name).exists()).count()
}

fn connect(link: &Link, server: &Server) -> redis::Connection {
    let client = redis::Client::open(server.url()).expect("a good address");
    link.right()
        .run(|| client.get_connection_with_timeout(wait::PATIENCE))
        .expect("the other side is reached")
}

#[test]
fn a_link_connects_partitions_and_removes_its_namespaces() {
    let link = Link::create().unwrap();
    let names = link.namespaces().map(str::to_owned);
    assert_eq!(existing(&names), 3);
    a_server_is_reachable_from_both_sides_only(&link);
    a_partition_drops_packets_silently_and_delivers_after_it_ends(&link);

    let other = Link::create().expect("a second link");
    let other_names = other.namespaces().map(str::to_owned);
    assert_eq!(existing(&other_names), 3);
    drop(other);
    assert_eq!((existing(&other_names), existing(&names)), (0, 3));
    let panicked = std::thread::spawn(move || {
        let _link = link;
        panic!("a failing test");
    });
    assert!(panicked.join().is_err());
    assert_eq!(existing(&names), 0);
}

fn a_server_is_reachable_from_both_sides_only(link: &Link) {
    let server = Setup::new(Flavor::Redis7).inside(link.left()).start();
    let addr = server.addr();
    assert_eq!(addr.ip(), link.left().ip());
    for side in [link.left(), link.right()] {
        side.run(|| TcpStream::connect_timeout(&addr, wait::PATIENCE)).expect("a side of the link");
    }
    // Each namespace has its own loopback.
    let loopback = SocketAddr::from((Ipv4Addr::LOCALHOST, addr.port()));
    link.left().run(|| TcpStream::connect(loopback)).expect("the server's own loopback");
    link.right().run(|| TcpStream::connect(loopback)).expect_err("the other side's loopback");
    TcpStream::connect(loopback).expect_err("the host's loopback");

    // A proxy started inside stays inside, with its thread.
    let proxy = link.right().run(|| Proxy::start(addr));
    let client = redis::Client::open(proxy.url()).expect("a good address");
    let mut connection = link.right().run(|| client.get_connection()).expect("a proxy on its loopback");
    redis::cmd("PING").exec(&mut connection).expect("an answer through the proxy");
}

fn a_partition_drops_packets_silently_and_delivers_after_it_ends(link: &Link) {
    let server = Setup::new(Flavor::Redis7).inside(link.left()).start();
    let mut before = connect(link, &server);
    redis::cmd("PING").exec(&mut before).expect("a connected network");

    link.down();
    before.set_read_timeout(Some(SILENCE)).expect("a time that is not zero");
    let write = redis::cmd("SET").arg("key").arg(1).arg("EX").arg(60).exec(&mut before);
    assert!(write.expect_err("a partition").is_timeout());
    let error =
        link.right().run(|| TcpStream::connect_timeout(&server.addr(), SILENCE)).expect_err("a partition");
    assert_eq!(error.kind(), ErrorKind::TimedOut, "the kernel reports the partition");
    let keys = || {
        redis::cmd("DBSIZE").query::<u64>(&mut server.connection()).expect("the testkit uses the unix socket")
    };
    assert_eq!(keys(), 0);

    link.up();
    wait::until("the kernel retransmits", wait::PATIENCE, || keys() == 1);
    redis::cmd("PING").exec(&mut connect(link, &server)).expect("a connected network");
}
