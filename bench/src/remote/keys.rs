//! The keys of requests: one for all, or one of many.

/// The keys of a scenario.
#[derive(Clone, Copy, Debug)]
pub enum Keys {
    /// One key for all requests.
    Hot,
    /// This number of keys, equally likely.
    Random(u64),
}

impl Keys {
    /// Returns the key that a random number selects.
    pub fn name(self, random: u64) -> String {
        match self {
            Self::Hot => "user:hot".to_owned(),
            Self::Random(count) => format!("user:{}", random % count),
        }
    }
}
