//! The end of an operation, and that it is final.

use std::time::Duration;

use onlyonce_core::{
    ClaimOutcome, CompleteOutcome, Completion, Fingerprint, ReleaseOutcome, RenewOutcome, Reply,
};

use crate::Harness;
use crate::harness::{answered, fresh_token};

/// Nobody took over: the owner's completion is stored after the end of its lease, under both policies.
pub async fn a_late_completion_is_stored(h: &Harness) {
    let (held, free) = (h.operation("held"), h.operation("taken over at will"));
    let (holder, owner) = (fresh_token(), fresh_token());
    h.acquire_as(&held, &h.hold(holder)).await;
    h.acquire(&free, owner).await;
    h.advance(h.lease() * 3).await;
    for (operation, token) in [(held, holder), (free, owner)] {
        h.finish(&operation, token, Reply::ok("late")).await;
        assert_eq!(h.replay(&operation).await.reply, Reply::ok("late"));
    }
}

/// The record was lost, but the effect happened: the completion writes it anew, whole, with the owner's attempt.
pub async fn a_completion_without_a_record_is_stored_anew(h: &Harness) {
    let (operation, owner) = (h.operation("k"), fresh_token());
    let reply = Reply::ok("it happened");
    let completion = Completion { attempt: 3, ..h.completion(owner, reply.clone()) };
    match answered(h.store().complete(&operation, &completion).await) {
        CompleteOutcome::StoredAnew(stored) => {
            assert_eq!(stored.reply, reply);
            assert!(h.is_about(stored.remaining, h.retention()));
        }
        other => panic!("expected StoredAnew, got {other:?}"),
    }
    assert_eq!(h.replay(&operation).await.reply, reply);
    let other = operation.with_fingerprint(Fingerprint::of("another request"));
    assert!(matches!(h.claim(&other, fresh_token()).await, ClaimOutcome::Mismatch { .. }));
    // Asked again it is an ordinary completed record.
    assert!(matches!(h.complete(&operation, owner, Reply::ok("2")).await, CompleteOutcome::AlreadyStored(_)));
    if let Some(admin) = h.admin_if_any() {
        let view = answered(admin.show(operation.id()).await).expect("the record");
        assert_eq!(view.attempt, 3);
    }
}

/// Completing twice with one token answers the first reply and keeps its times.
pub async fn a_repeated_completion_answers_the_first_reply(h: &Harness) {
    let (operation, owner) = (h.operation("k"), fresh_token());
    h.acquire(&operation, owner).await;
    let first = h.finish(&operation, owner, Reply::new(201, "first")).await;
    h.advance(h.unit()).await;
    for reply in [Reply::new(201, "first"), Reply::new(500, "second")] {
        match h.complete(&operation, owner, reply).await {
            CompleteOutcome::AlreadyStored(stored) => {
                assert_eq!(stored.reply, first.reply);
                assert!(h.is_same_moment(stored.completed_at, first.completed_at));
                assert!(h.is_same_moment(stored.expires_at, first.expires_at));
                assert!(h.is_about(stored.remaining, h.retention() - h.unit()));
            }
            other => panic!("expected AlreadyStored, got {other:?}"),
        }
    }
}

/// A completed record does not change until it expires: not by its own owner, not by anybody else, in no call.
pub async fn a_completed_record_never_changes(h: &Harness) {
    let (operation, owner, stranger) = (h.operation("k"), fresh_token(), fresh_token());
    h.acquire(&operation, owner).await;
    let first = h.finish(&operation, owner, Reply::new(201, "first")).await;
    for store in h.handles(2).await {
        assert_eq!(answered(store.renew(&operation, owner, h.lease()).await), RenewOutcome::Ended);
        assert_eq!(answered(store.release(&operation, owner).await), ReleaseOutcome::Fenced);
        assert_eq!(answered(store.mark_unknown(&operation, owner).await), ReleaseOutcome::Fenced);
        h.assert_fenced(&operation, stranger, Some(&first.reply)).await;
        for request in [h.request(owner), h.request(stranger), h.hold(stranger)] {
            match h.claim_as(&operation, &request).await {
                ClaimOutcome::Completed(stored) => assert_eq!(stored.reply, first.reply),
                other => panic!("expected Completed, got {other:?}"),
            }
        }
        h.purge(100, Duration::ZERO).await;
        h.advance(h.unit()).await;
    }
    let last = h.replay(&operation).await;
    assert_eq!(last.reply, first.reply);
    assert!(h.is_same_moment(last.completed_at, first.completed_at));
    assert!(h.is_same_moment(last.expires_at, first.expires_at), "nothing made it live longer");
}

/// A completion changes the state, not the fingerprint: the honest retry is not refused afterwards.
pub async fn a_completion_keeps_the_fingerprint_of_the_claim(h: &Harness) {
    let (operation, owner) = (h.operation("k"), fresh_token());
    h.acquire(&operation, owner).await;
    let other = operation.with_fingerprint(Fingerprint::of("another request"));
    h.finish(&other, owner, Reply::ok("done")).await;
    assert_eq!(h.replay(&operation).await.reply, Reply::ok("done"));
    assert_eq!(
        h.claim(&other, fresh_token()).await,
        ClaimOutcome::Mismatch { stored: *operation.fingerprint(), origin: None }
    );
}

/// A reply says when it was stored, when it expires, and how long it still lives.
pub async fn a_reply_lives_for_its_retention(h: &Harness) {
    let (operation, owner) = (h.operation("k"), fresh_token());
    h.acquire(&operation, owner).await;
    h.advance(h.unit()).await;
    let now = h.wall().await;
    let stored = h.finish(&operation, owner, Reply::ok("done")).await;
    assert!(h.is_same_moment(stored.completed_at, now), "completed {:?} at {now:?}", stored.completed_at);
    assert!(h.is_same_moment(stored.expires_at, now + h.retention()), "from the completion, not the claim");
    assert!(h.is_about(stored.remaining, h.retention()));
    h.advance(h.unit() * 2).await;
    let later = h.replay(&operation).await;
    assert!(h.is_same_moment(later.completed_at, stored.completed_at));
    assert!(h.is_same_moment(later.expires_at, stored.expires_at));
    assert!(h.is_about(later.remaining, h.retention() - h.unit() * 2), "{:?} left", later.remaining);
}

/// Long retentions do not overflow: ten years are ten years.
pub async fn a_reply_may_live_for_ten_years(h: &Harness) {
    let (operation, owner) = (h.operation("k"), fresh_token());
    let years = Duration::from_secs(10 * 365 * 24 * 3600);
    h.acquire_as(&operation, &onlyonce_core::ClaimRequest { retention: years, ..h.request(owner) }).await;
    let completion = Completion { retention: years, ..h.completion(owner, Reply::ok("kept")) };
    answered(h.store().complete(&operation, &completion).await);
    h.advance(h.retention()).await;
    h.purge(100, Duration::ZERO).await;
    let left = h.replay(&operation).await.remaining;
    assert!(h.is_about(left, years - h.retention()), "{left:?} left");
}
