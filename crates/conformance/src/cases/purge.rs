//! The purge removes what is over, in bounded batches, and nothing else.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use onlyonce_core::{
    ClaimOutcome, ClaimRequest, CompleteOutcome, Completion, PurgeRequest, Purged, RenewOutcome, Reply,
};

use crate::harness::{answered, fresh_token};
use crate::{Expiry, Harness};

const WEEK: Duration = Duration::from_secs(7 * 24 * 3600);

/// Replies are purged when they have expired and not before.
pub async fn only_expired_replies_are_purged(h: &Harness) {
    completed(h, "old", h.retention()).await;
    completed(h, "kept", h.retention() * 100).await;
    assert_eq!(h.purge(100, WEEK).await, Purged::default());
    h.advance(h.retention()).await;
    assert_eq!(h.purge(100, WEEK).await, purged(h, 1, false));
    assert_eq!(h.purge(100, WEEK).await, Purged::default());
    assert_eq!(h.replay(&h.operation("kept")).await.reply, Reply::ok("kept"));
    assert_eq!(h.acquire(&h.operation("old"), fresh_token()).await.attempt, 1);
}

/// Records without a reply are kept for `hold_retention` after their lease ended, or was ended by a mark.
pub async fn records_without_a_reply_are_kept_for_the_hold_retention(h: &Harness) {
    let keep = h.unit() * 4;
    let [marked, held, dead] = ["marked", "held", "dead"].map(|key| (h.operation(key), fresh_token()));
    h.acquire(&marked.0, marked.1).await;
    h.mark_unknown(&marked.0, marked.1).await;
    h.acquire_as(&held.0, &h.hold(held.1)).await;
    h.acquire(&dead.0, dead.1).await;
    h.advance(h.unit() * 2).await;
    assert_eq!(h.purge(100, keep).await, Purged::default());
    h.advance(h.unit() * 2 + h.unit() / 2).await;
    assert_eq!(h.purge(100, keep).await, purged(h, 1, false), "the mark ended its lease at once");
    h.unknown_since(&held.0).await;
    h.advance(h.lease()).await;
    assert_eq!(h.purge(100, keep).await, purged(h, 2, false));
    match h.expiry() {
        Expiry::ByPurge => {
            for (operation, _) in [&marked, &held, &dead] {
                assert_eq!(h.acquire(operation, fresh_token()).await.attempt, 1);
            }
        }
        // Its own rule must keep what people have to look at.
        Expiry::ByStore => {
            h.unknown_since(&marked.0).await;
            h.unknown_since(&held.0).await;
        }
    }
}

/// A live lease is safe from every purge, however short the hold retention and however old the claim.
pub async fn a_live_lease_is_never_purged(h: &Harness) {
    let (operation, owner) = (h.operation("k"), fresh_token());
    h.acquire(&operation, owner).await;
    for _ in 0..3 {
        h.advance(h.unit() * 2).await;
        assert_eq!(h.purge(100, Duration::ZERO).await, Purged::default());
        assert_eq!(h.renew(&operation, owner).await, RenewOutcome::Renewed);
    }
    h.finish(&operation, owner, Reply::ok("done")).await;
    assert_eq!(h.purge(100, Duration::ZERO).await, Purged::default());
    assert_eq!(h.replay(&operation).await.reply, Reply::ok("done"));
}

/// One batch removes at most `limit` records and says whether more are waiting.
pub async fn a_purge_is_bounded(h: &Harness) {
    for n in 0..25 {
        completed(h, &format!("old {n}"), h.unit()).await;
    }
    let (held, holder) = (h.operation("held"), fresh_token());
    h.acquire_as(&held, &ClaimRequest { lease: h.unit() / 2, ..h.hold(holder) }).await;
    h.advance(h.unit()).await;
    for (removed, more) in [(10, true), (10, true), (5, false), (0, false)] {
        assert_eq!(h.purge(10, WEEK).await, purged(h, removed, more));
    }
    // A batch filled to the brim is not the sign of more.
    for n in 0..10 {
        completed(h, &format!("second {n}"), h.unit()).await;
    }
    h.advance(h.unit()).await;
    assert_eq!(h.purge(10, WEEK).await, purged(h, 10, false));
    h.finish(&held, holder, Reply::ok("late")).await;
}

/// While a purge runs without pause, claims, renewals and completions on other keys and on the very keys that
/// expired go on, and nothing that lives is lost.
pub async fn a_purge_under_load_loses_nothing(h: &Harness) {
    const KEYS: usize = 120;
    for n in 0..KEYS {
        completed(h, &format!("again {n}"), h.unit()).await;
    }
    h.advance(h.unit()).await;
    let done = Arc::new(AtomicBool::new(false));
    let purger = tokio::spawn({
        let (store, done) = (h.store(), Arc::clone(&done));
        async move {
            while !done.load(Ordering::Acquire) {
                answered(store.purge(&PurgeRequest { limit: 7, hold_retention: Duration::ZERO }).await);
                tokio::task::yield_now().await;
            }
        }
    });
    let mut work = tokio::task::JoinSet::new();
    for (n, store) in h.handles(4).await.into_iter().enumerate() {
        let keys: Vec<_> = (n..2 * KEYS)
            .step_by(4)
            .map(|n| if n < KEYS { format!("again {n}") } else { format!("new {n}") })
            .map(|key| (h.operation(&key), h.request(fresh_token())))
            .collect();
        let long = Duration::from_secs(300);
        work.spawn(async move {
            for (operation, request) in keys {
                let owner = request.token;
                let claim = answered(store.claim(&operation, &ClaimRequest { lease: long, ..request }).await);
                assert!(matches!(claim, ClaimOutcome::Acquired(lease) if lease.attempt == 1), "{claim:?}");
                tokio::task::yield_now().await;
                assert_eq!(answered(store.renew(&operation, owner, long).await), RenewOutcome::Renewed);
                let reply = Reply::ok("done");
                let completion = Completion { token: owner, attempt: 1, reply, retention: long };
                let end = answered(store.complete(&operation, &completion).await);
                assert!(matches!(end, CompleteOutcome::Stored(_)), "{end:?}");
            }
        });
    }
    while let Some(worker) = work.join_next().await {
        worker.expect("no worker panicked");
    }
    done.store(true, Ordering::Release);
    purger.await.expect("the purger did not panic");
    for n in 0..2 * KEYS {
        let key = if n < KEYS { format!("again {n}") } else { format!("new {n}") };
        assert_eq!(h.replay(&h.operation(&key)).await.reply, Reply::ok("done"), "{key}");
    }
}

fn purged(h: &Harness, removed: u64, more: bool) -> Purged {
    match h.expiry() {
        Expiry::ByPurge => Purged { removed, more, paused: false },
        Expiry::ByStore => Purged::default(),
    }
}

async fn completed(h: &Harness, key: &str, retention: Duration) {
    let (operation, owner) = (h.operation(key), fresh_token());
    h.acquire(&operation, owner).await;
    let completion = Completion { retention, ..h.completion(owner, Reply::ok(key.to_owned())) };
    answered(h.store().complete(&operation, &completion).await);
}
