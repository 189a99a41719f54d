//! Opening a file for looking alone: on a medium that cannot be written, by a user who may not, beside a writer that holds
//! the database, and on a full disk.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use onlyonce_core::{Clock, SystemClock};
use rusqlite::{Connection, ErrorCode, OpenFlags};

use crate::boot::{Timeline, system_boot_id, system_namespace_ms};
use crate::error::Fault;
use crate::open::{self, Identity, Options, check_header, check_place, check_whole, unfit};
use crate::schema;

/// Checks what can be checked without writing.
pub(crate) fn open(options: &Options) -> Result<(Timeline, Identity), Fault> {
    let path = &options.path;
    check_place(path, false)?;
    check_header(path)?;
    let clock: Arc<dyn Clock> = options.clock.clone().unwrap_or_else(|| Arc::new(SystemClock));
    let boot_id = options.boot_id.clone().map_or_else(system_boot_id, Ok)?;
    let namespace_ms = if options.clock.is_some() { 0 } else { system_namespace_ms() };
    let timeline = Timeline::new(clock, boot_id, namespace_ms);
    let conn = connect(options)?;
    check_whole(&conn, path)?;
    schema::check_readable(&conn)?;
    timeline.look(&conn)?;
    Ok((timeline, Identity::of(path)))
}

/// A connection that cannot write.
pub(crate) fn connect(options: &Options) -> Result<Connection, Fault> {
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let conn = Connection::open_with_flags(&options.path, flags).map_err(open::not_to_be_read)?;
    conn.busy_timeout(options.busy_timeout)?;
    // The first look is where SQLite opens the -wal and its index, -shm.
    let kept_out = match conn.query_row("SELECT count(*) FROM main.sqlite_schema", [], |_| Ok(())) {
        Ok(()) => return Ok(conn),
        Err(error) => error,
    };
    let is_the_index = matches!(
        kept_out.sqlite_error_code(),
        Some(ErrorCode::CannotOpen | ErrorCode::ReadOnly | ErrorCode::SystemIoFailure | ErrorCode::DiskFull)
    );
    if !is_the_index {
        return Err(kept_out.into());
    }
    if ["-wal", "-journal"].iter().any(|end| has_beside(&options.path, end)) {
        return Err(unfit(
            "its -wal or -journal has what is not in the file yet, and it cannot be opened: look as the user of the \
             gateway, or copy the file with all that stands beside it to another folder",
        ));
    }
    // Without them the file is all there is, and who writes to it would have made one.
    let flags = flags | OpenFlags::SQLITE_OPEN_URI;
    let conn = Connection::open_with_flags(PathBuf::from(immutable(&options.path)), flags)?;
    Ok(conn)
}

fn has_beside(path: &Path, end: &str) -> bool {
    let mut beside = path.as_os_str().to_owned();
    beside.push(end);
    std::fs::metadata(beside).is_ok_and(|found| found.len() > 0)
}

/// The file as a URI that says that nobody changes it.
fn immutable(path: &Path) -> OsString {
    let mut uri = b"file:".to_vec();
    for byte in path.as_os_str().as_encoded_bytes() {
        match byte {
            b'%' | b'?' | b'#' => uri.extend(format!("%{byte:02x}").bytes()),
            byte => uri.push(*byte),
        }
    }
    uri.extend(b"?immutable=1");
    #[cfg(unix)]
    {
        std::os::unix::ffi::OsStringExt::from_vec(uri)
    }
    #[cfg(not(unix))]
    {
        String::from_utf8_lossy(&uri).into_owned().into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_stays_a_path_in_a_uri() {
        assert_eq!(immutable(Path::new("/a b/50%?#.db")), "file:/a b/50%25%3f%23.db?immutable=1");
    }
}
