//! Takes the steps of a history on a real store.

use std::time::Duration;

use onlyonce_core::{
    ClaimOutcome, ClaimRequest, CompleteOutcome, Completion, Fingerprint, LeaseToken, Operation,
    OperatorAction, OperatorOutcome, PurgeRequest, RecordView, ReleaseOutcome, RenewOutcome, Reply,
    StoredReply, Target,
};
use tokio::time::Instant;

use super::history::{KEYS, Step, Ticks, policy_of};
use super::invariants::Ledger;
use super::spec::{ATTEMPT_GIVEN, Answer, Spec};
use crate::harness::answered;
use crate::{Expiry, Harness, Time};

/// What histories depend on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Traits {
    pub(super) time: Time,
    pub(super) expiry: Expiry,
    pub(super) survives_restart: bool,
    pub(super) admin: bool,
}

pub(super) fn traits_of(h: &Harness) -> Traits {
    Traits {
        time: h.time(),
        expiry: h.expiry(),
        survives_restart: h.survives_restart(),
        admin: h.admin_if_any().is_some(),
    }
}

/// One history on its way.
pub(super) struct Run<'h> {
    h: &'h Harness,
    traits: Traits,
    spec: Spec,
    ledger: Ledger,
    started: Instant,
}

impl<'h> Run<'h> {
    pub(super) fn new(h: &'h Harness, spec: Spec) -> Self {
        let traits = traits_of(h);
        Self { h, traits, spec, ledger: Ledger::default(), started: Instant::now() }
    }

    /// Takes one step on the store and in the model, and compares.
    pub(super) async fn step(&mut self, step: &Step) {
        let now = self.spec.now;
        let told = self.traits.time == Time::Told;
        let before = if told { self.views().await } else { Vec::new() };
        let answer = self.take(step).await;
        if matches!(step, Step::Restart) && !self.traits.survives_restart {
            self.ledger.forget();
        }
        let expected = self.spec.apply(step);
        if self.is_late() {
            // What was answered may be of a later moment than the model's.
            return;
        }
        self.ledger.check(step, &answer, now);
        assert_eq!(answer, expected, "the answer to {step:?}, and the model's");
        let after = self.views().await;
        if self.is_late() {
            return;
        }
        if is_refusal(&answer) && told {
            assert_eq!(before, after, "{step:?} was answered {answer:?} and changed something");
        }
        self.assert_views(&after);
    }

    /// Real time has run away from the history: its ends and moments may have crossed.
    pub(super) fn is_late(&self) -> bool {
        match self.traits.time {
            Time::Told => false,
            Time::Real { unit } => self.started.elapsed() > unit / 8 * (2 * self.spec.now + 1),
        }
    }

    async fn take(&self, step: &Step) -> Answer {
        let (h, store) = (self.h, self.h.store());
        match *step {
            Step::Claim { key, owner, request, lease, takeover_now, max_attempts } => {
                let lease = self.time(lease);
                let ask = ClaimRequest {
                    token: token(key, owner),
                    lease,
                    retention: h.retention(),
                    on_lease_end: policy_of(owner),
                    takeover_now,
                    max_attempts,
                };
                let answer = answered(store.claim(&operation(key, request), &ask).await);
                if let ClaimOutcome::Acquired(granted) = answer {
                    assert_eq!((granted.token, granted.duration), (ask.token, ask.lease));
                }
                self.claim_answer(answer)
            }
            Step::Renew { key, owner, lease } => {
                match answered(store.renew(&operation(key, 0), token(key, owner), self.time(lease)).await) {
                    RenewOutcome::Renewed => Answer::Renewed,
                    RenewOutcome::Ended => Answer::Ended,
                    RenewOutcome::Fenced => Answer::Fenced { reply: None },
                    RenewOutcome::Gone => Answer::Gone,
                }
            }
            Step::Complete { key, owner, request, reply, retention } => {
                let completion = Completion {
                    token: token(key, owner),
                    attempt: ATTEMPT_GIVEN,
                    reply: reply_of(reply),
                    retention: self.time(retention),
                };
                self.end_answer(&answered(store.complete(&operation(key, request), &completion).await))
            }
            Step::Release { key, owner } => {
                released(answered(store.release(&operation(key, 0), token(key, owner)).await))
            }
            Step::MarkUnknown { key, owner } => {
                released(answered(store.mark_unknown(&operation(key, 0), token(key, owner)).await))
            }
            Step::Advance { by } => {
                let by = match self.traits.time {
                    Time::Told => self.time(by),
                    // What the steps so far took is not waited for again.
                    Time::Real { .. } => self.time(self.spec.now + by).saturating_sub(self.started.elapsed()),
                };
                h.advance(by).await;
                Answer::Silent
            }
            Step::Purge { hold_retention } => {
                let request = PurgeRequest { limit: 100, hold_retention: self.time(hold_retention) };
                let purged = answered(store.purge(&request).await);
                assert!(!purged.more && !purged.paused);
                Answer::Purged { removed: purged.removed }
            }
            Step::Restart => {
                drop(store);
                h.restart().await;
                Answer::Silent
            }
            Step::Resolve { key, reply, retention, force } => {
                let (id, reply) = (operation(key, 0).id().clone(), reply_of(reply));
                let admin = h.admin();
                let action = by(if force { Target::Any } else { Target::Undecided });
                self.operated(&answered(admin.resolve(&id, &reply, self.time(retention), &action).await))
            }
            Step::Free { key, target } => {
                let admin = h.admin();
                self.operated(&answered(admin.free(operation(key, 0).id(), &by(target)).await))
            }
        }
    }

    fn claim_answer(&self, answer: ClaimOutcome) -> Answer {
        match answer {
            ClaimOutcome::Acquired(lease) => Answer::Acquired { attempt: lease.attempt },
            ClaimOutcome::InProgress { lease_left, age, .. } => {
                Answer::InProgress { left: self.ticks(lease_left), age: self.ticks(age) }
            }
            ClaimOutcome::Completed(stored) => {
                Answer::Completed { reply: number_of(&stored.reply), left: self.ticks(stored.remaining) }
            }
            ClaimOutcome::Mismatch { stored, .. } => {
                let request = (0..=1).find(|n| *operation(0, *n).fingerprint() == stored);
                Answer::Mismatch { request: request.expect("the fingerprint of a request of the history") }
            }
            ClaimOutcome::Unknown { .. } => Answer::Unknown,
        }
    }

    fn end_answer(&self, answer: &CompleteOutcome) -> Answer {
        let told = |stored: &StoredReply| (number_of(&stored.reply), self.ticks(stored.remaining));
        match answer {
            CompleteOutcome::Stored(stored) => {
                let (reply, left) = told(stored);
                Answer::Stored { reply, left }
            }
            CompleteOutcome::StoredAnew(stored) => {
                let (reply, left) = told(stored);
                Answer::StoredAnew { reply, left }
            }
            CompleteOutcome::AlreadyStored(stored) => {
                let (reply, left) = told(stored);
                Answer::AlreadyStored { reply, left }
            }
            CompleteOutcome::Fenced(stored) => {
                Answer::Fenced { reply: stored.as_ref().map(|stored| number_of(&stored.reply)) }
            }
        }
    }

    fn operated(&self, answer: &OperatorOutcome) -> Answer {
        match answer {
            OperatorOutcome::Done(_) => Answer::Done,
            OperatorOutcome::Absent => Answer::Absent,
            OperatorOutcome::LiveLease { left } => Answer::LiveLease { left: self.ticks(*left) },
            OperatorOutcome::Completed => Answer::HasReply,
            OperatorOutcome::NoReply => Answer::NoReply,
        }
    }

    async fn views(&self) -> Vec<Option<RecordView>> {
        let mut views = Vec::new();
        if let Some(admin) = self.h.admin_if_any() {
            for key in 0..KEYS {
                views.push(answered(admin.show(operation(key, 0).id()).await));
            }
        }
        views
    }

    fn assert_views(&self, shown: &[Option<RecordView>]) {
        for (key, shown) in shown.iter().enumerate() {
            let expected = self.spec.view(key);
            if expected.is_some_and(|view| view.expired) && self.traits.expiry == Expiry::ByStore {
                continue;
            }
            let seen = shown.as_ref().map(|view| {
                let request = (0..=1).find(|n| *operation(0, *n).fingerprint() == view.fingerprint);
                super::spec::View {
                    state: view.state,
                    attempt: view.attempt,
                    request: request.expect("the fingerprint of a request of the history"),
                    lease_left: view.lease_left.map(|left| self.ticks(left)),
                    reply: view.reply.as_ref().map(number_of),
                    expired: expected.is_some_and(|view| view.expired),
                }
            });
            assert_eq!(seen, expected, "operation {key} as an operator sees it");
        }
    }

    fn time(&self, ticks: Ticks) -> Duration {
        self.h.unit() / 4 * ticks
    }

    // Rounded to the nearest: a store may count in milliseconds, and real time runs on a little.
    fn ticks(&self, time: Duration) -> Ticks {
        let tick = self.h.unit() / 4;
        let ticks = (time + tick / 2).as_nanos() / tick.as_nanos();
        Ticks::try_from(ticks).expect("histories are short")
    }
}

/// Whether the answer says that nothing was changed.
fn is_refusal(answer: &Answer) -> bool {
    match answer {
        Answer::InProgress { .. }
        | Answer::Completed { .. }
        | Answer::Mismatch { .. }
        | Answer::Unknown
        | Answer::Ended
        | Answer::Gone
        | Answer::AlreadyStored { .. }
        | Answer::Absent
        | Answer::Fenced { .. }
        | Answer::LiveLease { .. }
        | Answer::HasReply
        | Answer::NoReply => true,
        Answer::Acquired { .. }
        | Answer::Renewed
        | Answer::Stored { .. }
        | Answer::StoredAnew { .. }
        | Answer::Applied
        | Answer::Purged { .. }
        | Answer::Done
        | Answer::Silent => false,
    }
}

fn released(answer: ReleaseOutcome) -> Answer {
    match answer {
        ReleaseOutcome::Applied => Answer::Applied,
        ReleaseOutcome::Fenced => Answer::Fenced { reply: None },
        ReleaseOutcome::Absent => Answer::Absent,
    }
}

fn operation(key: usize, request: u8) -> Operation {
    crate::harness::operation("history", &format!("key {key}")).with_fingerprint(Fingerprint::of([request]))
}

fn token(key: usize, owner: usize) -> LeaseToken {
    let mut bytes = [0xab; 16];
    (bytes[0], bytes[1]) = (key as u8, owner as u8);
    LeaseToken::from_bytes(bytes)
}

fn reply_of(number: u16) -> Reply {
    Reply::new(200 + number % 300, number.to_be_bytes().to_vec())
}

fn number_of(reply: &Reply) -> u16 {
    let bytes: [u8; 2] = reply.body().as_ref().try_into().expect("a body of the history");
    let number = u16::from_be_bytes(bytes);
    assert_eq!(reply.status(), 200 + number % 300);
    number
}

fn by(target: Target) -> OperatorAction {
    OperatorAction { actor: "operator".into(), reason: "a history".into(), target }
}
