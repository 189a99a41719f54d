//! The right to run one operation, and the duty to say how it ended.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use onlyonce_core::{
    CompleteOutcome, Completion, Lease, Mutant, OnLeaseEnd, Operation, RenewOutcome, Reply, StoreError,
    StoredReply, mutant,
};
use sha2::{Digest, Sha256};

use crate::counters::add;
use crate::flight::{End, Leader};
use crate::idempotency::Shared;
use crate::outcome::EngineError;
use crate::policy::Policy;
use crate::slots::Slot;

/// The right to run one operation. End it with [`complete`](Self::complete), [`release`](Self::release) or
/// [`unknown`](Self::unknown).
///
/// Dropped without an end its outcome is unknown, for the work may have happened: renewal stops at once, nothing is
/// released, and the policy decides what a retry gets.
#[must_use = "an operation that is acquired must be ended"]
#[derive(Debug)]
pub struct Execution {
    context: Context,
    // Taken by the end.
    duty: Option<Duty>,
}

#[derive(Debug)]
struct Duty {
    leader: Leader,
    _slot: Slot,
}

/// What the work may know of its execution. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Context {
    live: Arc<Live>,
}

/// The owner's view of its lease, shared with the heartbeat.
#[derive(Debug)]
pub(crate) struct Live {
    pub(crate) shared: Arc<Shared>,
    pub(crate) operation: Operation,
    pub(crate) policy: Arc<Policy>,
    pub(crate) lease: Lease,
    pub(crate) started: Duration,
    // Boot clock, ms. Counted from the instant before the claim or renewal was SENT.
    deadline_ms: AtomicU64,
    next_renewal_ms: AtomicU64,
    fenced: AtomicBool,
    recording: AtomicBool,
    // Ended, or its record is gone: nothing is renewed and nothing may be begun any more.
    over: AtomicBool,
}

/// This caller is not the owner any more: it must not touch the operation again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the lease is lost to another owner, or could not be renewed in time")]
pub struct NotOwner;

/// How a completion went.
#[derive(Debug)]
pub enum Completed {
    /// The reply is recorded: every retry gets it.
    Recorded(StoredReply),
    /// Another owner was faster: its reply is the answer, if it is there yet.
    Fenced(Option<StoredReply>),
    /// The store failed until the lease was over. The effect happened; the lease is left to end. Recording is tried on
    /// in the background for up to an hour, for a late completion still resolves a record that nobody took over.
    NotRecorded(EngineError),
}

impl Execution {
    pub(crate) fn new(live: Arc<Live>, leader: Leader, slot: Slot) -> Self {
        leader.working(live.clone());
        add(&live.shared.counters.acquired);
        if live.lease.attempt > 1 {
            add(&live.shared.counters.takeovers);
        }
        Self { context: Context { live }, duty: Some(Duty { leader, _slot: slot }) }
    }

    /// What the work may know.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// See [`Context::attempt`].
    pub fn attempt(&self) -> u32 {
        self.context.attempt()
    }

    /// See [`Context::downstream_key`].
    pub fn downstream_key(&self, step: &str) -> String {
        self.context.downstream_key(step)
    }

    /// Records the reply. Durable, as far as the store is, when it returns [`Completed::Recorded`].
    ///
    /// A failing store is asked again, and the lease renewed, until the lease is over.
    ///
    /// # Cancellation
    /// Goes on in the background, even when the future was never polled: the effect happened.
    pub fn complete(mut self, reply: Reply) -> impl Future<Output = Completed> + Send + use<> {
        let live = self.context.live.clone();
        let too_early = mutant(Mutant::AnswerBeforeRecord).then(|| live.too_early(&reply));
        let recording = Recording { live, duty: self.duty.take(), reply, in_background: false }.run();
        async move {
            let Some(answer) = too_early else { return recording.await };
            tokio::spawn(async move {
                tokio::time::sleep(Duration::from_millis(300)).await;
                recording.await
            });
            answer
        }
    }

    /// Gives the operation back: surely nothing happened, a retry may run it.
    ///
    /// # Cancellation
    /// Goes on in the background.
    pub async fn release(self) {
        self.release_answering(None).await;
    }

    /// Like [`release`](Self::release), and tells the duplicates in flight what this caller was answered: one of them
    /// claims again, the others get this reply.
    pub async fn release_answering(mut self, reply: Option<Reply>) {
        let Some(duty) = self.duty.take() else { return };
        let live = self.context.live.clone();
        live.stop_renewing();
        let token = live.lease.token;
        add(&live.shared.counters.released);
        let mut sent = UnsentRelease { live: &live, done: false };
        let until = || live.deadline();
        let call = || live.shared.store.release(&live.operation, token);
        sent.done = live.shared.persist("release", until, call).await.is_ok();
        drop(sent);
        duty.leader.end(End::Released(reply));
    }

    /// Says that nobody knows whether it happened. Under [`OnLeaseEnd::Hold`] retries are told so at once and until it is
    /// resolved; under [`OnLeaseEnd::TakeOver`] a retry runs again after the lease.
    ///
    /// # Cancellation
    /// The lease ends by itself; the outcome stays unknown.
    pub async fn unknown(mut self) {
        if let Some(duty) = self.duty.take() {
            end_unknown(&self.context.live, duty).await;
        }
    }
}

impl Drop for Execution {
    fn drop(&mut self) {
        let Some(duty) = self.duty.take() else { return };
        let live = self.context.live.clone();
        live.stop_renewing();
        if mutant(Mutant::ReleaseOnDisconnect) {
            live.shared.release_in_background(&live.operation, live.lease.token);
            return duty.leader.end(End::Released(None));
        }
        // Without a runtime the lease ends by itself, which says the same a little later.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(async move { end_unknown(&live, duty).await });
        }
    }
}

async fn end_unknown(live: &Arc<Live>, duty: Duty) {
    live.stop_renewing();
    add(&live.shared.counters.unknown);
    if live.policy.on_lease_end == OnLeaseEnd::Hold {
        let until = || live.deadline();
        let call = || live.shared.store.mark_unknown(&live.operation, live.lease.token);
        if let Err(error) = live.shared.persist("mark_unknown", until, call).await {
            // The lease ends by itself, and a held record is unknown from then on.
            tracing::warn!(error = %error, "could not mark an outcome as unknown; it is so when its lease ends");
        }
    }
    duty.leader.end(End::Abandoned);
}

/// A completion under way; dropped half-way it goes on in the background.
struct Recording {
    live: Arc<Live>,
    duty: Option<Duty>,
    reply: Reply,
    // Dropped once more, with its runtime, there is nowhere left to go on.
    in_background: bool,
}

impl Recording {
    async fn run(mut self) -> Completed {
        let live = self.live.clone();
        let sent_at = live.shared.clock.boot();
        let result = live.record(&self.reply).await;
        match self.duty.take() {
            Some(duty) => {
                let completed = live.finish(duty, sent_at, result);
                if matches!(completed, Completed::NotRecorded(_)) {
                    live.shared.record_late(&live, &self.reply);
                }
                completed
            }
            None => Completed::Fenced(None),
        }
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        let Some(duty) = self.duty.take() else { return };
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        if !self.in_background {
            let (live, reply) = (self.live.clone(), self.reply.clone());
            let rest = Self { live, duty: Some(duty), reply, in_background: true };
            runtime.spawn(async move { rest.run().await });
        }
    }
}

/// A release under way; dropped half-way it goes on in the background.
struct UnsentRelease<'a> {
    live: &'a Arc<Live>,
    done: bool,
}

impl Drop for UnsentRelease<'_> {
    fn drop(&mut self) {
        if !self.done {
            let Live { shared, operation, lease, .. } = &**self.live;
            shared.release_in_background(operation, lease.token);
        }
    }
}

impl Context {
    /// 1 for the first run, one more for each takeover.
    pub fn attempt(&self) -> u32 {
        self.live.lease.attempt
    }

    /// The operation.
    pub fn operation(&self) -> &Operation {
        &self.live.operation
    }

    /// A key for one step downstream (a payment provider, a mail service), the same on every attempt, so that the
    /// other side can tell a second attempt from a second operation.
    ///
    /// SHA-256 of the length-prefixed scope, key and step, written as a version 8 UUID (RFC 9562 §5.8).
    pub fn downstream_key(&self, step: &str) -> String {
        downstream_key(&self.live.operation, step)
    }

    /// Call it right before the irreversible part (sending to the provider): returns when more than half of the
    /// lease is left, renewing it if need be.
    ///
    /// # Errors
    /// [`NotOwner`]: do not go on. Also past the work timeout, and once the execution has ended.
    pub async fn ensure_lease(&self) -> Result<(), NotOwner> {
        if !self.live.is_timed_out() && self.live.ensure_half().await { Ok(()) } else { Err(NotOwner) }
    }

    /// Whether another owner is known to have taken the operation over.
    pub fn is_fenced(&self) -> bool {
        self.live.fenced.load(Ordering::Acquire)
    }
}

/// [`Context::downstream_key`] for work outside of an [`Execution`], as in a transaction of its own: the same key.
pub fn downstream_key(operation: &Operation, step: &str) -> String {
    let mut hasher = Sha256::new();
    for part in [operation.scope().as_str(), operation.key().as_str(), step] {
        hasher.update((part.len() as u64).to_be_bytes());
        hasher.update(part.as_bytes());
    }
    let digest: [u8; 32] = hasher.finalize().into();
    let mut id = [0; 16];
    id.copy_from_slice(&digest[..16]);
    id[6] = (id[6] & 0x0f) | 0x80;
    id[8] = (id[8] & 0x3f) | 0x80;
    let mut text = String::with_capacity(36);
    for (at, byte) in id.iter().enumerate() {
        if matches!(at, 4 | 6 | 8 | 10) {
            text.push('-');
        }
        for nibble in [byte >> 4, byte & 15] {
            text.push(char::from(b"0123456789abcdef"[usize::from(nibble)]));
        }
    }
    text
}

impl Live {
    pub(crate) fn new(
        shared: &Arc<Shared>,
        operation: &Operation,
        policy: &Arc<Policy>,
        lease: Lease,
        sent_at: Duration,
    ) -> Arc<Self> {
        let live = Self {
            shared: shared.clone(),
            operation: operation.clone(),
            policy: policy.clone(),
            lease,
            started: sent_at,
            deadline_ms: AtomicU64::new(0),
            next_renewal_ms: AtomicU64::new(0),
            fenced: AtomicBool::new(false),
            recording: AtomicBool::new(false),
            over: AtomicBool::new(false),
        };
        live.extended(sent_at);
        Arc::new(live)
    }

    /// When the lease ends, by the boot clock.
    pub(crate) fn deadline(&self) -> Duration {
        Duration::from_millis(self.deadline_ms.load(Ordering::Acquire))
    }

    pub(crate) fn left(&self) -> Duration {
        self.deadline().saturating_sub(self.shared.clock.boot())
    }

    /// Whether this process must doubt that the operation is still its own.
    pub(crate) fn is_lost(&self) -> bool {
        self.fenced.load(Ordering::Acquire) || self.left().is_zero()
    }

    /// Whether the reply is on its way to the store, or there.
    pub(crate) fn is_recording(&self) -> bool {
        self.recording.load(Ordering::Acquire)
    }

    /// Whether the heartbeat must renew now.
    pub(crate) fn renewal_due(&self, now: Duration) -> bool {
        now.as_millis() as u64 >= self.next_renewal_ms.load(Ordering::Acquire)
            && !self.is_given_up()
            && !self.is_timed_out()
    }

    fn is_given_up(&self) -> bool {
        self.fenced.load(Ordering::Acquire) || self.over.load(Ordering::Acquire)
    }

    // Past it nothing is renewed: the outcome is unknown.
    fn is_timed_out(&self) -> bool {
        self.shared.clock.boot() >= self.started + self.policy.work_timeout
    }

    /// Makes sure that more than half of the lease is left, renewing it if need be. False: nothing may be begun.
    pub(crate) async fn ensure_half(&self) -> bool {
        let half = self.policy.lease / 2;
        // Asked again after the renewal, for its answer may have been late too.
        let mut renewed = false;
        while !self.is_given_up() {
            if self.left() > half {
                return true;
            }
            if renewed || !matches!(self.renew().await, Ok(RenewOutcome::Renewed)) {
                return false;
            }
            renewed = true;
        }
        false
    }

    /// Renews once.
    pub(crate) async fn renew(&self) -> Result<RenewOutcome, StoreError> {
        let (shared, lease) = (&self.shared, self.policy.lease);
        let sent_at = shared.clock.boot();
        // Not again before this answer, and soon after it if it fails.
        let patience = shared.limits.store_timeout.min(lease / 3);
        self.next_renewal_ms.store((sent_at + patience + lease / 12).as_millis() as u64, Ordering::Release);
        let call = shared.store.renew(&self.operation, self.lease.token, lease);
        let outcome = shared.bounded("renew", patience, call).await?;
        match outcome {
            RenewOutcome::Renewed => {
                add(&shared.counters.renewals);
                self.extended(sent_at);
            }
            RenewOutcome::Fenced => self.note_fenced(),
            // Completion writes a lost record anew; renewing it is over.
            RenewOutcome::Gone | RenewOutcome::Ended => self.stop_renewing(),
        }
        Ok(outcome)
    }

    fn extended(&self, sent_at: Duration) {
        let lease = self.policy.lease;
        // Answers may overtake each other: the lease never shrinks.
        self.deadline_ms.fetch_max((sent_at + lease).as_millis() as u64, Ordering::AcqRel);
        self.next_renewal_ms.store((sent_at + lease / 3).as_millis() as u64, Ordering::Release);
    }

    fn note_fenced(&self) {
        if !self.fenced.swap(true, Ordering::AcqRel) {
            add(&self.shared.counters.fenced);
        }
    }

    pub(crate) fn stop_renewing(&self) {
        self.over.store(true, Ordering::Release);
    }

    pub(crate) fn completion(&self, reply: &Reply) -> Completion {
        Completion {
            token: self.lease.token,
            attempt: self.lease.attempt,
            reply: reply.clone(),
            retention: self.policy.retention,
        }
    }

    // Of a mutant.
    fn too_early(&self, reply: &Reply) -> Completed {
        let now = self.shared.clock.wall();
        Completed::Recorded(StoredReply {
            reply: reply.clone(),
            completed_at: now,
            expires_at: now + self.policy.retention,
            remaining: self.policy.retention,
            origin: self.operation.origin().cloned(),
        })
    }

    async fn record(&self, reply: &Reply) -> Result<CompleteOutcome, StoreError> {
        self.recording.store(true, Ordering::Release);
        let completion = self.completion(reply);
        let until = || self.deadline();
        self.shared
            .persist("complete", until, || self.shared.store.complete(&self.operation, &completion))
            .await
    }

    fn finish(
        &self,
        duty: Duty,
        sent_at: Duration,
        result: Result<CompleteOutcome, StoreError>,
    ) -> Completed {
        self.stop_renewing();
        let shared = &self.shared;
        let counters = &shared.counters;
        let (stored, counter) = match result {
            Ok(CompleteOutcome::Stored(stored) | CompleteOutcome::AlreadyStored(stored)) => {
                (stored, &counters.completed)
            }
            Ok(CompleteOutcome::StoredAnew(stored)) => {
                tracing::warn!("a record was gone at completion and is written anew");
                (stored, &counters.completed_anew)
            }
            Ok(CompleteOutcome::Fenced(stored)) => {
                self.note_fenced();
                // Followers ask for themselves: the other owner's request need not be theirs.
                duty.leader.end(End::Abandoned);
                return Completed::Fenced(stored);
            }
            Err(error) => {
                add(&counters.not_recorded);
                tracing::error!(error = %error, "the work ran and its reply could not be recorded");
                duty.leader.end(End::Abandoned);
                return Completed::NotRecorded(error.into());
            }
        };
        add(counter);
        shared.cache.put(self.operation.id(), self.operation.fingerprint(), &stored, sent_at);
        duty.leader.end(End::Completed(stored.clone()));
        Completed::Recorded(stored)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use onlyonce_core::{Fingerprint, Key, Scope};

    // Frozen: a changed key here would be a second charge at the provider on takeover after an upgrade.
    #[test]
    fn downstream_keys_are_frozen() {
        let key = |scope: &str, key: &str, step: &str| {
            let operation =
                Operation::new(Scope::new(scope).unwrap(), Key::new(key).unwrap(), Fingerprint::of("any"));
            downstream_key(&operation, step)
        };
        assert_eq!(key("", "k", ""), "83d78470-c44e-8d70-9561-467e1ff35c0e");
        assert_eq!(key("merchant-1", "order-42", "charge"), "075a09c4-3766-816f-a726-4b4ff70650d8");
        assert_ne!(key("a", "bc", "d"), key("ab", "c", "d"));
        assert_ne!(key("a", "b", "cd"), key("a", "bc", "d"));
    }
}
