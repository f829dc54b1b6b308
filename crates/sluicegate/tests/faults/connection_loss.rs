//! Lost connections of a server that is up: calls in flight are degraded, and hardly any others.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use sluicegate::{Limiter, Options, RedisStore, store::RemoteStore};
use sluicegate_testkit::{
    proxy::{Mode, Proxy, RequestFilter},
    server::{Flavor, Server},
    wait,
};
use tokio::{
    task::JoinSet,
    time::{Instant, interval, sleep},
};

use crate::scenario::{RuleMix, rules, run_exclusively};

/// The default deadline. It is not extended for slow machines: the share of degraded decisions depends on it.
const DEADLINE: Duration = Duration::from_millis(50);

/// Long enough for a loaded machine, and shorter than the delay of a replacement that waits as after a failed dial.
const LONG_DEADLINE: Duration = Duration::from_millis(200);

async fn limiter(url: &str, deadline: Duration) -> Limiter {
    let options = Options::new().deadline(deadline);
    Limiter::builder()
        .store(RedisStore::connect(url).await.unwrap())
        .rules(rules())
        .options(options)
        .build()
        .unwrap()
}

/// Decisions, and how many of them were degraded.
#[derive(Clone, Copy, Debug, Default)]
struct Tally {
    decisions: u64,
    degraded: u64,
}

impl Tally {
    fn assert_share_below(self, percent: u64, situation: &str) {
        assert!(self.decisions > 100, "{situation}: only {self:?}");
        assert!(self.degraded * 100 < self.decisions * percent, "{situation}: {self:?}");
    }
}

/// Makes checks one after the other, with this pause in between, until stopped.
fn spawn_caller(callers: &mut JoinSet<Tally>, limiter: &Limiter, pause: Duration, stop: &Arc<AtomicBool>) {
    let (limiter, stop) = (limiter.clone(), Arc::clone(stop));
    callers.spawn(async move {
        let labels = RuleMix::OPEN.labels("lost");
        let mut tally = Tally::default();
        while !stop.load(Ordering::Relaxed) {
            tally.decisions += 1;
            tally.degraded += u64::from(limiter.check(&labels, 1).await.unwrap().is_degraded());
            sleep(pause).await;
        }
        tally
    });
}

/// Callers that make checks during a fault.
#[derive(Clone, Copy)]
struct Load {
    callers: usize,
    /// Between two checks of a caller.
    pause: Duration,
}

impl Load {
    /// About a thousand checks per second and caller.
    const fn busy(callers: usize) -> Self {
        Self { callers, pause: Duration::from_millis(1) }
    }
}

/// Runs `fault` under load. Returns the checks of all callers.
async fn during(limiter: &Limiter, load: Load, fault: impl Future<Output = ()>) -> Tally {
    let stop = Arc::new(AtomicBool::new(false));
    let mut running = JoinSet::new();
    for _ in 0..load.callers {
        spawn_caller(&mut running, limiter, load.pause, &stop);
    }
    fault.await;
    stop.store(true, Ordering::Relaxed);
    let tallies = running.join_all().await;
    let sum = |of: fn(&Tally) -> u64| tallies.iter().map(of).sum();
    Tally { decisions: sum(|tally| tally.decisions), degraded: sum(|tally| tally.degraded) }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_lost_at_any_age_degrades_only_calls_in_flight() {
    const CALLERS: usize = 4;
    let _exclusive = run_exclusively().await;
    let server = Server::start(Flavor::Redis7);
    let proxy = Proxy::start(server.addr());
    let limiter = limiter(&proxy.url(), LONG_DEADLINE).await;
    assert!(!limiter.check(&RuleMix::OPEN.labels("first"), 1).await.unwrap().is_degraded());
    for age in [20, 50, 300, 1_200].map(Duration::from_millis) {
        // the connection that is lost next has the age under test
        proxy.reset_connections();
        let tally = during(&limiter, Load::busy(CALLERS), async {
            sleep(age).await;
            proxy.reset_connections();
            sleep(Duration::from_millis(1_500)).await;
        })
        .await;
        let lost = u64::try_from(CALLERS).unwrap();
        assert!(tally.degraded <= 2 * lost, "lost at an age of {age:?}: {tally:?}");
        assert_eq!(limiter.stats().open_breakers, 0);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_idle_connection_that_ends_is_replaced_before_the_next_call() {
    let _exclusive = run_exclusively().await;
    let server = Server::start(Flavor::Redis7);
    let proxy = Proxy::start(server.addr());
    let store = Arc::new(RedisStore::connect(&proxy.url()).await.unwrap());
    let limiter = Limiter::new(Arc::clone(&store), rules()).unwrap();
    let labels = RuleMix::OPEN.labels("idle");
    for replaced in 1..=5 {
        assert!(!limiter.check(&labels, 1).await.unwrap().is_degraded());
        proxy.reset_connections();
        wait::until("the connection is replaced without a call", wait::PATIENCE, || {
            store.stats().connections == 1 + replaced
        });
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_right_after_the_end_of_an_idle_connection_is_decided_by_the_store() {
    let _exclusive = run_exclusively().await;
    let server = Server::start(Flavor::Redis7);
    let proxy = Proxy::start(server.addr());
    let limiter = limiter(&proxy.url(), DEADLINE).await;
    let labels = RuleMix::OPEN.labels("idle");
    for round in 0..8 {
        assert!(!limiter.check(&labels, 1).await.unwrap().is_degraded());
        proxy.reset_connections();
        let decision = limiter.check(&labels, 1).await.unwrap();
        assert!(!decision.is_degraded(), "round {round}: {:?}", decision.failure);
    }
    assert_eq!(limiter.stats().ambiguous, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_every_tenth_reply_lost_few_other_decisions_are_degraded() {
    let _exclusive = run_exclusively().await;
    let server = Server::start(Flavor::Redis7);
    let proxy = Proxy::start(server.addr());
    let limiter = limiter(&proxy.url(), DEADLINE).await;
    // every tenth of these is less than ten connections per second
    let load = Load { callers: 1, pause: Duration::from_millis(12) };
    let tally = during(&limiter, load, async {
        proxy.drop_every_nth_reply(10, RequestFilter::SCRIPTS);
        sleep(Duration::from_secs(4)).await;
    })
    .await;
    tally.assert_share_below(15, "every tenth reply is lost");
}

/// This happens if a firewall loses the state of a connection: neither side gets an error, and new connections work.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_that_is_lost_silently_is_replaced_when_the_server_is_probed() {
    let _exclusive = run_exclusively().await;
    let server = Server::start(Flavor::Redis7);
    let proxy = Proxy::start(server.addr());
    let limiter = limiter(&proxy.url(), DEADLINE).await;
    for _ in 0..3 {
        let tally = during(&limiter, Load { callers: 2, pause: Duration::from_millis(5) }, async {
            sleep(Duration::from_millis(200)).await;
            proxy.drop_next_reply_and_stall(RequestFilter::SCRIPTS);
            sleep(Duration::from_millis(1_800)).await;
        })
        .await;
        // about 150 ms of 2 s: the deadline, and the pause before the first probe
        tally.assert_share_below(30, "the connection is lost silently");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_killed_every_50_ms_leave_most_decisions_to_the_store() {
    let _exclusive = run_exclusively().await;
    let server = Server::start(Flavor::Redis7);
    let proxy = Proxy::start(server.addr());
    let limiter = limiter(&proxy.url(), DEADLINE).await;
    let before = proxy.counters().accepted;
    let tally = during(&limiter, Load::busy(2), async {
        let mut kill = interval(Duration::from_millis(50));
        for _ in 0..60 {
            kill.tick().await;
            proxy.reset_connections();
        }
    })
    .await;
    tally.assert_share_below(50, "connections are killed every 50 ms");
    let opened = proxy.counters().accepted - before;
    assert!(opened <= 45, "{opened} connections in 3 s");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_is_down_for_200_of_every_400_ms_decides_most_of_the_remaining_time() {
    let _exclusive = run_exclusively().await;
    let server = Server::start(Flavor::Redis7);
    for mode in [Mode::Stall, Mode::Cut, Mode::Refuse] {
        let proxy = Proxy::start(server.addr());
        let limiter = limiter(&proxy.url(), DEADLINE).await;
        let load = Load { callers: 8, pause: Duration::from_millis(25) };
        let tally = during(&limiter, load, async {
            for _ in 0..8 {
                proxy.set(mode);
                sleep(Duration::from_millis(200)).await;
                proxy.pass();
                sleep(Duration::from_millis(200)).await;
            }
        })
        .await;
        tally.assert_share_below(70, &format!("half of the time {mode:?}"));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_store_decides_as_soon_as_a_server_accepts_connections_again() {
    let _exclusive = run_exclusively().await;
    let server = Server::start(Flavor::Redis7);
    let proxy = Proxy::start(server.addr());
    let limiter = limiter(&proxy.url(), DEADLINE).await;
    let labels = RuleMix::OPEN.labels("back");
    for mode in [Mode::Refuse, Mode::Cut] {
        proxy.set(mode);
        let (start, mut before) = (Instant::now(), None);
        while start.elapsed() < Duration::from_secs(4) {
            assert!(limiter.check(&labels, 1).await.unwrap().is_degraded());
            sleep(Duration::from_millis(5)).await;
            if start.elapsed() > Duration::from_secs(1) {
                before.get_or_insert(proxy.counters().accepted);
            }
        }
        let opened = proxy.counters().accepted - before.unwrap();
        assert!(opened <= 6, "{mode:?}: {opened} connections in 3 s");
        proxy.pass();
        let back = Instant::now();
        while limiter.check(&labels, 1).await.unwrap().is_degraded() {
            assert!(back.elapsed() < Duration::from_secs(2), "{mode:?}: still degraded");
            sleep(Duration::from_millis(5)).await;
        }
    }
}
