use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use onlyonce_core::{Store, StoreAdmin};

/// One fresh, empty store, and its clock.
///
/// A subject is made anew for each case; whatever it opened, it removes when it is dropped.
#[async_trait]
pub trait Subject: Send + Sync + 'static {
    /// Opens a handle on the records: a connection or an instance of its own where the store can have several, as
    /// another process would. Panics when that fails.
    async fn open(&self) -> Arc<dyn Store>;

    /// Opens the operator's side of the same records; `None` when the store has none.
    async fn open_admin(&self) -> Option<Arc<dyn StoreAdmin>>;

    /// Lets the store's clock run on by `by`: exactly where time is told, at least where it is real.
    async fn advance(&self, by: Duration);

    /// Closes everything as at the end of the process. All handles given out before are dropped by now; what
    /// [`Subject::open`] gives afterwards finds the records as a new process would.
    async fn restart(&self);

    /// Whether the records are still there after [`Subject::restart`].
    fn survives_restart(&self) -> bool;

    /// How time passes for the store.
    fn time(&self) -> Time;

    /// How records that are over go away.
    fn expiry(&self) -> Expiry;
}

/// How time passes for a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Time {
    /// It stands still but for [`Subject::advance`]: a test clock. Bounds are tested exactly.
    Told,
    /// It runs by itself, as a server's does. Cases sleep for a few `unit`s; one unit must outlast a few round trips on
    /// a busy machine: a second is a good start.
    Real {
        /// The step of all waiting.
        unit: Duration,
    },
}

/// How records that are over go away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expiry {
    /// `purge` removes them.
    ByPurge,
    /// The store drops them by itself, by a time to live of its own: `purge` always answers that it removed nothing, and
    /// records without a reply are kept by the store's own rule.
    ByStore,
}
