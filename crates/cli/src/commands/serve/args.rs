//! The options of `onlyonce serve`, a file for each heading of its help.

mod guard;
mod limits;
mod network;
mod policy;

use std::path::PathBuf;

use clap::Args;

use super::log::LogFormat;
use crate::store_url::StoreArg;
pub(super) use guard::GuardArgs;
pub(super) use limits::LimitArgs;
pub(super) use network::{AdminArgs, BrowserArgs, NetworkArgs};
pub(super) use policy::{OnUnknown, PolicyArgs};

/// Stand in front of an HTTP API: each POST and PATCH with an Idempotency-Key takes effect once.
///
/// The first request with a key goes to the upstream; its reply is recorded before it is sent on, and every retry gets the
/// same reply. Everything else passes through untouched.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  onlyonce serve --upstream http://127.0.0.1:3000
  onlyonce serve --listen 127.0.0.1:8080 --upstream http://127.0.0.1:3000 --wait 2s --log json
  onlyonce serve --upstream http://127.0.0.1:3000 --guard 'POST /v1/charges/*' --exempt 'POST /v1/charges/search'
  onlyonce serve --config onlyonce.toml --explain-route 'POST /v1/charges'
  onlyonce serve --upstream http://127.0.0.1:3000 --scope-header X-Account --on-unknown retry

A file of options holds a line for each, by its long name: upstream = \"http://127.0.0.1:3000\", wait = \"2s\",
guard = [\"POST /v1/charges/*\"], expires = true. What the command line says goes before the environment (ONLYONCE_STORE), and both before the file.

The store, the scope and what else an operator should know are printed at the start. SIGTERM finishes what runs.")]
pub(crate) struct Serve {
    /// A file of options (TOML), by their long names; the command line and ONLYONCE_STORE go before it
    // Read before the command line is: here it is in the help, and its value in the banner.
    #[arg(long, value_name = "FILE")]
    pub(super) config: Option<PathBuf>,
    #[command(flatten)]
    pub(super) network: NetworkArgs,
    #[command(flatten)]
    pub(super) store: StoreArg,
    /// Refuse to start on a store that loses acknowledged replies in a crash
    #[arg(long)]
    pub(super) require_durable: bool,
    /// Say what applies to a request, such as 'POST /v1/charges', and why; nothing is started
    #[arg(long, value_name = "METHOD PATH")]
    pub(super) explain_route: Option<String>,
    /// One line for each guarded request, on standard error; in json what is said at the start and the end too
    #[arg(long, value_enum, value_name = "FORMAT", default_value = "text")]
    pub(super) log: LogFormat,

    #[command(flatten)]
    pub(super) guard: GuardArgs,
    #[command(flatten)]
    pub(super) policy: PolicyArgs,
    #[command(flatten)]
    pub(super) browsers: BrowserArgs,
    #[command(flatten)]
    pub(super) admin: AdminArgs,
    #[command(flatten)]
    pub(super) limits: LimitArgs,
}
