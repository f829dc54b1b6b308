//! Who asks: one key for everybody, or one of many.

/// The keys of a scenario.
#[derive(Clone, Copy, Debug)]
pub enum Keys {
    /// Everybody is counted together.
    Hot,
    /// This many, equally likely.
    Random(u64),
}

impl Keys {
    /// The key that a random number stands for.
    pub fn name(self, random: u64) -> String {
        match self {
            Self::Hot => "user:hot".to_owned(),
            Self::Random(count) => format!("user:{}", random % count),
        }
    }
}
