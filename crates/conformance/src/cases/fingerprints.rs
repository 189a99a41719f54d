//! The same key for another request.

use onlyonce_core::{ClaimOutcome, DefinitionId, Fingerprint, Operation, Reply};

use crate::Harness;
use crate::harness::fresh_token;

/// Another request under a known key is a mismatch, whether that key is at work, over its lease, unknown or done; the
/// answer tells the stored fingerprint whole.
pub async fn a_mismatch_goes_before_every_state(h: &Harness) {
    let operations =
        ["late", "held", "unknown", "at work", "done"].map(|key| (h.operation(key), fresh_token()));
    let [late, held, unknown, at_work, done] = &operations;
    h.acquire(&late.0, late.1).await;
    h.acquire_as(&held.0, &h.hold(held.1)).await;
    h.acquire(&unknown.0, unknown.1).await;
    h.mark_unknown(&unknown.0, unknown.1).await;
    h.advance(h.lease()).await;
    h.acquire(&at_work.0, at_work.1).await;
    h.acquire(&done.0, done.1).await;
    h.finish(&done.0, done.1, Reply::ok("done")).await;
    for (operation, owner) in &operations {
        // Not even the owner's own token makes another request the same one.
        for token in [fresh_token(), *owner] {
            assert_mismatch(operation, &h.claim(&other(operation), token).await);
        }
    }
}

/// A mismatch changes nothing: the lease runs on as it did, the attempt stays, the stored reply still replays.
pub async fn a_mismatch_changes_nothing(h: &Harness) {
    let (operation, owner) = (h.operation("k"), fresh_token());
    h.acquire(&operation, owner).await;
    h.advance(h.unit()).await;
    assert_mismatch(&operation, &h.claim(&other(&operation), fresh_token()).await);
    assert!(h.is_about(h.lease_left(&operation).await, h.lease() - h.unit()));
    h.finish(&operation, owner, Reply::ok("done")).await;
    for _ in 0..3 {
        assert_mismatch(&operation, &h.claim(&other(&operation), fresh_token()).await);
        assert_eq!(h.replay(&operation).await.reply, Reply::ok("done"));
    }
}

/// Equal digests under two definitions are two fingerprints; the stored one comes back with its definition.
pub async fn fingerprints_of_two_definitions_differ(h: &Harness) {
    for (key, definition) in [("raw", 0), ("one", 1), ("greatest", u64::MAX), ("sign", 1 << 63)] {
        let made = |id| Fingerprint::builder(DefinitionId(id)).part("the request").finish();
        let operation = h.operation(key).with_fingerprint(made(definition));
        h.acquire(&operation, fresh_token()).await;
        let other = operation.with_fingerprint(made(7));
        assert_mismatch(&operation, &h.claim(&other, fresh_token()).await);
        assert!(!h.lease_left(&operation).await.is_zero());
    }
}

fn other(operation: &Operation) -> Operation {
    operation.with_fingerprint(Fingerprint::of("another request"))
}

fn assert_mismatch(operation: &Operation, answer: &ClaimOutcome) {
    assert_eq!(
        *answer,
        ClaimOutcome::Mismatch { stored: *operation.fingerprint(), origin: None },
        "{:?}",
        operation.id()
    );
}
