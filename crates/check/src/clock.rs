//! Every reading of time of the checker.
#![allow(clippy::disallowed_methods, reason = "the home of the clock")]

pub(crate) use std::time::Instant;

/// Now, on a clock that never goes back.
pub(crate) fn now() -> Instant {
    Instant::now()
}
