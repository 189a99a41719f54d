//! Retries of an answered request: that they do nothing, and that they get the whole first answer.

use std::time::Duration;

use http::{HeaderMap, Method};

use super::Finding::{self, Broken, Held, NotApplicable, NotObservable};
use super::{ReplayAspect, RequestChange};
use crate::lab::{Lab, Op, Payload};
use crate::profile::Profile;
use crate::seen::{self, Effects, Second};
use crate::stop::{Step, Stop};
use crate::story;
use crate::wire::{Answer, Call};

/// A record may be written a moment after the answer left: not good, and not what this trial is about.
const RECORDING_MAX: Duration = Duration::from_secs(2);

/// Three sends of one operation.
pub(super) struct Replay {
    first: Answer,
    second: Answer,
    third: Answer,
    /// Whether each run makes another answer, or the effect was seen.
    shows: bool,
}

/// The same request `sends` times: one effect.
pub(super) async fn once(lab: &Lab<'_>, sends: u32, change: &RequestChange) -> Step<Finding> {
    let op = lab.op();
    let call = changed(lab.call(Payload::Main, &op)?, change, &op)?;
    let watch = lab.watch().await?;
    let first = lab.accepted(&call).await?;
    let (mut others, mut patience) = (0, RECORDING_MAX);
    for _ in 1..sends {
        let again = lab.settled(&call, patience).await?;
        if again.is_in_progress() {
            patience = Duration::ZERO;
        }
        others += u32::from(again.is_accepted() && !lab.facts().same_run(&again, &first));
    }
    let facts = lab.facts();
    Ok(match lab.effects(watch, facts.unit, true).await? {
        Effects::Count(1) => Held,
        Effects::Unseen if others > 0 && facts.tells() && sends > 2 => {
            Broken(format!("{others} of {} retries got another answer than the first", sends - 1))
        }
        Effects::Unseen => {
            NotObservable("give --effect-url or --effect-cmd to see how often it took effect".into())
        }
        Effects::Odd(step) => NotObservable(Effects::Odd(step).text()),
        effects => Broken(format!("sent {sends} times: {}", effects.text())),
    })
}

pub(super) async fn replay(lab: &Lab<'_>, aspect: ReplayAspect, change: &RequestChange) -> Step<Finding> {
    let cell = lab.cache.replays.lock().entry(change.clone()).or_default().clone();
    let replay = lab.shared(&cell, make(lab, change)).await?;
    if !replay.shows {
        return Ok(NotObservable(
            "every run gives the same answer, so that a replay cannot be told from a run".into(),
        ));
    }
    if aspect == ReplayAspect::Answered {
        return Ok(answered(&replay));
    }
    if !replay.second.is_accepted() && replay.first.is_accepted() {
        return Ok(NotApplicable("there was no replay to look at: the retry was refused".into()));
    }
    Ok(match aspect {
        ReplayAspect::Answered => unreachable!("handled above"),
        ReplayAspect::Status => status(&replay),
        ReplayAspect::Text => text(&replay),
        ReplayAspect::Binary => binary(&replay),
        ReplayAspect::Encoding => encoding(&replay),
        ReplayAspect::Headers => headers(&replay),
        ReplayAspect::RepeatedHeaders => repeated_headers(&replay),
        ReplayAspect::SetCookie => set_cookie(&replay),
        ReplayAspect::Marker => marked(lab.profile(), &replay),
        ReplayAspect::FirstUnmarked => first_unmarked(&replay),
    })
}

async fn make(lab: &Lab<'_>, change: &RequestChange) -> Step<Replay> {
    let op = lab.op();
    let call = changed(lab.call(Payload::Main, &op)?, change, &op)?;
    let watch = lab.watch().await?;
    let first = lab.accepted(&call).await?;
    // The first effect must not be taken for one of the retries'.
    let own = lab.step(watch, true).await?;
    // The world goes on: an answer made anew from what is there now would not show otherwise.
    lab.accepted(&lab.call(Payload::Main, &lab.op())?).await?;
    lab.step(lab.watch().await?, false).await?;
    let watch = lab.watch().await?;
    let second = lab.settled(&call, RECORDING_MAX).await?;
    let third = lab.settled(&call, RECORDING_MAX).await?;
    // A vector's own request may have no effect that the probe sees.
    let moved = lab.step(watch, false).await?.filter(|_| own.is_some_and(|step| !step.is_zero()));
    if *change == RequestChange::default() && first.is_accepted() && second.is_accepted() {
        let is_same_run = match moved {
            Some(step) => step.is_zero(),
            None => lab.facts().has_sign_of_same_run(&first, &second),
        };
        if is_same_run {
            lab.learn(|facts| facts.learn_replay(&first, &second));
        }
    }
    Ok(Replay { first, second, third, shows: moved.is_some() || lab.facts().tells() })
}

/// A request with what a vector says.
pub(super) fn changed(mut call: Call, change: &RequestChange, op: &Op) -> Step<Call> {
    let unfit = |text: &str| Stop::Unfit(format!("{text:?} cannot be sent"));
    if let Some(method) = &change.method {
        call.method = Method::from_bytes(method.as_bytes()).map_err(|_| unfit(method))?;
    }
    if let Some(path) = &change.path {
        call.target = op.fill(path);
    }
    if let Some(body) = &change.body {
        call.body = op.fill(body).into();
    }
    for (name, value) in &change.headers {
        call.headers.retain(|(given, _)| !given.eq_ignore_ascii_case(name));
        call.headers.push((name.clone(), op.fill(value).into_bytes()));
    }
    Ok(call)
}

fn answered(replay: &Replay) -> Finding {
    let second = &replay.second;
    if second.is_accepted() {
        return Held;
    }
    if second.is_in_progress() {
        return Broken(format!(
            "long after its answer the retry is still told to wait: {}",
            story::answer(second)
        ));
    }
    Broken(format!("the retry of an answered request was refused: {}", story::answer(second)))
}

fn status(replay: &Replay) -> Finding {
    match (replay.first.status, replay.second.status) {
        (first, second) if first == second => Held,
        (first, second) => Broken(format!("the first answer was {first}, its replay {second}")),
    }
}

fn is_text(answer: &Answer) -> bool {
    std::str::from_utf8(&answer.body).is_ok() && !answer.headers.contains_key("content-encoding")
}

fn text(replay: &Replay) -> Finding {
    match is_text(&replay.first) {
        true => same_body(replay),
        false => NotApplicable("the body is not plain text".into()),
    }
}

fn binary(replay: &Replay) -> Finding {
    if replay.first.headers.contains_key("content-encoding") {
        return NotApplicable("the body has a Content-Encoding".into());
    }
    match is_text(&replay.first) {
        true => NotApplicable("the body is text".into()),
        false => same_body(replay),
    }
}

fn same_body(replay: &Replay) -> Finding {
    let (first, second) = (&replay.first.body, &replay.second.body);
    if first == second {
        return Held;
    }
    let at = first.iter().zip(second.iter()).take_while(|(a, b)| a == b).count();
    Broken(format!(
        "the replay's body differs from byte {at} on: {} bytes, then {}",
        first.len(),
        second.len()
    ))
}

fn encoding(replay: &Replay) -> Finding {
    let of = |answer: &Answer| answer.header("content-encoding").map(str::to_owned);
    match (of(&replay.first), of(&replay.second)) {
        (None, _) => NotApplicable("the API does not encode its answers".into()),
        (Some(first), None) => Broken(format!("Content-Encoding: {first} is missing from the replay")),
        (Some(first), Some(second)) if first != second => {
            Broken(format!("Content-Encoding was {first}, and is {second} in the replay"))
        }
        _ => same_body(replay),
    }
}

/// Headers that are of the moment, of the connection, or looked at elsewhere.
fn is_of_the_moment(name: &str) -> bool {
    const NAMES: [&str; 27] = [
        "age",
        "alt-svc",
        "cache-control",
        "cf-ray",
        "connection",
        "content-encoding",
        "content-length",
        "date",
        "expires",
        "keep-alive",
        "nel",
        "proxy-authenticate",
        "proxy-connection",
        "report-to",
        "server",
        "server-timing",
        "set-cookie",
        "strict-transport-security",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "vary",
        "via",
        "www-authenticate",
        "x-cache",
        "x-powered-by",
    ];
    const PARTS: [&str; 8] = [
        "idempoten",
        "replay",
        "request-id",
        "correlation-id",
        "trace",
        "ratelimit",
        "rate-limit",
        "response-time",
    ];
    NAMES.contains(&name) || PARTS.iter().any(|part| name.contains(part))
}

fn headers(replay: &Replay) -> Finding {
    let Replay { first, second, third, .. } = replay;
    let mut faults = Vec::new();
    for name in first.headers.keys().filter(|name| !is_of_the_moment(name.as_str())) {
        let [value, again, later] = [first, second, third].map(|answer| all(&answer.headers, name.as_str()));
        if again.is_empty() {
            faults.push(format!("{name} is missing from the replay"));
        } else if value.len() == 1 && value != again && again == later {
            // What differs in every answer, stored or not, is about that answer and not about the operation.
            faults.push(format!("{name} has another value in the replay"));
        }
    }
    match faults.is_empty() {
        true => Held,
        false => Broken(faults.join("; ")),
    }
}

fn repeated_headers(replay: &Replay) -> Finding {
    let Replay { first, second, .. } = replay;
    let repeated = |name: &&http::HeaderName| {
        !is_of_the_moment(name.as_str())
            && all(&first.headers, name.as_str()).len() > 1
            && second.headers.contains_key(*name)
    };
    let mut seen = 0;
    for name in first.headers.keys().filter(repeated) {
        seen += 1;
        let (values, again) = (all(&first.headers, name.as_str()), all(&second.headers, name.as_str()));
        if values != again {
            return Broken(format!(
                "{name} appeared {} times, and {} times in the replay",
                values.len(),
                again.len()
            ));
        }
    }
    if seen == 0 { NotApplicable("no header appears more than once".into()) } else { Held }
}

fn all<'a>(headers: &'a HeaderMap, name: &str) -> Vec<&'a [u8]> {
    headers.get_all(name).iter().map(|value| value.as_bytes()).collect()
}

fn set_cookie(replay: &Replay) -> Finding {
    let (first, second) =
        (all(&replay.first.headers, "set-cookie"), all(&replay.second.headers, "set-cookie"));
    if first.is_empty() {
        return NotApplicable("the API sets no cookie".into());
    }
    match second.iter().any(|cookie| first.contains(cookie)) {
        true => Broken("the replay sets the cookie of the first answer again".into()),
        false => Held,
    }
}

/// The header by which an answer says that it is a replay.
pub(super) fn marker(headers: &HeaderMap) -> Option<String> {
    let says_yes = |value: &str| {
        ["true", "1", "?1", "yes", "hit", "replay", "replayed", "cached", "duplicate"]
            .iter()
            .any(|yes| value.eq_ignore_ascii_case(yes))
    };
    let mut found = story::markers(headers).filter(|(_, value)| says_yes(value)).map(|(name, _)| name);
    found.next()
}

fn marked(profile: Profile, replay: &Replay) -> Finding {
    match marker(&replay.second.headers) {
        None => Broken("nothing in a replay says that it is one".into()),
        Some(name) if profile == Profile::Stripe && name != "idempotent-replayed" => {
            Broken(format!("a replay says so by {name}, not by Idempotent-Replayed"))
        }
        Some(_) => Held,
    }
}

fn first_unmarked(replay: &Replay) -> Finding {
    match (marker(&replay.first.headers), marker(&replay.second.headers)) {
        (Some(name), _) => Broken(format!("the first answer says by {name} that it is a replay")),
        (None, Some(_)) => Held,
        (None, None) => NotApplicable("replays have no marker".into()),
    }
}

/// The first key of the run: whatever came since, it is remembered.
pub(super) async fn remembered(lab: &Lab<'_>) -> Step<Finding> {
    let earliest = lab.cache.earliest.lock().clone();
    let Some((call, first)) = earliest else { return Ok(NotApplicable("there was no first key".into())) };
    let facts = lab.facts();
    let watch = lab.watch().await?;
    let again = lab.settled(&call, RECORDING_MAX).await?;
    let effects = lab.effects(watch, facts.unit, false).await?;
    Ok(match seen::second(&first, &again, effects, &facts) {
        Second::Replayed => Held,
        Second::Ran => Broken("the first key of the run was forgotten: its request ran again".into()),
        Second::Refused => {
            Broken(format!("the first key of the run got no answer: {}", story::answer(&again)))
        }
        Second::Unclear => {
            NotObservable("every run gives the same answer, and nothing shows the effect".into())
        }
    })
}

/// A client says that its request is a replay: nobody should believe it.
pub(super) async fn forged_marker(lab: &Lab<'_>) -> Step<Finding> {
    let mut call = lab.call(Payload::Main, &lab.op())?;
    for name in ["Idempotency-Replayed", "Idempotent-Replayed", "Idempotency-Replay"] {
        call = call.with(name, "true");
    }
    let watch = lab.watch().await?;
    let answer = lab.accepted(&call).await?;
    if let Some(name) = marker(&answer.headers) {
        return Ok(Broken(format!("a first answer says {name}, because the client's request said so")));
    }
    Ok(match lab.effects(watch, lab.facts().unit, true).await? {
        Effects::Count(0) => Broken("a first request that claims to be a replay did not run".into()),
        _ => Held,
    })
}
