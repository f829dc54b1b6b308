//! A server that scans its Redis for keys without a TTL.

use sluicegate_testkit::{
    server::{Flavor, Server},
    wait::{self, PATIENCE},
};

use crate::server_process::{ANY_PORTS, ConfigDir};

/// A counter of the rule `r`.
const COUNTER: &str = "sg1:{30d13f94}:sliding-log:r:a";

#[test]
fn the_server_scans_soon_after_its_start_and_reports_keys_without_a_ttl() {
    let redis = Server::start(Flavor::Redis7);
    redis::cmd("SET").arg(COUNTER).arg("x").exec(&mut redis.connection()).unwrap();
    let store = format!("[store]\nurl = \"{}\"\nkey_scan_interval = \"1m\"\n", redis.url());
    let program = ConfigDir::new(&format!("rule = []\n{ANY_PORTS}{store}")).start();
    wait::until("the first scan has ended", PATIENCE, || {
        program.metric("sluicegate_store_keys_without_ttl ") == "1"
    });
    assert_eq!(program.metric("sluicegate_store_scanned_keys "), "1");
    assert_eq!(program.metric("sluicegate_store_last_key_scan_successful "), "1");
    program.wait_for_log("keys in Redis without a TTL, which never expire: 1;");
    redis::cmd("DEL").arg(COUNTER).exec(&mut redis.connection()).unwrap();
}
