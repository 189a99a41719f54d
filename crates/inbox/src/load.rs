//! Loading messages in bulk: read and parsed in parallel, received in their order, committed in batches.
//!
//! The order is that of the sources, then of the names of their files, then of lines; which of two messages with one key
//! is applied does not depend on how fast who was. So what is committed is at any moment a beginning of the whole, and a
//! load that was killed ends with the same `inbox_log` when it is run again.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read};
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;
use std::time::Duration;

use onlyonce_store_sqlite::rusqlite::Connection;

use crate::envelope::{Envelope, Keys, Place};
use crate::error::{BadData, InboxError};
use crate::inbox::Inbox;
use crate::receive::{Body, Incoming, Turn, Verdict, Via};
use crate::scratch::IgnoredKeys;
use crate::source::{Format, Kind, LineReader, Lines, Listing, MESSAGE_BYTES_MAX, Skipped, read_stable};
use crate::work::Work;

/// Files of one message each that are read as one unit.
const UNIT_FILES: usize = 64;
/// Units that wait before and after each reader.
const QUEUE_UNITS: usize = 8;
/// Between two transactions: longer than the naps of those who wait for the database, so that they get their turn.
const REST: Duration = Duration::from_millis(2);
const READERS_MAX: usize = 64;

/// How to load.
#[derive(Clone, Debug)]
pub struct LoadOptions {
    /// What is taken from each message.
    pub keys: Keys,
    /// By which path they came.
    pub via: Via,
    /// How messages stand in files, whatever their names say.
    pub format: Option<Format>,
    /// How many messages one transaction takes, about: it ends with a block of lines or a handful of files.
    pub batch: usize,
    /// How many threads read.
    pub readers: usize,
}

impl Default for LoadOptions {
    fn default() -> Self {
        let cores = thread::available_parallelism().map_or(1, NonZero::get);
        Self { keys: Keys::default(), via: Via::Batch, format: None, batch: 10_000, readers: cores.min(8) }
    }
}

/// What a load did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoadReport {
    /// Files, standard input being one.
    pub files: u64,
    /// Messages in them, those that could not be read included.
    pub messages: u64,
    /// New ones.
    pub applied: u64,
    /// Known ones, conflicts included.
    pub duplicates: u64,
    /// Known ones with another body than the first.
    pub conflicts: u64,
    /// Those that were not taken, or whose work failed for good.
    pub failed: u64,
    /// Rows of `inbox_log` afterwards.
    pub rows: u64,
}

/// What is told while a load goes on, about what is committed.
#[derive(Debug)]
pub enum LoadEvent<'e> {
    /// What there is to do, as far as it is known.
    Start {
        /// Files.
        files: u64,
        /// Bytes of the files among them that are read line by line.
        line_bytes: u64,
        /// What of the folders is left out.
        skipped: Skipped,
    },
    /// A message was not taken.
    Failed(&'e InboxError),
    /// The work of a message failed for good; the failure is recorded.
    WorkFailed {
        /// The key.
        key: &'e str,
        /// Where it came from.
        source: &'e str,
    },
    /// A message has a known key and another body.
    Conflict {
        /// The key.
        key: &'e str,
        /// Where it came from.
        source: &'e str,
    },
    /// A batch is committed.
    Committed {
        /// What was done so far.
        report: LoadReport,
        /// Bytes read line by line so far.
        line_bytes: u64,
    },
}

/// The keys that a load ignored as duplicates, each once, conflicts among them.
#[derive(Debug)]
pub struct Ignored(IgnoredKeys);

impl Ignored {
    /// Writes a line each, ascending by bytes. `path` is for errors.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn write(&self, path: &Path, out: &mut impl io::Write) -> Result<(), InboxError> {
        self.0.write(path, out)
    }
}

/// The files of a load, found before anything is changed.
#[derive(Debug)]
pub struct Sources(Listing);

impl Sources {
    /// Looks where the sources lead to: folders, files, `-` for standard input, patterns such as `in/*/2026-*.json`.
    ///
    /// # Errors
    /// [`InboxError::File`] for one that is not there.
    pub fn find(sources: &[OsString], format: Option<Format>) -> Result<Self, InboxError> {
        Listing::of(sources, format).map(Self)
    }
}

impl Inbox {
    /// Loads all messages of the sources.
    ///
    /// # Guarantees
    /// A message that cannot be taken is told to `observe` and counted, and the load goes on. Memory does not grow with the
    /// number of files or messages.
    ///
    /// # Errors
    /// When the database or the sources fail; what was committed before stays, and a second load finds it.
    pub fn load(
        &self,
        sources: Sources,
        options: &LoadOptions,
        work: &Work,
        mut observe: impl FnMut(&LoadEvent<'_>),
    ) -> Result<(LoadReport, Ignored), InboxError> {
        let Sources(listing) = sources;
        let (files, line_bytes) = (listing.count()?, listing.line_bytes);
        observe(&LoadEvent::Start { files, line_bytes, skipped: listing.skipped });
        let (from_readers, feeder) = start(listing, options, work.needs_body());
        let mut writer = Writer {
            inbox: self,
            options,
            work,
            ignored: IgnoredKeys::new()?,
            report: LoadReport::default(),
        };
        // After an error the readers find that nobody takes what they read, and end; not waited for, since standard
        // input may never say another word.
        writer.receive_all(&from_readers, &mut observe)?;
        feeder.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        writer.report.rows = self.rows()?;
        Ok((writer.report, Ignored(writer.ignored)))
    }
}

type Feeding = thread::JoinHandle<Result<(), InboxError>>;

// The blocks come in turn: one from each receiver.
fn start(listing: Listing, options: &LoadOptions, needs_body: bool) -> (Vec<Receiver<Block>>, Feeding) {
    let keys = Arc::new(options.keys.clone());
    let (mut to_readers, mut from_readers) = (Vec::new(), Vec::new());
    for _ in 0..options.readers.clamp(1, READERS_MAX) {
        let (give, take) = sync_channel::<Unit>(QUEUE_UNITS);
        let (put, get) = sync_channel::<Block>(QUEUE_UNITS);
        let keys = Arc::clone(&keys);
        thread::spawn(move || {
            // Ends when the feeder has no more, or when nobody takes what was read.
            for unit in take {
                if put.send(unit.read(&keys, needs_body)).is_err() {
                    return;
                }
            }
        });
        to_readers.push(give);
        from_readers.push(get);
    }
    let feeder = thread::spawn(move || Feeder { to: to_readers, next: 0 }.feed(&listing));
    (from_readers, feeder)
}

/// A piece of work for a reader.
enum Unit {
    Files(Vec<(PathBuf, Kind)>),
    Lines(Arc<str>, Lines),
    // A file that is read line by line is over: or it could not be read.
    End(Option<InboxError>),
}

/// What a reader made of a unit.
struct Block {
    files: u64,
    line_bytes: u64,
    messages: Vec<Result<Message, InboxError>>,
}

struct Message {
    envelope: Envelope,
    source: String,
    body: Vec<u8>,
}

impl Message {
    fn incoming(&self, via: Via) -> Incoming<'_> {
        Incoming { envelope: &self.envelope, via, source: &self.source, body: &self.body }
    }
}

/// Hands units to the readers in turn, so that what they made can be taken in the same turn.
struct Feeder {
    to: Vec<SyncSender<Unit>>,
    next: usize,
}

impl Feeder {
    fn feed(mut self, files: &Listing) -> Result<(), InboxError> {
        let mut unit = Vec::new();
        files.each(|path, kind| {
            if matches!(kind, Kind::Json | Kind::NoFile) {
                unit.push((path, kind));
                return unit.len() < UNIT_FILES || self.give(Unit::Files(std::mem::take(&mut unit)));
            }
            (unit.is_empty() || self.give(Unit::Files(std::mem::take(&mut unit)))) && self.lines(&path)
        })?;
        if !unit.is_empty() {
            self.give(Unit::Files(unit));
        }
        Ok(())
    }

    // False when nobody takes any more.
    fn give(&mut self, unit: Unit) -> bool {
        let to = self.next;
        self.next = (to + 1) % self.to.len();
        self.to[to].send(unit).is_ok()
    }

    fn lines(&mut self, path: &Path) -> bool {
        if path.as_os_str() == "-" {
            return self.stream(Path::new("stdin"), io::stdin().lock());
        }
        match File::open(path) {
            Ok(file) => self.stream(path, file),
            Err(error) => self.give(Unit::End(Some(InboxError::file(path, "cannot be opened", error)))),
        }
    }

    fn stream(&mut self, path: &Path, from: impl Read) -> bool {
        let name: Arc<str> = path.to_string_lossy().into();
        let mut reader = LineReader::new(from);
        loop {
            match reader.next() {
                Ok(Some(lines)) => {
                    if !self.give(Unit::Lines(name.clone(), lines)) {
                        return false;
                    }
                }
                Ok(None) => return self.give(Unit::End(None)),
                Err(error) => {
                    return self.give(Unit::End(Some(InboxError::file(path, "cannot be read", error))));
                }
            }
        }
    }
}

impl Unit {
    fn read(self, keys: &Keys, needs_body: bool) -> Block {
        match self {
            Self::Files(files) => Block {
                files: files.len() as u64,
                line_bytes: 0,
                messages: files
                    .iter()
                    .map(|(path, kind)| file_message(path, *kind, keys, needs_body))
                    .collect(),
            },
            Self::Lines(name, lines) => Block {
                files: 0,
                line_bytes: lines.bytes,
                messages: line_messages(&name, &lines, keys, needs_body),
            },
            Self::End(error) => {
                Block { files: 1, line_bytes: 0, messages: error.map(Err).into_iter().collect() }
            }
        }
    }
}

fn file_message(path: &Path, kind: Kind, keys: &Keys, needs_body: bool) -> Result<Message, InboxError> {
    if kind == Kind::NoFile {
        let reason = io::Error::new(io::ErrorKind::InvalidInput, "it is not a file");
        return Err(InboxError::file(path, "cannot be read", reason));
    }
    let text = read_stable(path)?;
    let source = path.to_string_lossy().into_owned();
    let envelope = Envelope::read(&text, keys, Place::start_of(&source))?;
    Ok(Message { envelope, source, body: if needs_body { text } else { Vec::new() } })
}

fn line_messages(
    name: &str,
    lines: &Lines,
    keys: &Keys,
    needs_body: bool,
) -> Vec<Result<Message, InboxError>> {
    let too_long = |line: u64| {
        let reason = format!("expected a message of at most {MESSAGE_BYTES_MAX} bytes, found a longer line");
        InboxError::from(BadData { source_name: name.to_owned(), line, column: 1, reason })
    };
    if lines.is_too_long {
        return vec![Err(too_long(lines.first_line))];
    }
    let read = lines.iter().map(|line| {
        if line.text.len() > MESSAGE_BYTES_MAX {
            return Err(too_long(line.number));
        }
        let place = Place { source_name: name, first_line: line.number };
        let envelope = Envelope::read(line.text, keys, place)?;
        let body = if needs_body { line.text.to_vec() } else { Vec::new() };
        Ok(Message { envelope, source: format!("{name}:{}", line.number), body })
    });
    read.collect()
}

/// What of a batch is told when it is committed.
enum Told {
    Failed(InboxError),
    WorkFailed(Message),
    Conflict(Message),
}

struct Writer<'l> {
    inbox: &'l Inbox,
    options: &'l LoadOptions,
    work: &'l Work,
    ignored: IgnoredKeys,
    report: LoadReport,
}

impl Writer<'_> {
    fn receive_all(
        &mut self,
        from: &[Receiver<Block>],
        observe: &mut impl FnMut(&LoadEvent<'_>),
    ) -> Result<(), InboxError> {
        let mut blocks = Blocks { from, turn: 0, line_bytes: 0 };
        while let Some(block) = blocks.wait() {
            let mut told = Vec::new();
            let received = match self.work {
                Work::Leased(_) => self.receive_one_by_one(block, &mut told),
                Work::RecordAlone | Work::InTransaction(_) => {
                    self.receive_batch(block, &mut blocks, &mut told)
                }
            };
            for told in &told {
                observe(&told.event());
            }
            received?;
            observe(&LoadEvent::Committed { report: self.report, line_bytes: blocks.line_bytes });
            thread::sleep(REST);
        }
        Ok(())
    }

    // A block and what else there is by then, up to a batch: nobody is waited for while the database is held. All of it, or
    // nothing: what is told is what is committed.
    fn receive_batch(
        &mut self,
        first: Block,
        blocks: &mut Blocks<'_>,
        committed: &mut Vec<Told>,
    ) -> Result<(), InboxError> {
        let mut report = self.report;
        let mut told = Vec::new();
        self.inbox.write(|conn| {
            let turn = self.inbox.turn(conn)?;
            let (mut next, mut taken) = (Some(first), 0);
            while let Some(block) = next {
                // One without messages counts too, so that no number of empty files makes a transaction without end.
                taken += block.messages.len().max(1);
                self.receive_block(conn, &turn, block, &mut report, &mut told)?;
                next = if taken < self.options.batch { blocks.ready() } else { None };
            }
            Ok(())
        })?;
        self.report = report;
        *committed = told;
        Ok(())
    }

    fn receive_block(
        &self,
        conn: &Connection,
        turn: &Turn,
        block: Block,
        report: &mut LoadReport,
        told: &mut Vec<Told>,
    ) -> Result<(), InboxError> {
        report.files += block.files;
        for message in block.messages {
            report.messages += 1;
            let message = match message {
                Ok(message) => message,
                Err(error) => {
                    report.failed += 1;
                    told.push(Told::Failed(error));
                    continue;
                }
            };
            match self.inbox.receive_in(conn, &message.incoming(self.options.via), self.work, turn) {
                Ok(receipt) => self.count(receipt.verdict, message, report, told)?,
                // Of this message alone; unless the table's constraint rolled everything back.
                Err(error) if error.is_of_the_message() && !conn.is_autocommit() => {
                    report.failed += 1;
                    told.push(Told::Failed(error));
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    // No transaction is open while a handler runs; what has ended is committed, whatever becomes of the next.
    fn receive_one_by_one(&mut self, block: Block, told: &mut Vec<Told>) -> Result<(), InboxError> {
        let mut report = self.report;
        report.files += block.files;
        for message in block.messages {
            report.messages += 1;
            let received = message.and_then(|message| {
                let incoming = message.incoming(self.options.via);
                let receipt = self.inbox.receive_with(&incoming, self.work)?;
                Ok((receipt, message))
            });
            match received {
                Ok((receipt, message)) => self.count(receipt.verdict, message, &mut report, told)?,
                // One that could not be read, or whose work came to no end.
                Err(error) if error.is_of_the_message() || is_of_the_file(&error) => {
                    report.failed += 1;
                    told.push(Told::Failed(error));
                }
                Err(error) => return Err(error),
            }
        }
        self.report = report;
        Ok(())
    }

    fn count(
        &self,
        verdict: Verdict,
        message: Message,
        report: &mut LoadReport,
        told: &mut Vec<Told>,
    ) -> Result<(), InboxError> {
        match verdict {
            Verdict::Applied => report.applied += 1,
            Verdict::Failed => {
                report.failed += 1;
                told.push(Told::WorkFailed(message));
            }
            Verdict::Duplicate(body) => {
                report.duplicates += 1;
                self.ignored.add(message.envelope.key.as_str())?;
                if body == Body::Different {
                    report.conflicts += 1;
                    told.push(Told::Conflict(message));
                }
            }
        }
        Ok(())
    }
}

impl Told {
    fn event(&self) -> LoadEvent<'_> {
        match self {
            Self::Failed(error) => LoadEvent::Failed(error),
            Self::WorkFailed(message) => {
                LoadEvent::WorkFailed { key: message.envelope.key.as_str(), source: &message.source }
            }
            Self::Conflict(message) => {
                LoadEvent::Conflict { key: message.envelope.key.as_str(), source: &message.source }
            }
        }
    }
}

fn is_of_the_file(error: &InboxError) -> bool {
    matches!(error, InboxError::File { .. } | InboxError::Changing { .. })
}

/// What the readers made, in the turn in which they were given it.
struct Blocks<'r> {
    from: &'r [Receiver<Block>],
    turn: usize,
    /// Bytes read line by line, of the blocks taken so far.
    line_bytes: u64,
}

impl Blocks<'_> {
    // `None` at the end.
    fn wait(&mut self) -> Option<Block> {
        let block = self.from[self.turn].recv().ok()?;
        Some(self.taken(block))
    }

    // `None` when there is none yet, or at the end.
    fn ready(&mut self) -> Option<Block> {
        let block = self.from[self.turn].try_recv().ok()?;
        Some(self.taken(block))
    }

    fn taken(&mut self, block: Block) -> Block {
        self.turn = (self.turn + 1) % self.from.len();
        self.line_bytes += block.line_bytes;
        block
    }
}
