//! `onlyonce inbox duplicates`.

use std::io::{self, Write, stdout};

use onlyonce_inbox::{DuplicateView, Inbox, PathTotal};

use super::Database;
use crate::failure::Failure;
use crate::output;

/// Lists the messages that came more than once: how often, by which paths, when, and whether they said the same
///
/// TIMES counts every delivery, the first too; PATH names the paths of the repeated ones. Totals by path follow, in which
/// messages that were purged count too.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  onlyonce inbox duplicates inbox.db
  onlyonce inbox duplicates inbox.db --csv > duplicates.csv
  onlyonce inbox duplicates inbox.db --by-path")]
pub(super) struct Duplicates {
    #[command(flatten)]
    database: Database,
    /// Only the totals by path
    #[arg(long)]
    by_path: bool,
    /// Print JSON: `duplicates`, `by_path`
    #[arg(long, conflicts_with = "csv")]
    json: bool,
    /// Print CSV (RFC 4180): a line for each message, or with --by-path for each path
    #[arg(long)]
    csv: bool,
}

const COLUMNS: [&str; 6] = ["msg_id", "times", "path", "first_seen", "last_seen", "body"];
const PATH_COLUMNS: [&str; 6] = ["path", "duplicates", "conflicts", "first_seen", "last_seen", "applied"];
/// Keys longer than this push their line to the right.
const KEY_WIDTH_MAX: usize = 60;

impl Duplicates {
    pub(super) fn run(self) -> Result<(), Failure> {
        let inbox = self.database.open_existing()?;
        let mut out = io::BufWriter::new(stdout().lock());
        match (self.json, self.csv) {
            (true, _) => self.json(&inbox, &mut out)?,
            (_, true) => self.csv(&inbox, &mut out)?,
            _ => self.table(&inbox, &mut out)?,
        }
        Ok(out.flush()?)
    }

    // Row by row: there may be more than fit in memory.
    fn json(&self, inbox: &Inbox, out: &mut impl Write) -> Result<(), Failure> {
        write!(out, "{{")?;
        if !self.by_path {
            write!(out, "\n  \"duplicates\": [")?;
            let mut separator = "\n    ";
            inbox.duplicates(|view| {
                write!(out, "{separator}{}", serde_json::to_string(&view).map_err(io::Error::from)?)?;
                separator = ",\n    ";
                Ok::<(), Failure>(())
            })?;
            write!(out, "\n  ],")?;
        }
        let totals = inbox.duplicates_by_path()?;
        writeln!(out, "\n  \"by_path\": {}\n}}", serde_json::to_string(&totals).map_err(io::Error::from)?)?;
        Ok(())
    }

    fn csv(&self, inbox: &Inbox, out: &mut impl Write) -> Result<(), Failure> {
        if self.by_path {
            record(out, &PATH_COLUMNS.map(String::from))?;
            for total in inbox.duplicates_by_path()? {
                record(out, &path_cells(&total))?;
            }
            return Ok(());
        }
        record(out, &COLUMNS.map(String::from))?;
        inbox.duplicates(|view| Ok(record(out, &cells(&view))?))
    }

    fn table(&self, inbox: &Inbox, out: &mut impl Write) -> Result<(), Failure> {
        let totals = inbox.duplicates_by_path()?;
        if totals.iter().all(|total| total.duplicates == 0) {
            writeln!(out, "no duplicates")?;
            return Ok(());
        }
        if !self.by_path {
            let longest = usize::try_from(inbox.duplicates_key_width()?).unwrap_or(KEY_WIDTH_MAX);
            let width = longest.clamp("MSG_ID".len(), KEY_WIDTH_MAX);
            let line = |out: &mut dyn Write, cells: &[String; 6]| {
                let [key, times, path, first, last, body] = cells;
                writeln!(out, "{key:<width$}  {times:>5}  {path:<12}  {first:<19}  {last:<19}  {body}")
            };
            line(out, &COLUMNS.map(str::to_uppercase))?;
            inbox.duplicates(|view| {
                let mut cells = cells(&view);
                cells[0] = output::visible(&cells[0]);
                Ok::<(), Failure>(line(out, &cells)?)
            })?;
            writeln!(out)?;
        }
        let mut table = output::table(&PATH_COLUMNS.map(str::to_uppercase).each_ref().map(String::as_str));
        table.add_rows(totals.iter().map(path_cells));
        Ok(output::print_table(out, &mut table)?)
    }
}

fn cells(view: &DuplicateView) -> [String; 6] {
    let DuplicateView { msg_id, times, path, first_seen, last_seen, body, .. } = view;
    [msg_id.clone(), times.to_string(), path.clone(), first_seen.clone(), last_seen.clone(), (*body).into()]
}

fn path_cells(total: &PathTotal) -> [String; 6] {
    let PathTotal { path, duplicates, conflicts, applied, first_seen, last_seen } = total;
    let seen = |at: &Option<String>| at.clone().unwrap_or_default();
    [
        path.clone(),
        duplicates.to_string(),
        conflicts.to_string(),
        seen(first_seen),
        seen(last_seen),
        applied.to_string(),
    ]
}

fn record(out: &mut impl Write, cells: &[String]) -> io::Result<()> {
    let quoted: Vec<String> = cells
        .iter()
        .map(|cell| match cell.contains([',', '"', '\r', '\n']) {
            true => format!("\"{}\"", cell.replace('"', "\"\"")),
            false => cell.clone(),
        })
        .collect();
    writeln!(out, "{}", quoted.join(","))
}
