//! From a request to an answer or an execution: cache, in-flight table, store, in this order.

use std::sync::atomic::Ordering;
use std::time::Duration;

use onlyonce_core::{
    ClaimOutcome, ClaimRequest, Fingerprint, Operation, RenewOutcome, StoreError, StoreErrorKind, StoredReply,
};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout_at};

use crate::counters::add;
use crate::execution::{Execution, Live};
use crate::flight::{End, Flight, Leader, Phase, Place};
use crate::idempotency::Idempotency;
use crate::outcome::{Begin, EngineError};
use crate::random;

/// Claims whose answers came too late to be worked on, before the store counts as too slow.
const LATE_CLAIMS_MAX: u32 = 3;

/// What to do next with a follower.
enum Next {
    Answer(Result<Begin, EngineError>),
    AskAgain,
    Lead(Leader),
}

impl Idempotency {
    /// Asks for the right to run this operation.
    ///
    /// Waits up to the policy's `wait` where somebody else is at work. The answer Acquired must be ended.
    ///
    /// # Errors
    /// [`EngineError`]: infrastructure only; nothing is held.
    ///
    /// # Cancellation
    /// Safe: a claim that was sent is released in the background.
    pub async fn begin(&self, operation: &Operation) -> Result<Begin, EngineError> {
        let answer = self.begin_uncounted(operation).await;
        let counters = &self.shared.counters;
        match &answer {
            Ok(Begin::InProgress { .. }) => add(&counters.in_progress),
            Ok(Begin::Mismatch { .. }) => add(&counters.mismatches),
            Err(EngineError::Overloaded) => add(&counters.overloaded),
            _ => {}
        }
        answer
    }

    /// The answer from memory, if it is there: for callers that would rather not start a task for a replay.
    pub fn replay_from_memory(&self, operation: &Operation) -> Option<Begin> {
        let shared = &self.shared;
        let hit = shared.cache.find(operation.id(), shared.clock.boot())?;
        Some(if hit.fingerprint == *operation.fingerprint() {
            add(&shared.counters.replayed_from_memory);
            Begin::Completed(hit.stored)
        } else {
            Begin::Mismatch { stored: hit.fingerprint }
        })
    }

    async fn begin_uncounted(&self, operation: &Operation) -> Result<Begin, EngineError> {
        let wait_until = Instant::now() + self.policy.wait;
        loop {
            if self.shared.closing.load(Ordering::Acquire) {
                return Err(EngineError::ShuttingDown);
            }
            if let Some(answer) = self.replay_from_memory(operation) {
                return Ok(answer);
            }
            let next = match self.shared.flights.join(operation) {
                Place::Leader(leader) => Next::Lead(leader),
                Place::Follower(flight, phase) => self.follow(operation, &flight, phase, wait_until).await,
            };
            match next {
                Next::Answer(answer) => return answer,
                Next::AskAgain => {}
                Next::Lead(leader) => return self.lead(operation, leader, wait_until).await,
            }
        }
    }

    /// Watches another caller's flight of the same operation.
    async fn follow(
        &self,
        operation: &Operation,
        flight: &std::sync::Arc<Flight>,
        mut phase: watch::Receiver<Phase>,
        wait_until: Instant,
    ) -> Next {
        // Its answer is due within the store timeout, and is as good as an answer of our own.
        let claimed = match phase.wait_for(|phase| !matches!(phase, Phase::Claiming)).await {
            Ok(phase) => phase.clone(),
            Err(_) => return Next::AskAgain,
        };
        let live = match claimed {
            Phase::Claiming => return Next::AskAgain,
            Phase::Ended(end) => return self.after(operation, flight, end, wait_until),
            Phase::Working(live) => live,
        };
        if flight.fingerprint != *operation.fingerprint() {
            return Next::Answer(Ok(Begin::Mismatch { stored: flight.fingerprint }));
        }
        if live.left().is_zero() {
            // A dead lease: the store knows better.
            return self.shared.flights.replace(operation, flight).map_or(Next::AskAgain, Next::Lead);
        }
        let in_progress = || {
            let age = self.shared.clock.boot().saturating_sub(live.started);
            Next::Answer(Ok(Begin::InProgress { retry_after: retry_after(age, live.left()), last: None }))
        };
        let Some(_place) = Waiting::enter(self, wait_until) else { return in_progress() };
        let lease_end = Instant::now() + live.left();
        match timeout_at(wait_until.min(lease_end), phase.wait_for(|phase| matches!(phase, Phase::Ended(_))))
            .await
        {
            Ok(Ok(ended)) => match &*ended {
                Phase::Ended(end) => self.after(operation, flight, end.clone(), wait_until),
                _ => Next::AskAgain,
            },
            Ok(Err(_)) => Next::AskAgain,
            // Renewed in the meantime, or a dead lease: look again.
            Err(_) if Instant::now() < wait_until => Next::AskAgain,
            Err(_) => in_progress(),
        }
    }

    /// A follower's answer once the flight has ended.
    fn after(&self, operation: &Operation, flight: &Flight, end: End, wait_until: Instant) -> Next {
        let stored_print = match &end {
            End::Answered(stored, _) => *stored,
            End::Completed(_) => flight.fingerprint,
            End::Released(_) | End::Failed(_) | End::Abandoned => *operation.fingerprint(),
        };
        if stored_print != *operation.fingerprint() {
            return Next::Answer(Ok(Begin::Mismatch { stored: stored_print }));
        }
        match end {
            End::Completed(stored) => Next::Answer(Ok(self.replayed(stored))),
            End::Answered(_, ClaimOutcome::Completed(stored)) => Next::Answer(Ok(self.replayed(stored))),
            End::Answered(_, ClaimOutcome::InProgress { .. }) if Instant::now() < wait_until => {
                Next::AskAgain
            }
            End::Answered(_, outcome) => match without_execution(&outcome) {
                Some(answer) => Next::Answer(Ok(answer)),
                None => Next::AskAgain,
            },
            // Another request under this key was given back: the key is free for this one.
            End::Released(_) if flight.fingerprint != *operation.fingerprint() => Next::AskAgain,
            End::Released(_) if flight.take_succession() => Next::AskAgain,
            End::Released(last) => {
                Next::Answer(Ok(Begin::InProgress { retry_after: Duration::from_secs(1), last }))
            }
            End::Failed(error) => Next::Answer(Err(error)),
            End::Abandoned => Next::AskAgain,
        }
    }

    /// Asks the store, for this caller and its followers.
    async fn lead(
        &self,
        operation: &Operation,
        leader: Leader,
        wait_until: Instant,
    ) -> Result<Begin, EngineError> {
        let shared = &self.shared;
        let mut pause = Duration::from_millis(20);
        let mut too_late = 0;
        loop {
            let Ok(slot) = shared.slots.clone().try_acquire_owned() else {
                return Err(leader.fail(EngineError::Overloaded));
            };
            let sent_at = shared.clock.boot();
            let request = self.claim_request(sent_at);
            let outcome = match shared.claim(operation, &request).await {
                Ok(outcome) => outcome,
                Err(error) => return Err(leader.fail(error.into())),
            };
            match outcome {
                ClaimOutcome::Acquired(lease) => {
                    let live = Live::new(shared, operation, &self.policy, lease, sent_at);
                    // Work starts only with more than half of the lease left.
                    if live.left() > self.policy.lease / 2
                        || matches!(live.renew().await, Ok(RenewOutcome::Renewed))
                    {
                        return Ok(Begin::Acquired(Execution::new(live, leader, slot)));
                    }
                    shared.release_in_background(operation, request.token, request.lease);
                    too_late += 1;
                    if too_late == LATE_CLAIMS_MAX {
                        let error = StoreError::new(StoreErrorKind::Timeout, "claim")
                            .with_detail("answers take longer than half of the lease; nothing was run");
                        return Err(leader.fail(error.into()));
                    }
                }
                // Another process works on it: poll, with jitter, ever more rarely.
                ClaimOutcome::InProgress { .. } if Instant::now() + pause < wait_until => {
                    drop(slot);
                    let Some(_place) = Waiting::enter(self, wait_until) else {
                        return Ok(self.end_with_answer(operation, leader, outcome));
                    };
                    let pause_ms = pause.as_millis() as u64;
                    sleep(Duration::from_millis(pause_ms / 2 + random::jitter(pause_ms))).await;
                    pause = (pause * 3 / 2).min(Duration::from_secs(1));
                }
                outcome => return Ok(self.end_with_answer(operation, leader, outcome)),
            }
        }
    }

    fn end_with_answer(&self, operation: &Operation, leader: Leader, outcome: ClaimOutcome) -> Begin {
        let stored_print: Fingerprint = match &outcome {
            ClaimOutcome::Mismatch { stored } => *stored,
            _ => *operation.fingerprint(),
        };
        leader.end(End::Answered(stored_print, outcome.clone()));
        match outcome {
            ClaimOutcome::Completed(stored) => {
                let shared = &self.shared;
                shared.cache.put(operation.id(), operation.fingerprint(), &stored, shared.clock.boot());
                self.replayed(stored)
            }
            outcome => without_execution(&outcome).expect("Acquired and Completed are taken care of"),
        }
    }

    fn replayed(&self, stored: StoredReply) -> Begin {
        add(&self.shared.counters.replayed_from_store);
        Begin::Completed(stored)
    }

    fn claim_request(&self, now: Duration) -> ClaimRequest {
        let policy = &self.policy;
        ClaimRequest {
            token: random::token(),
            lease: policy.lease,
            retention: policy.retention,
            on_lease_end: policy.on_lease_end,
            takeover_now: !self.shared.network || self.shared.contact.lock().unbroken_for(policy.lease, now),
            max_attempts: policy.max_attempts,
        }
    }
}

/// The answers that need nothing but the outcome.
fn without_execution(outcome: &ClaimOutcome) -> Option<Begin> {
    match outcome {
        ClaimOutcome::InProgress { lease_left, age } => {
            Some(Begin::InProgress { retry_after: retry_after(*age, *lease_left), last: None })
        }
        ClaimOutcome::Mismatch { stored } => Some(Begin::Mismatch { stored: *stored }),
        ClaimOutcome::Unknown { since } => Some(Begin::Unknown { since: *since }),
        ClaimOutcome::Completed(stored) => Some(Begin::Completed(stored.clone())),
        ClaimOutcome::Acquired(_) => None,
    }
}

/// Whole seconds from 1 to min(lease left, 5), growing with the age of the work, jittered by a second, so that a
/// crowd of duplicates does not come back as one.
fn retry_after(age: Duration, lease_left: Duration) -> Duration {
    let most = lease_left.as_secs().clamp(1, 5);
    Duration::from_secs((1 + age.as_secs() / 4 + random::jitter(2)).clamp(1, most))
}

/// A place among those who wait; there are only so many.
struct Waiting<'a>(&'a Idempotency);

impl<'a> Waiting<'a> {
    /// `None` when the time is over or there is no place left.
    fn enter(idem: &'a Idempotency, wait_until: Instant) -> Option<Self> {
        if Instant::now() >= wait_until {
            return None;
        }
        let waiting = idem.shared.waiting.fetch_add(1, Ordering::Relaxed);
        let place = Self(idem);
        (waiting < idem.shared.limits.max_waiters).then_some(place)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.shared.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retry_after_stays_between_one_second_and_the_lease() {
        let secs = Duration::from_secs;
        for (age, left, low, high) in
            [(0, 30, 1, 2), (8, 30, 3, 4), (600, 30, 5, 5), (600, 3, 3, 3), (0, 0, 1, 1)]
        {
            for _ in 0..50 {
                let after = retry_after(secs(age), secs(left));
                assert!((secs(low)..=secs(high)).contains(&after), "{after:?} at age {age} with {left} left");
            }
        }
    }
}
