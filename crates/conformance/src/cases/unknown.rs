//! It may have happened, and nobody may run it again.

use onlyonce_core::{ClaimOutcome, ReleaseOutcome, RenewOutcome, Reply};

use crate::Harness;
use crate::harness::fresh_token;

/// A held operation is unknown once its lease is over, since that moment, and stays so.
pub async fn a_held_operation_is_unknown_since_its_lease_ended(h: &Harness) {
    let (operation, owner) = (h.operation("k"), fresh_token());
    h.acquire_as(&operation, &h.hold(owner)).await;
    h.advance(h.lease()).await;
    let ended = h.wall().await;
    let since = h.unknown_since(&operation).await;
    assert!(h.is_same_moment(since, ended), "unknown since {since:?}, the lease ended {ended:?}");
    h.advance(h.lease() * 2).await;
    assert!(h.is_same_moment(h.unknown_since(&operation).await, since), "since then, however late one asks");
}

/// A mark ends the lease at once, is idempotent, and is never undone by a claim of somebody else, whatever both
/// policies allow.
pub async fn a_mark_ends_the_lease_at_once_for_good(h: &Harness) {
    let (operation, owner) = (h.operation("k"), fresh_token());
    h.acquire(&operation, owner).await;
    h.advance(h.unit()).await;
    let marked = h.wall().await;
    assert_eq!(h.mark_unknown(&operation, owner).await, ReleaseOutcome::Applied);
    let since = h.unknown_since(&operation).await;
    assert!(h.is_same_moment(since, marked), "unknown since {since:?}, marked {marked:?}");
    h.advance(h.lease() * 2).await;
    assert_eq!(h.mark_unknown(&operation, owner).await, ReleaseOutcome::Applied);
    for store in h.handles(2).await {
        match store.claim(&operation, &h.request(fresh_token())).await {
            Ok(ClaimOutcome::Unknown { since: again, .. }) => assert!(h.is_same_moment(again, since)),
            other => panic!("expected Unknown, got {other:?}"),
        }
    }
}

/// The owner's completion resolves an unknown outcome, marked or held, however late.
pub async fn a_completion_resolves_an_unknown_outcome(h: &Harness) {
    let (marked, held) = (h.operation("marked"), h.operation("held"));
    let (one, two) = (fresh_token(), fresh_token());
    h.acquire(&marked, one).await;
    h.mark_unknown(&marked, one).await;
    h.acquire_as(&held, &h.hold(two)).await;
    h.advance(h.lease() * 2).await;
    for (operation, owner) in [(marked, one), (held, two)] {
        h.unknown_since(&operation).await;
        h.finish(&operation, owner, Reply::ok("it did happen")).await;
        assert_eq!(h.replay(&operation).await.reply, Reply::ok("it did happen"));
    }
}

/// The owner's renewal makes an unknown outcome work in progress again, with a full lease and under its old policy.
pub async fn a_renewal_resumes_an_unknown_outcome(h: &Harness) {
    let (operation, owner) = (h.operation("k"), fresh_token());
    h.acquire(&operation, owner).await;
    h.mark_unknown(&operation, owner).await;
    h.advance(h.lease()).await;
    h.unknown_since(&operation).await;
    assert_eq!(h.renew(&operation, owner).await, RenewOutcome::Renewed);
    assert!(h.is_about(h.lease_left(&operation).await, h.lease()));
    h.advance(h.lease()).await;
    assert_eq!(h.acquire(&operation, fresh_token()).await.attempt, 2);
}

/// The owner's release of an unknown outcome frees the key.
pub async fn a_release_frees_an_unknown_outcome(h: &Harness) {
    let (operation, owner) = (h.operation("k"), fresh_token());
    h.acquire_as(&operation, &h.hold(owner)).await;
    h.mark_unknown(&operation, owner).await;
    assert_eq!(h.release(&operation, fresh_token()).await, ReleaseOutcome::Fenced);
    h.unknown_since(&operation).await;
    assert_eq!(h.release(&operation, owner).await, ReleaseOutcome::Applied);
    assert_eq!(h.acquire(&operation, fresh_token()).await.attempt, 1);
}

/// A claim is re-entrant for its own token even then: the owner resumes as the same attempt.
pub async fn the_owner_may_claim_an_unknown_outcome_again(h: &Harness) {
    let (operation, owner) = (h.operation("k"), fresh_token());
    h.acquire(&operation, owner).await;
    h.mark_unknown(&operation, owner).await;
    assert_eq!(h.acquire(&operation, owner).await.attempt, 1);
    assert!(h.is_about(h.lease_left(&operation).await, h.lease()));
}
