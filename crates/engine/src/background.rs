//! The heartbeat and the purge: one task each, gone with the last handle.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use onlyonce_core::crash::dies_at;
use onlyonce_core::{CrashPoint, Mutant, PurgeRequest, mutant};
use tokio::sync::Notify;
use tokio::time::{sleep, timeout};

use crate::idempotency::Shared;

pub(crate) fn start(shared: &Arc<Shared>) {
    tokio::spawn(heartbeat(Arc::downgrade(shared), shared.heartbeat_wake.clone()));
    if !shared.limits.purge_interval.is_zero() {
        tokio::spawn(purge(Arc::downgrade(shared), shared.limits.purge_interval));
    }
}

/// Renews each lease at a third of it. One sweep over what is in flight, a dozen times a lease, instead of a timer for
/// each of many operations that end long before their first renewal.
async fn heartbeat(shared: Weak<Shared>, wake: Arc<Notify>) {
    loop {
        let Some(lease_ms) = shared.upgrade().map(|shared| shared.shortest_lease_ms.load(Ordering::Relaxed))
        else {
            return;
        };
        // Woken when a handle with a shorter lease is made.
        let _ = timeout(Duration::from_millis((lease_ms / 12).clamp(5, 1000)), wake.notified()).await;
        let Some(shared) = shared.upgrade() else { return };
        shared.probe_in_background();
        let now = shared.clock.boot();
        let mut due = Vec::new();
        shared.flights.for_each_live(|live| {
            if live.renewal_due(now) {
                due.push(live.clone());
            }
        });
        // Who has the least time left goes first.
        due.sort_by_key(|live| (live.deadline(), *live.lease.token.as_bytes()));
        for live in due {
            // Marked as sent by `renew` before its first await: the next sweep does not send it twice.
            tokio::spawn(async move {
                if let Err(error) = live.renew().await {
                    tracing::warn!(error = %error, left = ?live.left(), "a lease could not be renewed yet");
                }
            });
        }
    }
}

async fn purge(weak: Weak<Shared>, interval: Duration) {
    let soon = mutant(Mutant::PurgeByAge) || dies_at(&[CrashPoint::PurgeBefore, CrashPoint::PurgeAfter]);
    let interval = if soon { Duration::from_millis(500) } else { interval };
    let quarter_ms = (interval.as_millis() / 4) as u64;
    loop {
        // Jitter, so that the instances on one store do not purge in step.
        let Some(jitter_ms) = weak.upgrade().map(|shared| shared.random.jitter(quarter_ms)) else { return };
        sleep(interval - Duration::from_millis(quarter_ms / 2) + Duration::from_millis(jitter_ms)).await;
        loop {
            let Some(shared) = weak.upgrade() else { return };
            let request = PurgeRequest { hold_retention: shared.limits.hold_retention, ..Default::default() };
            let call = shared.store.purge(&request);
            let Ok(purged) = shared.bounded("purge", Duration::from_secs(30), call).await else { break };
            shared.counters.purged.fetch_add(purged.removed, Ordering::Relaxed);
            if !purged.more {
                if !purged.paused {
                    let now_ms = shared.clock.boot().as_millis() as u64;
                    shared.purged_through_ms.store(now_ms, Ordering::Relaxed);
                }
                break;
            }
            drop(shared);
            // Claims go first.
            sleep(Duration::from_millis(20)).await;
        }
    }
}
