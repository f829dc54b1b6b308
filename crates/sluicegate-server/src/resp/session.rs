//! What a connection knows of its client, and the commands that are about that and nothing else.

use std::{fmt::Display, net::SocketAddr};

use super::{
    auth::{self, DEFAULT_USER, Needs},
    codec::Command,
    commands::{self, COMMANDS, Entry, Verb},
    error::{Error, shown},
    info::{Numbers, VERSION},
    request::{CommandRequest, whole},
    response::{Protocol, Replies},
};
use crate::{
    auth::{Access, AuthError, Identity, UNAUTHENTICATED},
    config::Scope,
    engine::Summary,
    observe::{
        Observer,
        logs::{Audit, audit},
    },
};

/// The longest name of a connection, in bytes.
const MAX_NAME: usize = 256;

/// How many arguments an error about an unknown command quotes.
const QUOTED_ARGUMENTS: usize = 8;

/// What a connection knows of its client.
#[derive(Debug)]
pub(super) struct Session {
    id: u64,
    peer: Option<SocketAddr>,
    name: Vec<u8>,
    access: Access,
    /// Who the client is, once it is let in.
    granted: Option<Identity>,
    /// How often tokens had changed when that was found out.
    changes: u64,
}

/// What becomes of the connection after a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    Stay,
    Leave,
}

impl Session {
    pub(super) fn new(id: u64, peer: Option<SocketAddr>, access: Access) -> Self {
        let changes = access.changes();
        let granted = auth::at_first(&access);
        Self { id, peer, name: Vec::new(), access, granted, changes }
    }

    /// Writes the audit line of a command that adjusts or administers.
    pub(super) fn audit<T>(&self, request: &CommandRequest<'_>, outcome: &Result<T, sluicegate::Error>) {
        let who = self.granted.as_ref().map_or(UNAUTHENTICATED, Identity::name);
        let result = outcome.as_ref().map(|_| ()).map_err(|error| error as &dyn Display);
        let (from, action) = (self.peer, request.call.name());
        audit(&Audit { who, from, action, subject: &Summary(&request.request), result });
    }

    /// The command of a name, if the client may use it so.
    #[inline]
    pub(super) fn find(&mut self, command: &Command<'_>) -> Result<&'static Entry, Error> {
        self.renew();
        let entry = commands::find(command.name());
        match entry {
            Some(entry) if entry.takes(command.len()) && entry.needs.are_met_by(self.granted.as_ref()) => {
                Ok(entry)
            }
            _ => Err(self.refusal(entry, command)),
        }
    }

    /// Why the client may not use a command so.
    #[cold]
    fn refusal(&self, entry: Option<&Entry>, command: &Command<'_>) -> Error {
        match entry {
            entry if self.granted.is_none() && !entry.is_some_and(Entry::is_open) => {
                Error::new(Error::NO_TOKEN, "Authentication required.")
            }
            None => unknown(command),
            Some(entry) if !entry.takes(command.len()) => Error::arity(entry.name),
            Some(entry) => {
                let text = format_args!("this token has no permission to run the '{}' command", entry.name);
                Error::new(Error::TOO_WEAK, text)
            }
        }
    }

    /// Counts a command that was not executed, and writes an audit line if it would have changed something.
    #[cold]
    pub(super) fn rejected(&self, command: &Command<'_>, error: &Error, observer: &Observer) {
        let Some(entry) = commands::find(command.name()) else { return };
        let Some(call) = entry.verb.call() else { return };
        if !error.is_denial() {
            observer.invalid(call);
            return;
        }
        observer.unauthorized(call);
        if let Needs::Scope(scope @ (Scope::Adjust | Scope::Admin)) = entry.needs {
            let denied = match &self.granted {
                Some(granted) => AuthError::MissingScope { name: granted.name().to_owned(), scope },
                None => AuthError::MissingToken,
            };
            self.access.audit_rejected(self.peer, call.name(), &denied);
        }
    }

    /// Looks again who the client is, if tokens have changed since: one that was taken back lets nobody in.
    #[inline]
    fn renew(&mut self) {
        let changes = self.access.changes();
        if changes != self.changes {
            self.look_again(changes);
        }
    }

    #[cold]
    fn look_again(&mut self, changes: u64) {
        self.granted = match &self.granted {
            Some(granted) => self.access.renewed(granted),
            None => auth::at_first(&self.access),
        };
        self.changes = changes;
    }

    /// Answers a command that asks nothing about counters.
    pub(super) fn answer(
        &mut self,
        entry: &Entry,
        command: &Command<'_>,
        numbers: &Numbers,
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
            Verb::Info => replies.bulk(numbers.info(command.from(1)).as_bytes()),
            Verb::Command => list(entry, command, replies)?,
            Verb::Client => self.client(entry, command, replies)?,
            Verb::Select => match command.get(1) {
                Some(b"0") => replies.ok(),
                _ => return Err(Error::mistake("DB index is out of range")),
            },
            Verb::Quit => {
                replies.ok();
                return Ok(Next::Leave);
            }
            Verb::Reset => {
                self.granted = auth::at_first(&self.access);
                self.name.clear();
                replies.protocol = Protocol::default();
                replies.simple("RESET");
            }
            Verb::Throttle | Verb::Check | Verb::Peek | Verb::Charge | Verb::Refund | Verb::Forget => {
                unreachable!("a question is asked, not answered here")
            }
        }
        Ok(Next::Stay)
    }

    /// `HELLO [version [AUTH user password] [SETNAME name]]`. Nothing changes unless all of it can be done.
    fn hello(&mut self, command: &Command<'_>, replies: &mut Replies) -> Result<(), Error> {
        let protocol = match command.get(1) {
            None => replies.protocol,
            Some(b"2") => Protocol::Resp2,
            Some(b"3") => Protocol::Resp3,
            Some(version) if whole(version).is_some() => {
                return Err(Error::new("NOPROTO", "unsupported protocol version"));
            }
            Some(_) => return Err(Error::mistake("Protocol version is not an integer or out of range")),
        };
        let (mut granted, mut name) = (self.granted.clone(), None);
        let mut at = 2;
        while let Some(option) = command.get(at) {
            match (option.to_ascii_uppercase().as_slice(), command.get(at + 1), command.get(at + 2)) {
                (b"AUTH", Some(user), Some(secret)) => {
                    granted = Some(self.let_in(user, secret)?);
                    at += 3;
                }
                (b"SETNAME", Some(given), _) => {
                    name = Some(checked_name(given)?);
                    at += 2;
                }
                _ => {
                    return Err(Error::mistake(format_args!(
                        "Syntax error in HELLO option '{}'",
                        shown(option)
                    )));
                }
            }
        }
        if granted.is_none() {
            return Err(Error::new(
                Error::NO_TOKEN,
                "HELLO must be called with the client already authenticated, otherwise the HELLO <proto> AUTH \
                 <user> <pass> option can be used to authenticate the client and select the RESP protocol version \
                 at the same time",
            ));
        }
        self.granted = granted;
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
        let granted = match (command.get(1), command.get(2), command.len()) {
            (Some(secret), None, _) => self.let_in(DEFAULT_USER.as_bytes(), secret)?,
            (Some(user), Some(secret), 3) => self.let_in(user, secret)?,
            _ => return Err(Error::arity(entry.name)),
        };
        self.granted = Some(granted);
        replies.ok();
        Ok(())
    }

    fn let_in(&self, user: &[u8], secret: &[u8]) -> Result<Identity, Error> {
        if self.access.is_open() {
            return Err(Error::mistake(
                "AUTH <password> called without any password configured for the default user. Are you sure your \
                 configuration is correct?",
            ));
        }
        auth::given(&self.access, user, secret).ok_or_else(|| {
            self.access.audit_rejected(self.peer, "auth", &AuthError::UnknownToken);
            Error::new("WRONGPASS", "invalid username-password pair or user is disabled.")
        })
    }

    /// What clients say about themselves when they come.
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
            // what they say about their library, and about keys in memory, changes nothing here
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
        return Err(Error::mistake("Client names cannot contain spaces, newlines or special characters."));
    }
    Ok(name.to_vec())
}

fn unknown(command: &Command<'_>) -> Error {
    let mut text = format!("unknown command '{}', with args beginning with: ", shown(command.name()));
    for argument in command.from(1).take(QUOTED_ARGUMENTS) {
        text.push_str(&format!("'{}' ", shown(argument)));
    }
    Error::mistake(text)
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

/// Name, arity, flags, and where the keys are: first, last, step.
fn describe(entry: &Entry, replies: &mut Replies) {
    replies.array(6);
    replies.bulk(entry.name.as_bytes());
    replies.integer(entry.arity.into());
    let flags: &[&str] = if entry.only_reads() { &["readonly", "fast"] } else { &["write", "fast"] };
    replies.array(flags.len());
    flags.iter().for_each(|flag| replies.simple(flag));
    let place = i64::from(entry.has_key());
    [place; 3].into_iter().for_each(|place| replies.integer(place));
}

fn document(entry: &Entry, replies: &mut Replies) {
    replies.bulk(entry.name.as_bytes());
    replies.map(3);
    for (field, text) in [("summary", entry.summary), ("since", VERSION), ("group", entry.group)] {
        replies.bulk(field.as_bytes());
        replies.bulk(text.as_bytes());
    }
}
