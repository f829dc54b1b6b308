//! One connection: all commands that have arrived are answered in order, and the answers written at once.
//!
//! A client that is slow costs a bounded time and a bounded amount of memory: the buffer of what it sends holds one command
//! at most once all others are answered, and answers that it does not read stop us from reading more.

use std::{io, net::SocketAddr, time::Duration};

use bytes::{Buf, BytesMut};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    task::coop::consume_budget,
    time::{Instant, Sleep, sleep_until, timeout},
};
use tollgate::{Operation, Store};

use super::{
    CALLER, Endpoint,
    at_once::{AtOnce, MAX_AT_ONCE},
    codec::{Command, Decoded, Decoder},
    commands::{Entry, Verb},
    error::Error,
    question::{LastLimit, Question},
    reply::Replies,
    session::{Next, Session},
    together::Together,
};
use crate::{
    aside::Aside,
    connections::{SHUTDOWN_GRACE, Stop},
    crowd::{Asking, Voice},
    desk::Desk,
    observe::Call,
};

/// How long a new connection may take to send its first command.
pub const FIRST_COMMAND_TIMEOUT: Duration = Duration::from_secs(30);

/// How long a connection may idle between commands.
pub const IDLE_TIMEOUT: Duration = Duration::from_secs(300);

/// How long a command may take to arrive once it has begun.
pub const COMMAND_TIMEOUT: Duration = Duration::from_secs(10);

/// How long a connection must be quiet to be ended when the server stops: what the client has sent by then is answered.
pub const DRAIN_QUIET: Duration = Duration::from_millis(50);

/// So many bytes of answers are written without waiting for more of them.
pub const MAX_REPLIES: usize = 64 << 10;

/// How long a client may go on sending, unheard, after the last answer: it would not get that answer otherwise.
const LINGER: Duration = Duration::from_secs(1);

/// For how many commands the runtime is asked once whether others have waited long enough.
const COMMANDS_PER_LOOK: u64 = 4;

/// How much is read at once.
const READ_ROOM: usize = 16 << 10;

/// How much room a quiet connection keeps for answers.
const REPLY_ROOM: usize = 4 << 10;

impl<S: Store> Endpoint<S> {
    /// Serves one client until it leaves, breaks the protocol or is too slow to send, or until `stop` comes and it is quiet.
    pub async fn serve(&self, io: impl AsyncRead + AsyncWrite + Unpin, stop: Stop) {
        self.serve_guest(io, None, &Voice::of_nobody(), stop).await;
    }

    /// The same for a client that loses its place to others when it is silent.
    pub(super) async fn serve_guest(
        &self,
        io: impl AsyncRead + AsyncWrite + Unpin,
        peer: Option<SocketAddr>,
        voice: &Voice,
        stop: Stop,
    ) {
        let present = Present::come(self);
        let connection = Connection {
            io,
            desk: &self.desk,
            is_far: self.desk.limiter().store().is_remote(),
            has_keys_here: self.desk.has_keys_here(),
            endpoint: self,
            session: Session::new(present.id, peer, self.access.clone()),
            input: BytesMut::new(),
            decoder: Decoder::default(),
            replies: Replies::default(),
            last: LastLimit::default(),
            together: Together::default(),
        };
        // A connection that breaks off is its client's affair.
        let _ended = connection.run(voice, stop).await;
    }
}

/// A client that is here, until this is dropped.
struct Present<'a, S> {
    endpoint: &'a Endpoint<S>,
    id: u64,
}

impl<'a, S> Present<'a, S> {
    fn come(endpoint: &'a Endpoint<S>) -> Self {
        Self { endpoint, id: endpoint.numbers.connected() }
    }
}

impl<S> Drop for Present<'_, S> {
    fn drop(&mut self) {
        self.endpoint.numbers.disconnected();
    }
}

struct Connection<'a, I, S> {
    io: I,
    desk: &'a Desk<S>,
    /// Whether asking costs a round trip.
    is_far: bool,
    /// Whether throttles can be decided at once.
    has_keys_here: bool,
    endpoint: &'a Endpoint<S>,
    session: Session,
    /// What has arrived and is not answered yet.
    input: BytesMut,
    decoder: Decoder,
    replies: Replies,
    last: LastLimit,
    together: Together,
}

impl<I: AsyncRead + AsyncWrite + Unpin, S: Store> Connection<'_, I, S> {
    async fn run(mut self, voice: &Voice, mut stop: Stop) -> io::Result<()> {
        let mut patience = Patience::new(Instant::now());
        let mut timer = Aside::new(sleep_until(patience.until));
        let told = stop.clone();
        let mut stopped = Aside::new(stop.stopped());
        loop {
            self.input.reserve(READ_ROOM);
            let waited_for_the_rest = !self.input.is_empty();
            tokio::select! {
                biased;
                read = self.io.read_buf(&mut self.input) => {
                    if read? == 0 {
                        return Ok(());
                    }
                    let had = self.input.len();
                    if self.answer_all(voice).await? == Next::Leave {
                        return self.leave().await;
                    }
                    let waits = if self.input.is_empty() {
                        Waits::ForMore
                    } else if waited_for_the_rest && self.input.len() == had {
                        Waits::Still
                    } else {
                        Waits::ForTheRest
                    };
                    let now = Instant::now();
                    // somebody who always has sent more already would not be told otherwise, and be cut off in the end
                    if !patience.is_stopping() && told.has_come() {
                        patience.stop(self.input.is_empty(), now);
                    }
                    patience.heard(waits, now);
                    if patience.until <= now {
                        return self.leave().await;
                    }
                    patience.set(&mut timer);
                }
                () = &mut timer => {
                    if patience.until <= Instant::now() {
                        return self.leave().await;
                    }
                    timer.change().reset(patience.until);
                }
                () = &mut stopped, if !patience.is_stopping() => {
                    patience.stop(self.input.is_empty(), Instant::now());
                    patience.set(&mut timer);
                }
            }
        }
    }

    /// Answers all commands that have arrived.
    async fn answer_all(&mut self, voice: &Voice) -> io::Result<Next> {
        let mut heard = Heard { voice, asking: None, read: 0, commands: 0, since_look: 0 };
        let next = loop {
            if !self.is_far {
                let may_go_on = self.answer_here(&mut heard);
                heard.gives_way().await;
                self.write_much(&mut heard).await?;
                if may_go_on {
                    continue;
                }
            }
            match self.decoder.decode(&self.input[heard.read..]) {
                Ok(Decoded::Partial) => break Next::Stay,
                Ok(Decoded::Empty(len)) => {
                    heard.nothing(len);
                    heard.gives_way().await;
                }
                Ok(Decoded::Command(command, len)) => {
                    heard.command(len);
                    heard.gives_way().await;
                    let asked = Asked {
                        desk: self.desk,
                        is_far: self.is_far,
                        together: &mut self.together,
                        replies: &mut self.replies,
                    };
                    if asked.answer(&mut self.session, self.endpoint, &command).await == Next::Leave {
                        break Next::Leave;
                    }
                    self.write_much(&mut heard).await?;
                }
                Err(error) => {
                    self.together.answer(self.desk, &mut self.replies).await;
                    self.endpoint.numbers.broke_protocol();
                    self.replies.error(Error::mistake(format_args!("Protocol error: {error}")));
                    break Next::Leave;
                }
            }
        };
        self.together.answer(self.desk, &mut self.replies).await;
        let Heard { read, commands, asking, .. } = heard;
        drop(asking);
        self.endpoint.numbers.served(commands);
        self.input.advance(read);
        if self.input.is_empty() && self.input.capacity() > READ_ROOM {
            self.input = BytesMut::new();
        }
        self.write().await?;
        Ok(next)
    }

    /// Answers commands that need no waiting, as nearly all that come to a store in this process, up to one that does. Whether there
    /// may be more of them.
    fn answer_here(&mut self, heard: &mut Heard<'_>) -> bool {
        let Self { desk, input, decoder, session, last, replies, .. } = self;
        let mut at_once = AtOnce::default();
        let mut answered = 0;
        while answered < MAX_AT_ONCE
            && let Ok(Decoded::Command(command, len)) = decoder.decode(&input[heard.read..])
        {
            let is_answered = match session.find(&command) {
                Ok(Entry { verb: Verb::Throttle, .. }) => {
                    self.has_keys_here && at_once.add(&command, heard.read, last)
                }
                Ok(Entry { verb: Verb::Check, .. }) => {
                    at_once.answer(input, desk, replies);
                    is_checked_here(desk, &command, replies)
                }
                _ => false,
            };
            if !is_answered {
                break;
            }
            heard.command(len);
            answered += 1;
        }
        at_once.answer(input, desk, replies);
        answered == MAX_AT_ONCE
    }

    /// Writes the answers if there are many.
    async fn write_much(&mut self, heard: &mut Heard<'_>) -> io::Result<()> {
        if self.replies.len() >= MAX_REPLIES {
            heard.asking = None;
            self.write().await?;
        }
        Ok(())
    }

    async fn write(&mut self) -> io::Result<()> {
        if self.replies.is_empty() {
            return Ok(());
        }
        self.io.write_all(self.replies.bytes()).await?;
        self.io.flush().await?;
        self.replies.clear(REPLY_ROOM);
        Ok(())
    }

    /// Ends the connection so that the client hears all answers: one that is closed while it still sends may not.
    async fn leave(mut self) -> io::Result<()> {
        self.io.shutdown().await?;
        let unheard = async {
            loop {
                self.input.clear();
                self.input.reserve(READ_ROOM);
                if self.io.read_buf(&mut self.input).await? == 0 {
                    return Ok(());
                }
            }
        };
        timeout(LINGER, unheard).await?
    }
}

/// Answers a check, if that needs no waiting.
fn is_checked_here<S: Store>(desk: &Desk<S>, command: &Command<'_>, replies: &mut Replies) -> bool {
    let Some(Ok(question)) = Question::read(desk, Verb::Check, command) else { return false };
    match desk.check_here(CALLER.transport, &question.subject) {
        Some(Ok(decision)) => question.answer(&decision, replies),
        Some(Err(error)) => replies.error(Error::from(error)),
        None => return false,
    }
    true
}

/// What of the input was heard.
struct Heard<'a> {
    voice: &'a Voice,
    /// Held while the client waits for answers: half a command asks nothing, and who does not read its answers may lose its place.
    asking: Option<Asking>,
    /// How many bytes.
    read: usize,
    /// How many commands in them.
    commands: u64,
    /// How many of these, and of those that ask nothing, since the runtime was asked about others.
    since_look: u64,
}

impl Heard<'_> {
    /// Another command, of so many bytes.
    fn command(&mut self, len: usize) {
        self.nothing(len);
        self.commands += 1;
        self.asking.get_or_insert_with(|| self.voice.asks());
    }

    /// Nothing that asks for an answer, in so many bytes: to read it takes time too.
    fn nothing(&mut self, len: usize) {
        self.read += len;
        self.since_look += 1;
    }

    /// Lets others have their turn if they have waited long enough.
    async fn gives_way(&mut self) {
        while self.since_look >= COMMANDS_PER_LOOK {
            self.since_look -= COMMANDS_PER_LOOK;
            consume_budget().await;
        }
    }
}

/// Where a command is asked and answered.
struct Asked<'a, S> {
    desk: &'a Desk<S>,
    is_far: bool,
    together: &'a mut Together,
    replies: &'a mut Replies,
}

impl<S: Store> Asked<'_, S> {
    /// Answers one command, or keeps its question to ask it together with others.
    async fn answer(self, session: &mut Session, endpoint: &Endpoint<S>, command: &Command<'_>) -> Next {
        let Self { desk, is_far, together, replies } = self;
        if is_http(command) {
            return Next::Leave;
        }
        let found = session.find(command);
        let question = match &found {
            Ok(entry) => Question::read(desk, entry.verb, command).transpose(),
            Err(_) => Ok(None),
        };
        if let Err(error) | Ok(Err(error)) = found.as_ref().map(|_| question.as_ref()) {
            session.turned_away(command, error, desk.observer());
        }
        let question = match question {
            Ok(Some(question)) if is_far && question.call == Call::CHECK => {
                if !together.has_room_for(&question) {
                    together.answer(desk, replies).await;
                }
                together.add(question);
                return Next::Stay;
            }
            other => other,
        };
        together.answer(desk, replies).await;
        let answered = match (found, question) {
            (Err(error), _) | (_, Err(error)) => Err(error),
            (Ok(_), Ok(Some(question))) => ask(desk, &question, session, replies).await.map(|()| Next::Stay),
            (Ok(entry), Ok(None)) => session.answer(entry, command, &endpoint.numbers, replies),
        };
        answered.unwrap_or_else(|error| {
            replies.error(error);
            Next::Stay
        })
    }
}

async fn ask<S: Store>(
    desk: &Desk<S>,
    question: &Question,
    session: &Session,
    replies: &mut Replies,
) -> Result<(), Error> {
    match question.call {
        Call::Decide(operation) => {
            let decided = desk.decide(CALLER, operation, &question.subject).await;
            if matches!(operation, Operation::Charge | Operation::Refund { .. }) {
                session.audit(question, &decided);
            }
            question.answer(&decided?, replies);
        }
        Call::Reset => {
            let forgotten = desk.reset(CALLER, &question.subject).await;
            session.audit(question, &forgotten);
            replies.count(forgotten?);
        }
    }
    Ok(())
}

/// Whether a browser was made to send this: its lines are words too, and a page must not speak for its visitor.
fn is_http(command: &Command<'_>) -> bool {
    [&b"POST"[..], b"HOST:"].iter().any(|word| command.name().eq_ignore_ascii_case(word))
}

/// What a connection waits for once all that has arrived is answered.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Waits {
    /// A command.
    ForMore,
    /// The rest of a command.
    ForTheRest,
    /// The rest of a command, as before.
    Still,
}

/// Until when a client may be silent.
struct Patience {
    until: Instant,
    /// When the connection ends at the latest, once the server stops.
    end: Option<Instant>,
}

impl Patience {
    fn new(now: Instant) -> Self {
        Self { until: now + FIRST_COMMAND_TIMEOUT, end: None }
    }

    fn is_stopping(&self) -> bool {
        self.end.is_some()
    }

    fn heard(&mut self, waits: Waits, now: Instant) {
        let until = match (waits, self.end) {
            (Waits::Still, _) => self.until,
            (Waits::ForTheRest, _) => now + COMMAND_TIMEOUT,
            (Waits::ForMore, None) => now + IDLE_TIMEOUT,
            (Waits::ForMore, Some(_)) => now + DRAIN_QUIET,
        };
        self.until = self.end.map_or(until, |end| until.min(end));
    }

    fn stop(&mut self, is_quiet: bool, now: Instant) {
        // half of it, so that it is the client who is waited for, and not a connection that is cut off
        self.end = Some(now + SHUTDOWN_GRACE / 2);
        self.heard(if is_quiet { Waits::ForMore } else { Waits::Still }, now);
    }

    /// Lets the timer go off in time. One that goes off too early is only set again: so a command costs no timer.
    fn set(&self, timer: &mut Aside<Sleep>) {
        if self.until < timer.look().deadline() {
            timer.change().reset(self.until);
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{duplex, join};
    use tollgate::{Limiter, MemoryStore};

    use super::*;
    use crate::auth::Access;

    /// Also in the middle of what it has sent: its answers may be much longer than that.
    #[tokio::test(start_paused = true)]
    async fn who_does_not_read_its_answers_is_silent() {
        for command in ["PING\n", "TG.CHECK 1\n", "COMMAND DOCS\n"] {
            let desk = Desk::new(Limiter::new(MemoryStore::new(), []).unwrap());
            let endpoint = Endpoint::new(desk, Access::default());
            let (_stop, stopped) = Stop::when_dropped();
            let (_deaf, answers) = duplex(1);
            let sent = command.repeat(READ_ROOM);
            let voice = Voice::of_nobody();
            let long = Duration::from_secs(5);
            let served = endpoint.serve_guest(join(sent.as_bytes(), answers), None, &voice, stopped);
            timeout(long, served).await.expect_err("the client is waited for");
            assert!(voice.has_asked() && voice.silence() >= long, "{command:?}: {:?}", voice.silence());
        }
    }
}
