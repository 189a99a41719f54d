//! The options of `onlyonce serve`.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::RangedU64ValueParser;
use clap::{Args, ValueEnum};
use http::HeaderName;
use onlyonce_core::fingerprint::Definition;
use onlyonce_gateway::UpstreamUrl;
use onlyonce_http::{DocsUrl, Preset, ScopeSecret, ScopeSource};

use super::OnUnknown;
use super::log::LogFormat;
use crate::commands::units::{bytes, duration};
use crate::failure::Failure;
use crate::store_url::StoreArg;

/// Stand in front of an HTTP API: each POST and PATCH with an Idempotency-Key takes effect once.
///
/// The first request with a key goes to the upstream; its reply is recorded before it is sent on, and every retry gets the
/// same reply. Everything else passes through untouched.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  onlyonce serve --upstream http://127.0.0.1:3000
  onlyonce serve --listen 127.0.0.1:8080 --upstream http://127.0.0.1:3000 --wait 2s --log json
  onlyonce serve --upstream http://127.0.0.1:3000 --scope-header X-Account --on-unknown retry

The store, the scope and what else an operator should know are printed at the start. SIGTERM finishes what runs.")]
pub(crate) struct Serve {
    /// Where to listen
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:8080", value_parser = address)]
    pub(super) listen: SocketAddr,
    /// The API behind: http://HOST:PORT, or h2c://HOST:PORT for HTTP/2 with prior knowledge
    #[arg(long, value_name = "URL")]
    pub(super) upstream: UpstreamUrl,
    #[command(flatten)]
    pub(super) store: StoreArg,
    /// Refuse to start on a store that loses acknowledged replies in a crash
    #[arg(long)]
    pub(super) require_durable: bool,

    /// Let requests without a key run unguarded; the answer says so (Idempotency-Status: ignored)
    #[arg(long, help_heading = "What is guarded")]
    pub(super) optional: bool,
    /// Guard nothing: pass everything through, to measure or to see the difference
    #[arg(long, conflicts_with = "optional", help_heading = "What is guarded")]
    pub(super) unguarded: bool,
    /// A header that names the principal whose keys these are, instead of Authorization; may be repeated.
    /// Only behind a proxy that sets it: a client could name anybody
    #[arg(long, value_name = "NAME", help_heading = "What is guarded", conflicts_with_all = ["scope_cookie", "scope_none"])]
    pub(super) scope_header: Vec<HeaderName>,
    /// A cookie that names the principal (the session), instead of Authorization
    #[arg(long, value_name = "NAME", help_heading = "What is guarded", conflicts_with = "scope_none")]
    pub(super) scope_cookie: Option<String>,
    /// All callers share one scope: for an upstream with a single client
    #[arg(long, help_heading = "What is guarded")]
    pub(super) scope_none: bool,
    /// A file with a secret of at least 16 bytes: scopes become an HMAC under it
    #[arg(long, value_name = "FILE", help_heading = "What is guarded")]
    pub(super) scope_secret_file: Option<PathBuf>,
    /// What makes a request the same request, besides method, path and query
    #[arg(long, value_enum, default_value = "raw", help_heading = "What is guarded")]
    pub(super) fingerprint: Fingerprints,

    /// How long a duplicate waits for the result of the one in flight, before 409
    #[arg(long, value_name = "TIME", default_value = "0", value_parser = duration, help_heading = "Policy")]
    pub(super) wait: Duration,
    /// How long a claim holds without renewal
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = duration, help_heading = "Policy")]
    pub(super) lease: Duration,
    /// How long a reply is kept
    #[arg(long, value_name = "TIME", default_value = "24h", value_parser = duration, help_heading = "Policy")]
    pub(super) retention: Duration,
    /// What a retry gets when nobody knows whether it happened
    #[arg(long, value_enum, default_value = "hold", help_heading = "Policy")]
    pub(super) on_unknown: OnUnknown,
    /// With --on-unknown retry: runs of one operation, at most
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..), help_heading = "Policy")]
    pub(super) max_attempts: u32,
    /// Which replies are final: default, strict, stripe or success-only
    #[arg(long, value_name = "NAME", default_value = "default", value_parser = preset, help_heading = "Policy")]
    pub(super) preset: Preset,
    /// When the store cannot be asked, run unguarded instead of refusing: a retry may then run twice
    #[arg(long, help_heading = "Policy")]
    pub(super) fail_open: bool,
    /// Send Idempotency-Key-Expires with first answers and replays
    #[arg(long, help_heading = "Policy")]
    pub(super) expires: bool,
    /// Link this documentation in every refusal
    #[arg(long, value_name = "URL", value_parser = docs_url, help_heading = "Policy")]
    pub(super) docs_url: Option<DocsUrl>,

    /// How long a request head may take, from its first byte; past it 408
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = duration, help_heading = "Limits")]
    pub(super) header_timeout: Duration,
    /// How long the body of a guarded request may take, and that of any other may pause; past it 408
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = duration, help_heading = "Limits")]
    pub(super) body_timeout: Duration,
    /// How long a connection to the upstream may take
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = duration, help_heading = "Limits")]
    pub(super) connect_timeout: Duration,
    /// How long the upstream may take to answer
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = duration, help_heading = "Limits")]
    pub(super) upstream_timeout: Duration,
    /// How long running requests get to finish after SIGTERM
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = duration, help_heading = "Limits")]
    pub(super) shutdown_timeout: Duration,
    /// Guarded operations at once; past it 503
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = at_least_one(), help_heading = "Limits")]
    pub(super) max_in_flight: usize,
    /// Connections at once; more wait in the listen queue
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = at_least_one(), help_heading = "Limits")]
    pub(super) max_connections: usize,
    /// The longest request head; past it 431
    #[arg(long, value_name = "BYTES", default_value = "64KiB", value_parser = bytes, help_heading = "Limits")]
    pub(super) max_header_bytes: usize,
    /// The longest body of a guarded request; past it 413
    #[arg(long, value_name = "BYTES", default_value = "1MiB", value_parser = bytes, help_heading = "Limits")]
    pub(super) max_request_body: usize,
    /// The longest reply body that is stored; a longer one streams through, and its replays have no body
    #[arg(long, value_name = "BYTES", default_value = "1MiB", value_parser = bytes, help_heading = "Limits")]
    pub(super) max_stored_body: usize,
    /// All bodies of guarded requests and replies in memory at once; past it 503
    #[arg(long, value_name = "BYTES", default_value = "64MiB", value_parser = bytes, help_heading = "Limits")]
    pub(super) buffer_budget: usize,
    /// Replies kept in memory for replays; 0: none
    #[arg(long, value_name = "BYTES", default_value = "32MiB", value_parser = bytes64, help_heading = "Limits")]
    pub(super) cache_bytes: u64,

    /// One line for each guarded request, on standard error
    #[arg(long, value_enum, value_name = "FORMAT", default_value = "text")]
    pub(super) log: LogFormat,
}

/// What of the body joins the fingerprint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Fingerprints {
    /// The body, byte for byte
    Raw,
    /// JSON bodies in canonical form (RFC 8785): member order and white space do not matter
    Json,
}

impl Fingerprints {
    pub(super) fn definition(self) -> Definition {
        match self {
            Self::Raw => Definition::raw(),
            Self::Json => Definition::canonical_json(),
        }
    }
}

impl Serve {
    pub(super) fn scope_source(&self) -> Result<ScopeSource, Failure> {
        Ok(match (&self.scope_cookie, self.scope_none) {
            (Some(cookie), _) => ScopeSource::Cookie(cookie.clone()),
            (None, true) => ScopeSource::None,
            (None, false) if self.scope_header.is_empty() => ScopeSource::Authorization,
            (None, false) => ScopeSource::Headers(self.scope_header.clone()),
        })
    }

    pub(super) fn scope_secret(&self) -> Result<Option<ScopeSecret>, Failure> {
        let Some(path) = &self.scope_secret_file else { return Ok(None) };
        let doing = format!("--scope-secret-file {}", path.display());
        let secret = std::fs::read(path).map_err(|error| Failure::io(&doing, &error))?;
        ScopeSecret::new(secret.trim_ascii())
            .map(Some)
            .map_err(|error| Failure::Usage(format!("{doing}: {error}")))
    }
}

fn at_least_one() -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..)
}

fn address(text: &str) -> Result<SocketAddr, String> {
    text.parse().map_err(|_| {
        "write an IP address and a port, for example 127.0.0.1:8080, 0.0.0.0:8080 or [::]:8080".into()
    })
}

fn preset(text: &str) -> Result<Preset, String> {
    text.parse().map_err(|error: onlyonce_http::UnknownPreset| error.to_string())
}

fn docs_url(text: &str) -> Result<DocsUrl, String> {
    DocsUrl::new(text).map_err(|error| error.to_string())
}

fn bytes64(text: &str) -> Result<u64, String> {
    bytes(text).map(|bytes| bytes as u64)
}
