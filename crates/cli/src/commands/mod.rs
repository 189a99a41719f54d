//! One file a subcommand.

pub(crate) mod completions;
pub(crate) mod demo;
pub(crate) mod explain;
pub(crate) mod keys;
pub(crate) mod serve;
