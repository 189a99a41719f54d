//! One file a subcommand.

use tokio::runtime::{Builder, Runtime};

use crate::failure::Failure;

pub(crate) mod check;
pub(crate) mod completions;
pub(crate) mod demo;
pub(crate) mod explain;
pub(crate) mod inbox;
pub(crate) mod keys;
mod operator;
pub(crate) mod prove;
mod secret;
pub(crate) mod serve;
mod tls;
mod units;

/// The runtime that a command runs on.
fn runtime(mut builder: Builder) -> Result<Runtime, Failure> {
    builder.enable_all().build().map_err(|error| Failure::io("starting the runtime", &error))
}
