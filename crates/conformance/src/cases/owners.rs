//! An owner whose token is no longer the stored one can do nothing.

use onlyonce_core::{ClaimOutcome, CompleteOutcome, ReleaseOutcome, RenewOutcome, Reply};

use crate::Harness;
use crate::harness::fresh_token;

/// After a takeover every call of the old owner is Fenced and changes nothing, before and after the new one completes.
pub async fn a_stale_owner_is_fenced_after_a_takeover(h: &Harness) {
    let (operation, stale, owner) = (h.operation("k"), fresh_token(), fresh_token());
    h.acquire(&operation, stale).await;
    h.advance(h.lease()).await;
    h.acquire(&operation, owner).await;
    h.assert_fenced(&operation, stale, None).await;
    assert!(h.is_about(h.lease_left(&operation).await, h.lease()), "the new owner's lease is untouched");
    let reply = Reply::ok("by the new owner");
    h.finish(&operation, owner, reply.clone()).await;
    h.assert_fenced(&operation, stale, Some(&reply)).await;
    assert_eq!(h.replay(&operation).await.reply, reply);
}

/// Taken over, released by the second owner, claimed by a third: the first two are Fenced, though the attempt is 1 again.
pub async fn a_stale_owner_is_fenced_after_a_release_and_a_third_claim(h: &Harness) {
    let (operation, first, second, third) = (h.operation("k"), fresh_token(), fresh_token(), fresh_token());
    h.acquire(&operation, first).await;
    h.advance(h.lease()).await;
    assert_eq!(h.acquire(&operation, second).await.attempt, 2);
    assert_eq!(h.release(&operation, second).await, ReleaseOutcome::Applied);
    assert_eq!(h.acquire(&operation, third).await.attempt, 1);
    for stale in [first, second] {
        h.assert_fenced(&operation, stale, None).await;
    }
    let reply = Reply::ok("by the third owner");
    h.finish(&operation, third, reply.clone()).await;
    for stale in [first, second] {
        h.assert_fenced(&operation, stale, Some(&reply)).await;
    }
    assert_eq!(h.replay(&operation).await.reply, reply);
}

/// The owner of an expired reply is a stale owner once the key is claimed anew.
pub async fn a_stale_owner_is_fenced_after_expiry_and_a_new_claim(h: &Harness) {
    let (operation, first, second) = (h.operation("k"), fresh_token(), fresh_token());
    h.acquire(&operation, first).await;
    h.finish(&operation, first, Reply::ok("old")).await;
    h.advance(h.retention()).await;
    assert_eq!(h.acquire(&operation, second).await.attempt, 1);
    h.assert_fenced(&operation, first, None).await;
    h.finish(&operation, second, Reply::ok("new")).await;
    assert_eq!(h.replay(&operation).await.reply, Reply::ok("new"));
}

/// A stale owner that claims again with its old token is a caller like any other.
pub async fn a_stale_owner_that_claims_again_waits(h: &Harness) {
    let (operation, stale, owner) = (h.operation("k"), fresh_token(), fresh_token());
    h.acquire(&operation, stale).await;
    h.advance(h.lease()).await;
    h.acquire(&operation, owner).await;
    assert!(matches!(h.claim(&operation, stale).await, ClaimOutcome::InProgress { .. }));
    h.finish(&operation, owner, Reply::ok("done")).await;
    assert!(matches!(h.claim(&operation, stale).await, ClaimOutcome::Completed(_)));
}

/// A token owns the operation it was claimed for and no other, not even the same key in another scope.
pub async fn a_token_is_worth_nothing_on_another_operation(h: &Harness) {
    let (mine, other) = (h.operation("k"), crate::harness::operation("another scope", "k"));
    let (my_token, other_token) = (fresh_token(), fresh_token());
    h.acquire(&mine, my_token).await;
    h.acquire(&other, other_token).await;
    h.assert_fenced(&other, my_token, None).await;
    h.finish(&mine, my_token, Reply::ok("mine")).await;
    h.finish(&other, other_token, Reply::ok("other")).await;
    assert_eq!(h.replay(&mine).await.reply, Reply::ok("mine"));
    assert_eq!(h.replay(&other).await.reply, Reply::ok("other"));
}

/// Where no record is, renewal says Gone, release and mark say Absent, and none of them makes one.
pub async fn without_a_record_there_is_nothing_to_renew_or_release(h: &Harness) {
    let (operation, owner) = (h.operation("k"), fresh_token());
    for _ in 0..2 {
        assert_eq!(h.renew(&operation, owner).await, RenewOutcome::Gone);
        assert_eq!(h.release(&operation, owner).await, ReleaseOutcome::Absent);
        assert_eq!(h.mark_unknown(&operation, owner).await, ReleaseOutcome::Absent);
        h.acquire(&operation, owner).await;
        assert_eq!(h.release(&operation, owner).await, ReleaseOutcome::Applied);
    }
    let late = h.complete(&operation, owner, Reply::ok("it happened after all")).await;
    assert!(matches!(late, CompleteOutcome::StoredAnew(_)), "{late:?}");
}
