//! `onlyonce inbox purge`.

use std::io::{Write, stdout};

use indicatif::ProgressBar;
use onlyonce_inbox::{PurgeOptions, PurgeReport};
use serde::Serialize;

use super::Database;
use crate::failure::Failure;
use crate::output;

/// Removes messages older than a period
///
/// By their date alone, in small transactions, so that a load goes on meanwhile. Rows whose date cannot be read are kept and
/// told. A message that comes again after its row was removed is new: keep rows for longer than senders retry.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  onlyonce inbox purge inbox.db 30
  onlyonce inbox purge inbox.db 30 --dry-run")]
pub(super) struct Purge {
    #[command(flatten)]
    database: Database,
    /// Messages applied more than this many days ago are removed
    #[arg(value_parser = parse_period)]
    days: PurgeOptions,
    /// Count, and change nothing
    #[arg(long)]
    dry_run: bool,
    /// Print JSON: `deleted`, `remain`, `unreadable`, `leases`, `longest_retry_days`, `dry_run`
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct PurgeJson {
    deleted: u64,
    remain: u64,
    unreadable: u64,
    leases: u64,
    longest_retry_days: Option<f64>,
    dry_run: bool,
}

impl Purge {
    pub(super) fn run(self) -> Result<(), Failure> {
        let inbox = self.database.open_existing()?;
        let mut options = self.days;
        options.dry_run = self.dry_run;
        // Draws on a terminal alone.
        let progress = ProgressBar::new_spinner();
        let purged = inbox.purge(options, |deleted| {
            progress.set_message(format!("removed {deleted}"));
            progress.tick();
        });
        progress.finish_and_clear();
        let report = purged?;
        self.warn(&report);
        let PurgeReport { deleted, remain, unreadable, leases, longest_retry_days, .. } = report;
        let mut out = stdout().lock();
        match self.json {
            true => {
                let dry_run = self.dry_run;
                output::json(
                    &mut out,
                    &PurgeJson { deleted, remain, unreadable, leases, longest_retry_days, dry_run },
                )?;
            }
            false => writeln!(out, "deleted={deleted} remain={remain}")?,
        }
        Ok(())
    }

    fn warn(&self, report: &PurgeReport) {
        if self.dry_run {
            eprintln!("note: a dry run: nothing was removed");
        }
        if report.leases > 0 {
            eprintln!(
                "warning: {} messages as old have no row, since their work was begun and not seen to end; that is forgotten",
                report.leases
            );
        }
        if report.unreadable > 0 {
            let named: Vec<String> = report.unreadable_keys.iter().map(|key| format!("{key:?}")).collect();
            let more = if report.unreadable > named.len() as u64 { ", …" } else { "" };
            eprintln!(
                "warning: {} rows have a created_at that cannot be read, and were kept: {}{more}",
                report.unreadable,
                named.join(", ")
            );
        }
        if let Some(longest) = report.longest_retry_days.filter(|longest| *longest > self.days.days()) {
            eprintln!(
                "warning: {} days are shorter than the longest time after which a message came again, {longest:.1} days: one \
                 that comes as late once more is applied again",
                self.days.days()
            );
        }
    }
}

fn parse_period(text: &str) -> Result<PurgeOptions, String> {
    let days = text.parse().map_err(|_| onlyonce_inbox::InvalidPeriod.to_string())?;
    PurgeOptions::older_than_days(days).map_err(|error| error.to_string())
}
