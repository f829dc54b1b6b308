//! Who may use which command. A token's secret is the password, its name the user; a client may also give the secret only.

use crate::{
    auth::{Access, Identity},
    config::Scope,
};

/// What a command needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Needs {
    /// Nothing, not even a password: how a client gets in, and out.
    Nothing,
    /// To be let in.
    Entry,
    /// To be let in with this.
    Scope(Scope),
}

/// The user of a client that gives a password only.
pub(super) const DEFAULT_USER: &str = "default";

impl Needs {
    /// Whether somebody may do this who was let in as `granted`, or not at all.
    pub(super) fn are_met_by(self, granted: Option<&Identity>) -> bool {
        match self {
            Self::Nothing => true,
            Self::Entry => granted.is_some(),
            Self::Scope(scope) => granted.is_some_and(|granted| granted.may().allows(scope)),
        }
    }
}

/// Who a client is that has given no password.
pub(super) fn at_first(access: &Access) -> Option<Identity> {
    if access.is_open() { Some(Identity::anonymous()) } else { None }
}

/// Who a client is with this password.
pub(super) fn given(access: &Access, user: &[u8], secret: &[u8]) -> Option<Identity> {
    let holder = access.holder(secret)?;
    (user == DEFAULT_USER.as_bytes() || user == holder.name().as_bytes()).then_some(holder)
}
