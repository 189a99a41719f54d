//! How many bytes of requests and replies may be held at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};

/// A bound on all buffers of a layer, its clones and its services.
#[derive(Clone, Debug)]
pub(crate) struct Budget(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    max_bytes: usize,
    used_bytes: AtomicUsize,
    waiting: AtomicUsize,
    freed: Notify,
}

/// A share of the budget, given back when dropped.
#[derive(Debug)]
pub(crate) struct Permit {
    budget: Budget,
    bytes: usize,
}

impl Budget {
    pub(crate) fn new(max_bytes: usize) -> Self {
        Self(Arc::new(Shared {
            max_bytes,
            used_bytes: AtomicUsize::new(0),
            waiting: AtomicUsize::new(0),
            freed: Notify::new(),
        }))
    }

    /// A share of this many bytes, if there is room.
    pub(crate) fn take(&self, bytes: usize) -> Option<Permit> {
        let mut permit = Permit { budget: self.clone(), bytes: 0 };
        permit.grow_to(bytes).then_some(permit)
    }
}

impl Permit {
    /// Makes the share this large at least, if there is room.
    pub(crate) fn grow_to(&mut self, bytes: usize) -> bool {
        let Some(more) = bytes.checked_sub(self.bytes).filter(|more| *more > 0) else { return true };
        let shared = &self.budget.0;
        let taken = shared.used_bytes.fetch_update(Ordering::AcqRel, Ordering::Relaxed, |used| {
            used.checked_add(more).filter(|used| *used <= shared.max_bytes)
        });
        if taken.is_ok() {
            self.bytes = bytes;
        }
        taken.is_ok()
    }

    /// Like [`grow_to`](Self::grow_to), and waits up to `patience` for others to give room back.
    pub(crate) async fn grow_to_within(&mut self, bytes: usize, patience: Duration) -> bool {
        if self.grow_to(bytes) {
            return true;
        }
        let shared = self.budget.0.clone();
        let until = Instant::now() + patience;
        shared.waiting.fetch_add(1, Ordering::AcqRel);
        let _waiting = Waiting(&shared);
        loop {
            // Listening starts before the look, so that nothing freed in between is missed.
            let freed = shared.freed.notified();
            tokio::pin!(freed);
            freed.as_mut().enable();
            if self.grow_to(bytes) {
                return true;
            }
            if timeout_at(until, freed).await.is_err() {
                return self.grow_to(bytes);
            }
        }
    }

    /// Gives back all but this many bytes.
    pub(crate) fn shrink_to(&mut self, bytes: usize) {
        self.give_back(self.bytes.saturating_sub(bytes));
    }

    fn give_back(&mut self, bytes: usize) {
        self.bytes -= bytes;
        let shared = &self.budget.0;
        shared.used_bytes.fetch_sub(bytes, Ordering::AcqRel);
        if shared.waiting.load(Ordering::Acquire) > 0 {
            shared.freed.notify_waiters();
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.give_back(self.bytes);
    }
}

struct Waiting<'a>(&'a Shared);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_is_given_back_can_be_taken() {
        let budget = Budget::new(100);
        let mut a = budget.take(60).unwrap();
        assert!(budget.take(41).is_none());
        let b = budget.take(40).unwrap();
        assert!(!a.grow_to(61) && a.grow_to(10));
        drop(b);
        assert!(a.grow_to(100));
        a.shrink_to(30);
        assert!(budget.take(70).is_some());
        let mut c = budget.take(70).unwrap();
        assert!(!c.grow_to_within(71, Duration::from_millis(10)).await);
        let waiter = tokio::spawn(async move { c.grow_to_within(100, Duration::from_secs(30)).await });
        testkit::wait_until("a waiter", || budget.0.waiting.load(Ordering::Acquire) == 1).await;
        drop(a);
        assert!(waiter.await.unwrap());
        assert_eq!(budget.0.used_bytes.load(Ordering::Acquire), 0);
    }
}
