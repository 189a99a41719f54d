//! The engine: asks a store for the right to run an operation, keeps the lease alive while it runs, records its
//! reply, and answers every duplicate with it.
//!
//! ```
//! # use std::time::Duration;
//! use onlyonce_core::{Fingerprint, Key, MemoryStore, Operation, Reply, Scope};
//! use onlyonce_engine::{Failure, Idempotency, Outcome};
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let idem = Idempotency::builder(MemoryStore::new())
//!     .lease(Duration::from_secs(30))
//!     .retention(Duration::from_secs(24 * 3600))
//!     .build();
//! let operation = Operation::new(Scope::new("merchant-1")?, Key::new("order-42")?, Fingerprint::of(b"100 EUR"));
//! for expected in ["ran", "replayed"] {
//!     let outcome = idem
//!         .run(&operation, async |execution| {
//!             // The same key on every attempt: the provider sees one charge.
//!             let _provider_key = execution.downstream_key("charge");
//!             Ok::<_, Failure>(Reply::ok("charged 100 EUR"))
//!         })
//!         .await?;
//!     match outcome {
//!         Outcome::Ran(reply) => assert_eq!((expected, &reply.body()[..]), ("ran", &b"charged 100 EUR"[..])),
//!         Outcome::Replayed(stored) => assert_eq!((expected, stored.reply.status()), ("replayed", 200)),
//!         other => panic!("{other:?}"),
//!     }
//! }
//! # Ok(()) }
//! ```

mod background;
mod begin;
mod builder;
mod cache;
mod counters;
mod execution;
mod flight;
mod idempotency;
mod outcome;
mod policy;
mod random;
mod slots;
mod store_calls;

pub use builder::Builder;
pub use counters::Counts;
pub use execution::{Completed, Context, Execution, NotOwner, downstream_key};
pub use idempotency::Idempotency;
pub use outcome::{Begin, EngineError, Failure, Outcome};
pub use policy::{InvalidPolicy, Limits, Policy};
pub use random::{Random, SystemRandom};
