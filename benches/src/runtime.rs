//! Where servers and callers run: the same number of threads for every subject.

use std::future::Future;

use anyhow::{Context, Result};
use tokio::runtime::{Builder, Runtime};

/// Worker threads of a server: ours, axum's and nginx's alike.
pub(crate) const WORKERS: usize = 2;

/// A runtime as a server has it.
pub(crate) fn workers() -> Result<Runtime> {
    Builder::new_multi_thread().worker_threads(WORKERS).enable_all().build().context("a runtime")
}

/// Runs `future` on this thread alone.
pub(crate) fn on_this_thread<T>(future: impl Future<Output = Result<T>>) -> Result<T> {
    Builder::new_current_thread().enable_all().build().context("a runtime")?.block_on(future)
}
