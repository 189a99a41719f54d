//! The reference model: what the architecture says, in the plainest words, and with no help from the product.

use onlyonce_core::{OnLeaseEnd, StateName, Target};

use super::driver::Traits;
use super::history::{KEYS, Step, Ticks, policy_of};
use crate::Expiry;

/// The state of the world, and the answers that it gives. Times are ticks since the start.
#[derive(Clone, Debug)]
pub(super) struct Spec {
    traits: Traits,
    pub(super) now: Ticks,
    records: [Option<Rec>; KEYS],
}

#[derive(Clone, Debug)]
struct Rec {
    // None: an operator's token, which nobody has.
    owner: Option<usize>,
    request: u8,
    policy: OnLeaseEnd,
    attempt: u32,
    claimed: Ticks,
    lease_end: Ticks,
    stage: Stage,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Working,
    Marked,
    Freed,
    Done { reply: u16, expires: Ticks },
}

/// What a call is answered, of every kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    Acquired { attempt: u32 },
    InProgress { left: Ticks, age: Ticks },
    Completed { reply: u16, left: Ticks },
    Mismatch { request: u8 },
    Unknown,
    Renewed,
    Ended,
    Gone,
    Stored { reply: u16, left: Ticks },
    StoredAnew { reply: u16, left: Ticks },
    AlreadyStored { reply: u16, left: Ticks },
    Applied,
    Absent,
    Fenced { reply: Option<u16> },
    Purged { removed: u64 },
    LiveLease { left: Ticks },
    HasReply,
    NoReply,
    Done,
    Silent,
}

/// What an operator sees of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct View {
    pub(super) state: StateName,
    pub(super) attempt: u32,
    pub(super) request: u8,
    pub(super) lease_left: Option<Ticks>,
    pub(super) reply: Option<u16>,
    /// Whether it is past its retention: a store that drops by itself shows it no more.
    pub(super) expired: bool,
}

/// The attempt that owners give with a completion, for a record that is lost.
pub(super) const ATTEMPT_GIVEN: u32 = 7;

impl Spec {
    pub(super) fn new(traits: Traits) -> Self {
        Self { traits, now: 0, records: [const { None }; KEYS] }
    }

    /// Takes the step, and says what the store must answer.
    pub(super) fn apply(&mut self, step: &Step) -> Answer {
        match *step {
            Step::Claim { key, owner, request, lease, takeover_now, max_attempts } => {
                self.claim(key, owner, request, lease, takeover_now, max_attempts)
            }
            Step::Renew { key, owner, lease } => self.renew(key, owner, lease),
            Step::Complete { key, owner, request, reply, retention } => {
                self.complete(key, owner, request, reply, retention)
            }
            Step::Release { key, owner } => match self.not_done_by(key, owner) {
                Ok(_) => {
                    self.records[key] = None;
                    Answer::Applied
                }
                Err(refusal) => refusal,
            },
            Step::MarkUnknown { key, owner } => {
                let now = self.now;
                match self.not_done_by(key, owner) {
                    Ok(rec) => {
                        rec.stage = Stage::Marked;
                        rec.lease_end = rec.lease_end.min(now);
                        Answer::Applied
                    }
                    Err(refusal) => refusal,
                }
            }
            Step::Advance { by } => {
                self.now += by;
                Answer::Silent
            }
            Step::Purge { hold_retention } => self.purge(hold_retention),
            Step::Restart => {
                if !self.traits.survives_restart {
                    self.records = [const { None }; KEYS];
                }
                Answer::Silent
            }
            Step::Resolve { key, reply, retention, force } => {
                let target = if force { Target::Any } else { Target::Undecided };
                self.operate(key, target, |now| Stage::Done { reply, expires: now + retention })
            }
            Step::Free { key, target } => self.operate(key, target, |_| Stage::Freed),
        }
    }

    /// What an operator sees.
    pub(super) fn view(&self, key: usize) -> Option<View> {
        let rec = self.records[key].as_ref()?;
        let live = rec.lease_end > self.now;
        let (state, lease_left, reply, expired) = match rec.stage {
            Stage::Working if live => (StateName::InProgress, Some(rec.lease_end - self.now), None, false),
            Stage::Working | Stage::Marked => (StateName::Unknown, None, None, false),
            Stage::Freed => (StateName::Freed, None, None, false),
            Stage::Done { reply, expires } => (StateName::Completed, None, Some(reply), expires <= self.now),
        };
        Some(View { state, attempt: rec.attempt, request: rec.request, lease_left, reply, expired })
    }

    fn claim(
        &mut self,
        key: usize,
        owner: usize,
        request: u8,
        lease: Ticks,
        takeover_now: bool,
        max_attempts: u32,
    ) -> Answer {
        let now = self.now;
        let policy = policy_of(owner);
        let new = |attempt| Rec {
            owner: Some(owner),
            request,
            policy,
            attempt,
            claimed: now,
            lease_end: now + lease,
            stage: Stage::Working,
        };
        let (record, attempt) = match self.living(key) {
            None => (new(1), 1),
            Some(rec) if rec.stage == Stage::Freed => (new(rec.attempt + 1), rec.attempt + 1),
            Some(rec) if rec.request != request => return Answer::Mismatch { request: rec.request },
            Some(rec) => match rec.stage {
                Stage::Done { reply, expires } => return Answer::Completed { reply, left: expires - now },
                _ if rec.owner == Some(owner) => {
                    (Rec { claimed: rec.claimed, ..new(rec.attempt) }, rec.attempt)
                }
                Stage::Working if rec.lease_end > now => {
                    return Answer::InProgress { left: rec.lease_end - now, age: now - rec.claimed };
                }
                Stage::Working
                    if rec.policy == OnLeaseEnd::TakeOver
                        && policy == OnLeaseEnd::TakeOver
                        && rec.attempt < max_attempts =>
                {
                    if !takeover_now {
                        return Answer::InProgress { left: 0, age: now - rec.claimed };
                    }
                    (new(rec.attempt + 1), rec.attempt + 1)
                }
                Stage::Working | Stage::Marked => return Answer::Unknown,
                Stage::Freed => unreachable!("matched above"),
            },
        };
        self.records[key] = Some(record);
        Answer::Acquired { attempt }
    }

    fn renew(&mut self, key: usize, owner: usize, lease: Ticks) -> Answer {
        let now = self.now;
        match self.living(key) {
            None => Answer::Gone,
            Some(rec) if rec.owner != Some(owner) => Answer::Fenced { reply: None },
            Some(rec) => match rec.stage {
                Stage::Done { .. } => Answer::Ended,
                _ => {
                    (rec.stage, rec.lease_end) = (Stage::Working, now + lease);
                    Answer::Renewed
                }
            },
        }
    }

    fn complete(&mut self, key: usize, owner: usize, request: u8, reply: u16, retention: Ticks) -> Answer {
        let now = self.now;
        let done = Stage::Done { reply, expires: now + retention };
        match self.living(key) {
            None => {
                self.records[key] = Some(Rec {
                    owner: Some(owner),
                    request,
                    policy: policy_of(owner),
                    attempt: ATTEMPT_GIVEN,
                    claimed: now,
                    lease_end: now,
                    stage: done,
                });
                Answer::StoredAnew { reply, left: retention }
            }
            Some(rec) => match rec.stage {
                Stage::Done { reply, expires } if rec.owner == Some(owner) => {
                    Answer::AlreadyStored { reply, left: expires - now }
                }
                // Only a reply to its own request is shown to a fenced owner.
                Stage::Done { reply, .. } => {
                    Answer::Fenced { reply: (rec.request == request).then_some(reply) }
                }
                _ if rec.owner == Some(owner) => {
                    rec.stage = done;
                    Answer::Stored { reply, left: retention }
                }
                _ => Answer::Fenced { reply: None },
            },
        }
    }

    fn purge(&mut self, hold_retention: Ticks) -> Answer {
        if self.traits.expiry == Expiry::ByStore {
            return Answer::Purged { removed: 0 };
        }
        let mut removed = 0;
        for slot in &mut self.records {
            let over = slot.as_ref().is_some_and(|rec| match rec.stage {
                Stage::Done { expires, .. } => expires <= self.now,
                _ => rec.lease_end + hold_retention <= self.now,
            });
            if over {
                *slot = None;
                removed += 1;
            }
        }
        Answer::Purged { removed }
    }

    fn operate(&mut self, key: usize, target: Target, stage: impl FnOnce(Ticks) -> Stage) -> Answer {
        let now = self.now;
        let Some(rec) = self.living(key) else { return Answer::Absent };
        match rec.stage {
            Stage::Working if rec.lease_end > now && target != Target::Any => {
                return Answer::LiveLease { left: rec.lease_end - now };
            }
            Stage::Done { .. } if target == Target::Undecided => return Answer::HasReply,
            Stage::Done { .. } => {}
            _ if target == Target::Completed => return Answer::NoReply,
            _ => {}
        }
        (rec.owner, rec.lease_end, rec.stage) = (None, now, stage(now));
        Answer::Done
    }

    fn not_done_by(&mut self, key: usize, owner: usize) -> Result<&mut Rec, Answer> {
        match self.living(key) {
            None => Err(Answer::Absent),
            Some(rec) if rec.owner == Some(owner) && !matches!(rec.stage, Stage::Done { .. }) => Ok(rec),
            Some(_) => Err(Answer::Fenced { reply: None }),
        }
    }

    // What has expired is not there, whoever asks.
    fn living(&mut self, key: usize) -> Option<&mut Rec> {
        let now = self.now;
        self.records[key]
            .as_mut()
            .filter(|rec| !matches!(rec.stage, Stage::Done { expires, .. } if expires <= now))
    }
}
