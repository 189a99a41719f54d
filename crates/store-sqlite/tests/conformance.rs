//! The one case list, on a file.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use onlyonce_conformance::{Expiry, Subject, Time};
use onlyonce_core::{Store, StoreAdmin, TestClock};
use onlyonce_store_sqlite::SqliteStore;
use tempfile::TempDir;

struct Sqlite {
    _folder: TempDir,
    path: PathBuf,
    clock: TestClock,
}

impl Sqlite {
    async fn fresh() -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("onlyonce.db");
        Self { _folder: folder, path, clock: TestClock::new() }
    }

    // A store of its own on the same file, as another process has it.
    async fn another(&self) -> SqliteStore {
        let options = SqliteStore::options(&self.path).clock(Arc::new(self.clock.clone()));
        options.busy_timeout(Duration::from_secs(60)).open().await.expect("the file opens")
    }
}

#[async_trait]
impl Subject for Sqlite {
    async fn open(&self) -> Arc<dyn Store> {
        Arc::new(self.another().await)
    }

    async fn open_admin(&self) -> Option<Arc<dyn StoreAdmin>> {
        Some(Arc::new(self.another().await))
    }

    async fn advance(&self, by: Duration) {
        self.clock.advance(by);
    }

    // The last store on the file was closed when its last handle was dropped.
    async fn restart(&self) {}

    fn survives_restart(&self) -> bool {
        true
    }

    fn time(&self) -> Time {
        Time::Told
    }

    fn expiry(&self) -> Expiry {
        Expiry::ByPurge
    }
}

onlyonce_conformance::conformance!(Sqlite::fresh);
onlyonce_conformance::admin_conformance!(Sqlite::fresh);
