//! The store in the documentation of `trait Store` passes every case: `decide` and its sisters, with nothing around them.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use onlyonce_conformance::{Expiry, Subject, Time};
use onlyonce_core::{Store, StoreAdmin, TestClock};

#[allow(dead_code, unreachable_pub, reason = "the example's own main")]
#[path = "../../core/examples/custom_store.rs"]
mod custom_store;

use custom_store::MapStore;

struct Map {
    store: Mutex<Arc<MapStore>>,
    clock: TestClock,
}

impl Map {
    async fn fresh() -> Self {
        let clock = TestClock::new();
        Self { store: Mutex::new(Arc::new(MapStore::new(Arc::new(clock.clone())))), clock }
    }
}

#[async_trait]
impl Subject for Map {
    async fn open(&self) -> Arc<dyn Store> {
        self.store.lock().expect("no panic holds it").clone()
    }

    async fn open_admin(&self) -> Option<Arc<dyn StoreAdmin>> {
        None
    }

    async fn advance(&self, by: Duration) {
        self.clock.advance(by);
    }

    async fn restart(&self) {
        let empty = MapStore::new(Arc::new(self.clock.clone()));
        *self.store.lock().expect("no panic holds it") = Arc::new(empty);
    }

    fn survives_restart(&self) -> bool {
        false
    }

    fn time(&self) -> Time {
        Time::Told
    }

    fn expiry(&self) -> Expiry {
        Expiry::ByPurge
    }
}

onlyonce_conformance::conformance!(Map::fresh);
