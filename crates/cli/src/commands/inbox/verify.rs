//! `onlyonce inbox verify`.

use std::io::{Write, stdout};

use onlyonce_inbox::Verdict;
use serde::Serialize;

use super::delivery::{Delivery, OnConflict, ViaArg, verdict_line};
use crate::failure::Failure;
use crate::output;

/// Applies one message twice and compares the responses byte for byte
///
/// Prints `replay=identical`, or `replay=different` with exit code 1.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  onlyonce inbox verify inbox.db message.json")]
pub(super) struct Verify {
    #[command(flatten)]
    delivery: Delivery,
    /// By which path the message came; kept in the delivery log
    #[arg(long, value_name = "PATH", default_value = "manual")]
    via: ViaArg,
    /// Print JSON: `replay`, `first`, `second`
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct ReplayJson {
    replay: &'static str,
    first: &'static str,
    second: &'static str,
}

impl Verify {
    pub(super) fn run(self) -> Result<(), Failure> {
        let message = self.delivery.read()?;
        let work = self.delivery.handling.work()?;
        // A connection each, so that nothing but the file can carry the response over.
        let once = || message.receive(&self.delivery.database.open()?, self.via.into(), &work);
        let (first, second) = (once()?, once()?);
        let is_replay = matches!(second.verdict, Verdict::Duplicate(_));
        let replay = if is_replay && first.response == second.response { "identical" } else { "different" };
        let mut out = stdout().lock();
        match self.json {
            true => {
                let name = |verdict| verdict_line(verdict, OnConflict::Warn);
                let (first, second) = (name(first.verdict), name(second.verdict));
                output::json(&mut out, &ReplayJson { replay, first, second })?;
            }
            false => writeln!(out, "replay={replay}")?,
        }
        match replay {
            "identical" => Ok(()),
            _ => Err(Failure::Refused("the second response is not the first one".into())),
        }
    }
}
