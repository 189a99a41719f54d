//! What goes on in a server, for tests that wait for it.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// How many there are.
#[derive(Clone, Debug, Default)]
pub(crate) struct Gauge(Arc<AtomicUsize>);

/// One of them, until it is dropped.
#[derive(Debug)]
pub(crate) struct Counted(Gauge);

impl Gauge {
    pub(crate) fn enter(&self) -> Counted {
        self.0.fetch_add(1, Ordering::SeqCst);
        Counted(self.clone())
    }

    pub(crate) fn get(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::SeqCst);
    }
}
