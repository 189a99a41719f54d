//! [`SqliteStore`] and its side of the contract.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use async_trait::async_trait;
use onlyonce_core::{
    Capabilities, ClaimOutcome, ClaimRequest, CompleteOutcome, Completion, LeaseToken, Operation,
    PurgeRequest, Purged, ReleaseOutcome, RenewOutcome, Store, StoreError, StoreErrorKind,
};
use parking_lot::Mutex;
use rusqlite::Connection;
use tokio::sync::oneshot;

use crate::boot::Now;
use crate::error::Fault;
use crate::open::{self, Durability, Opened, Options};
use crate::purge::Purge;
use crate::readers::Readers;
use crate::reading;
use crate::row::HashText;
use crate::transaction::Transactions;
use crate::writer::{self, Answer, Job, Queue, Shared};

/// Records in an SQLite file. Clones are handles on one store; dropping the last one finishes what is queued.
#[derive(Clone, Debug)]
pub struct SqliteStore(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    shared: Arc<Shared>,
    readers: Arc<Readers>,
    transactions: Arc<Transactions>,
    writer: Mutex<Option<JoinHandle<()>>>,
}

/// What the writer of a store has done since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Batches of operations.
    pub batches: u64,
    /// Transactions that changed something, purges and operator's changes among them.
    pub commits: u64,
    /// Operations in the batches.
    pub operations: u64,
}

impl SqliteStore {
    /// Opens the file with the defaults, and creates it when it is missing. See [`Options::open`].
    ///
    /// # Errors
    /// Those of [`Options::open`].
    pub async fn open(path: impl Into<PathBuf>) -> Result<Self, StoreError> {
        Self::options(path).open().await
    }

    /// Opens a file that holds records already.
    ///
    /// # Errors
    /// Those of [`Options::open`]; also when the file is missing or holds no records.
    pub async fn open_existing(path: impl Into<PathBuf>) -> Result<Self, StoreError> {
        Self::options(path).existing().open().await
    }

    /// The options, to be changed before [`Options::open`].
    pub fn options(path: impl Into<PathBuf>) -> Options {
        Options::new(path)
    }

    /// What the writer has done so far.
    pub fn counters(&self) -> Counters {
        let shared = self.shared();
        Counters {
            batches: shared.batches.load(Ordering::Relaxed),
            commits: shared.commits.load(Ordering::Relaxed),
            operations: shared.operations.load(Ordering::Relaxed),
        }
    }

    /// Where the records are.
    pub fn path(&self) -> &Path {
        &self.shared().path
    }

    /// Finishes what is queued and closes the writer. Later operations fail with [`StoreErrorKind::Unavailable`].
    /// Dropping the last handle does the same, and blocks its thread meanwhile.
    pub async fn close(&self) {
        let inner = Arc::clone(&self.0);
        // A writer that panicked has said so in the log.
        let _ = tokio::task::spawn_blocking(move || inner.join()).await;
    }

    pub(crate) fn start(mut options: Options) -> Result<Self, StoreError> {
        // The process may change its folder; the file is named by this path again and again.
        if let Ok(absolute) = std::path::absolute(&options.path) {
            options.path = absolute;
        }
        let path = options.path.clone();
        let opened = match options.reading {
            true => reading::open(&options).map(|(timeline, identity)| (None, timeline, identity, 0)),
            false => open::open(&options)
                .map(|Opened { conn, timeline, identity, others }| (Some(conn), timeline, identity, others)),
        };
        let (conn, timeline, identity, others) = opened.map_err(|fault| fault.into_error("open", &path))?;
        let readers = Arc::new(Readers::new(options.readers_max));
        let shared = Arc::new(Shared {
            path,
            queue: Queue::new(options.queue_max),
            options,
            timeline,
            identity,
            others,
            gate: Mutex::default(),
            batches: AtomicU64::default(),
            commits: AtomicU64::default(),
            operations: AtomicU64::default(),
        });
        let writer = match conn {
            Some(conn) => Some(start_writer(&shared, conn)?),
            None => {
                shared.queue.close();
                None
            }
        };
        let transactions = Arc::default();
        Ok(Self(Arc::new(Inner { shared, readers, transactions, writer: Mutex::new(writer) })))
    }

    /// How many tables of others there were in the file when this opening added ours to it; 0 where ours were there, and in a
    /// new file. A program whose operator did not mean that file should say so.
    pub fn added_beside(&self) -> u64 {
        self.0.shared.others
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.0.shared
    }

    pub(crate) fn transactions(&self) -> &Arc<Transactions> {
        &self.0.transactions
    }

    pub(crate) async fn read<T: Send + 'static>(
        &self,
        operation: &'static str,
        read: impl FnOnce(&Connection, &Now<'_>) -> Result<T, Fault> + Send + 'static,
    ) -> Result<T, StoreError> {
        self.0.readers.read(self.shared(), operation, read).await
    }

    pub(crate) async fn answered<T>(
        &self,
        operation: &'static str,
        answered: oneshot::Receiver<Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        answered.await.unwrap_or_else(|_| {
            Err(StoreError::new(StoreErrorKind::Unavailable, operation)
                .with_detail(format!("{}: the writer ended before it answered", self.path().display()))
                .ambiguous())
        })
    }

    async fn ask<T>(
        &self,
        operation: &'static str,
        job: impl FnOnce(Answer<T>) -> Job,
    ) -> Result<T, StoreError> {
        let (answer, answered) = oneshot::channel();
        self.shared().queue.push(operation, job(answer))?;
        self.answered(operation, answered).await
    }
}

fn start_writer(shared: &Arc<Shared>, conn: Connection) -> Result<JoinHandle<()>, StoreError> {
    let its = Arc::clone(shared);
    let thread = std::thread::Builder::new().name("onlyonce-sqlite".into());
    thread.spawn(move || writer::run(&its, conn)).map_err(|error| {
        StoreError::new(StoreErrorKind::Overloaded, "open")
            .with_detail("no thread can be started for the writer")
            .with_source(error)
    })
}

impl Inner {
    fn join(&self) {
        self.shared.queue.close();
        let writer = self.writer.lock().take();
        // The last handle may be dropped by the writer itself, when it answers: it ends by itself then.
        if let Some(writer) = writer.filter(|writer| writer.thread().id() != std::thread::current().id()) {
            let _ = writer.join();
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.join();
    }
}

#[async_trait]
impl Store for SqliteStore {
    /// Dropped while it is queued, it is not made.
    async fn claim(&self, operation: &Operation, request: &ClaimRequest) -> Result<ClaimOutcome, StoreError> {
        let hash = HashText::of(operation.fingerprint());
        self.ask("claim", |answer| Job::Claim(operation.clone(), hash, request.clone(), answer)).await
    }

    async fn renew(
        &self,
        operation: &Operation,
        token: LeaseToken,
        lease: Duration,
    ) -> Result<RenewOutcome, StoreError> {
        self.ask("renew", |answer| Job::Renew(operation.clone(), token, lease, answer)).await
    }

    async fn complete(
        &self,
        operation: &Operation,
        completion: &Completion,
    ) -> Result<CompleteOutcome, StoreError> {
        let head = completion.reply.encode_head();
        self.ask("complete", |answer| Job::Complete(operation.clone(), head, completion.clone(), answer))
            .await
    }

    async fn release(&self, operation: &Operation, token: LeaseToken) -> Result<ReleaseOutcome, StoreError> {
        self.ask("release", |answer| Job::Release(operation.clone(), token, answer)).await
    }

    async fn mark_unknown(
        &self,
        operation: &Operation,
        token: LeaseToken,
    ) -> Result<ReleaseOutcome, StoreError> {
        self.ask("mark_unknown", |answer| Job::MarkUnknown(operation.clone(), token, answer)).await
    }

    /// Removes a hundred at a time between batches. Paused while the wall clock is over 60 s away from the boot clock.
    async fn purge(&self, request: &PurgeRequest) -> Result<Purged, StoreError> {
        let (answer, answered) = oneshot::channel();
        self.shared().queue.push_chore("purge", Box::new(Purge::new(*request, answer)))?;
        self.answered("purge", answered).await
    }

    fn capabilities(&self) -> Capabilities {
        let durable = self.shared().options.durability == Durability::Full;
        Capabilities {
            name: "sqlite",
            location: self.path().display().to_string(),
            network: false,
            durable,
            hazard: (!durable).then(|| {
                "synchronous=OFF: a power cut loses acknowledged completions, and their operations run again".into()
            }),
        }
    }
}
