//! What a restart of the process leaves. A store that keeps nothing must say so, and then has nothing.

use onlyonce_core::{ClaimOutcome, ReleaseOutcome, RenewOutcome, Reply};

use crate::Harness;
use crate::harness::fresh_token;

/// A claim outlives a restart: others wait, its owner renews and completes.
pub async fn claims_and_their_owners_outlive_a_restart(h: &Harness) {
    let (operation, owner) = (h.operation("k"), fresh_token());
    h.acquire_as(&operation, &h.hold(owner)).await;
    h.restart().await;
    if forgotten(h, &operation).await {
        return;
    }
    assert!(h.lease_left(&operation).await <= h.lease());
    assert_eq!(h.renew(&operation, owner).await, RenewOutcome::Renewed);
    h.advance(h.lease()).await;
    h.unknown_since(&operation).await;
    h.finish(&operation, owner, Reply::ok("late")).await;
    assert_eq!(h.replay(&operation).await.reply, Reply::ok("late"));
}

/// A reply outlives a restart with its times, and its owner is still known.
pub async fn replies_outlive_a_restart(h: &Harness) {
    let (operation, owner) = (h.operation("k"), fresh_token());
    h.acquire(&operation, owner).await;
    let first = h.finish(&operation, owner, Reply::new(201, "done")).await;
    h.restart().await;
    if forgotten(h, &operation).await {
        return;
    }
    let stored = h.replay(&operation).await;
    assert_eq!(stored.reply, first.reply);
    assert!(h.is_same_moment(stored.completed_at, first.completed_at));
    assert!(h.is_same_moment(stored.expires_at, first.expires_at));
    assert_eq!(h.renew(&operation, owner).await, RenewOutcome::Ended);
    h.assert_fenced(&operation, fresh_token(), Some(&first.reply)).await;
}

/// An unknown outcome outlives a restart, with the moment since when, and its owner can still end it.
pub async fn unknown_outcomes_outlive_a_restart(h: &Harness) {
    let (operation, owner) = (h.operation("k"), fresh_token());
    h.acquire(&operation, owner).await;
    assert_eq!(h.mark_unknown(&operation, owner).await, ReleaseOutcome::Applied);
    let since = h.unknown_since(&operation).await;
    h.restart().await;
    if forgotten(h, &operation).await {
        return;
    }
    assert!(h.is_same_moment(h.unknown_since(&operation).await, since));
    h.finish(&operation, owner, Reply::ok("done")).await;
}

/// The attempt and the policy outlive a restart.
pub async fn attempts_outlive_a_restart(h: &Harness) {
    let operation = h.operation("k");
    h.acquire(&operation, fresh_token()).await;
    h.advance(h.lease()).await;
    assert_eq!(h.acquire(&operation, fresh_token()).await.attempt, 2);
    h.restart().await;
    if forgotten(h, &operation).await {
        return;
    }
    h.advance(h.lease()).await;
    assert_eq!(h.acquire(&operation, fresh_token()).await.attempt, 3);
}

/// For a store that keeps nothing: it says that it is not durable and what that means, and the operation runs anew.
async fn forgotten(h: &Harness, operation: &onlyonce_core::Operation) -> bool {
    if h.survives_restart() {
        return false;
    }
    let capabilities = h.store().capabilities();
    assert!(!capabilities.durable, "a store that forgets must not call itself durable");
    assert!(capabilities.hazard.is_some(), "a store that forgets must say so");
    match h.claim(operation, fresh_token()).await {
        ClaimOutcome::Acquired(lease) => assert_eq!(lease.attempt, 1),
        other => panic!("declared to forget, it remembers: {other:?}"),
    }
    true
}
