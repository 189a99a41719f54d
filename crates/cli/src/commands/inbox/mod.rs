//! `onlyonce inbox`: messages that may come more than once, applied once.

mod apply;
mod delivery;
mod duplicates;
mod forget;
mod load;
mod purge;
mod race;
mod show;
mod verify;

use std::path::PathBuf;
use std::time::Duration;

use clap::Subcommand;
use onlyonce_inbox::{Inbox, InboxOptions};

use crate::failure::Failure;

/// Receives messages that may come more than once, and applies each once
///
/// A message is known by its key, by default the member `msg_id`. A unique constraint on the table `inbox_log` decides
/// whether it is new; every delivery, duplicates and conflicts too, is on record in `inbox_deliveries`.
#[derive(Debug, clap::Args)]
#[command(subcommand_required = true, arg_required_else_help = true)]
#[command(after_help = "\
Exit codes:
  0   done
  1   some messages failed; not found
  2   the command line is wrong
  65  bad data: the file, line and column are named, and what was expected; or a table that is not fit
  74  a file, a folder or the database failed, or is not there
  75  busy for longer than --busy-timeout, or a failure that passes: run it again

Examples:
  onlyonce inbox apply inbox.db message.json
  onlyonce inbox load inbox.db messages/ --duplicates dup.txt
  onlyonce inbox duplicates inbox.db
  onlyonce inbox purge inbox.db 30")]
pub(crate) struct InboxCommand {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Apply(apply::Apply),
    Load(load::Load),
    Race(race::Race),
    Purge(purge::Purge),
    Verify(verify::Verify),
    Duplicates(duplicates::Duplicates),
    Show(show::Show),
    Forget(forget::Forget),
}

impl InboxCommand {
    pub(crate) fn run(self) -> Result<(), Failure> {
        match self.command {
            Command::Apply(command) => command.run(),
            Command::Load(command) => command.run(),
            Command::Race(command) => command.run(),
            Command::Purge(command) => command.run(),
            Command::Verify(command) => command.run(),
            Command::Duplicates(command) => command.run(),
            Command::Show(command) => command.run(),
            Command::Forget(command) => command.run(),
        }
    }
}

/// The database.
#[derive(Debug, clap::Args)]
struct Database {
    /// The file of SQLite
    #[arg(value_name = "DB")]
    path: PathBuf,
    /// How long to wait while another process holds the database, such as 5s or 500ms; a bare number is milliseconds
    #[arg(long, value_name = "DURATION", default_value = "5s", value_parser = parse_patience)]
    busy_timeout: Duration,
}

impl Database {
    /// Opens it, or makes it.
    fn open(&self) -> Result<Inbox, Failure> {
        Ok(self.options().open(&self.path)?)
    }

    fn open_existing(&self) -> Result<Inbox, Failure> {
        Ok(self.options().existing().open(&self.path)?)
    }

    fn options(&self) -> InboxOptions {
        InboxOptions::default().busy_timeout(self.busy_timeout)
    }
}

// A bare number is in milliseconds, as for PRAGMA busy_timeout.
fn parse_patience(text: &str) -> Result<Duration, String> {
    const MAX: Duration = Duration::from_secs(3600);
    let patience = match text.parse() {
        Ok(ms) => Duration::from_millis(ms),
        Err(_) => humantime::parse_duration(text).map_err(|error| error.to_string())?,
    };
    if patience > MAX { Err("the limit is an hour".into()) } else { Ok(patience) }
}
