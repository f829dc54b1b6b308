//! A runtime without work stealing: every connection stays on the thread that it was assigned to.
//!
//! If decisions never wait, work stealing only causes wake-ups. With a remote store, a shared runtime is faster,
//! because all threads can process the store's replies: see [`server`](crate::server).

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use tokio::{
    net::TcpStream,
    runtime::{Builder, Handle},
    sync::oneshot,
    task::{AbortHandle, JoinSet},
};

/// How many files the runtime of a thread holds open: its poller twice, its waker, and its signal receiver.
const FILES_PER_THREAD: u64 = 4;

/// After how many task polls a thread checks its sockets, even if some of its tasks are ready to run.
const POLLS_PER_IO_CHECK: u32 = 16;

/// Threads that serve connections. Cheap to clone; the threads end with the last clone.
#[derive(Clone)]
pub struct NoStealRuntime(Arc<[Worker]>);

struct Worker {
    runtime: Handle,
    connections: AtomicUsize,
    _ends_thread_on_drop: oneshot::Sender<()>,
}

impl NoStealRuntime {
    /// Starts as many threads as the current runtime has.
    ///
    /// # Errors
    /// When the operating system does not grant them.
    pub fn start() -> io::Result<Self> {
        let threads = Handle::current().metrics().num_workers();
        (0..threads).map(Worker::start).collect::<Result<_, _>>().map(Self)
    }

    /// How many threads it has: at least one.
    pub(crate) fn threads(&self) -> usize {
        self.0.len()
    }

    /// How many files the threads hold open, apart from connections.
    pub(crate) fn files(&self) -> u64 {
        self.0.iter().map(|_| FILES_PER_THREAD).sum()
    }

    /// Returns the thread for a new connection: the one with the fewest active connections of the same front end, then the one with the
    /// fewest connections. Idle connections count only as a tie-breaker: otherwise a client could keep idle connections open on all
    /// threads but one, and all other clients would share that thread.
    pub(crate) fn choose(&self, active_per_thread: &[usize]) -> usize {
        let connections = |thread: usize| self.0[thread].connections.load(Ordering::Relaxed);
        let least = (0..self.0.len()).min_by_key(|&thread| (active_per_thread[thread], connections(thread)));
        least.expect("there is at least one thread")
    }

    /// Serves a connection on a thread.
    ///
    /// # Errors
    /// When the connection cannot be moved to the thread.
    pub(crate) fn spawn<F>(
        &self,
        thread: usize,
        stream: TcpStream,
        serve: impl FnOnce(TcpStream) -> F + Send + 'static,
        connections: &mut JoinSet<()>,
    ) -> io::Result<AbortHandle>
    where
        F: Future<Output = ()> + Send + 'static,
    {
        // A stream belongs to the runtime in which it was created.
        let stream = stream.into_std()?;
        let counted = CountedConnection::new(self, thread);
        let task = async move {
            let _counted = counted;
            // A connection that cannot be registered with the new runtime is broken.
            if let Ok(stream) = TcpStream::from_std(stream) {
                serve(stream).await;
            }
        };
        Ok(connections.spawn_on(task, &self.0[thread].runtime))
    }
}

impl Worker {
    fn start(number: usize) -> io::Result<Self> {
        let runtime =
            Builder::new_current_thread().enable_all().event_interval(POLLS_PER_IO_CHECK).build()?;
        let (ends_thread_on_drop, end) = oneshot::channel();
        let worker = Self {
            runtime: runtime.handle().clone(),
            connections: AtomicUsize::new(0),
            _ends_thread_on_drop: ends_thread_on_drop,
        };
        thread::Builder::new().name(format!("sluicegate-{number}")).spawn(move || runtime.block_on(end))?;
        Ok(worker)
    }
}

/// Counts one connection of a thread until this is dropped, and keeps the threads running.
struct CountedConnection {
    runtime: NoStealRuntime,
    thread: usize,
}

impl CountedConnection {
    fn new(runtime: &NoStealRuntime, thread: usize) -> Self {
        let runtime = runtime.clone();
        runtime.0[thread].connections.fetch_add(1, Ordering::Relaxed);
        Self { runtime, thread }
    }
}

impl Drop for CountedConnection {
    fn drop(&mut self) {
        self.runtime.0[self.thread].connections.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::mpsc, time::Duration};

    use tokio::{io::AsyncReadExt, net::TcpListener, time::timeout};

    use super::*;

    /// A listener, and the threads that serve its connections.
    struct TestServer {
        listener: TcpListener,
        runtime: NoStealRuntime,
        connections: JoinSet<()>,
        active_per_thread: Vec<usize>,
    }

    impl TestServer {
        async fn start() -> Self {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let runtime = NoStealRuntime::start().unwrap();
            let active_per_thread = vec![0; runtime.threads()];
            Self { listener, runtime, connections: JoinSet::new(), active_per_thread }
        }

        /// Connects a client. Returns it and the name of the thread that serves it.
        async fn connect(&mut self) -> (TcpStream, String) {
            let client = TcpStream::connect(self.listener.local_addr().unwrap()).await.unwrap();
            let (stream, _) = self.listener.accept().await.unwrap();
            let (send_name, thread_name) = oneshot::channel();
            let serve = |mut stream: TcpStream| async move {
                send_name.send(thread::current().name().unwrap().to_owned()).unwrap();
                assert_eq!(stream.read(&mut [0]).await.unwrap(), 0);
            };
            let thread = self.runtime.choose(&self.active_per_thread);
            self.runtime.spawn(thread, stream, serve, &mut self.connections).unwrap();
            (client, thread_name.await.unwrap())
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_connection_goes_to_the_thread_with_the_fewest_connections() {
        let mut server = TestServer::start().await;
        let mut clients = Vec::new();
        for expected in ["sluicegate-0", "sluicegate-1", "sluicegate-0", "sluicegate-1"] {
            let (client, thread) = server.connect().await;
            assert_eq!(thread, expected);
            clients.push(client);
        }
        drop((clients.remove(1), clients.remove(2)));
        server.connections.join_next().await.unwrap().unwrap();
        server.connections.join_next().await.unwrap().unwrap();
        for _ in 0..2 {
            let (client, thread) = server.connect().await;
            assert_eq!(thread, "sluicegate-1");
            clients.push(client);
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn active_connections_count_before_idle_ones() {
        let mut server = TestServer::start().await;
        let mut clients = Vec::new();
        for (active, expected) in
            [([0, 5], "sluicegate-0"), ([1, 5], "sluicegate-0"), ([6, 5], "sluicegate-1")]
        {
            server.active_per_thread = active.into();
            let (client, thread) = server.connect().await;
            assert_eq!(thread, expected);
            clients.push(client);
        }
    }

    #[tokio::test]
    async fn threads_run_until_the_last_connection_closes() {
        let mut server = TestServer::start().await;
        let (held, ended) = mpsc::channel::<()>();
        server.runtime.0[0].runtime.spawn(async move {
            let _held = held;
            std::future::pending::<()>().await;
        });
        let client = server.connect().await;
        let TestServer { mut connections, runtime, .. } = server;
        drop(runtime);
        assert_eq!(ended.try_recv(), Err(mpsc::TryRecvError::Empty), "a client is still connected");
        drop(client);
        timeout(Duration::from_secs(5), connections.join_next()).await.unwrap().unwrap().unwrap();
        assert_eq!(ended.recv_timeout(Duration::from_secs(5)), Err(mpsc::RecvTimeoutError::Disconnected));
    }
}
