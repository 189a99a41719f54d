//! The batcher against a backend that does what it is told.

#![allow(clippy::unwrap_used, reason = "a test fails by it")]

use std::collections::{HashMap, HashSet, VecDeque};
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::join_all;
use onlyonce_batch::{Answer, Ask, Backend, Batcher, Fault, Job, Limits};
use onlyonce_core::{
    ClaimOutcome, ClaimRequest, CompleteOutcome, Completion, Fingerprint, Key, Lease, LeaseToken, OnLeaseEnd,
    Operation, ReleaseOutcome, RenewOutcome, Reply, Scope, StoreError, StoreErrorKind,
};
use tokio::sync::Semaphore;

/// What a batch that is under way looks like: the names of its jobs.
type Batch = Vec<String>;

#[derive(Debug)]
struct Fake {
    // Each batch takes one: zero holds them back.
    gate: Arc<Semaphore>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    batches: Vec<Batch>,
    alone: Batch,
    in_flight: HashMap<String, u32>,
    // Keys whose presence fails a batch, with the fault.
    poison: HashMap<String, Broken>,
    locked: HashSet<String>,
    next: VecDeque<Broken>,
    panics: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Broken {
    Content,
    Connection,
    Lock,
}

impl Fault for Broken {
    fn error(self: &Arc<Self>, operation: &'static str) -> StoreError {
        StoreError::new(StoreErrorKind::Unavailable, operation).with_detail(format!("{self:?}"))
    }

    fn splits(&self) -> bool {
        *self == Self::Content
    }

    fn is_lock_wait(&self) -> bool {
        *self == Self::Lock
    }
}

fn name(job: &Job) -> String {
    format!("{} {}", job.name(), job.id().key)
}

fn answer(job: &Job) -> Answer {
    match job.ask() {
        Ask::Claim(request) => Answer::Claim(ClaimOutcome::Acquired(Lease {
            token: request.token,
            attempt: 1,
            duration: request.lease,
        })),
        Ask::Renew { .. } => Answer::Renew(RenewOutcome::Renewed),
        Ask::Complete { .. } => Answer::Complete(CompleteOutcome::Fenced(None)),
        Ask::Release(_) | Ask::MarkUnknown(_) => Answer::Release(ReleaseOutcome::Applied),
    }
}

impl Fake {
    fn enter(&self, jobs: &[Job]) {
        let mut state = self.state.lock().unwrap();
        for job in jobs {
            let count = state.in_flight.entry(job.id().key.to_string()).or_default();
            *count += 1;
            assert_eq!(*count, 1, "{} is under way twice", job.id().key);
        }
    }

    fn leave(&self, jobs: &[Job]) {
        let mut state = self.state.lock().unwrap();
        for job in jobs {
            state.in_flight.remove(job.id().key.as_str());
        }
    }
}

impl Backend for Fake {
    type Fault = Broken;

    async fn run(&self, jobs: &[Job]) -> Result<Vec<Result<Answer, Broken>>, Broken> {
        self.state.lock().unwrap().batches.push(jobs.iter().map(name).collect());
        self.enter(jobs);
        self.gate.acquire().await.unwrap().forget();
        self.leave(jobs);
        let mut state = self.state.lock().unwrap();
        if std::mem::take(&mut state.panics) {
            drop(state);
            panic!("as told");
        }
        if let Some(broken) = state.next.pop_front() {
            return Err(broken);
        }
        if let Some(broken) = jobs.iter().find_map(|job| state.poison.get(job.id().key.as_str())) {
            return Err(*broken);
        }
        let locked = |job: &Job| state.locked.contains(job.id().key.as_str());
        Ok(jobs.iter().map(|job| Ok(if locked(job) { Answer::Locked } else { answer(job) })).collect())
    }

    async fn run_alone(&self, job: &Job) -> Result<Answer, Broken> {
        self.enter(std::slice::from_ref(job));
        let locked = {
            let mut state = self.state.lock().unwrap();
            state.alone.push(name(job));
            state.locked.contains(job.id().key.as_str()) || state.poison.contains_key(job.id().key.as_str())
        };
        tokio::task::yield_now().await;
        self.leave(std::slice::from_ref(job));
        Ok(if locked && matches!(job.ask(), Ask::Claim(_)) { Answer::Locked } else { answer(job) })
    }
}

/// A call that owns all it needs.
type Waits<T> = Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send>>;

struct Bench {
    batcher: Arc<Batcher<Fake>>,
    gate: Arc<Semaphore>,
}

fn bench(lanes: usize, open: bool) -> Bench {
    bench_with(Limits { lanes, ..Limits::default() }, open)
}

fn bench_with(limits: Limits, open: bool) -> Bench {
    let gate = Arc::new(Semaphore::new(if open { 1 << 20 } else { 0 }));
    let fake = Fake { gate: Arc::clone(&gate), state: Mutex::default() };
    Bench { batcher: Arc::new(Batcher::start(fake, limits)), gate }
}

impl Bench {
    fn let_pass(&self, batches: usize) {
        self.gate.add_permits(batches);
    }

    fn state<T>(&self, look: impl FnOnce(&mut State) -> T) -> T {
        look(&mut self.batcher.backend().state.lock().unwrap())
    }

    fn batches(&self) -> Vec<Batch> {
        self.state(|state| state.batches.clone())
    }

    async fn until(&self, what: &str, condition: impl Fn(&mut State) -> bool) {
        for _ in 0..20_000 {
            if self.state(&condition) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        panic!("waited in vain: {what}; batches: {:?}", self.batches());
    }

    fn claim(&self, key: &str) -> Waits<ClaimOutcome> {
        let (batcher, op) = (Arc::clone(&self.batcher), op(key));
        Box::pin(async move { batcher.claim(&op, &request(2)).await })
    }

    fn renew(&self, key: &str) -> Waits<RenewOutcome> {
        let (batcher, op) = (Arc::clone(&self.batcher), op(key));
        Box::pin(async move { batcher.renew(&op, token(1), Duration::from_secs(1)).await })
    }

    fn release(&self, key: &str) -> Waits<ReleaseOutcome> {
        let (batcher, op) = (Arc::clone(&self.batcher), op(key));
        Box::pin(async move { batcher.release(&op, token(1)).await })
    }

    fn complete(&self, key: &str, body: &str) -> Waits<CompleteOutcome> {
        let (batcher, op, completion) = (Arc::clone(&self.batcher), op(key), completion(body));
        Box::pin(async move { batcher.complete(&op, &completion).await })
    }

    fn claims(&self, count: usize) -> Vec<Waits<ClaimOutcome>> {
        (0..count).map(|n| self.claim(&format!("k{n}"))).collect()
    }

    /// A job that is under way, so that what comes next waits.
    async fn occupy(&self, key: &str) -> tokio::task::JoinHandle<()> {
        let before = self.batches().len();
        let (batcher, op) = (Arc::clone(&self.batcher), op(key));
        let job = tokio::spawn(async move {
            batcher.claim(&op, &request(1)).await.unwrap();
        });
        self.until("the lane is occupied", |state| state.batches.len() > before).await;
        job
    }
}

fn op(key: &str) -> Operation {
    Operation::new(Scope::anonymous(), Key::new(key).unwrap(), Fingerprint::of("request"))
}

fn token(n: u8) -> LeaseToken {
    LeaseToken::from_bytes([n; 16])
}

fn request(n: u8) -> ClaimRequest {
    ClaimRequest {
        token: token(n),
        lease: Duration::from_secs(30),
        retention: Duration::from_secs(60),
        on_lease_end: OnLeaseEnd::TakeOver,
        takeover_now: true,
        max_attempts: 5,
    }
}

fn completion(body: &str) -> Completion {
    Completion {
        token: token(1),
        attempt: 1,
        reply: Reply::ok(body.to_owned()),
        retention: Duration::from_secs(60),
    }
}

fn queued<T>(mut future: Waits<T>) -> Waits<T> {
    assert!(future.as_mut().now_or_never().is_none());
    future
}

#[tokio::test]
async fn what_waited_goes_together_and_owners_go_first() {
    let bench = bench(1, false);
    let first = bench.occupy("first").await;
    let (a, b) = (queued(bench.claim("a")), queued(bench.claim("b")));
    let (renewal, release) = (queued(bench.renew("c")), queued(bench.release("d")));
    bench.let_pass(2);
    assert!(a.await.is_ok() && b.await.is_ok());
    assert_eq!(renewal.await.unwrap(), RenewOutcome::Renewed);
    assert_eq!(release.await.unwrap(), ReleaseOutcome::Applied);
    first.await.unwrap();
    let second = ["renew c", "release d", "claim a", "claim b"].map(String::from);
    assert_eq!(bench.batches(), [vec!["claim first".to_owned()], second.into()]);
    let counters = bench.batcher.counters();
    assert_eq!((counters.batches, counters.operations), (2, 5));
}

#[tokio::test]
async fn repeats_of_one_key_wait_for_the_answer_and_owners_go_first_in_its_line() {
    let bench = bench(3, false);
    let first = bench.occupy("k").await;
    let (again, renewal) = (queued(bench.claim("k")), queued(bench.renew("k")));
    // Two lanes are idle, and may not touch the key.
    let beside = queued(bench.claim("other"));
    bench.until("the other key is under way", |state| state.batches.len() == 2).await;
    tokio::time::sleep(Duration::from_millis(20)).await;
    assert_eq!(bench.batches().len(), 2);
    bench.let_pass(4);
    assert!(again.await.is_ok() && renewal.await.is_ok() && beside.await.is_ok());
    first.await.unwrap();
    let expected = [["claim k"], ["claim other"], ["renew k"], ["claim k"]];
    assert_eq!(bench.batches(), expected.map(|batch| batch.map(String::from)));
}

#[tokio::test]
async fn a_claim_that_is_dropped_while_it_waits_is_not_sent_and_an_owners_job_is() {
    let bench = bench(1, false);
    let first = bench.occupy("first").await;
    drop(queued(bench.claim("a")));
    drop(queued(bench.complete("b", "done")));
    let kept = queued(bench.claim("c"));
    bench.let_pass(2);
    assert!(kept.await.is_ok());
    first.await.unwrap();
    assert_eq!(bench.batches()[1], ["complete b", "claim c"]);
}

#[tokio::test]
async fn batches_are_bounded_by_number_and_by_bytes() {
    let limits = Limits { lanes: 1, batch_max: 4, batch_bytes_max: 1000, ..Limits::default() };
    let bench = bench_with(limits, false);
    let first = bench.occupy("first").await;
    let claims: Vec<_> = bench.claims(9).into_iter().map(queued).collect();
    bench.let_pass(4);
    assert!(join_all(claims).await.iter().all(Result::is_ok));
    first.await.unwrap();
    let sizes: Vec<_> = bench.batches().iter().map(Vec::len).collect();
    assert_eq!(sizes, [1, 4, 4, 1]);
    let first = bench.occupy("first").await;
    let long = "x".repeat(800);
    let completions: Vec<_> = (0..5).map(|n| queued(bench.complete(&format!("k{n}"), &long))).collect();
    bench.let_pass(4);
    assert!(join_all(completions).await.iter().all(Result::is_ok));
    first.await.unwrap();
    let sizes: Vec<_> = bench.batches()[4..].iter().map(Vec::len).collect();
    assert_eq!(sizes, [1, 2, 2, 1]);
}

#[tokio::test]
async fn past_its_bound_the_queue_refuses_and_nothing_is_lost() {
    let bench = bench_with(Limits { lanes: 1, queue_max: 3, ..Limits::default() }, false);
    let first = bench.occupy("first").await;
    let waiting: Vec<_> = bench.claims(3).into_iter().map(queued).collect();
    let error = bench.claim("one too many").await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Overloaded);
    assert!(error.retryable() && !error.may_have_applied());
    // The places of owners are their own.
    let renewal = queued(bench.renew("another"));
    bench.let_pass(2);
    assert!(join_all(waiting).await.iter().all(Result::is_ok));
    assert!(renewal.await.is_ok());
    first.await.unwrap();
}

#[tokio::test]
async fn a_fault_of_one_job_hits_that_job_alone() {
    let bench = bench(1, true);
    bench.state(|state| state.poison.insert("k5".into(), Broken::Content));
    let outcomes = join_all(bench.claims(16)).await;
    for (n, outcome) in outcomes.iter().enumerate() {
        assert_eq!(outcome.is_err(), n == 5, "{n}: {outcome:?}");
    }
    // Halves on the way to it, not each for itself.
    assert_eq!(bench.batches().len(), 9);
}

#[tokio::test]
async fn a_fault_of_the_connection_hits_the_batch_and_the_next_one_runs() {
    let bench = bench(1, true);
    bench.state(|state| state.next.push_back(Broken::Connection));
    assert!(join_all(bench.claims(4)).await.iter().all(Result::is_err));
    assert_eq!(bench.batches().len(), 1);
    assert!(bench.claim("k0").await.is_ok());
}

#[tokio::test]
async fn a_locked_operation_goes_on_alone_and_is_kept_apart_for_a_while() {
    let bench = bench(1, true);
    bench.state(|state| state.locked.insert("held".into()));
    let (claim, other) = tokio::join!(bench.claim("held"), bench.claim("free"));
    assert!(matches!(claim.unwrap(), ClaimOutcome::InProgress { lease_left: Duration::ZERO, .. }));
    assert!(matches!(other.unwrap(), ClaimOutcome::Acquired(_)));
    let batches = bench.batches();
    // Its owner waits for the lock, out of the way of everybody else.
    assert_eq!(bench.renew("held").await.unwrap(), RenewOutcome::Renewed);
    assert_eq!(bench.state(|state| state.alone.clone()), ["claim held", "renew held"]);
    assert_eq!(bench.batches(), batches, "it is kept out of the batches");
    assert_eq!(bench.batcher.counters().alone, 2);
}

#[tokio::test]
async fn a_batch_that_met_a_lock_is_not_made_to_wait_again() {
    let bench = bench(1, true);
    bench.state(|state| state.poison.insert("k3".into(), Broken::Lock));
    let outcomes = join_all(bench.claims(8)).await;
    for (n, outcome) in outcomes.into_iter().enumerate() {
        assert_eq!(matches!(outcome.unwrap(), ClaimOutcome::Acquired(_)), n != 3, "{n}");
    }
    assert_eq!(bench.batches().len(), 1);
    assert_eq!(bench.batcher.counters().alone, 8);
    bench.claim("k3").await.unwrap();
    bench.claim("k4").await.unwrap();
    assert_eq!(bench.batches().len(), 2, "the locked one alone is kept apart");
}

#[tokio::test]
async fn a_panic_costs_its_batch_and_nothing_else() {
    let bench = bench(1, true);
    bench.state(|state| state.panics = true);
    let error = bench.claim("k").await.unwrap_err();
    assert!(error.may_have_applied(), "{error}");
    assert!(bench.claim("k").await.is_ok());
}

#[tokio::test]
async fn closing_finishes_what_waits_and_refuses_what_comes() {
    let bench = bench(2, false);
    let first = bench.occupy("first").await;
    let waiting = queued(bench.claim("first"));
    let batcher = Arc::clone(&bench.batcher);
    let closing = tokio::spawn(async move { batcher.close().await });
    let refused = async || bench.complete("k", "done").now_or_never();
    let error = loop {
        match refused().await {
            Some(Err(error)) => break error,
            _ => tokio::task::yield_now().await,
        }
    };
    assert_eq!(error.kind(), StoreErrorKind::Unavailable);
    bench.let_pass(10);
    assert!(waiting.await.is_ok());
    closing.await.unwrap();
    first.await.unwrap();
}

#[tokio::test]
async fn dropping_the_last_handle_finishes_what_waits() {
    let bench = bench(1, false);
    let (one, two) = (queued(bench.claim("a")), queued(bench.complete("b", "done")));
    // Their callers go, and with them every handle but this.
    drop((one, two));
    let watched = Arc::downgrade(&bench.gate);
    bench.let_pass(5);
    drop(bench);
    // The backend, with its handle on the gate, goes when all is done.
    while watched.upgrade().is_some() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_thousand_callers_need_few_batches_and_one_caller_one_each() {
    let bench = bench(2, false);
    for n in 0..10 {
        bench.let_pass(1);
        bench.claim(&format!("one {n}")).await.unwrap();
    }
    assert_eq!(bench.batcher.counters().batches, 10);
    let callers: Vec<_> = bench.claims(1000).into_iter().map(tokio::spawn).collect();
    bench.until("both lanes are occupied", |state| state.batches.len() == 12).await;
    // All are there before the first batch ends.
    while bench.batcher.waiting() + bench.state(|state| state.in_flight.len()) < 1000 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    bench.let_pass(100);
    for caller in callers {
        caller.await.unwrap().unwrap();
    }
    assert!(bench.batcher.counters().batches - 10 <= 50, "{:?}", bench.batcher.counters());
}
