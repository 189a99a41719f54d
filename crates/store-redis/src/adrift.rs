//! Copies of claims that were sent and not answered.
//!
//! A claim that waits behind WAIT on one connection may be asked again on another, be taken back there, and come alive
//! when the WAIT is over: a record that nobody owns, of an operation that nobody ran. So whoever takes a claim back waits
//! until the copies have arrived, and takes back what they wrote.

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use onlyonce_core::LeaseToken;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep, timeout_at};

use crate::link::Link;
use crate::request::What;

/// How long a copy may take to arrive on a connection that is still there.
const LANDING_MAX: Duration = Duration::from_secs(60);
/// How long it may take where the connection broke: the server drops what it had not begun with.
const BROKEN_MAX: Duration = Duration::from_secs(1);
/// Between two looks whether it is still to be sent.
const LOOK_PAUSE: Duration = Duration::from_millis(5);

/// The copies that may still arrive, counted by the token of their claim.
#[derive(Debug, Default)]
pub(crate) struct Adrift {
    copies: Mutex<HashMap<LeaseToken, usize>>,
    landed: Notify,
}

/// A copy that is on its way. Dropped without an answer, it may be under way for longer.
#[derive(Debug)]
pub(crate) struct Copy {
    adrift: Arc<Adrift>,
    token: LeaseToken,
    link: Option<Arc<Link>>,
    /// Held by whoever may still be about to send it.
    what: Weak<What>,
}

impl Adrift {
    /// A copy that is about to be sent on this link.
    pub(crate) fn copy(self: &Arc<Self>, token: LeaseToken, what: &Arc<What>, link: &Arc<Link>) -> Copy {
        Copy { adrift: Arc::clone(self), token, link: Some(Arc::clone(link)), what: Arc::downgrade(what) }
    }

    /// Whether a copy of this claim may still arrive.
    pub(crate) fn has(&self, token: &LeaseToken) -> bool {
        self.copies.lock().contains_key(token)
    }

    /// Waits until none may arrive any more; false when that takes longer than this.
    pub(crate) async fn all_landed(&self, token: &LeaseToken, patience: Duration) -> bool {
        let end = Instant::now() + patience;
        loop {
            let landed = self.landed.notified();
            tokio::pin!(landed);
            landed.as_mut().enable();
            if !self.has(token) {
                return true;
            }
            if timeout_at(end, landed).await.is_err() {
                return !self.has(token);
            }
        }
    }

    fn end(&self, token: &LeaseToken) {
        let mut copies = self.copies.lock();
        if let Some(count) = copies.get_mut(token) {
            *count -= 1;
            if *count == 0 {
                copies.remove(token);
            }
        }
        drop(copies);
        self.landed.notify_waiters();
    }
}

impl Copy {
    /// It was answered, or never sent.
    pub(crate) fn end(mut self) {
        self.link = None;
    }
}

impl Drop for Copy {
    fn drop(&mut self) {
        let Some(link) = self.link.take() else { return };
        // Without a runtime the process ends, and its connections with it.
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        let (adrift, token, what) = (Arc::clone(&self.adrift), self.token, self.what.clone());
        *adrift.copies.lock().entry(token).or_default() += 1;
        runtime.spawn(async move {
            let begun = Instant::now();
            while what.strong_count() > 0 && begun.elapsed() < LANDING_MAX {
                sleep(LOOK_PAUSE).await;
            }
            // Held meanwhile, so that the answer to what was sent last can arrive: by then the copy has.
            if !link.has_drained(LANDING_MAX).await {
                drop(link);
                sleep(BROKEN_MAX).await;
            }
            adrift.end(&token);
        });
    }
}
