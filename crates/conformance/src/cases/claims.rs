//! One owner claims, asks again, renews, gives back.

use std::time::Duration;

use onlyonce_core::{ClaimOutcome, ClaimRequest, ReleaseOutcome, RenewOutcome, Reply};

use crate::Harness;
use crate::harness::fresh_token;

/// The first claim is Acquired as attempt 1; every other handle sees it in progress, with what is left of the lease
/// and its age.
pub async fn a_claim_is_acquired_and_others_are_in_progress(h: &Harness) {
    let (operation, owner) = (h.operation("k"), fresh_token());
    assert_eq!(h.acquire(&operation, owner).await.attempt, 1);
    h.advance(h.unit()).await;
    for store in h.handles(3).await {
        match store.claim(&operation, &h.request(fresh_token())).await {
            Ok(ClaimOutcome::InProgress { lease_left, age, .. }) => {
                assert!(h.is_about(lease_left, h.unit() * 2), "{lease_left:?} of the lease left");
                assert!(h.is_about(h.unit(), age) || h.is_about(age, h.unit()), "claimed {age:?} ago");
            }
            other => panic!("expected InProgress, got {other:?}"),
        }
    }
}

/// The owner asks again with its token, as after a lost answer: Acquired, the same attempt, a full lease, its age kept.
pub async fn a_claim_is_reentrant_for_its_own_token(h: &Harness) {
    let (operation, owner) = (h.operation("k"), fresh_token());
    h.acquire(&operation, owner).await;
    h.advance(h.unit() * 2).await;
    for store in h.handles(2).await {
        match store.claim(&operation, &h.request(owner)).await {
            Ok(ClaimOutcome::Acquired(lease)) => {
                assert_eq!((lease.attempt, lease.token, lease.duration), (1, owner, h.lease()));
            }
            other => panic!("expected Acquired, got {other:?}"),
        }
    }
    match h.claim(&operation, fresh_token()).await {
        ClaimOutcome::InProgress { lease_left, age, .. } => {
            assert!(h.is_about(lease_left, h.lease()), "only {lease_left:?} of a full lease left");
            assert!(age >= h.unit() * 2, "the owner claimed it {age:?} ago");
        }
        other => panic!("expected InProgress, got {other:?}"),
    }
    // The lease is the one that was asked for last, also where it is the shorter one.
    for lease in [h.lease() * 2, h.lease()] {
        let request = ClaimRequest { lease, ..h.request(owner) };
        assert_eq!(h.acquire_as(&operation, &request).await.duration, lease);
        assert!(h.is_about(h.lease_left(&operation).await, lease), "not the lease of the latest claim");
    }
    h.finish(&operation, owner, Reply::ok("done")).await;
    assert_eq!(h.replay(&operation).await.reply, Reply::ok("done"));
}

/// Asked again after its lease, the owner still gets it back as the same attempt, under both policies.
pub async fn a_late_reentrant_claim_keeps_its_attempt(h: &Harness) {
    for (key, hold) in [("taken over at will", false), ("held", true)] {
        let (operation, owner) = (h.operation(key), fresh_token());
        let request = if hold { h.hold(owner) } else { h.request(owner) };
        h.acquire_as(&operation, &request).await;
        h.advance(h.lease() * 2).await;
        assert_eq!(h.acquire_as(&operation, &request).await.attempt, 1);
        assert!(h.is_about(h.lease_left(&operation).await, h.lease()));
    }
}

/// A caller that never got its claim's answer gives it back with the token, as often as it likes; nothing is left held,
/// and a late release does not touch the next owner.
pub async fn a_lost_claim_is_released_in_the_background(h: &Harness) {
    let (operation, lost, next) = (h.operation("k"), fresh_token(), fresh_token());
    assert_eq!(h.release(&operation, lost).await, ReleaseOutcome::Absent);
    h.acquire(&operation, lost).await;
    assert_eq!(h.release(&operation, lost).await, ReleaseOutcome::Applied);
    assert_eq!(h.release(&operation, lost).await, ReleaseOutcome::Absent);
    assert_eq!(h.acquire(&operation, next).await.attempt, 1);
    assert_eq!(h.release(&operation, lost).await, ReleaseOutcome::Fenced);
    assert!(h.is_about(h.lease_left(&operation).await, h.lease()));
    h.finish(&operation, next, Reply::ok("done")).await;
}

/// After a release the operation is new: another request may claim the key, under another policy.
pub async fn another_owner_may_claim_after_a_release(h: &Harness) {
    let (operation, first, second) = (h.operation("k"), fresh_token(), fresh_token());
    h.acquire(&operation, first).await;
    assert_eq!(h.release(&operation, first).await, ReleaseOutcome::Applied);
    let other = operation.with_fingerprint(onlyonce_core::Fingerprint::of("another request"));
    assert_eq!(h.acquire_as(&other, &h.hold(second)).await.attempt, 1);
    assert!(matches!(h.claim(&operation, fresh_token()).await, ClaimOutcome::Mismatch { .. }));
    h.advance(h.lease()).await;
    h.unknown_since(&other).await;
}

/// Renewed in time, an operation stays its owner's for as long as it likes; each renewal counts from its own moment.
pub async fn renewal_holds_the_operation_for_many_leases(h: &Harness) {
    let (operation, owner) = (h.operation("k"), fresh_token());
    h.acquire(&operation, owner).await;
    for _ in 0..4 {
        h.advance(h.unit()).await;
        assert_eq!(h.renew(&operation, owner).await, RenewOutcome::Renewed);
        assert!(h.is_about(h.lease_left(&operation).await, h.lease()));
    }
    // A renewal sets the lease, it does not add to it, and it may shorten it.
    let short: Duration = h.unit();
    for _ in 0..2 {
        let renewed = h.store().renew(&operation, owner, short).await.expect("the store answers");
        assert_eq!(renewed, RenewOutcome::Renewed);
    }
    h.advance(short).await;
    assert_eq!(h.acquire(&operation, fresh_token()).await.attempt, 2);
}
