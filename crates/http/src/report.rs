//! One line about each request that asked for the guard: for logs and measurements.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use onlyonce_core::Operation;
use sha2::{Digest, Sha256};

use crate::origin::RequestOrigin;
use crate::problem::Code;

/// Gets a report on each request on a guarded route, when its answer is ready.
#[derive(Clone)]
pub struct ReportFn(Arc<dyn Fn(&Report) + Send + Sync>);

/// How a request on a guarded route was answered. Holds no secret.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Report {
    /// In one word.
    pub verdict: Verdict,
    /// The status of the answer.
    pub status: u16,
    /// Tells keys apart in a log without naming them; `None` when the key was refused.
    pub key_hash: Option<KeyHash>,
    /// The attempt that ran.
    pub attempt: Option<u32>,
    /// Asking the store, waiting for another copy, recording.
    pub store: Duration,
    /// The service behind.
    pub work: Duration,
    /// From the head of the request to the head of the answer.
    pub total: Duration,
    /// How the caller's logs and traces name the request.
    pub origin: RequestOrigin,
    /// The request whose run is answered with, where that is another one: of a replay, of a 409, of a 422.
    pub original: Option<RequestOrigin>,
}

/// What became of a request on a guarded route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Verdict {
    /// It ran and its reply is recorded.
    Ran,
    /// It was answered with the recorded reply.
    Replayed,
    /// It ran and nothing happened: the key is free.
    Released,
    /// It ran and nobody knows whether it happened.
    Unknown,
    /// It ran and its reply could not be recorded.
    NotRecorded,
    /// It ran unguarded: the store could not be asked.
    Degraded,
    /// It ran unguarded: it had no key and needed none.
    Ignored,
    /// It did not run.
    Refused(Code),
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ran => "ran",
            Self::Replayed => "replayed",
            Self::Released => "released",
            Self::Unknown => "unknown",
            Self::NotRecorded => "not-recorded",
            Self::Degraded => "degraded",
            Self::Ignored => "ignored",
            Self::Refused(code) => code.as_str(),
        })
    }
}

/// The first 8 bytes of the SHA-256 of scope and key, as 16 hex digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct KeyHash([u8; 8]);

impl KeyHash {
    /// Of this operation.
    pub fn of(operation: &Operation) -> Self {
        let mut hasher = Sha256::new();
        for part in [operation.scope().as_str(), operation.key().as_str()] {
            hasher.update((part.len() as u64).to_be_bytes());
            hasher.update(part);
        }
        let mut hash = [0; 8];
        hash.copy_from_slice(&hasher.finalize()[..8]);
        Self(hash)
    }
}

impl fmt::Display for KeyHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for KeyHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KeyHash({self})")
    }
}

impl ReportFn {
    /// Calls this function. It must not block.
    pub fn new(function: impl Fn(&Report) + Send + Sync + 'static) -> Self {
        Self(Arc::new(function))
    }

    pub(crate) fn call(&self, report: &Report) {
        (self.0)(report);
    }
}

impl fmt::Debug for ReportFn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ReportFn(…)")
    }
}
