//! Idempotency records in SQLite: the embedded default store.
