//! The suite is worth what it catches: each of these stores breaks the contract in one way, and the case that is there for
//! it fails.
#![allow(clippy::unwrap_used, reason = "test code")]

use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use http::HeaderMap;
use onlyonce_conformance::{Expiry, Harness, Subject, Time, cases, model, run};
use onlyonce_core::*;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    None,
    FoldsCase,
    TrimsKeys,
    TruncatesKeys,
    JoinsScopeAndKey,
    ChecksThenInserts,
    IsNotReentrant,
    IgnoresFingerprints,
    IgnoresCallersPolicy,
    IgnoresMaxAttempts,
    IgnoresBrokenContact,
    LeasesTooLong,
    LetsStaleOwnersComplete,
    LetsStaleOwnersRelease,
    LosesLateCompletions,
    OverwritesReplies,
    ReleasesUnknownOutcomes,
    KeepsRepliesTwiceAsLong,
    KeepsTextOnly,
    KeepsOneHeaderOfAName,
    LosesTrailers,
    LosesOmission,
    LosesOrigins,
    PurgesHeldRecords,
    PurgesWithoutBound,
    CallsItselfDurable,
}

#[derive(Clone, Debug)]
struct Broken {
    inner: MemoryStore,
    fault: Fault,
    seen: Arc<Mutex<HashSet<LeaseToken>>>,
}

impl Broken {
    fn name(&self, operation: &Operation) -> Operation {
        let (scope, key) = (operation.scope().as_str(), operation.key().as_str());
        let (scope, key) = match self.fault {
            Fault::FoldsCase => (scope.to_lowercase(), key.to_lowercase()),
            Fault::TrimsKeys => (scope.into(), key.trim_end().into()),
            Fault::TruncatesKeys => (scope.into(), key.chars().take(254).collect()),
            Fault::JoinsScopeAndKey => (String::new(), format!("{scope}{key}").chars().take(63).collect()),
            _ => (scope.into(), key.into()),
        };
        let key = if key.is_empty() { "?".into() } else { key };
        let fingerprint = match self.fault {
            Fault::IgnoresFingerprints => Fingerprint::of(""),
            _ => *operation.fingerprint(),
        };
        let origin = operation.origin().filter(|_| self.fault != Fault::LosesOrigins).cloned();
        Operation::new(Scope::new(scope).unwrap(), Key::new(key).unwrap(), fingerprint).with_origin(origin)
    }

    fn reply(&self, reply: &Reply) -> Reply {
        let mut headers = HeaderMap::new();
        for (name, value) in reply.headers() {
            if self.fault == Fault::KeepsOneHeaderOfAName {
                headers.insert(name, value.clone());
            } else {
                headers.append(name, value.clone());
            }
        }
        let body = match self.fault {
            Fault::KeepsTextOnly => String::from_utf8_lossy(reply.body()).into_owned().into(),
            _ => Bytes::clone(reply.body()),
        };
        let trailers = match self.fault {
            Fault::LosesTrailers => HeaderMap::new(),
            _ => reply.trailers().clone(),
        };
        let kept = Reply::new(reply.status(), body).with_headers(headers).with_trailers(trailers);
        if reply.is_omitted() && self.fault != Fault::LosesOmission { kept.omitting_body() } else { kept }
    }
}

fn force() -> OperatorAction {
    OperatorAction { actor: "fault".into(), reason: String::new(), target: Target::Any }
}

#[async_trait]
impl Store for Broken {
    async fn claim(&self, operation: &Operation, request: &ClaimRequest) -> Result<ClaimOutcome, StoreError> {
        let operation = self.name(operation);
        let mut request = request.clone();
        match self.fault {
            Fault::IgnoresCallersPolicy => request.on_lease_end = OnLeaseEnd::TakeOver,
            Fault::IgnoresMaxAttempts => request.max_attempts = u32::MAX,
            Fault::IgnoresBrokenContact => request.takeover_now = true,
            Fault::LeasesTooLong => request.lease += Duration::from_millis(2),
            Fault::ChecksThenInserts => {
                let absent = self.inner.show(operation.id()).await?.is_none();
                tokio::time::sleep(Duration::from_millis(5)).await;
                if absent {
                    self.inner.free(operation.id(), &force()).await?;
                }
            }
            Fault::IsNotReentrant if !self.seen.lock().unwrap().insert(request.token) => {
                request.token = LeaseToken::from_bytes([0; 16]);
            }
            _ => {}
        }
        let answer = self.inner.claim(&operation, &request).await?;
        Ok(match answer {
            ClaimOutcome::Acquired(lease) if self.fault == Fault::LeasesTooLong => {
                ClaimOutcome::Acquired(Lease { duration: lease.duration - Duration::from_millis(2), ..lease })
            }
            answer => answer,
        })
    }

    async fn renew(
        &self,
        operation: &Operation,
        token: LeaseToken,
        lease: Duration,
    ) -> Result<RenewOutcome, StoreError> {
        self.inner.renew(&self.name(operation), token, lease).await
    }

    async fn complete(
        &self,
        operation: &Operation,
        completion: &Completion,
    ) -> Result<CompleteOutcome, StoreError> {
        let operation = self.name(operation);
        let mut completion = Completion { reply: self.reply(&completion.reply), ..completion.clone() };
        if self.fault == Fault::KeepsRepliesTwiceAsLong {
            completion.retention *= 2;
        }
        if self.fault == Fault::LosesLateCompletions && self.inner.show(operation.id()).await?.is_none() {
            return Ok(CompleteOutcome::Fenced(None));
        }
        let answer = self.inner.complete(&operation, &completion).await?;
        let overwrite = match answer {
            CompleteOutcome::Fenced(None) => self.fault == Fault::LetsStaleOwnersComplete,
            CompleteOutcome::AlreadyStored(_) => self.fault == Fault::OverwritesReplies,
            _ => false,
        };
        if !overwrite {
            return Ok(answer);
        }
        self.inner.resolve(operation.id(), &completion.reply, completion.retention, &force()).await?;
        match self.inner.claim(&operation, &request_of(completion.token)).await? {
            ClaimOutcome::Completed(stored) => Ok(CompleteOutcome::Stored(stored)),
            other => panic!("just resolved, not {other:?}"),
        }
    }

    async fn release(&self, operation: &Operation, token: LeaseToken) -> Result<ReleaseOutcome, StoreError> {
        let operation = self.name(operation);
        let answer = self.inner.release(&operation, token).await?;
        if self.fault == Fault::LetsStaleOwnersRelease && answer == ReleaseOutcome::Fenced {
            self.inner.free(operation.id(), &force()).await?;
            return Ok(ReleaseOutcome::Applied);
        }
        Ok(answer)
    }

    async fn mark_unknown(
        &self,
        operation: &Operation,
        token: LeaseToken,
    ) -> Result<ReleaseOutcome, StoreError> {
        match self.fault {
            Fault::ReleasesUnknownOutcomes => self.inner.release(&self.name(operation), token).await,
            _ => self.inner.mark_unknown(&self.name(operation), token).await,
        }
    }

    async fn purge(&self, request: &PurgeRequest) -> Result<Purged, StoreError> {
        let mut request = *request;
        match self.fault {
            Fault::PurgesHeldRecords => request.hold_retention = Duration::ZERO,
            Fault::PurgesWithoutBound => request.limit = u32::MAX,
            _ => {}
        }
        self.inner.purge(&request).await
    }

    fn capabilities(&self) -> Capabilities {
        let durable = self.fault == Fault::CallsItselfDurable;
        Capabilities { durable, ..self.inner.capabilities() }
    }
}

fn request_of(token: LeaseToken) -> ClaimRequest {
    ClaimRequest {
        token,
        lease: Duration::from_secs(1),
        retention: Duration::from_secs(1),
        on_lease_end: OnLeaseEnd::Hold,
        takeover_now: true,
        max_attempts: 1,
    }
}

struct Mutant {
    store: Mutex<Broken>,
    clock: TestClock,
}

impl Mutant {
    fn with(fault: Fault) -> Self {
        let clock = TestClock::new();
        let inner = MemoryStore::with_clock(Arc::new(clock.clone()));
        Self { store: Mutex::new(Broken { inner, fault, seen: Arc::default() }), clock }
    }
}

#[async_trait]
impl Subject for Mutant {
    async fn open(&self) -> Arc<dyn Store> {
        Arc::new(self.store.lock().unwrap().clone())
    }

    async fn open_admin(&self) -> Option<Arc<dyn StoreAdmin>> {
        None
    }

    async fn advance(&self, by: Duration) {
        self.clock.advance(by);
    }

    async fn restart(&self) {
        self.store.lock().unwrap().inner = MemoryStore::with_clock(Arc::new(self.clock.clone()));
    }

    fn survives_restart(&self) -> bool {
        false
    }

    fn time(&self) -> Time {
        Time::Told
    }

    fn expiry(&self) -> Expiry {
        Expiry::ByPurge
    }
}

fn passes(fault: Fault, case: impl AsyncFnOnce(&Harness)) -> bool {
    catch_unwind(AssertUnwindSafe(|| run(async || Mutant::with(fault), case))).is_ok()
}

/// One test for each fault: the named case fails with it, and passes without.
macro_rules! catches {
    ($($fault:ident: $module:ident::$case:ident)*) => {
        $(
            #[test]
            #[allow(non_snake_case)]
            fn $fault() {
                assert!(!passes(Fault::$fault, async |h| cases::$module::$case(h).await), "not caught");
                assert!(passes(Fault::None, async |h| cases::$module::$case(h).await), "a false alarm");
            }
        )*
    };
}

catches! {
    FoldsCase: keys::names_are_compared_byte_for_byte
    TrimsKeys: keys::names_are_compared_byte_for_byte
    TruncatesKeys: keys::names_of_full_length_are_kept_whole
    JoinsScopeAndKey: keys::scope_and_key_never_run_together
    ChecksThenInserts: races::one_of_many_claims_is_acquired
    IsNotReentrant: claims::a_claim_is_reentrant_for_its_own_token
    IgnoresFingerprints: fingerprints::a_mismatch_goes_before_every_state
    IgnoresCallersPolicy: takeover::a_takeover_needs_both_policies
    IgnoresMaxAttempts: takeover::too_many_attempts_are_unknown
    IgnoresBrokenContact: takeover::broken_contact_lets_the_owner_go_first
    LeasesTooLong: takeover::the_lease_ends_exactly_at_its_bound
    LetsStaleOwnersComplete: owners::a_stale_owner_is_fenced_after_a_takeover
    LetsStaleOwnersRelease: owners::a_stale_owner_is_fenced_after_a_release_and_a_third_claim
    LosesLateCompletions: completion::a_completion_without_a_record_is_stored_anew
    OverwritesReplies: completion::a_repeated_completion_answers_the_first_reply
    ReleasesUnknownOutcomes: unknown::a_mark_ends_the_lease_at_once_for_good
    KeepsRepliesTwiceAsLong: expiry::a_reply_expires_exactly_at_its_bound
    KeepsTextOnly: replay::a_large_binary_reply_comes_back_whole
    KeepsOneHeaderOfAName: replay::every_reply_comes_back_whole
    LosesTrailers: replay::every_reply_comes_back_whole
    LosesOmission: replay::an_omitted_body_stays_omitted
    LosesOrigins: origins::every_answer_tells_the_origin_of_the_owner
    PurgesHeldRecords: purge::records_without_a_reply_are_kept_for_the_hold_retention
    PurgesWithoutBound: purge::a_purge_is_bounded
    CallsItselfDurable: restart::replies_outlive_a_restart
}

/// The random histories find every fault of the state machine by themselves.
#[test]
fn histories_find_the_faults_of_the_state_machine() {
    for fault in [
        Fault::IsNotReentrant,
        Fault::IgnoresFingerprints,
        Fault::IgnoresCallersPolicy,
        Fault::IgnoresMaxAttempts,
        Fault::IgnoresBrokenContact,
        Fault::LetsStaleOwnersComplete,
        Fault::LetsStaleOwnersRelease,
        Fault::LosesLateCompletions,
        Fault::OverwritesReplies,
        Fault::ReleasesUnknownOutcomes,
        Fault::KeepsRepliesTwiceAsLong,
        Fault::PurgesHeldRecords,
    ] {
        let found = catch_unwind(|| model::check(async || Mutant::with(fault), 500)).is_err();
        assert!(found, "{fault:?} was not found");
    }
}
