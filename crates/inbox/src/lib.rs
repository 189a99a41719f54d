//! At-least-once messages, applied once.
