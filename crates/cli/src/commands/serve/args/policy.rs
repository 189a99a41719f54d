//! What a retry gets.

use std::time::Duration;

use clap::{Args, ValueEnum, value_parser};
use http::HeaderName;
use onlyonce_core::OnLeaseEnd;
use onlyonce_engine::{InvalidPolicy, Policy};
use onlyonce_http::{DocsUrl, IdempotencyLayer, OnStoreFailure, Preset};

use crate::commands::units::duration;
use crate::failure::Failure;

#[derive(Debug, Args)]
#[command(next_help_heading = "Policy")]
pub(crate) struct PolicyArgs {
    /// How long a duplicate waits for the result of the one in flight, before 409
    #[arg(long, value_name = "TIME", default_value = "0", value_parser = duration)]
    wait: Duration,
    /// How long a claim holds without renewal
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = duration)]
    lease: Duration,
    /// How long a reply is kept
    #[arg(long, value_name = "TIME", default_value = "24h", value_parser = duration)]
    retention: Duration,
    /// What a retry gets when nobody knows whether it happened
    #[arg(long, value_enum, default_value = "hold")]
    pub(crate) on_unknown: OnUnknown,
    /// With --on-unknown retry: runs of one operation, at most
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = value_parser!(u32).range(1..))]
    max_attempts: u32,
    /// Which replies are final: default, strict, stripe or success-only
    #[arg(long, value_name = "NAME", default_value = "default", value_parser = preset)]
    pub(crate) preset: Preset,
    /// When the store cannot be asked, run unguarded instead of refusing: a retry may then run twice
    #[arg(long)]
    fail_open: bool,
    /// A header of replies that is not stored, besides those that never are (Set-Cookie, Date and the like); may be repeated
    #[arg(long, value_name = "NAME")]
    not_stored: Vec<HeaderName>,
    /// The header that marks replays [default: idempotency-replayed; with --preset stripe: idempotent-replayed]
    #[arg(long, value_name = "NAME")]
    replayed_header: Option<HeaderName>,
    /// Send Idempotency-Key-Expires with first answers and replays
    #[arg(long)]
    expires: bool,
    /// Let clients ask what became of a key: GET /.well-known/idempotency/KEY; nothing is run
    #[arg(long)]
    pub(crate) status_lookup: bool,
    /// Link this documentation in every refusal; {code} in it stands for the error code
    #[arg(long, value_name = "URL", value_parser = docs_url)]
    pub(crate) docs_url: Option<DocsUrl>,
}

impl PolicyArgs {
    /// The engine's policy, for work that takes so long.
    pub(crate) fn policy(&self, work_timeout: Duration) -> Policy {
        Policy {
            lease: self.lease,
            retention: self.retention,
            wait: self.wait,
            on_lease_end: self.on_unknown.on_lease_end(),
            max_attempts: self.max_attempts,
            work_timeout,
        }
    }

    /// The same, proved to be one.
    pub(crate) fn checked(&self, work_timeout: Duration) -> Result<Policy, Failure> {
        let policy = self.policy(work_timeout);
        let time = humantime::format_duration;
        policy.check().map_err(|error| {
            Failure::Usage(match error {
                InvalidPolicy::LeaseTooShort { lease } => {
                    format!("--lease {} is too short: it must be at least 100ms", time(lease))
                }
                InvalidPolicy::RetentionTooShort { retention, lease } => format!(
                    "--retention {} is too short: it must be at least twice the lease (--lease {})",
                    time(retention),
                    time(lease)
                ),
                error => error.to_string(),
            })
        })?;
        Ok(policy)
    }

    pub(crate) fn on_store_failure(&self) -> OnStoreFailure {
        if self.fail_open { OnStoreFailure::RunUnguarded } else { OnStoreFailure::FailClosed }
    }

    pub(crate) fn apply(&self, layer: IdempotencyLayer) -> IdempotencyLayer {
        let mut layer = layer
            .preset(self.preset)
            .on_store_failure(self.on_store_failure())
            .not_stored(self.not_stored.iter().cloned());
        if let Some(name) = &self.replayed_header {
            layer = layer.replayed_header(name.clone());
        }
        if self.expires {
            layer = layer.advertise_expiry();
        }
        match &self.docs_url {
            Some(docs) => layer.docs_url(docs.clone()),
            None => layer,
        }
    }
}

/// What a retry gets after an outcome that nobody knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum OnUnknown {
    /// 409 outcome-unknown until an operator resolves it or the late owner comes back
    Hold,
    /// It runs again after the lease: for upstreams that tell a repeated key themselves
    Retry,
}

impl OnUnknown {
    fn on_lease_end(self) -> OnLeaseEnd {
        match self {
            Self::Hold => OnLeaseEnd::Hold,
            Self::Retry => OnLeaseEnd::TakeOver,
        }
    }
}

fn preset(text: &str) -> Result<Preset, String> {
    text.parse().map_err(|error: onlyonce_http::UnknownPreset| error.to_string())
}

fn docs_url(text: &str) -> Result<DocsUrl, String> {
    DocsUrl::new(text).map_err(|error| error.to_string())
}
