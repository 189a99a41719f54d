//! Reading a file whole, and only when nobody is writing it.

use std::fs::{File, Metadata};
use std::io::{self, Read};
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, SystemTime};

use onlyonce_core::{Clock, SystemClock};

use crate::error::{BadData, InboxError};

/// The longest message, in bytes.
pub const MESSAGE_BYTES_MAX: usize = 16 << 20;

/// How often a file that is being written is read.
const TRIES: u32 = 5;
const PAUSE: Duration = Duration::from_millis(100);
/// A file that ends too early and was written this recently may not be complete yet.
const RECENT: Duration = Duration::from_secs(2);

/// Reads the message in a file; `-` is standard input. What is not a regular file is read to its end.
///
/// # Errors
/// [`InboxError::File`]; [`InboxError::Changing`] for a file that changes during each of several reads; [`BadData`] for one
/// over [`MESSAGE_BYTES_MAX`].
pub fn read_message(path: &Path) -> Result<Vec<u8>, InboxError> {
    if path.as_os_str() == "-" {
        return bounded(io::stdin().lock(), Path::new("stdin"));
    }
    let file = File::open(path).map_err(|error| InboxError::file(path, "cannot be opened", error))?;
    let about = file.metadata().map_err(|error| InboxError::file(path, "cannot be read", error))?;
    match about.is_file() {
        true => read_stable(path),
        false => bounded(file, path),
    }
}

/// Reads a regular file that stays the same meanwhile.
pub(crate) fn read_stable(path: &Path) -> Result<Vec<u8>, InboxError> {
    for attempt in 1..=TRIES {
        if attempt > 1 {
            sleep(PAUSE);
        }
        let failed = |error| InboxError::file(path, "cannot be read", error);
        let file = File::open(path).map_err(|error| InboxError::file(path, "cannot be opened", error))?;
        let before = file.metadata().map_err(failed)?;
        if before.len() > MESSAGE_BYTES_MAX as u64 {
            return Err(too_long(path));
        }
        let text = bounded(&file, path)?;
        if ends_early(&text) && is_recent(&before) {
            sleep(PAUSE);
        }
        // By its path: whoever replaces a file by another one is writing it too.
        let after = std::fs::metadata(path).map_err(failed)?;
        if state(&before) == state(&after) && before.len() == text.len() as u64 {
            return Ok(text);
        }
    }
    Err(InboxError::Changing { path: path.into(), tries: TRIES })
}

fn bounded(from: impl Read, path: &Path) -> Result<Vec<u8>, InboxError> {
    let mut text = Vec::new();
    from.take(MESSAGE_BYTES_MAX as u64 + 1)
        .read_to_end(&mut text)
        .map_err(|error| InboxError::file(path, "cannot be read", error))?;
    match text.len() > MESSAGE_BYTES_MAX {
        true => Err(too_long(path)),
        false => Ok(text),
    }
}

fn too_long(path: &Path) -> InboxError {
    let reason = format!("expected a message of at most {MESSAGE_BYTES_MAX} bytes, found more");
    InboxError::BadData(BadData { source_name: path.display().to_string(), line: 1, column: 1, reason })
}

// An object or array that is closed ends with its bracket: one look, no parsing.
fn ends_early(text: &[u8]) -> bool {
    !matches!(text.trim_ascii_end().last(), Some(b'}' | b']'))
}

fn is_recent(file: &Metadata) -> bool {
    let age = file.modified().ok().and_then(|at| SystemClock.wall().duration_since(at).ok());
    age.is_none_or(|age| age < RECENT)
}

fn state(file: &Metadata) -> (u64, Option<SystemTime>, u64) {
    #[cfg(unix)]
    let inode = std::os::unix::fs::MetadataExt::ino(file);
    #[cfg(not(unix))]
    let inode = 0;
    (file.len(), file.modified().ok(), inode)
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    #[test]
    fn a_file_that_is_being_written_is_read_when_it_is_complete_or_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.json");
        std::fs::write(&path, "{\"msg_id\":").unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                sleep(PAUSE / 2);
                std::fs::OpenOptions::new().append(true).open(&path).unwrap().write_all(b"\"M1\"}").unwrap();
            });
            assert_eq!(read_stable(&path).unwrap(), b"{\"msg_id\":\"M1\"}");
        });

        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut file = std::fs::OpenOptions::new().append(true).open(&path).unwrap();
                while !done.load(Ordering::Relaxed) {
                    file.write_all(b" ").unwrap();
                    sleep(Duration::from_millis(1));
                }
            });
            let text = " ".repeat(MESSAGE_BYTES_MAX / 2);
            std::fs::OpenOptions::new().append(true).open(&path).unwrap().write_all(text.as_bytes()).unwrap();
            let refused = read_stable(&path);
            done.store(true, Ordering::Relaxed);
            assert!(matches!(refused, Err(InboxError::Changing { tries: 5, .. })), "{refused:?}");
        });
    }

    #[test]
    fn a_message_over_the_limit_is_refused_without_being_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.json");
        File::create(&path).unwrap().set_len(1 << 40).unwrap();
        assert!(
            matches!(read_message(&path), Err(InboxError::BadData(bad)) if bad.reason.contains("at most 16777216 bytes"))
        );
    }
}
