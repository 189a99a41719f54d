//! Where messages come from: files, folders, patterns, lines of a stream.

mod file;
mod lines;
mod listing;

pub(crate) use file::read_stable;
pub use file::{MESSAGE_BYTES_MAX, read_message};
pub(crate) use lines::{LineReader, Lines};
pub use listing::{Format, Skipped};
pub(crate) use listing::{Kind, Listing};
