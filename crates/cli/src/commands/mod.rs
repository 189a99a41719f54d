//! One file a subcommand.

pub(crate) mod completions;
pub(crate) mod keys;
