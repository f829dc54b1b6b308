//! throttlecrab's library takes `&mut self` and the time: a mutex and the system's clock make it a limiter that
//! threads can share.

use std::{sync::Mutex, time::SystemTime};

use throttlecrab::{AdaptiveStore, RateLimiter};

use super::child::Decider;

pub struct Crab {
    limiter: Mutex<RateLimiter<AdaptiveStore>>,
    amount: i64,
    window_s: i64,
    prepared: Vec<String>,
}

impl Crab {
    pub fn new(amount: i64, window_s: i64, prepared: Vec<String>) -> Self {
        Self { limiter: Mutex::new(RateLimiter::new(AdaptiveStore::new())), amount, window_s, prepared }
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
