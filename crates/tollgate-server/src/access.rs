//! Who may call: tokens, and what each of them may do. Without any token everybody may do everything.

use std::{
    mem,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::{
    config::{Digest, Scope, Scopes, Token},
    observe::logs::{Audit, audit},
};

/// What callers are called when there are no tokens.
pub const ANYBODY: &str = "anybody";

/// What callers are called that have no token that is known.
pub const NOBODY: &str = "nobody";

/// How many calls that are not allowed are written down in a second, of those without a token and of those with one each: whoever has no
/// token could fill the log with them.
pub const MAX_DENIALS_TOLD: u32 = 10;

/// The tokens in force. Cheap to clone; all clones change together.
#[derive(Clone, Debug, Default)]
pub struct Access(Arc<Tokens>);

#[derive(Debug, Default)]
struct Tokens {
    in_force: ArcSwap<Vec<Arc<Token>>>,
    /// How often they were replaced by others.
    changes: AtomicU64,
    /// Of callers who have no token that is known, and of those who have one.
    denials: [Mutex<Denials>; 2],
}

/// Calls that were not allowed.
#[derive(Debug, Default)]
struct Denials {
    /// Since when they are counted.
    since: Option<Instant>,
    told: u32,
    /// How many were not written down since one was.
    untold: u64,
}

/// Somebody who may call: by a token, or because there are none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Granted(Option<Arc<Token>>);

/// Why somebody may not.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Denied {
    /// There is no token.
    #[error("a token is needed: send \"Authorization: Bearer …\"")]
    NoToken,
    /// Nobody has this token.
    #[error("the token is not known: it may have been replaced")]
    WrongToken,
    /// The token is not enough for this call.
    #[error("token {name:?} may not do this: it needs \"{}\" in its \"may\"", scope.name())]
    TooWeak {
        /// The token's name.
        name: String,
        /// What it lacks.
        scope: Scope,
    },
}

impl Granted {
    /// Everybody, where there are no tokens.
    pub fn anybody() -> Self {
        Self(None)
    }

    fn by(token: Arc<Token>) -> Self {
        Self(Some(token))
    }

    /// The name of the token.
    pub fn name(&self) -> &str {
        self.0.as_ref().map_or(ANYBODY, |token| &token.name)
    }

    /// What it may do.
    pub fn may(&self) -> Scopes {
        self.0.as_ref().map_or(Scopes::ALL, |token| token.may)
    }
}

impl Access {
    /// Lets in who has one of these tokens, or everybody if there are none.
    pub fn new(tokens: Vec<Token>) -> Self {
        let access = Self::default();
        access.replace(tokens);
        access
    }

    /// Lets in by these tokens from now on.
    pub fn replace(&self, tokens: Vec<Token>) {
        let tokens: Vec<_> = tokens.into_iter().map(Arc::new).collect();
        if **self.0.in_force.load() != tokens {
            self.0.in_force.store(Arc::new(tokens));
            // after the tokens: who sees the change sees them too
            self.0.changes.fetch_add(1, Ordering::Release);
        }
    }

    /// How often the tokens have changed: who was let in before the last time may have to leave.
    pub fn changes(&self) -> u64 {
        self.0.changes.load(Ordering::Acquire)
    }

    /// What somebody who was let in before may do now; nothing, if their token was taken back.
    pub fn renewed(&self, granted: &Granted) -> Option<Granted> {
        let tokens = self.0.in_force.load();
        if tokens.is_empty() {
            return Some(Granted::anybody());
        }
        let before = granted.0.as_ref()?;
        tokens.iter().find(|token| token.has_the_secret_of(before)).cloned().map(Granted::by)
    }

    /// Whether everybody may do everything.
    pub fn is_open(&self) -> bool {
        self.0.in_force.load().is_empty()
    }

    /// Who has this secret. Every token is looked at, so that the time it takes tells nothing.
    pub fn holder(&self, secret: &[u8]) -> Option<Granted> {
        let given = Digest::of(secret);
        let tokens = self.0.in_force.load();
        let holder =
            tokens.iter().fold(None, |holder, token| token.accepts(&given).then_some(token).or(holder));
        holder.cloned().map(Granted::by)
    }

    /// Whether somebody with this `Authorization` may do what needs `scope`.
    ///
    /// # Errors
    /// When they may not.
    pub fn check(&self, authorization: Option<&[u8]>, scope: Scope) -> Result<Granted, Denied> {
        if self.is_open() {
            return Ok(Granted::anybody());
        }
        let secret = authorization.and_then(bearer).ok_or(Denied::NoToken)?;
        let granted = self.holder(secret).ok_or(Denied::WrongToken)?;
        if granted.may().allows(scope) {
            Ok(granted)
        } else {
            Err(Denied::TooWeak { name: granted.name().to_owned(), scope })
        }
    }
}

impl Access {
    /// Writes down that somebody may not adjust or administer, unless there are too many of them.
    pub fn audit_denied(&self, from: Option<SocketAddr>, action: &str, denied: &Denied) {
        let [of_nobody, of_tokens] = &self.0.denials;
        // apart, so that nobody hides what a token is used for
        let (who, denials) = match denied {
            Denied::NoToken | Denied::WrongToken => (NOBODY, of_nobody),
            Denied::TooWeak { name, .. } => (name.as_str(), of_tokens),
        };
        let Some(untold) = denials.lock().tell(Instant::now()) else { return };
        let error = match untold {
            0 => denied.to_string(),
            more => format!("{denied} (and {more} other calls that were denied before)"),
        };
        audit(&Audit { who, from, action, subject: &"", result: Err(&error) });
    }
}

impl Denials {
    const PERIOD: Duration = Duration::from_secs(1);

    /// Another one: whether to tell of it, and of how many that nobody was told of.
    fn tell(&mut self, now: Instant) -> Option<u64> {
        if self.since.is_none_or(|since| now >= since + Self::PERIOD) {
            (self.since, self.told) = (Some(now), 0);
        }
        if self.told == MAX_DENIALS_TOLD {
            self.untold += 1;
            return None;
        }
        self.told += 1;
        Some(mem::take(&mut self.untold))
    }
}

/// The secret of `Bearer …`.
fn bearer(authorization: &[u8]) -> Option<&[u8]> {
    let (scheme, secret) = authorization.split_at_checked(7)?;
    let secret = secret.trim_ascii();
    (scheme.eq_ignore_ascii_case(b"bearer ") && !secret.is_empty()).then_some(secret)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_may_do_what_it_says_and_nothing_else() {
        let check_only = Scopes { check: true, adjust: false, admin: false };
        let access = Access::new(vec![
            Token::new("app", b"s3cret", check_only),
            Token::new("ops", b"other", Scopes::ALL),
        ]);
        let name = |authorization: &str, scope| {
            access.check(Some(authorization.as_bytes()), scope).map(|granted| granted.name().to_owned())
        };
        assert_eq!(name("Bearer s3cret", Scope::Check), Ok("app".to_owned()));
        assert_eq!(name("bearer  s3cret ", Scope::Check), Ok("app".to_owned()));
        assert_eq!(name("Bearer other", Scope::Admin), Ok("ops".to_owned()));
        let too_weak = Denied::TooWeak { name: "app".to_owned(), scope: Scope::Adjust };
        assert_eq!(name("Bearer s3cret", Scope::Adjust), Err(too_weak));
        for wrong in ["Bearer s3cre", "Bearer s3cret2", "Bearer S3CRET"] {
            assert_eq!(name(wrong, Scope::Check), Err(Denied::WrongToken), "{wrong}");
        }
        for none in ["", "Bearer", "Bearer ", "Basic s3cret", "s3cret"] {
            assert_eq!(name(none, Scope::Check), Err(Denied::NoToken), "{none}");
        }
        assert_eq!(access.check(None, Scope::Check), Err(Denied::NoToken));
        access.clone().replace(Vec::new());
        assert_eq!(access.check(None, Scope::Admin).unwrap().name(), ANYBODY);
    }

    #[test]
    fn a_flood_of_denials_is_told_in_few_lines_which_say_how_many_there_were() {
        let (mut denials, begin) = (Denials::default(), Instant::now());
        let told: Vec<_> = (0..100).filter_map(|_| denials.tell(begin)).collect();
        assert_eq!(told, [0; MAX_DENIALS_TOLD as usize]);
        assert_eq!(denials.tell(begin + Denials::PERIOD), Some(100 - u64::from(MAX_DENIALS_TOLD)));
        assert_eq!(denials.tell(begin + Denials::PERIOD), Some(0));
    }

    #[test]
    fn who_was_let_in_keeps_what_the_same_secret_allows_now() {
        let check_only = Scopes { check: true, adjust: false, admin: false };
        let access = Access::new(vec![Token::new("app", b"s3cret", check_only)]);
        let app = access.holder(b"s3cret").unwrap();
        let changes = access.changes();
        access.replace(vec![Token::new("app", b"s3cret", check_only)]);
        assert_eq!(access.changes(), changes, "nothing has changed");
        access.replace(vec![
            Token::new("renamed", b"s3cret", Scopes::ALL),
            Token::new("app", b"new", check_only),
        ]);
        assert_eq!(access.changes(), changes + 1);
        let renewed = access.renewed(&app).unwrap();
        assert_eq!((renewed.name(), renewed.may()), ("renamed", Scopes::ALL));
        assert_eq!(access.renewed(&Granted::anybody()), None);
        access.replace(vec![Token::new("app", b"new", check_only)]);
        assert_eq!(access.renewed(&app), None);
        access.replace(Vec::new());
        assert_eq!(access.renewed(&app), Some(Granted::anybody()));
    }
}
