//! The state of a connection, and the commands that concern only the connection.

use std::net::SocketAddr;

use super::{
    auth::{self, DEFAULT_USER, Requirement},
    codec::Command,
    commands::{self, COMMANDS, Entry, Verb},
    error::{Error, shown},
    info::{ServerInfo, VERSION},
    request::{CommandRequest, parse_whole},
    response::{Protocol, Replies},
};
use crate::{
    auth::{Access, AuthError, Identity, UNAUTHENTICATED},
    config::Scope,
    engine::{Excess, Summary},
    observe::{
        Observer,
        logs::{Audit, AuditResult, audit},
    },
};

/// The longest name of a connection, in bytes.
const MAX_NAME: usize = 256;

/// The most arguments quoted in an error about an unknown command.
const QUOTED_ARGUMENTS: usize = 8;

/// The state of a connection.
#[derive(Debug)]
pub(super) struct Session {
    id: u64,
    peer: Option<SocketAddr>,
    name: Vec<u8>,
    access: Access,
    /// The identity of the client; `None` until it is authenticated.
    identity: Option<Identity>,
    /// The number of token changes at the time of authentication.
    token_changes: u64,
}

/// Whether the connection stays open after a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    Continue,
    Close,
}

impl Session {
    pub(super) fn new(id: u64, peer: Option<SocketAddr>, access: Access) -> Self {
        let token_changes = access.changes();
        let identity = auth::initial_identity(&access);
        Self { id, peer, name: Vec::new(), access, identity, token_changes }
    }

    /// Whether the client is authenticated, or need not be.
    pub(super) fn is_authenticated(&self) -> bool {
        self.identity.is_some()
    }

    /// Returns how much the client may charge beyond the estimate of a hold.
    pub(super) fn excess(&self) -> Excess {
        let adjusts = Requirement::Scope(Scope::Adjust).is_met_by(self.identity.as_ref());
        if adjusts { Excess::Unbounded } else { Excess::Bounded }
    }

    /// Writes the audit line of a command that adjusts or administers.
    pub(super) fn audit<T>(&self, request: &CommandRequest<'_>, outcome: &Result<T, sluicegate::Error>) {
        let who = self.identity.as_ref().map_or(UNAUTHENTICATED, Identity::name);
        let result = AuditResult::of(outcome);
        let (from, action) = (self.peer, request.call.name());
        audit(&Audit { who, from, action, subject: &Summary(&request.request), result });
    }

    /// Returns the command, if the number of arguments is valid and the client is authorized.
    #[inline]
    pub(super) fn find(&mut self, command: &Command<'_>) -> Result<&'static Entry, Error> {
        self.refresh_identity();
        let entry = commands::find(command.name());
        match entry {
            Some(entry)
                if entry.accepts(command.len()) && entry.requires.is_met_by(self.identity.as_ref()) =>
            {
                Ok(entry)
            }
            _ => Err(self.rejection(entry, command)),
        }
    }

    /// Returns why a command is rejected.
    #[cold]
    fn rejection(&self, entry: Option<&Entry>, command: &Command<'_>) -> Error {
        match entry {
            entry if self.identity.is_none() && !entry.is_some_and(Entry::is_public) => {
                Error::new(Error::NOT_AUTHENTICATED, "Authentication required.")
            }
            None => unknown(command),
            Some(entry) if !entry.accepts(command.len()) => Error::arity(entry.name),
            Some(entry) => {
                let text = format_args!("this token has no permission to run the '{}' command", entry.name);
                Error::new(Error::NO_PERMISSION, text)
            }
        }
    }

    /// Counts a command that was not executed, and logs it if it was unauthorized: an audit line if it would have changed
    /// something.
    #[cold]
    pub(super) fn rejected(&self, command: &Command<'_>, error: &Error, observer: &Observer) {
        let Some(entry) = commands::find(command.name()) else { return };
        let Some(call) = entry.verb.call() else { return };
        if !error.is_unauthorized() {
            observer.invalid(call);
            return;
        }
        observer.unauthorized(call);
        if let Requirement::Scope(scope) = entry.requires {
            let error = match &self.identity {
                Some(identity) => AuthError::MissingScope { name: identity.name().to_owned(), scope },
                None => AuthError::MissingToken,
            };
            match scope {
                Scope::Check => self.access.log_rejected_check(self.peer, call.name(), &error),
                Scope::Adjust | Scope::Admin => self.access.audit_rejected(self.peer, call.name(), &error),
            }
        }
    }

    /// Updates the identity if tokens have changed: a revoked token ends the authorization.
    #[inline]
    fn refresh_identity(&mut self) {
        let changes = self.access.changes();
        if changes != self.token_changes {
            self.update_identity(changes);
        }
    }

    #[cold]
    fn update_identity(&mut self, changes: u64) {
        self.identity = match &self.identity {
            Some(identity) => self.access.renewed(identity),
            None => auth::initial_identity(&self.access),
        };
        self.token_changes = changes;
    }

    /// Answers a command that does not concern counters.
    pub(super) fn answer(
        &mut self,
        entry: &Entry,
        command: &Command<'_>,
        info: &ServerInfo,
        replies: &mut Replies,
    ) -> Result<Next, Error> {
        match entry.verb {
            Verb::Ping => match (command.len(), command.get(1)) {
                (1, _) => replies.simple("PONG"),
                (2, Some(text)) => replies.bulk(text),
                _ => return Err(Error::arity(entry.name)),
            },
            Verb::Echo => replies.bulk(command.get(1).unwrap_or_default()),
            Verb::Hello => self.hello(command, replies)?,
            Verb::Auth => self.auth(entry, command, replies)?,
            Verb::Info => replies.bulk(info.info(command.from(1)).as_bytes()),
            Verb::Command => list(entry, command, replies)?,
            Verb::Client => self.client(entry, command, replies)?,
            Verb::Select => match command.get(1) {
                Some(b"0") => replies.ok(),
                _ => return Err(Error::invalid("DB index is out of range")),
            },
            Verb::Quit => {
                replies.ok();
                return Ok(Next::Close);
            }
            Verb::Reset => {
                self.identity = auth::initial_identity(&self.access);
                self.name.clear();
                replies.protocol = Protocol::default();
                replies.simple("RESET");
            }
            Verb::Throttle
            | Verb::Check
            | Verb::Peek
            | Verb::Charge
            | Verb::Refund
            | Verb::ResetCounters
            | Verb::Hold
            | Verb::Settle
            | Verb::Release
            | Verb::Renew => unreachable!("commands on counters are decided by the engine"),
        }
        Ok(Next::Continue)
    }

    /// `HELLO [version [AUTH user password] [SETNAME name]]`. On an error nothing changes.
    fn hello(&mut self, command: &Command<'_>, replies: &mut Replies) -> Result<(), Error> {
        let protocol = match command.get(1) {
            None => replies.protocol,
            Some(b"2") => Protocol::Resp2,
            Some(b"3") => Protocol::Resp3,
            Some(version) if parse_whole(version).is_some() => {
                return Err(Error::new("NOPROTO", "unsupported protocol version"));
            }
            Some(_) => return Err(Error::invalid("Protocol version is not an integer or out of range")),
        };
        let (mut identity, mut name) = (self.identity.clone(), None);
        let mut at = 2;
        while let Some(option) = command.get(at) {
            match (option.to_ascii_uppercase().as_slice(), command.get(at + 1), command.get(at + 2)) {
                (b"AUTH", Some(user), Some(secret)) => {
                    identity = Some(self.authenticate(user, secret)?);
                    at += 3;
                }
                (b"SETNAME", Some(given), _) => {
                    name = Some(checked_name(given)?);
                    at += 2;
                }
                _ => {
                    return Err(Error::invalid(format_args!(
                        "Syntax error in HELLO option '{}'",
                        shown(option)
                    )));
                }
            }
        }
        if identity.is_none() {
            return Err(Error::new(
                Error::NOT_AUTHENTICATED,
                "HELLO must be called with the client already authenticated, otherwise the HELLO <proto> AUTH \
                 <user> <pass> option can be used to authenticate the client and select the RESP protocol version \
                 at the same time",
            ));
        }
        self.identity = identity;
        if let Some(name) = name {
            self.name = name;
        }
        replies.protocol = protocol;
        replies.map(7);
        let texts =
            [("server", "sluicegate"), ("version", VERSION), ("mode", "standalone"), ("role", "master")];
        for (field, text) in texts {
            replies.bulk(field.as_bytes());
            replies.bulk(text.as_bytes());
        }
        replies.bulk(b"proto");
        replies.integer(protocol.number().into());
        replies.bulk(b"id");
        replies.count(self.id);
        replies.bulk(b"modules");
        replies.array(0);
        Ok(())
    }

    /// `AUTH [user] password`.
    fn auth(&mut self, entry: &Entry, command: &Command<'_>, replies: &mut Replies) -> Result<(), Error> {
        let identity = match (command.get(1), command.get(2), command.len()) {
            (Some(secret), None, _) => self.authenticate(DEFAULT_USER.as_bytes(), secret)?,
            (Some(user), Some(secret), 3) => self.authenticate(user, secret)?,
            _ => return Err(Error::arity(entry.name)),
        };
        self.identity = Some(identity);
        replies.ok();
        Ok(())
    }

    fn authenticate(&self, user: &[u8], secret: &[u8]) -> Result<Identity, Error> {
        if self.access.is_open() {
            return Err(Error::invalid(
                "AUTH <password> called without any password configured for the default user. Are you sure your \
                 configuration is correct?",
            ));
        }
        auth::authenticate(&self.access, user, secret).ok_or_else(|| {
            self.access.audit_rejected(self.peer, "auth", &AuthError::UnknownToken);
            Error::new("WRONGPASS", "invalid username-password pair or user is disabled.")
        })
    }

    /// `CLIENT ID | GETNAME | SETNAME | INFO | SETINFO | NO-EVICT | NO-TOUCH`.
    fn client(&mut self, entry: &Entry, command: &Command<'_>, replies: &mut Replies) -> Result<(), Error> {
        let subcommand = command.get(1).unwrap_or_default();
        match (subcommand.to_ascii_uppercase().as_slice(), command.len()) {
            (b"ID", 2) => replies.count(self.id),
            (b"GETNAME", 2) if self.name.is_empty() => replies.null(),
            (b"GETNAME", 2) => replies.bulk(&self.name),
            (b"SETNAME", 3) => {
                self.name = checked_name(command.get(2).unwrap_or_default())?;
                replies.ok();
            }
            (b"INFO", 2) => {
                let name = String::from_utf8_lossy(&self.name);
                let line = format!("id={} name={name} db=0 resp={}\n", self.id, replies.protocol.number());
                replies.bulk(line.as_bytes());
            }
            // accepted without an effect: clients send them after connecting
            (b"SETINFO", 4) | (b"NO-EVICT" | b"NO-TOUCH", 3) => replies.ok(),
            (b"ID" | b"GETNAME" | b"SETNAME" | b"INFO" | b"SETINFO" | b"NO-EVICT" | b"NO-TOUCH", _) => {
                let name = format!("{}|{}", entry.name, String::from_utf8_lossy(subcommand).to_lowercase());
                return Err(Error::arity(&name));
            }
            _ => return Err(Error::subcommand(entry.name, subcommand)),
        }
        Ok(())
    }
}

fn checked_name(name: &[u8]) -> Result<Vec<u8>, Error> {
    if name.len() > MAX_NAME || !name.iter().all(u8::is_ascii_graphic) {
        return Err(Error::invalid("Client names cannot contain spaces, newlines or special characters."));
    }
    Ok(name.to_vec())
}

fn unknown(command: &Command<'_>) -> Error {
    let mut text = format!("unknown command '{}', with args beginning with: ", shown(command.name()));
    for argument in command.from(1).take(QUOTED_ARGUMENTS) {
        text.push_str(&format!("'{}' ", shown(argument)));
    }
    Error::invalid(text)
}

/// `COMMAND [COUNT | LIST | INFO [name ...] | DOCS [name ...]]`.
fn list(entry: &Entry, command: &Command<'_>, replies: &mut Replies) -> Result<(), Error> {
    let Some(subcommand) = command.get(1) else {
        replies.array(COMMANDS.len());
        COMMANDS.iter().for_each(|entry| describe(entry, replies));
        return Ok(());
    };
    match (subcommand.to_ascii_uppercase().as_slice(), command.len()) {
        (b"COUNT", 2) => replies.count(COMMANDS.len() as u64),
        (b"LIST", 2) => {
            replies.array(COMMANDS.len());
            COMMANDS.iter().for_each(|entry| replies.bulk(entry.name.as_bytes()));
        }
        (b"INFO", 2) => {
            replies.array(COMMANDS.len());
            COMMANDS.iter().for_each(|entry| describe(entry, replies));
        }
        (b"INFO", _) => {
            replies.array(command.len() - 2);
            for name in command.from(2) {
                match commands::find(name) {
                    Some(entry) => describe(entry, replies),
                    None => replies.null(),
                }
            }
        }
        (b"DOCS", 2) => {
            replies.map(COMMANDS.len());
            COMMANDS.iter().for_each(|entry| document(entry, replies));
        }
        (b"DOCS", _) => {
            let known: Vec<_> = command.from(2).filter_map(commands::find).collect();
            replies.map(known.len());
            known.into_iter().for_each(|entry| document(entry, replies));
        }
        _ => return Err(Error::subcommand(entry.name, subcommand)),
    }
    Ok(())
}

/// Name, arity, flags, and the positions of the keys: first, last, step.
fn describe(entry: &Entry, replies: &mut Replies) {
    replies.array(6);
    replies.bulk(entry.name.as_bytes());
    replies.integer(entry.arity.into());
    let flags: &[&str] = if entry.is_read_only() { &["readonly", "fast"] } else { &["write", "fast"] };
    replies.array(flags.len());
    flags.iter().for_each(|flag| replies.simple(flag));
    let position = i64::from(entry.has_key());
    [position; 3].into_iter().for_each(|position| replies.integer(position));
}

fn document(entry: &Entry, replies: &mut Replies) {
    replies.bulk(entry.name.as_bytes());
    replies.map(3);
    for (field, text) in [("summary", entry.summary), ("since", VERSION), ("group", entry.group)] {
        replies.bulk(field.as_bytes());
        replies.bulk(text.as_bytes());
    }
}
