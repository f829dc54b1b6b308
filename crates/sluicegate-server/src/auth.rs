//! Authentication by tokens and authorization by their scopes. Without tokens every call is allowed.

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
    observe::logs::{Audit, AuditResult, audit},
};

/// The name of callers when no tokens are configured.
pub const ANONYMOUS: &str = "anonymous";

/// The name of callers without a valid token.
pub const UNAUTHENTICATED: &str = "unauthenticated";

/// Rejected calls logged per second, separately for callers with and without a valid token, so that callers without a token
/// cannot flood the log.
pub const MAX_LOGGED_REJECTIONS: u32 = 10;

/// Rejected checks logged per second.
const MAX_LOGGED_CHECKS: u32 = 1;

/// The active tokens. Cheap to clone; all clones share them.
#[derive(Clone, Debug, Default)]
pub struct Access(Arc<Tokens>);

#[derive(Debug, Default)]
struct Tokens {
    active: ArcSwap<Vec<Arc<Token>>>,
    /// Number of times the tokens have changed.
    changes: AtomicU64,
    /// Rejections of callers without a valid token, and of callers with one.
    rejections: [Mutex<RejectionLog>; 2],
    /// Rejected checks, which have no audit line.
    rejected_checks: Mutex<RejectionLog>,
}

/// Limits the log lines about rejected calls.
#[derive(Debug, Default)]
struct RejectionLog {
    /// Start of the current period.
    since: Option<Instant>,
    logged: u32,
    /// Number of rejections since the last line that were not logged.
    suppressed: u64,
}

/// An authenticated caller: a token, or anonymous if no tokens are configured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity(Option<Arc<Token>>);

/// A call was rejected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AuthError {
    /// The request has no token.
    #[error("missing token: send \"Authorization: Bearer …\"")]
    MissingToken,
    /// The token is not configured.
    #[error("unknown token: it may have been replaced")]
    UnknownToken,
    /// The token lacks the scope of this call.
    #[error("token {name:?} lacks the scope \"{}\": add it to \"may\"", scope.name())]
    MissingScope {
        /// The token's name.
        name: String,
        /// The missing scope.
        scope: Scope,
    },
}

impl Identity {
    /// A caller of a server without tokens.
    pub fn anonymous() -> Self {
        Self(None)
    }

    fn by(token: Arc<Token>) -> Self {
        Self(Some(token))
    }

    /// The name of the token, or [`ANONYMOUS`].
    pub fn name(&self) -> &str {
        self.0.as_ref().map_or(ANONYMOUS, |token| &token.name)
    }

    /// The allowed scopes.
    pub fn may(&self) -> Scopes {
        self.0.as_ref().map_or(Scopes::ALL, |token| token.may)
    }
}

/// Whether the token of a checked call is valid, or none is configured. A valid token may lack the scope of the call.
pub fn is_authenticated(checked: &Result<Identity, AuthError>) -> bool {
    match checked {
        Ok(_) | Err(AuthError::MissingScope { .. }) => true,
        Err(AuthError::MissingToken | AuthError::UnknownToken) => false,
    }
}

impl Access {
    /// Accepts these tokens, or every caller if there are none.
    pub fn new(tokens: Vec<Token>) -> Self {
        let access = Self::default();
        access.replace(tokens);
        access
    }

    /// Replaces the tokens.
    pub fn replace(&self, tokens: Vec<Token>) {
        let tokens: Vec<_> = tokens.into_iter().map(Arc::new).collect();
        if **self.0.active.load() != tokens {
            self.0.active.store(Arc::new(tokens));
            // Incremented after the store, so that a reader that sees the change sees the new tokens.
            self.0.changes.fetch_add(1, Ordering::Release);
        }
    }

    /// Number of times the tokens have changed. After a change, identities must be renewed.
    pub fn changes(&self) -> u64 {
        self.0.changes.load(Ordering::Acquire)
    }

    /// Returns the current identity of an earlier caller, or `None` if the token was removed.
    pub fn renewed(&self, granted: &Identity) -> Option<Identity> {
        let tokens = self.0.active.load();
        if tokens.is_empty() {
            return Some(Identity::anonymous());
        }
        let before = granted.0.as_ref()?;
        tokens.iter().find(|token| token.has_same_secret(before)).cloned().map(Identity::by)
    }

    /// Whether no tokens are configured.
    pub fn is_open(&self) -> bool {
        self.0.active.load().is_empty()
    }

    /// Returns the identity with this secret. All tokens are compared, so that the time taken reveals nothing.
    pub fn holder(&self, secret: &[u8]) -> Option<Identity> {
        let given = Digest::of(secret);
        let tokens = self.0.active.load();
        let holder =
            tokens.iter().fold(None, |holder, token| token.accepts(&given).then_some(token).or(holder));
        holder.cloned().map(Identity::by)
    }

    /// Authenticates an `Authorization` header and checks the scope.
    ///
    /// # Errors
    /// If the token is missing, unknown or lacks the scope.
    pub fn check(&self, authorization: Option<&[u8]>, scope: Scope) -> Result<Identity, AuthError> {
        if self.is_open() {
            return Ok(Identity::anonymous());
        }
        let secret = authorization.and_then(bearer).ok_or(AuthError::MissingToken)?;
        let granted = self.holder(secret).ok_or(AuthError::UnknownToken)?;
        if granted.may().allows(scope) {
            Ok(granted)
        } else {
            Err(AuthError::MissingScope { name: granted.name().to_owned(), scope })
        }
    }
}

impl Access {
    /// Writes an audit line for a rejected call, within [`MAX_LOGGED_REJECTIONS`].
    pub fn audit_rejected(&self, from: Option<SocketAddr>, action: &str, error: &AuthError) {
        let [unauthenticated, of_tokens] = &self.0.rejections;
        // Separate limits, so that callers without a token cannot suppress lines about tokens.
        let (who, rejections) = match error {
            AuthError::MissingToken | AuthError::UnknownToken => (UNAUTHENTICATED, unauthenticated),
            AuthError::MissingScope { name, .. } => (name.as_str(), of_tokens),
        };
        let admitted = rejections.lock().admit(Instant::now(), MAX_LOGGED_REJECTIONS);
        let Some(suppressed) = admitted else { return };
        let error = with_suppressed(error, suppressed);
        audit(&Audit { who, from, action, subject: &"", result: AuditResult::Rejected(&error) });
    }
}

impl Access {
    /// Logs a rejected call that only checks, at most once a second.
    #[cold]
    pub fn log_rejected_check(&self, from: Option<SocketAddr>, action: &str, error: &AuthError) {
        let admitted = self.0.rejected_checks.lock().admit(Instant::now(), MAX_LOGGED_CHECKS);
        let Some(suppressed) = admitted else { return };
        let error = with_suppressed(error, suppressed);
        match from {
            Some(from) => tracing::warn!("{action} from {from} rejected: {error}"),
            None => tracing::warn!("{action} rejected: {error}"),
        }
    }
}

/// The text of an error, with the number of rejections before it that were not logged.
fn with_suppressed(error: &AuthError, suppressed: u64) -> String {
    match suppressed {
        0 => error.to_string(),
        more => format!("{error} (and {more} more rejected calls before this one)"),
    }
}

impl RejectionLog {
    const PERIOD: Duration = Duration::from_secs(1);

    /// Counts a rejection. Returns the number of suppressed lines if this one is to be logged.
    fn admit(&mut self, now: Instant, max: u32) -> Option<u64> {
        if self.since.is_none_or(|since| now >= since + Self::PERIOD) {
            (self.since, self.logged) = (Some(now), 0);
        }
        if self.logged == max {
            self.suppressed += 1;
            return None;
        }
        self.logged += 1;
        Some(mem::take(&mut self.suppressed))
    }
}

/// Extracts the secret of `Bearer …`.
fn bearer(authorization: &[u8]) -> Option<&[u8]> {
    let (scheme, secret) = authorization.split_at_checked(7)?;
    let secret = secret.trim_ascii();
    (scheme.eq_ignore_ascii_case(b"bearer ") && !secret.is_empty()).then_some(secret)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_allows_its_scopes_and_nothing_else() {
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
        let too_weak = AuthError::MissingScope { name: "app".to_owned(), scope: Scope::Adjust };
        assert_eq!(name("Bearer s3cret", Scope::Adjust), Err(too_weak));
        for wrong in ["Bearer s3cre", "Bearer s3cret2", "Bearer S3CRET"] {
            assert_eq!(name(wrong, Scope::Check), Err(AuthError::UnknownToken), "{wrong}");
        }
        for none in ["", "Bearer", "Bearer ", "Basic s3cret", "s3cret"] {
            assert_eq!(name(none, Scope::Check), Err(AuthError::MissingToken), "{none}");
        }
        assert_eq!(access.check(None, Scope::Check), Err(AuthError::MissingToken));
        access.clone().replace(Vec::new());
        assert_eq!(access.check(None, Scope::Admin).unwrap().name(), ANONYMOUS);
    }

    #[test]
    fn a_flood_of_rejections_is_logged_in_few_lines_with_a_count() {
        let (mut rejections, begin) = (RejectionLog::default(), Instant::now());
        let mut admit = |now| rejections.admit(now, MAX_LOGGED_REJECTIONS);
        let logged: Vec<_> = (0..100).filter_map(|_| admit(begin)).collect();
        assert_eq!(logged, [0; MAX_LOGGED_REJECTIONS as usize]);
        assert_eq!(admit(begin + RejectionLog::PERIOD), Some(100 - u64::from(MAX_LOGGED_REJECTIONS)));
        assert_eq!(admit(begin + RejectionLog::PERIOD), Some(0));
    }

    #[test]
    fn a_renewed_identity_has_the_current_scopes_of_its_secret() {
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
        assert_eq!(access.renewed(&Identity::anonymous()), None);
        access.replace(vec![Token::new("app", b"new", check_only)]);
        assert_eq!(access.renewed(&app), None);
        access.replace(Vec::new());
        assert_eq!(access.renewed(&app), Some(Identity::anonymous()));
    }
}
