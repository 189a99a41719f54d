//! Places for what is in flight: counted, bounded, and waited for at shutdown.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::Notify;

#[derive(Debug)]
pub(crate) struct Slots {
    taken: AtomicUsize,
    max: usize,
    idle: Notify,
}

/// One place, given back when dropped.
#[derive(Debug)]
pub(crate) struct Slot(Arc<Slots>);

impl Slots {
    pub(crate) fn new(max: usize) -> Arc<Self> {
        Arc::new(Self { taken: AtomicUsize::new(0), max, idle: Notify::new() })
    }

    /// `None` when all are taken.
    pub(crate) fn take(self: &Arc<Self>) -> Option<Slot> {
        // SeqCst, for `Shared::take_slot` orders it against the mark of shutdown.
        self.taken
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |taken| (taken < self.max).then_some(taken + 1))
            .is_ok()
            .then(|| Slot(self.clone()))
    }

    pub(crate) fn taken(&self) -> usize {
        self.taken.load(Ordering::SeqCst)
    }

    /// Returns at a moment when none is taken.
    pub(crate) async fn idle(&self) {
        loop {
            let notified = self.idle.notified();
            // Created before the look: a slot given back in between wakes it.
            if self.taken() == 0 {
                return;
            }
            notified.await;
        }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        if self.0.taken.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.0.idle.notify_waiters();
        }
    }
}
