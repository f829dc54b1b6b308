//! Clusters of the testkit are complete when they start, and fail on command.

use redis::{Connection, RedisResult};
use sluicegate_testkit::cluster::{Cluster, ClusterState, Coverage, Setup};
use sluicegate_testkit::server::{Flavor, Server};
use sluicegate_testkit::wait;

fn set(node: &Server, key: &str) -> RedisResult<()> {
    redis::cmd("SET").arg(key).arg(1).arg("EX").arg(60).exec(&mut node.try_connection()?)
}

fn code<T>(outcome: RedisResult<T>) -> String {
    let error = outcome.map(|_| ()).expect_err("should be an error");
    error.code().unwrap_or_else(|| panic!("no error code: {error}")).to_string()
}

fn get(connection: &mut Connection, keys: &[&str]) -> RedisResult<Vec<Option<u8>>> {
    redis::cmd("MGET").arg(keys).query(connection)
}

#[test]
fn three_primaries_serve_a_third_of_the_slots_each_and_redirect_other_keys() {
    for flavor in Flavor::ALL {
        let cluster = Cluster::start(flavor);
        assert_eq!(cluster.slot_of("{user1000}.x"), 3_443);
        for (node, server) in cluster.nodes().iter().enumerate() {
            let key = cluster.redis_key_on(node);
            set(server, &key).unwrap();
            let other = &cluster.nodes()[(node + 1) % 3];
            assert_eq!(code(set(other, &key)), "MOVED", "{flavor}");
        }
        let bounds = [0, 5_461, 5_462, 10_922, 10_923, 16_383];
        assert_eq!(bounds.map(|slot| cluster.primary_of(slot).unwrap()), [0, 0, 1, 1, 2, 2]);
    }
}

#[test]
fn a_dead_primary_makes_its_own_slots_or_all_slots_unavailable() {
    for coverage in [Coverage::Partial, Coverage::Required] {
        let mut cluster = Setup::new(Flavor::Redis7).coverage(coverage).start();
        let (dead, alive) = (cluster.redis_key_on(0), cluster.redis_key_on(1));
        let slot = cluster.slot_of(&dead);
        cluster.node_mut(0).kill();
        wait::until("the failure is detected", wait::PATIENCE, || cluster.primary_of(slot).is_none());
        let node = &cluster.nodes()[1];
        match coverage {
            Coverage::Partial => {
                set(node, &alive).unwrap();
                assert_eq!(code(set(node, &dead)), "MOVED");
            }
            Coverage::Required => {
                cluster.wait_for_state(ClusterState::Fail);
                assert_eq!(code(set(node, &alive)), "CLUSTERDOWN");
                assert_eq!(code(set(node, &dead)), "CLUSTERDOWN");
            }
        }

        cluster.node_mut(0).restart();
        cluster.wait_for_state(ClusterState::Ok);
        set(&cluster.nodes()[0], &dead).unwrap();
    }
}

#[test]
fn a_replica_takes_over_when_its_primary_dies() {
    let mut cluster = Setup::new(Flavor::Redis7).replicas(1).start();
    let key = cluster.redis_key_on(2);
    let slot = cluster.slot_of(&key);
    set(&cluster.nodes()[2], &key).unwrap();
    wait::until("the key is replicated", wait::PATIENCE, || {
        redis::cmd("DBSIZE").query::<u64>(&mut cluster.nodes()[5].connection()).unwrap() == 1
    });

    cluster.node_mut(2).kill();
    assert_eq!(cluster.wait_for_other_primary(slot, 2), 5);
    cluster.wait_for_state(ClusterState::Ok);
    assert_eq!(get(&mut cluster.nodes()[5].connection(), &[&key]).unwrap(), [Some(1)]);

    cluster.node_mut(2).restart();
    wait::until("the old primary is a replica", wait::PATIENCE, || !cluster.nodes()[2].is_primary());
}

#[test]
fn a_replica_takes_over_on_command() {
    let cluster = Setup::new(Flavor::Valkey9).replicas(1).start();
    let key = cluster.redis_key_on(1);
    cluster.failover(4);
    assert_eq!(cluster.primary_of(cluster.slot_of(&key)), Some(4));
    set(&cluster.nodes()[4], &key).unwrap();
    wait::until("the old primary is a replica", wait::PATIENCE, || !cluster.nodes()[1].is_primary());
    assert_eq!(code(set(&cluster.nodes()[1], &key)), "MOVED");
}

#[test]
fn a_slot_migration_can_be_paused_and_finished() {
    for flavor in Flavor::ALL {
        let cluster = Cluster::start(flavor);
        let tag = cluster.redis_key_on(0);
        let [first, second, absent] = ["first", "second", "absent"].map(|name| format!("{{{tag}}}{name}"));
        let slot = cluster.slot_of(&first);
        let (from, to) = (&cluster.nodes()[0], &cluster.nodes()[1]);
        set(from, &first).unwrap();
        set(from, &second).unwrap();

        let migration = cluster.begin_migration(slot, 1);
        assert_eq!(migration.from(), 0);
        set(from, &first).unwrap();
        assert_eq!(code(set(from, &absent)), "ASK", "{flavor}");

        migration.move_key(&first);
        assert_eq!(code(set(from, &first)), "ASK");
        let mut asking = to.connection();
        redis::cmd("ASKING").exec(&mut asking).unwrap();
        assert_eq!(code(get(&mut asking, &[&first, &second])), "TRYAGAIN");
        redis::cmd("ASKING").exec(&mut asking).unwrap();
        assert_eq!(get(&mut asking, &[&first]).unwrap(), [Some(1)]);
        assert_eq!(code(set(to, &first)), "MOVED");

        assert_eq!(migration.move_keys(10), 1);
        migration.finish();
        assert_eq!(cluster.primary_of(slot), Some(1));
        assert_eq!(code(set(from, &first)), "MOVED");
        assert_eq!(get(&mut to.connection(), &[&first, &second, &absent]).unwrap(), [Some(1), Some(1), None]);
    }
}

#[test]
fn an_abandoned_migration_leaves_the_slot_in_place() {
    let cluster = Cluster::start(Flavor::Redis7);
    let key = cluster.redis_key_on(2);
    let migration = cluster.begin_migration(cluster.slot_of(&key), 0);
    assert_eq!(code(set(&cluster.nodes()[2], &key)), "ASK");
    migration.abandon();
    set(&cluster.nodes()[2], &key).unwrap();
}

#[test]
fn a_key_without_ttl_on_a_node_fails_the_test_even_during_a_migration() {
    let cluster = Cluster::start(Flavor::Redis7);
    let key = cluster.redis_key_on(0);
    redis::cmd("SET").arg(&key).arg(1).exec(&mut cluster.nodes()[0].connection()).unwrap();
    cluster.begin_migration(cluster.slot_of(&key), 1).move_key(&key);
    cluster.nodes()[0].assert_every_key_expires();
    let check = std::panic::AssertUnwindSafe(|| cluster.nodes()[1].assert_every_key_expires());
    let message = *std::panic::catch_unwind(check).unwrap_err().downcast::<String>().unwrap();
    assert!(message.contains(&key), "{message}");
    let expire: RedisResult<()> = {
        let mut connection = cluster.nodes()[1].connection();
        redis::cmd("ASKING").exec(&mut connection).unwrap();
        redis::cmd("EXPIRE").arg(&key).arg(60).exec(&mut connection)
    };
    expire.unwrap();
}
