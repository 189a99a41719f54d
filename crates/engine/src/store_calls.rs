//! Questions to the store: bounded in time, asked again where the answer was lost, cleaned up after where it stays
//! unknown.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use onlyonce_core::crash::dies_at;
use onlyonce_core::{
    ClaimOutcome, ClaimRequest, CompleteOutcome, CrashPoint, Fingerprint, Key, LeaseToken, Operation, Reply,
    Scope, StoreError, StoreErrorKind,
};
use tokio::time::{Instant, sleep, timeout};

use crate::counters::add;
use crate::execution::Live;
use crate::idempotency::Shared;
use crate::policy::Policy;

/// Releases under way in the background at once; past it a claim that nobody can answer for is left to its lease.
pub(crate) const BACKGROUND_RELEASES_MAX: usize = 1024;

/// How long the store may be away before a release is given up, and the engine with its last handle kept for it.
const RELEASE_MAX: Duration = Duration::from_secs(3600);

/// Replies that wait in the background for their store; past it one is lost.
pub(crate) const LATE_COMPLETIONS_MAX: usize = 1024;

/// The longest reply, in bytes of memory, that waits whole: 32 MiB in all.
const LATE_REPLY_BYTES_MAX: usize = 32 << 10;

/// How long a reply waits for its store.
const LATE_MAX: Duration = Duration::from_secs(3600);

/// How long a claim that was sent may take to arrive.
const LANDING_MAX: Duration = Duration::from_secs(60);

/// The claim of one `begin`, under one token however often it is sent. Dropped while it may be held, because its
/// answer stayed lost, came too late or was not waited for, it is released in the background.
pub(crate) struct Claim<'a> {
    shared: &'a Arc<Shared>,
    operation: &'a Operation,
    policy: &'a Policy,
    token: LeaseToken,
    // Some try of it may still arrive at the store.
    adrift: bool,
    may_be_held: bool,
}

impl<'a> Claim<'a> {
    pub(crate) fn new(shared: &'a Arc<Shared>, operation: &'a Operation, policy: &'a Policy) -> Self {
        let token = shared.random.token();
        Self { shared, operation, policy, token, adrift: false, may_be_held: false }
    }

    /// Sends it, within the store timeout; where the answer is lost, once more and again, with the same token. Returns
    /// the answer and the instant before the try that got it was sent.
    pub(crate) async fn send(&mut self) -> Result<(ClaimOutcome, Duration), StoreError> {
        let shared = self.shared;
        let end = Instant::now() + shared.limits.store_timeout;
        let mut pause = Duration::from_millis(5);
        let mut first = true;
        loop {
            add(&shared.counters.claims);
            let sent_at = shared.clock.boot();
            let request = self.request(sent_at);
            let left = end.saturating_duration_since(Instant::now());
            // The first try leaves time for a second one.
            let patience = if first { left / 2 } else { left };
            first = false;
            self.may_be_held = true;
            let call = shared.store.claim(self.operation, &request);
            let error = match shared.bounded("claim", patience, call).await {
                Ok(outcome) => {
                    self.may_be_held = self.adrift || matches!(outcome, ClaimOutcome::Acquired(_));
                    return Ok((outcome, sent_at));
                }
                Err(error) => error,
            };
            self.adrift |= error.may_have_applied();
            self.may_be_held = self.adrift;
            // Surely not applied is an answer; but not for a try before this one.
            let ask_again = error.may_have_applied() || (self.adrift && error.retryable());
            if !ask_again || Instant::now() + pause >= end {
                return Err(error);
            }
            sleep(pause).await;
            pause = (pause * 2).min(Duration::from_millis(100));
        }
    }

    /// An execution answers for it from here on.
    pub(crate) fn hand_over(mut self) {
        self.may_be_held = false;
    }

    fn request(&self, now: Duration) -> ClaimRequest {
        let policy = self.policy;
        ClaimRequest {
            token: self.token,
            lease: policy.lease,
            retention: policy.retention,
            on_lease_end: policy.on_lease_end,
            takeover_now: self.shared.may_take_over(policy.lease, now),
            max_attempts: policy.max_attempts,
        }
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        if self.may_be_held {
            self.shared.release_in_background(self.operation, self.token);
        }
    }
}

impl Shared {
    /// Repeats a call that is safe to repeat until it succeeds, fails for good, or `until` has passed (by the boot
    /// clock). `until` is asked again each time, for renewals move it.
    pub(crate) async fn persist<T, Fut: Future<Output = Result<T, StoreError>>>(
        &self,
        what: &'static str,
        until: impl Fn() -> Duration,
        call: impl Fn() -> Fut,
    ) -> Result<T, StoreError> {
        let mut pause = Duration::from_millis(10);
        loop {
            let error = match self.bounded(what, self.limits.store_timeout, call()).await {
                Ok(value) => return Ok(value),
                Err(error) => error,
            };
            if !(error.retryable() || error.may_have_applied()) || self.clock.boot() + pause >= until() {
                return Err(error);
            }
            sleep(pause).await;
            pause = (pause * 2).min(Duration::from_millis(500));
        }
    }

    /// One call, bounded in time, its failure counted and held against the contact with the store.
    pub(crate) async fn bounded<T>(
        &self,
        what: &'static str,
        patience: Duration,
        call: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        let result = match timeout(patience, call).await {
            Ok(result) => result,
            Err(_) => Err(StoreError::new(StoreErrorKind::Timeout, what)
                .with_detail(format!("no answer within {patience:?}"))
                .ambiguous()),
        };
        if self.network {
            let answered = result.as_ref().err().is_none_or(is_an_answer);
            self.contact.lock().note(answered, self.clock.boot(), self.silence_max());
        }
        result.inspect_err(|error| {
            add(&self.counters.store_errors);
            tracing::debug!(error = %error, what, "store call failed");
        })
    }

    /// Whether this process may take over from an owner on a lease as long as this: over a network only when its own
    /// contact has been unbroken for so long, for an owner cut off by the same outage goes first.
    fn may_take_over(&self, lease: Duration, now: Duration) -> bool {
        !self.network || self.contact.lock().unbroken_for(lease, now, self.silence_max())
    }

    // An owner that renews at a third of its lease has more than this left when an outage begins.
    fn silence_max(&self) -> Duration {
        Duration::from_millis(self.shortest_lease_ms.load(Ordering::Relaxed) / 2)
    }

    /// Keeps up the contact of an idle process with a network store: asks for the release of what nobody holds.
    pub(crate) fn probe_in_background(self: &Arc<Self>) {
        let interval = self.silence_max() / 3;
        // Its release is none of an owner's.
        if dies_at(&[CrashPoint::ReleaseBefore, CrashPoint::ReleaseAfter]) {
            return;
        }
        if !self.network || !self.contact.lock().take_probe(self.clock.boot(), interval) {
            return;
        }
        let shared = self.clone();
        tokio::spawn(async move {
            let key = Key::new("onlyonce contact probe").expect("a valid key");
            let nothing = Operation::new(Scope::anonymous(), key, Fingerprint::of(""));
            let call = shared.store.release(&nothing, shared.random.token());
            // Its outcome is noted on the way.
            let _ = shared.bounded("release", shared.limits.store_timeout, call).await;
        });
    }

    /// Keeps sending `release` for a claim that may be held and that nobody works on, until the store has heard of it.
    pub(crate) fn release_in_background(self: &Arc<Self>, operation: &Operation, token: LeaseToken) {
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        let Some(slot) = self.background_releases.take() else {
            tracing::warn!("too many releases under way: a claim is left to its lease");
            return;
        };
        let mut unanswered = self.unanswered_releases.take();
        let (shared, operation) = (self.clone(), operation.clone());
        runtime.spawn(async move {
            let _slot = slot;
            let begun = Instant::now();
            let mut pause = Duration::from_millis(20);
            // Past the lease too: a held record would be unknown for ever, though nothing ran.
            while begun.elapsed() < RELEASE_MAX {
                let call = shared.store.release(&operation, token);
                use onlyonce_core::ReleaseOutcome::{Absent, Applied, Fenced};
                match shared.bounded("release", shared.limits.store_timeout, call).await {
                    Ok(Applied | Fenced) => return,
                    // No end: the claim may still be on its way, though not for ever.
                    Ok(Absent) if begun.elapsed() > LANDING_MAX => return,
                    Ok(Absent) => drop(unanswered.take()),
                    Err(_) => {}
                }
                sleep(pause).await;
                pause = (pause * 2).min(Duration::from_secs(2));
            }
        });
    }

    /// Keeps trying to record a reply whose lease is over: the effect happened, and what is known must not be lost only
    /// because the store was away for longer than a lease. Whoever took over in the meantime fences it.
    pub(crate) fn record_late(self: &Arc<Self>, live: &Arc<Live>, reply: &Reply) {
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        let Some(slot) = self.late_completions.take() else {
            tracing::error!("too many replies wait for the store: one is lost, and its outcome unknown");
            return;
        };
        // What waits is bounded: a long reply is kept like one that is too long to be stored.
        let long = reply.weight_bytes() > LATE_REPLY_BYTES_MAX;
        let reply = if long { reply.clone().omitting_body() } else { reply.detached() };
        let (shared, live) = (self.clone(), live.clone());
        runtime.spawn(async move {
            let _slot = slot;
            let (completion, begun) = (live.completion(&reply), Instant::now());
            let mut pause = Duration::from_millis(250);
            while begun.elapsed() < LATE_MAX {
                sleep(pause).await;
                pause = (pause * 2).min(Duration::from_secs(5));
                let call = shared.store.complete(&live.operation, &completion);
                match shared.bounded("complete", shared.limits.store_timeout, call).await {
                    Ok(CompleteOutcome::Fenced(_)) => return,
                    Ok(_) => {
                        add(&shared.counters.recorded_late);
                        tracing::warn!("a reply is recorded after all, past its lease");
                        return;
                    }
                    Err(_) => {}
                }
            }
            tracing::error!(
                "a reply could not be recorded for an hour and is given up; its outcome is unknown"
            );
        });
    }
}

/// Whether the store itself was reached, and said no.
fn is_an_answer(error: &StoreError) -> bool {
    use StoreErrorKind::{Conflict, Full, Unreadable};
    !error.may_have_applied() && matches!(error.kind(), Conflict | Full | Unreadable)
}

/// Since when the contact with a network store is unbroken. Start-up counts as a break, and so does silence: an outage
/// that nobody here noticed may have kept an owner from renewing.
#[derive(Debug)]
pub(crate) struct Contact {
    unbroken_since: Option<Duration>,
    last_answer: Duration,
    next_probe: Duration,
}

impl Contact {
    pub(crate) fn new() -> Self {
        Self { unbroken_since: None, last_answer: Duration::ZERO, next_probe: Duration::ZERO }
    }

    fn note(&mut self, answered: bool, now: Duration, silence_max: Duration) {
        let silent = now.saturating_sub(self.last_answer) > silence_max;
        self.unbroken_since = match (answered, self.unbroken_since) {
            (true, Some(since)) if !silent => Some(since),
            (true, _) => Some(now),
            (false, _) => None,
        };
        if answered {
            self.last_answer = now;
        }
    }

    fn unbroken_for(&self, lease: Duration, now: Duration, silence_max: Duration) -> bool {
        now.saturating_sub(self.last_answer) <= silence_max
            && self.unbroken_since.is_some_and(|since| now.saturating_sub(since) >= lease)
    }

    /// Whether it is time for a call that has no other purpose; true once in so often.
    fn take_probe(&mut self, now: Duration, interval: Duration) -> bool {
        let due = now >= self.next_probe && now.saturating_sub(self.last_answer) >= interval;
        if due {
            self.next_probe = now + interval;
        }
        due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contact_counts_from_the_first_answer_after_a_break() {
        let secs = Duration::from_secs;
        let mut contact = Contact::new();
        assert!(!contact.unbroken_for(secs(0), secs(1000), secs(15)));
        for now in [10, 20, 30, 40] {
            contact.note(true, secs(now), secs(15));
        }
        assert!(!contact.unbroken_for(secs(31), secs(40), secs(15)));
        assert!(contact.unbroken_for(secs(30), secs(40), secs(15)));
        contact.note(false, secs(41), secs(15));
        for now in [42, 52, 62, 71] {
            contact.note(true, secs(now), secs(15));
        }
        assert!(!contact.unbroken_for(secs(30), secs(71), secs(15)));
        assert!(contact.unbroken_for(secs(30), secs(72), secs(15)));
    }

    #[test]
    fn silence_is_a_break_of_contact() {
        let secs = Duration::from_secs;
        let mut contact = Contact::new();
        for now in [10, 20, 30, 40] {
            contact.note(true, secs(now), secs(15));
        }
        assert!(contact.unbroken_for(secs(30), secs(55), secs(15)));
        assert!(!contact.unbroken_for(secs(30), secs(56), secs(15)));
        contact.note(true, secs(56), secs(15));
        assert!(!contact.unbroken_for(secs(30), secs(56), secs(15)));
    }

    #[test]
    fn a_probe_is_due_after_silence_and_once_in_so_often() {
        let secs = Duration::from_secs;
        let mut contact = Contact::new();
        contact.note(true, secs(10), secs(15));
        assert!(!contact.take_probe(secs(14), secs(5)));
        assert!(contact.take_probe(secs(15), secs(5)));
        assert!(!contact.take_probe(secs(19), secs(5)));
        assert!(contact.take_probe(secs(20), secs(5)));
    }
}
