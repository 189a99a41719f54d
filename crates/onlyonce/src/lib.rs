//! Send it twice, it happens only once: idempotency keys for Rust programs.
