//! What the gateway itself did, counted: for the operator's metrics.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use onlyonce_http::Code;
use prometheus_client::metrics::histogram::Histogram;

use crate::admin::BUCKETS;

/// Counts of one gateway, shared by its parts. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Counters(Arc<Numbers>);

#[derive(Debug)]
struct Numbers {
    connections: AtomicUsize,
    requests: AtomicUsize,
    requests_total: AtomicU64,
    problems: [AtomicU64; Code::ALL.len()],
    upstream_guarded: Histogram,
    upstream_passed: Histogram,
}

impl Default for Numbers {
    fn default() -> Self {
        Self {
            connections: AtomicUsize::new(0),
            requests: AtomicUsize::new(0),
            requests_total: AtomicU64::new(0),
            problems: std::array::from_fn(|_| AtomicU64::new(0)),
            upstream_guarded: Histogram::new(BUCKETS),
            upstream_passed: Histogram::new(BUCKETS),
        }
    }
}

impl Counters {
    /// Client connections now, tunnels among them.
    pub fn connections(&self) -> usize {
        self.0.connections.load(Ordering::Relaxed)
    }

    /// Requests now, from the head to the last byte of the answer.
    pub fn requests(&self) -> usize {
        self.0.requests.load(Ordering::Relaxed)
    }

    /// Requests read so far, guarded or not.
    pub fn requests_total(&self) -> u64 {
        self.0.requests_total.load(Ordering::Relaxed)
    }

    /// How often the listener and the proxy answered with each problem; what the guard refused is not among it.
    pub fn problems(&self) -> impl Iterator<Item = (Code, u64)> {
        Code::ALL.iter().zip(&self.0.problems).map(|(code, count)| (*code, count.load(Ordering::Relaxed)))
    }

    /// How long the upstream took for guarded requests.
    pub(crate) fn upstream_guarded(&self) -> &Histogram {
        &self.0.upstream_guarded
    }

    /// How long it took for others.
    pub(crate) fn upstream_passed(&self) -> &Histogram {
        &self.0.upstream_passed
    }

    pub(crate) fn problem(&self, code: Code) {
        if let Some(at) = Code::ALL.iter().position(|one| *one == code) {
            self.0.problems[at].fetch_add(1, Ordering::Relaxed);
        }
    }

    pub(crate) fn connection(&self) -> OpenConnection {
        self.0.connections.fetch_add(1, Ordering::Relaxed);
        OpenConnection(self.clone())
    }

    /// One more request, unless there are so many.
    pub(crate) fn request(&self, max: usize) -> Option<OpenRequest> {
        self.0.requests_total.fetch_add(1, Ordering::Relaxed);
        let before = self.0.requests.fetch_add(1, Ordering::Relaxed);
        let open = OpenRequest(self.clone());
        (before < max).then_some(open)
    }
}

/// Counts as a connection until it is dropped.
#[derive(Debug)]
pub(crate) struct OpenConnection(Counters);

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.0.0.connections.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Counts as a request until it is dropped.
#[derive(Debug)]
pub(crate) struct OpenRequest(Counters);

impl Drop for OpenRequest {
    fn drop(&mut self) {
        self.0.0.requests.fetch_sub(1, Ordering::Relaxed);
    }
}
