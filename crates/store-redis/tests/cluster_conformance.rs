//! The one case list, on a cluster of three masters and three replicas whose clock the tests tell.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use onlyonce_conformance::{Expiry, Subject, Time};
use onlyonce_core::{Store, StoreAdmin};
use onlyonce_store_redis::{Options, RedisStore};
use testkit::ToldCluster;

struct Six(ToldCluster);

impl Six {
    async fn fresh() -> Self {
        Self(ToldCluster::take().await)
    }

    async fn another(&self) -> RedisStore {
        let options = Options::from_url(&self.0.url()).expect("a URL");
        let options = options.hold_retention(Duration::from_secs(3600)).timeout(Duration::from_secs(60));
        options.connect_timeout(Duration::from_secs(60)).open().await.expect("the store opens")
    }
}

#[async_trait]
impl Subject for Six {
    async fn open(&self) -> Arc<dyn Store> {
        Arc::new(self.another().await)
    }

    async fn open_admin(&self) -> Option<Arc<dyn StoreAdmin>> {
        Some(Arc::new(self.another().await))
    }

    async fn advance(&self, by: Duration) {
        self.0.clock().advance(by);
    }

    // A server's records outlive its clients.
    async fn restart(&self) {}

    fn survives_restart(&self) -> bool {
        true
    }

    fn time(&self) -> Time {
        Time::Told
    }

    fn expiry(&self) -> Expiry {
        Expiry::ByStore
    }
}

onlyonce_conformance::conformance!(Six::fresh);
onlyonce_conformance::admin_conformance!(Six::fresh);
