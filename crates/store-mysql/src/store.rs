//! [`MysqlStore`] and its side of the contract.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use onlyonce_batch::{Batcher, Counters, Turns};
use onlyonce_core::{
    Capabilities, ClaimOutcome, ClaimRequest, CompleteOutcome, Completion, LeaseToken, Operation,
    OperationId, PurgeRequest, Purged, ReleaseOutcome, RenewOutcome, Store, StoreError,
};

use crate::backend::Backend;
use crate::open::Options;
use crate::purge;

/// Records in a database of MySQL or MariaDB. Clones are handles on one store; dropping the last one finishes what is
/// queued, in the background.
#[derive(Clone, Debug)]
pub struct MysqlStore {
    batcher: Arc<Batcher<Backend>>,
    location: Arc<str>,
    hazard: Option<Arc<str>>,
    turns: Arc<Turns<OperationId>>,
}

impl MysqlStore {
    /// Opens the database of a URL with the defaults, and makes the tables when they are missing. See
    /// [`Options::open`] and, for the URL, the crate.
    ///
    /// # Errors
    /// Those of [`Options::new`] and [`Options::open`].
    pub async fn open(url: &str) -> Result<Self, StoreError> {
        Self::options(url)?.open().await
    }

    /// Opens a database that holds records already.
    ///
    /// # Errors
    /// Those of [`Options::open`]; also when it holds none.
    pub async fn open_existing(url: &str) -> Result<Self, StoreError> {
        Self::options(url)?.existing().open().await
    }

    /// The options, to be changed before [`Options::open`].
    ///
    /// # Errors
    /// Those of [`Options::new`].
    pub fn options(url: &str) -> Result<Options, StoreError> {
        Options::new(url)
    }

    /// What was done so far, in batches and beside them.
    pub fn counters(&self) -> Counters {
        self.batcher.counters()
    }

    /// Where the records are: the URL without its user and password.
    pub fn location(&self) -> &str {
        &self.location
    }

    /// Finishes what is queued. Later operations fail with
    /// [`StoreErrorKind::Unavailable`](onlyonce_core::StoreErrorKind::Unavailable).
    pub async fn close(&self) {
        self.batcher.close().await;
        self.backend().pool.forget_idle();
    }

    pub(crate) fn new(batcher: Arc<Batcher<Backend>>, location: String, hazard: Option<String>) -> Self {
        Self { batcher, location: location.into(), hazard: hazard.map(Into::into), turns: Arc::default() }
    }

    pub(crate) fn turns(&self) -> &Turns<OperationId> {
        &self.turns
    }

    pub(crate) fn backend(&self) -> &Backend {
        self.batcher.backend()
    }
}

#[async_trait]
impl Store for MysqlStore {
    /// Dropped while it is queued, it is not made.
    async fn claim(&self, operation: &Operation, request: &ClaimRequest) -> Result<ClaimOutcome, StoreError> {
        self.batcher.claim(operation, request).await
    }

    async fn renew(
        &self,
        operation: &Operation,
        token: LeaseToken,
        lease: Duration,
    ) -> Result<RenewOutcome, StoreError> {
        self.batcher.renew(operation, token, lease).await
    }

    async fn complete(
        &self,
        operation: &Operation,
        completion: &Completion,
    ) -> Result<CompleteOutcome, StoreError> {
        self.batcher.complete(operation, completion).await
    }

    async fn release(&self, operation: &Operation, token: LeaseToken) -> Result<ReleaseOutcome, StoreError> {
        self.batcher.release(operation, token).await
    }

    async fn mark_unknown(
        &self,
        operation: &Operation,
        token: LeaseToken,
    ) -> Result<ReleaseOutcome, StoreError> {
        self.batcher.mark_unknown(operation, token).await
    }

    /// Passes over rows that somebody holds at the moment: the next purge finds them.
    async fn purge(&self, request: &PurgeRequest) -> Result<Purged, StoreError> {
        purge::purge(self.backend(), request).await.map_err(|fault| fault.into_error("purge"))
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            name: "mysql",
            location: self.location.to_string(),
            network: true,
            durable: self.hazard.is_none(),
            hazard: self.hazard.as_deref().map(Into::into),
        }
    }
}
