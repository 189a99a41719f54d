//! Idempotency records in MySQL or MariaDB.
