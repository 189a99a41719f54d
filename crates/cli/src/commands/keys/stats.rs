//! `onlyonce keys stats`.

use std::io::{Write, stdout};

use crate::failure::Failure;
use crate::output::{self, StatsJson};
use crate::store_url::StoreArg;

/// Counts records by state
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  onlyonce keys stats
  onlyonce keys stats --json")]
pub(super) struct Stats {
    #[command(flatten)]
    store: StoreArg,
    /// Print JSON: a count for each state, and `bytes` (null where the store cannot tell)
    #[arg(long)]
    json: bool,
}

impl Stats {
    pub(super) async fn run(self) -> Result<(), Failure> {
        let stats = self.store.open_reading().await?.stats().await?;
        let mut out = stdout().lock();
        if self.json {
            output::json(&mut out, &StatsJson::from(&stats))?;
            return Ok(());
        }
        let counts = [
            ("in_progress", stats.in_progress, "an owner is at work"),
            ("completed", stats.completed, "every retry gets the stored reply"),
            (
                "unknown",
                stats.unknown,
                "waiting for resolve or release, or for a retry that may run it again",
            ),
            ("freed", stats.freed, "released by an operator, not yet run again"),
            ("expired", stats.expired, "waiting for purge"),
        ];
        let mut table = output::table(&["STATE", "RECORDS", "MEANING"]);
        table.add_rows(
            counts.map(|(state, count, meaning)| [state.into(), count.to_string(), meaning.to_owned()]),
        );
        output::print_table(&mut out, &mut table)?;
        if let Some(bytes) = stats.bytes {
            writeln!(out, "size: {bytes} bytes")?;
        }
        Ok(())
    }
}
