//! Gate, breaker, coalescing and policies over a store that misbehaves, in virtual time: thousands of seeded schedules
//! of delays, lost requests, lost replies, requests that the wire repeats, errors, outages, restarts and clock steps.
//!
//! A failing seed is printed; `TOLLGATE_SEED=17 cargo nextest run -p tollgate -E 'test(/^simulation::/)'` replays it.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

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
use tokio::time::Instant;
use tollgate::{
    Algorithm, Check, Deadline, Decided, Decision, Key, Labels, Limit, Limiter, ManualClock, MemoryStore,
    OnStoreFailure, Options, Rule, Source, Store, StoreError, Timestamp,
};

const SEEDS: u64 = 2000;
const CALLERS: usize = 12;
const REQUESTS: usize = 25;
const AMOUNT: u64 = 8;
/// How many processes ask, as far as the store knows.
const INSTANCES: u64 = 2;
const WINDOW: Duration = Duration::from_secs(1);
const DEADLINE: Duration = Duration::from_millis(10);
const MILLI: Duration = Duration::from_millis(1);

/// A store at the end of a bad wire.
#[derive(Clone)]
struct Wire(Arc<Simulated>);

struct Simulated {
    counters: Mutex<MemoryStore>,
    clock: ManualClock,
    begun: Instant,
    fate: Mutex<Fate>,
    /// How often data was lost or the clock was set.
    upsets: AtomicU32,
    /// Requests that were decided, whether anybody heard of it or not.
    decided: AtomicU32,
}

struct Fate {
    random: StdRng,
    /// Out of a hundred calls, how many go wrong.
    trouble: u32,
    /// Until when nothing answers.
    away_until: Instant,
    /// By how much the store's clock is ahead, in milliseconds.
    ahead_ms: u64,
}

/// What becomes of one call.
enum Course {
    Answered {
        before: Duration,
        after: Duration,
    },
    RequestLost,
    ReplyLost {
        before: Duration,
    },
    /// The wire delivers it twice; the first answer counts.
    Repeated {
        before: Duration,
        again: Duration,
    },
    Refused,
}

impl Simulated {
    fn new(seed: u64) -> Self {
        let mut random = StdRng::seed_from_u64(seed);
        let clock = ManualClock::new(Timestamp::from_micros(1_794_765_441_799_839));
        let fate = Fate {
            trouble: [0, 5, 30, 90][random.random_range(0..4)],
            away_until: Instant::now(),
            ahead_ms: 0,
            random,
        };
        Self {
            counters: Mutex::new(MemoryStore::new().with_clock(clock.clone())),
            clock,
            begun: Instant::now(),
            fate: Mutex::new(fate),
            upsets: AtomicU32::new(0),
            decided: AtomicU32::new(0),
        }
    }

    fn course(&self) -> Course {
        let mut fate = self.fate.lock();
        let away = Instant::now() < fate.away_until;
        let trouble = fate.trouble;
        let wrong = fate.random.random_range(0..100) < trouble;
        let mut delay = |slow: bool| {
            let millis = if slow { fate.random.random_range(0..30) } else { fate.random.random_range(0..3) };
            MILLI * millis
        };
        let (before, after) = (delay(wrong), delay(wrong));
        if away {
            return Course::RequestLost;
        }
        if !wrong {
            return Course::Answered { before, after };
        }
        match fate.random.random_range(0..7) {
            0 => Course::RequestLost,
            1 => Course::ReplyLost { before },
            2 => Course::Refused,
            3 => {
                let outage = MILLI * fate.random.random_range(1..3000);
                fate.away_until = Instant::now() + outage;
                Course::RequestLost
            }
            4 => {
                self.upsets.fetch_add(1, Ordering::Relaxed);
                if fate.random.random_range(0..2) == 0 {
                    *self.counters.lock() = MemoryStore::new().with_clock(self.clock.clone());
                } else {
                    fate.ahead_ms = fate.random.random_range(0..5000);
                }
                Course::Answered { before, after }
            }
            5 => Course::Repeated { before, again: after },
            _ => Course::Answered { before, after },
        }
    }

    fn end_trouble(&self) {
        let mut fate = self.fate.lock();
        (fate.trouble, fate.away_until) = (0, Instant::now());
    }

    fn run(&self, checks: &[Check]) -> Decided {
        self.decided.fetch_add(checks.iter().map(Check::count).sum(), Ordering::Relaxed);
        self.decide(checks)
    }

    fn decide(&self, checks: &[Check]) -> Decided {
        let ahead = MILLI * u32::try_from(self.fate.lock().ahead_ms).unwrap();
        let begun = Timestamp::from_micros(1_794_765_441_799_839);
        self.clock.set(begun.plus(self.begun.elapsed()).plus(ahead));
        self.counters.lock().decide_all(checks)
    }
}

impl Store for Wire {
    async fn decide(&self, checks: &[Check], _: Option<Deadline>) -> Result<Decided, StoreError> {
        match self.0.course() {
            Course::Answered { before, after } => {
                // once sent, it runs, whether the caller waits or not
                let (store, checks) = (Arc::clone(&self.0), checks.to_vec());
                let ran = tokio::spawn(async move {
                    tokio::time::sleep(before).await;
                    store.run(&checks)
                });
                let decided = ran.await.unwrap();
                tokio::time::sleep(after).await;
                Ok(decided)
            }
            Course::ReplyLost { before } => {
                let (store, checks) = (Arc::clone(&self.0), checks.to_vec());
                tokio::spawn(async move {
                    tokio::time::sleep(before).await;
                    store.run(&checks);
                });
                pending().await
            }
            Course::Repeated { before, again } => {
                let (store, checks) = (Arc::clone(&self.0), checks.to_vec());
                let ran = tokio::spawn(async move {
                    tokio::time::sleep(before).await;
                    let decided = store.run(&checks);
                    tokio::spawn(async move {
                        tokio::time::sleep(again).await;
                        // more is taken, which admits nobody; that it was sent twice is not the gate's doing
                        store.decide(&checks);
                    });
                    decided
                });
                Ok(ran.await.unwrap())
            }
            Course::RequestLost => pending().await,
            Course::Refused => Err(StoreError::Refused { code: "OOM".to_owned(), detail: String::new() }),
        }
    }

    fn lane(&self, _: &Check) -> u64 {
        0
    }

    fn is_remote(&self) -> bool {
        true
    }

    async fn probe(&self, _: u64) -> Result<(), StoreError> {
        match self.0.course() {
            Course::Answered { before, .. } | Course::Repeated { before, .. } => {
                tokio::time::sleep(before).await;
                Ok(())
            }
            Course::Refused => Err(StoreError::Refused { code: "OOM".to_owned(), detail: String::new() }),
            Course::RequestLost | Course::ReplyLost { .. } => pending().await,
        }
    }

    async fn announce(&self, _: u64, _: Duration) -> Result<u32, StoreError> {
        Ok(u32::try_from(INSTANCES).unwrap())
    }

    async fn reset(&self, counters: &[(Key, Algorithm)]) -> Result<u64, StoreError> {
        Ok(self.0.counters.lock().forget(counters))
    }
}

fn rules() -> [Rule; 3] {
    [OnStoreFailure::Open, OnStoreFailure::Closed, OnStoreFailure::Local].map(|policy| {
        let limit = Limit::sliding_log(AMOUNT, WINDOW).unwrap();
        let name = format!("{policy:?}");
        Rule::new(&name, limit).per([&*name]).on_store_failure(policy)
    })
}

/// A request, and what came of it.
struct Asked {
    subject: (usize, u64),
    decision: Decision,
}

async fn caller(limiter: Limiter<Wire>, mut random: StdRng) -> Vec<Asked> {
    let mut all = Vec::new();
    for _ in 0..REQUESTS {
        tokio::time::sleep(MILLI * random.random_range(0..200)).await;
        let (policy, user) = (random.random_range(0..3), random.random_range(0..2));
        let label = ["Open", "Closed", "Local"][policy];
        let labels = Labels::new([(label, format!("{user}"))]).unwrap();
        let before = Instant::now();
        if random.random_range(0..10) == 0 {
            // who goes away hears nothing, and must not be waited for
            let _ = tokio::time::timeout(MILLI * random.random_range(0..8), limiter.check(&labels, 1)).await;
            continue;
        }
        let decision = limiter.check(&labels, 1).await.unwrap();
        assert!(before.elapsed() <= DEADLINE + MILLI, "an answer after {:?}", before.elapsed());
        all.push(Asked { subject: (policy, user), decision });
    }
    all
}

/// What must hold of every answer by itself, and of all together.
fn judge(store: &Simulated, asked: &[Asked]) {
    for Asked { subject: (policy, _), decision } in asked {
        let expected = [(Source::Open, true), (Source::Closed, false)];
        match decision.source {
            Source::Store => assert!(decision.at.is_some() && decision.failure.is_none()),
            Source::Local => assert!(!decision.is_allowed(), "only refusals are certain"),
            Source::Fallback => assert_eq!(*policy, 2),
            source => assert_eq!((source, decision.is_allowed()), expected[*policy]),
        }
        assert_eq!(decision.is_degraded(), decision.failure.is_some());
    }
    let upsets = u64::from(store.upsets.load(Ordering::Relaxed));
    let mut admitted: HashMap<(usize, u64), Vec<Timestamp>> = HashMap::new();
    let by_store = |asked: &&Asked| asked.decision.source == Source::Store && asked.decision.is_allowed();
    for Asked { subject, decision } in asked.iter().filter(by_store) {
        admitted.entry(*subject).or_default().push(decision.at.unwrap());
    }
    for (subject, mut times) in admitted {
        times.sort_unstable();
        for (first, time) in times.iter().enumerate() {
            let in_window = times[first..].iter().take_while(|later| **later < time.plus(WINDOW)).count();
            let bound = (1 + upsets) * AMOUNT;
            assert!(in_window as u64 <= bound, "{subject:?}: {in_window} in a window, {upsets} upsets");
        }
    }
    let fallback = asked.iter().filter(|asked| asked.decision.source == Source::Fallback);
    let mut by_share: HashMap<u64, u64> = HashMap::new();
    for Asked { subject: (_, user), .. } in fallback.filter(|asked| asked.decision.is_allowed()) {
        *by_share.entry(*user).or_default() += 1;
    }
    // the share's clock is the real one, which hardly moves here: all of this is one window
    assert!(by_share.values().all(|admitted| *admitted <= AMOUNT / INSTANCES), "{by_share:?}");
    let requests = u32::try_from(CALLERS * REQUESTS).unwrap();
    assert!(store.decided.load(Ordering::Relaxed) <= requests, "nothing is sent twice");
}

async fn simulate(seed: u64) {
    let store = Arc::new(Simulated::new(seed));
    let options = Options { deadline: DEADLINE, ..Options::default() };
    let limiter = Limiter::with_options(Wire(Arc::clone(&store)), rules(), options).unwrap();
    let mut random = StdRng::seed_from_u64(!seed);
    let callers: Vec<_> = (0..CALLERS)
        .map(|_| tokio::spawn(caller(limiter.clone(), StdRng::seed_from_u64(random.random()))))
        .collect();
    let mut asked = Vec::new();
    for caller in callers {
        asked.extend(caller.await.unwrap());
    }
    judge(&store, &asked);

    // once the trouble is over, the store decides again within two seconds
    store.end_trouble();
    tokio::time::sleep(Duration::from_secs(2)).await;
    let decision = limiter.check(&Labels::new([("Closed", "new")]).unwrap(), 1).await.unwrap();
    assert_eq!((decision.is_allowed(), decision.source), (true, Source::Store));
}

#[test]
fn no_schedule_of_faults_breaks_a_promise() {
    let seeds = match std::env::var("TOLLGATE_SEED") {
        Ok(seed) => seed.parse().unwrap()..=seed.parse().unwrap(),
        Err(_) => 1..=SEEDS,
    };
    for seed in seeds {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
        let run = std::panic::AssertUnwindSafe(|| runtime.unwrap().block_on(simulate(seed)));
        if let Err(panic) = std::panic::catch_unwind(run) {
            eprintln!("replay this schedule with TOLLGATE_SEED={seed}");
            std::panic::resume_unwind(panic);
        }
    }
}
