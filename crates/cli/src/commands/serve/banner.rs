//! What is printed at the start: what this gateway does, and what its operator should know.

use onlyonce_core::{Capabilities, OnLeaseEnd};
use onlyonce_engine::Policy;
use onlyonce_gateway::GatewayOptions;
use onlyonce_http::{OnStoreFailure, ScopeSource};

use super::Serve;
use super::args::OnUnknown;
use super::voice::Told;

/// Each under its name.
pub(super) fn told(
    serve: &Serve,
    options: &GatewayOptions,
    store: &Capabilities,
    policy: &Policy,
) -> Vec<Told> {
    let durable = if store.durable { "durable" } else { "NOT durable" };
    let mut told: Vec<Told> = Vec::new();
    told.extend(serve.config.as_ref().map(|file| ("config", file.display().to_string())));
    told.push(("upstream", options.upstream.to_string()));
    told.push(("store", format!("{} {} ({durable})", store.name, store.location)));
    told.push(("guarded", guarded(serve)));
    for (name, patterns) in [("exempt", &serve.guard.exempt), ("optional", &serve.guard.optional_for)] {
        told.extend(patterns.iter().map(|pattern| (name, pattern.to_string())));
    }
    if !serve.guard.unguarded {
        told.push((
            "passes",
            "application/grpc over HTTP/2, unguarded unless --guard names it: its calls say how they ended after the reply"
                .into(),
        ));
    }
    told.push(("policy", policy_line(serve, policy)));
    told
}

fn guarded(serve: &Serve) -> String {
    if serve.guard.unguarded {
        return "nothing (--unguarded)".into();
    }
    let what = match &serve.guard.guard[..] {
        [] => "POST, PATCH".into(),
        patterns => patterns.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "),
    };
    let key = if serve.guard.optional { "optional" } else { "required" };
    format!("{what}; key {key}; scope {}", scope(serve))
}

/// What names the caller whose keys these are.
pub(super) fn scope(serve: &Serve) -> String {
    match serve.guard.scope_source() {
        ScopeSource::Cookie(cookie) => format!("cookie {cookie}"),
        ScopeSource::None => "none".into(),
        ScopeSource::Headers(names) => names.iter().map(|name| name.as_str()).collect::<Vec<_>>().join(" + "),
        _ => "Authorization; callers without credentials share one".into(),
    }
}

fn policy_line(serve: &Serve, policy: &Policy) -> String {
    let on_unknown = match policy.on_lease_end {
        OnLeaseEnd::Hold => "hold",
        OnLeaseEnd::TakeOver => "retry",
    };
    let time = humantime::format_duration;
    format!(
        "preset {}; on unknown {on_unknown}; lease {}, retention {}, wait {}",
        serve.policy.preset.as_str(),
        time(policy.lease),
        time(policy.retention),
        time(policy.wait)
    )
}

/// What its operator should know.
pub(super) fn hazards(serve: &Serve, store: &Capabilities) -> Vec<String> {
    let mut hazards: Vec<String> = store.hazard.iter().cloned().collect();
    if serve.guard.unguarded {
        hazards.push("nothing is guarded: a retry runs again".into());
        return hazards;
    }
    if serve.policy.on_unknown == OnUnknown::Retry {
        hazards.push(
            "an operation whose outcome is unknown runs again after its lease: \
             only for an upstream that tells a repeated Idempotency-Key itself"
                .into(),
        );
    }
    if !serve.guard.scope_header.is_empty() {
        hazards.push(
            "the scope is what a header says: only behind a proxy that sets it and drops the client's".into(),
        );
    }
    if serve.guard.scope_none {
        hazards.push("all callers share one scope: a key of one replays its reply to another".into());
    }
    if serve.policy.on_store_failure() == OnStoreFailure::RunUnguarded {
        hazards.push("while the store is down requests run unguarded (--fail-open)".into());
    }
    if !serve.network.listen.ip().is_loopback() {
        hazards.push("listening beyond this machine, without TLS: put a TLS proxy in front".into());
    }
    hazards
}
