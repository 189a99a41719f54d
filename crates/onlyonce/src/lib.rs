#![cfg_attr(
    all(feature = "sqlite", feature = "postgres", feature = "axum"),
    doc = include_str!("../../../README.md")
)]
#![cfg_attr(
    not(all(feature = "sqlite", feature = "postgres", feature = "axum")),
    doc = "Send it twice, it happens only once: idempotency keys for Rust programs."
)]
//!
//! # Features
//! | feature | what it adds |
//! |---|---|
//! | `sqlite` (default) | `SqliteStore`, and all of its crate as `sqlite` |
//! | `mysql` | `MysqlStore`, and all of its crate as `mysql` |
//! | `postgres` | `PostgresStore`, and all of its crate as `postgres` |
//! | `sqlx` | `postgres`, and its transactional mode on connections of sqlx |
//! | `redis` | `RedisStore`, and all of its crate as `redis` |
//! | `http` (default) | `IdempotencyLayer` and `testing`, and all of their crate as `http` |
//! | `axum` | the layer sees the whole path inside nested axum routers |
//!
//! Core and engine are always there. A feature adds items and changes no behaviour of others, but for `axum` as said.

pub use onlyonce_core::*;
pub use onlyonce_engine::*;

#[cfg(feature = "http")]
pub use onlyonce_http::{self as http, IdempotencyLayer, testing};

#[cfg(feature = "mysql")]
pub use onlyonce_store_mysql::{self as mysql, MysqlStore};

#[cfg(feature = "redis")]
pub use onlyonce_store_redis::{self as redis, RedisStore};

#[cfg(feature = "sqlite")]
pub use onlyonce_store_sqlite::{self as sqlite, SqliteStore};

#[cfg(feature = "postgres")]
pub use onlyonce_store_postgres::{self as postgres, PostgresStore};

#[cfg(all(doctest, feature = "axum", feature = "mysql", feature = "postgres"))]
#[doc = include_str!("../../../docs/transactions.md")]
struct Transactions;
