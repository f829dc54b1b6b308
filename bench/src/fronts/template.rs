//! Requests that are equal except for the user.

use std::io::Write;

use anyhow::{Context, Result};

use super::USERS;

/// Stands for the user in the text of a request.
pub const USER: &str = "%s";
/// Length of every user's name.
pub const USER_LEN: usize = "user:00000".len();

/// A request with a gap for the user.
#[derive(Clone, Debug)]
pub struct RequestTemplate {
    before: String,
    after: String,
}

impl RequestTemplate {
    /// Creates a template from a text that contains [`USER`].
    pub fn new(text: &str) -> Result<Self> {
        let (before, after) = text.split_once(USER).context("the request does not name a user")?;
        Ok(Self { before: before.to_owned(), after: after.to_owned() })
    }

    /// Appends the request for a random user.
    pub fn write(&self, random: &mut fastrand::Rng, output: &mut Vec<u8>) -> Result<()> {
        output.extend_from_slice(self.before.as_bytes());
        write!(output, "user:{:05}", random.u32(..USERS))?;
        output.extend_from_slice(self.after.as_bytes());
        Ok(())
    }
}

/// Returns a random user.
pub fn random_user(random: &mut fastrand::Rng) -> String {
    format!("user:{:05}", random.u32(..USERS))
}
