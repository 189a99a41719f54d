//! The form of refusals, and what is said about expiry.

use serde_json::Value;

use super::Finding::{self, Broken, Held, NotApplicable};
use super::in_flight;
use crate::lab::{Lab, Payload};
use crate::stop::Step;
use crate::wire::Answer;

/// A refusal for each reason that can be brought about, with its name.
async fn collect(lab: &Lab<'_>) -> Step<Vec<(&'static str, Answer)>> {
    let mut found = Vec::new();
    let missing = lab.send(&lab.call(Payload::Main, &lab.op_without_key())?).await?;
    found.push(("a missing key", missing));
    if lab.options.other_body.is_some() {
        let op = lab.op();
        lab.accepted(&lab.call(Payload::Main, &op)?).await?;
        found.push(("a mismatch", lab.send(&lab.call(Payload::Other, &op)?).await?));
    }
    if lab.options.slow_body.is_some()
        && let Ok(seen) = in_flight::shared(lab).await
        && let Some(refusal) = seen.refusal()
    {
        found.push(("a copy in flight", refusal.clone()));
    }
    found.retain(|(_, answer)| (400..500).contains(&answer.status));
    Ok(found)
}

pub(super) async fn problem_documents(lab: &Lab<'_>) -> Step<Finding> {
    judge(lab, problem_fault).await
}

pub(super) async fn links(lab: &Lab<'_>) -> Step<Finding> {
    judge(lab, link_fault).await
}

async fn judge(lab: &Lab<'_>, fault: fn(&Answer) -> Option<String>) -> Step<Finding> {
    let refusals = collect(lab).await?;
    if refusals.is_empty() {
        return Ok(NotApplicable("nothing was refused".into()));
    }
    let faults: Vec<String> = refusals
        .iter()
        .filter_map(|(name, answer)| {
            fault(answer).map(|fault| format!("{name} ({}): {fault}", answer.status))
        })
        .collect();
    Ok(if faults.is_empty() { Held } else { Broken(faults.join("; ")) })
}

fn problem_fault(answer: &Answer) -> Option<String> {
    let kind = answer.header("content-type").unwrap_or_default();
    let essence = kind.split(';').next().unwrap_or_default().trim();
    if !essence.eq_ignore_ascii_case("application/problem+json") {
        return Some(match kind {
            "" => "no Content-Type".into(),
            kind => format!("Content-Type is {kind}"),
        });
    }
    let Some(Value::Object(problem)) = answer.json() else {
        return Some("the body is not a JSON object".into());
    };
    if problem.get("type").is_some_and(|kind| !kind.is_string()) {
        return Some("`type` is not a text".into());
    }
    if !problem.get("title").is_some_and(Value::is_string) {
        return Some("no `title`".into());
    }
    match problem.get("status") {
        Some(status) if status.as_u64() != Some(u64::from(answer.status)) => {
            Some(format!("`status` is {status}"))
        }
        _ => None,
    }
}

fn link_fault(answer: &Answer) -> Option<String> {
    let is_link = |text: &str| text.starts_with("https://") || text.starts_with("http://");
    let kind = answer.json().and_then(|problem| problem.get("type").and_then(Value::as_str).map(is_link));
    let has_header = answer.headers.get_all("link").iter().any(|value| {
        let value = value.to_str().unwrap_or_default();
        ["describedby", "help"].iter().any(|relation| value.contains(relation))
    });
    // Plain text and HTML may hold a link as well.
    let has_body = String::from_utf8_lossy(&answer.body).contains("http");
    (kind != Some(true) && !has_header && !has_body).then(|| "no link to documentation".into())
}

pub(super) async fn expiry(lab: &Lab<'_>) -> Step<Finding> {
    let call = lab.call(Payload::Main, &lab.op())?;
    let first = lab.accepted(&call).await?;
    let again = lab.send(&call).await?;
    let says = |answer: &Answer| {
        answer
            .headers
            .keys()
            .any(|name| name.as_str().contains("idempoten") && name.as_str().contains("expire"))
    };
    Ok(match says(&first) || says(&again) {
        true => Held,
        false => Broken("no header says until when the key is remembered".into()),
    })
}
