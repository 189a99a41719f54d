//! Work that fails: for good, or for the moment.

use super::Finding::{self, Broken, Held, NotApplicable, NotObservable};
use super::replay::marker;
use crate::lab::{Lab, Op, Payload};
use crate::seen::Effects;
use crate::stop::Step;
use crate::story;
use crate::wire::Answer;

/// A refusal for good is the operation's answer: a retry gets it again.
pub(super) async fn definitive(lab: &Lab<'_>) -> Step<Finding> {
    if lab.options.failing_body.is_none() {
        return Ok(NotApplicable("give --failing-body, a body that is refused for good".into()));
    }
    let op = lab.op();
    let call = lab.call(Payload::Failing, &op)?;
    let first = lab.send(&call).await?;
    if !(400..500).contains(&first.status) {
        return Ok(NotApplicable(format!(
            "the failing body was answered {}, not refused by a 4xx",
            first.status
        )));
    }
    let watch = lab.watch().await?;
    let second = lab.settled(&call, std::time::Duration::from_secs(2)).await?;
    let effects = lab.effects(watch, lab.facts().unit, false).await?;
    if effects.moved() {
        return Ok(Broken(format!("the retry of a refused request ran: {}", effects.text())));
    }
    let lost = lab.facts().lost;
    if second.status != first.status && !lost.status {
        return Ok(Broken(format!(
            "the refusal was {}, its retry got {}",
            first.status,
            story::answer(&second)
        )));
    }
    if second.body != first.body && !lost.body {
        return Ok(Broken("the retry got another refusal than the first".into()));
    }
    if marker(&second.headers).is_some() && marker(&first.headers).is_none() {
        return Ok(Held);
    }
    // Work that is refused again says the same again, unless each run says something of its own.
    let other = lab.send(&lab.call(Payload::Failing, &lab.op())?).await?;
    if other.body != first.body {
        return Ok(Held);
    }
    is_taken(lab, &op, &first).await
}

/// Whether the key of a refused request is taken: what is accepted under a fresh key is refused under this one.
async fn is_taken(lab: &Lab<'_>, op: &Op, refusal: &Answer) -> Step<Finding> {
    let watch = lab.watch().await?;
    let other = lab.settled(&lab.call(Payload::Main, op)?, std::time::Duration::from_secs(2)).await?;
    let facts = lab.facts();
    Ok(match lab.effects(watch, facts.unit, other.is_accepted()).await? {
        effects if effects.moved() => {
            Broken("the refusal was not recorded: another request ran under its key".into())
        }
        _ if other.is_accepted() => {
            Broken("another request was accepted under the key of a refused one".into())
        }
        _ if other.status == refusal.status || (400..500).contains(&other.status) => Held,
        _ => NotObservable(format!("another request under its key was answered {}", other.status)),
    })
}

/// A failure that passes is nobody's answer: a retry runs.
pub(super) async fn transient(lab: &Lab<'_>) -> Step<Finding> {
    if lab.options.transient_body.is_none() {
        return Ok(NotApplicable(
            "give --transient-body, a body whose work fails once and then succeeds".into(),
        ));
    }
    let call = lab.call(Payload::Transient, &lab.op())?;
    let watch = lab.watch().await?;
    let first = lab.send_once(&call).await?;
    if first.is_accepted() {
        return Ok(NotApplicable(format!(
            "the transient body did not fail: it was answered {}",
            first.status
        )));
    }
    let retry = lab.settled(&call, lab.options.patience.min(std::time::Duration::from_secs(10))).await?;
    if retry.is_outcome_unknown() {
        return Ok(Held);
    }
    if !retry.is_accepted() {
        return Ok(Broken(match lab.facts().same_run(&retry, &first) {
            true => format!("the failure was stored: a retry gets the {} again", first.status),
            false => format!("after a failure that passes a retry is refused: {}", story::answer(&retry)),
        }));
    }
    let again = lab.settled(&call, std::time::Duration::from_secs(2)).await?;
    if !lab.facts().same_run(&again, &retry) {
        return Ok(Broken("once it succeeded, another retry got another answer".into()));
    }
    Ok(match lab.step(watch, true).await? {
        Some(step) if step.is_zero() => {
            Broken("the retry was told of a success, and it never took effect".into())
        }
        Some(step) => match Effects::of(step, lab.facts().unit) {
            Effects::Count(n) if n > 1 => {
                Broken(format!("a failure and its retries: {}", Effects::Count(n).text()))
            }
            _ => Held,
        },
        None => Held,
    })
}
