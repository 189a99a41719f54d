//! A few connections for the operator's look-ups, opened when first needed.

use onlyonce_core::{StoreError, StoreErrorKind};
use parking_lot::Mutex;
use rusqlite::Connection;
use std::sync::Arc;
use tokio::sync::Semaphore;

use crate::boot::Now;
use crate::error::Fault;
use crate::open;
use crate::reading;
use crate::writer::Shared;

/// At most `readers_max` connections; who comes later waits.
#[derive(Debug)]
pub(crate) struct Readers {
    idle: Mutex<Vec<Connection>>,
    permits: Semaphore,
}

impl Readers {
    pub(crate) fn new(readers_max: usize) -> Self {
        Self { idle: Mutex::default(), permits: Semaphore::new(readers_max) }
    }

    /// Runs `read` on one snapshot of the file, off the runtime's threads.
    pub(crate) async fn read<T: Send + 'static>(
        self: &Arc<Self>,
        shared: &Arc<Shared>,
        operation: &'static str,
        read: impl FnOnce(&Connection, &Now<'_>) -> Result<T, Fault> + Send + 'static,
    ) -> Result<T, StoreError> {
        let closed = |_| StoreError::new(StoreErrorKind::Unavailable, operation);
        let _permit = self.permits.acquire().await.map_err(closed)?;
        let (this, its_shared) = (Arc::clone(self), Arc::clone(shared));
        let done = tokio::task::spawn_blocking(move || this.read_now(&its_shared, read)).await;
        match done {
            Ok(Ok(found)) => Ok(found),
            Ok(Err(fault)) => Err(fault.into_error(operation, &shared.path)),
            Err(panicked) => Err(StoreError::new(StoreErrorKind::Internal, operation).with_source(panicked)),
        }
    }

    fn read_now<T>(
        &self,
        shared: &Shared,
        read: impl FnOnce(&Connection, &Now<'_>) -> Result<T, Fault>,
    ) -> Result<T, Fault> {
        shared.identity.check(&shared.path)?;
        let idle = self.idle.lock().pop();
        let conn = match idle {
            Some(conn) => conn,
            // Made for each look: one that took the file for all there is must not outlive the moment.
            None if shared.options.reading => reading::connect(&shared.options)?,
            None => {
                let conn = open::connect(&shared.options)?;
                conn.execute_batch("PRAGMA query_only = ON; PRAGMA cache_size = -1024")?;
                conn
            }
        };
        conn.execute_batch("BEGIN")?;
        let found = read(&conn, &shared.timeline.now());
        if conn.execute_batch("ROLLBACK").is_ok() && !shared.options.reading {
            self.idle.lock().push(conn);
        }
        found
    }
}
