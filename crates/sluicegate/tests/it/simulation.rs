//! Deadlines, batching, circuit breaker and failure policies over a faulty store, in virtual time: thousands of seeded schedules of
//! delays, lost requests, lost replies, duplicated requests, errors, outages, restarts and clock steps.
//!
//! A failing seed is printed; `SLUICEGATE_SEED=17 cargo nextest run -p sluicegate -E 'test(/^simulation::/)'` replays it.

use std::{
    collections::HashMap,
    future::pending,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use rand::{Rng, SeedableRng, rngs::StdRng};
use sluicegate::{
    Algorithm, Decision, Labels, Limit, Limiter, ManualClock, MemoryStore, OnStoreFailure, Options, Rule,
    Source, StoreError, Timestamp,
    store::{BoxFuture, Check, CheckAnswer, Deadline, Key, RemoteStore},
};
use tokio::time::Instant;

const SEEDS: u64 = 2000;
const CALLERS: usize = 12;
const REQUESTS: usize = 25;
const AMOUNT: u64 = 8;
/// The number of instances that the store reports.
const INSTANCES: u64 = 2;
const WINDOW: Duration = Duration::from_secs(1);
const DEADLINE: Duration = Duration::from_millis(10);
const MILLI: Duration = Duration::from_millis(1);

/// A remote store over a faulty network.
#[derive(Clone)]
struct FaultyStore(Arc<SimulatedServer>);

struct SimulatedServer {
    counters: Mutex<MemoryStore>,
    clock: ManualClock,
    started: Instant,
    schedule: Mutex<FaultSchedule>,
    /// Number of data losses and clock changes.
    disruptions: AtomicU32,
    /// Requests that were decided, including those whose reply was lost.
    decided: AtomicU32,
}

struct FaultSchedule {
    random: StdRng,
    /// Percentage of faulty calls.
    fault_percent: u32,
    /// End of the current outage.
    down_until: Instant,
    /// How far the clock of the store is ahead, in milliseconds.
    clock_ahead_ms: u64,
}

/// The fate of one call.
enum CallOutcome {
    Answered {
        before: Duration,
        after: Duration,
    },
    RequestLost,
    ReplyLost {
        before: Duration,
    },
    /// The request is delivered twice; the first answer counts.
    Duplicated {
        before: Duration,
        again: Duration,
    },
    Rejected,
}

impl SimulatedServer {
    fn new(seed: u64) -> Self {
        let mut random = StdRng::seed_from_u64(seed);
        let clock = ManualClock::new(Timestamp::from_micros(1_794_765_441_799_839));
        let schedule = FaultSchedule {
            fault_percent: [0, 5, 30, 90][random.random_range(0..4)],
            down_until: Instant::now(),
            clock_ahead_ms: 0,
            random,
        };
        Self {
            counters: Mutex::new(MemoryStore::new().with_clock(clock.clone())),
            clock,
            started: Instant::now(),
            schedule: Mutex::new(schedule),
            disruptions: AtomicU32::new(0),
            decided: AtomicU32::new(0),
        }
    }

    fn next_outcome(&self) -> CallOutcome {
        let mut schedule = self.schedule.lock();
        let away = Instant::now() < schedule.down_until;
        let fault_percent = schedule.fault_percent;
        let wrong = schedule.random.random_range(0..100) < fault_percent;
        let mut delay = |slow: bool| {
            let millis =
                if slow { schedule.random.random_range(0..30) } else { schedule.random.random_range(0..3) };
            MILLI * millis
        };
        let (before, after) = (delay(wrong), delay(wrong));
        if away {
            return CallOutcome::RequestLost;
        }
        if !wrong {
            return CallOutcome::Answered { before, after };
        }
        match schedule.random.random_range(0..7) {
            0 => CallOutcome::RequestLost,
            1 => CallOutcome::ReplyLost { before },
            2 => CallOutcome::Rejected,
            3 => {
                let outage = MILLI * schedule.random.random_range(1..3000);
                schedule.down_until = Instant::now() + outage;
                CallOutcome::RequestLost
            }
            4 => {
                self.disruptions.fetch_add(1, Ordering::Relaxed);
                if schedule.random.random_range(0..2) == 0 {
                    *self.counters.lock() = MemoryStore::new().with_clock(self.clock.clone());
                } else {
                    schedule.clock_ahead_ms = schedule.random.random_range(0..5000);
                }
                CallOutcome::Answered { before, after }
            }
            5 => CallOutcome::Duplicated { before, again: after },
            _ => CallOutcome::Answered { before, after },
        }
    }

    fn end_faults(&self) {
        let mut schedule = self.schedule.lock();
        (schedule.fault_percent, schedule.down_until) = (0, Instant::now());
    }

    fn run(&self, checks: &[Check]) -> Vec<CheckAnswer> {
        self.decided.fetch_add(checks.iter().map(Check::count).sum(), Ordering::Relaxed);
        self.decide(checks)
    }

    fn decide(&self, checks: &[Check]) -> Vec<CheckAnswer> {
        let ahead = MILLI * u32::try_from(self.schedule.lock().clock_ahead_ms).unwrap();
        let started = Timestamp::from_micros(1_794_765_441_799_839);
        self.clock.set(started.plus(self.started.elapsed()).plus(ahead));
        self.counters.lock().decide_all(checks)
    }
}

impl FaultyStore {
    async fn decide(&self, checks: &[Check]) -> Result<Vec<CheckAnswer>, StoreError> {
        match self.0.next_outcome() {
            CallOutcome::Answered { before, after } => {
                // once sent, it runs even if the caller gives up
                let (store, checks) = (Arc::clone(&self.0), checks.to_vec());
                let ran = tokio::spawn(async move {
                    tokio::time::sleep(before).await;
                    store.run(&checks)
                });
                let decided = ran.await.unwrap();
                tokio::time::sleep(after).await;
                Ok(decided)
            }
            CallOutcome::ReplyLost { before } => {
                let (store, checks) = (Arc::clone(&self.0), checks.to_vec());
                tokio::spawn(async move {
                    tokio::time::sleep(before).await;
                    store.run(&checks);
                });
                pending().await
            }
            CallOutcome::Duplicated { before, again } => {
                let (store, checks) = (Arc::clone(&self.0), checks.to_vec());
                let ran = tokio::spawn(async move {
                    tokio::time::sleep(before).await;
                    let decided = store.run(&checks);
                    tokio::spawn(async move {
                        tokio::time::sleep(again).await;
                        // a duplicate charges more but admits nothing; it is not counted, as the limiter sent it once
                        store.decide(&checks);
                    });
                    decided
                });
                Ok(ran.await.unwrap())
            }
            CallOutcome::RequestLost => pending().await,
            CallOutcome::Rejected => {
                Err(StoreError::Rejected { code: "OOM".to_owned(), detail: String::new() })
            }
        }
    }
}

impl RemoteStore for FaultyStore {
    fn decide<'a>(
        &'a self,
        checks: &'a [Check],
        _: Option<Deadline>,
    ) -> BoxFuture<'a, Vec<Result<CheckAnswer, StoreError>>> {
        Box::pin(async move {
            match self.decide(checks).await {
                Ok(answers) => answers.into_iter().map(Ok).collect(),
                Err(error) => vec![Err(error); checks.len()],
            }
        })
    }

    fn probe(&self, _: u64) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(async {
            match self.0.next_outcome() {
                CallOutcome::Answered { before, .. } | CallOutcome::Duplicated { before, .. } => {
                    tokio::time::sleep(before).await;
                    Ok(())
                }
                CallOutcome::Rejected => {
                    Err(StoreError::Rejected { code: "OOM".to_owned(), detail: String::new() })
                }
                CallOutcome::RequestLost | CallOutcome::ReplyLost { .. } => pending().await,
            }
        })
    }

    fn announce(&self, _: u64, _: Duration) -> BoxFuture<'_, Result<u32, StoreError>> {
        Box::pin(async { Ok(u32::try_from(INSTANCES).unwrap()) })
    }

    fn reset<'a>(&'a self, counters: &'a [(Key, Algorithm)]) -> BoxFuture<'a, Result<u64, StoreError>> {
        Box::pin(async move { Ok(self.0.counters.lock().forget(counters)) })
    }
}

fn rules() -> [Rule; 3] {
    [OnStoreFailure::Open, OnStoreFailure::Closed, OnStoreFailure::Local].map(|policy| {
        let limit = Limit::sliding_log(AMOUNT, WINDOW).unwrap();
        let name = format!("{policy:?}");
        Rule::new(&name, limit).per([&*name]).on_store_failure(policy)
    })
}

/// A request and its decision.
struct CallRecord {
    subject: (usize, u64),
    decision: Decision,
}

async fn caller(limiter: Limiter, mut random: StdRng) -> Vec<CallRecord> {
    let mut all = Vec::new();
    for _ in 0..REQUESTS {
        tokio::time::sleep(MILLI * random.random_range(0..200)).await;
        let (policy, user) = (random.random_range(0..3), random.random_range(0..2));
        let label = ["Open", "Closed", "Local"][policy];
        let labels = Labels::new([(label, format!("{user}"))]).unwrap();
        let before = Instant::now();
        if random.random_range(0..10) == 0 {
            // a caller that gives up must not block others
            let _ = tokio::time::timeout(MILLI * random.random_range(0..8), limiter.check(&labels, 1)).await;
            continue;
        }
        let decision = limiter.check(&labels, 1).await.unwrap();
        assert!(before.elapsed() <= DEADLINE + MILLI, "an answer after {:?}", before.elapsed());
        all.push(CallRecord { subject: (policy, user), decision });
    }
    all
}

/// Asserts the invariants of every decision and of all decisions together.
fn assert_invariants(store: &SimulatedServer, calls: &[CallRecord], elapsed: Duration) {
    for CallRecord { subject: (policy, _), decision } in calls {
        let expected = [(Source::Open, true), (Source::Closed, false)];
        match decision.source {
            Source::Store => assert!(decision.at.is_some() && decision.failure.is_none()),
            Source::Cache => assert!(!decision.is_allowed(), "only denials are cached"),
            Source::Fallback => assert_eq!(*policy, 2),
            source => assert_eq!((source, decision.is_allowed()), expected[*policy]),
        }
        assert_eq!(decision.is_degraded(), decision.failure.is_some());
    }
    let disruptions = u64::from(store.disruptions.load(Ordering::Relaxed));
    let mut admitted: HashMap<(usize, u64), Vec<Timestamp>> = HashMap::new();
    let by_store =
        |calls: &&CallRecord| calls.decision.source == Source::Store && calls.decision.is_allowed();
    for CallRecord { subject, decision } in calls.iter().filter(by_store) {
        admitted.entry(*subject).or_default().push(decision.at.unwrap());
    }
    for (subject, mut times) in admitted {
        times.sort_unstable();
        for (first, time) in times.iter().enumerate() {
            let in_window = times[first..].iter().take_while(|later| **later < time.plus(WINDOW)).count();
            let bound = (1 + disruptions) * AMOUNT;
            assert!(
                in_window as u64 <= bound,
                "{subject:?}: {in_window} in a window, {disruptions} disruptions"
            );
        }
    }
    let fallback = calls.iter().filter(|calls| calls.decision.source == Source::Fallback);
    let mut by_share: HashMap<u64, u64> = HashMap::new();
    for CallRecord { subject: (_, user), .. } in fallback.filter(|calls| calls.decision.is_allowed()) {
        *by_share.entry(*user).or_default() += 1;
    }
    // the fallback uses the real clock, which hardly moves here: all of this is one window, unless the machine is busy
    let windows = 1 + elapsed.as_secs() / WINDOW.as_secs();
    assert!(by_share.values().all(|admitted| *admitted <= windows * AMOUNT / INSTANCES), "{by_share:?}");
    let requests = u32::try_from(CALLERS * REQUESTS).unwrap();
    assert!(store.decided.load(Ordering::Relaxed) <= requests, "a request was sent twice");
}

#[expect(clippy::disallowed_methods, reason = "the fallback uses the real clock, unlike the simulation")]
async fn simulate(seed: u64) {
    let start = std::time::Instant::now();
    let store = Arc::new(SimulatedServer::new(seed));
    let options = Options::default().deadline(DEADLINE);
    let limiter = Limiter::builder()
        .store(FaultyStore(Arc::clone(&store)))
        .rules(rules())
        .options(options)
        .build()
        .unwrap();
    let mut random = StdRng::seed_from_u64(!seed);
    let callers: Vec<_> = (0..CALLERS)
        .map(|_| tokio::spawn(caller(limiter.clone(), StdRng::seed_from_u64(random.random()))))
        .collect();
    let mut calls = Vec::new();
    for caller in callers {
        calls.extend(caller.await.unwrap());
    }
    assert_invariants(&store, &calls, start.elapsed());

    // after the faults end, the store decides again within two seconds
    store.end_faults();
    tokio::time::sleep(Duration::from_secs(2)).await;
    let decision = limiter.check(&Labels::new([("Closed", "new")]).unwrap(), 1).await.unwrap();
    assert_eq!((decision.is_allowed(), decision.source), (true, Source::Store));
}

#[test]
fn no_fault_schedule_violates_an_invariant() {
    let seeds = match std::env::var("SLUICEGATE_SEED") {
        Ok(seed) => seed.parse().unwrap()..=seed.parse().unwrap(),
        Err(_) => 1..=SEEDS,
    };
    for seed in seeds {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
        let run = std::panic::AssertUnwindSafe(|| runtime.unwrap().block_on(simulate(seed)));
        if let Err(panic) = std::panic::catch_unwind(run) {
            eprintln!("replay this schedule with SLUICEGATE_SEED={seed}");
            std::panic::resume_unwind(panic);
        }
    }
}
