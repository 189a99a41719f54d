//! `onlyonce keys purge`.

use std::io::{Write, stdout};
use std::time::Duration;

use indicatif::ProgressBar;
use onlyonce_core::{PurgeRequest, Purged, StoreAdmin};
use serde::Serialize;

use crate::commands::units::duration;
use crate::failure::Failure;
use crate::output;
use crate::store_url::StoreArg;

/// Removes records that are over, in small batches
///
/// Completed records past their retention; records in progress, unknown or freed when --hold-retention has passed
/// since their lease: an outcome that nobody has decided by then is forgotten, and the next request with its key runs
/// again. Claims go on meanwhile. May be stopped at any moment.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  onlyonce keys purge
  onlyonce keys purge --hold-retention 30d --json")]
pub(super) struct Purge {
    #[command(flatten)]
    store: StoreArg,
    /// How long records without a reply are kept after their lease; less than 24h needs --force
    #[arg(long, value_name = "DURATION", default_value = "7d", value_parser = duration)]
    hold_retention: Duration,
    /// Also with a short --hold-retention, though outcomes that somebody may still have to decide are forgotten
    #[arg(long)]
    force: bool,
    /// Print JSON: `removed`
    #[arg(long)]
    json: bool,
}

/// A day, so that whoever decides has slept once.
const HOLD_RETENTION_MIN: Duration = Duration::from_secs(24 * 3600);

#[derive(Serialize)]
struct PurgedJson {
    removed: u64,
}

impl Purge {
    pub(super) async fn run(self) -> Result<(), Failure> {
        if self.hold_retention < HOLD_RETENTION_MIN && !self.force {
            return Err(Failure::Usage(
                "--hold-retention under 24h forgets outcomes that somebody may still have to decide, and a retry runs again: \
                 `onlyonce keys list --state unknown` shows them, `onlyonce keys resolve` and `release` decide them; add --force \
                 to go on"
                    .into(),
            ));
        }
        let store = self.store.open_existing().await?;
        let removed = self.purge(&*store).await?;
        let mut out = stdout().lock();
        match self.json {
            true => output::json(&mut out, &PurgedJson { removed })?,
            false => writeln!(out, "removed {removed}")?,
        }
        Ok(())
    }

    async fn purge(&self, store: &dyn StoreAdmin) -> Result<u64, Failure> {
        let request = PurgeRequest { hold_retention: self.hold_retention, ..PurgeRequest::default() };
        // Draws on a terminal alone.
        let progress = ProgressBar::new_spinner();
        let mut removed = 0;
        loop {
            let batch: Purged = store.purge(&request).await?;
            if batch.paused {
                progress.finish_and_clear();
                return Err(Failure::Refused(format!(
                    "removed {removed}, then paused: the wall clock was stepped, so nobody knows what has expired; set it \
                     right, or purge again when it has stood for an hour"
                )));
            }
            removed += batch.removed;
            progress.set_message(format!("removed {removed}"));
            progress.tick();
            if !batch.more {
                progress.finish_and_clear();
                return Ok(removed);
            }
        }
    }
}
