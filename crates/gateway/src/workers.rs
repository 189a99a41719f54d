//! The threads that serve connections, each with a runtime of its own.
//!
//! A client's connection, the upstream's that it uses and the timers of both stay on one thread: who sees that a socket is
//! ready is who goes on with it, and nobody is woken to take it over. What has many requests at once, as an HTTP/2 connection
//! has, is better off on the runtime at home, whose threads share them.

use std::cell::Cell;
use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::runtime::{Builder, Handle};
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::warn;

/// How long a thread may take to end when nothing that is tracked runs on it.
const END_TIME_MAX: Duration = Duration::from_secs(1);

thread_local! {
    static NUMBER: Cell<usize> = const { Cell::new(0) };
}

/// The number of the worker that calls, from 1; 0 for any other thread.
pub(crate) fn number() -> usize {
    NUMBER.get()
}

/// The workers of one listener.
///
/// Dropped, they go on until the last task of theirs is over.
#[derive(Debug)]
pub(crate) struct Workers {
    workers: Vec<Worker>,
    turn: usize,
    home: Handle,
    tasks: TaskTracker,
    ending: CancellationToken,
    // Over when each thread has let go of its end.
    ended: mpsc::Receiver<Infallible>,
}

#[derive(Debug)]
struct Worker {
    runtime: Handle,
    connections: Arc<AtomicUsize>,
}

/// One connection of a worker's, until it is dropped.
struct Load(Arc<AtomicUsize>);

impl Drop for Load {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Workers {
    /// So many threads, or as many as the system gives; without any, all is done at home, the runtime of the caller.
    pub(crate) async fn start(count: usize) -> Self {
        let (tasks, ending) = (TaskTracker::new(), CancellationToken::new());
        let (alive, ended) = mpsc::channel(1);
        let mut workers = Vec::new();
        for number in 1..=count {
            match Worker::start(number, tasks.clone(), ending.clone(), alive.clone()).await {
                Ok(worker) => workers.push(worker),
                Err(error) => {
                    warn!(%error, "only {} of {count} threads could be started", workers.len());
                    break;
                }
            }
        }
        Self { workers, turn: 0, home: Handle::current(), tasks, ending, ended }
    }

    /// What runs on them and was begun with [`Workers::spawn`] or through this.
    pub(crate) fn tasks(&self) -> &TaskTracker {
        &self.tasks
    }

    /// The runtime of who started them.
    pub(crate) fn home(&self) -> &Handle {
        &self.home
    }

    /// Serves a connection where there are the fewest.
    pub(crate) fn spawn(&mut self, connection: impl Future<Output = ()> + Send + 'static) {
        let Some(worker) = self.next().map(|number| &self.workers[number]) else {
            self.tasks.spawn_on(connection, &self.home);
            return;
        };
        worker.connections.fetch_add(1, Ordering::Relaxed);
        let load = Load(worker.connections.clone());
        let task = async move {
            let _load = load;
            connection.await;
        };
        self.tasks.spawn_on(task, &worker.runtime);
    }

    // Of those with the fewest connections the next in turn.
    fn next(&mut self) -> Option<usize> {
        let count = self.workers.len();
        self.turn = (self.turn + 1) % count.max(1);
        let order = (0..count).map(|number| (self.turn + number) % count);
        order.min_by_key(|number| self.workers[*number].connections.load(Ordering::Relaxed))
    }

    /// Ends the threads once what is tracked is over. What else runs on them is cut.
    pub(crate) async fn end(mut self) {
        self.ending.cancel();
        self.tasks.close();
        while self.ended.recv().await.is_some() {}
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.ending.cancel();
        self.tasks.close();
    }
}

impl Worker {
    async fn start(
        number: usize,
        tasks: TaskTracker,
        ending: CancellationToken,
        alive: mpsc::Sender<Infallible>,
    ) -> io::Result<Self> {
        let (up, is_up) = oneshot::channel();
        std::thread::Builder::new().name(format!("onlyonce-worker-{number}")).spawn(move || {
            NUMBER.set(number);
            let runtime = match Builder::new_current_thread().enable_all().build() {
                Ok(runtime) => runtime,
                Err(error) => {
                    let _ = up.send(Err(error));
                    return;
                }
            };
            if up.send(Ok(runtime.handle().clone())).is_err() {
                return;
            }
            runtime.block_on(async {
                ending.cancelled().await;
                tasks.wait().await;
            });
            // A name that is still looked up is not waited for.
            runtime.shutdown_timeout(END_TIME_MAX);
            drop(alive);
        })?;
        let runtime = is_up.await.map_err(|_| io::Error::other("a thread ended at its start"))??;
        Ok(Self { runtime, connections: Arc::default() })
    }
}
