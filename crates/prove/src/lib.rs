//! Proof by trying to break it: gateways on one store, or an inbox; clients that retry as real ones do; and a nemesis that
//! kills, pauses, cuts and slows. Then it heals, everything converges, and the history is judged.
//!
//! It is a stranger to the product: it starts the program, speaks HTTP to it, and believes only the ledger, an upstream that
//! writes every execution down and has no uniqueness of its own.
//!
//! | module | what it holds |
//! |---|---|
//! | [`clients`] | [`Callers`]: who asks, and asks again; [`Door`]: how they reach a gateway |
//! | [`plan`] | [`Plan`]: what is to be done, and with which faults |
//! | [`fault`] | [`FaultProxy`]: a network that delays, drops, cuts and loses replies |
//! | [`gauge`] | [`Held`](gauge::Held): what a process holds, and whether that stays |
//! | [`history`] | [`Event`]: what was sent, and what came back |
//! | [`ledger`] | [`Order`]: what is posted, and written down |
//! | [`port`](mod@port) | [`quiet_port()`]: where a server that is killed can start again |
//! | [`series`] | [`Series`]: what was held and how long answers took, over time |
//! | [`random`] | [`Random`]: numbers from a seed |
//! | [`judge`](mod@judge) | [`judge()`]: the rules, as a pure function over a history |
//! | [`report`] | [`Report`]: counts, violations, and the history of each operation at fault |
//!
//! # What is random
//! The seed decides operations, timing, and which fault comes when. What the machine makes of it is its own: a seed is the same
//! experiment again, not the same interleaving.

pub mod clients;
pub mod fault;
pub mod gauge;
pub mod history;
pub mod judge;
pub mod ledger;
pub mod plan;
pub mod port;
pub mod random;
pub mod report;
pub mod series;

mod book;
mod door;
mod fleet;
mod inbox;
mod nemesis;
mod plot;
mod rounds;
mod run;
mod subject;
mod watch;

pub use clients::{Callers, Pace};
pub use door::Door;
pub use fault::FaultProxy;
pub use history::{Answer, Event, Execution, History, Kept, Sent};
pub use judge::{Rule, Violation, judge};
pub use ledger::Order;
pub use plan::{Fault, OnUnknown, Plan, PlanError, Target, Work, WorkAt};
pub use port::quiet_port;
pub use random::Random;
pub use report::Report;
pub use run::{ProveError, prove};
pub use series::Series;
