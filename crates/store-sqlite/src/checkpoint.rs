//! The WAL is copied back to the file beside the writer, which would stand still for it for tens of milliseconds.
//!
//! A thread and a connection of its own copy most of it while commits go on; the writer copies the little that came
//! meanwhile, for only a WAL that was copied whole is used again from its start.

use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};
use std::thread::JoinHandle;

use rusqlite::Connection;
use rusqlite::hooks::Wal;

use crate::error::Fault;
use crate::open;
use crate::writer::Shared;

/// The WAL is copied back at this many pages: more of them are the same page again.
const CHECKPOINT_PAGES: i32 = 4000;
/// A WAL that a reader keeps from its start grows by so many pages before it is tried again.
const AGAIN_PAGES: i32 = 1000;
/// As few pages as the writer copies itself.
const REST_PAGES: i32 = 200;
/// How often the thread goes after what came while it copied.
const PASSES_MAX: u32 = 4;

/// The checkpoints of the writer's connection.
pub(crate) struct Checkpoints {
    wal_pages: Arc<AtomicI32>,
    // At the last look; fewer than then: the WAL began anew.
    seen_pages: i32,
    due_pages: i32,
    copying: Option<JoinHandle<()>>,
}

impl Checkpoints {
    /// In place of SQLite's own checkpoints on `conn`.
    pub(crate) fn of(conn: &mut Connection) -> Result<Self, Fault> {
        let wal_pages = Arc::new(AtomicI32::new(0));
        let latest = Arc::clone(&wal_pages);
        conn.wal_hook(Some(move |_: &mut Wal, pages| {
            latest.store(pages, Ordering::Relaxed);
            Ok(())
        }))?;
        Ok(Self { wal_pages, seen_pages: 0, due_pages: CHECKPOINT_PAGES, copying: None })
    }

    /// Makes the next step, if one is due. Between transactions.
    pub(crate) fn step(&mut self, shared: &Arc<Shared>, conn: &Connection) {
        let pages = self.wal_pages.load(Ordering::Relaxed);
        if pages < self.seen_pages {
            self.due_pages = CHECKPOINT_PAGES;
        }
        self.seen_pages = pages;
        match &self.copying {
            None if pages >= self.due_pages => self.start(shared, conn),
            Some(copying) if copying.is_finished() => self.finish(conn),
            _ => {}
        }
    }

    fn start(&mut self, shared: &Arc<Shared>, conn: &Connection) {
        let (its, wal_pages) = (Arc::clone(shared), Arc::clone(&self.wal_pages));
        let thread = std::thread::Builder::new().name("onlyonce-wal".into());
        match thread.spawn(move || copy_most(&its, &wal_pages)) {
            Ok(copying) => self.copying = Some(copying),
            Err(_) => self.finish(conn),
        }
    }

    // Whatever the thread met: what is left is copied here, and what cannot be is tried again later.
    fn finish(&mut self, conn: &Connection) {
        self.wait();
        let _ = copy(conn);
        self.due_pages = self.seen_pages.saturating_add(AGAIN_PAGES);
    }

    fn wait(&mut self) {
        if let Some(copying) = self.copying.take() {
            let _ = copying.join();
        }
    }
}

impl Drop for Checkpoints {
    // Before the writer's connection closes: the last one removes the WAL.
    fn drop(&mut self) {
        self.wait();
    }
}

fn copy_most(shared: &Shared, wal_pages: &AtomicI32) {
    let Ok(conn) = shared.identity.check(&shared.path).and_then(|()| open::connect(&shared.options)) else {
        return;
    };
    for _ in 0..PASSES_MAX {
        match copy(&conn) {
            Ok(copied) if wal_pages.load(Ordering::Relaxed).saturating_sub(copied) > REST_PAGES => {}
            // Little is left, or another process is about it.
            _ => return,
        }
    }
}

/// Copies what no reader stands in the way of, waiting for nobody. Answers how many pages of the WAL are copied now.
fn copy(conn: &Connection) -> rusqlite::Result<i32> {
    conn.query_row("PRAGMA main.wal_checkpoint(PASSIVE)", [], |row| row.get(2))
}
