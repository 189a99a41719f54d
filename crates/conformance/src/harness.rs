use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, SystemTime};

use onlyonce_core::{
    ClaimOutcome, ClaimRequest, CompleteOutcome, Completion, Fingerprint, Key, Lease, LeaseToken, OnLeaseEnd,
    Operation, PurgeRequest, Purged, ReleaseOutcome, RenewOutcome, Reply, Scope, Store, StoreAdmin,
    StoreError, StoredReply,
};

use crate::{Expiry, Subject, Time};

const CASE_TIME_MAX: Duration = Duration::from_secs(300);

/// Runs one case on one fresh subject, in a runtime of its own. Panics when the case fails or hangs.
pub fn run<S: Subject>(factory: impl AsyncFnOnce() -> S, case: impl AsyncFnOnce(&Harness)) {
    runtime().block_on(async {
        let case = Box::pin(async {
            let harness = Harness::new(factory().await).await;
            case(&harness).await;
        });
        tokio::time::timeout(CASE_TIME_MAX, case).await.expect("the case ends in time");
    });
}

pub(crate) fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(4)
        .enable_all()
        .build()
        .expect("a runtime can be made")
}

/// A subject with a handle on its store, and short words for what cases do with it.
///
/// Its calls panic on a [`StoreError`]: no case provokes one.
pub struct Harness {
    subject: Box<dyn Subject>,
    handles: RwLock<Option<Handles>>,
}

struct Handles {
    store: Arc<dyn Store>,
    admin: Option<Arc<dyn StoreAdmin>>,
}

impl Harness {
    /// Opens a handle on a fresh subject, and one for its operator.
    pub async fn new(subject: impl Subject) -> Self {
        let harness = Self { subject: Box::new(subject), handles: RwLock::new(None) };
        harness.open().await;
        harness
    }

    /// The first handle.
    pub fn store(&self) -> Arc<dyn Store> {
        let handles = self.handles.read().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(&handles.as_ref().expect("only a restart closes them").store)
    }

    /// Further handles on the same records.
    pub async fn handles(&self, count: usize) -> Vec<Arc<dyn Store>> {
        let mut handles = Vec::with_capacity(count);
        for _ in 0..count {
            handles.push(self.subject.open().await);
        }
        handles
    }

    /// The operator's side.
    ///
    /// # Panics
    /// When the store has none: the admin cases are for those that have.
    pub fn admin(&self) -> Arc<dyn StoreAdmin> {
        self.admin_if_any().expect("admin cases are for stores with an operator's side")
    }

    /// The operator's side, where there is one.
    pub fn admin_if_any(&self) -> Option<Arc<dyn StoreAdmin>> {
        let handles = self.handles.read().unwrap_or_else(PoisonError::into_inner);
        handles.as_ref().expect("only a restart closes them").admin.clone()
    }

    /// Closes the handles, restarts the subject, opens new ones. The caller has dropped its own.
    pub async fn restart(&self) {
        drop(self.handles.write().unwrap_or_else(PoisonError::into_inner).take());
        self.subject.restart().await;
        self.open().await;
    }

    async fn open(&self) {
        let handles = Handles { store: self.subject.open().await, admin: self.subject.open_admin().await };
        *self.handles.write().unwrap_or_else(PoisonError::into_inner) = Some(handles);
    }

    /// Whether records outlive a restart.
    pub fn survives_restart(&self) -> bool {
        self.subject.survives_restart()
    }

    /// How time passes.
    pub fn time(&self) -> Time {
        self.subject.time()
    }

    /// How records that are over go away.
    pub fn expiry(&self) -> Expiry {
        self.subject.expiry()
    }

    /// Lets the store's clock run on.
    pub async fn advance(&self, by: Duration) {
        self.subject.advance(by).await;
    }

    /// The step of time: cases wait and lease for small multiples of it.
    pub fn unit(&self) -> Duration {
        match self.time() {
            Time::Told => Duration::from_secs(10),
            Time::Real { unit } => unit,
        }
    }

    /// The lease of [`Harness::request`]: three units.
    pub fn lease(&self) -> Duration {
        self.unit() * 3
    }

    /// The retention of [`Harness::complete`]: six units.
    pub fn retention(&self) -> Duration {
        self.unit() * 6
    }

    /// Whether a duration that the store measured is the expected one: exactly (to the millisecond, in which stores
    /// count) where time is told, less a unit where it runs by itself.
    pub fn is_about(&self, measured: Duration, expected: Duration) -> bool {
        let slack = match self.time() {
            Time::Told => Duration::from_millis(1),
            Time::Real { unit } => unit,
        };
        measured <= expected + Duration::from_millis(1) && measured + slack >= expected
    }

    /// Whether two readings of the store's wall clock tell the same moment, as far as the subject's time can be told.
    pub fn is_same_moment(&self, a: SystemTime, b: SystemTime) -> bool {
        let apart = a.duration_since(b).unwrap_or_else(|error| error.duration());
        let slack = match self.time() {
            Time::Told => Duration::from_millis(2),
            Time::Real { unit } => unit,
        };
        apart <= slack
    }

    /// What the store's wall clock shows: read from a throw-away completion.
    pub async fn wall(&self) -> SystemTime {
        let name = format!("wall clock {:?}", fresh_token().as_bytes());
        let operation = self.operation(&name);
        let token = fresh_token();
        self.acquire(&operation, token).await;
        match self.complete(&operation, token, Reply::ok("")).await {
            CompleteOutcome::Stored(stored) => stored.completed_at,
            other => panic!("a fresh operation completes, not {other:?}"),
        }
    }

    /// An operation with this key, and the fingerprint of one request.
    pub fn operation(&self, key: &str) -> Operation {
        operation("scope", key)
    }

    /// A claim by `token` with the usual lease, that may take over and be taken over.
    pub fn request(&self, token: LeaseToken) -> ClaimRequest {
        ClaimRequest {
            token,
            lease: self.lease(),
            retention: self.retention(),
            on_lease_end: OnLeaseEnd::TakeOver,
            takeover_now: true,
            max_attempts: 5,
        }
    }

    /// The same under [`OnLeaseEnd::Hold`].
    pub fn hold(&self, token: LeaseToken) -> ClaimRequest {
        ClaimRequest { on_lease_end: OnLeaseEnd::Hold, ..self.request(token) }
    }

    /// Claims by [`Harness::request`].
    pub async fn claim(&self, operation: &Operation, token: LeaseToken) -> ClaimOutcome {
        self.claim_as(operation, &self.request(token)).await
    }

    /// Claims by this request.
    pub async fn claim_as(&self, operation: &Operation, request: &ClaimRequest) -> ClaimOutcome {
        answered(self.store().claim(operation, request).await)
    }

    /// Claims by [`Harness::request`] and expects to get it.
    pub async fn acquire(&self, operation: &Operation, token: LeaseToken) -> Lease {
        self.acquire_as(operation, &self.request(token)).await
    }

    /// Claims by this request and expects to get it.
    pub async fn acquire_as(&self, operation: &Operation, request: &ClaimRequest) -> Lease {
        match self.claim_as(operation, request).await {
            ClaimOutcome::Acquired(lease) => {
                assert_eq!((lease.token, lease.duration), (request.token, request.lease));
                lease
            }
            other => panic!("expected Acquired, got {other:?}"),
        }
    }

    /// Claims with a token of nobody and expects the stored reply.
    pub async fn replay(&self, operation: &Operation) -> StoredReply {
        match self.claim(operation, fresh_token()).await {
            ClaimOutcome::Completed(stored) => stored,
            other => panic!("expected Completed, got {other:?}"),
        }
    }

    /// Claims with a token of nobody and expects that somebody is at work; answers what is left of the lease.
    pub async fn lease_left(&self, operation: &Operation) -> Duration {
        match self.claim(operation, fresh_token()).await {
            ClaimOutcome::InProgress { lease_left, .. } => lease_left,
            other => panic!("expected InProgress, got {other:?}"),
        }
    }

    /// Claims with a token of nobody and expects an unknown outcome; answers since when.
    pub async fn unknown_since(&self, operation: &Operation) -> SystemTime {
        match self.claim(operation, fresh_token()).await {
            ClaimOutcome::Unknown { since, .. } => since,
            other => panic!("expected Unknown, got {other:?}"),
        }
    }

    /// Renews with the usual lease.
    pub async fn renew(&self, operation: &Operation, token: LeaseToken) -> RenewOutcome {
        answered(self.store().renew(operation, token, self.lease()).await)
    }

    /// What [`Harness::complete`] stores.
    pub fn completion(&self, token: LeaseToken, reply: Reply) -> Completion {
        Completion { token, attempt: 1, reply, retention: self.retention() }
    }

    /// Completes with the usual retention.
    pub async fn complete(&self, operation: &Operation, token: LeaseToken, reply: Reply) -> CompleteOutcome {
        answered(self.store().complete(operation, &self.completion(token, reply)).await)
    }

    /// Completes and expects that the reply was stored on the living record.
    pub async fn finish(&self, operation: &Operation, token: LeaseToken, reply: Reply) -> StoredReply {
        match self.complete(operation, token, reply.clone()).await {
            CompleteOutcome::Stored(stored) => {
                assert_eq!(stored.reply, reply);
                stored
            }
            other => panic!("expected Stored, got {other:?}"),
        }
    }

    /// Releases.
    pub async fn release(&self, operation: &Operation, token: LeaseToken) -> ReleaseOutcome {
        answered(self.store().release(operation, token).await)
    }

    /// Marks the outcome unknown.
    pub async fn mark_unknown(&self, operation: &Operation, token: LeaseToken) -> ReleaseOutcome {
        answered(self.store().mark_unknown(operation, token).await)
    }

    /// Purges one batch.
    pub async fn purge(&self, limit: u32, hold_retention: Duration) -> Purged {
        answered(self.store().purge(&PurgeRequest { limit, hold_retention }).await)
    }

    /// Expects every call of this owner to be refused, whatever its reply, and `stored` to be shown to it.
    pub async fn assert_fenced(&self, operation: &Operation, token: LeaseToken, stored: Option<&Reply>) {
        assert_eq!(self.renew(operation, token).await, RenewOutcome::Fenced);
        assert_eq!(self.release(operation, token).await, ReleaseOutcome::Fenced);
        assert_eq!(self.mark_unknown(operation, token).await, ReleaseOutcome::Fenced);
        match self.complete(operation, token, Reply::ok("written by a stale owner")).await {
            CompleteOutcome::Fenced(shown) => assert_eq!(shown.as_ref().map(|s| &s.reply), stored),
            other => panic!("expected Fenced, got {other:?}"),
        }
    }
}

/// An operation with this scope and key, and the fingerprint of one request.
pub(crate) fn operation(scope: &str, key: &str) -> Operation {
    let scope = Scope::new(scope).expect("a valid scope");
    Operation::new(scope, Key::new(key).expect("a valid key"), Fingerprint::of("the request"))
}

/// A token that nobody has.
pub(crate) fn fresh_token() -> LeaseToken {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).expect("the system has random bytes");
    LeaseToken::from_bytes(bytes)
}

/// Unwraps an answer of the store.
#[track_caller]
pub(crate) fn answered<T>(answer: Result<T, StoreError>) -> T {
    match answer {
        Ok(answer) => answer,
        Err(error) => panic!("the store failed: {error} ({:?})", std::error::Error::source(&error)),
    }
}
