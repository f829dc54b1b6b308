//! One connection: answers the commands that have arrived in order, and writes the replies together.
//!
//! A slow client costs bounded time and memory: the input buffer holds at most one incomplete command after all others are answered, and
//! no input is read while the client does not read its replies.

use std::{
    cell::RefCell,
    future::poll_fn,
    io,
    mem::MaybeUninit,
    net::SocketAddr,
    pin::Pin,
    task::{Poll, ready},
    time::Duration,
};

use bytes::{Buf, BytesMut};
use sluicegate::limiter::{Operation, Progress};
use tokio::{
    io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadBuf},
    task::coop::consume_budget,
    time::{Instant, timeout, timeout_at},
};

use super::{
    Endpoint,
    batch::Batch,
    codec::{Command, Decoded, Decoder},
    error::Error,
    hold::HoldCommand,
    request::{CommandRequest, LastLimit, reset_reply},
    response::Replies,
    server::TIMEOUTS,
    session::{Next, Session},
};
use crate::{
    engine::{Engine, Transport},
    net::{
        activity::{Activity, CloseReason, InFlight},
        shutdown::SHUTDOWN_GRACE,
    },
    observe::Call,
};

/// How long a new connection may take to send its first command.
pub const FIRST_COMMAND_TIMEOUT: Duration = Duration::from_secs(30);

/// How long a connection may be idle between commands.
pub const IDLE_TIMEOUT: Duration = Duration::from_secs(300);

/// How long a command may take to arrive, from its first byte.
pub const COMMAND_TIMEOUT: Duration = Duration::from_secs(10);

/// How long a connection must be quiet before it is closed while the server stops. Commands that arrive until then are answered.
pub const DRAIN_QUIET: Duration = Duration::from_millis(50);

/// How many bytes of replies are collected before they are written.
pub const MAX_REPLIES: usize = 64 << 10;

/// How long input is read and discarded after the last reply. Closing a socket with unread input resets the connection, and the client
/// might not receive that reply.
const LINGER: Duration = Duration::from_secs(1);

/// How many commands take one unit of the task's cooperative budget.
const COMMANDS_PER_BUDGET_UNIT: u64 = 4;

/// How many bytes of input are read at a time.
const READ_ROOM: usize = 16 << 10;

/// How many bytes of input buffer an idle connection keeps.
const INPUT_ROOM: usize = 1 << 10;

/// How many bytes of reply buffer an idle connection keeps.
const REPLY_ROOM: usize = 1 << 10;

thread_local! {
    /// Where input is received.
    static READ_BUFFER: RefCell<Box<[MaybeUninit<u8>]>> = RefCell::new(Box::new_uninit_slice(READ_ROOM));
}

impl Endpoint {
    /// Serves one client that has no slot, until it disconnects or violates the protocol. There are no timeouts,
    /// because these are enforced by the listener.
    pub async fn serve(&self, io: impl AsyncRead + AsyncWrite + Unpin) {
        self.serve_connection(io, None, &Activity::detached(TIMEOUTS)).await;
    }

    /// Serves one client until it disconnects, violates the protocol or times out, or until the server stops and the
    /// client is idle.
    pub(super) async fn serve_connection(
        &self,
        io: impl AsyncRead + AsyncWrite + Unpin,
        peer: Option<SocketAddr>,
        activity: &Activity,
    ) {
        let counted = CountedClient::new(self);
        let mut connection = Connection {
            io,
            engine: &self.engine,
            endpoint: self,
            session: Session::new(counted.id, peer, self.access.clone()),
            input: BytesMut::new(),
            command_deadline: None,
            decoder: Decoder::default(),
            replies: Replies::default(),
            last: LastLimit::default(),
            batch: Batch::default(),
        };
        // An I/O error affects only this client.
        let _closed = connection.run(activity).await;
    }
}

/// Counts one connected client until this is dropped.
struct CountedClient<'a> {
    endpoint: &'a Endpoint,
    id: u64,
}

impl<'a> CountedClient<'a> {
    fn new(endpoint: &'a Endpoint) -> Self {
        Self { endpoint, id: endpoint.info.connected() }
    }
}

impl Drop for CountedClient<'_> {
    fn drop(&mut self) {
        self.endpoint.info.disconnected();
    }
}

struct Connection<'a, I> {
    io: I,
    engine: &'a Engine,
    endpoint: &'a Endpoint,
    session: Session,
    /// Bytes that have arrived and are not answered yet.
    input: BytesMut,
    /// When the command at the end of the input must be complete.
    command_deadline: Option<Instant>,
    decoder: Decoder,
    replies: Replies,
    last: LastLimit,
    batch: Batch,
}

impl<I: AsyncRead + AsyncWrite + Unpin> Connection<'_, I> {
    async fn run(&mut self, activity: &Activity) -> io::Result<()> {
        loop {
            tokio::select! {
                biased;
                read = self.receive() => {
                    if read? == 0 {
                        return Ok(());
                    }
                }
                reason = activity.close_requested() => match reason {
                    CloseReason::TimedOut => return self.close().await,
                    CloseReason::Shutdown => return self.drain(activity).await,
                }
            }
            if self.answer_received(activity).await? == Next::Close {
                return self.close().await;
            }
            let now = Instant::now();
            match self.command_deadline {
                None => activity.set_deadline(now + IDLE_TIMEOUT),
                Some(deadline) if deadline <= now => return self.close().await,
                Some(deadline) => activity.set_deadline(deadline),
            }
            // If the client's next bytes are always available, `select!` never polls its second branch.
            if activity.is_shutting_down() {
                return self.drain(activity).await;
            }
        }
    }

    /// Receives input. It is read into a buffer of the thread first, so that a connection without unanswered input has no large one.
    async fn receive(&mut self) -> io::Result<usize> {
        poll_fn(|context| {
            READ_BUFFER.with_borrow_mut(|buffer| {
                let mut buffer = ReadBuf::uninit(buffer);
                ready!(Pin::new(&mut self.io).poll_read(context, &mut buffer))?;
                self.input.extend_from_slice(buffer.filled());
                Poll::Ready(Ok(buffer.filled().len()))
            })
        })
        .await
    }

    /// Answers commands that are still on their way, until the client is quiet for [`DRAIN_QUIET`].
    async fn drain(&mut self, activity: &Activity) -> io::Result<()> {
        // Half the grace, so that the connection is closed in order and not aborted.
        let end = Instant::now() + SHUTDOWN_GRACE / 2;
        loop {
            let now = Instant::now();
            let until = self.command_deadline.unwrap_or(now + DRAIN_QUIET).min(end);
            if until <= now {
                return self.close().await;
            }
            match timeout_at(until, self.receive()).await {
                Ok(read) => {
                    if read? == 0 {
                        return Ok(());
                    }
                }
                Err(_elapsed) => return self.close().await,
            }
            if self.answer_received(activity).await? == Next::Close {
                return self.close().await;
            }
        }
    }

    /// Answers the commands that have arrived, and sets the deadline of an incomplete one.
    async fn answer_received(&mut self, activity: &Activity) -> io::Result<Next> {
        let received = self.input.len();
        let next = self.answer_all(activity).await?;
        if self.input.is_empty() {
            self.command_deadline = None;
        } else if self.command_deadline.is_none() || self.input.len() < received {
            self.command_deadline = Some(Instant::now() + COMMAND_TIMEOUT);
        }
        Ok(next)
    }

    /// Answers all complete commands of the input, and writes the replies.
    async fn answer_all(&mut self, activity: &Activity) -> io::Result<Next> {
        let mut cursor = InputCursor { activity, in_flight: None, read: 0, commands: 0, unbudgeted: 0 };
        let next = loop {
            match self.decoder.decode(&self.input[cursor.read..]) {
                Ok(Decoded::Partial) => break Next::Continue,
                Ok(Decoded::Empty(len)) => {
                    cursor.skip(len);
                    cursor.yield_if_due().await;
                }
                Ok(Decoded::Command(command, len)) => {
                    cursor.command(len);
                    cursor.yield_if_due().await;
                    let mut executor = Executor {
                        activity,
                        engine: self.engine,
                        endpoint: self.endpoint,
                        session: &mut self.session,
                        last: &mut self.last,
                        batch: &mut self.batch,
                        replies: &mut self.replies,
                    };
                    if executor.execute(&command).await == Next::Close {
                        break Next::Close;
                    }
                    self.write_if_large(&mut cursor).await?;
                }
                Err(error) => {
                    self.batch.flush(&mut self.replies).await;
                    self.endpoint.info.record_protocol_error();
                    self.replies.error(Error::invalid(format_args!("Protocol error: {error}")));
                    break Next::Close;
                }
            }
        };
        self.batch.flush(&mut self.replies).await;
        let InputCursor { read, commands, in_flight, .. } = cursor;
        drop(in_flight);
        self.endpoint.info.record_commands(commands);
        self.input.advance(read);
        if self.input.is_empty() && self.input.capacity() > INPUT_ROOM {
            self.input = BytesMut::new();
        }
        self.write().await?;
        Ok(next)
    }

    /// Writes the replies once they are large.
    async fn write_if_large(&mut self, cursor: &mut InputCursor<'_>) -> io::Result<()> {
        if self.replies.len() >= MAX_REPLIES {
            cursor.in_flight = None;
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

    /// Closes the connection so that the client receives all replies, even if it is still sending.
    async fn close(&mut self) -> io::Result<()> {
        self.io.shutdown().await?;
        let discard_input = async {
            loop {
                self.input.clear();
                if self.receive().await? == 0 {
                    return Ok(());
                }
            }
        };
        timeout(LINGER, discard_input).await?
    }
}

/// How far the input has been answered.
struct InputCursor<'a> {
    activity: &'a Activity,
    /// Held while the client waits for replies. An incomplete command is not a request, and a client that does not read
    /// its replies may be evicted.
    in_flight: Option<InFlight>,
    /// Bytes read.
    read: usize,
    /// Commands read.
    commands: u64,
    /// Commands and empty lines that have not yet been charged to the task's cooperative budget.
    unbudgeted: u64,
}

impl InputCursor<'_> {
    /// Records a command of this many bytes.
    fn command(&mut self, len: usize) {
        self.skip(len);
        self.commands += 1;
        self.in_flight.get_or_insert_with(|| self.activity.start_request());
    }

    /// Records input of this many bytes that needs no reply but takes time to read.
    fn skip(&mut self, len: usize) {
        self.read += len;
        self.unbudgeted += 1;
    }

    /// Yields to other tasks once the task's cooperative budget is spent.
    async fn yield_if_due(&mut self) {
        while self.unbudgeted >= COMMANDS_PER_BUDGET_UNIT {
            self.unbudgeted -= COMMANDS_PER_BUDGET_UNIT;
            consume_budget().await;
        }
    }
}

/// The parts of a connection that execute commands.
struct Executor<'a> {
    activity: &'a Activity,
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
            return Next::Close;
        }
        let found = self.session.find(command);
        self.activity.set_authenticated(self.session.is_authenticated());
        let entry = match found {
            Ok(entry) => entry,
            Err(error) => return self.reject(command, error).await,
        };
        if let Some(read) = HoldCommand::read(self.engine, entry.verb, command, self.session) {
            return match read {
                // boxed to keep idle connections small
                Ok(hold) => Box::pin(self.hold(hold)).await,
                Err(error) => self.reject(command, error).await,
            };
        }
        match CommandRequest::read(self.engine, entry.verb, command, self.last) {
            Some(Ok(request)) if request.call == Call::CHECK => self.check(&request).await,
            Some(Ok(request)) => self.adjust(&request).await,
            Some(Err(error)) => self.reject(command, error).await,
            None => {
                self.batch.flush(self.replies).await;
                let answered = self.session.answer(entry, command, &self.endpoint.info, self.replies);
                self.activity.set_authenticated(self.session.is_authenticated());
                answered.unwrap_or_else(|error| {
                    self.replies.error(error);
                    Next::Continue
                })
            }
        }
    }

    /// Starts a check. Its reply is written now if it is decided and no earlier check waits.
    async fn check(&mut self, request: &CommandRequest<'_>) -> Next {
        if !self.batch.accepts(request) {
            self.batch.flush(self.replies).await;
        }
        match self.engine.start(Transport::Resp, &request.request) {
            Ok(Progress::Decided(decision)) if self.batch.is_empty() => {
                request.reply(&decision, self.replies);
            }
            progress => self.batch.push(request.to_owned(), progress),
        }
        Next::Continue
    }

    /// Peeks, charges, refunds or resets, once all earlier checks are answered.
    async fn adjust(&mut self, request: &CommandRequest<'_>) -> Next {
        self.batch.flush(self.replies).await;
        let answered = if let Call::Decide(operation) = request.call {
            let decided = self.engine.decide(Transport::Resp, &request.request).await;
            if matches!(operation, Operation::Charge | Operation::Refund { .. }) {
                self.session.audit(request, &decided);
            }
            decided.map(|decision| request.reply(&decision, self.replies))
        } else {
            let reset = self.engine.reset(Transport::Resp, &request.request).await;
            self.session.audit(request, &reset);
            reset.map(|reset| reset_reply(&reset, self.replies))
        };
        if let Err(error) = answered {
            self.replies.error(Error::from(error));
        }
        Next::Continue
    }

    /// Makes, ends or renews a hold, once all earlier checks are answered.
    async fn hold(&mut self, hold: HoldCommand) -> Next {
        self.batch.flush(self.replies).await;
        if let Err(error) = hold.execute(self.engine, self.replies).await {
            self.replies.error(Error::from(error));
        }
        Next::Continue
    }

    async fn reject(&mut self, command: &Command<'_>, error: Error) -> Next {
        self.batch.flush(self.replies).await;
        self.session.rejected(command, &error, self.engine.observer());
        self.replies.error(error);
        Next::Continue
    }
}

/// Whether this is an HTTP request, which a web page could make a browser send. Its lines would be parsed as commands.
fn is_http(command: &Command<'_>) -> bool {
    [&b"POST"[..], b"HOST:"].iter().any(|word| command.name().eq_ignore_ascii_case(word))
}

#[cfg(test)]
mod tests {
    use std::task::Context;

    use sluicegate::{Limiter, MemoryStore};
    use tokio::io::{duplex, join};

    use super::*;
    use crate::auth::Access;

    fn endpoint() -> Endpoint {
        Endpoint::new(Engine::new(Limiter::new(MemoryStore::new(), []).unwrap()), Access::default())
    }

    /// Also in the middle of a pipeline: the replies may be much longer than the commands.
    #[tokio::test(start_paused = true)]
    async fn a_client_that_does_not_read_its_replies_is_idle() {
        for command in ["PING\n", "SG.CHECK 1\n", "COMMAND DOCS\n"] {
            let endpoint = endpoint();
            let (_not_reading, replies) = duplex(1);
            let sent = command.repeat(READ_ROOM);
            let activity = Activity::detached(TIMEOUTS);
            let long = Duration::from_secs(5);
            let served = endpoint.serve_connection(join(sent.as_bytes(), replies), None, &activity);
            timeout(long, served).await.expect_err("the replies are not read");
            let idle_time = activity.idle_time(Instant::now());
            assert!(idle_time >= long, "{command:?}: {idle_time:?}");
        }
    }

    /// A client whose next command is always available, until the server closes the connection.
    #[derive(Default)]
    struct BusyClient {
        received: usize,
        is_closed: bool,
    }

    impl AsyncRead for BusyClient {
        fn poll_read(
            self: Pin<&mut Self>,
            _: &mut Context<'_>,
            into: &mut ReadBuf<'_>,
        ) -> Poll<io::Result<()>> {
            if !self.is_closed {
                into.put_slice(b"PING\r\n");
            }
            Poll::Ready(Ok(()))
        }
    }

    impl AsyncWrite for BusyClient {
        fn poll_write(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
            replies: &[u8],
        ) -> Poll<io::Result<usize>> {
            self.received += replies.len();
            Poll::Ready(Ok(replies.len()))
        }

        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }

        fn poll_shutdown(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            self.is_closed = true;
            Poll::Ready(Ok(()))
        }
    }

    // On the real clock: a paused clock does not advance while a task is busy.
    #[tokio::test]
    async fn a_client_that_never_pauses_is_disconnected_in_order_on_shutdown() {
        let activity = Activity::detached(TIMEOUTS);
        activity.shut_down();
        let mut client = BusyClient::default();
        let (endpoint, served) = (endpoint(), Duration::from_secs(20));
        timeout(served, endpoint.serve_connection(&mut client, None, &activity)).await.unwrap();
        assert!(client.is_closed && client.received > 0);
        assert!(client.received.is_multiple_of(b"+PONG\r\n".len()));
    }
}
