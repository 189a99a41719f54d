//! How many bytes of requests and replies may be held at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};

/// A bound on all buffers of a layer, its clones and its services. A quarter of it is for replies alone, so that requests
/// that wait never keep the one they wait for from being recorded whole.
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

    /// How many bytes are taken.
    pub(crate) fn used_bytes(&self) -> usize {
        self.0.used_bytes.load(Ordering::Relaxed)
    }

    /// A request's share of this many bytes, if there is room.
    pub(crate) fn take(&self, bytes: usize) -> Option<Permit> {
        let mut permit = Permit { budget: self.clone(), bytes: 0 };
        permit.grow_for_request(bytes).then_some(permit)
    }
}

impl Permit {
    /// Makes a request's share this large at least, if there is room.
    pub(crate) fn grow_for_request(&mut self, bytes: usize) -> bool {
        let bytes_max = self.budget.0.max_bytes;
        self.grow_to(bytes, bytes_max - bytes_max / 4)
    }

    /// Makes a reply's share this large at least; waits up to `patience` for others to give room back.
    pub(crate) async fn grow_for_reply(&mut self, bytes: usize, patience: Duration) -> bool {
        let bytes_max = self.budget.0.max_bytes;
        if self.grow_to(bytes, bytes_max) {
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
            if self.grow_to(bytes, bytes_max) {
                return true;
            }
            if timeout_at(until, freed).await.is_err() {
                return self.grow_to(bytes, bytes_max);
            }
        }
    }

    fn grow_to(&mut self, bytes: usize, bytes_max: usize) -> bool {
        let Some(more) = bytes.checked_sub(self.bytes).filter(|more| *more > 0) else { return true };
        let taken = self.budget.0.used_bytes.fetch_update(Ordering::AcqRel, Ordering::Relaxed, |used| {
            used.checked_add(more).filter(|used| *used <= bytes_max)
        });
        if taken.is_ok() {
            self.bytes = bytes;
        }
        taken.is_ok()
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
        assert!(budget.take(16).is_none());
        let b = budget.take(15).unwrap();
        assert!(!a.grow_for_request(61) && a.grow_for_request(10));
        drop(b);
        assert!(a.grow_for_request(75) && !a.grow_for_request(76));
        // The last quarter is for replies.
        let soon = Duration::from_millis(10);
        assert!(a.grow_for_reply(100, soon).await && !a.grow_for_reply(101, soon).await);
        a.shrink_to(30);
        let mut c = budget.take(45).unwrap();
        assert!(!c.grow_for_reply(71, soon).await);
        let waiter = tokio::spawn(async move { c.grow_for_reply(100, Duration::from_secs(30)).await });
        testkit::wait_until("a waiter", || budget.0.waiting.load(Ordering::Acquire) == 1).await;
        drop(a);
        assert!(waiter.await.unwrap());
        assert_eq!(budget.0.used_bytes.load(Ordering::Acquire), 0);
    }
}
