//! [`PostgresStore`] and its side of the contract.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use onlyonce_batch::{Batcher, Limits, Turns};
use onlyonce_core::{
    Capabilities, ClaimOutcome, ClaimRequest, CompleteOutcome, Completion, LeaseToken, Operation,
    PurgeRequest, Purged, ReleaseOutcome, RenewOutcome, Store, StoreError,
};

use crate::batch::Batches;
use crate::error::Fault;
use crate::inside::Inside;
use crate::open::{InvalidUrl, Options};
use crate::purge::Purge;
use crate::schema::Place;
use crate::session::Connections;
use crate::statements::Statements;

/// Records in a PostgreSQL database. Clones are handles on one store; after the last one is dropped what is queued is
/// still done, in the background of its runtime.
#[derive(Clone)]
pub struct PostgresStore(Arc<Inner>);

struct Inner {
    batcher: Batcher<Batches>,
    place: Place,
    location: String,
    hazard: Option<String>,
    purge: Purge,
    inside: Arc<Inside>,
    /// By the number of the operation's lock.
    turns: Turns<i64>,
}

/// What the batches of a store have done since it was opened.
pub use onlyonce_batch::Counters;

impl PostgresStore {
    /// Opens the database of the URL with the defaults, and creates the tables where there are none. See [`Options::new`]
    /// and [`Options::open`].
    ///
    /// # Errors
    /// Those of [`Options::new`] and [`Options::open`].
    pub async fn open(url: &str) -> Result<Self, StoreError> {
        Options::new(url)?.open().await
    }

    /// Opens a database that holds records already.
    ///
    /// # Errors
    /// Those of [`PostgresStore::open`]; also when there are no tables.
    pub async fn open_existing(url: &str) -> Result<Self, StoreError> {
        Options::new(url)?.existing().open().await
    }

    /// The options, to be changed before [`Options::open`].
    ///
    /// # Errors
    /// Those of [`Options::new`].
    pub fn options(url: &str) -> Result<Options, InvalidUrl> {
        Options::new(url)
    }

    /// What the batches have done so far.
    pub fn counters(&self) -> Counters {
        self.0.batcher.counters()
    }

    /// Finishes what is queued. Later operations fail with
    /// [`StoreErrorKind::Unavailable`](onlyonce_core::StoreErrorKind::Unavailable).
    pub async fn close(&self) {
        self.0.batcher.close().await;
        self.connections().pool.close();
    }

    pub(crate) fn start(
        connections: Connections,
        limits: Limits,
        place: Place,
        store_id: [u8; 16],
        location: String,
        hazard: Option<String>,
    ) -> Self {
        let statements = Statements::new(&place.keys());
        let purge = Purge::new(&place);
        let inside = Arc::new(Inside::new(&place, store_id));
        let batcher = Batcher::start(Batches { connections, statements }, limits);
        let turns = Turns::default();
        Self(Arc::new(Inner { batcher, place, location, hazard, purge, inside, turns }))
    }

    pub(crate) fn connections(&self) -> &Connections {
        &self.0.batcher.backend().connections
    }

    pub(crate) fn statements(&self) -> &Statements {
        &self.0.batcher.backend().statements
    }

    pub(crate) fn place(&self) -> &Place {
        &self.0.place
    }

    pub(crate) fn inside(&self) -> &Arc<Inside> {
        &self.0.inside
    }

    pub(crate) fn turns(&self) -> &Turns<i64> {
        &self.0.turns
    }
}

impl fmt::Debug for PostgresStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostgresStore")
            .field("location", &self.0.location)
            .field("counters", &self.counters())
            .finish_non_exhaustive()
    }
}

#[async_trait]
impl Store for PostgresStore {
    /// Dropped while it is queued, it is not made.
    async fn claim(&self, operation: &Operation, request: &ClaimRequest) -> Result<ClaimOutcome, StoreError> {
        self.0.batcher.claim(operation, request).await
    }

    async fn renew(
        &self,
        operation: &Operation,
        token: LeaseToken,
        lease: Duration,
    ) -> Result<RenewOutcome, StoreError> {
        self.0.batcher.renew(operation, token, lease).await
    }

    async fn complete(
        &self,
        operation: &Operation,
        completion: &Completion,
    ) -> Result<CompleteOutcome, StoreError> {
        self.0.batcher.complete(operation, completion).await
    }

    async fn release(&self, operation: &Operation, token: LeaseToken) -> Result<ReleaseOutcome, StoreError> {
        self.0.batcher.release(operation, token).await
    }

    async fn mark_unknown(
        &self,
        operation: &Operation,
        token: LeaseToken,
    ) -> Result<ReleaseOutcome, StoreError> {
        self.0.batcher.mark_unknown(operation, token).await
    }

    /// Skips what others hold locked; the next purge finds it.
    async fn purge(&self, request: &PurgeRequest) -> Result<Purged, StoreError> {
        let purged = self.0.purge.run(self.connections(), request).await;
        purged.map_err(|fault: Fault| fault.into_error("purge"))
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            name: "postgres",
            location: self.0.location.clone(),
            network: true,
            durable: self.0.hazard.is_none(),
            hazard: self.0.hazard.clone(),
        }
    }
}
