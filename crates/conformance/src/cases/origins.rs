//! Which request made the record: kept, told in every answer, never compared.

use onlyonce_core::{
    ClaimOutcome, CompleteOutcome, Completion, Fingerprint, Operation, Origin, Reply, StoredReply,
};

use crate::Harness;
use crate::harness::{answered, fresh_token};

/// Whatever a claim is answered, it is told the owner's origin, as it was given, and its own is forgotten.
pub async fn every_answer_tells_the_origin_of_the_owner(h: &Harness) {
    // As long as it may be, and not ASCII alone.
    let longest = format!("요청 {}", "x".repeat(255 - "요청 ".len()));
    for (key, origin) in
        [("usual", "req-1 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"), ("long", &longest)]
    {
        let (operation, owner) = (from(&h.operation(key), origin), fresh_token());
        let retry = from(&operation, "a retry");
        let other = retry.with_fingerprint(Fingerprint::of("another request"));
        h.acquire(&operation, owner).await;
        assert_eq!(origin_of(&h.claim(&retry, fresh_token()).await), Some(origin), "in progress");
        assert_eq!(origin_of(&h.claim(&other, fresh_token()).await), Some(origin), "mismatch");
        h.mark_unknown(&operation, owner).await;
        assert_eq!(origin_of(&h.claim(&retry, fresh_token()).await), Some(origin), "unknown");
        let stored = h.finish(&operation, owner, Reply::ok("done")).await;
        assert_eq!(stored.origin.as_ref().map(Origin::as_str), Some(origin), "stored");
        for store in h.handles(2).await {
            let answer = answered(store.claim(&retry, &h.request(fresh_token())).await);
            assert_eq!(origin_of(&answer), Some(origin), "completed");
        }
        assert_eq!(
            origin_of(&h.claim(&other, fresh_token()).await),
            Some(origin),
            "mismatch of a completed one"
        );
        match h.complete(&operation, owner, Reply::ok("again")).await {
            CompleteOutcome::AlreadyStored(stored) => assert_eq!(text(&stored), Some(origin)),
            other => panic!("expected AlreadyStored, got {other:?}"),
        }
        if let Some(admin) = h.admin_if_any() {
            let view = answered(admin.show(operation.id()).await).expect("the record");
            assert_eq!(view.origin.as_ref().map(Origin::as_str), Some(origin), "shown");
        }
    }
}

/// A takeover is another run, and so is one after a release or the end of the reply: the origin is that of its owner.
pub async fn the_origin_is_that_of_the_last_owner(h: &Harness) {
    let operation = h.operation("k");
    let owned = [from(&operation, "first"), operation.clone(), from(&operation, "third")];
    for (attempt, operation) in (1..).zip(&owned) {
        let owner = fresh_token();
        assert_eq!(h.acquire(operation, owner).await.attempt, attempt);
        let told = h.claim(&from(operation, "a retry"), fresh_token()).await;
        assert_eq!(origin_of(&told), operation.origin().map(Origin::as_str), "attempt {attempt}");
        h.advance(h.lease()).await;
    }
    let (last, owner) = (from(&operation, "fourth"), fresh_token());
    h.acquire(&last, owner).await;
    h.release(&last, owner).await;
    h.acquire(&operation, owner).await;
    assert_eq!(origin_of(&h.claim(&last, fresh_token()).await), None, "released, so forgotten");
    h.finish(&operation, owner, Reply::ok("done")).await;
    h.advance(h.retention()).await;
    h.acquire(&last, fresh_token()).await;
    assert_eq!(origin_of(&h.claim(&operation, fresh_token()).await), Some("fourth"), "expired, so forgotten");
}

/// A completion that finds no record writes the origin with the rest.
pub async fn a_completion_without_a_record_keeps_its_origin(h: &Harness) {
    let (operation, owner) = (from(&h.operation("k"), "the lost one"), fresh_token());
    let completion = Completion { attempt: 2, ..h.completion(owner, Reply::ok("it happened")) };
    match answered(h.store().complete(&operation, &completion).await) {
        CompleteOutcome::StoredAnew(stored) => assert_eq!(text(&stored), Some("the lost one")),
        other => panic!("expected StoredAnew, got {other:?}"),
    }
    assert_eq!(text(&h.replay(&h.operation("k")).await), Some("the lost one"));
}

fn from(operation: &Operation, origin: &str) -> Operation {
    operation.clone().with_origin(Some(Origin::new(origin).expect("a valid origin")))
}

fn origin_of(answer: &ClaimOutcome) -> Option<&str> {
    match answer {
        ClaimOutcome::Completed(stored) => text(stored),
        ClaimOutcome::InProgress { origin, .. }
        | ClaimOutcome::Mismatch { origin, .. }
        | ClaimOutcome::Unknown { origin, .. } => origin.as_ref().map(Origin::as_str),
        ClaimOutcome::Acquired(_) => panic!("expected an answer, got {answer:?}"),
    }
}

fn text(stored: &StoredReply) -> Option<&str> {
    stored.origin.as_ref().map(Origin::as_str)
}
