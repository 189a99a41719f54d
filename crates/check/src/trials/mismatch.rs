//! A used key with another request: refused, and nothing is spoilt by it.

use bytes::Bytes;

use super::Change;
use super::Finding::{self, Broken, Held, NotApplicable, NotObservable, Weak};
use super::replay::changed;
use crate::lab::{Lab, Op, Payload};
use crate::profile::Profile;
use crate::seen::{Second, second};
use crate::stop::{Step, Stop};
use crate::story;
use crate::wire::{Answer, Call};

/// White space before a body, from the most: longer bodies are refused by some.
const PADDING: [usize; 4] = [128 * 1024, 32 * 1024, 8 * 1024, 2 * 1024];

/// The request that uses the key first, and the other one.
struct Pair {
    first: Call,
    other: Call,
}

pub(super) async fn another_request(lab: &Lab<'_>, change: &Change) -> Step<Finding> {
    let padding = match change {
        Change::LongBodyEnd => padding(lab).await?,
        _ => 0,
    };
    // Under a key of its own the other request must be good: otherwise its refusal says nothing of the key.
    let control = lab.send(&pair(lab, change, padding, &lab.op())?.other).await?;
    let op = lab.op();
    let Pair { first, other } = pair(lab, change, padding, &op)?;
    if !control.is_accepted() && matches!(change, Change::BigNumber) {
        return Ok(NotObservable(format!("the body is refused with one more member ({})", control.status)));
    }
    let earlier = lab.accepted(&first).await?;
    let own = lab.watch().await?;
    // The effect of the first must not be taken for one of the other.
    lab.step(own, false).await?;
    let watch = lab.watch().await?;
    let later = lab.send(&other).await?;
    let facts = lab.facts();
    let effects = lab.effects(watch, facts.unit, false).await?;
    let outcome = second(&earlier, &later, effects, &facts);
    if !control.is_accepted()
        && !matches!(outcome, Second::Replayed | Second::Ran)
        && !is_mismatch(lab, &later, &control)
    {
        let why = format!(
            "the other request is refused under a fresh key too ({}){}",
            control.status,
            hint(change)
        );
        return Ok(if is_none(lab, change, &control) { NotApplicable(why) } else { NotObservable(why) });
    }
    Ok(judge(lab, change, outcome, &later))
}

/// Whether there is no other operation here: nobody named one, and the one that was tried is not there.
fn is_none(lab: &Lab<'_>, change: &Change, control: &Answer) -> bool {
    match change {
        Change::OtherPath => lab.options.other_path.is_none() && matches!(control.status, 404 | 405),
        Change::OtherMethod => {
            lab.options.other_method.is_none() && matches!(control.status, 404 | 405 | 501)
        }
        _ => false,
    }
}

fn is_mismatch(lab: &Lab<'_>, later: &Answer, control: &Answer) -> bool {
    later.status != control.status && expected(lab.profile()).contains(&later.status)
}

fn expected(profile: Profile) -> &'static [u16] {
    match profile {
        // Stripe documents an error of the request's parameters, and 409 where the key is of another request.
        Profile::Stripe => &[400, 409, 422],
        _ => &[422],
    }
}

fn judge(lab: &Lab<'_>, change: &Change, outcome: Second, later: &Answer) -> Finding {
    let is_place = matches!(change, Change::Query(_) | Change::OtherPath | Change::OtherMethod);
    match outcome {
        Second::Refused if expected(lab.profile()).contains(&later.status) => Held,
        Second::Refused if later.status >= 500 => Broken(format!("it was answered {}", later.status)),
        Second::Refused => Weak(format!("it was refused with {}, not with 422", later.status)),
        Second::Replayed => Broken("it got the stored answer of another request".into()),
        // Some keep the keys of each method and path apart: no harm, but a client is not told of its mistake.
        Second::Ran if is_place && later.is_accepted() => {
            Weak("it ran as an operation of its own: the same key elsewhere is another key here".into())
        }
        Second::Ran => Broken("it ran, under a key that was used".into()),
        Second::Unclear => Broken("it was accepted, under a key that was used for another".into()),
    }
}

fn hint(change: &Change) -> &'static str {
    match change {
        Change::OtherPath => ": give a path that takes the same body by --other-path",
        Change::OtherMethod => ": give another method that the URL takes by --other-method",
        _ => "",
    }
}

fn pair(lab: &Lab<'_>, change: &Change, padding: usize, op: &Op) -> Step<Pair> {
    let first = lab.call(Payload::Main, op)?;
    let mut other = first.clone();
    match change {
        Change::OtherBody => other = lab.call(Payload::Other, op)?,
        Change::LongBodyEnd => {
            let other = padded(lab.call(Payload::Other, op)?, padding);
            return Ok(Pair { first: padded(first, padding), other });
        }
        Change::BigNumber => {
            let with = |call: Call, number: u64| with_member(call, &format!("\"onlyonce_check\":{number}"));
            // 2^53 + 1 is no double: read as one, both are 2^53.
            return Ok(Pair { first: with(first, 1 << 53)?, other: with(other, (1 << 53) + 1)? });
        }
        Change::Query(query) => {
            let joint = if other.target.contains('?') { '&' } else { '?' };
            other.target = format!("{}{joint}{query}", other.target);
        }
        Change::OtherPath => other.target = other_path(lab, &other.target),
        Change::OtherMethod => other.method = lab.other_method(),
        Change::Request(change) => other = changed(other, change, op)?,
    }
    Ok(Pair { first, other })
}

fn other_path(lab: &Lab<'_>, target: &str) -> String {
    let (path, query) = target.split_once('?').map_or((target, None), |(path, query)| (path, Some(query)));
    let path = match &lab.options.other_path {
        Some(path) => path.clone(),
        None => format!("{}/onlyonce-check", path.trim_end_matches('/')),
    };
    query.map_or_else(|| path.clone(), |query| format!("{path}?{query}"))
}

/// White space before JSON changes nothing but its length.
pub(super) fn padded(mut call: Call, padding: usize) -> Call {
    let mut body = vec![b' '; padding];
    body.extend_from_slice(&call.body);
    call.body = Bytes::from(body);
    call
}

/// One more member in a JSON object, with its text as given.
fn with_member(mut call: Call, member: &str) -> Step<Call> {
    let object: Option<serde_json::Map<String, serde_json::Value>> = serde_json::from_slice(&call.body).ok();
    let Some(object) = object else { return Err(Stop::Unfit("the body is no JSON object".into())) };
    let start = call.body.iter().position(|byte| *byte == b'{').unwrap_or_default() + 1;
    let comma = if object.is_empty() { "" } else { "," };
    call.body =
        [&call.body[..start], member.as_bytes(), comma.as_bytes(), &call.body[start..]].concat().into();
    Ok(call)
}

/// The longest padding with which both bodies are accepted.
async fn padding(lab: &Lab<'_>) -> Step<usize> {
    for payload in [Payload::Main, Payload::Other] {
        is_json(&lab.call(payload, &lab.op())?)?;
    }
    for padding in PADDING {
        let call = padded(lab.call(Payload::Main, &lab.op())?, padding);
        if lab.send(&call).await?.is_accepted() {
            return Ok(padding);
        }
    }
    Err(Stop::Unfit("the API takes no body with white space before it".into()))
}

pub(super) fn is_json(call: &Call) -> Step<()> {
    match serde_json::from_slice::<serde_json::Value>(&call.body) {
        Ok(_) => Ok(()),
        Err(_) => {
            Err(Stop::Unfit("only JSON bodies can be made longer without a change of what they say".into()))
        }
    }
}

/// A refused mismatch, and then the right request: it still gets its answer, and the wrong one still does not.
pub(super) async fn harmless(lab: &Lab<'_>) -> Step<Finding> {
    let op = lab.op();
    let (right, wrong) = (lab.call(Payload::Main, &op)?, lab.call(Payload::Other, &op)?);
    let first = lab.accepted(&right).await?;
    let own = lab.watch().await?;
    lab.step(own, false).await?;
    let watch = lab.watch().await?;
    lab.send(&wrong).await?;
    let again = lab.send(&right).await?;
    lab.send(&wrong).await?;
    let last = lab.send(&right).await?;
    let facts = lab.facts();
    let effects = lab.effects(watch, facts.unit, false).await?;
    for answer in [&again, &last] {
        match second(&first, answer, effects, &facts) {
            Second::Replayed | Second::Unclear if facts.same_run(answer, &first) => {}
            Second::Refused => {
                return Ok(Broken(format!(
                    "after a mismatch the right request was refused: {}",
                    story::answer(answer)
                )));
            }
            Second::Ran => return Ok(Broken("after a mismatch it ran again".into())),
            _ => return Ok(Broken("after a mismatch the right request got another answer".into())),
        }
    }
    if effects.is_seen() || facts.tells() {
        Ok(Held)
    } else {
        Ok(NotObservable("every run gives the same answer".into()))
    }
}
