//! A store that fails as told, in front of a memory store, and what the tests share.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used, reason = "each test file uses its part")]

use std::collections::HashMap;
use std::future::{Future, pending};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use onlyonce_core::{
    Capabilities, ClaimOutcome, ClaimRequest, CompleteOutcome, Completion, Fingerprint, Key, LeaseToken,
    MemoryStore, Operation, PurgeRequest, Purged, ReleaseOutcome, RenewOutcome, Reply, Scope, Store,
    StoreError, StoreErrorKind,
};
use onlyonce_engine::{Begin, Builder, Execution, Idempotency, Outcome};
use parking_lot::Mutex;

/// How long a test waits for what must come, on a machine that has other things to do.
pub const PATIENCE: Duration = Duration::from_secs(40);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Method {
    Claim,
    Renew,
    Complete,
    Release,
    MarkUnknown,
    Purge,
}

#[derive(Clone, Copy, Debug)]
pub enum Fault {
    /// Not applied, and says so.
    Refuse(StoreErrorKind),
    /// Not applied, but nobody can tell.
    LoseRequest,
    /// Applied, but nobody can tell.
    LoseAnswer,
    /// Not applied, no answer ever.
    Hang,
    /// Applied, no answer ever.
    HangAfter,
    /// Applied after this long.
    Late(Duration),
    /// Applied at once, answered after this long.
    LateAnswer(Duration),
}

/// A handle on a faulty way to a memory store; another one may lead to the same records.
#[derive(Clone, Debug)]
pub struct FaultyStore(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    records: MemoryStore,
    network: bool,
    faults: Mutex<HashMap<Method, (Fault, usize)>>,
    calls: [AtomicU64; 6],
    claim_tokens: Mutex<Vec<LeaseToken>>,
}

impl FaultyStore {
    pub fn new() -> Self {
        Self::onto(&MemoryStore::new())
    }

    /// Another way to the same records.
    pub fn onto(records: &MemoryStore) -> Self {
        Self::build(records, false)
    }

    pub fn over_network(records: &MemoryStore) -> Self {
        Self::build(records, true)
    }

    fn build(records: &MemoryStore, network: bool) -> Self {
        Self(Arc::new(Inner {
            records: records.clone(),
            network,
            faults: Mutex::default(),
            calls: Default::default(),
            claim_tokens: Mutex::default(),
        }))
    }

    pub fn records(&self) -> &MemoryStore {
        &self.0.records
    }

    /// The next `times` calls of this method go wrong.
    pub fn fail(&self, method: Method, times: usize, fault: Fault) {
        self.0.faults.lock().insert(method, (fault, times));
    }

    /// All calls of this method go wrong until it is healed.
    pub fn break_down(&self, method: Method, fault: Fault) {
        self.fail(method, usize::MAX, fault);
    }

    pub fn break_all(&self, fault: Fault) {
        use Method::*;
        for method in [Claim, Renew, Complete, Release, MarkUnknown, Purge] {
            self.break_down(method, fault);
        }
    }

    pub fn heal(&self) {
        self.0.faults.lock().clear();
    }

    pub fn calls(&self, method: Method) -> u64 {
        self.0.calls[method as usize].load(Ordering::SeqCst)
    }

    /// The tokens of all claims, in order.
    pub fn claim_tokens(&self) -> Vec<LeaseToken> {
        self.0.claim_tokens.lock().clone()
    }

    async fn through<T>(
        &self,
        method: Method,
        apply: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        self.0.calls[method as usize].fetch_add(1, Ordering::SeqCst);
        let fault = {
            let mut faults = self.0.faults.lock();
            faults.get_mut(&method).filter(|(_, left)| *left > 0).map(|(fault, left)| {
                *left -= 1;
                *fault
            })
        };
        let lost = |kind| StoreError::new(kind, "faulty").ambiguous();
        match fault {
            None => apply.await,
            Some(Fault::Refuse(kind)) => Err(StoreError::new(kind, "faulty")),
            Some(Fault::LoseRequest) => Err(lost(StoreErrorKind::Unavailable)),
            Some(Fault::LoseAnswer) => {
                apply.await?;
                Err(lost(StoreErrorKind::Unavailable))
            }
            Some(Fault::Hang) => pending().await,
            Some(Fault::HangAfter) => {
                apply.await?;
                pending().await
            }
            Some(Fault::Late(by)) => {
                tokio::time::sleep(by).await;
                apply.await
            }
            Some(Fault::LateAnswer(by)) => {
                let answer = apply.await;
                tokio::time::sleep(by).await;
                answer
            }
        }
    }
}

#[async_trait]
impl Store for FaultyStore {
    async fn claim(&self, operation: &Operation, request: &ClaimRequest) -> Result<ClaimOutcome, StoreError> {
        self.0.claim_tokens.lock().push(request.token);
        self.through(Method::Claim, self.0.records.claim(operation, request)).await
    }

    async fn renew(
        &self,
        operation: &Operation,
        token: LeaseToken,
        lease: Duration,
    ) -> Result<RenewOutcome, StoreError> {
        self.through(Method::Renew, self.0.records.renew(operation, token, lease)).await
    }

    async fn complete(
        &self,
        operation: &Operation,
        completion: &Completion,
    ) -> Result<CompleteOutcome, StoreError> {
        self.through(Method::Complete, self.0.records.complete(operation, completion)).await
    }

    async fn release(&self, operation: &Operation, token: LeaseToken) -> Result<ReleaseOutcome, StoreError> {
        self.through(Method::Release, self.0.records.release(operation, token)).await
    }

    async fn mark_unknown(
        &self,
        operation: &Operation,
        token: LeaseToken,
    ) -> Result<ReleaseOutcome, StoreError> {
        self.through(Method::MarkUnknown, self.0.records.mark_unknown(operation, token)).await
    }

    async fn purge(&self, request: &PurgeRequest) -> Result<Purged, StoreError> {
        self.through(Method::Purge, self.0.records.purge(request)).await
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { network: self.0.network, ..self.0.records.capabilities() }
    }
}

pub fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

pub fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

/// An operation in the anonymous scope.
pub fn operation(key: &str, body: &str) -> Operation {
    Operation::new(Scope::anonymous(), Key::new(key).unwrap(), Fingerprint::of(body))
}

/// An engine with a lease that no test outlives.
pub fn engine(store: &FaultyStore) -> Builder {
    Idempotency::builder(store.clone())
}

/// An engine whose leases end within a test.
pub fn brief(store: &FaultyStore, lease: Duration) -> Builder {
    engine(store).lease(lease).retention(secs(3600))
}

pub async fn acquire(idem: &Idempotency, operation: &Operation) -> Execution {
    match idem.begin(operation).await.unwrap() {
        Begin::Acquired(execution) => execution,
        other => panic!("not acquired: {other:?}"),
    }
}

/// Asks again until the answer passes, and returns it.
pub async fn begin_until(
    idem: &Idempotency,
    operation: &Operation,
    mut passes: impl FnMut(&Begin) -> bool,
) -> Begin {
    let asking = async {
        loop {
            match idem.begin(operation).await {
                Ok(answer) if passes(&answer) => return answer,
                _ => tokio::time::sleep(ms(15)).await,
            }
        }
    };
    tokio::time::timeout(PATIENCE, asking).await.expect("the answer that was waited for never came")
}

/// Two processes on the same records, each with a way of its own.
pub fn two_ways() -> (FaultyStore, FaultyStore) {
    let records = MemoryStore::new();
    (FaultyStore::onto(&records), FaultyStore::onto(&records))
}

/// Asks until the operation may be taken over, and takes it.
pub async fn attempt_after_takeover(idem: &Idempotency, operation: &Operation) -> Execution {
    match begin_until(idem, operation, |begin| matches!(begin, Begin::Acquired(_))).await {
        Begin::Acquired(execution) => execution,
        _ => unreachable!("waited for"),
    }
}

/// Waits for what must come.
pub async fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let waiting = async {
        while !condition() {
            tokio::time::sleep(ms(5)).await;
        }
    };
    if tokio::time::timeout(PATIENCE, waiting).await.is_err() {
        panic!("never: {what}");
    }
}

pub async fn all_given_back(idem: &Idempotency) {
    eventually("all slots given back", || idem.in_flight() == 0).await;
}

/// The body of an answer that is a replay.
pub fn replayed(answer: &Begin) -> &[u8] {
    match answer {
        Begin::Completed(stored) => stored.reply.body(),
        other => panic!("not a replay: {other:?}"),
    }
}

/// The body of an outcome with a recorded reply.
pub fn recorded(outcome: &Outcome) -> &[u8] {
    match outcome {
        Outcome::Ran(reply) => reply.body(),
        Outcome::Replayed(stored) => stored.reply.body(),
        other => panic!("no recorded reply: {other:?}"),
    }
}

pub fn is_in_progress(answer: &Begin) -> bool {
    matches!(answer, Begin::InProgress { .. })
}

pub fn body(text: impl Into<String>) -> Reply {
    Reply::ok(text.into())
}
