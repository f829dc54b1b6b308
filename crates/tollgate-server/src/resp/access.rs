//! Who may use which command.

use std::{fmt, sync::Arc};

/// What a client may do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Scopes {
    /// Ask: checks and peeks.
    pub check: bool,
    /// Change what was used: charges and refunds.
    pub adjust: bool,
    /// Forget counters.
    pub admin: bool,
}

/// What a command needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scope {
    /// Nothing, not even a password: how a client gets in, and out.
    Open,
    /// To be let in.
    Any,
    Check,
    Adjust,
    Admin,
}

/// How clients are let in.
#[derive(Clone, Default)]
pub struct Access(Option<Arc<Password>>);

type Password = dyn Fn(&str, &str) -> Option<Scopes> + Send + Sync;

/// The user of a client that gives a password only.
pub(super) const DEFAULT_USER: &str = "default";

impl Scopes {
    /// Everything.
    pub const ALL: Self = Self { check: true, adjust: true, admin: true };

    pub(super) const fn allow(self, scope: Scope) -> bool {
        match scope {
            Scope::Open | Scope::Any => true,
            Scope::Check => self.check,
            Scope::Adjust => self.adjust,
            Scope::Admin => self.admin,
        }
    }
}

impl Access {
    /// Everybody may do everything.
    pub const fn open() -> Self {
        Self(None)
    }

    /// Only who gives a user and a password that this function knows, which also says what they may do. A client that
    /// gives a password only is the user `default`.
    pub fn by(password: impl Fn(&str, &str) -> Option<Scopes> + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(password)))
    }

    /// What a client may do that has given no password.
    pub(super) fn at_first(&self) -> Option<Scopes> {
        if self.0.is_none() { Some(Scopes::ALL) } else { None }
    }

    pub(super) fn has_passwords(&self) -> bool {
        self.0.is_some()
    }

    /// What a client may do with this password.
    pub(super) fn given(&self, user: &[u8], secret: &[u8]) -> Option<Scopes> {
        let password = self.0.as_ref()?;
        password(str::from_utf8(user).ok()?, str::from_utf8(secret).ok()?)
    }
}

impl fmt::Debug for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.has_passwords() { "Access::by(..)" } else { "Access::open()" })
    }
}
