//! Idempotency records in Redis.
