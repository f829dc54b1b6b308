//! A deterministic simulation of leases: several processes with random demand over one simulated store, in virtual time.
//!
//! Requests and replies take time, replies are lost, calls fail, and processes crash and are replaced. A failure prints its seed;
//! `SLUICEGATE_SEED` replays it.

use std::{env, future::pending, sync::Arc, time::Duration};

use parking_lot::Mutex;
use rand::{Rng, SeedableRng, rngs::StdRng, seq::IndexedRandom};
use sluicegate::{
    Algorithm, Cost, Limit, Limiter, ManualClock, MemoryStore, Options, Source, StoreError, Timestamp,
    limiter::Operation,
    store::{Answer, BoxFuture, Check, CheckAnswer, Deadline, Key, LeaseCall, RemoteStore, Terms, Tier},
};
use sluicegate_core::Bound;
use sluicegate_testkit::{
    oracle::{Admitted, bucket_violation, window_violation},
    store_fixture::START,
};
use tokio::{
    task::JoinSet,
    time::{Instant, sleep},
};

/// The number of simulations in the normal run.
const SEEDS: u64 = 2_000;
/// How long a simulation lasts, in windows.
const WINDOWS: u32 = 3;

/// What goes wrong, as probabilities.
#[derive(Clone, Copy)]
struct Faults {
    lost_reply: f64,
    not_run: f64,
    crash: f64,
}

/// The simulated store: counters and leases behind a network.
struct SimulatedStore {
    state: Mutex<State>,
    begun: Instant,
    limit: Limit,
    longest_delay: Duration,
    faults: Faults,
}

struct State {
    counters: MemoryStore,
    clock: ManualClock,
    leases: Vec<RecordedLease>,
    chance: StdRng,
    processes: u32,
}

/// Leased units as the store records them.
struct RecordedLease {
    at: Timestamp,
    until: Timestamp,
    units: u64,
}

impl SimulatedStore {
    fn new(limit: Limit, longest_delay: Duration, faults: Faults, processes: u32, seed: u64) -> Arc<Self> {
        let (chance, clock) = (StdRng::seed_from_u64(seed), ManualClock::new(START));
        let counters = MemoryStore::new().with_clock(clock.clone());
        let state = State { counters, clock, leases: Vec::new(), chance, processes };
        Arc::new(Self { state: Mutex::new(state), begun: Instant::now(), limit, longest_delay, faults })
    }

    fn now(&self) -> Timestamp {
        START.plus(self.begun.elapsed())
    }

    async fn delay(&self) {
        let most = u64::try_from(self.longest_delay.as_micros()).unwrap();
        let micros = self.state.lock().chance.random_range(0..=most);
        sleep(Duration::from_micros(micros)).await;
    }

    fn happens(&self, probability: f64) -> bool {
        self.state.lock().chance.random_bool(probability)
    }

    fn decide_all(&self, checks: &[Check]) -> Vec<Result<CheckAnswer, StoreError>> {
        let at = self.now();
        let state = &mut *self.state.lock();
        state.clock.set(at);
        state.leases.retain(|lease| lease.until > at && lease.units > 0);
        let decided = checks.iter().map(|check| Ok(state.decide(check, at))).collect();
        let (leased, most) = (state.leased(), self.limit.lease().unwrap().units());
        assert!(leased <= most, "{leased} units are leased, at most {most} may be");
        decided
    }
}

impl State {
    fn leased(&self) -> u64 {
        self.leases.iter().map(|lease| lease.units).sum()
    }

    fn decide(&mut self, check: &Check, now: Timestamp) -> CheckAnswer {
        let tier = &check.tiers()[0];
        if let (Some(LeaseCall::End { spent, unspent }), Operation::Refund { at: Some(at) }) =
            (check.lease(), check.operation())
        {
            let refunded = self.end_lease(at, spent.into(), unspent.into());
            let terms = Terms::new(tier.terms.limit, Cost::new(refunded).unwrap());
            let refund = Check::new(check.operation(), vec![Tier { key: tier.key.clone(), terms }]).unwrap();
            return self.counters.decide_all(&[refund]).remove(0);
        }
        let mut answer = self.counters.decide_all(&[check.clone().without_lease()]).remove(0);
        let decided = &mut answer.answers[0];
        decided.leased = self.leased();
        let lease = tier.terms.limit.lease().unwrap();
        if let Some(LeaseCall::Draw { requests }) = check.lease()
            && decided.passes == check.count()
        {
            let (cost, free) = (tier.terms.cost.units(), u64::try_from(decided.available).unwrap_or(0));
            let room = (lease.units() - self.leased()) / cost;
            let drawn = u64::from(requests).min(room).min(free / (2 * cost));
            if drawn > 0 && drawn * 8 >= u64::from(requests) {
                let drawn = u32::try_from(drawn).unwrap();
                let charge = Check::new(Operation::Check, vec![tier.clone()]).unwrap().times(drawn);
                let charged = self.counters.decide_all(&[charge]).remove(0).answers[0];
                assert_eq!(charged.charged, drawn);
                let charged =
                    Answer { passes: check.count() + drawn, charged: check.count() + drawn, ..charged };
                answer.answers[0] = charged;
                let until = now.plus(lease.lifetime() + Duration::from_secs(1));
                self.leases.push(RecordedLease { at: now, until, units: u64::from(drawn) * cost });
            }
        }
        answer
    }

    /// Removes units of a lease and returns how many to refund.
    fn end_lease(&mut self, at: Timestamp, spent: u64, unspent: u64) -> u64 {
        let mut removed = 0;
        for lease in self.leases.iter_mut().filter(|lease| lease.at == at) {
            let part = lease.units.min(spent + unspent - removed);
            lease.units -= part;
            removed += part;
        }
        removed.saturating_sub(spent)
    }
}

impl RemoteStore for SimulatedStore {
    fn decide<'a>(
        &'a self,
        checks: &'a [Check],
        deadline: Option<Deadline>,
    ) -> BoxFuture<'a, Vec<Result<CheckAnswer, StoreError>>> {
        Box::pin(async move {
            self.delay().await;
            if self.happens(self.faults.not_run) {
                return vec![Err(StoreError::NotRun("injected".to_owned())); checks.len()];
            }
            if let Some(Deadline::Process(deadline)) = deadline
                && Instant::now() > deadline
            {
                return vec![Err(StoreError::Late(self.now())); checks.len()];
            }
            let decided = self.decide_all(checks);
            self.delay().await;
            if self.happens(self.faults.lost_reply) {
                return pending().await;
            }
            decided
        })
    }

    fn probe(&self, _: u64) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(async { Ok(()) })
    }

    fn announce(&self, _: u64, _: Duration) -> BoxFuture<'_, Result<u32, StoreError>> {
        Box::pin(async { Ok(self.state.lock().processes) })
    }

    fn reset<'a>(&'a self, _: &'a [(Key, Algorithm)]) -> BoxFuture<'a, Result<u64, StoreError>> {
        unreachable!("a simulation resets nothing")
    }

    fn has_leases(&self) -> bool {
        true
    }
}

/// The admitted calls of all processes, and how many of them were decided by a lease.
#[derive(Default)]
struct Report {
    admitted: Vec<Admitted>,
    leased: u64,
}

/// Calls until `end`, with random pauses.
async fn call_until(
    limiter: Limiter,
    limit: Limit,
    begun: Instant,
    end: Instant,
    mut chance: StdRng,
    report: Arc<Mutex<Report>>,
) {
    while Instant::now() < end {
        let units = *[1, 1, 1, 1, 2, 5].choose(&mut chance).unwrap();
        let cost = Cost::new(units.min(limit.capacity())).unwrap();
        let sent = begun.elapsed();
        let decision = limiter.check_key("hot", &limit, cost).await.unwrap();
        // the policy `open` admits without the store; the bound does not cover it
        if decision.is_allowed() && matches!(decision.source, Source::Store | Source::Lease) {
            let mut report = report.lock();
            report.admitted.push(Admitted { sent, received: begun.elapsed(), cost: cost.units() });
            report.leased += u64::from(decision.source == Source::Lease);
        }
        let pause = match chance.random_range(0..20) {
            0..12 => 0,
            12..19 => chance.random_range(0..20_000),
            _ => chance.random_range(0..500_000),
        };
        sleep(Duration::from_micros(pause.max(3_000))).await;
    }
}

fn random_limit(chance: &mut StdRng) -> Limit {
    let algorithm = *Algorithm::WINDOWED.choose(chance).unwrap();
    let amount = chance.random_range(20..=100);
    let window = Duration::from_millis(chance.random_range(100..=600));
    let limit = Limit::new(algorithm, amount, window).unwrap();
    let units = (amount * chance.random_range(2..=60) / 100).max(1);
    let lifetime = Duration::from_millis(chance.random_range(10..=300)).min(window);
    limit.with_lease(units, lifetime).unwrap()
}

/// Runs one simulation and returns how many calls a lease decided.
async fn simulate(seed: u64) -> u64 {
    let mut chance = StdRng::seed_from_u64(seed);
    let limit = random_limit(&mut chance);
    let faults = if chance.random_bool(0.5) {
        Faults { lost_reply: 0.03, not_run: 0.03, crash: 0.5 }
    } else {
        Faults { lost_reply: 0.0, not_run: 0.0, crash: 0.0 }
    };
    let processes = chance.random_range(1..=3);
    let longest_delay = Duration::from_micros(*[0, 500, 5_000].choose(&mut chance).unwrap());
    let store = SimulatedStore::new(limit, longest_delay, faults, processes, seed);
    let begun = store.begun;
    let end = begun + limit.window() * WINDOWS;
    let report = Arc::new(Mutex::new(Report::default()));
    let mut all = JoinSet::new();
    for _ in 0..processes {
        let mut own = StdRng::seed_from_u64(chance.random());
        let (store, report) = (Arc::clone(&store), Arc::clone(&report));
        all.spawn(async move {
            while Instant::now() < end {
                let options = Options::new().deadline(Duration::from_millis(50));
                let remote: Arc<dyn RemoteStore> = Arc::clone(&store) as _;
                let limiter = Limiter::builder().store(remote).options(options).build().unwrap();
                let until = if own.random_bool(faults.crash) {
                    Instant::now() + limit.window().mul_f64(own.random_range(0.1..1.5))
                } else {
                    end
                };
                let mut callers = JoinSet::new();
                for _ in 0..own.random_range(1..=3) {
                    let chance = StdRng::seed_from_u64(own.random());
                    let (limiter, report) = (limiter.clone(), Arc::clone(&report));
                    callers.spawn(call_until(limiter, limit, begun, until.min(end), chance, report));
                }
                callers.join_all().await;
                if own.random_bool(0.5) && faults.crash == 0.0 {
                    limiter.return_leases().await;
                }
                // without it, the process has crashed: its leases are lost
                sleep(Duration::from_millis(own.random_range(0..50))).await;
            }
        });
    }
    all.join_all().await;

    let Report { admitted, leased } = &*report.lock();
    let violation = match limit.bound() {
        Bound::Window { most, window } => window_violation(admitted, most, window),
        Bound::Bucket { burst, amount, window } => bucket_violation(admitted, burst, amount, window),
        Bound::Live { .. } => unreachable!("it has no lease"),
    };
    if let Some(violation) = violation {
        panic!("seed {seed}: {violation}\n{limit:#?}");
    }
    *leased
}

fn run(simulation: impl Future<Output = u64>) -> u64 {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
    runtime.block_on(simulation)
}

#[test]
fn with_leases_no_process_mix_and_no_fault_admits_more_than_the_bound_plus_the_lease() {
    if let Some(seed) = env::var("SLUICEGATE_SEED").ok().and_then(|seed| seed.parse().ok()) {
        run(simulate(seed));
        return;
    }
    let mut leased = 0;
    for seed in 0..SEEDS {
        leased += run(simulate(seed));
    }
    assert!(leased > 3 * SEEDS, "only {leased} calls were decided by leases");
}

/// Continuous demand of several processes uses at least the part of the limit that is not leased.
#[test]
fn with_leases_continuous_demand_uses_the_limit_less_the_lease() {
    for (seed, algorithm) in (0..).zip(Algorithm::WINDOWED) {
        run(async move {
            let window = Duration::from_secs(1);
            let limit = Limit::new(algorithm, 500, window).unwrap();
            let limit = limit.with_lease(50, Duration::from_millis(100)).unwrap();
            let faults = Faults { lost_reply: 0.0, not_run: 0.0, crash: 0.0 };
            let store = SimulatedStore::new(limit, Duration::from_millis(1), faults, 3, seed);
            let (begun, report) = (store.begun, Arc::new(Mutex::new(Report::default())));
            let end = begun + window * 4;
            let mut callers = JoinSet::new();
            for _ in 0..3 {
                let remote: Arc<dyn RemoteStore> = Arc::clone(&store) as _;
                let limiter = Limiter::builder().store(remote).build().unwrap();
                for _ in 0..4 {
                    let (limiter, report) = (limiter.clone(), Arc::clone(&report));
                    callers.spawn(async move {
                        while Instant::now() < end {
                            let decision = limiter.check_key("hot", &limit, Cost::ONE).await.unwrap();
                            if decision.is_allowed() {
                                let now = begun.elapsed();
                                let mut report = report.lock();
                                report.admitted.push(Admitted { sent: now, received: now, cost: 1 });
                                report.leased += u64::from(decision.source == Source::Lease);
                            }
                            sleep(Duration::from_millis(2)).await;
                        }
                    });
                }
            }
            callers.join_all().await;
            let Report { admitted, leased } = &*report.lock();
            let used = admitted.len();
            assert!(used >= 4 * 450, "{algorithm}: {used} of 2,000 units were used");
            assert!(*leased > 100, "{algorithm}: {leased} calls were decided by leases");
            *leased
        });
    }
}
