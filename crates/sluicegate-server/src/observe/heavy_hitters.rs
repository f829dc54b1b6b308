//! Heavy hitters: the keys with the most checks and the most denials, in bounded memory.
//!
//! Each thread has a pair of frequent-items sketches (Misra and Gries, as implemented by Apache DataSketches), which a
//! snapshot merges. The count of a key is never too large, and too small by at most [`HeavyHitterSnapshot::error`], which is
//! at most [`ERROR_SHARE`] of all recorded checks. A key with more checks than that is never missed.
//!
//! A thread records the first [`EXACT`] checks of a window individually, and then a random sample of one in [`SAMPLED`] with
//! that weight: recording every check would cost about as much as deciding it. Counts then have a sampling error too,
//! mostly less than twice the square root of [`SAMPLED`] times the count.
//!
//! The current and the previous window are kept, so that old checks expire. Secret labels are already hashed.

use std::{
    borrow::Borrow,
    hash::{BuildHasher, Hash, Hasher},
    sync::{
        Arc, LazyLock,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use datasketches::frequencies::{ErrorType, FrequentItemsSketch};
use foldhash::{SharedSeed, quality::SeedableRandomState};
use parking_lot::Mutex;
use serde::Serialize;
use sluicegate::{Labels, random};

use super::{counters::KEY_RULE, per_thread::PerThread};

/// Length of a window. A snapshot covers one to two windows.
pub const WINDOW: Duration = Duration::from_secs(300);

/// Number of checks per window and thread that are recorded individually.
pub const EXACT: u64 = 20_000;

/// Sampling interval after that: one check in this many is recorded.
pub const SAMPLED: u64 = 16;

/// Capacity of a sketch, a power of two; three quarters of it are used.
const CAPACITY: usize = 512;

/// Maximum error of a count, as a share of all recorded checks.
pub const ERROR_SHARE: f64 = 3.5 / CAPACITY as f64;

/// Maximum length of a displayed key, in bytes; longer keys are truncated.
const MAX_TEXT: usize = 256;

/// Maximum number of keys in each list of a snapshot.
pub const MAX_KEYS: usize = 100;

/// The outcome of a check for one key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyOutcome {
    /// The rule allowed the request.
    Allowed,
    /// The rule denied the request.
    Denied,
}

/// The parts of a rule that identify its keys.
pub struct KeyedRule {
    name: Arc<str>,
    per: Box<[Box<str>]>,
}

/// The heavy hitters of the last one to two windows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct HeavyHitterSnapshot {
    /// Covered time, in seconds.
    pub seconds: u64,
    /// Checks that matched a rule.
    pub count: u64,
    /// Checks that the rule denied.
    pub denied: u64,
    /// Maximum error of the counts of checks.
    pub error: u64,
    /// Maximum error of the counts of denials.
    pub denied_error: u64,
    /// The keys with the most checks, in descending order.
    pub heaviest: Vec<HeavyHitter>,
    /// The keys with the most denials, in descending order.
    pub most_denied: Vec<HeavyHitter>,
}

/// A key and its counts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct HeavyHitter {
    /// The rule's name.
    pub rule: Arc<str>,
    /// The counted labels as `label=value`; empty if the rule has one counter for all requests.
    pub key: Box<str>,
    /// Number of checks.
    pub count: u64,
    /// Number of denials.
    pub denied: u64,
}

/// Records checks by key.
pub struct HeavyHitters {
    recorders: Box<PerThread<Recorder>>,
    hashing: SeedableRandomState,
}

/// The record of one thread, or of several threads that share it.
#[derive(Default)]
struct Recorder {
    /// Number of checks to skip. Threads that share it may lose updates, which does not bias the sample.
    skip: AtomicU64,
    windows: Mutex<Windows>,
}

struct Windows {
    current: Sketches,
    previous: Option<Sketches>,
    random_state: u64,
}

#[derive(Clone)]
struct Sketches {
    started: Duration,
    checked: FrequentItemsSketch<KeyName>,
    denied: FrequentItemsSketch<KeyName>,
}

/// A key, identified by a keyed 64-bit hash.
#[derive(Clone)]
struct KeyName {
    hash: u64,
    rule: Option<Arc<str>>,
    text: Box<str>,
}

impl KeyedRule {
    /// Creates a rule that counts by these labels.
    pub fn new(name: Arc<str>, per: &[Box<str>]) -> Self {
        Self { name, per: per.into() }
    }

    fn text(&self, labels: &Labels) -> Box<str> {
        text_of_labels(self.per.iter().map(|label| (&**label, labels.get(label).unwrap_or_default())))
    }
}

impl Default for HeavyHitters {
    fn default() -> Self {
        static SEED: LazyLock<SharedSeed> = LazyLock::new(|| SharedSeed::from_u64(random()));
        Self { recorders: Box::default(), hashing: SeedableRandomState::with_seed(random(), &SEED) }
    }
}

impl HeavyHitters {
    /// Records a check that matched a rule. `now` is the time since recording started.
    pub fn record_rule(&self, rule: &Arc<KeyedRule>, labels: &Labels, outcome: KeyOutcome, now: Duration) {
        let recorder = self.recorders.own();
        if recorder.is_skipped() {
            return;
        }
        let mut hasher = self.hashing.build_hasher();
        hasher.write(rule.name.as_bytes());
        for label in &rule.per {
            let value = labels.get(label).unwrap_or_default();
            hasher.write_usize(value.len());
            hasher.write(value);
        }
        recorder.record(hasher.finish(), outcome, now, || (Some(Arc::clone(&rule.name)), rule.text(labels)));
    }

    /// Records a check with its own limit, counted by all its labels.
    pub fn record_labels(&self, labels: &Labels, outcome: KeyOutcome, now: Duration) {
        let recorder = self.recorders.own();
        if recorder.is_skipped() {
            return;
        }
        let mut hasher = self.hashing.build_hasher();
        for (label, value) in labels.iter() {
            for part in [label.as_bytes(), value] {
                hasher.write_usize(part.len());
                hasher.write(part);
            }
        }
        let text = || (None, text_of_labels(labels.iter()));
        recorder.record(hasher.finish(), outcome, now, text);
    }

    /// Records a check of a key.
    pub fn record_key(&self, key: &[u8], outcome: KeyOutcome, now: Duration) {
        let recorder = self.recorders.own();
        if recorder.is_skipped() {
            return;
        }
        let text = || (None, text_of_key(key));
        recorder.record(self.hashing.hash_one(key), outcome, now, text);
    }

    /// Returns at most `count` keys with the most checks, and as many with the most denials.
    pub fn snapshot(&self, count: usize, now: Duration) -> HeavyHitterSnapshot {
        let count = count.min(MAX_KEYS);
        let mut all = Sketches::new(now);
        for recorder in self.recorders.all() {
            let windows = {
                let mut windows = recorder.windows.lock();
                windows.advance(now);
                [Some(windows.current.clone()), windows.previous.clone()]
            };
            for sketches in windows.into_iter().flatten() {
                all.add(&sketches);
            }
        }
        HeavyHitterSnapshot {
            seconds: now.saturating_sub(all.started).as_secs(),
            count: all.checked.total_weight(),
            denied: all.denied.total_weight(),
            error: all.checked.maximum_error(),
            denied_error: all.denied.maximum_error(),
            heaviest: all.heaviest(&all.checked, count),
            most_denied: all.heaviest(&all.denied, count),
        }
    }
}

impl Recorder {
    fn is_skipped(&self) -> bool {
        let left = self.skip.load(Relaxed);
        if left > 0 {
            self.skip.store(left - 1, Relaxed);
        }
        left > 0
    }

    fn record(
        &self,
        hash: u64,
        outcome: KeyOutcome,
        now: Duration,
        name: impl Fn() -> (Option<Arc<str>>, Box<str>),
    ) {
        let mut windows = self.windows.lock();
        windows.advance(now);
        let weight = if windows.current.checked.total_weight() < EXACT { 1 } else { SAMPLED };
        let Sketches { checked, denied, .. } = &mut windows.current;
        add_to(checked, hash, weight, &name);
        if outcome == KeyOutcome::Denied {
            add_to(denied, hash, weight, &name);
        }
        if weight > 1 {
            self.skip.store(windows.random_below(2 * weight - 1), Relaxed);
        }
    }
}

fn add_to(
    sketch: &mut FrequentItemsSketch<KeyName>,
    hash: u64,
    weight: u64,
    name: &impl Fn() -> (Option<Arc<str>>, Box<str>),
) {
    // A known key keeps its name, so that usually none is allocated.
    let is_known = sketch.lower_bound(&hash) > 0;
    let (rule, text) = if is_known { Default::default() } else { name() };
    sketch.update_with_count(KeyName { hash, rule, text }, weight);
}

impl Default for Windows {
    fn default() -> Self {
        Self { current: Sketches::new(Duration::ZERO), previous: None, random_state: random() | 1 }
    }
}

impl Windows {
    /// Returns a uniformly distributed number below `bound`.
    fn random_below(&mut self, bound: u64) -> u64 {
        // Marsaglia's xorshift suffices because predicting it has no benefit.
        self.random_state ^= self.random_state << 13;
        self.random_state ^= self.random_state >> 7;
        self.random_state ^= self.random_state << 17;
        self.random_state % bound
    }

    /// Starts the next window if the current one has ended.
    fn advance(&mut self, now: Duration) {
        let age = now.saturating_sub(self.current.started);
        if age < WINDOW {
            return;
        }
        let ended = std::mem::replace(&mut self.current, Sketches::new(now));
        self.previous = (age < 2 * WINDOW).then_some(ended);
    }
}

impl Sketches {
    fn new(started: Duration) -> Self {
        let sketch = || FrequentItemsSketch::new(CAPACITY).expect("the capacity is a power of two");
        Self { started, checked: sketch(), denied: sketch() }
    }

    fn add(&mut self, other: &Self) {
        self.started = self.started.min(other.started);
        self.checked.merge(&other.checked);
        self.denied.merge(&other.denied);
    }

    fn heaviest(&self, sketch: &FrequentItemsSketch<KeyName>, count: usize) -> Vec<HeavyHitter> {
        let mut rows = sketch.frequent_items_with_threshold(ErrorType::NoFalseNegatives, 0);
        rows.truncate(count);
        rows.iter()
            .map(|row| {
                let KeyName { hash, rule, text } = row.item();
                HeavyHitter {
                    rule: rule.clone().unwrap_or_else(|| KEY_RULE.into()),
                    key: text.clone(),
                    count: self.checked.lower_bound(hash).max(self.denied.lower_bound(hash)),
                    denied: self.denied.lower_bound(hash),
                }
            })
            .collect()
    }
}

impl PartialEq for KeyName {
    fn eq(&self, other: &Self) -> bool {
        self.hash == other.hash
    }
}

impl Eq for KeyName {}

impl Hash for KeyName {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.hash.hash(state);
    }
}

impl Borrow<u64> for KeyName {
    fn borrow(&self) -> &u64 {
        &self.hash
    }
}

/// Formats labels as `label=value`.
fn text_of_labels<'a>(labels: impl Iterator<Item = (&'a str, &'a [u8])>) -> Box<str> {
    let mut text = String::new();
    for (label, value) in labels {
        if !text.is_empty() {
            text.push(' ');
        }
        text.push_str(label);
        text.push('=');
        text.push_str(&String::from_utf8_lossy(value));
    }
    truncated(text)
}

/// Formats a key as text.
fn text_of_key(key: &[u8]) -> Box<str> {
    truncated(String::from_utf8_lossy(key).into_owned())
}

/// Truncates a text to [`MAX_TEXT`] bytes.
fn truncated(mut text: String) -> Box<str> {
    if text.len() > MAX_TEXT {
        text.truncate(text.floor_char_boundary(MAX_TEXT - '…'.len_utf8()));
        text.push('…');
    }
    text.into()
}
