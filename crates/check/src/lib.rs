//! A black-box test of the idempotency of any HTTP API: any language, no access to its code.
//!
//! It sends requests as clients do when the network fails them (again, at once, half, changed), looks at the answers
//! and, where it is told how, at the effect, and says which promises hold. What cannot be seen is said to be not
//! observable; it never passes.
//!
//! ```no_run
//! use onlyonce_check::{EffectSource, Options, Target, check};
//!
//! # async fn run() -> Result<(), Box<dyn std::error::Error>> {
//! let mut options = Options::new(Target::parse("http://127.0.0.1:8130/pay")?);
//! options.body = r#"{"amount":100}"#.into();
//! options.other_body = Some(r#"{"amount":200}"#.into());
//! options.effect = Some(EffectSource::Command("redis-cli get balance".into()));
//! let report = check(&options, &mut |_| {}).await?;
//! assert!(report.holds());
//! # Ok(())
//! # }
//! ```
//!
//! The scenarios are data: see [`catalogue`], and `docs/check.md` for the format.

pub mod catalogue;
mod clock;
mod effect;
mod lab;
mod options;
mod plan;
mod profile;
pub mod report;
mod run;
mod seen;
mod shell;
mod stop;
mod story;
mod target;
mod trials;
mod wire;

pub use catalogue::Scenario;
pub use options::{EffectSource, KeyStyle, Options};
pub use plan::Plan;
pub use profile::{Level, Levels, Profile};
pub use report::{Report, Verdict, Verified};
pub use run::{CheckError, Event, check};
pub use target::{InvalidUrl, Target};
pub use trials::{BreakAspect, Change, FlightAspect, RaceAspect, ReplayAspect, RequestChange, Trial};
