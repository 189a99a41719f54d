//! Idempotency records in PostgreSQL: many instances, one database.
//!
//! ```no_run
//! # async fn f() -> Result<(), onlyonce_core::StoreError> {
//! use onlyonce_store_postgres::PostgresStore;
//!
//! let store = PostgresStore::open("postgres://app:secret@db.example/shop?sslmode=verify-full").await?;
//! # Ok(()) }
//! ```
//!
//! # Speed
//! Whatever was asked while the last batch was under way goes as one statement for each kind of operation, all in one
//! transaction and one round trip: no timer, nothing added when idle, many operations a commit when busy. Renewals and
//! completions go before claims.
//!
//! # Durability
//! Every change is committed before it is answered. `synchronous_commit` is raised to `on` where the server, the database
//! or the user has it weaker, and never lowered; [`capabilities`] tell when `fsync` is off on the server.
//!
//! # Time
//! Leases and retention run on the clock of the server, read as each row is written (`clock_timestamp()`).
//!
//! # Locks
//! Whoever changes a record holds a transaction-level advisory lock on its operation, got by a try. A claim on an
//! operation that somebody holds is answered by what is there, else that it is in progress; nobody else waits. Only
//! `max_locks_per_transaction` limits how many operations may be in batches at once (all instances together): the
//! server's default is good for thousands.
//!
//! # The tables
//! `idempotency_keys`, one row a record, with names as text under the collation `C`, so that they compare by bytes and
//! `psql` reads them: `select scope, key, status, locked_until from idempotency_keys`. Beside it `idempotency_audit`
//! and `idempotency_meta`. They are created at the first start, by any number of instances at once, in the schema that
//! `search_path` or [`schema=`](Options::new) names. A table that would not keep keys byte for byte is refused.
//!
//! # One transaction with business rows
//! [`PostgresStore::once`] and [`PostgresStore::claim_in`] put a claim, the caller's own writes and the reply into one
//! transaction of the caller's own connection; with the feature `sqlx` on one of sqlx too.
//!
//! # Poolers
//! Behind PgBouncer and its kin in transaction mode add `prepare=off` to the URL: then nothing is kept on a connection
//! between transactions.
//!
//! [`capabilities`]: onlyonce_core::Store::capabilities

mod admin;
mod batch;
mod claims;
mod columns;
mod error;
mod functions;
mod inside;
mod link;
mod open;
mod purge;
mod row;
mod schema;
mod session;
#[cfg(feature = "sqlx")]
mod sqlx;
mod statements;
mod store;
mod tls;
mod transaction;

pub use deadpool_postgres;
pub use onlyonce_core::{OnceOutcome, Pending, TxFailure, TxOptions};
pub use open::{InvalidUrl, Options};
pub use store::{Counters, PostgresStore};
pub use tokio_postgres;
pub use transaction::{InTransaction, TransactionClaim, TxClaim};
