//! A wall clock of a server that moves only when told.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, ensure};
use parking_lot::Mutex;

use crate::service;

/// Of the files of clocks; the process that made it follows.
const PREFIX: &str = "told.";

const SOURCE: &str = include_str!("clock.c");

/// The wall clock of one server or of several. It is the real time until it is first told another.
#[derive(Clone, Debug)]
pub struct ToldClock(Arc<Told>);

#[derive(Debug)]
struct Told {
    path: PathBuf,
    is_ours: bool,
    file: File,
    // Microseconds since the epoch; 0 is the real time.
    now_us: Mutex<i64>,
}

impl Drop for Told {
    fn drop(&mut self) {
        if self.is_ours {
            let _ = fs::remove_file(&self.path);
        }
    }
}

// A process that ends with a clock in a static, or is killed, leaves its file.
fn remove_left_behind(root: &Path) {
    for entry in fs::read_dir(root).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let of = name.to_str().and_then(|name| name.strip_prefix(PREFIX)?.split('.').next()?.parse().ok());
        if of.is_some_and(|pid| !service::is_alive(pid)) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

impl ToldClock {
    /// A clock that shows the real time.
    ///
    /// # Panics
    /// When its file cannot be made.
    pub fn real() -> Self {
        static MADE: AtomicU64 = AtomicU64::new(0);
        let root = service::root().expect("the folder of all services");
        let number = MADE.fetch_add(1, Ordering::Relaxed);
        if number == 0 {
            remove_left_behind(&root);
        }
        let path = root.join(format!("{PREFIX}{}.{number}", std::process::id()));
        fs::write(&path, 0_i64.to_ne_bytes()).expect("a file in it");
        let file = OpenOptions::new().write(true).open(&path).expect("the file");
        Self(Arc::new(Told { path, is_ours: true, file, now_us: Mutex::new(0) }))
    }

    /// The clock in a file that servers have already.
    pub(super) fn at(path: PathBuf) -> Result<Self> {
        let file = OpenOptions::new().write(true).open(&path)?;
        Ok(Self(Arc::new(Told { path, is_ours: false, file, now_us: Mutex::new(0) })))
    }

    /// A clock that stands still, at the whole millisecond that it is now.
    ///
    /// # Panics
    /// When its file cannot be made.
    pub fn stopped() -> Self {
        let clock = Self::real();
        clock.stop();
        clock
    }

    /// Stops it at the whole millisecond that it is.
    ///
    /// # Panics
    /// When its file cannot be written.
    pub fn stop(&self) {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("it is past 1970");
        self.set(i64::try_from(now.as_millis()).expect("it is before the year 292 million") * 1000);
    }

    /// Lets it run on by `by`; it stands still afterwards.
    ///
    /// # Panics
    /// When it runs by itself, or its file cannot be written.
    pub fn advance(&self, by: Duration) {
        let now = *self.0.now_us.lock();
        assert!(now > 0, "the clock runs by itself");
        self.set(now + i64::try_from(by.as_micros()).expect("a short time"));
    }

    /// Steps it back, as a clock daemon does.
    ///
    /// # Panics
    /// When it runs by itself, or its file cannot be written.
    pub fn step_back(&self, by: Duration) {
        let now = *self.0.now_us.lock();
        assert!(now > 0, "the clock runs by itself");
        self.set(now - i64::try_from(by.as_micros()).expect("a short time"));
    }

    fn set(&self, now_us: i64) {
        self.0.file.write_all_at(&now_us.to_ne_bytes(), 0).expect("the clock's file can be written");
        *self.0.now_us.lock() = now_us;
    }

    /// Makes `command` start its program on this clock.
    pub(super) fn apply(&self, command: &mut Command) -> Result<()> {
        Self::preload(command, &self.0.path)
    }

    pub(super) fn preload(command: &mut Command, clock: &Path) -> Result<()> {
        command.env("LD_PRELOAD", library()?).env("TESTKIT_CLOCK", clock);
        Ok(())
    }
}

/// The library that is preloaded, made by the C compiler once for all tests of this source.
fn library() -> Result<PathBuf> {
    let hash = SOURCE.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    let path = service::root()?.join(format!("clock-{hash:016x}.so"));
    if !path.exists() {
        build(&path)?;
    }
    Ok(path)
}

fn build(path: &Path) -> Result<()> {
    let folder = tempfile::tempdir_in(path.parent().context("it is in a folder")?)?;
    let (source, made) = (folder.path().join("clock.c"), folder.path().join("clock.so"));
    fs::write(&source, SOURCE)?;
    let compiler = std::env::var_os("CC").unwrap_or_else(|| "cc".into());
    let mut command = Command::new(compiler);
    command.args(["-shared", "-fPIC", "-O1", "-Wall", "-o"]).arg(&made).arg(&source);
    let output = command.output().with_context(|| format!("run {command:?}"))?;
    ensure!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    // Another test may have been first; either is the same.
    Ok(fs::rename(made, path)?)
}
