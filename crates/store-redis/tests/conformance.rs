//! The one case list, on one server whose clock the tests tell, killed and started again for a restart.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use onlyonce_conformance::{Expiry, Subject, Time};
use onlyonce_core::{Store, StoreAdmin};
use onlyonce_store_redis::{Options, RedisStore};
use testkit::{Redis, ToldClock};

/// A server outlives its subject: the next one of this process takes it, emptied.
static IDLE: Mutex<Vec<(Redis, ToldClock)>> = Mutex::new(Vec::new());

struct Single {
    server: Redis,
    clock: ToldClock,
}

impl Single {
    async fn fresh() -> Self {
        let idle = IDLE.lock().expect("no panic holds it").pop();
        let (server, clock) = match idle {
            Some((server, clock)) => {
                assert_eq!(server.cli(["flushall"]).await, "OK");
                (server, clock)
            }
            None => {
                let clock = ToldClock::stopped();
                (Redis::options().durable().clock(&clock).start().await, clock)
            }
        };
        Self { server, clock }
    }

    async fn another(&self) -> RedisStore {
        let options = Options::from_url(&self.server.url()).expect("a URL");
        // Records without a reply are kept by the store's own rule; the cases outwait the shortest one.
        let options = options.hold_retention(Duration::from_secs(3600)).timeout(Duration::from_secs(60));
        options.connect_timeout(Duration::from_secs(60)).open().await.expect("the store opens")
    }
}

impl Drop for Single {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            IDLE.lock().expect("no panic holds it").push((self.server.clone(), self.clock.clone()));
        }
    }
}

#[async_trait]
impl Subject for Single {
    async fn open(&self) -> Arc<dyn Store> {
        Arc::new(self.another().await)
    }

    async fn open_admin(&self) -> Option<Arc<dyn StoreAdmin>> {
        Some(Arc::new(self.another().await))
    }

    async fn advance(&self, by: Duration) {
        self.clock.advance(by);
    }

    // The server, too: what was answered must be on its disk.
    async fn restart(&self) {
        self.server.kill_9().await;
        self.server.start().await;
    }

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

onlyonce_conformance::conformance!(Single::fresh);
onlyonce_conformance::admin_conformance!(Single::fresh);
