//! `onlyonce inbox load`.

use std::ffi::OsString;
use std::fs;
use std::io::{BufWriter, Write, stderr, stdout};
use std::path::{Path, PathBuf};

use clap::ValueEnum;
use indicatif::{ProgressBar, ProgressStyle};
use onlyonce_inbox::{Format, Ignored, LoadEvent, LoadOptions, LoadReport, Skipped, Sources};
use serde::Serialize;

use super::Database;
use super::delivery::{Handling, OnConflict, Reading, ViaArg, conflict};
use crate::failure::{self, Failure};
use crate::output;

/// Loads many messages: folders of files, patterns, files of lines (NDJSON), standard input
///
/// Messages are taken in the order of the names of their files, so that it may be stopped at any moment and run again with
/// the same end. Each message that fails is told on standard error; the others are loaded.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  onlyonce inbox load inbox.db messages/ --duplicates dup.txt
  onlyonce inbox load inbox.db 'in/2026-*/**/*.json'
  onlyonce inbox load inbox.db messages/ --sql book.sql
  zcat messages.ndjson.gz | onlyonce inbox load inbox.db -")]
pub(super) struct Load {
    #[command(flatten)]
    database: Database,
    /// Folders, files, patterns, or - for lines on standard input. Of a folder the files *.json (one message each),
    /// *.ndjson and *.jsonl (a message a line) are loaded
    #[arg(value_name = "DIR", required = true)]
    sources: Vec<OsString>,
    /// Write the keys that were ignored as duplicates to this file: each once, a line each, ascending by bytes
    #[arg(long, value_name = "FILE")]
    duplicates: Option<PathBuf>,
    #[command(flatten)]
    reading: Reading,
    #[command(flatten)]
    handling: Handling,
    /// By which path the messages came; kept in the delivery log
    #[arg(long, value_name = "PATH", default_value = "batch")]
    via: ViaArg,
    /// How messages stand in files, whatever the files are called [default: by the end of the name]
    #[arg(long)]
    format: Option<FormatArg>,
    /// Messages of one transaction, about: more are faster, fewer let others at the database sooner
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    batch: u32,
    /// Print JSON: `files`, `messages`, `applied`, `duplicates`, `conflicts`, `failed`, `rows`
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum FormatArg {
    /// One message in a file
    Json,
    /// A message a line
    Ndjson,
}

impl From<FormatArg> for Format {
    fn from(format: FormatArg) -> Self {
        match format {
            FormatArg::Json => Self::Json,
            FormatArg::Ndjson => Self::Lines,
        }
    }
}

#[derive(Serialize)]
struct ReportJson {
    files: u64,
    messages: u64,
    applied: u64,
    duplicates: u64,
    conflicts: u64,
    failed: u64,
    rows: u64,
}

/// Memory for the database's pages: the index on keys is what is touched at random.
const CACHE_KIB: u32 = 64 * 1024;

impl Load {
    pub(super) fn run(self) -> Result<(), Failure> {
        let format = self.format.map(Format::from);
        let work = self.handling.work()?;
        let sources = Sources::find(&self.sources, format)?;
        // Before anything is loaded: a list that cannot be written must not be found out at the end.
        let list = self.duplicates.as_deref().map(List::create).transpose()?;
        let inbox = self.database.options().cache_kib(CACHE_KIB).open(&self.database.path)?;
        let options = LoadOptions {
            keys: self.reading.keys(),
            via: self.via.into(),
            format,
            batch: usize::try_from(self.batch).unwrap_or(usize::MAX),
            ..LoadOptions::default()
        };
        let mut progress = Progress::default();
        let loaded = inbox.load(sources, &options, &work, |event| progress.observe(event));
        progress.bar.finish_and_clear();
        let (report, ignored) = loaded?;
        if let Some(list) = list {
            list.write(&ignored)?;
        }
        self.print(&report)?;
        if report.conflicts > 0 && self.reading.on_conflict == OnConflict::Fail {
            return Err(Failure::Data(format!(
                "{} conflicts; nothing of theirs was applied",
                report.conflicts
            )));
        }
        match report.failed {
            0 => Ok(()),
            failed => Err(Failure::Refused(format!("{failed} of {} messages failed", report.messages))),
        }
    }

    fn print(&self, report: &LoadReport) -> Result<(), Failure> {
        let LoadReport { files, messages, applied, duplicates, conflicts, failed, rows } = *report;
        let mut out = stdout().lock();
        match self.json {
            true => output::json(
                &mut out,
                &ReportJson { files, messages, applied, duplicates, conflicts, failed, rows },
            )?,
            false => writeln!(
                out,
                "files={files} applied={applied} duplicates={duplicates} conflicts={conflicts} failed={failed} rows={rows}"
            )?,
        }
        Ok(())
    }
}

/// Draws on a terminal alone; what is told is told everywhere.
struct Progress {
    bar: ProgressBar,
    // Of files that are read line by line bytes are counted, else files.
    by_bytes: bool,
}

impl Default for Progress {
    fn default() -> Self {
        Self { bar: ProgressBar::no_length(), by_bytes: false }
    }
}

impl Progress {
    fn observe(&mut self, event: &LoadEvent<'_>) {
        match event {
            LoadEvent::Start { files, line_bytes, skipped } => self.start(*files, *line_bytes, *skipped),
            LoadEvent::Failed(error) => self.say("error", &failure::chain(*error)),
            LoadEvent::WorkFailed { key, source } => {
                self.say(
                    "error",
                    &format!("{source}: the work of {key:?} failed for good; the failure is recorded"),
                );
            }
            LoadEvent::Conflict { key, source } => self.say("warning", &conflict(key, source)),
            LoadEvent::Committed { report, line_bytes } => {
                self.bar.set_position(if self.by_bytes { *line_bytes } else { report.files });
                self.bar.set_message(format!(
                    "{} messages: {} applied, {} duplicates, {} failed",
                    report.messages, report.applied, report.duplicates, report.failed
                ));
            }
        }
    }

    fn start(&mut self, files: u64, line_bytes: u64, skipped: Skipped) {
        self.by_bytes = line_bytes > 0;
        let (template, length) = match self.by_bytes {
            true => ("{elapsed_precise} {bar:30} {bytes}/{total_bytes}, {msg}", line_bytes),
            false => ("{elapsed_precise} {bar:30} {pos}/{len} files, {msg}", files),
        };
        self.bar.set_style(ProgressStyle::with_template(template).expect("a template of indicatif"));
        self.bar.set_length(length);
        let Skipped { other_files, hidden, folders } = skipped;
        if skipped != Skipped::default() {
            self.say(
                "note",
                &format!(
                    "left out: {other_files} files that are not .json, .ndjson or .jsonl, {hidden} hidden ones, {folders} \
                     folders (a pattern such as 'DIR/**/*.json' enters them)"
                ),
            );
        }
    }

    fn say(&self, what: &str, text: &str) {
        // Whoever closed standard error does not read it.
        self.bar.suspend(|| {
            let _ = writeln!(stderr(), "{what}: {text}");
        });
    }
}

/// The list of ignored keys: whole, or as it was.
struct List {
    path: PathBuf,
    // `None` for what is not a regular file, such as a pipe: written in place.
    temporary: Option<tempfile::NamedTempFile>,
}

impl List {
    fn create(path: &Path) -> Result<Self, Failure> {
        let in_place = fs::metadata(path).is_ok_and(|found| !found.is_file());
        let temporary = match in_place {
            true if path.is_dir() => {
                return Err(Failure::Io(format!("{}: it is a folder, not a file", path.display())));
            }
            true => None,
            false => {
                let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
                let made = tempfile::Builder::new()
                    .prefix(".onlyonce-")
                    .permissions(permissions())
                    .tempfile_in(folder.unwrap_or(Path::new(".")));
                Some(made.map_err(|error| Self::failed(path, &error))?)
            }
        };
        Ok(Self { path: path.into(), temporary })
    }

    fn write(self, ignored: &Ignored) -> Result<(), Failure> {
        let Self { path, temporary } = self;
        let Some(temporary) = temporary else {
            let file = fs::OpenOptions::new()
                .write(true)
                .open(&path)
                .map_err(|error| Self::failed(&path, &error))?;
            return Ok(ignored.write(&path, &mut BufWriter::new(file))?);
        };
        ignored.write(&path, &mut BufWriter::new(temporary.as_file()))?;
        temporary.persist(&path).map_err(|error| Self::failed(&path, &error.error))?;
        Ok(())
    }

    fn failed(path: &Path, error: &std::io::Error) -> Failure {
        Failure::io(&format!("{}: cannot be written", path.display()), error)
    }
}

// As any program makes a file; the user's mask applies.
fn permissions() -> fs::Permissions {
    std::os::unix::fs::PermissionsExt::from_mode(0o666)
}
