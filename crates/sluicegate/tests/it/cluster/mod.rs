//! Redis Cluster: slot migration, dead nodes, lost replies, and checks over several nodes.

mod holds;
mod node_calls;
mod release;
mod round_trips;

use std::{collections::BTreeMap, time::Duration};

use sluicegate::{
    Cost, Limit, Limiter, Options, RedisStore, Source, StoreError,
    limiter::Operation,
    store::{Answer, Check, CheckAnswer, Deadline, Key, RemoteStore, Terms, Tier},
};
use sluicegate_testkit::{
    cluster::{Cluster, ClusterState, Coverage, Setup},
    proxy::{Mode, Proxy, RequestFilter},
    server::{Flavor, Server},
    store_fixture::DecideAll,
    wait,
};
use tokio::time::Instant;

const HOUR: Duration = Duration::from_secs(3_600);
const MANY: u64 = 100_000;

fn url(cluster: &Cluster) -> String {
    let places: Vec<String> = cluster.nodes().iter().map(|node| node.addr().to_string()).collect();
    format!("redis-cluster://{}", places.join(","))
}

fn tier(key: &str, amount: u64) -> Tier {
    let limit = Limit::sliding_log(amount, HOUR).unwrap();
    Tier { key: Key::without_rule(key).unwrap(), terms: Terms::new(limit, Cost::ONE) }
}

fn check(operation: Operation, tiers: &[(&str, u64)]) -> Check {
    Check::new(operation, tiers.iter().map(|(key, amount)| tier(key, *amount)).collect()).unwrap()
}

async fn ask(store: &RedisStore, check: Check) -> Result<Vec<Answer>, StoreError> {
    let decided = store.decide_all(&[check], None).await?;
    Ok(decided.into_iter().next().unwrap().answers)
}

async fn hit(store: &RedisStore, key: &str) -> Result<Vec<Answer>, StoreError> {
    ask(store, check(Operation::Check, &[(key, MANY)])).await
}

/// Returns whether all tiers pass.
fn passes(answers: &[Answer]) -> bool {
    answers.iter().all(|answer| answer.charged == 1)
}

async fn used(store: &RedisStore, key: &str) -> u64 {
    let available = ask(store, check(Operation::Peek, &[(key, MANY)])).await.unwrap()[0].available;
    MANY - u64::try_from(available).unwrap()
}

/// A key with its slot and node.
#[derive(Clone, Debug)]
struct Place {
    key: String,
    slot: u16,
    node: usize,
}

/// Returns the slots and nodes of some keys, which do not depend on the prefix.
async fn places(cluster: &Cluster, store: &RedisStore) -> Vec<Place> {
    let probe = store.clone().with_prefix("probe").unwrap();
    for number in 0..60 {
        hit(&probe, &format!("k{number}")).await.unwrap();
    }
    let mut places = Vec::new();
    for (node, server) in cluster.nodes().iter().enumerate().filter(|(_, server)| server.is_primary()) {
        let names: Vec<String> = redis::cmd("KEYS").arg("probe1:*").query(&mut server.connection()).unwrap();
        for name in names {
            let key = name.rsplit(':').next().unwrap().to_owned();
            places.push(Place { slot: cluster.slot_of(&name), key, node });
        }
    }
    assert_eq!(places.len(), 60);
    places.sort_by_key(|place| place.slot);
    places
}

fn at(places: &[Place], node: usize) -> Place {
    places.iter().find(|place| place.node == node).unwrap().clone()
}

/// Returns how often a node ran a script by digest, and how often it got the script in full.
fn scripts(server: &Server) -> (u64, u64) {
    let info: String = redis::cmd("INFO").arg("commandstats").query(&mut server.connection()).unwrap();
    let calls = |command: &str| {
        let line = info.lines().find_map(|line| line.strip_prefix(&format!("cmdstat_{command}:calls=")));
        line.map_or(0, |rest| rest.split(',').next().unwrap().parse().unwrap())
    };
    (calls("evalsha"), calls("eval"))
}

#[tokio::test(flavor = "multi_thread")]
async fn every_primary_is_warmed_up_and_an_unreachable_one_does_not_block_startup() {
    let cluster = Cluster::start(Flavor::Redis7);
    let store = RedisStore::connect_later(&url(&cluster)).unwrap();
    store.warm_up().await.unwrap();
    let primaries = || cluster.nodes().iter().filter(|node| node.is_primary());
    assert!(primaries().count() > 1);
    for node in primaries() {
        assert_eq!(scripts(node), (1, 1), "{}", node.addr());
    }
    for place in places(&cluster, &store).await {
        assert!(passes(&hit(&store, &place.key).await.unwrap()));
    }
    for node in primaries() {
        assert_eq!(scripts(node).1, 1, "no decision had to send the script to {}", node.addr());
    }
    let another = RedisStore::connect_later(&url(&cluster)).unwrap();
    cluster.nodes()[2].suspend();
    let warmed_up = tokio::time::timeout(wait::PATIENCE, another.warm_up()).await;
    cluster.nodes()[2].resume();
    warmed_up.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tiers_on_several_nodes_are_charged_all_or_none_under_concurrency() {
    let cluster = Cluster::start(Flavor::Redis7);
    let store = RedisStore::connect(&url(&cluster)).await.unwrap();
    let places = places(&cluster, &store).await;
    let [first, second, third] = [0, 1, 2].map(|node| at(&places, node).key);
    let other = places.iter().rfind(|place| place.node == 2).unwrap().key.clone();
    let callers = (0..8).map(|caller| {
        let (store, keys) = (store.clone(), [first.clone(), second.clone(), third.clone(), other.clone()]);
        tokio::spawn(async move {
            let [first, second, third, other] = &keys;
            let mut admitted = (0, 0);
            for round in 0..40 {
                // the smallest limit is last for some and first for others
                let (wide, tiers) = if (caller + round) % 2 == 0 {
                    (true, check(Operation::Check, &[(third, 70), (second, 90), (first, 200)]))
                } else {
                    (false, check(Operation::Check, &[(other, 60), (second, 90)]))
                };
                let passed = u32::from(passes(&ask(&store, tiers).await.unwrap()));
                if wide { admitted.0 += passed } else { admitted.1 += passed }
            }
            admitted
        })
    });
    let callers: Vec<_> = callers.collect();
    let (mut wide, mut narrow) = (0, 0);
    for caller in callers {
        let admitted = caller.await.unwrap();
        (wide, narrow) = (wide + u64::from(admitted.0), narrow + u64::from(admitted.1));
    }
    assert!(wide <= 70 && narrow <= 60 && wide + narrow <= 90, "{wide} {narrow}");
    assert_eq!(used(&store, &first).await, wide, "reservations of denied checks were released");
    // without concurrency, all released units are available
    for (tiers, count) in
        [([(&*third, 70), (&*second, 90)], &mut wide), ([(&*other, 60), (&*second, 90)], &mut narrow)]
    {
        while passes(&ask(&store, check(Operation::Check, &tiers)).await.unwrap()) {
            *count += 1;
        }
    }
    assert_eq!(wide + narrow, 90, "the shared limit is fully used");
    let found = [used(&store, &third).await, used(&store, &other).await, used(&store, &second).await];
    assert_eq!(found, [wide, narrow, 90], "the usage of each tier equals what was admitted");
}

#[tokio::test]
async fn a_batch_over_several_nodes_charges_each_check_as_a_whole() {
    let cluster = Cluster::start(Flavor::Redis7);
    let store = RedisStore::connect(&url(&cluster)).await.unwrap();
    let users: Vec<String> = (0..40).map(|user| format!("user:{user}")).collect();
    // all users share one counter and have one each; one user gets half of its requests
    let batch: Vec<Check> =
        users.iter().map(|user| check(Operation::Check, &[("global", 51), (user, 2)]).times(2)).collect();
    let decided = store.decide_all(&batch, None).await.unwrap();
    let admitted: u32 = decided.iter().map(|check| check.answers[0].charged).sum();
    assert_eq!(admitted, 51);
    for (user, CheckAnswer { answers, .. }) in users.iter().zip(&decided) {
        assert_eq!(answers[0].charged, answers[1].charged, "{user}");
        let left = 2 - i64::from(answers[1].charged);
        let peeked = ask(&store, check(Operation::Peek, &[(user, 2)])).await.unwrap();
        assert_eq!(peeked[0].available, left, "{user}");
    }
    let tags: Vec<(Key, sluicegate::Algorithm)> = users
        .iter()
        .map(|user| (Key::without_rule(user).unwrap(), sluicegate::Algorithm::SlidingLog))
        .collect();
    let found = store.reset(&tags).await.unwrap();
    assert!((26..=40).contains(&found), "a reset finds its counters on every node, not {found}");
    let again = ask(&store, check(Operation::Check, &[("global", 51), ("user:0", 2)])).await.unwrap();
    assert_eq!([again[0].passes, again[1].passes], [0, 1]);
    assert_eq!([again[0].charged, again[1].charged, u32::from(again[1].available == 2)], [0, 0, 1]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_partly_migrated_slot_answers_and_counts_correctly() {
    for flavor in Flavor::ALL {
        let cluster = Cluster::start(flavor);
        let store = RedisStore::connect(&url(&cluster)).await.unwrap();
        let place = at(&places(&cluster, &store).await, 0);
        // one tag, so one slot: the same key under other algorithms
        let limits =
            sluicegate::Algorithm::WINDOWED.map(|algorithm| Limit::new(algorithm, MANY, HOUR).unwrap());
        let tiers = |count: usize| {
            let tier = |limit: &Limit| Tier {
                key: Key::without_rule(&place.key).unwrap(),
                terms: Terms::new(*limit, Cost::ONE),
            };
            Check::new(Operation::Check, limits.iter().take(count).map(tier).collect()).unwrap()
        };
        let left = |answers: Vec<Answer>| answers.iter().map(|one| one.available).collect::<Vec<_>>();
        let many = i64::try_from(MANY).unwrap();
        ask(&store, tiers(2)).await.unwrap();

        let migration = cluster.begin_migration(place.slot, 1);
        assert_eq!(
            left(ask(&store, tiers(2)).await.unwrap()),
            [many - 2; 2],
            "{flavor}: both are still there"
        );
        let names: Vec<String> =
            redis::cmd("KEYS").arg("sg1:*").query(&mut cluster.nodes()[0].connection()).unwrap();
        let moved = names.iter().find(|name| name.contains("fixed-window")).unwrap();
        migration.move_key(moved);
        assert_eq!(left(ask(&store, tiers(1)).await.unwrap()), [many - 3], "{flavor}: ASK is followed");
        // a batch of single keys does not wait for the end of the migration
        let batch: Vec<Check> = (0..2)
            .map(|index| {
                let terms = Terms::new(limits[index], Cost::ONE);
                let key = Key::without_rule(&place.key).unwrap();
                Check::new(Operation::Check, vec![Tier { key, terms }]).unwrap()
            })
            .collect();
        let decided = store.decide_all(&batch, None).await.unwrap();
        assert_eq!([decided[0].answers[0].available, decided[1].answers[0].available], [many - 4, many - 3]);

        // several keys of which some have moved: TRYAGAIN until all have moved
        let waiting = tokio::spawn({
            let (store, both) = (store.clone(), tiers(2));
            async move { ask(&store, both).await }
        });
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert!(!waiting.is_finished(), "{flavor}: it cannot be decided yet");
        tokio::task::block_in_place(|| migration.finish());
        assert_eq!(left(waiting.await.unwrap().unwrap()), [many - 5, many - 4], "{flavor}");
        assert_eq!(
            left(ask(&store, tiers(2)).await.unwrap()),
            [many - 6, many - 5],
            "{flavor}: MOVED is followed"
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn resharding_under_load_charges_every_call_exactly_once() {
    let cluster = Cluster::start(Flavor::Redis7);
    let store = RedisStore::connect(&url(&cluster)).await.unwrap();
    let places = places(&cluster, &store).await;
    let moving: Vec<Place> = places.iter().filter(|place| place.node == 0).take(6).cloned().collect();
    let (stop, stopped) = tokio::sync::watch::channel(false);
    let callers = moving.iter().map(|place| {
        let (store, key, stopped) = (store.clone(), place.key.clone(), stopped.clone());
        tokio::spawn(async move {
            let mut admitted = 0_u64;
            while !*stopped.borrow() {
                let answers = hit(&store, &key).await.unwrap_or_else(|error| panic!("{key}: {error}"));
                admitted += u64::from(answers[0].charged);
            }
            (key, admitted)
        })
    });
    let callers: Vec<_> = callers.collect();
    for to in [1, 2, 0] {
        for place in &moving {
            tokio::task::block_in_place(|| cluster.begin_migration(place.slot, to).finish());
        }
    }
    stop.send(true).unwrap();
    for caller in callers {
        let (key, admitted) = caller.await.unwrap();
        assert!(admitted > 20, "{key} was checked too rarely");
        assert_eq!(used(&store, &key).await, admitted, "{key}");
    }
}

/// While a slot migrates, leases are neither drawn nor ended; all requests are decided, and nothing is lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn resharding_under_load_keeps_the_counts_of_leased_keys() {
    let cluster = Cluster::start(Flavor::Redis7);
    let store = RedisStore::connect(&url(&cluster)).await.unwrap();
    let places = places(&cluster, &store).await;
    let moving: Vec<Place> = places.iter().filter(|place| place.node == 0).take(3).cloned().collect();
    let options = Options::new().deadline(Duration::from_secs(5));
    let limiter = Limiter::builder().store(store.clone()).options(options).build().unwrap();
    let limit = Limit::sliding_log(MANY, HOUR).unwrap().with_lease(100, Duration::from_secs(1)).unwrap();
    let (stop, stopped) = tokio::sync::watch::channel(false);
    let callers = moving.iter().map(|place| {
        let (limiter, key, stopped) = (limiter.clone(), place.key.clone(), stopped.clone());
        tokio::spawn(async move {
            let (mut admitted, mut leased) = (0_u64, 0_u64);
            while !*stopped.borrow() {
                let decision = limiter.check_key(&key, &limit, Cost::ONE).await.unwrap();
                assert!(decision.is_allowed() && !decision.is_degraded(), "{key}: {decision:?}");
                admitted += 1;
                leased += u64::from(decision.source == Source::Lease);
                tokio::task::yield_now().await;
            }
            (key, admitted, leased)
        })
    });
    let callers: Vec<_> = callers.collect();
    for to in [1, 2, 0] {
        for place in &moving {
            tokio::task::block_in_place(|| cluster.begin_migration(place.slot, to).finish());
        }
    }
    stop.send(true).unwrap();
    let mut counts = Vec::new();
    for caller in callers {
        counts.push(caller.await.unwrap());
    }
    limiter.return_leases().await;
    let lost = limiter.stats().leases.lost;
    for (key, admitted, leased) in counts {
        assert!(leased > 20, "{key}: {leased} of {admitted} were leased");
        let used = used(&store, &key).await;
        assert!(
            (admitted..=admitted + lost).contains(&used),
            "{key}: {used} used, {admitted} admitted, {lost} lost"
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_node_affects_only_its_own_slots_and_recovers() {
    let mut cluster = Setup::new(Flavor::Redis7).coverage(Coverage::Partial).start();
    let store = RedisStore::connect(&url(&cluster)).await.unwrap();
    let places = places(&cluster, &store).await;
    let [dead, alive, well] = [0, 1, 2].map(|node| at(&places, node).key);
    hit(&store, &dead).await.unwrap();
    cluster.node_mut(0).kill();
    // the open connection fails with the first call, which may have run
    let _ = hit(&store, &dead).await;
    for _ in 0..300 {
        assert!(passes(&hit(&store, &alive).await.unwrap()));
        assert!(passes(
            &ask(&store, check(Operation::Check, &[(&alive, MANY), (&well, MANY)])).await.unwrap()
        ));
        let error = hit(&store, &dead).await.unwrap_err();
        assert!(matches!(error, StoreError::NotRun(_)), "{error}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    // one batch: checks on live nodes are answered, others get an error
    let batch = [&dead, &alive].map(|key| check(Operation::Check, &[(key, MANY)]));
    let each = store.decide(&batch, None).await;
    assert!(matches!(each[0], Err(StoreError::NotRun(_))), "{each:?}");
    assert!(passes(&each[1].as_ref().unwrap().answers));
    // a charge over both nodes is applied where possible and reported as ambiguous; a peek changes nothing
    let both = [(&*dead, MANY), (&*well, MANY)];
    let half = ask(&store, check(Operation::Charge, &both)).await.unwrap_err();
    assert!(matches!(half, StoreError::Ambiguous(_)), "{half}");
    let unseen = ask(&store, check(Operation::Peek, &both)).await.unwrap_err();
    assert!(matches!(unseen, StoreError::NotRun(_)), "{unseen}");
    // a denial by a live node decides the check
    let denied = ask(&store, check(Operation::Check, &[(&dead, MANY), (&well, 1)])).await.unwrap();
    assert_eq!((denied[1].passes, denied[1].charged), (0, 0));
    // a check over both nodes reserves nothing
    let before = used(&store, &well).await;
    for _ in 0..5 {
        let error = ask(&store, check(Operation::Check, &[(&dead, MANY), (&well, MANY)])).await.unwrap_err();
        assert!(matches!(error, StoreError::NotRun(_)), "{error}");
    }
    assert_eq!(used(&store, &well).await, before);

    cluster.node_mut(0).restart();
    let back = async {
        while hit(&store, &dead).await.is_err() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(wait::PATIENCE, back).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_promoted_replica_is_found_and_no_replica_decides() {
    let mut cluster = Setup::new(Flavor::Redis7).replicas(1).start();
    let store = RedisStore::connect(&url(&cluster)).await.unwrap();
    let places = places(&cluster, &store).await;
    let [planned, killed] = [1, 2].map(|node| at(&places, node));
    for _ in 0..10 {
        hit(&store, &planned.key).await.unwrap();
        hit(&store, &killed.key).await.unwrap();
    }
    tokio::task::block_in_place(|| cluster.failover(4));
    let answers = hit(&store, &planned.key).await.unwrap();
    assert_eq!(answers[0].available, i64::try_from(MANY).unwrap() - 11, "a planned failover loses nothing");

    cluster.node_mut(2).kill();
    let _ = hit(&store, &killed.key).await;
    tokio::task::block_in_place(|| {
        cluster.wait_for_other_primary(killed.slot, 2);
        cluster.wait_for_state(ClusterState::Ok);
    });
    let back = async {
        while let Err(error) = hit(&store, &killed.key).await {
            assert!(!error.to_string().contains("READONLY"), "{error}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(3), back).await.unwrap();
    for replica in [&cluster.nodes()[3], &cluster.nodes()[1]] {
        assert!(!replica.is_primary());
        let before = scripts_run(replica);
        for place in &places {
            hit(&store, &place.key).await.unwrap();
        }
        assert_eq!(scripts_run(replica), before);
    }
}

/// Returns how many scripts a server has run.
fn scripts_run(server: &Server) -> u64 {
    let info: String = redis::cmd("INFO").arg("commandstats").query(&mut server.connection()).unwrap();
    let calls = |line: &str| line.split_once("calls=")?.1.split(',').next()?.parse::<u64>().ok();
    info.lines().filter(|line| line.starts_with("cmdstat_eval")).filter_map(calls).sum()
}

/// Starts a proxy for each node, and connects a store through them.
async fn start_proxies(cluster: &Cluster) -> (RedisStore, Vec<Proxy>) {
    let proxies = tokio::task::block_in_place(|| cluster.start_proxies());
    let places: Vec<String> = proxies.iter().map(|proxy| proxy.addr().to_string()).collect();
    (RedisStore::connect(&format!("redis-cluster://{}", places.join(","))).await.unwrap(), proxies)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_with_a_lost_reply_is_charged_at_most_once_on_a_cluster() {
    let cluster = Cluster::start(Flavor::Redis7);
    let direct = RedisStore::connect(&url(&cluster)).await.unwrap();
    let places = places(&cluster, &direct).await;
    let keys = [0, 1, 2].map(|node| at(&places, node).key);
    let (store, proxies) = start_proxies(&cluster).await;
    let mut outcomes: BTreeMap<&str, (u64, u64)> = BTreeMap::new();
    for round in 0..60 {
        if round % 20 == 0 {
            proxies.iter().for_each(|proxy| proxy.drop_next_reply(RequestFilter::SCRIPTS));
        }
        for key in &keys {
            let (answered, lost) = outcomes.entry(key).or_default();
            match hit(&store, key).await {
                Ok(_) => *answered += 1,
                Err(StoreError::Ambiguous(_)) => *lost += 1,
                Err(other) => panic!("unexpected error: {other}"),
            }
        }
    }
    for (key, (answered, lost)) in outcomes {
        assert_eq!((answered, lost), (57, 3), "{key}");
        assert_eq!(used(&direct, key).await, 60, "{key}: each call was charged once");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_reservation_or_release_never_admits_more() {
    let cluster = Cluster::start(Flavor::Redis7);
    let direct = RedisStore::connect(&url(&cluster)).await.unwrap();
    let places = places(&cluster, &direct).await;
    let [first, last] = [0, 2].map(|node| at(&places, node).key);
    let (store, proxies) = start_proxies(&cluster).await;
    // a new store peeks at all tiers before it reserves; one that has seen enough room does not
    for (peeks, prefix) in [(1, "unknown"), (0, "known")] {
        let tiers = [(&*first, 30), (&*last, 20)];
        let mut store = store.clone().with_prefix(prefix).unwrap();
        let (mut admitted, mut lost) = (0_u64, 0_u64);
        for round in 0..60 {
            proxies.iter().for_each(Proxy::pass);
            if peeks == 1 {
                let places: Vec<String> = proxies.iter().map(|proxy| proxy.addr().to_string()).collect();
                store = RedisStore::connect(&format!("redis-cluster://{}", places.join(","))).await.unwrap();
                store = store.with_prefix(prefix).unwrap();
            }
            // after the peek, the first call of a node is its reservation, and the second one its release
            match round % 15 {
                3 => proxies[0].drop_every_nth_reply(peeks + 1, RequestFilter::SCRIPTS),
                9 => proxies[2].drop_every_nth_reply(peeks + 1, RequestFilter::SCRIPTS),
                12 => {
                    proxies[2].drop_every_nth_reply(peeks + 1, RequestFilter::SCRIPTS);
                    proxies[0].drop_every_nth_reply(peeks + 2, RequestFilter::SCRIPTS);
                }
                _ => {}
            }
            match ask(&store, check(Operation::Check, &tiers)).await {
                Ok(answers) => admitted += u64::from(passes(&answers)),
                Err(StoreError::Ambiguous(_)) => lost += 1,
                // a lost peek changes nothing
                Err(StoreError::NotRun(_)) if peeks == 0 => {}
                Err(other) => panic!("unexpected error: {other}"),
            }
        }
        assert!((3..=12).contains(&lost), "{prefix}: {lost} calls were lost");
        let direct = direct.clone().with_prefix(prefix).unwrap();
        let (first, last) = (used(&direct, &first).await, used(&direct, &last).await);
        assert!(last <= 20 && first <= 30, "{prefix}: {first} {last}");
        assert!(
            admitted <= last && admitted <= first,
            "{prefix}: {admitted} admitted, {first} and {last} used"
        );
        assert!(
            last <= admitted + lost && first <= admitted + lost,
            "{prefix}: {first} {last} {admitted} {lost}"
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_that_cannot_be_sent_is_reported_as_not_run_by_its_deadline() {
    let cluster = Cluster::start(Flavor::Redis7);
    let direct = RedisStore::connect(&url(&cluster)).await.unwrap();
    let key = at(&places(&cluster, &direct).await, 0).key;
    let (store, proxies) = start_proxies(&cluster).await;
    let places: Vec<String> = proxies.iter().map(|proxy| proxy.addr().to_string()).collect();
    let unconnected = RedisStore::connect_later(&format!("redis-cluster://{}", places.join(","))).unwrap();
    hit(&store, &key).await.unwrap();
    // no connection to one node, and no slot map from the others
    tokio::task::block_in_place(|| {
        proxies[0].set(Mode::Refuse);
        proxies[1].stall();
        proxies[2].stall();
    });
    // the open connection fails with the first call, which may have run
    let _ = hit(&store, &key).await;
    let check = [check(Operation::Check, &[(&key, MANY)])];
    for store in [&store, &unconnected] {
        for _ in 0..10 {
            let deadline = Instant::now() + Duration::from_millis(50);
            let outcome = store.decide(&check, Some(Deadline::Process(deadline))).await.remove(0);
            assert!(matches!(outcome, Err(StoreError::NotRun(_))), "{outcome:?}");
            let late = deadline.elapsed();
            assert!(late < Duration::from_millis(100), "reported {late:?} after the deadline");
        }
    }
}

#[tokio::test]
async fn unreachable_addresses_are_reported_at_once() {
    let error = RedisStore::connect("redis-cluster://127.0.0.1:1,127.0.0.1:2").await.unwrap_err();
    assert!(error.to_string().contains("127.0.0.1:2"), "{error}");
    let store = RedisStore::connect_later("redis-cluster://127.0.0.1:1").unwrap();
    assert!(matches!(hit(&store, "k").await, Err(StoreError::NotRun(_))));
    let standalone = Server::start(Flavor::Redis7);
    let error = RedisStore::connect(&format!("redis-cluster://{}", standalone.addr())).await.unwrap_err();
    assert!(error.to_string().contains("cluster support disabled"), "{error}");
}
