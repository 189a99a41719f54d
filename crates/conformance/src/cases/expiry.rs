//! A record past `expires_at` is absent before anything else is looked at.

use std::time::Duration;

use onlyonce_core::{CompleteOutcome, Fingerprint, Operation, ReleaseOutcome, RenewOutcome, Reply};

use crate::harness::fresh_token;
use crate::{Harness, Time};

/// A reply replays until its retention is over, and is absent at that very moment: zero left is over.
pub async fn a_reply_expires_exactly_at_its_bound(h: &Harness) {
    let operation = completed(h, "k").await.0;
    match h.time() {
        Time::Told => {
            h.advance(h.retention() - Duration::from_millis(1)).await;
            assert_eq!(h.replay(&operation).await.remaining, Duration::from_millis(1));
            h.advance(Duration::from_millis(1)).await;
        }
        // Real time cannot be stopped at the bound: two units before it and just past it must do.
        Time::Real { unit } => {
            h.advance(h.retention() - unit * 2).await;
            assert_eq!(h.replay(&operation).await.reply, Reply::ok("old"));
            h.advance(unit * 2).await;
        }
    }
    assert_eq!(h.acquire(&operation, fresh_token()).await.attempt, 1);
}

/// Expired, the key is free for another request, before any purge; nothing of the old record is left in the new one.
pub async fn an_expired_record_is_absent_before_its_fingerprint_is_compared(h: &Harness) {
    let (operation, owner) = (h.operation("k"), fresh_token());
    h.acquire(&operation, fresh_token()).await;
    h.advance(h.lease()).await;
    assert_eq!(h.acquire_as(&operation, &h.request(owner)).await.attempt, 2);
    h.finish(&operation, owner, Reply::ok("old")).await;
    h.advance(h.retention()).await;
    let (other, next) = (operation.with_fingerprint(Fingerprint::of("another request")), fresh_token());
    assert_eq!(h.acquire(&other, next).await.attempt, 1);
    assert!(h.is_about(h.lease_left(&other).await, h.lease()));
    h.finish(&other, next, Reply::ok("new")).await;
    assert_eq!(h.replay(&other).await.reply, Reply::ok("new"));
}

/// Its own owner finds nothing either; a completion that comes that late writes it anew.
pub async fn an_expired_record_is_absent_for_its_owner(h: &Harness) {
    let (operation, owner) = completed(h, "k").await;
    h.advance(h.retention()).await;
    assert_eq!(h.renew(&operation, owner).await, RenewOutcome::Gone);
    assert_eq!(h.release(&operation, owner).await, ReleaseOutcome::Absent);
    assert_eq!(h.mark_unknown(&operation, owner).await, ReleaseOutcome::Absent);
    let late = h.complete(&operation, owner, Reply::ok("anew")).await;
    assert!(matches!(late, CompleteOutcome::StoredAnew(_)), "{late:?}");
    let stored = h.replay(&operation).await;
    assert_eq!(stored.reply, Reply::ok("anew"));
    assert!(h.is_about(stored.remaining, h.retention()));
}

async fn completed(h: &Harness, key: &str) -> (Operation, onlyonce_core::LeaseToken) {
    let (operation, owner) = (h.operation(key), fresh_token());
    h.acquire(&operation, owner).await;
    h.finish(&operation, owner, Reply::ok("old")).await;
    (operation, owner)
}
