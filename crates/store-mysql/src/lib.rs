//! Idempotency records in MySQL or MariaDB: many instances, one database.
//!
//! ```no_run
//! # async fn f() -> Result<(), onlyonce_core::StoreError> {
//! use onlyonce_store_mysql::MysqlStore;
//!
//! let store = MysqlStore::open("mysql://user:password@db.example/shop").await?;
//! # Ok(()) }
//! ```
//!
//! # The URL
//! `mysql://user:password@host:port/database` (or `mariadb://`), special characters as `%xx`, and after a `?`:
//!
//! | option | what it does |
//! |---|---|
//! | `ssl-mode` | `disabled`, `preferred` (the default over a network: TLS where the server offers it), `required`, `verify_identity` |
//! | `ssl-ca` | a file with the authorities that may name the server; asks for `verify_identity`. Else those of this machine |
//! | `ssl-cert`, `ssl-key` | files with the certificate that the server is shown, and its key |
//! | `socket` | the server's Unix socket, in place of host and port |
//! | `connections` | how many at most; 10 |
//! | `prepare=off` | no prepared statements, for a proxy that cannot carry them |
//!
//! # The server
//! MariaDB 10.6 or MySQL 8.0 and later, InnoDB. The tables are made at the first start, by one of any number of instances
//! that start at once; the user needs CREATE for that, and afterwards SELECT, INSERT, UPDATE and DELETE.
//!
//! # Speed
//! Whatever was asked while the last batch was under way goes as one statement for each kind of operation: no timer, nothing
//! added when idle, many operations a commit when busy. Nobody's lock is waited for in a batch, so an open
//! transaction on one key delays no other key.
//!
//! # Durability
//! Every commit is synced where the server does so: `innodb_flush_log_at_trx_commit=1` and, with a binary log,
//! `sync_binlog=1`. Else the store says what a power cut may lose ([`Capabilities`](onlyonce_core::Capabilities)). A replica
//! that takes over may lack what its primary had acknowledged, unless replication waits for it.
//!
//! # One transaction
//! Where the effect is rows on the same server, record and rows are committed together or not at all. A crash is a rollback:
//! nothing is held, nothing is taken over.
//!
//! ```no_run
//! # use onlyonce_core::{Operation, Reply, StoreError};
//! use onlyonce_store_mysql::mysql_async::prelude::Queryable;
//! use onlyonce_store_mysql::mysql_async::Conn;
//! use onlyonce_store_mysql::{MysqlStore, OnceOutcome, Transaction};
//!
//! # async fn f(store: &MysqlStore, conn: &mut Conn, operation: &Operation) -> Result<(), StoreError> {
//! let place_order = async move |tx: &mut Transaction<'_>| {
//!     tx.query_drop("insert into orders (item, amount) values ('tea', 3)").await?;
//!     Ok(Reply::new(201, "ordered"))
//! };
//! match store.once(conn, operation, place_order).await? {
//!     OnceOutcome::Ran(stored) | OnceOutcome::Replayed(stored) => println!("{}", stored.reply.status()),
//!     other => println!("not done: {other:?}"),
//! }
//! # Ok(()) }
//! ```
//!
//! [`MysqlStore::claim_in`] is the same for those who hold a [`Transaction`] of their own.
//!
//! # Time
//! Leases and retention run on the server's clock, in UTC.
//!
//! # The table
//! `idempotency_keys`, one row a record: `select scope, key, status, locked_until from idempotency_keys`. Names are
//! VARBINARY, compared byte for byte (the `mysql` shell shows them as text with `--skip-binary-as-hex`).

mod admin;
mod backend;
mod claims;
mod error;
mod guard;
mod inside;
mod locked;
mod open;
mod purge;
mod row;
mod schema;
mod session;
mod sql;
mod store;
mod transaction;
mod url;

pub use guard::Transaction;
pub use mysql_async;
pub use onlyonce_batch::Counters;
pub use onlyonce_core::{OnceOutcome, Pending, TxFailure, TxOptions};
pub use open::Options;
pub use store::MysqlStore;
pub use transaction::{TransactionClaim, TxClaim};
