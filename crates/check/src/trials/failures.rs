//! Work that fails: for good, or for the moment.

use super::Finding::{self, Broken, Held, NotApplicable, NotObservable};
use super::replay::marker;
use crate::lab::{Lab, Payload};
use crate::seen::Effects;
use crate::stop::Step;
use crate::story;

/// A refusal for good is the operation's answer: a retry gets it again.
pub(super) async fn definitive(lab: &Lab<'_>) -> Step<Finding> {
    if lab.options.failing_body.is_none() {
        return Ok(NotApplicable("give --failing-body, a body that is refused for good".into()));
    }
    let call = lab.call(Payload::Failing, &lab.op())?;
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
    if second.status != first.status {
        return Ok(Broken(format!(
            "the refusal was {}, its retry got {}",
            first.status,
            story::answer(&second)
        )));
    }
    if second.body != first.body {
        return Ok(Broken("the retry got another refusal than the first".into()));
    }
    if marker(&second.headers).is_some() && marker(&first.headers).is_none() {
        return Ok(Held);
    }
    // Work that is refused again says the same again, unless each run says something of its own.
    let other = lab.send(&lab.call(Payload::Failing, &lab.op())?).await?;
    Ok(match other.body == first.body {
        false => Held,
        true => NotObservable(
            "the work refuses in the same words each time, so that a replay cannot be told from a run".into(),
        ),
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
    let first = lab.send(&call).await?;
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
        return Ok(Broken(match retry.same_run(&first) {
            true => format!("the failure was stored: a retry gets the {} again", first.status),
            false => format!("after a failure that passes a retry is refused: {}", story::answer(&retry)),
        }));
    }
    let again = lab.settled(&call, std::time::Duration::from_secs(2)).await?;
    if !again.same_run(&retry) {
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
