//! Questions to the store: bounded in time, asked again where the answer was lost, cleaned up after where it stays
//! unknown.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use onlyonce_core::{ClaimOutcome, ClaimRequest, LeaseToken, Operation, StoreError, StoreErrorKind};
use tokio::time::{Instant, sleep, timeout};

use crate::counters::add;
use crate::idempotency::Shared;

/// Releases under way in the background at once; past it a claim that nobody can answer for is left to its lease.
pub(crate) const BACKGROUND_RELEASES_MAX: usize = 1024;

impl Shared {
    /// Claims within the store timeout. A lost answer is asked for again with the same token; one that stays lost,
    /// because of errors or because the caller went away, is released in the background.
    pub(crate) async fn claim(
        self: &Arc<Self>,
        operation: &Operation,
        request: &ClaimRequest,
    ) -> Result<ClaimOutcome, StoreError> {
        let mut sent = SentClaim { shared: self, operation, request, answered: false };
        let end = Instant::now() + self.limits.store_timeout;
        let mut first = true;
        loop {
            add(&self.counters.claims);
            let left = end.saturating_duration_since(Instant::now());
            // The first try leaves time for a second one.
            let patience = if first { left / 2 } else { left };
            let answer = self.bounded("claim", patience, self.store.claim(operation, request)).await;
            match answer {
                Ok(outcome) => {
                    sent.answered = true;
                    return Ok(outcome);
                }
                Err(error) if error.may_have_applied() && Instant::now() < end => first = false,
                Err(error) => {
                    // Surely not applied: nothing to clean up after.
                    sent.answered = !error.may_have_applied();
                    return Err(error);
                }
            }
        }
    }

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
            self.contact.lock().note(result.is_ok(), self.clock.boot());
        }
        result.inspect_err(|error| {
            add(&self.counters.store_errors);
            tracing::debug!(error = %error, what, "store call failed");
        })
    }

    /// Keeps sending `release` for a claim that may be held and that nobody works on, for as long as it could land.
    pub(crate) fn release_in_background(
        self: &Arc<Self>,
        operation: &Operation,
        token: LeaseToken,
        lease: Duration,
    ) {
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        let Ok(slot) = self.background_releases.clone().try_acquire_owned() else { return };
        let (shared, operation) = (self.clone(), operation.clone());
        runtime.spawn(async move {
            let _slot = slot;
            let end = Instant::now() + lease;
            let mut pause = Duration::from_millis(20);
            while Instant::now() < end {
                let call = shared.store.release(&operation, token);
                use onlyonce_core::ReleaseOutcome::{Applied, Fenced};
                // Absent is no end: the claim may still be on its way.
                if let Ok(Applied | Fenced) =
                    shared.bounded("release", shared.limits.store_timeout, call).await
                {
                    return;
                }
                sleep(pause).await;
                pause = (pause * 2).min(Duration::from_secs(1));
            }
        });
    }
}

/// Stands while a claim is under way: dropped unanswered, the claim is released.
struct SentClaim<'a> {
    shared: &'a Arc<Shared>,
    operation: &'a Operation,
    request: &'a ClaimRequest,
    answered: bool,
}

impl Drop for SentClaim<'_> {
    fn drop(&mut self) {
        if !self.answered {
            self.shared.release_in_background(self.operation, self.request.token, self.request.lease);
        }
    }
}

/// Since when the contact with a network store is unbroken. Start-up counts as a break.
#[derive(Debug)]
pub(crate) struct Contact {
    unbroken_since: Option<Duration>,
}

impl Contact {
    pub(crate) fn new() -> Self {
        Self { unbroken_since: None }
    }

    fn note(&mut self, ok: bool, now: Duration) {
        self.unbroken_since = if ok { self.unbroken_since.or(Some(now)) } else { None };
    }

    pub(crate) fn unbroken_for(&self, lease: Duration, now: Duration) -> bool {
        self.unbroken_since.is_some_and(|since| now.saturating_sub(since) >= lease)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contact_counts_from_the_first_answer_after_a_break() {
        let secs = Duration::from_secs;
        let mut contact = Contact::new();
        assert!(!contact.unbroken_for(secs(0), secs(1000)));
        contact.note(true, secs(10));
        contact.note(true, secs(20));
        assert!(contact.unbroken_for(secs(30), secs(40)));
        contact.note(false, secs(41));
        contact.note(true, secs(42));
        assert!(!contact.unbroken_for(secs(30), secs(71)));
        assert!(contact.unbroken_for(secs(30), secs(72)));
    }
}
