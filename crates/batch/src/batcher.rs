//! [`Batcher`]: the lanes between the queue and the backend.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::FutureExt;
use onlyonce_core::{
    ClaimOutcome, ClaimRequest, CompleteOutcome, Completion, CrashPoint, LeaseToken, Operation, OperationId,
    ReleaseOutcome, RenewOutcome, StoreError, StoreErrorKind, crash_point,
};
use tokio::sync::{Semaphore, oneshot, watch};

use crate::job::{Reply, To};
use crate::queue::Queue;
use crate::{Answer, Answers, Ask, Backend, Fault, Job};

/// The bounds of a batcher.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Batches under way at once. 2 by default.
    pub lanes: usize,
    /// Jobs in a batch. 256 by default.
    pub batch_max: usize,
    /// Bytes of replies in a batch; the last one may go over. 4 MiB by default.
    pub batch_bytes_max: usize,
    /// Claims that wait, and as many jobs of owners. 4096 by default.
    pub queue_max: usize,
    /// Jobs that run alone at once. 4 by default.
    pub alone_max: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { lanes: 2, batch_max: 256, batch_bytes_max: 4 << 20, queue_max: 4096, alone_max: 4 }
    }
}

/// What a batcher has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Batches handed to the backend, parts of a split one among them.
    pub batches: u64,
    /// Jobs in them.
    pub operations: u64,
    /// Jobs that ran alone, for somebody held their operation locked.
    pub alone: u64,
}

/// Collects jobs and hands them to its backend in batches; see the crate.
///
/// Dropping it finishes what waits, in the background of the runtime it was started in.
#[derive(Debug)]
pub struct Batcher<B: Backend> {
    shared: Arc<Shared<B>>,
    over: watch::Receiver<()>,
}

#[derive(Debug)]
struct Shared<B> {
    backend: B,
    queue: Queue,
    limits: Limits,
    places_alone: Semaphore,
    waiting_alone: AtomicUsize,
    batches: AtomicU64,
    operations: AtomicU64,
    alone: AtomicU64,
}

impl<B: Backend> Batcher<B> {
    /// Starts the lanes in the current tokio runtime.
    ///
    /// # Panics
    /// Outside a runtime.
    pub fn start(backend: B, limits: Limits) -> Self {
        let shared = Arc::new(Shared {
            backend,
            queue: Queue::new(limits),
            limits,
            places_alone: Semaphore::new(limits.alone_max.max(1)),
            waiting_alone: AtomicUsize::new(0),
            batches: AtomicU64::new(0),
            operations: AtomicU64::new(0),
            alone: AtomicU64::new(0),
        });
        let (running, over) = watch::channel(());
        for _ in 0..limits.lanes.max(1) {
            tokio::spawn(lane(Arc::clone(&shared), running.clone()));
        }
        Self { shared, over }
    }

    /// The backend.
    pub fn backend(&self) -> &B {
        &self.shared.backend
    }

    /// What was done so far.
    pub fn counters(&self) -> Counters {
        Counters {
            batches: self.shared.batches.load(Ordering::Relaxed),
            operations: self.shared.operations.load(Ordering::Relaxed),
            alone: self.shared.alone.load(Ordering::Relaxed),
        }
    }

    /// Jobs that wait for their batch now.
    pub fn waiting(&self) -> usize {
        self.shared.queue.waiting()
    }

    /// Refuses what comes from now on, and waits until everything that was asked is done.
    pub async fn close(&self) {
        self.shared.queue.close();
        let mut over = self.over.clone();
        // An error is what is waited for: the last lane is gone.
        while over.changed().await.is_ok() {}
    }

    /// [`Store::claim`](onlyonce_core::Store::claim).
    ///
    /// # Errors
    /// Those of the backend; [`StoreErrorKind::Overloaded`] past the bound.
    pub async fn claim(
        &self,
        operation: &Operation,
        request: &ClaimRequest,
    ) -> Result<ClaimOutcome, StoreError> {
        self.ask(operation, Ask::Claim(request.clone()), To::Claim).await
    }

    /// [`Store::renew`](onlyonce_core::Store::renew).
    ///
    /// # Errors
    /// As [`Batcher::claim`].
    pub async fn renew(
        &self,
        operation: &Operation,
        token: LeaseToken,
        lease: Duration,
    ) -> Result<RenewOutcome, StoreError> {
        self.ask(operation, Ask::Renew { token, lease }, To::Renew).await
    }

    /// [`Store::complete`](onlyonce_core::Store::complete).
    ///
    /// # Errors
    /// As [`Batcher::claim`].
    pub async fn complete(
        &self,
        operation: &Operation,
        completion: &Completion,
    ) -> Result<CompleteOutcome, StoreError> {
        let head = completion.reply.encode_head();
        self.ask(operation, Ask::Complete { completion: completion.clone(), head }, To::Complete).await
    }

    /// [`Store::release`](onlyonce_core::Store::release).
    ///
    /// # Errors
    /// As [`Batcher::claim`].
    pub async fn release(
        &self,
        operation: &Operation,
        token: LeaseToken,
    ) -> Result<ReleaseOutcome, StoreError> {
        self.ask(operation, Ask::Release(token), To::Release).await
    }

    /// [`Store::mark_unknown`](onlyonce_core::Store::mark_unknown).
    ///
    /// # Errors
    /// As [`Batcher::claim`].
    pub async fn mark_unknown(
        &self,
        operation: &Operation,
        token: LeaseToken,
    ) -> Result<ReleaseOutcome, StoreError> {
        self.ask(operation, Ask::MarkUnknown(token), To::Release).await
    }

    async fn ask<T>(
        &self,
        operation: &Operation,
        ask: Ask,
        to: impl FnOnce(Reply<T>) -> To,
    ) -> Result<T, StoreError> {
        let (reply, answer) = oneshot::channel();
        let job = Job::new(operation, ask, to(reply));
        let name = job.name();
        self.shared.queue.push(job)?;
        answer.await.unwrap_or_else(|_| {
            Err(StoreError::new(StoreErrorKind::Unavailable, name)
                .with_detail("the batch ended without an answer")
                .ambiguous())
        })
    }
}

impl<B: Backend> Drop for Batcher<B> {
    fn drop(&mut self) {
        self.shared.queue.close();
    }
}

async fn lane<B: Backend>(shared: Arc<Shared<B>>, _running: watch::Sender<()>) {
    loop {
        // Those who were just answered ask again at once: let them, so that their next jobs share one batch and not
        // two. Nobody else to run: no delay.
        tokio::task::yield_now().await;
        let Some(taken) = shared.queue.take().await else { return };
        for job in taken.alone {
            shared.run_alone(job);
        }
        if !taken.batch.is_empty()
            && AssertUnwindSafe(shared.run_batch(taken.batch)).catch_unwind().await.is_err()
        {
            tracing::error!("a batch panicked; the store goes on");
        }
    }
}

impl<B: Backend> Shared<B> {
    async fn run_batch(self: &Arc<Self>, mut jobs: Vec<Job>) {
        let mut in_flight =
            InFlight { queue: &self.queue, ids: jobs.iter().map(|job| job.id().clone()).collect() };
        // The parts that are still to be run, the first one last.
        let mut parts = vec![jobs.len()];
        while let Some(length) = parts.pop() {
            let rest = jobs.split_off(length);
            let part = std::mem::replace(&mut jobs, rest);
            self.batches.fetch_add(1, Ordering::Relaxed);
            self.operations.fetch_add(part.len() as u64, Ordering::Relaxed);
            match self.run_part(&part).await {
                Ok(answers) => {
                    debug_assert_eq!(answers.len(), part.len(), "an answer for each job");
                    for (job, answer) in part.into_iter().zip(answers) {
                        match answer {
                            Ok(Answer::Locked) => {
                                self.queue.set_apart(job.id());
                                in_flight.hand_over(&job);
                                self.run_alone(job);
                            }
                            answer => job.answer(answer.map_err(Arc::new)),
                        }
                    }
                }
                // Which one it is that waits is found out beside the lanes, so that the others do not wait again.
                Err(fault) if fault.is_lock_wait() => part.into_iter().for_each(|job| {
                    in_flight.hand_over(&job);
                    self.run_alone(job);
                }),
                Err(fault) if fault.splits() && length > 1 => {
                    parts.extend([length - length / 2, length / 2]);
                    let rest = std::mem::replace(&mut jobs, part);
                    jobs.extend(rest);
                }
                Err(fault) => {
                    let fault = Arc::new(fault);
                    part.into_iter().for_each(|job| job.answer(Err(Arc::clone(&fault))));
                }
            }
        }
    }

    async fn run_part(&self, part: &[Job]) -> Result<Answers<B::Fault>, B::Fault> {
        part.iter().for_each(|job| crash_point(job.places().0));
        let answers = self.backend.run(part).await?;
        part.iter().zip(&answers).for_each(|(job, answer)| crash_after(job, answer.as_ref().ok()));
        Ok(answers)
    }

    // Its operation stays in flight until it is done.
    fn run_alone(self: &Arc<Self>, job: Job) {
        self.alone.fetch_add(1, Ordering::Relaxed);
        let shared = Arc::clone(self);
        if self.waiting_alone.fetch_add(1, Ordering::Relaxed) >= self.limits.queue_max {
            self.waiting_alone.fetch_sub(1, Ordering::Relaxed);
            self.queue.finish([job.id()].into_iter());
            job.answer::<B::Fault>(Ok(Answer::Locked));
            return;
        }
        tokio::spawn(async move {
            let _counted = Counted(&shared.waiting_alone);
            let _in_flight = InFlight { queue: &shared.queue, ids: vec![job.id().clone()] };
            let Ok(_place) = shared.places_alone.acquire().await else { return };
            if job.is_given_up() {
                return;
            }
            crash_point(job.places().0);
            let answer = shared.backend.run_alone(&job).await;
            crash_after(&job, answer.as_ref().ok());
            let still_locked = match &answer {
                Ok(answer) => *answer == Answer::Locked,
                Err(fault) => fault.is_lock_wait(),
            };
            if still_locked {
                shared.queue.set_apart(job.id());
            }
            job.answer(answer.map_err(Arc::new));
        });
    }
}

/// Where it was done, and nobody was told.
fn crash_after(job: &Job, answer: Option<&Answer>) {
    if answer.is_none_or(|answer| *answer == Answer::Locked) {
        return;
    }
    crash_point(job.places().1);
    if matches!(answer, Some(Answer::Claim(ClaimOutcome::Acquired(lease))) if lease.attempt > 1) {
        crash_point(CrashPoint::TakeOverAfter);
    }
}

/// One job that runs, or waits to run, alone.
struct Counted<'a>(&'a AtomicUsize);

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Gives its operations back however the batch ends.
struct InFlight<'a> {
    queue: &'a Queue,
    ids: Vec<OperationId>,
}

impl InFlight<'_> {
    // Somebody else gives this one back.
    fn hand_over(&mut self, job: &Job) {
        self.ids.retain(|id| id != job.id());
    }
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.queue.finish(self.ids.iter());
    }
}
