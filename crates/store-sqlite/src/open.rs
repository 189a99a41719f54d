//! Opening a file: the options, and every check that is better made at start than met later.

use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use onlyonce_core::clock::unix_ms;
use onlyonce_core::{Clock, StoreError, StoreErrorKind, SystemClock};
use rusqlite::{Connection, ErrorCode, OpenFlags, TransactionBehavior};

use crate::boot::{Timeline, system_boot_id, system_namespace_ms};
use crate::error::Fault;
use crate::schema;
use crate::store::SqliteStore;

/// A file up to this size is checked whole at start; a larger one where it is read.
const CHECKED_WHOLE_BYTES_MAX: u64 = 4 << 20;
/// Where a connection copies the WAL back to the file by itself: the writer's is earlier, and has a thread for it.
const CHECKPOINT_PAGES: u32 = 8000;

/// How to open a store. [`Options::open`] creates a missing file, with mode 0600; never a folder.
#[derive(Clone, Debug)]
pub struct Options {
    pub(crate) path: PathBuf,
    pub(crate) create: bool,
    pub(crate) reading: bool,
    pub(crate) clock: Option<Arc<dyn Clock>>,
    pub(crate) boot_id: Option<String>,
    pub(crate) busy_timeout: Duration,
    pub(crate) queue_max: usize,
    pub(crate) batch_max: usize,
    pub(crate) durability: Durability,
    pub(crate) readers_max: usize,
    pub(crate) transaction_timeout: Duration,
    pub(crate) pages_max: Option<u32>,
}

/// Whether acknowledged operations survive a power cut.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Durability {
    /// Synced before they are answered; see the crate's documentation for which.
    #[default]
    Full,
    /// Never synced (`synchronous=OFF`): a power cut loses acknowledged completions, and their operations run again. For
    /// tests and throw-away data; [`Capabilities`](onlyonce_core::Capabilities) say so.
    Off,
}

impl Options {
    /// The defaults: system clock, 5 s, 4096 queued, 512 a batch, durable, 4 readers, 10 s a transaction.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            create: true,
            reading: false,
            clock: None,
            boot_id: None,
            busy_timeout: Duration::from_secs(5),
            queue_max: 4096,
            batch_max: 512,
            durability: Durability::Full,
            readers_max: 4,
            transaction_timeout: Duration::from_secs(10),
            pages_max: None,
        }
    }

    /// Another clock, for tests. It must be the same one for all stores on the file.
    #[must_use]
    pub fn clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.clock = Some(clock);
        self
    }

    /// Another id of this boot: for tests of a reboot, and for systems that have none of their own.
    #[must_use]
    pub fn boot_id(mut self, boot_id: impl Into<String>) -> Self {
        self.boot_id = Some(boot_id.into());
        self
    }

    /// How long to wait for other writers on the file before [`StoreErrorKind::Timeout`].
    #[must_use]
    pub fn busy_timeout(mut self, timeout: Duration) -> Self {
        self.busy_timeout = timeout.min(Duration::from_secs(3600));
        self
    }

    /// How many claims may wait, and how many operations of owners. Past it: [`StoreErrorKind::Overloaded`].
    #[must_use]
    pub fn queue_max(mut self, operations: usize) -> Self {
        self.queue_max = operations.max(1);
        self
    }

    /// How many operations one transaction takes at most.
    #[must_use]
    pub fn batch_max(mut self, operations: usize) -> Self {
        self.batch_max = operations.max(1);
        self
    }

    /// Gives up durability, or not.
    #[must_use]
    pub fn durability(mut self, durability: Durability) -> Self {
        self.durability = durability;
        self
    }

    /// How many connections serve the operator's look-ups at once.
    #[must_use]
    pub fn readers_max(mut self, readers: usize) -> Self {
        self.readers_max = readers.max(1);
        self
    }

    /// How long [`SqliteStore::once`] may hold the database.
    #[must_use]
    pub fn transaction_timeout(mut self, timeout: Duration) -> Self {
        self.transaction_timeout = timeout;
        self
    }

    /// The largest the file may grow, in pages of 4 KiB: past it operations that need room fail with
    /// [`StoreErrorKind::Full`] until a purge has made some. Unbounded by default.
    #[must_use]
    pub fn pages_max(mut self, pages: u32) -> Self {
        self.pages_max = Some(pages.max(1));
        self
    }

    /// Refuses a file that is missing or holds no records, in place of creating them.
    #[must_use]
    pub fn existing(mut self) -> Self {
        self.create = false;
        self
    }

    /// For looking alone: nothing is ever written, and a file that cannot be written, a writer that holds the database and a
    /// full disk are no hindrance. A file that is missing, holds no records or is of an older release is refused. What
    /// would change a record fails with [`StoreErrorKind::Unavailable`].
    #[must_use]
    pub fn reading(mut self) -> Self {
        (self.create, self.reading) = (false, true);
        self
    }

    /// Opens the store. Needs a tokio runtime.
    ///
    /// # Errors
    /// [`StoreErrorKind::Unfit`] with a sentence that names the file and the reason, in which case nothing was changed:
    /// a missing folder, a folder or another program's file in its place, a damaged or read-only database, a wrong
    /// table, a newer release's schema, a network file system. Other kinds: worth trying again.
    ///
    /// # Cost
    /// One synced transaction, with [`Options::reading`] none; independent of the number of records.
    pub async fn open(self) -> Result<SqliteStore, StoreError> {
        let path = self.path.clone();
        let opened = tokio::task::spawn_blocking(move || SqliteStore::start(self)).await;
        opened.unwrap_or_else(|panicked| {
            Err(StoreError::new(StoreErrorKind::Internal, "open")
                .with_detail(path.display().to_string())
                .with_source(panicked))
        })
    }
}

/// An open file that passed every check.
#[derive(Debug)]
pub(crate) struct Opened {
    pub(crate) conn: Connection,
    pub(crate) timeline: Timeline,
    pub(crate) identity: Identity,
    /// Tables of others in a file that ours were added to.
    pub(crate) others: u64,
}

/// Which file it is, whatever its path says later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Identity(Option<(u64, u64)>);

pub(crate) fn open(options: &Options) -> Result<Opened, Fault> {
    let path = &options.path;
    check_place(path, options.create)?;
    check_header(path)?;
    open_checked(options).map_err(|fault| match fault.cannot_open() {
        true => unfit("its -wal and -shm cannot be opened: this user must be able to write to its folder"),
        false => fault,
    })
}

fn open_checked(options: &Options) -> Result<Opened, Fault> {
    let path = &options.path;
    let clock: Arc<dyn Clock> = options.clock.clone().unwrap_or_else(|| Arc::new(SystemClock));
    let boot_id = options.boot_id.clone().map_or_else(system_boot_id, Ok)?;
    let namespace_ms = if options.clock.is_some() { 0 } else { system_namespace_ms() };
    let timeline = Timeline::new(clock.clone(), boot_id, namespace_ms);
    let mut conn = connect(options)?;
    check_whole(&conn, path)?;
    if !options.create && !schema::exists(&conn)? {
        return Err(unfit("it holds no idempotency records"));
    }
    use_wal(&conn, options.busy_timeout)?;
    let tx = conn.transaction_with_behavior(TransactionBehavior::Immediate)?;
    let others = schema::prepare(&tx, unix_ms(clock.wall()))?;
    timeline.join(&tx)?;
    tx.commit().map_err(|error| Fault::from(error).in_commit())?;
    Ok(Opened { conn, timeline, identity: Identity::of(path), others })
}

/// A connection to a file that is there, set up for this store. No checks.
pub(crate) fn connect(options: &Options) -> Result<Connection, Fault> {
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let conn = Connection::open_with_flags(&options.path, flags).map_err(not_to_be_read)?;
    // SQLite opens for reading what it may not open for writing, and says nothing.
    if conn.is_readonly("main")? {
        return Err(unfit("it is read-only, or this user may not write to it"));
    }
    conn.busy_timeout(options.busy_timeout)?;
    conn.set_prepared_statement_cache_capacity(64);
    conn.execute_batch(&format!(
        "PRAGMA synchronous = {};
         PRAGMA cache_size = -8192;
         PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES};
         PRAGMA journal_size_limit = 67108864;",
        if options.durability == Durability::Off { "OFF" } else { "FULL" }
    ))?;
    if let Some(pages) = options.pages_max {
        conn.execute_batch(&format!("PRAGMA max_page_count = {pages}"))?;
    }
    Ok(conn)
}

pub(crate) fn not_to_be_read(error: rusqlite::Error) -> Fault {
    match error.sqlite_error_code() {
        Some(ErrorCode::CannotOpen) => unfit("it cannot be opened: this user may not read it"),
        _ => error.into(),
    }
}

impl Identity {
    /// Of whatever is at this path now.
    pub(crate) fn of(path: &Path) -> Self {
        #[cfg(unix)]
        {
            use std::os::unix::fs::MetadataExt;
            Self(fs::metadata(path).ok().map(|file| (file.dev(), file.ino())))
        }
        #[cfg(not(unix))]
        {
            Self(path.exists().then_some((0, 0)))
        }
    }

    /// Whether the path still leads to this file. Writes to one that was removed or replaced would be lost, and
    /// another process would not see them.
    pub(crate) fn check(self, path: &Path) -> Result<(), Fault> {
        if Self::of(path) == self {
            return Ok(());
        }
        Err(unfit("the file was removed or replaced while it was in use; put it back, or start again"))
    }
}

/// What can be said before SQLite touches anything. Makes a missing file where `create` says so.
pub(crate) fn check_place(path: &Path, create: bool) -> Result<(), Fault> {
    if path.file_name().is_none_or(|name| name == ":memory:") && !path.is_dir() {
        return Err(unfit("a path to a file is needed; for records in memory use the memory store"));
    }
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    match fs::metadata(folder) {
        Ok(found) if found.is_dir() => {}
        Ok(_) => return Err(unfit(format!("{} is not a folder", folder.display()))),
        Err(error) => return Err(refused(&error, &format!("the folder {}", folder.display()))),
    }
    check_file_system(folder)?;
    match fs::metadata(path) {
        Ok(found) if found.is_dir() => Err(unfit("it is a folder")),
        Ok(found) if !found.is_file() => Err(unfit("it is not a regular file")),
        Ok(_) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotFound && create => create_file(path, folder),
        Err(error) => Err(refused(&error, "the file")),
    }
}

fn create_file(path: &Path, folder: &Path) -> Result<(), Fault> {
    let mut new = fs::OpenOptions::new();
    new.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut new, 0o600);
    match new.open(path) {
        Ok(_) => {}
        // Another instance starts at the same moment.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(refused(&error, "the new file")),
    }
    // The entry of the file in its folder must survive a power cut as its content does.
    #[cfg(unix)]
    fs::File::open(folder)
        .and_then(|folder| folder.sync_all())
        .map_err(|error| refused(&error, "the folder"))?;
    Ok(())
}

// SQLite finds this too, but only later and in other words.
pub(crate) fn check_header(path: &Path) -> Result<(), Fault> {
    const MAGIC: [u8; 16] = *b"SQLite format 3\0";
    let read = fs::File::open(path).and_then(|mut file| {
        let mut header = MAGIC;
        if file.metadata()?.len() > 0 {
            file.read_exact(&mut header)?;
        }
        Ok(header)
    });
    match read {
        Ok(MAGIC) => Ok(()),
        Ok(_) => Err(unfit("it is not an SQLite database")),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
            Err(unfit("it is not an SQLite database"))
        }
        Err(error) => Err(refused(&error, "the file")),
    }
}

#[cfg(target_os = "linux")]
fn check_file_system(folder: &Path) -> Result<(), Fault> {
    // From linux/magic.h: NFS, SMB, CIFS, SMB2, AFS, Coda, Ceph, 9P.
    const NETWORK: [u64; 8] =
        [0x6969, 0x517b, 0xff53_4d42, 0xfe53_4d42, 0x5346_414f, 0x7375_7245, 0x00c3_6400, 0x0102_1997];
    let found = rustix::fs::statfs(folder).map_err(|error| refused(&error.into(), "the folder"))?;
    if NETWORK.contains(&(found.f_type as u64 & 0xffff_ffff)) {
        return Err(unfit(
            "it is on a network file system, where processes of two machines would not see each other",
        ));
    }
    Ok(())
}

#[cfg(not(target_os = "linux"))]
fn check_file_system(_folder: &Path) -> Result<(), Fault> {
    Ok(())
}

pub(crate) fn check_whole(conn: &Connection, path: &Path) -> Result<(), Fault> {
    let bytes = fs::metadata(path).map_or(0, |file| file.len());
    if bytes > CHECKED_WHOLE_BYTES_MAX {
        return Ok(());
    }
    let verdict: String = conn.query_row("PRAGMA main.quick_check(1)", [], |row| row.get(0))?;
    match verdict.as_str() {
        "ok" => Ok(()),
        found => Err(unfit(format!("the database is damaged ({found})"))),
    }
}

pub(crate) fn use_wal(conn: &Connection, patience: Duration) -> Result<(), Fault> {
    let current: String = conn.query_row("PRAGMA main.journal_mode", [], |row| row.get(0))?;
    if current == "wal" {
        return Ok(());
    }
    // SQLite does not wait here when another connection is about the same.
    let pause = Duration::from_millis(5);
    for tries_left in (0..=patience.as_millis() / pause.as_millis()).rev() {
        match conn.query_row("PRAGMA main.journal_mode = WAL", [], |row| row.get::<_, String>(0)) {
            Ok(mode) if mode == "wal" => return Ok(()),
            Ok(mode) => return Err(unfit(format!("its journal mode stays {mode}, and WAL is needed"))),
            Err(error) if tries_left > 0 && error.sqlite_error_code() == Some(ErrorCode::DatabaseBusy) => {
                std::thread::sleep(pause);
            }
            Err(error) => return Err(error.into()),
        }
    }
    Err(Fault::new(StoreErrorKind::Timeout, "another program holds the database"))
}

fn refused(error: &io::Error, what: &str) -> Fault {
    let kind = match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => StoreErrorKind::Full,
        _ => StoreErrorKind::Unfit,
    };
    let hint = match error.kind() {
        io::ErrorKind::NotFound if what != "the file" => "; folders are not created",
        _ => "",
    };
    Fault::new(kind, format!("{what} cannot be used: {error}{hint}"))
}

pub(crate) fn unfit(reason: impl Into<String>) -> Fault {
    Fault::new(StoreErrorKind::Unfit, reason)
}
