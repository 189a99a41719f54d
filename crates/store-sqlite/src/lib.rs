//! Idempotency records in SQLite: the embedded default store.
//!
//! ```no_run
//! # async fn f() -> Result<(), onlyonce_core::StoreError> {
//! use onlyonce_store_sqlite::SqliteStore;
//!
//! let store = SqliteStore::open("onlyonce.db").await?;
//! # Ok(()) }
//! ```
//!
//! # Speed
//! One writer thread takes whatever was asked while its last transaction was in flight and commits it as one: no timer,
//! nothing added when idle, many operations a sync when busy. Renewals and completions go before claims. The WAL is
//! copied back to the file (16 MiB at a time) by a thread of its own, beside the writer.
//!
//! # Durability
//! Completions and marks of unknown outcome are synced before they are answered, claims under
//! [`Hold`](onlyonce_core::OnLeaseEnd::Hold) too. Claims under [`TakeOver`](onlyonce_core::OnLeaseEnd::TakeOver),
//! renewals and releases are synced with the next durable operation: store and owner die together in a power cut, and a
//! lost claim costs what an expired lease costs.
//!
//! # Time
//! Leases and retention run on the boot clock, so a step of the wall clock moves neither. What was written before the
//! last reboot is judged by wall time as it stood when the file was first opened after it, carried on by the boot
//! clock; its leases are over. While the wall clock is more than 60 s away from that, [`purge`] pauses; a step that has
//! stood for an hour is taken for the truth.
//!
//! # Several processes
//! Any number may open one file on a local file system. Writers wait for each other up to
//! [`busy_timeout`](Options::busy_timeout). Network file systems are refused: WAL does not work across machines.
//!
//! # The file
//! Table `idempotency_keys`, one row a record, times in milliseconds since the Unix epoch:
//! `sqlite3 onlyonce.db "select scope, key, status, datetime(locked_until / 1000, 'unixepoch') from idempotency_keys"`.
//! The tables may live in a file with business data: see [`SqliteStore::once`] and [`SqliteStore::claim_in`]. Nothing
//! but tables and indexes named `idempotency_…` is touched (`user_version` is left to the application); the file is
//! turned to WAL mode.
//!
//! [`purge`]: onlyonce_core::Store::purge

mod admin;
mod boot;
mod checkpoint;
mod claims;
mod error;
pub mod file;
mod open;
mod purge;
mod readers;
mod reading;
mod row;
mod schema;
mod store;
mod transaction;
mod writer;

pub use onlyonce_core::{OnceOutcome, Pending, TxFailure, TxOptions};
pub use open::{Durability, Options};
pub use rusqlite;
pub use store::{Counters, SqliteStore};
pub use transaction::{TransactionClaim, TxClaim};
