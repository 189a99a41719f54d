//! What is guarded, whose keys they are, and what makes a request the same request.

use std::path::PathBuf;

use clap::Args;
use http::HeaderName;
use onlyonce_core::fingerprint::Definition;
use onlyonce_gateway::{RoutePattern, Routes};
use onlyonce_http::{IdempotencyLayer, KeyRule, ScopeSecret, ScopeSource};

use crate::commands::keys::scope_secret;
use crate::commands::serve::fingerprint;
use crate::failure::Failure;

#[derive(Debug, Args)]
#[command(next_help_heading = "What is guarded")]
pub(crate) struct GuardArgs {
    /// Guard these requests instead of all POST and PATCH: 'POST /v1/charges/*'; may be repeated. `*` stands for
    /// anything but a slash, `/*` at the end for everything below
    #[arg(long, value_name = "METHOD PATH", conflicts_with = "unguarded")]
    pub(crate) guard: Vec<RoutePattern>,
    /// Do not guard these: 'POST /login'; may be repeated. The most specific rule decides
    #[arg(long, value_name = "METHOD PATH", conflicts_with = "unguarded")]
    pub(crate) exempt: Vec<RoutePattern>,
    /// Guard these only when they have a key; may be repeated
    #[arg(long, value_name = "METHOD PATH", conflicts_with = "unguarded")]
    pub(crate) optional_for: Vec<RoutePattern>,
    /// Let all requests without a key run unguarded; the answer says so (Idempotency-Status: ignored)
    #[arg(long)]
    pub(crate) optional: bool,
    /// Guard nothing: pass everything through, to measure or to see the difference
    #[arg(long, conflicts_with = "optional")]
    pub(crate) unguarded: bool,
    /// The header with the key
    #[arg(long, value_name = "NAME", default_value = "idempotency-key")]
    pub(crate) key_header: HeaderName,
    /// Refuse keys that are not quoted, as the standard has it: Idempotency-Key: "order-7"
    #[arg(long)]
    pub(crate) quoted_only: bool,
    /// A header that names the principal whose keys these are, instead of Authorization; may be repeated.
    /// Only behind a proxy that sets it: a client could name anybody
    #[arg(long, value_name = "NAME", conflicts_with_all = ["scope_cookie", "scope_none"])]
    pub(crate) scope_header: Vec<HeaderName>,
    /// A cookie that names the principal (the session), instead of Authorization
    #[arg(long, value_name = "NAME", conflicts_with = "scope_none")]
    pub(crate) scope_cookie: Option<String>,
    /// All callers share one scope: for an upstream with a single client
    #[arg(long)]
    pub(crate) scope_none: bool,
    /// A file with a secret of at least 16 bytes: scopes become an HMAC under it
    #[arg(long, value_name = "FILE")]
    pub(crate) scope_secret_file: Option<PathBuf>,
    /// What makes a request the same request, besides method, path and query: raw (the body, byte for byte), json
    /// (JSON bodies in canonical form, RFC 8785), members=/amount,/to (these members of JSON bodies alone), except=/sent_at
    /// (JSON bodies without these)
    #[arg(long, value_name = "FORM", default_value = "raw", value_parser = fingerprint::form)]
    pub(crate) fingerprint: fingerprint::Form,
    /// A header that joins it too; may be repeated
    #[arg(long, value_name = "NAME")]
    pub(crate) fingerprint_header: Vec<HeaderName>,
    /// A form that records were made under before, so that they are understood: members=/amount;headers=x-a; may be
    /// repeated. raw and json always are
    #[arg(long, value_name = "FORM", value_parser = fingerprint::definition)]
    pub(crate) known_fingerprint: Vec<Definition>,
    /// The header with the caller's id of a request; kept, and told on replays, 409 and 422
    #[arg(long, value_name = "NAME", default_value = "x-request-id")]
    pub(crate) request_id_header: HeaderName,
}

impl GuardArgs {
    pub(crate) fn routes(&self) -> Routes {
        let routes = Routes::default()
            .guard(self.guard.iter().cloned())
            .exempt(self.exempt.iter().cloned())
            .optional_for(self.optional_for.iter().cloned());
        if self.optional { routes.optional() } else { routes }
    }

    /// What of it can be wrong is found here.
    pub(crate) fn check(&self) -> Result<(Definition, Option<ScopeSecret>), Failure> {
        let definition = self.fingerprint.with_headers(self.fingerprint_header.clone());
        let definition =
            definition.map_err(|error| Failure::Usage(format!("--fingerprint-header: {error}")))?;
        Ok((definition, self.scope_secret()?))
    }

    pub(crate) fn apply(
        &self,
        layer: IdempotencyLayer,
        definition: Definition,
        secret: Option<ScopeSecret>,
    ) -> IdempotencyLayer {
        let routes = self.routes();
        let mut key = KeyRule::default().header(self.key_header.clone());
        if self.quoted_only {
            key = key.quoted_only();
        }
        let mut layer = layer
            .guard_by(move |head| routes.guarded(head))
            .key(key)
            .scope_source(self.scope_source())
            .fingerprint(definition)
            .request_id_header(self.request_id_header.clone());
        for known in &self.known_fingerprint {
            layer = layer.known_fingerprint(known.clone());
        }
        match secret {
            Some(secret) => layer.scope_secret(secret),
            None => layer,
        }
    }

    pub(crate) fn scope_source(&self) -> ScopeSource {
        match (&self.scope_cookie, self.scope_none) {
            (Some(cookie), _) => ScopeSource::Cookie(cookie.clone()),
            (None, true) => ScopeSource::None,
            (None, false) if self.scope_header.is_empty() => ScopeSource::Authorization,
            (None, false) => ScopeSource::Headers(self.scope_header.clone()),
        }
    }

    fn scope_secret(&self) -> Result<Option<ScopeSecret>, Failure> {
        self.scope_secret_file.as_deref().map(scope_secret).transpose()
    }
}
