//! Idempotency keys for HTTP services: a tower layer.
