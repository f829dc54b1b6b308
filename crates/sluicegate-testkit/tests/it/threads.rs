//! Many threads and tasks of one process on the same counters: the count is exact, in memory and in Redis.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Barrier, OnceLock};
use std::thread;
use std::time::Duration;

use rand::seq::IndexedRandom;
use sluicegate::{
    Algorithm, Cost, Decision, Labels, Limit, Limiter, MemoryStore, Options, RedisStore, Rule,
    limiter::Operation,
    store::{Check, Key, Store, Terms, Tier},
};
use sluicegate_core::limit::MAX_WINDOW;
use sluicegate_testkit::hammer::check_snapshot;
use sluicegate_testkit::server::{Flavor, Server};
use sluicegate_testkit::store_fixture::decide;
use tokio::runtime::{Builder, Runtime};
use tokio::task::JoinSet;

const THREADS: usize = 4;
const OPTIONS: Options = Options::new().deadline(Duration::from_secs(5)).denial_cache(Duration::from_secs(1));

/// Timeout of a test that could deadlock.
const STANDSTILL: Duration = Duration::from_secs(30);

/// How long a thread may be suspended between reading the clock of the memory store and taking its lock.
const HELD_UP: Duration = Duration::from_secs(10);

/// Returns a limit that admits `capacity` once and nothing more during a test.
fn once(algorithm: Algorithm, capacity: u64) -> Limit {
    Limit::new(algorithm, capacity, MAX_WINDOW).expect("within the range")
}

fn tasks() -> Runtime {
    Builder::new_multi_thread().worker_threads(THREADS).enable_all().build().expect("a runtime starts")
}

/// Runs `work` on another thread. A deadlock fails the test.
fn within_bound<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let (sender, done) = channel();
    let worker = thread::spawn(move || sender.send(work()).expect("the test waits"));
    match done.recv_timeout(STANDSTILL) {
        Ok(result) => result,
        Err(std::sync::mpsc::RecvTimeoutError::Timeout) => panic!("no end within {STANDSTILL:?}: a deadlock"),
        Err(_) => match worker.join() {
            Err(panic) => std::panic::resume_unwind(panic),
            Ok(()) => unreachable!("it ended without a result and without a panic"),
        },
    }
}

/// Asserts that a reply is consistent, and returns whether the call was admitted.
fn admitted(decision: &Decision, limits: &[Limit], cost: Cost) -> bool {
    check_snapshot(decision, limits, cost, HELD_UP).unwrap_or_else(|complaint| panic!("{complaint}"));
    decision.is_allowed()
}

/// Returns the usage of a key.
async fn used(limiter: &Limiter, key: &str, limit: &Limit) -> u64 {
    let peeked = limiter.peek_key(key, limit, Cost::ZERO).await.expect("the key is valid");
    assert!(!peeked.is_degraded());
    limit.capacity() - peeked.remaining().expect("one limit decides")
}

/// Starts tasks with several calls each at the same time, and returns how many calls were admitted.
async fn hammer(limiter: &Limiter, limit: Limit, callers: usize, calls: usize) -> u64 {
    let barrier = Arc::new(tokio::sync::Barrier::new(callers));
    let mut running = JoinSet::new();
    for _ in 0..callers {
        let (limiter, barrier) = (limiter.clone(), Arc::clone(&barrier));
        running.spawn(async move {
            barrier.wait().await;
            let mut count = 0;
            for _ in 0..calls {
                let decision = limiter.check_key("hot", &limit, Cost::ONE).await.expect("the key is valid");
                count += u64::from(admitted(&decision, &[limit], Cost::ONE));
            }
            count
        });
    }
    running.join_all().await.iter().sum()
}

/// Asserts that more calls than the limit allows admit and count exactly the limit, under each algorithm.
async fn admits_exactly(limiter: &Limiter, amount: u64, callers: usize, calls: usize) {
    assert!(
        u64::try_from(callers * calls).expect("a small number") > amount,
        "the demand must saturate the limit"
    );
    for algorithm in Algorithm::WINDOWED {
        let limit = once(algorithm, amount);
        assert_eq!(hammer(limiter, limit, callers, calls).await, amount, "{algorithm}");
        assert_eq!(used(limiter, "hot", &limit).await, amount, "{algorithm}");
    }
}

async fn in_redis(server: &Server) -> Limiter {
    let store = RedisStore::connect(&server.url()).await.expect("the server answers");
    Limiter::builder().store(store).rules([]).options(OPTIONS).build().expect("no rules are valid rules")
}

#[test]
fn four_threads_on_the_memory_store_get_exactly_the_limit() {
    // A race shows only when a limit is exhausted: many limits, each lasting until all threads run.
    const ROUNDS: usize = 60;
    const AMOUNT: u64 = 200;
    for algorithm in Algorithm::WINDOWED {
        let limiter = Limiter::new(MemoryStore::new(), []).unwrap();
        let limit = once(algorithm, AMOUNT);
        let barrier = Barrier::new(THREADS);
        let counts: Vec<_> = (0..ROUNDS).map(|_| AtomicU64::new(0)).collect();
        // A thread that panics would leave the others waiting at the barrier.
        let complaint = OnceLock::new();
        let hammer = || {
            let runtime = Builder::new_current_thread().build().unwrap();
            for (round, count) in counts.iter().enumerate() {
                let key = format!("round-{round}");
                barrier.wait();
                for _ in 0..AMOUNT {
                    let decision = runtime.block_on(limiter.check_key(&key, &limit, Cost::ONE)).unwrap();
                    count.fetch_add(u64::from(decision.is_allowed()), Ordering::Relaxed);
                    if let Err(what) = check_snapshot(&decision, &[limit], Cost::ONE, HELD_UP) {
                        complaint.get_or_init(|| what);
                    }
                }
            }
        };
        thread::scope(|scope| {
            for _ in 0..THREADS {
                scope.spawn(hammer);
            }
        });
        assert_eq!(complaint.into_inner(), None, "{algorithm}");
        for (round, count) in counts.into_iter().enumerate() {
            assert_eq!(count.into_inner(), AMOUNT, "{algorithm}, round {round}");
        }
    }
}

#[test]
fn sixty_four_parallel_callers_admit_exactly_the_limit_in_memory() {
    let limiter = Limiter::new(MemoryStore::new(), []).unwrap();
    tasks().block_on(admits_exactly(&limiter, 1_000, 64, 100));
}

#[test]
fn sixty_four_parallel_callers_admit_exactly_the_limit_in_redis() {
    let server = Server::start(Flavor::Redis7);
    tasks().block_on(async { admits_exactly(&in_redis(&server).await, 500, 64, 20).await });
}

#[test]
fn a_thousand_concurrent_callers_on_one_key_stay_exact_in_memory() {
    let limiter = Limiter::new(MemoryStore::new(), []).unwrap();
    tasks().block_on(admits_exactly(&limiter, 1_500, 1_000, 3));
}

#[test]
fn a_thousand_concurrent_callers_on_one_key_stay_exact_in_redis() {
    let server = Server::start(Flavor::Redis7);
    tasks().block_on(async { admits_exactly(&in_redis(&server).await, 1_500, 1_000, 3).await });
}

/// Counters that checks use in any order, and how much was admitted to each.
struct Counters {
    tiers: Vec<Tier>,
    admitted: Vec<AtomicU64>,
}

impl Counters {
    /// Returns a dozen counters of all algorithms at a cost of 1. Some fill up long before others.
    fn new() -> Arc<Counters> {
        let tier = |(index, algorithm): (u64, Algorithm)| {
            let key = Key::without_rule(format!("counter-{index}")).expect("a short key");
            Tier { key, terms: Terms::new(once(algorithm, 100 * (index + 1)), Cost::ONE) }
        };
        let tiers: Vec<_> = (0..12).zip(Algorithm::WINDOWED.into_iter().cycle()).map(tier).collect();
        let admitted = tiers.iter().map(|_| AtomicU64::new(0)).collect();
        Arc::new(Counters { tiers, admitted })
    }

    /// Checks two counters and records whether they were admitted.
    async fn check_two(&self, store: &Store) {
        let places: Vec<usize> = (0..self.tiers.len()).collect();
        let pair: Vec<usize> = places.choose_multiple(&mut rand::rng(), 2).copied().collect();
        // choose_multiple does not guarantee an order: use both orders
        let pair = if rand::random() { pair } else { pair.into_iter().rev().collect() };
        let tiers = pair.iter().map(|place| self.tiers[*place].clone()).collect();
        let check = Check::new(Operation::Check, tiers).expect("tiers are on different keys");
        let decided = decide(store, &[check], None).await.expect("the store answers");
        let answers = &decided[0].answers;
        let passes = answers.iter().all(|answer| answer.passes == 1);
        for (place, answer) in pair.into_iter().zip(answers) {
            assert_eq!(answer.charged, u32::from(passes), "all or none: {answers:?}");
            self.admitted[place].fetch_add(u64::from(answer.charged), Ordering::Relaxed);
        }
    }

    /// Asserts that the usage of each counter equals what was admitted to it, and that some are full.
    async fn assert_consistent(&self, store: &Store) {
        let mut full = 0;
        for (tier, admitted) in self.tiers.iter().zip(&self.admitted) {
            let peek = Check::new(Operation::Peek, vec![tier.clone()]).expect("one tier is a check");
            let free = decide(store, &[peek], None).await.expect("the store answers")[0].answers[0].available;
            let capacity = tier.terms.limit.capacity();
            let used = capacity - u64::try_from(free).expect("no counter is in debt");
            assert_eq!(used, admitted.load(Ordering::Relaxed), "used and admitted of {}", tier.key);
            full += u32::from(used == capacity);
        }
        assert!(full > 0, "no counter is full, so no check was denied");
    }
}

#[test]
fn two_tiers_in_opposite_orders_from_many_threads_neither_deadlock_nor_miscount() {
    const CALLS: usize = 20_000;
    within_bound(|| {
        let store = Store::from(MemoryStore::new());
        let counters = Counters::new();
        let barrier = Barrier::new(THREADS);
        thread::scope(|scope| {
            for _ in 0..THREADS {
                scope.spawn(|| {
                    let runtime = Builder::new_current_thread().build().unwrap();
                    barrier.wait();
                    for _ in 0..CALLS {
                        runtime.block_on(counters.check_two(&store));
                    }
                });
            }
        });
        Builder::new_current_thread().build().unwrap().block_on(counters.assert_consistent(&store));
    });
}

#[test]
fn two_tiers_in_opposite_orders_from_many_tasks_neither_deadlock_nor_miscount_in_redis() {
    let server = Server::start(Flavor::Redis7);
    let url = server.url();
    within_bound(move || {
        tasks().block_on(async {
            let store = Arc::new(Store::from(RedisStore::connect(&url).await.unwrap()));
            let counters = Counters::new();
            let mut running = JoinSet::new();
            for _ in 0..64 {
                let (store, counters) = (Arc::clone(&store), Arc::clone(&counters));
                running.spawn(async move {
                    for _ in 0..60 {
                        counters.check_two(&store).await;
                    }
                });
            }
            running.join_all().await;
            counters.assert_consistent(&store).await;
        });
    });
}

#[test]
fn rules_of_two_tiers_charge_both_or_none_under_parallel_callers() {
    const CALLERS: u64 = 64;
    const CALLS: u64 = 100;
    for (algorithm, users_algorithm) in
        Algorithm::WINDOWED.into_iter().zip(Algorithm::WINDOWED.into_iter().rev())
    {
        // Eight users could take 1600.
        let limits = [once(algorithm, 1_000), once(users_algorithm, 200)];
        let rules = [Rule::new("global", limits[0]), Rule::new("each", limits[1]).per(["user"])];
        let limiter = Limiter::new(MemoryStore::new(), rules).unwrap();
        let labels = |user: u64| Labels::new([("user", user.to_string())]).unwrap();
        let mut running = JoinSet::new();
        let runtime = tasks();
        for caller in 0..CALLERS {
            let (limiter, user) = (limiter.clone(), caller % 8);
            let labels = labels(user);
            let calls = async move {
                let mut count = 0;
                for _ in 0..CALLS {
                    let decision = limiter.check(&labels, Cost::ONE).await.unwrap();
                    count += u64::from(admitted(&decision, &limits, Cost::ONE));
                }
                (user, count)
            };
            running.spawn_on(calls, runtime.handle());
        }
        runtime.block_on(async {
            let counts = running.join_all().await;
            let together: u64 = counts.iter().map(|(_, count)| count).sum();
            assert_eq!(together, 1_000, "{algorithm}");
            for user in 0..8 {
                let alone: u64 = counts.iter().filter(|(of, _)| *of == user).map(|(_, count)| count).sum();
                let peeked = limiter.peek(&labels(user), Cost::ZERO).await.unwrap();
                let used: Vec<_> = peeked.tiers.iter().map(|tier| tier.limit - tier.remaining).collect();
                assert_eq!(used, [together, alone], "{algorithm}, {users_algorithm}");
            }
        });
    }
}
