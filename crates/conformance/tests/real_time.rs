//! The suite also serves stores whose clock runs by itself, as a server's does: here the memory store on the clocks of
//! the system. A few cases that wait for bounds are run, and a few histories: enough to keep that side of the suite alive.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use onlyonce_conformance::{Expiry, Subject, Time, cases, model, run};
use onlyonce_core::{MemoryStore, Store, StoreAdmin};

struct Real(MemoryStore);

impl Real {
    async fn fresh() -> Self {
        Self(MemoryStore::new())
    }
}

#[async_trait]
impl Subject for Real {
    async fn open(&self) -> Arc<dyn Store> {
        Arc::new(self.0.clone())
    }

    async fn open_admin(&self) -> Option<Arc<dyn StoreAdmin>> {
        Some(Arc::new(self.0.clone()))
    }

    async fn advance(&self, by: Duration) {
        tokio::time::sleep(by).await;
    }

    // A server's records outlive its clients.
    async fn restart(&self) {}

    fn survives_restart(&self) -> bool {
        true
    }

    fn time(&self) -> Time {
        Time::Real { unit: Duration::from_millis(500) }
    }

    fn expiry(&self) -> Expiry {
        Expiry::ByPurge
    }
}

#[test]
fn a_lease_ends() {
    run(Real::fresh, async |h| cases::takeover::the_lease_ends_exactly_at_its_bound(h).await);
}

#[test]
fn a_reply_expires() {
    run(Real::fresh, async |h| cases::expiry::a_reply_expires_exactly_at_its_bound(h).await);
}

#[test]
fn a_held_operation_is_unknown() {
    run(Real::fresh, async |h| cases::unknown::a_held_operation_is_unknown_since_its_lease_ended(h).await);
}

#[test]
fn a_record_is_shown() {
    run(Real::fresh, async |h| cases::admin::a_record_is_shown_as_it_stands(h).await);
}

#[test]
fn histories_keep_the_invariants() {
    model::check(Real::fresh, 16);
}
