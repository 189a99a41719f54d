//! `onlyonce inbox race`.

use std::io::{self, Write, stdout};
use std::process::Command;

use onlyonce_inbox::{AttemptResult, RaceReport, Verdict, Work, race, racer};
use serde::Serialize;

use super::delivery::{Delivery, Message, ViaArg};
use crate::failure::Failure;
use crate::output;

/// Starts several processes that apply one message at the same moment
///
/// They are separate processes that wait at one barrier, then open the database and apply the message at once. The last
/// line is `rows=1`: how many rows the key has.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  onlyonce inbox race inbox.db message.json
  onlyonce inbox race inbox.db message.json --attempts 40")]
pub(super) struct Race {
    #[command(flatten)]
    delivery: Delivery,
    /// How many processes
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u16).range(1..=1000))]
    attempts: u16,
    /// By which path the message came; kept in the delivery log
    #[arg(long, value_name = "PATH", default_value = "retry")]
    via: ViaArg,
    /// Print JSON: `attempts`, `applied`, `duplicates`, `failed`, `active_together_max`, `rows`
    #[arg(long)]
    json: bool,
    /// One of the processes of a race; its standard input is the barrier
    #[arg(long, hide = true)]
    racer: bool,
}

#[derive(Serialize)]
struct RaceJson {
    attempts: usize,
    applied: usize,
    duplicates: usize,
    failed: usize,
    active_together_max: usize,
    rows: u64,
}

impl Race {
    pub(super) fn run(self) -> Result<(), Failure> {
        if self.delivery.message.as_os_str() == "-" {
            return Err(Failure::Usage(
                "a race needs a file: its processes cannot share standard input".into(),
            ));
        }
        let message = self.delivery.read()?;
        let work = self.delivery.handling.work()?;
        if self.racer {
            return racer(|| self.attempt(&message, &work)).map_err(|error| Failure::io("the race", &error));
        }
        let report =
            race(self.attempts.into(), racer_command).map_err(|error| Failure::io("the race", &error))?;
        let rows = self.delivery.database.open_existing()?.rows_of(message.envelope.key.as_str())?;
        self.print(&report, rows)
    }

    fn attempt(&self, message: &Message, work: &Work) -> AttemptResult {
        let received =
            self.delivery.database.open().and_then(|inbox| message.receive(&inbox, self.via.into(), work));
        match received.map(|receipt| receipt.verdict) {
            Ok(Verdict::Applied) => AttemptResult::Applied,
            Ok(Verdict::Failed) => AttemptResult::Failed,
            Ok(Verdict::Duplicate(_)) => AttemptResult::Duplicate,
            Err(failure) => AttemptResult::Error(failure.to_string()),
        }
    }

    fn print(&self, report: &RaceReport, rows: u64) -> Result<(), Failure> {
        let attempts = report.attempts.len();
        let count = |is: fn(&AttemptResult) -> bool| report.attempts.iter().filter(|a| is(&a.result)).count();
        let applied = count(|result| matches!(result, AttemptResult::Applied));
        let duplicates = count(|result| matches!(result, AttemptResult::Duplicate));
        let failed = attempts - applied - duplicates;
        let active_together_max = report.active_together_max;
        for attempt in &report.attempts {
            if let AttemptResult::Error(error) = &attempt.result {
                eprintln!("error: {error}");
            }
        }
        let mut out = stdout().lock();
        if self.json {
            let race = RaceJson { attempts, applied, duplicates, failed, active_together_max, rows };
            output::json(&mut out, &race)?;
        } else {
            writeln!(out, "attempts={attempts} applied={applied} duplicates={duplicates} failed={failed}")?;
            writeln!(out, "active_together_max={active_together_max}")?;
            writeln!(out, "rows={rows}")?;
        }
        match (rows, failed) {
            (1, 0) => Ok(()),
            (1, failed) => Err(Failure::Refused(format!("{failed} of {attempts} processes failed"))),
            (rows, _) => Err(Failure::Refused(format!("the message has {rows} rows, not 1"))),
        }
    }
}

// The same command line, as a racer.
fn racer_command() -> io::Result<Command> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(std::env::args_os().skip(1)).arg("--racer");
    Ok(command)
}
