//! Sentinels of the testkit have discovered each other when they start, and replace a failed primary.

use std::time::Duration;

use redis::RedisResult;
use sluicegate_testkit::namespace::Link;
use sluicegate_testkit::sentinel::{NAME, Sentinels, Setup};
use sluicegate_testkit::server::{Flavor, Server};
use sluicegate_testkit::wait;

fn set(node: &Server, key: &str) -> RedisResult<()> {
    redis::cmd("SET").arg(key).arg(1).arg("EX").arg(60).exec(&mut node.try_connection()?)
}

#[test]
fn a_killed_primary_is_replaced_and_rejoins_as_a_replica() {
    for flavor in [Flavor::Redis7, Flavor::Valkey9] {
        let mut sentinels = Sentinels::start(flavor);
        assert_eq!(sentinels.primary(), 0);
        set(&sentinels.nodes()[0], "key").unwrap();
        assert_eq!(sentinels.kill_primary(), 0);
        assert_eq!(sentinels.wait_for_other_primary(0), 1);
        set(&sentinels.nodes()[1], "key").unwrap();

        sentinels.node_mut(0).restart();
        wait::until("the old primary is a replica", 2 * wait::PATIENCE, || {
            !sentinels.nodes()[0].is_primary()
        });
        assert_eq!(sentinels.primary(), 1);
    }
}

#[test]
fn the_oldest_sentinels_discover_each_other_too() {
    let sentinels = Sentinels::start(Flavor::Redis6);
    for sentinel in sentinels.sentinels() {
        let quorum: String =
            redis::cmd("SENTINEL").arg("CKQUORUM").arg(NAME).query(&mut sentinel.connection()).unwrap();
        assert!(quorum.starts_with("OK 3 usable Sentinels"), "{quorum}");
    }
}

#[test]
fn after_a_manual_failover_the_old_primary_stays_a_primary_for_a_while() {
    let sentinels = Setup::new(Flavor::Redis7).replicas(2).sentinel_line("maxclients 123").start();
    assert_eq!(sentinels.sentinels()[0].info("maxclients"), "123");
    let new = sentinels.failover();
    assert_ne!(new, 0);
    assert_eq!(sentinels.primary(), new);
    set(&sentinels.nodes()[new], "key").unwrap();
    wait::until("the old primary is a replica", 2 * wait::PATIENCE, || {
        set(&sentinels.nodes()[0], "key").is_err_and(|error| error.code() == Some("READONLY"))
    });
}

#[test]
fn passwords_are_required_and_do_not_prevent_a_failover() {
    let mut sentinels = Setup::new(Flavor::Redis7).password("data").sentinel_password("watch").start();
    for url in [sentinels.urls().remove(0), sentinels.nodes()[0].url()] {
        let mut connection = redis::Client::open(url).unwrap().get_connection().unwrap();
        let error = redis::cmd("INFO").exec(&mut connection).unwrap_err();
        assert_eq!(error.code(), Some("NOAUTH"));
    }
    let watcher = &sentinels.sentinels()[0];
    watcher.set_user("reader", &["on", ">secret", "+sentinel|get-master-addr-by-name"]);
    let url = format!("redis://reader:secret@{}", watcher.addr());
    let mut connection = redis::Client::open(url).unwrap().get_connection().unwrap();
    let mut command = redis::cmd("SENTINEL");
    let (_, port): (String, u16) =
        command.arg("get-master-addr-by-name").arg(NAME).query(&mut connection).unwrap();
    assert_eq!(port, sentinels.nodes()[0].port());

    let killed = sentinels.kill_primary();
    assert_eq!(sentinels.wait_for_other_primary(killed), 1);
}

#[test]
fn a_partition_leaves_two_primaries_and_the_old_one_loses_its_writes() {
    let link = Link::create().unwrap();
    let sentinels = Setup::new(Flavor::Redis7).across(&link).start();
    set(&sentinels.nodes()[0], "before").unwrap();
    wait::until("the key is replicated", wait::PATIENCE, || {
        redis::cmd("DBSIZE").query::<u64>(&mut sentinels.nodes()[1].connection()).unwrap() == 1
    });
    link.down();
    assert_eq!(sentinels.wait_for_other_primary(0), 1);
    assert!(sentinels.nodes()[0].is_primary(), "the old primary is still a primary");
    set(&sentinels.nodes()[0], "lost").unwrap();
    set(&sentinels.nodes()[1], "kept").unwrap();

    link.up();
    wait::until("the old primary is a replica", 3 * wait::PATIENCE, || {
        !sentinels.nodes()[0].is_primary() && sentinels.nodes()[0].info("master_link_status") == "up"
    });
    for (key, expected) in [("before", true), ("lost", false), ("kept", true)] {
        let exists: bool =
            redis::cmd("EXISTS").arg(key).query(&mut sentinels.nodes()[0].connection()).unwrap();
        assert_eq!(exists, expected, "{key}");
    }
}

#[test]
fn a_primary_may_be_silent_for_the_configured_time() {
    let sentinels = Setup::new(Flavor::Redis7).down_after(Duration::from_secs(60)).start();
    sentinels.nodes()[0].suspend();
    for sentinel in sentinels.sentinels() {
        let mut command = redis::cmd("SENTINEL");
        let (_, port): (String, u16) =
            command.arg("get-master-addr-by-name").arg(NAME).query(&mut sentinel.connection()).unwrap();
        assert_eq!(port, sentinels.nodes()[0].port());
    }
    sentinels.nodes()[0].resume();
    assert_eq!(sentinels.primary(), 0);
}
