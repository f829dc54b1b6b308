//! throttlecrab's library takes `&mut self` and the time: this wrapper adds a mutex and the system clock, so that
//! threads can share it.

use std::{
    sync::Mutex,
    time::{Duration, SystemTime},
};

use throttlecrab::{PeriodicStore, RateLimiter};

use super::child::Decider;

/// The number of keys that it preallocates memory for.
const CAPACITY: usize = 1_000;
/// How often it removes expired keys.
const CLEANUP: Duration = Duration::from_secs(60);

pub struct Crab {
    limiter: Mutex<RateLimiter<PeriodicStore>>,
    amount: i64,
    window_s: i64,
    prepared: Vec<String>,
}

impl Crab {
    pub fn new(amount: i64, window_s: i64, prepared: Vec<String>) -> Self {
        // its default store scans for expired keys more and more often while a million keys are added, and does not
        // finish
        let store = PeriodicStore::builder().capacity(CAPACITY).cleanup_interval(CLEANUP).build();
        Self { limiter: Mutex::new(RateLimiter::new(store)), amount, window_s, prepared }
    }
}

impl Decider for Crab {
    fn by_text(&self, text: &String) -> bool {
        let mut limiter = self.limiter.lock().expect("no thread panics while it decides");
        let decided = limiter.rate_limit(text, self.amount, self.amount, self.window_s, 1, SystemTime::now());
        decided.is_ok_and(|(allowed, _)| allowed)
    }

    fn by_place(&self, place: usize) -> bool {
        self.by_text(&self.prepared[place])
    }
}
