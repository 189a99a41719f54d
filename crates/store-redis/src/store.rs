//! [`RedisStore`] and its side of the contract.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use async_trait::async_trait;
use onlyonce_core::{
    Capabilities, ClaimOutcome, ClaimRequest, CompleteOutcome, Completion, CrashPoint, Fingerprint, Key,
    LeaseToken, OnLeaseEnd, Operation, PurgeRequest, Purged, ReleaseOutcome, RenewOutcome, Reply, Scope,
    Store, StoreError, StoreErrorKind, crash_point,
};
use parking_lot::Mutex;

use crate::claims::Calls;
use crate::error::Fault;
use crate::fitness::Durability;
use crate::names::Names;
use crate::open::{Kind, Options, Purpose};
use crate::routes::Routes;

/// How long a record of the self-test lives at most.
const SELF_TEST_KEPT: Duration = Duration::from_secs(50);

/// Records in Redis. Clones are handles on one store and share its connections.
#[derive(Clone, Debug)]
pub struct RedisStore {
    pub(crate) inner: Arc<Inner>,
    pub(crate) names: Names,
}

#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) routes: Routes,
    capabilities: Capabilities,
    pub(crate) location: String,
    // The shortest lease that was asked for: contact must be looked after more often than that.
    shortest_lease_ms: AtomicU64,
    /// The last warning of records that cannot be read.
    pub(crate) warned: Mutex<String>,
}

impl RedisStore {
    /// Opens the store at this URL; its forms are those of [`Options::from_url`]. Needs a tokio runtime, in which it stays.
    ///
    /// # Errors
    /// Those of [`Options::from_url`] and [`Options::open`].
    pub async fn open(url: &str) -> Result<Self, StoreError> {
        Options::from_url(url)?.open().await
    }

    /// The same store with every record in the slot of this hash tag: `idem{tag}:<key>`.
    ///
    /// On a cluster an effect and its record are one script only where their keys are in one slot. Name the hash tag of
    /// the business key here (`acct-7` for `{acct-7}:balance`) and ask that handle. An operation must always be named by
    /// the same tag: with another one, or none, it is another record.
    ///
    /// # Errors
    /// [`StoreErrorKind::Unfit`] on a tag that is empty, over 255 bytes, or holds a brace or a control character.
    pub fn with_hash_tag(&self, tag: &str) -> Result<Self, StoreError> {
        Ok(Self { inner: Arc::clone(&self.inner), names: self.names.with_tag(tag)? })
    }

    pub(crate) async fn start(options: Options) -> Result<Self, StoreError> {
        let (names, location) = (options.names()?, options.location());
        let options = Arc::new(options);
        let routes = Routes::new(&options);
        let opened = async {
            let fitness = routes.fitness().await?;
            if options.purpose == Purpose::Work {
                // Whatever fails on the way, what is left of it is gone soon.
                let hold_retention = Some(SELF_TEST_KEPT);
                try_out(Calls { routes: &routes, names: &names, hold_retention }).await?;
            }
            Ok(fitness)
        };
        let fitness = opened.await.map_err(|fault: Fault| fault.into_error("open", &location))?;
        let capabilities = capabilities(&options, location.clone(), &fitness);
        let shortest_lease_ms = AtomicU64::new(u64::MAX);
        let warned = Mutex::default();
        let inner = Arc::new(Inner { routes, capabilities, location, shortest_lease_ms, warned });
        tokio::spawn(look_after(Arc::downgrade(&inner)));
        Ok(Self { inner, names })
    }

    pub(crate) fn calls(&self) -> Calls<'_> {
        let routes = &self.inner.routes;
        Calls { routes, names: &self.names, hold_retention: routes.options.hold_retention }
    }

    pub(crate) fn told<T>(&self, operation: &'static str, result: Result<T, Fault>) -> Result<T, StoreError> {
        result.map_err(|fault| fault.into_error(operation, &self.inner.location))
    }
}

#[async_trait]
impl Store for RedisStore {
    async fn claim(&self, operation: &Operation, request: &ClaimRequest) -> Result<ClaimOutcome, StoreError> {
        let lease_ms = u64::try_from(request.lease.as_millis()).unwrap_or(u64::MAX);
        if lease_ms < self.inner.shortest_lease_ms.load(Ordering::Relaxed) {
            self.inner.shortest_lease_ms.fetch_min(lease_ms, Ordering::Relaxed);
        }
        crash_point(CrashPoint::ClaimBefore);
        let done = self.calls().claim(operation, request).await;
        crash_point(CrashPoint::ClaimAfter);
        if matches!(&done, Ok(ClaimOutcome::Acquired(lease)) if lease.attempt > 1) {
            crash_point(CrashPoint::TakeOverAfter);
        }
        self.told("claim", done)
    }

    async fn renew(
        &self,
        operation: &Operation,
        token: LeaseToken,
        lease: Duration,
    ) -> Result<RenewOutcome, StoreError> {
        crash_point(CrashPoint::RenewBefore);
        let done = self.calls().renew(operation, token, lease).await;
        crash_point(CrashPoint::RenewAfter);
        self.told("renew", done)
    }

    async fn complete(
        &self,
        operation: &Operation,
        completion: &Completion,
    ) -> Result<CompleteOutcome, StoreError> {
        crash_point(CrashPoint::CompleteBefore);
        let done = self.calls().complete(operation, completion).await;
        crash_point(CrashPoint::CompleteAfter);
        self.told("complete", done)
    }

    async fn release(&self, operation: &Operation, token: LeaseToken) -> Result<ReleaseOutcome, StoreError> {
        crash_point(CrashPoint::ReleaseBefore);
        let done = self.calls().release(operation, token).await;
        crash_point(CrashPoint::ReleaseAfter);
        self.told("release", done)
    }

    async fn mark_unknown(
        &self,
        operation: &Operation,
        token: LeaseToken,
    ) -> Result<ReleaseOutcome, StoreError> {
        crash_point(CrashPoint::UnknownBefore);
        let done = self.calls().mark_unknown(operation, token).await;
        crash_point(CrashPoint::UnknownAfter);
        self.told("mark_unknown", done)
    }

    /// Removes nothing: Redis does, by the time to live. Looks instead whether the servers are still fit to keep records.
    async fn purge(&self, _request: &PurgeRequest) -> Result<Purged, StoreError> {
        self.told("purge", self.inner.routes.check_again().await)?;
        Ok(Purged::default())
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities.clone()
    }
}

/// Asks idle servers whether they are there, so that a break of the contact is seen, and seen to be over.
async fn look_after(store: Weak<Inner>) {
    loop {
        let Some(inner) = store.upgrade() else { return };
        let shortest = inner.shortest_lease_ms.load(Ordering::Relaxed);
        let pause = Duration::from_millis((shortest / 8).clamp(20, 1000));
        inner.routes.look_after(pause).await;
        drop(inner);
        tokio::time::sleep(pause).await;
    }
}

/// Tries out every command that work needs, on a record of its own: a user who lacks one is better refused now than when
/// an effect has happened and cannot be recorded.
async fn try_out(calls: Calls<'_>) -> Result<(), Fault> {
    let mut token = [0; 16];
    getrandom::fill(&mut token)
        .map_err(|error| Fault::new(StoreErrorKind::Internal, format!("no random bytes: {error}")))?;
    let key: String = token.iter().map(|byte| format!("{byte:02x}")).collect();
    let token = LeaseToken::from_bytes(token);
    let key = Key::new(format!("onlyonce self-test {key}")).map_err(|_| Fault::strange("its own key"))?;
    let operation = Operation::new(Scope::anonymous(), key, Fingerprint::of(""));
    let second = Duration::from_secs(1);
    let request = ClaimRequest {
        token,
        lease: second,
        retention: second * 10,
        on_lease_end: OnLeaseEnd::TakeOver,
        takeover_now: false,
        max_attempts: 1,
    };
    for _ in 0..2 {
        // The second time as an owner asks again: the other way through.
        match calls.claim(&operation, &request).await? {
            ClaimOutcome::Acquired(_) => {}
            _ => return Err(Fault::strange("a fresh key is not free")),
        }
    }
    if calls.renew(&operation, token, second).await? != RenewOutcome::Renewed {
        return Err(Fault::strange("a claim cannot be renewed"));
    }
    if calls.mark_unknown(&operation, token).await? != ReleaseOutcome::Applied {
        return Err(Fault::strange("an outcome cannot be marked"));
    }
    if calls.release(&operation, token).await? != ReleaseOutcome::Applied {
        return Err(Fault::strange("a claim cannot be released"));
    }
    let completion = Completion { token, attempt: 1, reply: Reply::ok("self-test"), retention: second };
    if calls.complete_own(&operation, &completion).await?.is_some() {
        return Err(Fault::strange("a released claim is still there"));
    }
    // Kept for no time: nothing is left of the test.
    let completion = Completion { retention: Duration::ZERO, ..completion };
    match calls.complete(&operation, &completion).await? {
        CompleteOutcome::StoredAnew(_) => Ok(()),
        _ => Err(Fault::strange("a released key is not free")),
    }
}

fn capabilities(options: &Options, location: String, fitness: &[(Durability, bool)]) -> Capabilities {
    let worst = fitness.iter().map(|(durability, _)| *durability).max().unwrap_or(Durability::Unknown);
    let may_evict = fitness.iter().any(|(_, may_evict)| *may_evict);
    let single = options.kind == Kind::Single;
    let mut hazards = Vec::new();
    match worst {
        Durability::Always => {}
        Durability::Later => hazards.push(
            "Redis syncs its file later (appendfsync is not always): a crash loses the last replies, and their \
             operations run again",
        ),
        Durability::Unknown => hazards.push(
            "Redis does not say whether it syncs each write (its user may not ask it: INFO and CONFIG GET): a crash may lose the last \
             replies, and their operations run again",
        ),
        Durability::Nothing => hazards.push(
            "Redis keeps no append-only file: a crash loses every record since its last snapshot, and their \
             operations run again",
        ),
    }
    if !single && options.min_replicas == 0 {
        hazards.push(
            "a failover loses what the replica did not have yet, and those operations run again: set min_replicas",
        );
    }
    if may_evict {
        hazards.push("Redis may throw records away when its memory is full, and their operations run again");
    }
    let durable = worst == Durability::Always && !may_evict && (single || options.min_replicas > 0);
    Capabilities {
        name: "redis",
        location,
        network: true,
        durable,
        hazard: (!hazards.is_empty()).then(|| hazards.join("; ")),
    }
}
