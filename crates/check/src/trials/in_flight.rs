//! While a request is in flight: its copies, other requests with its key, and other keys.

use std::sync::Arc;
use std::time::Duration;

use super::Finding::{self, Broken, Held, NotApplicable, NotObservable, Weak};
use super::FlightAspect;
use crate::lab::{Lab, Op, Payload, Watch};
use crate::seen::Effects;
use crate::stop::{Step, Stop};
use crate::story;
use crate::wire::{Answer, Call, NoAnswer};

/// Shorter work cannot be met in flight with certainty.
const WORK_MIN: Duration = Duration::from_millis(150);
const SETTLES_MAX: Duration = Duration::from_secs(5);

/// A slow request, a copy sent while it ran, and a retry after it.
pub(super) struct InFlight {
    first: Answer,
    copy: Result<Answer, NoAnswer>,
    late: Answer,
    effects: Effects,
}

impl InFlight {
    /// The copy's answer, when it came while the first was still at work.
    pub(super) fn refusal(&self) -> Option<&Answer> {
        self.copy.as_ref().ok().filter(|copy| copy.done < self.first.done && !copy.is_accepted())
    }
}

/// How long the slow work takes.
pub(super) async fn slow_time(lab: &Lab<'_>) -> Step<Duration> {
    let mut time = lab.measure(Payload::Slow).await?.answer.took;
    // A busy machine makes quick work look slow once.
    if (WORK_MIN..WORK_MIN * 8).contains(&time) {
        time = time.min(lab.measure_again(Payload::Slow).await?.answer.took);
    }
    if time < WORK_MIN {
        return Err(Stop::Unfit(format!(
            "the slow body was answered within {time:.0?}: give one whose work takes {WORK_MIN:?} or more"
        )));
    }
    Ok(time)
}

/// When the other request is sent, in parts of the work. The next is tried where the first was done too soon.
type Moments = [f64; 3];
const EARLY: Moments = [0.25, 0.15, 0.1];
const LATE: Moments = [0.85, 0.75, 0.6];

pub(super) async fn shared(lab: &Lab<'_>) -> Step<Arc<InFlight>> {
    lab.shared(&lab.cache.in_flight, run(lab)).await
}

async fn run(lab: &Lab<'_>) -> Step<InFlight> {
    let unit = lab.measure(Payload::Slow).await?.unit;
    let met = meet(lab, EARLY, |op| lab.call(Payload::Slow, op).map(|call| (call.clone(), call))).await?;
    let first = accepted(met.first?)?;
    let effects = lab.effects(met.watch, unit, true).await?;
    let late = lab.settled(&met.call, SETTLES_MAX).await?;
    Ok(InFlight { first, copy: met.other, late, effects })
}

fn accepted(first: Answer) -> Step<Answer> {
    match first.is_accepted() {
        true => Ok(first),
        false => Err(Stop::Unfit(format!("the slow request was not accepted: {}", story::answer(&first)))),
    }
}

type Outcome = Result<Answer, NoAnswer>;

/// A request, and another one that was sent while it was at work.
struct Meeting {
    call: Call,
    first: Outcome,
    other: Outcome,
    watch: Watch,
}

/// Lets two requests meet. On a busy machine the second may leave too late: then the two others are tried, and what was
/// seen of these tells nothing.
async fn meet(lab: &Lab<'_>, moments: Moments, calls: impl Fn(&Op) -> Step<(Call, Call)>) -> Step<Meeting> {
    let time = slow_time(lab).await?;
    for moment in moments {
        let met = together(lab, || calls(&lab.op()), time.mul_f64(moment)).await?;
        if surely_met(&met.first, &met.other, time) {
            return Ok(met);
        }
    }
    Err(Stop::Unfit(format!("the slow work, of {time:.1?}, was over before another request could meet it")))
}

/// The other one left well before the first was done.
fn surely_met(first: &Outcome, other: &Outcome, time: Duration) -> bool {
    let (Ok(first), Ok(other)) = (first, other) else { return true };
    let on_its_way = (time / 20).max(Duration::from_millis(5));
    !first.is_accepted()
        || other.done < first.done
        || other.done < first.done + other.took.saturating_sub(on_its_way)
}

/// A request, and another one sent after some time. Others are sent, with fresh keys, where one of the two was told to rest:
/// that may be about the moment and not about the keys. If it is about the keys it is told every time.
async fn together(lab: &Lab<'_>, calls: impl Fn() -> Step<(Call, Call)>, after: Duration) -> Step<Meeting> {
    const TRIES: u32 = 3;
    let header = &lab.options.key_header;
    let mut tries = 0;
    loop {
        let (call, other_call) = calls()?;
        let watch = lab.watch().await?;
        let later = async {
            tokio::time::sleep(after).await;
            lab.send_silently(&other_call).await
        };
        let (first, other) = tokio::join!(lab.send_silently(&call), later);
        let (first, other) = (first?, other?);
        tries += 1;
        let pauses = [&first, &other].map(|outcome| outcome.as_ref().ok().and_then(Answer::slow_down));
        if let Some(pause) = pauses.into_iter().flatten().max()
            && tries < TRIES
        {
            tokio::time::sleep(pause).await;
            continue;
        }
        lab.tell(story::call(&call, header), story::outcome(&first));
        let meanwhile = format!("{}  (while the first is at work)", story::call(&other_call, header));
        lab.tell(meanwhile, story::outcome(&other));
        return Ok(Meeting { call, first, other, watch });
    }
}

pub(super) async fn copy(lab: &Lab<'_>, aspect: FlightAspect) -> Step<Finding> {
    let seen = shared(lab).await?;
    Ok(match aspect {
        FlightAspect::Copy => not_run(lab, &seen),
        FlightAspect::Conflict => conflict(&seen),
        FlightAspect::RetryAfter => retry_after(&seen),
        FlightAspect::Settles => settles(lab, &seen),
    })
}

fn not_run(lab: &Lab<'_>, seen: &InFlight) -> Finding {
    let copy = match &seen.copy {
        Ok(copy) => copy,
        Err(why) => return Broken(format!("a copy in flight got no answer: {why}")),
    };
    if let Effects::Count(n) = seen.effects
        && n > 1
    {
        return Broken(format!("the copy ran too: {}", seen.effects.text()));
    }
    if copy.is_accepted() {
        if !lab.facts().same_run(copy, &seen.first) {
            return Broken("a copy in flight got a success that is not the answer of the operation".into());
        }
        return match seen.effects.is_seen() || lab.facts().tells() {
            true => Held,
            false => NotObservable("every run gives the same answer".into()),
        };
    }
    match copy.status {
        409 => Held,
        status if copy.is_in_progress() => {
            Weak(format!("a copy in flight was told to wait by {status}, not by 409"))
        }
        status => Broken(format!("a copy in flight was answered {status}")),
    }
}

/// The lock lasts as long as the work: a copy near its end does not run.
pub(super) async fn late_copy(lab: &Lab<'_>) -> Step<Finding> {
    let unit = lab.measure(Payload::Slow).await?.unit;
    let met = meet(lab, LATE, |op| lab.call(Payload::Slow, op).map(|call| (call.clone(), call))).await?;
    let (first, copy) = (accepted(met.first?)?, met.other?);
    let facts = lab.facts();
    let effects = lab.effects(met.watch, unit, true).await?;
    Ok(match effects {
        Effects::Count(1) => Held,
        // The copy came when the first was done, or was refused: either way it is no run of its own.
        Effects::Unseen if !copy.is_accepted() || facts.same_run(&copy, &first) && facts.tells() => Held,
        Effects::Unseen if !facts.tells() => NotObservable("every run gives the same answer".into()),
        Effects::Unseen => Broken("near the end of the work a copy got a success of its own".into()),
        Effects::Odd(_) => NotObservable(effects.text()),
        Effects::Count(_) => Broken(format!("near the end of the work a copy was sent: {}", effects.text())),
    })
}

fn conflict(seen: &InFlight) -> Finding {
    match &seen.copy {
        Ok(copy) if copy.status == 409 => Held,
        Ok(copy) if copy.is_accepted() => Broken("a copy in flight is held until the end of the work".into()),
        Ok(copy) => Broken(format!("a copy in flight was answered {}, not 409", copy.status)),
        Err(why) => Broken(format!("a copy in flight got no answer: {why}")),
    }
}

fn retry_after(seen: &InFlight) -> Finding {
    let Some(refusal) = seen.refusal() else {
        return NotApplicable("no copy was told to wait".into());
    };
    match refusal.header("retry-after") {
        None => Broken("a copy in flight is not told when to come back".into()),
        // A date is allowed as well.
        Some(value) if value.parse::<u32>().is_ok() || value.ends_with("GMT") => Held,
        Some(value) => Broken(format!("Retry-After: {value:?} is neither a number of seconds nor a date")),
    }
}

fn settles(lab: &Lab<'_>, seen: &InFlight) -> Finding {
    if seen.late.is_in_progress() {
        return Broken(format!(
            "{SETTLES_MAX:?} after the answer a retry is still told to wait: {}",
            story::answer(&seen.late)
        ));
    }
    match lab.facts().same_run(&seen.late, &seen.first) {
        true => Held,
        false => Broken("after the answer a retry gets another one".into()),
    }
}

/// Another body with the key of a request in flight: a mismatch now as later, and no reason to come back.
pub(super) async fn mismatch(lab: &Lab<'_>) -> Step<Finding> {
    let unit = lab.measure(Payload::Slow).await?.unit;
    let calls = |op: &Op| Ok((lab.call(Payload::Slow, op)?, lab.call(Payload::Other, op)?));
    let met = meet(lab, EARLY, calls).await?;
    let (first, other) = (met.first?, met.other?);
    if !first.is_accepted() {
        return Ok(Broken(format!("the first request was spoilt: {}", story::answer(&first))));
    }
    let effects = lab.effects(met.watch, unit, true).await?;
    Ok(match other.status {
        _ if other.is_accepted() => {
            Broken("another request with the key of one in flight was accepted".into())
        }
        _ if effects.is_seen() && effects != Effects::Count(1) => {
            Broken(format!("with both sent: {}", effects.text()))
        }
        _ if matches!(effects, Effects::Odd(_)) => Broken(effects.text()),
        422 => Held,
        status if other.is_in_progress() => {
            Weak(format!("it was told to come back by {status}, which would be of no use"))
        }
        status if status < 500 => Weak(format!("it was refused with {status}, not with 422")),
        status => Broken(format!("it was answered {status}")),
    })
}

/// Another key is not held up by one that is at work.
pub(super) async fn others_go_on(lab: &Lab<'_>) -> Step<Finding> {
    const TRIES: u32 = 3;
    let time = slow_time(lab).await?;
    // Where everything is slow the quick one ends later, too: what tells is how long it took beyond its own time.
    let own = lab.measure(Payload::Main).await?.answer.took;
    let rest = time.mul_f64(1.0 - EARLY[0]);
    // A busy machine can be slow once; a lock is slow every time.
    for _ in 0..TRIES {
        let calls = || Ok((lab.call(Payload::Slow, &lab.op())?, lab.call(Payload::Main, &lab.op())?));
        let met = together(lab, calls, time.mul_f64(EARLY[0])).await?;
        let (slow, quick) = (met.first?, met.other?);
        if !slow.is_accepted() || !quick.is_accepted() {
            return Ok(Broken(format!(
                "two keys at once: {}, and {}",
                story::answer(&slow),
                story::answer(&quick)
            )));
        }
        if quick.done < slow.done || quick.took < own + rest / 2 {
            return Ok(Held);
        }
    }
    Ok(Broken("a request with another key waits for the one at work".into()))
}
