//! The invariants as properties of the answers alone: nothing here predicts, it only remembers and forbids.

use onlyonce_core::OnLeaseEnd;

use super::history::{KEYS, Step, Ticks, policy_of};
use super::spec::{ATTEMPT_GIVEN, Answer};

/// What the answers so far have promised.
#[derive(Default)]
pub(super) struct Ledger([Promises; KEYS]);

#[derive(Default)]
struct Promises {
    // The last owner that was told Acquired or Renewed, and until when.
    holder: Option<(usize, Ticks)>,
    // Set by a mark of unknown outcome: nobody else may be Acquired, however late.
    unknown: bool,
    // The reply that was told stored, and until when.
    reply: Option<(u16, Ticks)>,
    // The greatest attempt told since the operation was last absent.
    attempt: u32,
}

impl Ledger {
    /// Checks an answer given at `now` against what was promised before, and notes what it promises.
    pub(super) fn check(&mut self, step: &Step, answer: &Answer, now: Ticks) {
        for promises in &mut self.0 {
            promises.expire(now);
        }
        match *step {
            Step::Claim { key, owner, lease, .. } => self.0[key].claimed(owner, lease, answer, now),
            Step::Renew { key, owner, lease } => match answer {
                Answer::Renewed => {
                    self.0[key].nobody_else_holds(owner, now);
                    self.0[key].holds(owner, now + lease);
                }
                Answer::Ended => assert!(self.0[key].reply.is_some(), "ended without a reply"),
                _ => self.0[key].is_no_longer(owner),
            },
            Step::Complete { key, owner, reply, retention, .. } => {
                self.0[key].completed(owner, reply, retention, answer, now);
            }
            Step::Release { key, owner } => match answer {
                Answer::Applied => {
                    assert!(self.0[key].reply.is_none(), "a stored reply was released");
                    self.0[key].nobody_else_holds(owner, now);
                    self.0[key] = Promises::default();
                }
                _ => self.0[key].is_no_longer(owner),
            },
            Step::MarkUnknown { key, owner } => match answer {
                Answer::Applied => {
                    assert!(self.0[key].reply.is_none(), "a stored reply became unknown");
                    self.0[key].nobody_else_holds(owner, now);
                    let ended = self.0[key].holder.map_or(now, |(_, until)| until.min(now));
                    self.0[key].holds(owner, ended);
                    self.0[key].unknown = true;
                }
                _ => self.0[key].is_no_longer(owner),
            },
            // A store that drops by itself removes nothing, and all promises stand.
            Step::Purge { .. } if *answer == (Answer::Purged { removed: 0 }) => {}
            Step::Purge { hold_retention } => {
                for promises in &mut self.0 {
                    promises.purged(hold_retention, now);
                }
            }
            Step::Resolve { key, reply, retention, .. } if *answer == Answer::Done => {
                let attempt = self.0[key].attempt;
                self.0[key] =
                    Promises { reply: Some((reply, now + retention)), attempt, ..Promises::default() };
            }
            Step::Free { key, .. } if *answer == Answer::Done => {
                let attempt = self.0[key].attempt;
                self.0[key] = Promises { attempt, ..Promises::default() };
            }
            Step::Advance { .. } | Step::Restart | Step::Resolve { .. } | Step::Free { .. } => {}
        }
    }

    /// The store is empty: it kept nothing over a restart, and says so.
    pub(super) fn forget(&mut self) {
        *self = Self::default();
    }
}

impl Promises {
    fn claimed(&mut self, owner: usize, lease: Ticks, answer: &Answer, now: Ticks) {
        match *answer {
            Answer::Acquired { attempt } => {
                self.nobody_else_holds(owner, now);
                assert!(self.reply.is_none(), "acquired though its reply was stored");
                let again = self.holder.is_some_and(|(holder, _)| holder == owner);
                if let (Some((holder, _)), false) = (self.holder, again) {
                    assert!(!self.unknown, "acquired though its outcome was marked unknown");
                    assert!(
                        (policy_of(holder), policy_of(owner)) == (OnLeaseEnd::TakeOver, OnLeaseEnd::TakeOver),
                        "taken over without both policies"
                    );
                    assert_eq!(attempt, self.attempt + 1, "a takeover is one attempt more");
                }
                assert!(attempt == 1 || again && attempt == self.attempt || attempt == self.attempt + 1);
                self.attempt = attempt;
                self.holds(owner, now + lease);
            }
            Answer::Completed { reply, .. } => self.shows(reply),
            Answer::InProgress { left, .. } => {
                assert!(self.reply.is_none(), "in progress though its reply was stored");
                assert!(left == 0 || self.holder.is_some(), "in progress by nobody");
            }
            _ => {}
        }
    }

    fn completed(&mut self, owner: usize, reply: u16, retention: Ticks, answer: &Answer, now: Ticks) {
        match *answer {
            Answer::Stored { .. } | Answer::StoredAnew { .. } => {
                assert!(self.reply.is_none(), "a stored reply was overwritten");
                self.nobody_else_holds(owner, now);
                let anew = matches!(answer, Answer::StoredAnew { .. });
                assert!(
                    !(anew && self.holder.is_some_and(|(_, until)| until > now)),
                    "a live record was lost"
                );
                self.reply = Some((reply, now + retention));
                self.attempt = if anew { ATTEMPT_GIVEN } else { self.attempt };
                (self.holder, self.unknown) = (Some((owner, now)), false);
            }
            Answer::AlreadyStored { reply, .. } | Answer::Fenced { reply: Some(reply) } => self.shows(reply),
            _ => self.is_no_longer(owner),
        }
    }

    // One live lease for an operation.
    fn nobody_else_holds(&self, owner: usize, now: Ticks) {
        if let Some((holder, until)) = self.holder {
            assert!(holder == owner || until <= now, "{owner} holds what {holder} holds until {until}");
        }
    }

    // An owner that holds a live lease, or is the last there was, is never fenced and never finds nothing.
    fn is_no_longer(&self, owner: usize) {
        let is = self.holder.is_some_and(|(holder, _)| holder == owner) && self.reply.is_none();
        assert!(!is, "{owner} was refused though it is the owner");
    }

    fn holds(&mut self, owner: usize, until: Ticks) {
        (self.holder, self.unknown) = (Some((owner, until)), false);
    }

    // Completed records never change: every reply shown is the one that was stored.
    fn shows(&self, reply: u16) {
        let stored = self.reply.map(|(stored, _)| stored);
        assert_eq!(Some(reply), stored, "another reply than the stored one, or none was stored");
    }

    // What has expired is absent, before anything else.
    fn expire(&mut self, now: Ticks) {
        if self.reply.is_some_and(|(_, until)| until <= now) {
            *self = Self::default();
        }
    }

    fn purged(&mut self, hold_retention: Ticks, now: Ticks) {
        let over = match (self.reply, self.holder) {
            (None, Some((_, until))) => until + hold_retention <= now,
            (Some(_), _) | (None, None) => false,
        };
        if over {
            *self = Self::default();
        }
    }
}
