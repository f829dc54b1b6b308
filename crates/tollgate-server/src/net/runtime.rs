//! Threads that serve connections, each its own.
//!
//! Where a decision needs no waiting, threads that take work from each other only wake each other up. Where it waits for a store elsewhere
//! they serve its answers together, and so a runtime that they share does better: see [`run`](crate::run).

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

/// How many files the runtime of a thread has open: what it polls, twice, what wakes it up, and what tells it of signals.
const FILES: u64 = 4;

/// After how many turns a thread looks who else has sent something, also while some of its connections want another turn at once.
const TURNS_PER_LOOK: u32 = 16;

/// Who serves connections: threads, or by default the runtime of whoever takes them in. Cheap to clone; the threads end with the last clone.
#[derive(Clone, Default)]
pub struct Workers(Arc<[Worker]>);

struct Worker {
    runtime: Handle,
    connections: AtomicUsize,
    _ends_when_dropped: oneshot::Sender<()>,
}

impl Workers {
    /// As many threads as the current runtime has.
    ///
    /// # Errors
    /// When the system does not let the process have them.
    pub fn start() -> io::Result<Self> {
        let threads = Handle::current().metrics().num_workers();
        (0..threads).map(Worker::start).collect::<Result<_, _>>().map(Self)
    }

    /// How many files they have open, apart from their connections.
    pub(crate) fn files(&self) -> u64 {
        self.0.iter().map(|_| FILES).sum()
    }

    /// The thread that a new connection is best served by, if there are threads. `lively` says how many of the connections of each, of the
    /// same kind, have come or asked lately: silent ones count only where these are equally many, or whoever keeps some open on all
    /// threads but one would leave that one to everybody else.
    pub(crate) fn choose(&self, lively: impl FnOnce(usize) -> Vec<usize>) -> Option<usize> {
        let lively = if self.0.is_empty() { Vec::new() } else { lively(self.0.len()) };
        let all = |place: &usize| self.0[*place].connections.load(Ordering::Relaxed);
        (0..self.0.len()).min_by_key(|place| (lively[*place], all(place)))
    }

    /// Has a connection served by a thread, or without one by the current runtime.
    ///
    /// # Errors
    /// When the connection cannot be handed over.
    pub(crate) fn spawn<F>(
        &self,
        worker: Option<usize>,
        stream: TcpStream,
        serve: impl FnOnce(TcpStream) -> F + Send + 'static,
        connections: &mut JoinSet<()>,
    ) -> io::Result<AbortHandle>
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let Some(place) = worker else { return Ok(connections.spawn(serve(stream))) };
        // a stream is of the runtime that it was made in
        let stream = stream.into_std()?;
        let at_work = AtWork::begin(self, place);
        let served = async move {
            let _until_served = at_work;
            // A connection that cannot be taken over has broken off.
            if let Ok(stream) = TcpStream::from_std(stream) {
                serve(stream).await;
            }
        };
        Ok(connections.spawn_on(served, &self.0[place].runtime))
    }
}

impl Worker {
    fn start(number: usize) -> io::Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().event_interval(TURNS_PER_LOOK).build()?;
        let (ends_when_dropped, end) = oneshot::channel();
        let worker = Self {
            runtime: runtime.handle().clone(),
            connections: AtomicUsize::new(0),
            _ends_when_dropped: ends_when_dropped,
        };
        thread::Builder::new().name(format!("tollgate-{number}")).spawn(move || runtime.block_on(end))?;
        Ok(worker)
    }
}

/// A connection that is served, until this is dropped.
struct AtWork {
    workers: Workers,
    place: usize,
}

impl AtWork {
    fn begin(workers: &Workers, place: usize) -> Self {
        let workers = workers.clone();
        workers.0[place].connections.fetch_add(1, Ordering::Relaxed);
        Self { workers, place }
    }
}

impl Drop for AtWork {
    fn drop(&mut self) {
        self.workers.0[self.place].connections.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::mpsc, time::Duration};

    use tokio::{io::AsyncReadExt, net::TcpListener, time::timeout};

    use super::*;

    /// A listener, and the threads that the connections to it are served by.
    struct House {
        listener: TcpListener,
        workers: Workers,
        connections: JoinSet<()>,
        /// As the crowd says it.
        lively: Vec<usize>,
    }

    impl House {
        async fn of(workers: Workers) -> Self {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let lively = vec![0; workers.0.len()];
            Self { listener, workers, connections: JoinSet::new(), lively }
        }

        /// A client that stays until it is dropped, and the name of the thread that serves it.
        async fn client(&mut self) -> (TcpStream, String) {
            let client = TcpStream::connect(self.listener.local_addr().unwrap()).await.unwrap();
            let (stream, _) = self.listener.accept().await.unwrap();
            let (tell, served_by) = oneshot::channel();
            let serve = |mut stream: TcpStream| async move {
                tell.send(thread::current().name().unwrap().to_owned()).unwrap();
                assert_eq!(stream.read(&mut [0]).await.unwrap(), 0);
            };
            let worker = self.workers.choose(|_| self.lively.clone());
            self.workers.spawn(worker, stream, serve, &mut self.connections).unwrap();
            (client, served_by.await.unwrap())
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn connections_go_to_the_thread_that_has_the_fewest() {
        let mut house = House::of(Workers::start().unwrap()).await;
        let mut clients = Vec::new();
        for expected in ["tollgate-0", "tollgate-1", "tollgate-0", "tollgate-1"] {
            let (client, thread) = house.client().await;
            assert_eq!(thread, expected);
            clients.push(client);
        }
        drop((clients.remove(1), clients.remove(2)));
        house.connections.join_next().await.unwrap().unwrap();
        house.connections.join_next().await.unwrap().unwrap();
        for _ in 0..2 {
            let (client, thread) = house.client().await;
            assert_eq!(thread, "tollgate-1");
            clients.push(client);
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn who_is_silent_does_not_send_others_to_one_thread() {
        let mut house = House::of(Workers::start().unwrap()).await;
        let mut clients = Vec::new();
        for (lively, expected) in [([0, 5], "tollgate-0"), ([1, 5], "tollgate-0"), ([6, 5], "tollgate-1")] {
            house.lively = lively.into();
            let (client, thread) = house.client().await;
            assert_eq!(thread, expected);
            clients.push(client);
        }
    }

    #[tokio::test]
    async fn without_threads_the_runtime_serves() {
        let mut house = House::of(Workers::default()).await;
        let (_client, thread) = house.client().await;
        assert_eq!(Some(&*thread), thread::current().name());
    }

    #[tokio::test]
    async fn threads_end_with_whoever_needs_them() {
        let workers = Workers::start().unwrap();
        let (held, ended) = mpsc::channel::<()>();
        workers.0[0].runtime.spawn(async move {
            let _held = held;
            std::future::pending::<()>().await;
        });
        let mut house = House::of(workers).await;
        let client = house.client().await;
        let House { mut connections, workers, .. } = house;
        drop(workers);
        assert_eq!(ended.try_recv(), Err(mpsc::TryRecvError::Empty), "a client is still there");
        drop(client);
        timeout(Duration::from_secs(5), connections.join_next()).await.unwrap().unwrap().unwrap();
        assert_eq!(ended.recv_timeout(Duration::from_secs(5)), Err(mpsc::RecvTimeoutError::Disconnected));
    }
}
