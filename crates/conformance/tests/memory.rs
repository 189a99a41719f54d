//! The memory store passes every case.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use onlyonce_conformance::{Expiry, Subject, Time};
use onlyonce_core::{MemoryStore, Store, StoreAdmin, TestClock};

struct Memory {
    store: Mutex<MemoryStore>,
    clock: TestClock,
}

impl Memory {
    async fn fresh() -> Self {
        let clock = TestClock::new();
        Self { store: Mutex::new(MemoryStore::with_clock(Arc::new(clock.clone()))), clock }
    }

    fn handle(&self) -> Arc<MemoryStore> {
        Arc::new(self.store.lock().expect("no panic holds it").clone())
    }
}

#[async_trait]
impl Subject for Memory {
    async fn open(&self) -> Arc<dyn Store> {
        self.handle()
    }

    async fn open_admin(&self) -> Option<Arc<dyn StoreAdmin>> {
        Some(self.handle())
    }

    async fn advance(&self, by: Duration) {
        self.clock.advance(by);
    }

    async fn restart(&self) {
        *self.store.lock().expect("no panic holds it") =
            MemoryStore::with_clock(Arc::new(self.clock.clone()));
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

onlyonce_conformance::conformance!(Memory::fresh);
onlyonce_conformance::admin_conformance!(Memory::fresh);

#[test]
fn many_histories_keep_the_invariants() {
    onlyonce_conformance::model::check(Memory::fresh, 1000);
}
