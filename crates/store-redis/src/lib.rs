//! Idempotency records in Redis 7.0 or later: on one server, behind Sentinel, or on a cluster.
//!
//! ```no_run
//! # async fn f() -> Result<(), onlyonce_core::StoreError> {
//! use onlyonce_store_redis::RedisStore;
//!
//! let store = RedisStore::open("redis://127.0.0.1:6379").await?;
//! # Ok(()) }
//! ```
//!
//! # How it works
//! A claim is ONE atomic command, `SET key value NX GET PX ttl`, with `PTTL` behind it. Whatever changes a record after
//! that is a script that compares the owner's token first. All time is the server's: a value keeps the time to live it was
//! given and its lease, so what is left of the one tells what is left of the other. Any number of callers share one
//! connection, and what they ask while others are under way goes out in one write, its completions as one script (on a
//! cluster, where the keys of a script must be in one slot, as one each). 4096 claims may wait, and as many calls of owners; past
//! it they fail with [`Overloaded`](onlyonce_core::StoreErrorKind::Overloaded).
//!
//! # Keys
//! `idem:<key>` in the empty scope, else `idem@<32 hex of SHA-256(scope)>:<key>`; the prefix is an option. Scope and key are
//! in the value too, and compared: a record of another operation is an error, never a replay. A completed record lives for
//! its retention, one that may be taken over for its retention too, one that waits for somebody (held, unknown, freed) for
//! 7 days at least. The operator's changes are noted in lists under `idem!audit`.
//!
//! # What is guaranteed, and what is not
//! On one server with `appendonly yes` and `appendfsync always` nothing that was answered is lost by a crash. With anything
//! weaker a crash forgets the last records, and their operations run again when they are retried; the store says so
//! ([`Capabilities`](onlyonce_core::Capabilities)).
//!
//! Replication is asynchronous: a failover (Sentinel, cluster) forgets what the replica did not have yet. With
//! [`min_replicas`](Options::min_replicas) no claim and no reply is told before so many replicas have it, and nothing that was
//! told is lost while one of them becomes the master. Which one does is Redis's choice: with more replicas than
//! `min_replicas` it can be one that lacks the last records, so set it to the number of replicas of each master. Clocks of a
//! master and its replicas that are apart shift leases by as much at a failover.
//!
//! A record in Redis and rows in a database are never one transaction: between the effect and its record a crash leaves
//! an effect without a reply. That is for low-risk work, or work that can tell a repeat by itself; money belongs into the
//! database that holds it, with its record in the same transaction. Where the effect itself is in Redis, effect and record
//! are one script: [`RedisStore::once`].
//!
//! # What the server must be
//! * 7.0 or later, with `maxmemory-policy noeviction`. An evicted record is a second run, so another policy is refused,
//!   at each connection and each purge, unless [`allow_eviction`](Options::allow_eviction) says otherwise.
//! * A user for it needs these rights, on keys `~idem*`: `+set +get +del +pttl +time +pexpireat +pexpiretime +evalsha
//!   +script|load +ping +info`, with `min_replicas` `+wait`, on a cluster `+asking +cluster|slots
//!   +cluster|info +cluster|nodes`, for operators `+scan
//!   +getrange +strlen +lpush +ltrim +lrange`. `+config|get` lets it see whether the server syncs each write. What a claim and
//!   its owner need is tried out when the store is opened.

mod admin;
mod adrift;
mod batch;
mod claims;
mod cluster;
mod error;
mod fitness;
mod lanes;
mod link;
mod names;
mod node;
mod once;
mod open;
mod request;
mod rights;
mod routes;
mod row;
mod scripts;
mod store;
mod url;

pub use once::{Effect, OnceOptions, Plan};
pub use onlyonce_core::OnceOutcome;
pub use open::Options;
pub use store::RedisStore;

use onlyonce_core::{Clock, SystemClock};

/// The boot clock, in ms: for what this process measures. All time of records is the server's.
fn clock_ms() -> u64 {
    u64::try_from(SystemClock.boot().as_millis()).unwrap_or(u64::MAX)
}
