//! A server whose Redis is unavailable or slow.

use std::time::Duration;

use sluicegate_testkit::{
    proxy::Proxy,
    server::{Flavor, Server},
    wait::{self, PATIENCE},
};
use tonic::transport::Endpoint;
use tonic_health::pb::{
    HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
};

use crate::server_process::{ANY_PORTS, ConfigDir};

/// The delay of each direction. One round trip is well within [`SLOW_DEADLINE`]; the four that connecting and loading the script need are
/// not.
const ONE_WAY: Duration = Duration::from_millis(75);
const SLOW_DEADLINE: &str = "580ms";

fn check(client: &mut crate::http_client::Client, route: &str) -> serde_json::Value {
    let body = format!(r#"{{"labels":{{"route":"{route}"}}}}"#);
    let response = client.post("/v1/check", &body).unwrap();
    assert_eq!(response.status, 200, "{}", response.body);
    response.json()
}

#[test]
fn rules_that_fail_open_without_setting_a_policy_are_logged_at_start_and_after_a_reload() {
    let redis = Server::start(Flavor::Redis7);
    let rule = |name: &str| format!("[[rule]]\nname = \"{name}\"\namount = 3\nwindow = \"1h\"\n");
    let store = format!("{ANY_PORTS}[store]\nurl = \"{}\"\n", redis.url());
    let home = ConfigDir::new(&(store.clone() + &rule("one")));
    let program = home.start();
    program.wait_for_line("rules without on_store_failure", "late: \"one\"; set");
    home.write("sluicegate.toml", store + &rule("two"));
    program.signal("-HUP");
    program.wait_for_line("rules without on_store_failure", "late: \"two\"; set");
}

/// They were answered `queued`.
#[test]
fn settlements_that_are_queued_at_shutdown_are_logged() {
    let rule = "[[rule]]\nname = \"in-flight\"\nper = [\"user\"]\nalgorithm = \"concurrency\"\namount = 2\n";
    let home = ConfigDir::new(&format!("{ANY_PORTS}[store]\nurl = \"redis://127.0.0.1:1\"\n{rule}"));
    let mut program = home.start();
    for id in ["a", "b"] {
        let body = format!(r#"{{"id":"{id}","labels":{{"user":"1"}}}}"#);
        let released = program.client().post("/v1/release", &body).unwrap();
        assert_eq!((released.status, &released.json()["outcome"]), (200, &"queued".into()));
    }
    program.signal("-INT");
    assert!(program.wait_for_exit().success());
    program.wait_for_line("settlements lost", "2 settlements lost: the store did not answer before shutdown");
}

#[test]
fn it_starts_without_redis_and_applies_failure_policies_until_redis_is_up() {
    let mut redis = Server::start(Flavor::Redis7);
    redis.kill();
    let rule = |policy: &str| {
        format!(
            "[[rule]]\nname = \"{policy}\"\nwhen = {{ route = \"{policy}\" }}\nper = []\nalgorithm = \"sliding-log\"\n\
             amount = 3\nwindow = \"1h\"\non_store_failure = \"{policy}\"\n"
        )
    };
    let rules = ["open", "closed", "local"].map(rule).concat();
    let home = ConfigDir::new(&format!(
        "{ANY_PORTS}[store]\nurl = \"{}\"\ndeadline = \"2s\"\ndenial_cache = \"0s\"\n{rules}",
        redis.url()
    ));
    let program = home.start();
    let degraded = (200, r#"{"ready":true,"store":"degraded","rules":"ok"}"#.to_owned());
    // the outage is detected without a request
    let before_ready = [r#"{"ready":false,"store":"degraded","rules":"ok"}"#.to_owned(), degraded.1.clone()];
    wait::until("the server is ready without its store", PATIENCE, || {
        let (status, body) = program.get("/readyz");
        assert!(before_ready.contains(&body), "{body}");
        status == 200
    });
    assert_eq!(program.get("/readyz"), degraded);
    program.wait_for_log(&format!("store {} is unreachable: cannot connect to ", redis.url()));
    program.wait_for_log(
        "until it recovers, 1 rule allows every request (open), 1 rule denies every request (closed), 1 rule enforces this \
         process's share of the limit (local); run sluicegate doctor for details",
    );
    let mut client = program.client();
    for _ in 0..5 {
        let open = check(&mut client, "open");
        assert_eq!((&open["allowed"], &open["degraded"]), (&true.into(), &true.into()), "{open}");
        let closed = check(&mut client, "closed");
        assert_eq!((&closed["allowed"], &closed["source"]), (&false.into(), &"closed".into()), "{closed}");
    }
    let local: Vec<_> = (0..4).map(|_| check(&mut client, "local")["allowed"].as_bool().unwrap()).collect();
    assert_eq!(local, [true, true, true, false]);
    wait::until("the server reports the store outage", PATIENCE, || {
        check(&mut client, "open");
        program.get("/readyz") == degraded
    });

    redis.restart();
    let healthy = (200, r#"{"ready":true,"store":"ok","rules":"ok"}"#.to_owned());
    // probed in the background, at least every two seconds
    wait::until("the server reports the store as available", Duration::from_secs(10), || {
        program.get("/readyz") == healthy
    });
    for route in ["open", "closed"] {
        let counted: Vec<_> = (0..4)
            .map(|_| {
                let response = check(&mut client, route);
                assert_eq!(response["degraded"], false, "{response}");
                response["allowed"].as_bool().unwrap()
            })
            .collect();
        assert_eq!(counted, [true, true, true, false], "{route}");
    }
}

#[test]
fn an_outage_is_logged_with_the_address_and_each_new_reason() {
    let mut redis = Server::start(Flavor::Redis7);
    let home = ConfigDir::new(&format!(
        "{ANY_PORTS}[store]\nurl = \"{}\"\n\
         [[rule]]\nname = \"all\"\nper = []\namount = 3\nwindow = \"1h\"\non_store_failure = \"open\"\n",
        redis.url()
    ));
    let program = home.start();
    let mut client = program.client();
    redis.config_set("maxmemory", 1);
    let (address, next_step) = (redis.addr(), "applying failure policies; run sluicegate doctor for details");
    wait::until("the breaker opens", PATIENCE, || {
        check(&mut client, "any");
        program.output().contains("unavailable (OOM")
    });
    program.wait_for_line(&format!("store {address} unavailable (OOM command not allowed"), next_step);
    redis.kill();
    program.wait_for_line(&format!("store {address} still unavailable after"), next_step);
    program.wait_for_line("still unavailable after", "Connection refused");
    let unreachable = "sluicegate_store_errors_total{kind=\"unreachable\"} ";
    let unreachable_errors = || {
        let metrics = program.get("/metrics").1;
        let line = metrics.lines().find_map(|line| line.strip_prefix(unreachable)).unwrap();
        line.parse::<f64>().unwrap()
    };
    let before = unreachable_errors();
    wait::until("a failed probe is counted without a request", PATIENCE, || unreachable_errors() > before);
    redis.restart();
    program.wait_for_log(&format!("store {address} available again"));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_first_check_after_readiness_is_decided_by_a_slow_redis() {
    let redis = Server::start(Flavor::Redis7);
    let slow = Proxy::start(redis.addr());
    slow.delay(ONE_WAY);
    let home = ConfigDir::new(&format!(
        "{ANY_PORTS}[store]\nurl = \"{}\"\ndeadline = \"{SLOW_DEADLINE}\"\n\
         [[rule]]\nname = \"all\"\nper = []\namount = 3\nwindow = \"1h\"\n",
        slow.url()
    ));
    let program = home.start();
    let endpoint = Endpoint::from_shared(format!("http://{}", program.grpc)).unwrap();
    let mut health = HealthClient::new(endpoint.connect().await.unwrap());
    let healthy = (200, r#"{"ready":true,"store":"ok","rules":"ok"}"#.to_owned());
    wait::until("the server is ready", PATIENCE, || program.get("/readyz") == healthy);
    let first = check(&mut program.client(), "any");
    assert_eq!((&first["source"], &first["degraded"]), (&"store".into(), &false.into()), "{first}");
    wait::until_async("the gRPC health service reports ready", PATIENCE, async || {
        let request = HealthCheckRequest { service: String::new() };
        health.check(request).await.unwrap().into_inner().status() == ServingStatus::Serving
    })
    .await;
}

#[test]
fn a_round_trip_close_to_the_deadline_is_logged_with_a_remedy() {
    let redis = Server::start(Flavor::Redis7);
    let slow = Proxy::start(redis.addr());
    slow.delay(ONE_WAY);
    let home =
        ConfigDir::new(&format!("{ANY_PORTS}[store]\nurl = \"{}\"\ndeadline = \"250ms\"\n", slow.url()));
    let program = home.start();
    program.wait_for_line("the round trip to the store takes", "set the deadline to 6");
}
