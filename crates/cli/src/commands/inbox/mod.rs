//! `onlyonce inbox`: messages that may come more than once, applied once.

mod apply;
mod duplicates;
mod forget;
mod load;
mod purge;
mod race;
mod show;
mod verify;

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Subcommand, ValueEnum};
use onlyonce_inbox::{
    Body, Envelope, Inbox, InboxOptions, Incoming, KeyExpression, Keys, Place, Receipt, Verdict, Via, Work,
    read_message,
};

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

/// How messages are read, and what a conflict means.
#[derive(Debug, clap::Args)]
struct Reading {
    /// What a message is known by: a member, a JSON pointer such as /header/id, or several, as in '{sender}/{date}/{seq}'
    #[arg(long, value_name = "EXPRESSION", default_value = "msg_id", value_parser = parse_expression)]
    key: KeyExpression,
    /// What a message is about, kept beside its key; NULL where it has none
    #[arg(long, value_name = "EXPRESSION", default_value = "order_no", value_parser = parse_expression)]
    biz_key: KeyExpression,
    /// What to do about a known key with another body: warn and take it for a duplicate, or fail with exit code 65
    #[arg(long, value_name = "WHAT", default_value = "warn")]
    on_conflict: OnConflict,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum OnConflict {
    Warn,
    Fail,
}

impl Reading {
    fn keys(&self) -> Keys {
        Keys { key: self.key.clone(), biz_key: self.biz_key.clone() }
    }
}

/// By which path messages came.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum ViaArg {
    Retry,
    Queue,
    Manual,
    Batch,
    Unknown,
}

impl From<ViaArg> for Via {
    fn from(via: ViaArg) -> Self {
        match via {
            ViaArg::Retry => Self::Retry,
            ViaArg::Queue => Self::Queue,
            ViaArg::Manual => Self::Manual,
            ViaArg::Batch => Self::Batch,
            ViaArg::Unknown => Self::Unknown,
        }
    }
}

/// One message in a file.
struct Message {
    source: String,
    envelope: Envelope,
    body: Vec<u8>,
}

impl Message {
    fn read(path: &Path, keys: &Keys) -> Result<Self, Failure> {
        let body = read_message(path)?;
        let source =
            if path.as_os_str() == OsStr::new("-") { "stdin".into() } else { path.to_string_lossy() };
        let source = source.into_owned();
        let envelope = Envelope::read(&body, keys, Place::start_of(&source))
            .map_err(onlyonce_inbox::InboxError::from)?;
        Ok(Self { source, envelope, body })
    }

    fn incoming(&self, via: Via) -> Incoming<'_> {
        Incoming { envelope: &self.envelope, via, source: &self.source, body: &self.body }
    }

    fn receive(&self, inbox: &Inbox, via: Via, work: &Work) -> Result<Receipt, Failure> {
        Ok(inbox.receive(&self.incoming(via), work)?)
    }
}

/// What line 1 says.
fn verdict_line(verdict: Verdict, on_conflict: OnConflict) -> &'static str {
    match verdict {
        Verdict::Duplicate(Body::Different) if on_conflict == OnConflict::Fail => "conflict",
        Verdict::Duplicate(_) => "duplicate",
        other => other.as_str(),
    }
}

/// A conflict is told, and a failure where that was asked for.
fn conflict(key: &str, source: &str) -> String {
    format!(
        "{source}: conflict: the key {key:?} is known, and this body is another one than the first: nothing was applied; \
         `onlyonce inbox show` has both deliveries"
    )
}

fn parse_expression(text: &str) -> Result<KeyExpression, String> {
    text.parse().map_err(|error: onlyonce_inbox::InvalidExpression| error.to_string())
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
