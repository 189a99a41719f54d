//! The zoo: one right server, and many that are right but for one thing. The checker must name that thing, and
//! nothing else.
#![allow(clippy::unwrap_used, clippy::disallowed_methods, reason = "tests; they run in real time")]

mod defect;
mod door;
mod gauge;
mod key;
mod killed;
mod ledger;
mod nature;
mod proof;
mod replay;
mod serve;
mod shop;
mod verdicts;
mod wire;
