//! The one case list, on a real server.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use onlyonce_conformance::{Expiry, Subject, Time};
use onlyonce_core::{Store, StoreAdmin};
use onlyonce_store_postgres::PostgresStore;
use testkit::Postgres;

struct Postgresql {
    url: String,
}

impl Postgresql {
    async fn fresh() -> Self {
        let server = Postgres::shared().await;
        let database = server.database().await;
        Self { url: server.url(&database) }
    }

    // A store of its own on the same database, as another process has it.
    async fn another(&self) -> Arc<PostgresStore> {
        Arc::new(PostgresStore::open(&self.url).await.expect("the database opens"))
    }
}

#[async_trait]
impl Subject for Postgresql {
    async fn open(&self) -> Arc<dyn Store> {
        self.another().await
    }

    async fn open_admin(&self) -> Option<Arc<dyn StoreAdmin>> {
        Some(self.another().await)
    }

    async fn advance(&self, by: Duration) {
        tokio::time::sleep(by).await;
    }

    // Every handle is a store of its own; they were dropped.
    async fn restart(&self) {}

    fn survives_restart(&self) -> bool {
        true
    }

    fn time(&self) -> Time {
        Time::Real { unit: Duration::from_millis(800) }
    }

    fn expiry(&self) -> Expiry {
        Expiry::ByPurge
    }
}

onlyonce_conformance::conformance!(Postgresql::fresh);
onlyonce_conformance::admin_conformance!(Postgresql::fresh);
