//! Statistics about errors of the store.

use std::time::Duration;

use sluicegate::{
    Cost, Decision, Limit, Limiter, Options, RedisStore, Source,
    stats::{BOUNDS, Skew, Stats},
};
use sluicegate_testkit::{
    proxy::{Proxy, RequestFilter},
    server::{Flavor, Server},
    wait,
};

const DEADLINE: Duration = Duration::from_millis(200);

async fn limiter(url: &str) -> Limiter {
    let store = RedisStore::connect(url).await.unwrap();
    Limiter::builder().store(store).rules([]).options(Options::default().deadline(DEADLINE)).build().unwrap()
}

async fn hit(limiter: &Limiter) -> Decision {
    let limit = Limit::sliding_log(100, Duration::from_secs(60)).unwrap();
    limiter.check_key("k", &limit, Cost::ONE).await.unwrap()
}

fn errors(stats: &Stats, kind: &str) -> u64 {
    stats.errors.iter().find(|(name, _)| *name == kind).unwrap().1
}

fn degraded(stats: &Stats) -> u64 {
    stats.degraded.iter().map(|(_, count)| count).sum()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_errors_by_kind_and_degraded_decisions_are_counted() {
    let server = Server::start(Flavor::Redis7);
    let limiter = limiter(&server.url()).await;
    for _ in 0..3 {
        assert_eq!(hit(&limiter).await.source, Source::Store);
    }
    let calm = limiter.stats();
    assert_eq!(calm.calls.counts.iter().sum::<u64>(), 3);
    assert_eq!(calm.calls.counts.len(), BOUNDS.len() + 1);
    assert!(calm.calls.total > Duration::ZERO);
    assert_eq!((degraded(&calm), calm.ambiguous, calm.open_breakers, calm.waiting), (0, 0, 0, 0));
    assert_eq!(
        (calm.store.connections, calm.store.script_reloads),
        (1, 1),
        "the script was loaded at the start"
    );
    let skew = calm.store.clock_skew.unwrap();
    assert!(skew.size() < Duration::from_secs(1), "{skew:?} on one machine");
    assert!(matches!(skew, Skew::Ahead(_) | Skew::Behind(_)));

    server.flush_scripts();
    assert_eq!(hit(&limiter).await.source, Source::Store);
    assert_eq!(limiter.stats().store.script_reloads, 2);

    server.config_set("min-replicas-to-write", 1);
    assert_eq!(hit(&limiter).await.source, Source::Open);
    server.config_set("min-replicas-to-write", 0);
    let stats = limiter.stats();
    assert_eq!((errors(&stats, "NOREPLICAS"), degraded(&stats), stats.ambiguous), (1, 1, 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_reply_is_counted_as_ambiguous() {
    let server = Server::start(Flavor::Redis7);
    let proxy = Proxy::start(server.addr());
    let limiter = limiter(&proxy.url()).await;
    assert_eq!(hit(&limiter).await.source, Source::Store);
    proxy.drop_next_reply_and_stall(RequestFilter::SCRIPTS);
    assert_eq!(hit(&limiter).await.source, Source::Open);
    // the call outlives its caller by a moment, and then counts its timeout
    while errors(&limiter.stats(), "timeout") == 0 {
        tokio::task::yield_now().await;
    }
    let stats = limiter.stats();
    assert_eq!((stats.ambiguous, errors(&stats, "timeout"), degraded(&stats)), (1, 1, 1));
}

/// Waits until another client has sent `INFO`.
fn wait_for_info_query(server: &Server) {
    let (mut connection, mut own) = (server.connection(), 0);
    wait::until("another client has sent INFO", wait::PATIENCE, || {
        let info: String = redis::cmd("INFO").arg("commandstats").query(&mut connection).unwrap();
        let calls = info.lines().find_map(|line| line.strip_prefix("cmdstat_info:calls="));
        let calls: u64 = calls.map_or(0, |rest| rest.split(',').next().unwrap().parse().unwrap());
        own += 1;
        calls >= own
    });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_open_breaker_and_a_restarted_server_are_counted() {
    let mut server = Server::start(Flavor::Redis7);
    let limiter = limiter(&server.url()).await;
    hit(&limiter).await;
    wait_for_info_query(&server);
    server.kill();
    wait::until_async("the breaker is open", wait::PATIENCE, || async {
        hit(&limiter).await;
        limiter.stats().open_breakers == 1
    })
    .await;
    assert!(errors(&limiter.stats(), "unreachable") + errors(&limiter.stats(), "lost") > 0);
    assert_eq!(limiter.stats().store.generation_changes, 0);
    server.restart();
    wait::until_async("the store decides again", wait::PATIENCE, || async {
        hit(&limiter).await.source == Source::Store
    })
    .await;
    assert_eq!(limiter.stats().open_breakers, 0);
    wait::until_async("the restart is detected", wait::PATIENCE, || async {
        limiter.stats().store.generation_changes == 1
    })
    .await;
}
