//! What the layer promises, line by line: each test through a real socket against a real server with a side-effect
//! counter, on every store. The numbers (H1 …) are those of the list of HTTP behaviour.
#![allow(clippy::unwrap_used, reason = "a test fails by it")]

mod cors;
mod errors;
mod execution;
mod fingerprints;
mod harness;
mod in_flight;
mod keys;
mod large;
mod lookup;
mod origins;
mod outcomes;
mod races;
mod replays;
mod scopes;
mod time;
