//! quota's keyed pool: a bucket per key behind sharded maps. It never removes keys automatically.

use quota::{QuotaPolicy, QuotaPool, RefillRate};

use super::child::Decider;

pub struct Pool {
    pool: QuotaPool<String>,
    prepared: Vec<String>,
}

impl Pool {
    pub fn new(amount: u32, window_s: u64, prepared: Vec<String>) -> Self {
        let refill = RefillRate::per_sec(f64::from(amount) / window_s as f64);
        let policy = QuotaPolicy::new().set_capacity(f64::from(amount)).set_refill_rate(refill);
        Self { pool: QuotaPool::with_key_type(policy, u64::from(amount)), prepared }
    }

    pub fn len(&self) -> usize {
        self.pool.len()
    }
}

impl Decider for Pool {
    fn by_text(&self, text: &String) -> bool {
        self.pool.consume(text.as_str(), 1).is_ok()
    }

    fn by_place(&self, place: usize) -> bool {
        self.by_text(&self.prepared[place])
    }
}
