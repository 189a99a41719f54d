//! One operation of a store, waiting to be run.

use std::sync::Arc;
use std::time::Duration;

use onlyonce_core::{
    ClaimOutcome, ClaimRequest, CompleteOutcome, Completion, CrashPoint, LeaseToken, Operation, OperationId,
    ReleaseOutcome, RenewOutcome, StoreError, StoreErrorKind,
};
use tokio::sync::oneshot;

use crate::{Answer, Fault};

/// Where an answer goes. Closed when its caller is gone.
pub(crate) type Reply<T> = oneshot::Sender<Result<T, StoreError>>;

/// One question to the store.
#[derive(Debug)]
pub struct Job {
    operation: Operation,
    ask: Ask,
    to: To,
}

/// What is asked.
#[derive(Clone, Debug)]
pub enum Ask {
    /// [`Store::claim`](onlyonce_core::Store::claim).
    Claim(ClaimRequest),
    /// [`Store::renew`](onlyonce_core::Store::renew).
    Renew {
        /// The owner.
        token: LeaseToken,
        /// From now.
        lease: Duration,
    },
    /// [`Store::complete`](onlyonce_core::Store::complete).
    Complete {
        /// What is stored.
        completion: Completion,
        /// [`Reply::encode_head`](onlyonce_core::Reply::encode_head) of its reply, made by the caller: a lane is the
        /// narrow place.
        head: Vec<u8>,
    },
    /// [`Store::release`](onlyonce_core::Store::release).
    Release(LeaseToken),
    /// [`Store::mark_unknown`](onlyonce_core::Store::mark_unknown).
    MarkUnknown(LeaseToken),
}

#[derive(Debug)]
pub(crate) enum To {
    Claim(Reply<ClaimOutcome>),
    Renew(Reply<RenewOutcome>),
    Complete(Reply<CompleteOutcome>),
    Release(Reply<ReleaseOutcome>),
}

impl Job {
    pub(crate) fn new(operation: &Operation, ask: Ask, to: To) -> Self {
        Self { operation: operation.clone(), ask, to }
    }

    /// On which operation.
    pub fn operation(&self) -> &Operation {
        &self.operation
    }

    /// Which record.
    pub fn id(&self) -> &OperationId {
        self.operation.id()
    }

    /// What is asked.
    pub fn ask(&self) -> &Ask {
        &self.ask
    }

    /// Where the process can be made to die: before it is done, and after it.
    pub(crate) fn places(&self) -> (CrashPoint, CrashPoint) {
        match self.ask {
            Ask::Claim(_) => (CrashPoint::ClaimBefore, CrashPoint::ClaimAfter),
            Ask::Renew { .. } => (CrashPoint::RenewBefore, CrashPoint::RenewAfter),
            Ask::Complete { .. } => (CrashPoint::CompleteBefore, CrashPoint::CompleteAfter),
            Ask::Release(_) => (CrashPoint::ReleaseBefore, CrashPoint::ReleaseAfter),
            Ask::MarkUnknown(_) => (CrashPoint::UnknownBefore, CrashPoint::UnknownAfter),
        }
    }

    /// The store method that was called.
    pub fn name(&self) -> &'static str {
        match self.ask {
            Ask::Claim(_) => "claim",
            Ask::Renew { .. } => "renew",
            Ask::Complete { .. } => "complete",
            Ask::Release(_) => "release",
            Ask::MarkUnknown(_) => "mark_unknown",
        }
    }

    pub(crate) fn is_claim(&self) -> bool {
        matches!(self.ask, Ask::Claim(_))
    }

    /// How many bytes of reply it carries.
    pub(crate) fn bytes(&self) -> usize {
        match &self.ask {
            Ask::Complete { completion, head } => head.len() + completion.reply.body().len(),
            _ => 0,
        }
    }

    /// Whether it need not be run: a claim whose caller is gone. The work of an owner has happened.
    pub(crate) fn is_given_up(&self) -> bool {
        matches!(&self.to, To::Claim(reply) if reply.is_closed())
    }

    // A caller that is gone needs no answer, so failed sends are fine.
    pub(crate) fn answer<F: Fault>(self, answer: Result<Answer, Arc<F>>) {
        let name = self.name();
        match (self.to, answer) {
            (To::Claim(reply), Ok(Answer::Claim(outcome))) => drop(reply.send(Ok(outcome))),
            (To::Renew(reply), Ok(Answer::Renew(outcome))) => drop(reply.send(Ok(outcome))),
            (To::Complete(reply), Ok(Answer::Complete(outcome))) => drop(reply.send(Ok(outcome))),
            (To::Release(reply), Ok(Answer::Release(outcome))) => drop(reply.send(Ok(outcome))),
            // Whoever it is that works on it, in an open transaction: there is no lease to go by.
            (To::Claim(reply), Ok(Answer::Locked)) => {
                let (lease_left, age) = (Duration::ZERO, Duration::ZERO);
                drop(reply.send(Ok(ClaimOutcome::InProgress { lease_left, age, origin: None })));
            }
            (to, answer) => to.fail(match answer {
                Err(fault) => fault.error(name),
                Ok(Answer::Locked) => StoreError::new(StoreErrorKind::Timeout, name)
                    .with_detail("somebody holds the record locked in an open transaction"),
                Ok(_) => StoreError::new(StoreErrorKind::Internal, name)
                    .with_detail("an answer to another question")
                    .ambiguous(),
            }),
        }
    }
}

impl To {
    fn fail(self, error: StoreError) {
        match self {
            Self::Claim(reply) => drop(reply.send(Err(error))),
            Self::Renew(reply) => drop(reply.send(Err(error))),
            Self::Complete(reply) => drop(reply.send(Err(error))),
            Self::Release(reply) => drop(reply.send(Err(error))),
        }
    }
}
