//! Leases of a server: they decide hot keys, are visible to operators, and are returned at shutdown.

use sluicegate_testkit::{
    server::{Flavor, Server},
    wait::{self, PATIENCE},
};

use crate::server_process::{ANY_PORTS, ConfigDir};

const REQUEST: &str = r#"{"labels":{"tenant":"acme"}}"#;

#[test]
fn a_server_decides_hot_keys_by_leases_shows_them_and_returns_them_at_shutdown() {
    let redis = Server::start(Flavor::Redis7);
    let rule = "name = \"per-tenant\"\nper = [\"tenant\"]\nalgorithm = \"sliding-log\"\namount = 100_000\nwindow = \"1h\"\n\
                lease = \"10%\"\nlease_for = \"1m\"\non_store_failure = \"local\"";
    let home = ConfigDir::new(&format!(
        "{ANY_PORTS}[store]\nurl = \"{}\"\ndeadline = \"5s\"\n[[rule]]\n{rule}\n",
        redis.url()
    ));
    let mut server = home.start();
    let mut client = server.client();
    let mut check = || client.post("/v1/check", REQUEST).unwrap().json();
    let mut admitted = 0;
    wait::until("a lease decides", PATIENCE, || {
        admitted += 1;
        check()["source"] == "lease"
    });
    for _ in 0..100 {
        check();
        admitted += 1;
    }
    let explained = server.client().post("/v1/explain", REQUEST).unwrap().json();
    let state = &explained["applies"][0]["state"];
    let (used, leased) = (state["used"].as_u64().unwrap(), state["leased"].as_u64().unwrap());
    assert!(leased > 0 && used > admitted, "{explained}");
    let count = |metric: &str| server.metric(metric).parse::<u64>().unwrap();
    assert!(count("sluicegate_lease_units_total{event=\"drawn\"}") > 0);
    assert!(count("sluicegate_decision_sources_total{source=\"lease\"}") > 50);
    let rules = server.get("/v1/rules").1;
    assert!(rules.contains(r#""lease":"10%","lease_for":"1m""#), "{rules}");

    drop(client);
    server.signal("-TERM");
    assert!(server.wait_for_exit().success());
    let next = home.start();
    let explained = next.client().post("/v1/explain", REQUEST).unwrap().json();
    let state = &explained["applies"][0]["state"];
    assert_eq!((&state["used"], &state["leased"]), (&admitted.into(), &0.into()), "{explained}");
}
