//! Authorization of commands. The password is the secret of a token, and the user name is the name of the token; a
//! client may also send only the password.

use crate::{
    auth::{Access, Identity},
    config::Scope,
};

/// What a command requires of its client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Requirement {
    /// Nothing: commands to authenticate and to disconnect.
    Nothing,
    /// Authentication.
    Authenticated,
    /// Authentication with this scope.
    Scope(Scope),
}

/// The user of a client that sends only a password.
pub(super) const DEFAULT_USER: &str = "default";

impl Requirement {
    /// Whether a client with this identity meets the requirement; `None` if it is not authenticated.
    pub(super) fn is_met_by(self, identity: Option<&Identity>) -> bool {
        match self {
            Self::Nothing => true,
            Self::Authenticated => identity.is_some(),
            Self::Scope(scope) => identity.is_some_and(|identity| identity.may().allows(scope)),
        }
    }
}

/// Returns the identity of a client before authentication.
pub(super) fn initial_identity(access: &Access) -> Option<Identity> {
    if access.is_open() { Some(Identity::anonymous()) } else { None }
}

/// Returns the identity of a user with this password.
pub(super) fn authenticate(access: &Access, user: &[u8], secret: &[u8]) -> Option<Identity> {
    let holder = access.holder(secret)?;
    (user == DEFAULT_USER.as_bytes() || user == holder.name().as_bytes()).then_some(holder)
}
