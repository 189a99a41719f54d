//! Natural batching for stores behind a network.
//!
//! A [`Batcher`] takes everything that was asked while the last batch was under way and hands it to a [`Backend`] as
//! one batch: no timer, nothing added when idle, many operations a statement when busy. A few batches, the **lanes**, may be
//! under way at once.
//!
//! # What a backend can rely on
//! - No two jobs of a batch are on one operation, and no operation is in two batches at once: what comes meanwhile waits
//!   for the answer to what came before.
//! - Renewals and the other jobs of owners go before claims, in every batch and in the line of each operation.
//! - A batch has at most so many jobs and so many bytes of replies.
//! - After a fault that [may be of one job's making](Fault::splits) it is asked again for each half, down to one job.
//! - A job that would wait for somebody's lock is not waited for: it is answered [`Answer::Locked`], or is behind a
//!   [`Fault::is_lock_wait`]. It goes on [alone](Backend::run_alone), beside the lanes, and for a while so does
//!   whatever is asked of that operation.
//!
//! # What callers can rely on
//! Everything is bounded: past the bound a job is refused with [`StoreErrorKind::Overloaded`], and nothing was sent. A claim
//! that is dropped while it waits is never sent. Jobs of owners are, for their work has happened. A claim that was sent and
//! is then dropped may be held; only its caller knows whether it asks again with the same token, so its caller
//! releases it (the engine does).
//!
//! [`Turns`] and [`Tries`] are for the transactional mode, which is not batched: of each process one alone waits for an
//! operation, and a transaction that others went before is run again.
//!
//! [`StoreErrorKind::Overloaded`]: onlyonce_core::StoreErrorKind::Overloaded

mod backend;
mod batcher;
mod job;
mod queue;
mod tries;
mod turns;

pub use backend::{Answer, Answers, Backend, Fault};
pub use batcher::{Batcher, Counters, Limits};
pub use job::{Ask, Job};
pub use tries::Tries;
pub use turns::{Turn, Turns};
