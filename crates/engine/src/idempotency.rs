//! The handle that programs hold.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use onlyonce_core::{Clock, MemoryStore, Operation, Reply, Store};
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::timeout;

use crate::builder::Builder;
use crate::cache::ReplayCache;
use crate::counters::{Counters, Counts};
use crate::execution::{Completed, Context, Execution};
use crate::flight::Flights;
use crate::outcome::{Begin, Cause, EngineError, Failure, Outcome};
use crate::policy::{InvalidPolicy, Limits, Policy};
use crate::random::Draws;
use crate::slots::{Slot, Slots};
use crate::store_calls::Contact;

/// The engine: one store, one policy. Cheap to clone; clones, and handles with another policy, share the in-flight
/// table, the replay cache and the limits.
#[derive(Clone)]
pub struct Idempotency {
    pub(crate) shared: Arc<Shared>,
    pub(crate) policy: Arc<Policy>,
}

#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) network: bool,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) random: Draws,
    pub(crate) limits: Limits,
    pub(crate) flights: Arc<Flights>,
    pub(crate) cache: ReplayCache,
    pub(crate) counters: Counters,
    pub(crate) slots: Arc<Slots>,
    pub(crate) waiting: AtomicUsize,
    pub(crate) background_releases: Arc<Slots>,
    // Those of them that no store has answered yet.
    pub(crate) unanswered_releases: Arc<Slots>,
    pub(crate) late_completions: Arc<Slots>,
    pub(crate) contact: Mutex<Contact>,
    pub(crate) shortest_lease_ms: AtomicU64,
    // When a purge last left nothing behind, by the boot clock; the start at first.
    pub(crate) purged_through_ms: AtomicU64,
    pub(crate) heartbeat_wake: Arc<Notify>,
    pub(crate) closing: AtomicBool,
}

impl Idempotency {
    /// Starts building an engine on this store.
    pub fn builder(store: impl Store) -> Builder {
        Builder::new(Arc::new(store))
    }

    /// Starts building an engine on a shared store.
    pub fn builder_for(store: Arc<dyn Store>) -> Builder {
        Builder::new(store)
    }

    /// An engine in memory with all defaults: for tests and demos.
    pub fn in_memory() -> Self {
        Self::builder(MemoryStore::new()).build()
    }

    /// The policy of this handle.
    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// The limits, shared by all handles of this engine.
    pub fn limits(&self) -> &Limits {
        &self.shared.limits
    }

    /// The store.
    pub fn store(&self) -> &Arc<dyn Store> {
        &self.shared.store
    }

    /// The clock.
    pub fn clock(&self) -> &Arc<dyn Clock> {
        &self.shared.clock
    }

    /// A handle with another policy on the same engine: for a route that needs longer, or must be held.
    ///
    /// # Errors
    /// [`InvalidPolicy`].
    pub fn with_policy(&self, policy: Policy) -> Result<Self, InvalidPolicy> {
        policy.check()?;
        let lease_ms = policy.lease.as_millis() as u64;
        if self.shared.shortest_lease_ms.fetch_min(lease_ms, Ordering::Relaxed) > lease_ms {
            self.shared.heartbeat_wake.notify_one();
        }
        Ok(Self { shared: self.shared.clone(), policy: Arc::new(policy) })
    }

    /// What happened so far.
    pub fn counts(&self) -> Counts {
        self.shared.counters.read()
    }

    /// Operations claimed or running in this process.
    pub fn in_flight(&self) -> usize {
        self.shared.slots.taken()
    }

    /// How many replies are in memory for replays, and how many bytes they take.
    pub fn cached(&self) -> (usize, u64) {
        self.shared.cache.size()
    }

    /// For how long the purge of expired records has not been through: a minute or so when all is well, more when the store
    /// fails or cannot keep up. Zero where this engine does not purge.
    pub fn purge_lag(&self) -> Duration {
        if self.shared.limits.purge_interval.is_zero() {
            return Duration::ZERO;
        }
        let through = Duration::from_millis(self.shared.purged_through_ms.load(Ordering::Relaxed));
        self.shared.clock.boot().saturating_sub(through)
    }

    /// Duplicates that wait in this process.
    pub fn waiting(&self) -> usize {
        self.shared.waiting.load(Ordering::Relaxed)
    }

    /// Forgets a reply kept in memory, after an operator changed its record.
    pub fn forget_cached(&self, operation: &Operation) {
        self.shared.cache.forget(operation.id());
    }

    /// Runs `work` unless the operation ran before, is running, or may have happened.
    ///
    /// `work` may borrow. When the returned future is dropped so is the work, and the outcome is unknown: for work that
    /// must outlive its caller see [`run_detached`](Self::run_detached). A panic of the work passes through; its outcome
    /// is unknown.
    ///
    /// # Errors
    /// [`EngineError`]: infrastructure only; nothing ran.
    pub async fn run<W>(&self, operation: &Operation, work: W) -> Result<Outcome, EngineError>
    where
        W: AsyncFnOnce(&Context) -> Result<Reply, Failure>,
    {
        let execution = match self.acquire(operation).await? {
            Ok(execution) => execution,
            Err(outcome) => return Ok(outcome),
        };
        let context = execution.context().clone();
        let result = timeout(self.policy.work_timeout, work(&context)).await;
        Ok(self.end(execution, result.unwrap_or_else(|_| Err(Failure::Unknown(self.timed_out())))).await)
    }

    /// Runs `work` as a task of its own: when the caller goes away it runs to its end and its reply is recorded. A
    /// panic of the work is an unknown outcome. Past the work timeout the caller is told that the outcome is unknown and
    /// renewal stops; the work goes on, and its late completion resolves the record if nobody took over.
    ///
    /// # Errors
    /// [`EngineError`]: infrastructure only; nothing ran.
    pub async fn run_detached<W, Fut>(&self, operation: Operation, work: W) -> Result<Outcome, EngineError>
    where
        W: FnOnce(Context) -> Fut + Send + 'static,
        Fut: Future<Output = Result<Reply, Failure>> + Send + 'static,
    {
        let this = self.clone();
        let task = tokio::spawn(async move {
            let execution = match this.acquire(&operation).await? {
                Ok(execution) => execution,
                Err(outcome) => return Ok(outcome),
            };
            // A task within the task, so that a panic is a value here and the execution is ended in order.
            let context = execution.context().clone();
            let work = tokio::spawn(async move { work(context).await });
            let result = work.await.unwrap_or_else(|panicked| Err(Failure::unknown(panicked)));
            Ok(this.end(execution, result).await)
        });
        match timeout(self.policy.wait + self.policy.work_timeout, task).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(stopped)) if stopped.is_panic() => std::panic::resume_unwind(stopped.into_panic()),
            // Its runtime went away under it: nobody knows how far it came.
            Ok(Err(stopped)) => Ok(self.unknown(stopped.into())),
            Err(_) => Ok(self.unknown(self.timed_out())),
        }
    }

    /// Stops beginning operations, then waits for those in flight, and until the store has heard of every claim that
    /// is to be released and of every reply that came late, at most `patience`. Returns how many operations are left: they keep their leases.
    pub async fn shutdown(&self, patience: Duration) -> usize {
        self.shared.closing.store(true, Ordering::SeqCst);
        let quiet = async {
            self.shared.slots.idle().await;
            self.shared.unanswered_releases.idle().await;
            self.shared.late_completions.idle().await;
        };
        let _ = timeout(patience, quiet).await;
        self.in_flight()
    }

    async fn acquire(&self, operation: &Operation) -> Result<Result<Execution, Outcome>, EngineError> {
        Ok(match self.begin(operation).await? {
            Begin::Acquired(execution) => Ok(execution),
            Begin::Completed(stored) => Err(Outcome::Replayed(stored)),
            Begin::InProgress { retry_after, last, .. } => Err(Outcome::InProgress { retry_after, last }),
            Begin::Mismatch { stored, .. } => Err(Outcome::Mismatch { stored }),
            Begin::Unknown { since, .. } => Err(Outcome::Unknown { since, cause: None }),
        })
    }

    async fn end(&self, execution: Execution, result: Result<Reply, Failure>) -> Outcome {
        let reply = match result {
            Ok(reply) | Err(Failure::Definitive(reply)) => reply,
            Err(Failure::Transient(cause)) => {
                execution.release().await;
                return Outcome::Released(cause);
            }
            Err(Failure::Unknown(cause)) => {
                execution.unknown().await;
                return self.unknown(cause);
            }
        };
        match execution.complete(reply.clone()).await {
            Completed::Recorded(_) => Outcome::Ran(reply),
            Completed::Fenced(Some(stored)) => Outcome::Replayed(stored),
            Completed::Fenced(None) => {
                Outcome::InProgress { retry_after: Duration::from_secs(1), last: None }
            }
            Completed::NotRecorded(error) => Outcome::NotRecorded { reply, error },
        }
    }

    fn unknown(&self, cause: Cause) -> Outcome {
        Outcome::Unknown { since: self.shared.clock.wall(), cause: Some(cause) }
    }

    fn timed_out(&self) -> Cause {
        format!("the work took longer than {:?}", self.policy.work_timeout).into()
    }
}

impl Shared {
    /// A place in flight, or why there is none.
    pub(crate) fn take_slot(&self) -> Result<Slot, EngineError> {
        let slot = self.slots.take();
        // Looked at after the slot is taken: either shutdown waits for the slot, or its mark is seen here.
        if self.closing.load(Ordering::SeqCst) {
            return Err(EngineError::ShuttingDown);
        }
        slot.ok_or(EngineError::Overloaded)
    }
}

impl fmt::Debug for Idempotency {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Idempotency")
            .field("store", &self.shared.store)
            .field("policy", &self.policy)
            .finish()
    }
}
