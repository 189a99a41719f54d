//! Clients that go away: in the middle of the work, in the middle of their own request.

use std::time::Duration;

use super::BreakAspect;
use super::Finding::{self, Broken as Bad, Held, NotApplicable, NotObservable};
use super::in_flight::slow_time;
use crate::lab::{Lab, Payload};
use crate::seen::Effects;
use crate::stop::Step;
use crate::story;
use crate::wire::{Answer, Until};

/// What a retry got after something broke, and how often it took effect.
pub(super) struct Broken {
    /// The retry's answer, once it was not "in progress".
    pub(super) retry: Answer,
    /// The answer to one more.
    pub(super) again: Answer,
    pub(super) effects: Effects,
}

pub(super) async fn disconnect(lab: &Lab<'_>, aspect: BreakAspect) -> Step<Finding> {
    let broken = lab.shared(&lab.cache.disconnect, run_disconnect(lab)).await?;
    Ok(match aspect {
        BreakAspect::Answered => answered(lab, &broken),
        BreakAspect::Once => once(&broken),
    })
}

async fn run_disconnect(lab: &Lab<'_>) -> Step<Broken> {
    let is_slow = lab.options.slow_body.is_some();
    let (payload, stays, rest) = if is_slow {
        let time = slow_time(lab).await?;
        // In the middle; where the server goes on, its work is over by the time of the retry.
        (Payload::Slow, time / 2, time + Duration::from_millis(200))
    } else {
        (Payload::Main, Duration::ZERO, Duration::from_millis(300))
    };
    let unit = lab.measure(payload).await?.unit;
    let call = lab.call(payload, &lab.op())?;
    let watch = lab.watch().await?;
    let begun = lab.begin(&call, Until::End).await?;
    tokio::time::sleep(stays).await;
    drop(begun);
    tokio::time::sleep(rest).await;
    let retry = lab.settled(&call, lab.options.patience).await?;
    let again = lab.settled(&call, Duration::from_secs(2)).await?;
    let effects = lab.effects(watch, unit, true).await?;
    Ok(Broken { retry, again, effects })
}

/// A retry gets an answer that is an end.
pub(super) fn answered(lab: &Lab<'_>, broken: &Broken) -> Finding {
    let Broken { retry, again, .. } = broken;
    if retry.is_outcome_unknown() {
        return Held;
    }
    if retry.is_in_progress() {
        return Bad(format!(
            "the key is stuck: after {:?} a retry is still told to wait: {}",
            lab.options.patience,
            story::answer(retry)
        ));
    }
    if !retry.is_accepted() {
        return Bad(format!("a retry was refused: {}", story::answer(retry)));
    }
    match lab.facts().same_run(retry, again) {
        true => Held,
        false => Bad("two retries, one after the other, got different answers".into()),
    }
}

/// It took effect once; or at most once, where nobody claims to know.
pub(super) fn once(broken: &Broken) -> Finding {
    let is_unknown = broken.retry.is_outcome_unknown();
    match broken.effects {
        Effects::Count(1) => Held,
        Effects::Count(0) if is_unknown || !broken.retry.is_accepted() => Held,
        Effects::Count(n) if n < 0 => NotObservable(format!(
            "the effect moved back by {} operations: is it kept where a crash loses it?",
            -n
        )),
        Effects::Unseen => {
            NotObservable("give --effect-url or --effect-cmd to see how often it took effect".into())
        }
        Effects::Odd(_) => NotObservable(broken.effects.text()),
        Effects::Count(0) => Bad("the retry was told of a success, and it never took effect".into()),
        Effects::Count(_) => Bad(broken.effects.text()),
    }
}

/// Half a request does nothing, and leaves its key usable.
pub(super) async fn half_sent(lab: &Lab<'_>) -> Step<Finding> {
    let facts = lab.facts();
    let call = lab.call(Payload::Main, &lab.op())?;
    if call.body.len() < 2 {
        return Ok(NotApplicable("the operation has no body that could be cut in half".into()));
    }
    let watch = lab.watch().await?;
    let begun = lab.begin(&call, Until::HalfOfBody).await?;
    tokio::time::sleep(Duration::from_millis(100)).await;
    drop(begun);
    tokio::time::sleep(Duration::from_millis(200)).await;
    let early = lab.effects(watch, facts.unit, false).await?;
    if early.moved() {
        return Ok(Bad(format!("half a request ran: {}", early.text())));
    }
    let whole = lab.settled(&call, lab.options.patience).await?;
    if whole.is_in_progress() {
        return Ok(Bad(format!("the key is stuck after half a request: {}", story::answer(&whole))));
    }
    if !whole.is_accepted() {
        return Ok(Bad(format!("after half a request the whole one is refused: {}", story::answer(&whole))));
    }
    Ok(match lab.effects(watch, facts.unit, true).await? {
        Effects::Count(1) => Held,
        Effects::Unseen => {
            NotObservable("give --effect-url or --effect-cmd to see whether the half took effect".into())
        }
        Effects::Odd(step) => NotObservable(Effects::Odd(step).text()),
        effects => Bad(format!("half a request, then the whole: {}", effects.text())),
    })
}
