//! `--explain-route 'POST /x'`: what applies to a request, and why.

use std::io::{Write, stdout};

use http::{Method, Request, Uri};
use onlyonce_core::OnLeaseEnd;
use onlyonce_gateway::routes::Because;
use onlyonce_http::{Guarded, LOOKUP_PREFIX};

use super::{Serve, banner};
use crate::failure::Failure;

pub(super) fn print(serve: &Serve, route: &str) -> Result<(), Failure> {
    let (method, target) = read(route)?;
    let looks = matches!(method, Method::GET | Method::HEAD) && target.path().starts_with(LOOKUP_PREFIX);
    if serve.policy.status_lookup && !serve.guard.unguarded && looks {
        return Ok(write!(
            stdout().lock(),
            "request      {method} {target}\nguarded      no: the gateway answers what became of the key, and nothing is run\n\
             because      --status-lookup\n"
        )?);
    }
    let routes = serve.guard.routes();
    let (mut head, ()) = Request::new(()).into_parts();
    (head.method, head.uri) = (method.clone(), target.clone());
    let decision = routes.decide(&head);
    let guarded = if serve.guard.unguarded { Guarded::No } else { decision.guarded };
    let mut out = stdout().lock();
    let mut line = |name: &str, value: &str| writeln!(out, "{name:<12} {value}");
    line("request", &format!("{method} {target}"))?;
    line(
        "guarded",
        match guarded {
            Guarded::Required => "yes; a key is required",
            Guarded::Optional => "when it has a key; without one it runs unguarded, and the answer says so",
            Guarded::No => "no: it passes through, its key is not looked at, a retry runs again",
        },
    )?;
    line("because", &because(serve, decision.because, &method))?;
    if guarded == Guarded::No {
        return Ok(());
    }
    let quoted = if serve.guard.quoted_only { "quoted" } else { "quoted or bare" };
    line("key", &format!("{}, {quoted}", serve.guard.key_header))?;
    line("scope", &banner::scope(serve))?;
    line("compared", &format!("method, path, query and body ({})", compared(serve)))?;
    let policy = serve.policy.policy(std::time::Duration::from_secs(1));
    let time = humantime::format_duration;
    line(
        "in flight",
        &match policy.wait.is_zero() {
            true => "a copy is told 409 in-progress".into(),
            false => format!("a copy waits up to {} for the result, then 409 in-progress", time(policy.wait)),
        },
    )?;
    line("kept", &format!("{} (preset {})", time(policy.retention), serve.policy.preset.as_str()))?;
    line(
        "unknown",
        match policy.on_lease_end {
            OnLeaseEnd::Hold => "nobody runs it again until it is resolved",
            OnLeaseEnd::TakeOver => "a retry runs it again after the lease",
        },
    )?;
    if !matches!(decision.because, Because::Rule(..)) {
        line("but", "application/grpc over HTTP/2 passes unguarded")?;
    }
    Ok(())
}

fn read(route: &str) -> Result<(Method, Uri), Failure> {
    let wrong = |what: &str| {
        Failure::Usage(format!("--explain-route {route:?}: {what}; write for example 'POST /v1/charges'"))
    };
    let mut words = route.split_ascii_whitespace();
    let (Some(method), Some(target), None) = (words.next(), words.next(), words.next()) else {
        return Err(wrong("a method and a path"));
    };
    let method = method.parse().map_err(|_| wrong("not a method"))?;
    let target: Uri = target.parse().map_err(|_| wrong("not a path"))?;
    if !target.path().starts_with('/') || target.authority().is_some() {
        return Err(wrong("a path begins with a slash"));
    }
    Ok((method, target))
}

fn because(serve: &Serve, because: Because<'_>, method: &Method) -> String {
    if serve.guard.unguarded {
        return "--unguarded".into();
    }
    match because {
        Because::Rule(pattern, Guarded::Required) => format!("--guard '{pattern}'"),
        Because::Rule(pattern, Guarded::Optional) => format!("--optional-for '{pattern}'"),
        Because::Rule(pattern, Guarded::No) => format!("--exempt '{pattern}'"),
        Because::Method if serve.guard.optional => format!("{method} is guarded by default; --optional"),
        Because::Method => match method.as_str().to_ascii_uppercase().as_str() {
            "POST" | "PATCH" => format!("{method} is guarded by default, and no rule names it"),
            _ => format!("POST and PATCH are guarded by default, {method} is not, and no rule names it"),
        },
        Because::NoRule => "there are --guard rules, and none names it".into(),
        Because::Preflight => "a preflight of CORS carries no key".into(),
        Because::Grpc => "application/grpc over HTTP/2".into(),
    }
}

fn compared(serve: &Serve) -> String {
    let names: Vec<&str> = serve.guard.fingerprint_header.iter().map(|name| name.as_str()).collect();
    let form = serve.guard.fingerprint.as_str();
    if names.is_empty() { form.into() } else { format!("{form}; headers {}", names.join(", ")) }
}
