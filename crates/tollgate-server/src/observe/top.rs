//! The keys that ask the most and are refused the most, in bounded memory.
//!
//! Each thread has its own pair of frequent-items sketches (Misra and Gries, as Apache DataSketches has them), and a
//! look at them adds them up. What is said of a key is never more than what was noted, and less by at most
//! [`Snapshot::error`], which is at most [`ERROR_SHARE`] of all that was noted. A key that was noted more often than that
//! is never missed.
//!
//! A thread notes the first [`EXACT`] checks of a window one by one, and from then on one in [`SAMPLED`], chosen at
//! random, as that many: noting each would cost about as much as deciding it. The count of a key is then off by chance too,
//! mostly by less than twice the root of [`SAMPLED`] times the count.
//!
//! Two windows are kept, the one that goes on and the one before, so that what is old fades. Labels that are secret come
//! here hashed, like everywhere behind the front ends.

use std::{
    borrow::Borrow,
    hash::{BuildHasher, Hash, Hasher, RandomState},
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
use tollgate::Labels;

use super::{shard::Sharded, tally::KEYED};

/// How long a window is: a snapshot is about so long at least, and twice at most.
pub const WINDOW: Duration = Duration::from_secs(300);

/// How many checks of a window each thread notes one by one.
pub const EXACT: u64 = 20_000;

/// One in how many it notes after that.
pub const SAMPLED: u64 = 16;

/// Places in a sketch, a power of two; three quarters of them are used.
const PLACES: usize = 512;

/// By how much of all requests a count may be too small.
pub const ERROR_SHARE: f64 = 3.5 / PLACES as f64;

/// The longest text of a key, in bytes; a longer one is cut when it is shown.
const MAX_TEXT: usize = 256;

/// The most keys of a snapshot.
pub const MAX_KEYS: usize = 100;

/// What happened to a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Noted {
    /// The rule let a request pass.
    Passed,
    /// The rule refused one.
    Refused,
}

/// A rule as keys show it.
pub struct TopRule {
    name: Arc<str>,
    per: Box<[Box<str>]>,
}

/// What was noted lately.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Snapshot {
    /// How long it has been noted, in seconds.
    pub seconds: u64,
    /// Checks that met a rule.
    pub count: u64,
    /// Those that the rule refused.
    pub refused: u64,
    /// By how much the counts of the heaviest may be too small.
    pub error: u64,
    /// By how much the counts of refusals may be too small.
    pub refused_error: u64,
    /// The keys that ask the most, heaviest first.
    pub heaviest: Vec<TopKey>,
    /// The keys that are refused the most, most refused first.
    pub most_refused: Vec<TopKey>,
}

/// One key of a snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TopKey {
    /// The rule.
    pub rule: Arc<str>,
    /// Who is counted, as `label=value`; empty where the rule counts everybody together.
    pub key: Box<str>,
    /// How often it asked.
    pub count: u64,
    /// How often it was refused.
    pub refused: u64,
}

/// Notes keys.
pub struct Top {
    notes: Box<Sharded<Notes>>,
    hashing: SeedableRandomState,
}

/// The notes of one thread, or of a few.
#[derive(Default)]
struct Notes {
    /// How many checks to let go by. Threads that share it may lose one another's steps: it is up to chance anyway.
    skip: AtomicU64,
    windows: Mutex<Windows>,
}

struct Windows {
    current: Sketches,
    previous: Option<Sketches>,
    chance: u64,
}

#[derive(Clone)]
struct Sketches {
    begun: Duration,
    asked: FrequentItemsSketch<Name>,
    refused: FrequentItemsSketch<Name>,
}

/// A key: told from others by its hash, which is keyed and has 64 bits.
#[derive(Clone)]
struct Name {
    hash: u64,
    rule: Option<Arc<str>>,
    text: Box<str>,
}

impl TopRule {
    /// A rule that counts these labels apart.
    pub fn new(name: Arc<str>, per: &[Box<str>]) -> Self {
        Self { name, per: per.into() }
    }

    fn text(&self, labels: &Labels) -> Box<str> {
        text_of_labels(self.per.iter().map(|label| (&**label, labels.get(label).unwrap_or_default())))
    }
}

impl Default for Top {
    fn default() -> Self {
        static SEED: LazyLock<SharedSeed> = LazyLock::new(|| SharedSeed::from_u64(random()));
        Self { notes: Box::default(), hashing: SeedableRandomState::with_seed(random(), &SEED) }
    }
}

impl Top {
    /// A request met a rule, `now` since the notes began.
    pub fn note_rule(&self, rule: &Arc<TopRule>, labels: &Labels, noted: Noted, now: Duration) {
        let notes = self.notes.own();
        if notes.is_let_go_by() {
            return;
        }
        let mut hasher = self.hashing.build_hasher();
        hasher.write(rule.name.as_bytes());
        for label in &rule.per {
            let value = labels.get(label).unwrap_or_default();
            hasher.write_usize(value.len());
            hasher.write(value);
        }
        notes.take(hasher.finish(), noted, now, || (Some(Arc::clone(&rule.name)), rule.text(labels)));
    }

    /// A request came with a limit of its own, for exactly its labels.
    pub fn note_labels(&self, labels: &Labels, noted: Noted, now: Duration) {
        let notes = self.notes.own();
        if notes.is_let_go_by() {
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
        notes.take(hasher.finish(), noted, now, text);
    }

    /// A request was about a key of its own.
    pub fn note_key(&self, key: &[u8], noted: Noted, now: Duration) {
        let notes = self.notes.own();
        if notes.is_let_go_by() {
            return;
        }
        let text = || (None, text_of_key(key));
        notes.take(self.hashing.hash_one(key), noted, now, text);
    }

    /// The keys that ask the most and are refused the most, at most so many of each.
    pub fn snapshot(&self, count: usize, now: Duration) -> Snapshot {
        let count = count.min(MAX_KEYS);
        let mut all = Sketches::new(now);
        for notes in self.notes.all() {
            let windows = {
                let mut windows = notes.windows.lock();
                windows.go_on(now);
                [Some(windows.current.clone()), windows.previous.clone()]
            };
            for sketches in windows.into_iter().flatten() {
                all.add(&sketches);
            }
        }
        Snapshot {
            seconds: now.saturating_sub(all.begun).as_secs(),
            count: all.asked.total_weight(),
            refused: all.refused.total_weight(),
            error: all.asked.maximum_error(),
            refused_error: all.refused.maximum_error(),
            heaviest: all.leading(&all.asked, count),
            most_refused: all.leading(&all.refused, count),
        }
    }
}

impl Notes {
    fn is_let_go_by(&self) -> bool {
        let left = self.skip.load(Relaxed);
        if left > 0 {
            self.skip.store(left - 1, Relaxed);
        }
        left > 0
    }

    fn take(&self, hash: u64, noted: Noted, now: Duration, name: impl Fn() -> (Option<Arc<str>>, Box<str>)) {
        let mut windows = self.windows.lock();
        windows.go_on(now);
        let weight = if windows.current.asked.total_weight() < EXACT { 1 } else { SAMPLED };
        let Sketches { asked, refused, .. } = &mut windows.current;
        note_in(asked, hash, weight, &name);
        if noted == Noted::Refused {
            note_in(refused, hash, weight, &name);
        }
        if weight > 1 {
            self.skip.store(windows.any_below(2 * weight - 1), Relaxed);
        }
    }
}

fn note_in(
    sketch: &mut FrequentItemsSketch<Name>,
    hash: u64,
    weight: u64,
    name: &impl Fn() -> (Option<Arc<str>>, Box<str>),
) {
    // One that is there keeps the name that it has: most of the time there is none to be made.
    let is_known = sketch.lower_bound(&hash) > 0;
    let (rule, text) = if is_known { Default::default() } else { name() };
    sketch.update_with_count(Name { hash, rule, text }, weight);
}

impl Default for Windows {
    fn default() -> Self {
        Self { current: Sketches::new(Duration::ZERO), previous: None, chance: random() | 1 }
    }
}

impl Windows {
    /// A number below `bound`, each as likely as the others.
    fn any_below(&mut self, bound: u64) -> u64 {
        // Marsaglia's xorshift: nobody gains by foreseeing it
        self.chance ^= self.chance << 13;
        self.chance ^= self.chance >> 7;
        self.chance ^= self.chance << 17;
        self.chance % bound
    }

    /// Begins the next window if it is time to.
    fn go_on(&mut self, now: Duration) {
        let age = now.saturating_sub(self.current.begun);
        if age < WINDOW {
            return;
        }
        let ended = std::mem::replace(&mut self.current, Sketches::new(now));
        self.previous = (age < 2 * WINDOW).then_some(ended);
    }
}

impl Sketches {
    fn new(begun: Duration) -> Self {
        let sketch = || FrequentItemsSketch::new(PLACES).expect("a power of two is a size");
        Self { begun, asked: sketch(), refused: sketch() }
    }

    fn add(&mut self, other: &Self) {
        self.begun = self.begun.min(other.begun);
        self.asked.merge(&other.asked);
        self.refused.merge(&other.refused);
    }

    fn leading(&self, sketch: &FrequentItemsSketch<Name>, count: usize) -> Vec<TopKey> {
        let mut rows = sketch.frequent_items_with_threshold(ErrorType::NoFalseNegatives, 0);
        rows.truncate(count);
        rows.iter()
            .map(|row| {
                let Name { hash, rule, text } = row.item();
                TopKey {
                    rule: rule.clone().unwrap_or_else(|| KEYED.into()),
                    key: text.clone(),
                    count: self.asked.lower_bound(hash).max(self.refused.lower_bound(hash)),
                    refused: self.refused.lower_bound(hash),
                }
            })
            .collect()
    }
}

impl PartialEq for Name {
    fn eq(&self, other: &Self) -> bool {
        self.hash == other.hash
    }
}

impl Eq for Name {}

impl Hash for Name {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.hash.hash(state);
    }
}

impl Borrow<u64> for Name {
    fn borrow(&self) -> &u64 {
        &self.hash
    }
}

/// A number that nobody can foresee.
fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}

/// Labels as `label=value`.
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
    cut(text)
}

/// A key as text.
fn text_of_key(key: &[u8]) -> Box<str> {
    cut(String::from_utf8_lossy(key).into_owned())
}

/// The first [`MAX_TEXT`] bytes.
fn cut(mut text: String) -> Box<str> {
    if text.len() > MAX_TEXT {
        text.truncate(text.floor_char_boundary(MAX_TEXT - '…'.len_utf8()));
        text.push('…');
    }
    text.into()
}
