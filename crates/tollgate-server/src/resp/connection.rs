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
use tollgate::{Operation, Progress};

use super::{
    Endpoint,
    batch::Batch,
    codec::{Command, Decoded, Decoder},
    error::Error,
    request::{CommandRequest, LastLimit},
    response::Replies,
    session::{Next, Session},
};
use crate::{
    aside::Aside,
    engine::{Engine, Transport},
    net::acceptor::{SHUTDOWN_GRACE, Stop},
    net::connection_limit::{Asking, Voice},
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

impl Endpoint {
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
            engine: &self.engine,
            endpoint: self,
            session: Session::new(present.id, peer, self.access.clone()),
            input: BytesMut::new(),
            decoder: Decoder::default(),
            replies: Replies::default(),
            last: LastLimit::default(),
            batch: Batch::default(),
        };
        // A connection that breaks off is its client's affair.
        let _ended = connection.run(voice, stop).await;
    }
}

/// A client that is here, until this is dropped.
struct Present<'a> {
    endpoint: &'a Endpoint,
    id: u64,
}

impl<'a> Present<'a> {
    fn come(endpoint: &'a Endpoint) -> Self {
        Self { endpoint, id: endpoint.numbers.connected() }
    }
}

impl Drop for Present<'_> {
    fn drop(&mut self) {
        self.endpoint.numbers.disconnected();
    }
}

struct Connection<'a, I> {
    io: I,
    engine: &'a Engine,
    endpoint: &'a Endpoint,
    session: Session,
    /// What has arrived and is not answered yet.
    input: BytesMut,
    decoder: Decoder,
    replies: Replies,
    last: LastLimit,
    batch: Batch,
}

impl<I: AsyncRead + AsyncWrite + Unpin> Connection<'_, I> {
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
            match self.decoder.decode(&self.input[heard.read..]) {
                Ok(Decoded::Partial) => break Next::Stay,
                Ok(Decoded::Empty(len)) => {
                    heard.nothing(len);
                    heard.gives_way().await;
                }
                Ok(Decoded::Command(command, len)) => {
                    heard.command(len);
                    heard.gives_way().await;
                    let mut executor = Executor {
                        engine: self.engine,
                        endpoint: self.endpoint,
                        session: &mut self.session,
                        last: &mut self.last,
                        batch: &mut self.batch,
                        replies: &mut self.replies,
                    };
                    if executor.execute(&command).await == Next::Leave {
                        break Next::Leave;
                    }
                    self.write_much(&mut heard).await?;
                }
                Err(error) => {
                    self.batch.flush(&mut self.replies).await;
                    self.endpoint.numbers.broke_protocol();
                    self.replies.error(Error::mistake(format_args!("Protocol error: {error}")));
                    break Next::Leave;
                }
            }
        };
        self.batch.flush(&mut self.replies).await;
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

/// What executes the commands of a connection.
struct Executor<'a> {
    engine: &'a Engine,
    endpoint: &'a Endpoint,
    session: &'a mut Session,
    last: &'a mut LastLimit,
    batch: &'a mut Batch,
    replies: &'a mut Replies,
}

impl Executor<'_> {
    /// Answers one command, or adds it to the batch.
    async fn execute(&mut self, command: &Command<'_>) -> Next {
        if is_http(command) {
            return Next::Leave;
        }
        let entry = match self.session.find(command) {
            Ok(entry) => entry,
            Err(error) => return self.reject(command, error).await,
        };
        match CommandRequest::read(self.engine, entry.verb, command, self.last) {
            Some(Ok(request)) if request.call == Call::CHECK => self.check(request).await,
            Some(Ok(request)) => self.adjust(&request).await,
            Some(Err(error)) => self.reject(command, error).await,
            None => {
                self.batch.flush(self.replies).await;
                let answered = self.session.answer(entry, command, &self.endpoint.numbers, self.replies);
                answered.unwrap_or_else(|error| {
                    self.replies.error(error);
                    Next::Stay
                })
            }
        }
    }

    /// Starts a check. Its reply is written now if it is decided and no earlier check waits.
    async fn check(&mut self, request: CommandRequest<'_>) -> Next {
        if !self.batch.accepts(&request) {
            self.batch.flush(self.replies).await;
        }
        match self.engine.start(Transport::Resp, &request.request) {
            Ok(Progress::Decided(decision)) if self.batch.is_empty() => {
                request.reply(&decision, self.replies);
            }
            progress => self.batch.push(request.into_owned(), progress),
        }
        Next::Stay
    }

    /// Peeks, charges, refunds or resets, once all earlier checks are answered.
    async fn adjust(&mut self, request: &CommandRequest<'_>) -> Next {
        self.batch.flush(self.replies).await;
        let answered = match request.call {
            Call::Decide(operation) => {
                let decided = self.engine.decide(Transport::Resp, &request.request).await;
                if matches!(operation, Operation::Charge | Operation::Refund { .. }) {
                    self.session.audit(request, &decided);
                }
                decided.map(|decision| request.reply(&decision, self.replies))
            }
            Call::Reset => {
                let deleted = self.engine.reset(Transport::Resp, &request.request).await;
                self.session.audit(request, &deleted);
                deleted.map(|deleted| self.replies.count(deleted))
            }
        };
        if let Err(error) = answered {
            self.replies.error(Error::from(error));
        }
        Next::Stay
    }

    async fn reject(&mut self, command: &Command<'_>, error: Error) -> Next {
        self.batch.flush(self.replies).await;
        self.session.rejected(command, &error, self.engine.observer());
        self.replies.error(error);
        Next::Stay
    }
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
    use crate::access::Access;

    /// Also in the middle of what it has sent: its answers may be much longer than that.
    #[tokio::test(start_paused = true)]
    async fn who_does_not_read_its_answers_is_silent() {
        for command in ["PING\n", "TG.CHECK 1\n", "COMMAND DOCS\n"] {
            let engine = Engine::new(Limiter::new(MemoryStore::new(), []).unwrap());
            let endpoint = Endpoint::new(engine, Access::default());
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
