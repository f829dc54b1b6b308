//! One in-process contestant in a fresh process: resident memory before and after its keys exist, then CPU
//! time per decision.

use std::{
    hint::black_box,
    num::NonZeroU32,
    sync::Barrier,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use governor::{DefaultKeyedRateLimiter, Quota, RateLimiter};
use serde::{Deserialize, Serialize};
use sluicegate::{
    Cost, Limit, MemoryStore,
    limiter::Operation,
    store::{Key, Terms},
};

use crate::{args::Effort, machine};

/// Decisions between two readings of the clock.
const STRIDE: usize = 1024;
/// Maximum number of prepared keys; above it, keys are formatted per call.
const MAX_PREPARED: usize = 10_000;

/// The store's bound, for a million keys: its default of 256 MiB does not hold them all.
const MAX_MEMORY: usize = 1 << 30;

/// The figures of one run.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Measured {
    /// CPU time per decision: the CPU time of all threads divided by the number of all decisions.
    pub cpu_ns: f64,
    /// Decisions per second of all threads together.
    pub rate: f64,
    /// Growth of resident memory while the keys were added.
    pub bytes_per_key: f64,
}

/// An in-process limiter.
pub struct Contestant {
    pub name: &'static str,
    pub title: &'static str,
    prepared_only: bool,
    /// Runs less often with many keys, because it takes long.
    slow: bool,
}

/// Rounds of a slow contestant with many keys.
const SLOW_ROUNDS: usize = 2;

impl Contestant {
    const fn new(name: &'static str, title: &'static str) -> Self {
        Self { name, title, prepared_only: false, slow: false }
    }

    /// Returns the number of rounds.
    pub fn rounds(&self, keys: usize, effort: Effort) -> usize {
        if self.slow && keys > MAX_PREPARED { effort.rounds.min(SLOW_ROUNDS) } else { effort.rounds }
    }

    /// Returns whether it takes part with this number of keys.
    pub fn takes(&self, keys: usize, effort: Effort) -> bool {
        let too_many = keys > MAX_PREPARED;
        !(too_many && (self.prepared_only || self.slow && effort.is_quick()))
    }
}

pub const CONTESTANTS: &[Contestant] = &[
    Contestant::new("governor", "governor, keyed"),
    Contestant { prepared_only: true, ..Contestant::new("sluicegate", "sluicegate MemoryStore") },
    Contestant::new("sluicegate-str", "sluicegate MemoryStore, &str"),
    Contestant::new("quota", "quota"),
    #[cfg(feature = "throttlecrab")]
    Contestant::new("throttlecrab", "throttlecrab, in a mutex"),
    #[cfg(feature = "limitador")]
    Contestant { slow: true, ..Contestant::new("limitador", "limitador") },
];

/// Decides by the text of a key, or by the index of a prepared key.
pub(super) trait Decider: Sync {
    #[expect(clippy::ptr_arg, reason = "governor looks up by &String")]
    fn by_text(&self, text: &String) -> bool;
    fn by_place(&self, place: usize) -> bool;
}

struct Governor {
    limiter: DefaultKeyedRateLimiter<String>,
    prepared: Vec<String>,
}

impl Decider for Governor {
    fn by_text(&self, text: &String) -> bool {
        self.limiter.check_key(text).is_ok()
    }

    fn by_place(&self, place: usize) -> bool {
        self.by_text(&self.prepared[place])
    }
}

struct Ours {
    store: MemoryStore,
    terms: Terms,
    prepared: Vec<Key>,
}

impl Ours {
    fn decide(&self, key: &Key) -> bool {
        self.store.decide_one(key, &self.terms, Operation::Check, 1).0.passes == 1
    }
}

impl Decider for Ours {
    fn by_text(&self, text: &String) -> bool {
        self.decide(&Key::without_rule(text).expect("the bench's keys are short and not empty"))
    }

    fn by_place(&self, place: usize) -> bool {
        self.decide(&self.prepared[place])
    }
}

/// Runs one contestant.
pub fn run(name: &str, keys: usize, threads: usize, time: Duration) -> Result<Measured> {
    let many = keys > MAX_PREPARED;
    // few keys are checked millions of times; many keys a few times each, and they must not expire in between
    let (amount, window_s) = if many { (10_000, 86_400) } else { (1_000_000_000, 100_000) };
    let window = Duration::from_secs(window_s);
    let prepared = || (0..if many { 0 } else { keys }).map(text_of);
    if name == "governor" {
        let burst = NonZeroU32::new(amount).context("a quota is not zero")?;
        let quota = Quota::with_period(window / amount).context("a period is not zero")?.allow_burst(burst);
        let governor = Governor { limiter: RateLimiter::keyed(quota), prepared: prepared().collect() };
        let measured = measure(&governor, KeySet::new(keys, !many), threads, time)?;
        ensure!(governor.limiter.len() == keys, "governor holds {} keys", governor.limiter.len());
        return Ok(measured);
    }
    if name == "quota" {
        let pool = super::quota::Pool::new(amount, window_s, prepared().collect());
        let measured = measure(&pool, KeySet::new(keys, !many), threads, time)?;
        ensure!(pool.len() == keys, "quota holds {} keys", pool.len());
        return Ok(measured);
    }
    #[cfg(feature = "limitador")]
    if name == "limitador" {
        let limitador = super::limitador::Limitador::new(amount, window_s, keys, prepared().collect())?;
        return measure(&limitador, KeySet::new(keys, !many), threads, time);
    }
    #[cfg(feature = "throttlecrab")]
    if name == "throttlecrab" {
        let crab = super::throttlecrab::Crab::new(i64::from(amount), window_s as i64, prepared().collect());
        return measure(&crab, KeySet::new(keys, !many), threads, time);
    }
    let terms = Terms::new(Limit::token_bucket(u64::from(amount), window)?, Cost::ONE);
    let prepared = prepared().map(Key::without_rule).collect::<Result<_, _>>()?;
    let ours = Ours { store: MemoryStore::new().with_max_memory(MAX_MEMORY)?, terms, prepared };
    let measured = measure(&ours, KeySet::new(keys, !many && name == "sluicegate"), threads, time)?;
    ensure!(ours.store.len() == keys, "the store holds {} of {keys} counters", ours.store.len());
    Ok(measured)
}

fn text_of(place: usize) -> String {
    let mut text = String::new();
    write_text(place, &mut text);
    text
}

/// Writes `user:` and seven digits, without the cost of `format!`.
fn write_text(place: usize, text: &mut String) {
    text.clear();
    text.push_str("user:");
    let mut unit = 1_000_000;
    while unit > 0 {
        text.push(char::from(b'0' + (place / unit % 10) as u8));
        unit /= 10;
    }
}

/// The keys that are checked, and whether they are prepared.
#[derive(Clone, Copy)]
struct KeySet {
    keys: usize,
    by_place: bool,
}

impl KeySet {
    fn new(keys: usize, by_place: bool) -> Self {
        Self { keys, by_place }
    }

    fn decide(self, decider: &impl Decider, place: usize, text: &mut String) -> bool {
        if self.by_place {
            return decider.by_place(place);
        }
        write_text(place, text);
        decider.by_text(text)
    }
}

fn measure(decider: &impl Decider, key_set: KeySet, threads: usize, time: Duration) -> Result<Measured> {
    let before = machine::resident_bytes()?;
    let mut text = String::new();
    for place in 0..key_set.keys {
        ensure!(key_set.decide(decider, place, &mut text), "the first request of key {place} is denied");
    }
    let grown = machine::resident_bytes()?.saturating_sub(before);

    let barrier = Barrier::new(threads);
    let results = thread::scope(|scope| {
        let start = |seed| {
            let barrier = &barrier;
            scope.spawn(move || one_thread(decider, key_set, seed, time, barrier))
        };
        let running: Vec<_> = (0..threads as u64).map(start).collect();
        running
            .into_iter()
            .map(|thread| thread.join().expect("a thread panicked"))
            .collect::<Result<Vec<_>>>()
    })?;
    let decisions: u64 = results.iter().map(|result| result.decisions).sum();
    let cpu_ns: u64 = results.iter().map(|result| result.cpu_ns).sum();
    Ok(Measured {
        cpu_ns: cpu_ns as f64 / decisions as f64,
        rate: results.iter().map(|result| result.decisions as f64 / result.elapsed.as_secs_f64()).sum(),
        bytes_per_key: grown as f64 / key_set.keys as f64,
    })
}

struct Thread {
    decisions: u64,
    cpu_ns: u64,
    elapsed: Duration,
}

fn one_thread(
    decider: &impl Decider,
    key_set: KeySet,
    seed: u64,
    time: Duration,
    barrier: &Barrier,
) -> Result<Thread> {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut text = String::new();
    barrier.wait();
    let (begun, cpu_before) = (Instant::now(), machine::thread_cpu_ns()?);
    let mut decisions = 0;
    while begun.elapsed() < time {
        for _ in 0..STRIDE {
            let place = random.usize(..key_set.keys);
            ensure!(black_box(key_set.decide(decider, place, &mut text)), "key {place} is denied");
        }
        decisions += STRIDE as u64;
    }
    Ok(Thread { decisions, cpu_ns: machine::thread_cpu_ns()? - cpu_before, elapsed: begun.elapsed() })
}
