//! The zoo: one right server, and many that are right but for one thing. The checker must name that thing, and
//! nothing else.
#![allow(clippy::disallowed_methods, reason = "tests run in real time")]

mod defect;
mod key;
mod ledger;
mod proof;
mod serve;
mod shop;
mod wire;
