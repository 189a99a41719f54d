//! Idempotency records in PostgreSQL.
