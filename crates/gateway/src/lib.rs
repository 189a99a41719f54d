//! The gateway: idempotency keys in front of any HTTP API.
