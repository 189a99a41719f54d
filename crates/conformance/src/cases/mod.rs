//! The cases, a module a theme. Each is an `async fn(&Harness)` that panics when the store breaks the contract.

pub mod admin;
pub mod capabilities;
pub mod claims;
pub mod completion;
pub mod expiry;
pub mod fingerprints;
pub mod keys;
pub mod origins;
pub mod owners;
pub mod purge;
pub mod races;
pub mod replay;
pub mod restart;
pub mod takeover;
pub mod unknown;
