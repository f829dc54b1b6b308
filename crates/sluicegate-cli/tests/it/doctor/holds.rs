//! Findings about live and expired holds, and holds with lost records or wrong units.

use std::time::Duration;

use sluicegate::{
    Cost, Labels, Limit, Limiter, RedisStore, Rule,
    limiter::{HoldDecision, SettleOutcome},
    store::HoldId,
};
use sluicegate_core::OnExpiry;
use sluicegate_testkit::{
    cluster,
    server::{Flavor, Server},
    wait,
};

use super::{DOCTOR_PAGE, Diagnosis, REDIS_PAGE, diagnose, doctor, documented_user};

const LONG: Duration = Duration::from_secs(600);
const SHORT: Duration = Duration::from_millis(1);

/// A limiter with ten units in flight, ten units in a year that are refunded when holds expire, and ten that stay charged.
async fn limiter(url: &str) -> Limiter {
    let year = Duration::from_secs(365 * 24 * 60 * 60);
    let refunded = Limit::fixed_window(10, year).unwrap().with_on_expiry(OnExpiry::Release).unwrap();
    let charged = Limit::fixed_window(10, year).unwrap();
    let rules = [
        Rule::new("in flight", Limit::concurrency(10).unwrap()).when("route", "stream").per(["user"]),
        Rule::new("refunded", refunded).when("route", "job").per(["user"]),
        Rule::new("charged", charged).when("route", "report").per(["user"]),
    ];
    Limiter::new(RedisStore::connect(url).await.unwrap(), rules).unwrap().with_deadline(wait::PATIENCE)
}

fn labels(route: &str) -> Labels {
    Labels::new([("route", route), ("user", "ann")]).unwrap()
}

async fn hold(limiter: &Limiter, route: &str, id: &str, cost: u64, ttl: Duration) -> HoldDecision {
    let labels = labels(route);
    let hold = limiter.hold(&labels, Cost::from(u32::try_from(cost).unwrap()));
    let held = hold.id(HoldId::new(id).unwrap()).ttl(ttl).decide().await.unwrap();
    assert!(held.decision.is_allowed() && held.expires_at.is_some(), "{held:?}");
    held
}

/// Waits until the first hold of an index has expired.
fn wait_for_expiry(server: &Server, index: &str) {
    let expired = "local t = redis.call('TIME')
        return redis.call('ZCOUNT', KEYS[1], 0, string.format('%.0f', t[1] * 1000000 + t[2]))";
    wait::until("a hold expires", wait::PATIENCE, || {
        let count: u64 =
            redis::cmd("EVAL").arg(expired).arg(1).arg(index).query(&mut server.connection()).unwrap();
        count > 0
    });
}

/// The key of the only key of this kind.
fn key(server: &Server, pattern: &str) -> String {
    let keys: Vec<String> = redis::cmd("KEYS").arg(pattern).query(&mut server.connection()).unwrap();
    assert_eq!(keys.len(), 1, "{pattern}: {keys:?}");
    keys[0].clone()
}

fn what<'a>(diagnosis: &'a Diagnosis, id: &str) -> &'a str {
    diagnosis.finding(id)["what"].as_str().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn live_holds_are_counted_and_expired_ones_released() {
    for flavor in Flavor::ALL {
        let server = Server::start(flavor);
        let limiter = limiter(&server.url()).await;
        let live = hold(&limiter, "stream", "a", 3, LONG).await;
        hold(&limiter, "stream", "b", 2, SHORT).await;
        let counter = key(&server, "sg1:*}:concurrency:*");
        wait_for_expiry(&server, &counter);

        let doctors = documented_user(&server, DOCTOR_PAGE, "sluicegate-doctor");
        let diagnosis = Diagnosis::of(&mut doctor(&["--store", &doctors]));
        assert!(
            what(&diagnosis, "holds").starts_with("1 live hold of 3 units in 1 counter, the oldest made ")
        );
        let finding = diagnosis.finding("expired-holds");
        assert_eq!(finding["severity"], "advice", "{flavor}");
        let expired = what(&diagnosis, "expired-holds");
        assert!(
            expired.starts_with("rule \"in%20flight\": 1 hold of 2 units expired, the first "),
            "{expired}"
        );
        let holds = &diagnosis.report["holds"][0];
        assert_eq!((&holds["live"], &holds["units"], &holds["expired"]), (&1.into(), &3.into(), &1.into()));

        let diagnosis = diagnose(&server, &["--fix", "--yes"]);
        let repaired = &diagnosis.report["repaired"];
        assert_eq!((&repaired["released"], &repaired["corrected"]), (&1.into(), &0.into()), "{flavor}");
        assert!(diagnosis.findings().iter().all(|finding| finding["id"] != "expired-holds"));
        assert_eq!(diagnosis.report["holds"][0]["units"], 3);
        hold(&limiter, "stream", "c", 7, LONG).await;
        let settled = limiter.release(&live.token.unwrap()).await.unwrap();
        assert_eq!((settled.outcome, settled.tiers[0].remaining), (SettleOutcome::Released, Some(3)));
        server.assert_every_key_expires();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn expired_holds_of_other_rules_are_left_to_the_next_check() {
    let server = Server::start(Flavor::Redis7);
    let limiter = limiter(&server.url()).await;
    hold(&limiter, "job", "a", 4, SHORT).await;
    let index = key(&server, "sg1:*}:holds:*");
    wait_for_expiry(&server, &index);
    let diagnosis = diagnose(&server, &["--fix", "--yes"]);
    assert!(what(&diagnosis, "expired-holds").starts_with("rule \"refunded\": 1 hold of 4 units expired"));
    assert_eq!(diagnosis.report["repaired"], serde_json::Value::Null);
    let rules = diagnosis.report["rules"].as_array().unwrap();
    let keys = |name: &str| rules.iter().find(|rule| rule["rule"] == name).unwrap()["keys"].clone();
    assert_eq!((keys("refunded"), keys("refunded (holds)")), (1.into(), 2.into()), "index and record");
    let decision = limiter.check(&labels("job"), Cost::ONE).await.unwrap();
    assert_eq!(decision.remaining(), Some(9));
    let diagnosis = diagnose(&server, &[]);
    assert!(diagnosis.findings().iter().all(|finding| finding["id"] != "expired-holds"));
}

#[tokio::test(flavor = "multi_thread")]
async fn expired_holds_that_stay_charged_are_reported_until_they_are_settled() {
    for flavor in Flavor::ALL {
        let server = Server::start(flavor);
        let limiter = limiter(&server.url()).await;
        hold(&limiter, "report", "a", 1, LONG).await;
        let expired = hold(&limiter, "report", "b", 4, SHORT).await;
        let last = hold(&limiter, "report", "c", 2, SHORT).await.expires_at.unwrap();
        wait::until("the holds expire", wait::PATIENCE, || {
            let (seconds, micros): (u64, u64) = redis::cmd("TIME").query(&mut server.connection()).unwrap();
            seconds * 1_000_000 + micros > last.as_micros()
        });
        let diagnosis = diagnose(&server, &["--fix", "--yes"]);
        assert_eq!(diagnosis.finding("unsettled-holds")["severity"], "advice", "{flavor}");
        let text = what(&diagnosis, "unsettled-holds");
        assert_eq!(text, "rule \"charged\": 2 holds of 6 units expired without being settled", "{flavor}");
        let holds = &diagnosis.report["holds"][0];
        assert_eq!(
            (&holds["live"], &holds["unsettled"], &holds["expired"]),
            (&1.into(), &2.into(), &0.into())
        );
        assert_eq!(diagnosis.report["repaired"], serde_json::Value::Null);

        let settled = limiter.settle(&expired.token.unwrap(), 4).await.unwrap();
        assert_eq!(settled.outcome, SettleOutcome::Late);
        assert_eq!(diagnose(&server, &[]).report["holds"][0]["unsettled"], 1, "{flavor}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn holds_that_cannot_be_settled_are_a_problem_until_they_expire() {
    let server = Server::start(Flavor::Redis7);
    let limiter = limiter(&server.url()).await;
    for route in ["stream", "job"] {
        hold(&limiter, route, "lost", 1, LONG).await;
        hold(&limiter, route, "kept", 1, LONG).await;
        let record = key(
            &server,
            &format!("sg1:*}}:hold:*:{}:*:lost", if route == "job" { "refunded" } else { "in*" }),
        );
        redis::cmd("DEL").arg(record).exec(&mut server.connection()).unwrap();
    }
    let diagnosis = diagnose(&server, &[]);
    diagnosis.assert_problem("lost-hold-records");
    let text = what(&diagnosis, "lost-hold-records");
    assert_eq!(text.matches("1 live hold without a record, the last one for ").count(), 2, "{text}");
    assert_eq!(diagnosis.report["holds"][0]["live"], 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_counter_with_other_units_than_its_holds_is_corrected() {
    let server = Server::start(Flavor::Redis7);
    let limiter = limiter(&server.url()).await;
    hold(&limiter, "stream", "a", 3, LONG).await;
    let counter = key(&server, "sg1:*}:concurrency:*");
    for wrong in [-9, -2] {
        redis::cmd("ZADD").arg(&counter).arg(wrong).arg("").exec(&mut server.connection()).unwrap();
        let diagnosis = diagnose(&server, &[]);
        diagnosis.assert_problem("hold-units");
        let diagnosis = diagnose(&server, &["--fix", "--yes"]);
        assert_eq!(diagnosis.report["repaired"]["corrected"], 1);
        assert!(diagnosis.findings().iter().all(|finding| finding["id"] != "hold-units"));
        let score: i64 = redis::cmd("ZSCORE").arg(&counter).arg("").query(&mut server.connection()).unwrap();
        assert_eq!(score, -1 - 3);
    }
    // without its own entry, the counter would be empty
    redis::cmd("ZREM").arg(&counter).arg("").exec(&mut server.connection()).unwrap();
    assert_eq!(diagnose(&server, &["--fix", "--yes"]).report["repaired"]["corrected"], 1);
    assert_eq!(limiter.hold(&labels("stream"), 8).decide().await.unwrap().decision.remaining(), Some(7));
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_of_holds_without_a_ttl_get_one_that_covers_every_hold() {
    let server = Server::start(Flavor::Redis7);
    let limiter = limiter(&server.url()).await;
    hold(&limiter, "stream", "a", 1, LONG).await;
    hold(&limiter, "job", "a", 1, LONG).await;
    let keys: Vec<String> = redis::cmd("KEYS").arg("sg1:*}:*hold*").query(&mut server.connection()).unwrap();
    assert_eq!(keys.len(), 3, "{keys:?}");
    for key in keys.iter().chain([&key(&server, "sg1:*}:concurrency:*")]) {
        redis::cmd("PERSIST").arg(key).exec(&mut server.connection()).unwrap();
    }
    let dir = super::config_dir(&format!(
        "[store]\nurl = \"{}\"\n[[rule]]\nname = \"in flight\"\nalgorithm = \"concurrency\"\namount = 10\n",
        server.url()
    ));
    let config = dir.path().join("sluicegate.toml");
    let diagnosis = diagnose(&server, &["--fix", "--yes", "--config", config.to_str().unwrap()]);
    assert_eq!(diagnosis.report["repaired"]["expiring"], 4, "{:#}", diagnosis.report);
    let day = 24 * 60 * 60;
    for key in keys.iter().chain([&key(&server, "sg1:*}:concurrency:*")]) {
        assert!((day + 60..=day + 70).contains(&super::ttl(&server, key)), "{key}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn missing_permissions_for_holds_are_advice_and_the_documented_user_can_hold() {
    for flavor in Flavor::ALL {
        let server = Server::start(flavor);
        let own = documented_user(&server, REDIS_PAGE, "sluicegate");
        let limiter = limiter(&own).await;
        let held = hold(&limiter, "stream", "a", 1, LONG).await;
        hold(&limiter, "job", "a", 1, LONG).await;
        let settled = limiter.settle(&held.token.unwrap(), 1).await.unwrap();
        assert_eq!(settled.outcome, SettleOutcome::Settled, "{flavor}");
        server.set_user("sluicegate", &["-zrem", "-zscore"]);
        let diagnosis = Diagnosis::of(&mut doctor(&["--store", &own]));
        let finding = diagnosis.finding("hold-permissions");
        assert_eq!(finding["severity"], "advice", "{flavor}");
        assert_eq!(finding["do"], "to use holds, ACL SETUSER NAME +zrem +zscore");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn holds_of_every_cluster_node_are_counted() {
    let nodes = cluster::Setup::new(Flavor::Redis7).replicas(0).start();
    let url = format!("redis-cluster://{}", nodes.nodes()[0].addr());
    let limiter = limiter(&url).await;
    for user in 0..20 {
        let labels = Labels::new([("route", "stream".to_owned()), ("user", user.to_string())]).unwrap();
        let id = HoldId::new(format!("{user}")).unwrap();
        let held = limiter.hold(&labels, 1).id(id).ttl(LONG).decide().await.unwrap();
        assert!(held.expires_at.is_some(), "{held:?}");
    }
    let diagnosis = Diagnosis::of(&mut doctor(&["--store", &url]));
    assert!(what(&diagnosis, "holds").starts_with("20 live holds of 20 units in 20 counters"));
}

#[test]
fn the_maximum_admitted_includes_live_holds_and_the_excess_of_settlements() {
    let server = Server::start(Flavor::Redis7);
    let dir = super::config_dir(&format!(
        "[store]\nurl = \"{}\"\n[defaults]\non_store_failure = \"local\"\n\
         [[rule]]\nname = \"streams\"\nalgorithm = \"concurrency\"\namount = 8\n\
         [[rule]]\nname = \"tokens\"\nunit = \"tokens\"\namount = 1000\nwindow = \"1h\"\nmax_excess = 40\n",
        server.url()
    ));
    let diagnosis = diagnose(&server, &["--config", dir.path().join("sluicegate.toml").to_str().unwrap()]);
    let most = |situation: &str| {
        let rows = diagnosis.report["bound"].as_array().unwrap();
        rows.iter().find(|row| row["situation"] == situation).unwrap()["most"].as_str().unwrap().to_owned()
    };
    assert_eq!(most("rules for requests in flight"), "streams: N units in live holds at any time (N is 8)");
    let excess = "tokens: N + 40 for each hold that is settled above its estimate";
    assert_eq!(most("rules whose holds are settled"), excess);
    assert_eq!(most("Redis is down"), "2 rules local: 2 N");
}
