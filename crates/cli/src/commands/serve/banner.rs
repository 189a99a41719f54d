//! What is printed at the start: what this gateway does, and what its operator should know.

use onlyonce_core::{Capabilities, OnLeaseEnd};
use onlyonce_engine::Policy;
use onlyonce_http::OnStoreFailure;

use super::Serve;

pub(super) fn print(serve: &Serve, store: &Capabilities, policy: &Policy) {
    let durable = if store.durable { "durable" } else { "NOT durable" };
    eprintln!("onlyonce {}", env!("CARGO_PKG_VERSION"));
    eprintln!("  upstream  {}", serve.upstream);
    eprintln!("  store     {} {} ({durable})", store.name, store.location);
    eprintln!("  guarded   {}", guarded(serve));
    eprintln!("  policy    {}", policy_line(serve, policy));
    for hazard in hazards(serve, store) {
        eprintln!("  hazard    {hazard}");
    }
}

fn guarded(serve: &Serve) -> String {
    if serve.unguarded {
        return "nothing (--unguarded)".into();
    }
    let key = if serve.optional { "optional" } else { "required" };
    let scope = match (&serve.scope_cookie, serve.scope_none) {
        (Some(cookie), _) => format!("cookie {cookie}"),
        (None, true) => "none".into(),
        (None, false) if serve.scope_header.is_empty() => {
            "Authorization; callers without credentials share one".into()
        }
        (None, false) => serve.scope_header.iter().map(|name| name.as_str()).collect::<Vec<_>>().join(" + "),
    };
    format!("POST, PATCH; key {key}; scope {scope}")
}

fn policy_line(serve: &Serve, policy: &Policy) -> String {
    let on_unknown = match policy.on_lease_end {
        OnLeaseEnd::Hold => "hold",
        OnLeaseEnd::TakeOver => "retry",
    };
    let time = humantime::format_duration;
    format!(
        "preset {}; on unknown {on_unknown}; lease {}, retention {}, wait {}",
        serve.preset.as_str(),
        time(policy.lease),
        time(policy.retention),
        time(policy.wait)
    )
}

fn hazards(serve: &Serve, store: &Capabilities) -> Vec<String> {
    let mut hazards: Vec<String> = store.hazard.iter().cloned().collect();
    if serve.unguarded {
        hazards.push("nothing is guarded: a retry runs again".into());
        return hazards;
    }
    if serve.on_unknown == super::OnUnknown::Retry {
        hazards.push(
            "an operation whose outcome is unknown runs again after its lease: \
             only for an upstream that tells a repeated Idempotency-Key itself"
                .into(),
        );
    }
    if !serve.scope_header.is_empty() {
        hazards.push(
            "the scope is what a header says: only behind a proxy that sets it and drops the client's".into(),
        );
    }
    if serve.scope_none {
        hazards.push("all callers share one scope: a key of one replays its reply to another".into());
    }
    if serve.on_store_failure() == OnStoreFailure::RunUnguarded {
        hazards.push("while the store is down requests run unguarded (--fail-open)".into());
    }
    if !serve.listen.ip().is_loopback() {
        hazards.push("listening beyond this machine, without TLS: put a TLS proxy in front".into());
    }
    hazards
}
