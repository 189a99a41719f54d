//! A black-box test of the idempotency of any API.
