//! Many at once, on several handles.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use onlyonce_core::{
    ClaimOutcome, CompleteOutcome, LeaseToken, Operation, ReleaseOutcome, Reply, Store, StoreError,
};
use tokio::sync::Barrier;
use tokio::task::JoinSet;

use crate::Harness;
use crate::harness::{answered, fresh_token};

const CLAIMS: usize = 50;
const HANDLES: usize = 5;
const ROUNDS: usize = 10;

/// Fifty claims with tokens of their own, on five handles at once: one is Acquired, the others are in progress; and
/// all are answered with its reply afterwards.
pub async fn one_of_many_claims_is_acquired(h: &Harness) {
    let handles = h.handles(HANDLES).await;
    for round in 0..ROUNDS {
        let operation = h.operation(&format!("round {round}"));
        let winner = one_winner(h, &handles, &operation, 1).await;
        let reply = Reply::ok(format!("reply of round {round}"));
        h.finish(&operation, winner, reply.clone()).await;
        for answer in claim_all(h, &handles, &operation).await {
            match answer.1 {
                ClaimOutcome::Completed(stored) => assert_eq!(stored.reply, reply),
                other => panic!("expected Completed, got {other:?}"),
            }
        }
    }
}

/// Fifty claims meet a lease that is over: one takes over, as attempt 2.
pub async fn one_of_many_claims_takes_over(h: &Harness) {
    let handles = h.handles(HANDLES).await;
    let operations: Vec<_> = (0..ROUNDS).map(|round| h.operation(&format!("round {round}"))).collect();
    for operation in &operations {
        h.acquire(operation, fresh_token()).await;
    }
    h.advance(h.lease()).await;
    for operation in &operations {
        one_winner(h, &handles, operation, 2).await;
    }
}

/// Fifty claims follow a release: one is Acquired, as attempt 1.
pub async fn one_of_many_claims_follows_a_release(h: &Harness) {
    let (operation, first) = (h.operation("k"), fresh_token());
    h.acquire(&operation, first).await;
    assert_eq!(h.release(&operation, first).await, ReleaseOutcome::Applied);
    one_winner(h, &h.handles(HANDLES).await, &operation, 1).await;
}

/// Fifty claims meet a reply that has expired: one is Acquired, as attempt 1.
pub async fn one_of_many_claims_follows_expiry(h: &Harness) {
    let (operation, first) = (h.operation("k"), fresh_token());
    h.acquire(&operation, first).await;
    h.finish(&operation, first, Reply::ok("old")).await;
    h.advance(h.retention()).await;
    one_winner(h, &h.handles(HANDLES).await, &operation, 1).await;
}

/// Copies of one claim, sent again and again at once, are one owner: all are Acquired, as attempt 1.
pub async fn claims_with_one_token_are_one_owner(h: &Harness) {
    let (operation, owner) = (h.operation("k"), fresh_token());
    let request = h.request(owner);
    let answers = at_once(&h.handles(HANDLES).await, CLAIMS, |store, _| {
        let (operation, request) = (operation.clone(), request.clone());
        async move { store.claim(&operation, &request).await }
    })
    .await;
    for answer in answers {
        match answer {
            ClaimOutcome::Acquired(lease) => assert_eq!((lease.token, lease.attempt), (owner, 1)),
            other => panic!("expected Acquired, got {other:?}"),
        }
    }
    h.finish(&operation, owner, Reply::ok("done")).await;
}

/// A late completion against takeovers: either it is stored and they replay it, or one takes over and it is fenced.
pub async fn a_late_completion_or_a_takeover_wins(h: &Harness) {
    let handles = h.handles(HANDLES).await;
    let late: Vec<_> = (0..ROUNDS).map(|n| (h.operation(&format!("round {n}")), fresh_token())).collect();
    for (operation, owner) in &late {
        h.acquire(operation, *owner).await;
    }
    h.advance(h.lease()).await;
    for (operation, owner) in late {
        let completion = h.completion(owner, Reply::ok("late"));
        let (completing, store) = (operation.clone(), h.store());
        let completing = tokio::spawn(async move { store.complete(&completing, &completion).await });
        let claims = claim_all(h, &handles, &operation).await;
        let winners = claims.iter().filter(|c| matches!(c.1, ClaimOutcome::Acquired(_))).count();
        match answered(completing.await.expect("no panic")) {
            CompleteOutcome::Stored(_) => {
                assert_eq!(winners, 0, "taken over though the owner completed");
                assert_eq!(h.replay(&operation).await.reply, Reply::ok("late"));
            }
            CompleteOutcome::Fenced(None) => {
                assert_eq!(winners, 1, "fenced, so one took over");
                assert!(!h.lease_left(&operation).await.is_zero());
            }
            other => panic!("expected Stored or Fenced(None), got {other:?}"),
        }
    }
}

/// A completion and a release of one owner cross: whichever comes first, the effect is on record afterwards.
pub async fn a_completion_outlives_a_release(h: &Harness) {
    for round in 0..ROUNDS {
        let (operation, owner) = (h.operation(&format!("round {round}")), fresh_token());
        h.acquire(&operation, owner).await;
        let (releasing, store) = (operation.clone(), h.store());
        let releasing = tokio::spawn(async move { store.release(&releasing, owner).await });
        let completed = h.complete(&operation, owner, Reply::ok("done")).await;
        match (answered(releasing.await.expect("no panic")), completed) {
            (ReleaseOutcome::Applied, CompleteOutcome::StoredAnew(_))
            | (ReleaseOutcome::Fenced, CompleteOutcome::Stored(_)) => {}
            other => panic!("a release and a completion in no order: {other:?}"),
        }
        assert_eq!(h.replay(&operation).await.reply, Reply::ok("done"));
    }
}

/// Completions of one owner with different replies, all at once: one is stored, and every answer shows that one.
pub async fn completions_with_one_token_store_one_reply(h: &Harness) {
    let (operation, owner) = (h.operation("k"), fresh_token());
    h.acquire(&operation, owner).await;
    let answers = at_once(&h.handles(HANDLES).await, CLAIMS, |store, n| {
        let (operation, completion) = (operation.clone(), h.completion(owner, Reply::ok(format!("{n}"))));
        async move { store.complete(&operation, &completion).await }
    })
    .await;
    let first = h.replay(&operation).await.reply;
    let mut stored_times = 0;
    for answer in answers {
        match answer {
            CompleteOutcome::Stored(stored) => {
                stored_times += 1;
                assert_eq!(stored.reply, first);
            }
            CompleteOutcome::AlreadyStored(stored) => assert_eq!(stored.reply, first),
            other => panic!("expected Stored or AlreadyStored, got {other:?}"),
        }
    }
    assert_eq!(stored_times, 1);
}

/// A thousand operations are claimed and completed at once; each replays its own reply.
pub async fn a_thousand_operations_at_once(h: &Harness) {
    let handles = h.handles(HANDLES).await;
    let answers = at_once(&handles, 1000, |store, n| {
        let (operation, owner) = (h.operation(&format!("key {n}")), fresh_token());
        let (request, completion) = (h.request(owner), h.completion(owner, Reply::ok(format!("reply {n}"))));
        // The lease runs while a thousand wait for their turn.
        let request = onlyonce_core::ClaimRequest { lease: Duration::from_secs(300), ..request };
        async move {
            let claim = when_there_is_room(|| store.claim(&operation, &request)).await?;
            let end = when_there_is_room(|| store.complete(&operation, &completion)).await?;
            Ok((claim, end))
        }
    })
    .await;
    for (n, (claim, end)) in answers.into_iter().enumerate() {
        assert!(matches!(claim, ClaimOutcome::Acquired(lease) if lease.attempt == 1), "{n}: {claim:?}");
        assert!(matches!(end, CompleteOutcome::Stored(_)), "{n}: {end:?}");
    }
    for n in (0..1000).step_by(37) {
        assert_eq!(h.replay(&h.operation(&format!("key {n}"))).await.reply, Reply::ok(format!("reply {n}")));
    }
}

type Call<'a, T> = Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send + 'a>>;

/// Asks again while a bounded queue of the store is full: that is a refusal, not a fault.
async fn when_there_is_room<'a, T>(ask: impl Fn() -> Call<'a, T>) -> Result<T, StoreError> {
    loop {
        match ask().await {
            Err(error) if error.kind() == onlyonce_core::StoreErrorKind::Overloaded => {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            answer => return answer,
        }
    }
}

async fn one_winner(
    h: &Harness,
    handles: &[Arc<dyn Store>],
    operation: &Operation,
    attempt: u32,
) -> LeaseToken {
    let mut winner = None;
    for (token, answer) in claim_all(h, handles, operation).await {
        match answer {
            ClaimOutcome::Acquired(lease) => {
                assert_eq!((lease.token, lease.attempt), (token, attempt));
                assert_eq!(winner.replace(token), None, "two owners of one operation");
            }
            ClaimOutcome::InProgress { lease_left, .. } => assert!(!lease_left.is_zero()),
            other => panic!("expected Acquired or InProgress, got {other:?}"),
        }
    }
    winner.expect("one claim is Acquired")
}

async fn claim_all(
    h: &Harness,
    handles: &[Arc<dyn Store>],
    operation: &Operation,
) -> Vec<(LeaseToken, ClaimOutcome)> {
    at_once(handles, CLAIMS, |store, _| {
        let (operation, request) = (operation.clone(), h.request(fresh_token()));
        async move { Ok((request.token, store.claim(&operation, &request).await?)) }
    })
    .await
}

/// Starts `count` calls, spread over the handles, at the same moment; answers in the order of their numbers.
async fn at_once<T, F>(
    handles: &[Arc<dyn Store>],
    count: usize,
    call: impl Fn(Arc<dyn Store>, usize) -> F,
) -> Vec<T>
where
    T: Send + 'static,
    F: Future<Output = Result<T, StoreError>> + Send + 'static,
{
    let start = Arc::new(Barrier::new(count));
    let mut calls = JoinSet::new();
    for n in 0..count {
        let (start, call) = (Arc::clone(&start), call(Arc::clone(&handles[n % handles.len()]), n));
        calls.spawn(async move {
            start.wait().await;
            (n, call.await)
        });
    }
    let mut answers: Vec<_> = calls.join_all().await;
    answers.sort_by_key(|(n, _)| *n);
    answers.into_iter().map(|(_, answer)| answered(answer)).collect()
}
