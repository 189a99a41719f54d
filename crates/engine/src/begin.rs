//! From a request to an answer or an execution: cache, in-flight table, store, in this order.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use onlyonce_core::{ClaimOutcome, Mutant, Operation, Origin, StoreError, StoreErrorKind, mutant};
use tokio::time::{Instant, sleep_until, timeout, timeout_at};

use crate::counters::add;
use crate::execution::{Execution, Live};
use crate::flight::{End, Flight, Leader, Phase, Place, Sighting};
use crate::idempotency::Idempotency;
use crate::outcome::{Begin, EngineError};
use crate::random::Draws;
use crate::store_calls::Claim;

/// Claims whose answers came too late to be worked on, before the store counts as too slow.
const LATE_CLAIMS_MAX: u32 = 3;

/// How long the end of a recording is waited for before the store is asked.
const RECORDING_PATIENCE: Duration = Duration::from_millis(50);

/// The first pause of a caller that polls for another process.
const POLL_FIRST: Duration = Duration::from_millis(20);

/// What a caller knows of its own time.
#[derive(Clone, Copy, Debug)]
struct Patience {
    /// When it asked, on the boot clock: no answer may be older.
    asked_at: Duration,
    /// For how long it waits for another one's work.
    until: Instant,
}

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
        Some(if hit.fingerprint == *operation.fingerprint() || mutant(Mutant::CacheBeforeFingerprint) {
            add(&shared.counters.replayed_from_memory);
            Begin::Completed(hit.stored)
        } else {
            Begin::Mismatch { stored: hit.fingerprint, origin: hit.stored.origin }
        })
    }

    async fn begin_uncounted(&self, operation: &Operation) -> Result<Begin, EngineError> {
        let patience =
            Patience { asked_at: self.shared.clock.boot(), until: Instant::now() + self.policy.wait };
        loop {
            if self.shared.closing.load(Ordering::Acquire) {
                return Err(EngineError::ShuttingDown);
            }
            if let Some(answer) = self.replay_from_memory(operation) {
                return Ok(answer);
            }
            let next = match self.shared.flights.join(operation) {
                Place::Leader(leader) => Next::Lead(leader),
                Place::Follower(flight) => self.follow(operation, &flight, patience).await,
            };
            match next {
                Next::Answer(answer) => return answer,
                Next::AskAgain => {}
                Next::Lead(leader) => return self.lead(operation, leader, patience.until).await,
            }
        }
    }

    /// Watches another caller's flight of the same operation.
    async fn follow(&self, operation: &Operation, flight: &Arc<Flight>, patience: Patience) -> Next {
        let same = flight.fingerprint == *operation.fingerprint();
        if matches!(flight.phase(), Phase::Claiming) {
            // Its answer is due within the store timeout, and saves a question of our own, unless it is of a time before.
            let Some(_place) = Waiting::take(self) else { return crowded_out(same, &self.shared.random) };
            flight.until(|phase| (!matches!(phase, Phase::Claiming)).then_some(())).await;
        }
        let now = self.shared.clock.boot();
        let phase_now = flight.phase();
        if same && matches!(&phase_now, Phase::Working(live) if live.is_recording()) {
            return self.after_recording(operation, flight, patience).await;
        }
        let (age, left, origin) = match &phase_now {
            Phase::Claiming => return Next::AskAgain,
            Phase::Ended(end) => return self.after(operation, flight, end.clone(), patience),
            Phase::Elsewhere(seen) => (seen.age + now.saturating_sub(seen.at), seen.lease_left, &seen.origin),
            Phase::Working(live) if live.is_lost() => {
                // A dead lease: the store knows better.
                return self.shared.flights.replace(operation, flight).map_or(Next::AskAgain, Next::Lead);
            }
            Phase::Working(live) => (now.saturating_sub(live.started), live.left(), &flight.origin),
        };
        if !same {
            let origin = origin.clone();
            return Next::Answer(Ok(Begin::Mismatch { stored: flight.fingerprint, origin }));
        }
        let origin = origin.clone();
        let in_progress = || {
            let retry_after = retry_after(age, left, &self.shared.random);
            Next::Answer(Ok(Begin::InProgress { retry_after, last: None, origin: origin.clone() }))
        };
        let Some(place) = Waiting::enter(self, patience.until) else {
            return self.after_waiting(operation, flight, patience, in_progress).await;
        };
        let elsewhere = matches!(phase_now, Phase::Elsewhere(_));
        // A lease may have been renewed by its end, or be dead: then look again. Polling sees that by itself.
        let until = if elsewhere { patience.until } else { patience.until.min(Instant::now() + left) };
        drop(phase_now);
        let changed = flight.until(|phase| match phase {
            Phase::Ended(end) => Some(Some(end.clone())),
            Phase::Working(_) if elsewhere => Some(None),
            Phase::Claiming | Phase::Elsewhere(_) | Phase::Working(_) => None,
        });
        match timeout_at(until, changed).await {
            Ok(Some(end)) => self.after(operation, flight, end, patience),
            Ok(None) => Next::AskAgain,
            Err(_) if Instant::now() < patience.until => Next::AskAgain,
            Err(_) => {
                drop(place);
                self.after_waiting(operation, flight, patience, in_progress).await
            }
        }
    }

    /// A follower's answer when it waits no longer: in progress, if that was so at some time since it asked. What was seen before
    /// may be over, and its reply told to others elsewhere: one of those who wait asks the store.
    async fn after_waiting(
        &self,
        operation: &Operation,
        flight: &Arc<Flight>,
        patience: Patience,
        in_progress: impl Fn() -> Next,
    ) -> Next {
        match flight.phase() {
            Phase::Working(live) if live.is_recording() => {
                self.after_recording(operation, flight, patience).await
            }
            Phase::Elsewhere(seen) if seen.at < patience.asked_at => match self.replay_from_memory(operation)
            {
                // Another one asked.
                Some(answer) => Next::Answer(Ok(answer)),
                None => self.shared.flights.replace(operation, flight).map_or(Next::AskAgain, Next::Lead),
            },
            Phase::Ended(end) => self.after(operation, flight, end, patience),
            Phase::Claiming | Phase::Elsewhere(_) | Phase::Working(_) => in_progress(),
        }
    }

    /// A follower's answer while the reply is being recorded. It may be on record already, and told to others elsewhere: what
    /// this process knows is not enough to say that it is in progress.
    async fn after_recording(&self, operation: &Operation, flight: &Arc<Flight>, patience: Patience) -> Next {
        let Some(_place) = Waiting::take(self) else { return crowded_out(true, &self.shared.random) };
        let ended = flight.until(|phase| match phase {
            Phase::Ended(end) => Some(end.clone()),
            Phase::Claiming | Phase::Elsewhere(_) | Phase::Working(_) => None,
        });
        match timeout(RECORDING_PATIENCE, ended).await {
            Ok(end) => self.after(operation, flight, end, patience),
            Err(_) => self.shared.flights.replace(operation, flight).map_or(Next::AskAgain, Next::Lead),
        }
    }

    /// A follower's answer once the flight has ended.
    fn after(&self, operation: &Operation, flight: &Flight, end: End, patience: Patience) -> Next {
        let on_record = match &end {
            End::Answered(ClaimOutcome::Mismatch { stored, .. }, _) => Some(*stored),
            End::Answered(..) | End::Completed(_) => Some(flight.fingerprint),
            End::Released(_) | End::Failed(_) | End::Abandoned => None,
        };
        if let Some(stored) = on_record.filter(|stored| stored != operation.fingerprint()) {
            let origin = match end {
                End::Completed(stored) => stored.origin,
                End::Answered(outcome, _) => origin_of(outcome),
                End::Released(_) | End::Failed(_) | End::Abandoned => None,
            };
            return Next::Answer(Ok(Begin::Mismatch { stored, origin }));
        }
        match end {
            End::Completed(stored) | End::Answered(ClaimOutcome::Completed(stored), _) => {
                add(&self.shared.counters.replayed_from_memory);
                Next::Answer(Ok(Begin::Completed(stored)))
            }
            // The leader's key it was not: it is this caller's.
            End::Answered(ClaimOutcome::Mismatch { .. }, _) => Next::AskAgain,
            // Of a time before this caller asked: since then it may have been completed, and told to others elsewhere.
            End::Answered(_, sent_at) if sent_at < patience.asked_at => Next::AskAgain,
            // Too little time left to be the next one that polls: or a crowd would do so one after the other.
            End::Answered(ClaimOutcome::InProgress { .. }, _)
                if Instant::now() + POLL_FIRST < patience.until =>
            {
                Next::AskAgain
            }
            End::Answered(outcome, _) => match without_execution(&outcome, &self.shared.random) {
                Some(answer) => Next::Answer(Ok(answer)),
                None => Next::AskAgain,
            },
            // Another request under this key was given back: the key is free for this one.
            End::Released(_) if flight.fingerprint != *operation.fingerprint() => Next::AskAgain,
            End::Released(_) if flight.take_succession() => Next::AskAgain,
            End::Released(last) => {
                let retry_after = retry_after(Duration::ZERO, Duration::MAX, &self.shared.random);
                let origin = flight.origin.clone();
                Next::Answer(Ok(Begin::InProgress { retry_after, last, origin }))
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
        let mut claim = Claim::new(shared, operation, &self.policy);
        let mut pause = POLL_FIRST;
        let mut too_late = 0;
        loop {
            let slot = match shared.take_slot() {
                Ok(slot) => slot,
                Err(error) => return Err(leader.fail(error)),
            };
            let (outcome, sent_at) = match claim.send().await {
                Ok(answered) => answered,
                Err(error) => return Err(leader.fail(error.into())),
            };
            match outcome {
                ClaimOutcome::Acquired(lease) => {
                    let live = Live::new(shared, operation, &self.policy, lease, sent_at);
                    if live.ensure_half().await {
                        claim.hand_over();
                        return Ok(Begin::Acquired(Execution::new(live, leader, slot)));
                    }
                    too_late += 1;
                    if too_late == LATE_CLAIMS_MAX {
                        let error = StoreError::new(StoreErrorKind::Timeout, "claim")
                            .with_detail("answers take longer than half of the lease; nothing was run");
                        return Err(leader.fail(error.into()));
                    }
                }
                // Another process works on it: poll, with jitter, ever more rarely, and a last time at the end.
                ClaimOutcome::InProgress { lease_left, age, ref origin } if Instant::now() < wait_until => {
                    drop(slot);
                    leader.elsewhere(Sighting { at: sent_at, age, lease_left, origin: origin.clone() });
                    let Some(_place) = Waiting::enter(self, wait_until) else {
                        return Ok(self.end_with_answer(operation, leader, outcome, sent_at));
                    };
                    let pause_ms = pause.as_millis() as u64;
                    let next =
                        Instant::now() + Duration::from_millis(pause_ms / 2 + shared.random.jitter(pause_ms));
                    sleep_until(next.min(wait_until)).await;
                    pause = (pause * 3 / 2).min(Duration::from_secs(1));
                }
                outcome => return Ok(self.end_with_answer(operation, leader, outcome, sent_at)),
            }
        }
    }

    fn end_with_answer(
        &self,
        operation: &Operation,
        leader: Leader,
        outcome: ClaimOutcome,
        sent_at: Duration,
    ) -> Begin {
        if let ClaimOutcome::Completed(stored) = &outcome {
            // Before the flight ends, so that nobody in between asks the store again.
            self.shared.cache.put(operation.id(), operation.fingerprint(), stored, sent_at);
        }
        leader.end(End::Answered(outcome.clone(), sent_at));
        match outcome {
            ClaimOutcome::Completed(stored) => {
                add(&self.shared.counters.replayed_from_store);
                Begin::Completed(stored)
            }
            outcome => without_execution(&outcome, &self.shared.random)
                .expect("Acquired and Completed are taken care of"),
        }
    }
}

/// The answer to a follower for whom there is no place to wait for the claim before it.
fn crowded_out(same: bool, random: &Draws) -> Next {
    Next::Answer(if same {
        let retry_after = retry_after(Duration::ZERO, Duration::MAX, random);
        Ok(Begin::InProgress { retry_after, last: None, origin: None })
    } else {
        // In progress or a mismatch: nobody knows yet.
        Err(EngineError::Overloaded)
    })
}

/// The request that the record is of.
fn origin_of(outcome: ClaimOutcome) -> Option<Origin> {
    match outcome {
        ClaimOutcome::InProgress { origin, .. }
        | ClaimOutcome::Mismatch { origin, .. }
        | ClaimOutcome::Unknown { origin, .. } => origin,
        ClaimOutcome::Completed(stored) => stored.origin,
        ClaimOutcome::Acquired(_) => None,
    }
}

/// The answers that need nothing but the outcome.
fn without_execution(outcome: &ClaimOutcome, random: &Draws) -> Option<Begin> {
    match outcome {
        ClaimOutcome::InProgress { lease_left, age, origin } => {
            let retry_after = retry_after(*age, *lease_left, random);
            Some(Begin::InProgress { retry_after, last: None, origin: origin.clone() })
        }
        ClaimOutcome::Mismatch { stored, origin } => {
            Some(Begin::Mismatch { stored: *stored, origin: origin.clone() })
        }
        ClaimOutcome::Unknown { since, origin } => {
            Some(Begin::Unknown { since: *since, origin: origin.clone() })
        }
        ClaimOutcome::Completed(stored) => Some(Begin::Completed(stored.clone())),
        ClaimOutcome::Acquired(_) => None,
    }
}

/// Whole seconds from 1 to min(lease left, 5), growing with the age of the work, jittered by a second, so that a
/// crowd of duplicates does not come back as one.
fn retry_after(age: Duration, lease_left: Duration, random: &Draws) -> Duration {
    let most = lease_left.as_secs().clamp(1, 5);
    Duration::from_secs((1 + age.as_secs() / 4 + random.jitter(2)).clamp(1, most))
}

/// A place among those who wait; there are only so many.
struct Waiting<'a>(&'a Idempotency);

impl<'a> Waiting<'a> {
    /// `None` when the time is over or there is no place left.
    fn enter(idem: &'a Idempotency, wait_until: Instant) -> Option<Self> {
        if Instant::now() < wait_until { Self::take(idem) } else { None }
    }

    fn take(idem: &'a Idempotency) -> Option<Self> {
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
    use crate::random::SystemRandom;

    #[test]
    fn retry_after_stays_between_one_second_and_the_lease() {
        let secs = Duration::from_secs;
        let random = Draws::new(Arc::new(SystemRandom));
        for (age, left, low, high) in
            [(0, 30, 1, 2), (8, 30, 3, 4), (600, 30, 5, 5), (600, 3, 3, 3), (0, 0, 1, 1)]
        {
            for _ in 0..50 {
                let after = retry_after(secs(age), secs(left), &random);
                assert!((secs(low)..=secs(high)).contains(&after), "{after:?} at age {age} with {left} left");
            }
        }
    }
}
