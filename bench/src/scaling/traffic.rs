//! The simulated keys: each has a weight and belongs to a slot, and each slot to a primary.

/// The number of slots in a Cluster.
pub const SLOTS: u64 = 16_384;
/// The number of keys.
pub const KEYS: usize = 1_000_000;

/// The distribution of requests over the keys.
#[derive(Clone, Copy, Debug)]
pub enum Shape {
    /// Equally.
    Even,
    /// The n-th key has 1/n of the first one's share.
    Zipf,
    /// One key has this share of the requests; the rest is distributed equally.
    Hot(f64),
}

/// The keys of one primary.
pub struct Keys {
    /// Cumulative shares of all requests.
    shares: Vec<f64>,
    /// Whether the first of them is the most frequent of all keys.
    pub has_first: bool,
}

impl Shape {
    /// The share of the first key, and the weight of each key relative to it.
    fn weight(self, place: usize) -> f64 {
        match self {
            Self::Even => 1.0,
            Self::Zipf => 1.0 / (place + 1) as f64,
            Self::Hot(part) if place == 0 => part / (1.0 - part) * (KEYS - 1) as f64,
            Self::Hot(_) => 1.0,
        }
    }

    /// Distributes the keys over this number of primaries. Each primary has an equal range of slots.
    pub fn parts(self, primaries: u64) -> Vec<f64> {
        let mut parts = vec![0.0; primaries as usize];
        let mut total = 0.0;
        for key in 0..KEYS {
            let weight = self.weight(key);
            parts[owner(slot(key), primaries)] += weight;
            total += weight;
        }
        parts.iter_mut().for_each(|part| *part /= total);
        parts
    }

    /// The share of each key.
    pub fn shares(self) -> Vec<f64> {
        let total: f64 = (0..KEYS).map(|key| self.weight(key)).sum();
        (0..KEYS).map(|key| self.weight(key) / total).collect()
    }

    /// The keys of one primary.
    pub fn keys(self, primary: usize, primaries: u64) -> Keys {
        let total: f64 = (0..KEYS).map(|key| self.weight(key)).sum();
        let mut shares = Vec::new();
        let mut sum = 0.0;
        for key in (0..KEYS).filter(|key| owner(slot(*key), primaries) == primary) {
            sum += self.weight(key) / total;
            shares.push(sum);
        }
        Keys { shares, has_first: owner(slot(0), primaries) == primary }
    }
}

impl Keys {
    /// Their share of all requests.
    pub fn part(&self) -> f64 {
        self.shares.last().copied().unwrap_or_default()
    }

    /// Returns the key that a number from 0 to 1 selects.
    pub fn at(&self, number: f64) -> u32 {
        let sum = number * self.part();
        self.shares.partition_point(|share| *share <= sum).min(self.shares.len() - 1) as u32
    }
}

/// The primary of a key.
pub fn primary(key: usize, primaries: u64) -> usize {
    owner(slot(key), primaries)
}

/// The slot of a key. A mixing function replaces CRC16; its distribution is equally even.
fn slot(key: usize) -> u64 {
    let mut mixed = (key as u64).wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (mixed ^ (mixed >> 31)) % SLOTS
}

fn owner(slot: u64, primaries: u64) -> usize {
    (slot * primaries / SLOTS) as usize
}
