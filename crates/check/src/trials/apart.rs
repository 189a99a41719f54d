//! Principals are kept apart, and long requests are guarded like short ones.

use super::Finding::{self, Broken, Held, NotApplicable, NotObservable};
use super::mismatch::{is_json, padded};
use crate::lab::{Lab, Payload};
use crate::seen::Effects;
use crate::stop::Step;
use crate::story;

/// One key, two principals: two operations.
pub(super) async fn principals(lab: &Lab<'_>) -> Step<Finding> {
    if lab.options.other_headers.is_empty() {
        return Ok(NotApplicable("give --other-header, the credentials of another caller".into()));
    }
    let control_call = lab.as_other_principal(lab.call(Payload::Main, &lab.op())?);
    let watch = lab.watch().await?;
    let control = lab.send(&control_call).await?;
    if !control.is_accepted() {
        return Ok(NotObservable(format!(
            "the other caller's request is refused: {}",
            story::answer(&control)
        )));
    }
    // The other caller's effect may be on an account that the probe does not look at.
    let unit = lab.step(watch, false).await?.filter(|step| !step.is_zero());

    let op = lab.op();
    let watch = lab.watch().await?;
    let first = lab.accepted(&lab.call(Payload::Main, &op)?).await?;
    lab.step(watch, true).await?;
    let watch = lab.watch().await?;
    let call = lab.call(Payload::Main, &op.with_another_request())?;
    let other = lab.send(&lab.as_other_principal(call)).await?;
    let effects = lab.effects(watch, unit, unit.is_some() && other.is_accepted()).await?;
    if !other.is_accepted() {
        return Ok(Broken(format!(
            "a key that one caller used is refused to another: {}",
            story::answer(&other)
        )));
    }
    let facts = lab.facts();
    Ok(match (unit, effects) {
        (Some(_), Effects::Count(0)) => {
            Broken("another caller with the same key got the stored answer".into())
        }
        (Some(_), Effects::Count(_)) => Held,
        _ if !facts.tells() => {
            NotObservable("the other caller's effect cannot be seen, and all answers are the same".into())
        }
        _ if facts.same_run(&first, &other) => {
            Broken("another caller with the same key got the stored answer".into())
        }
        _ => Held,
    })
}

/// A long request is guarded, or refused: never let through without a guard.
pub(super) async fn big_body(lab: &Lab<'_>) -> Step<Finding> {
    const PADDING: usize = 2 * 1024 * 1024;
    let call = lab.call(Payload::Main, &lab.op())?;
    is_json(&call)?;
    let call = padded(call, PADDING);
    let watch = lab.watch().await?;
    let first = match lab.try_send(&call).await? {
        Ok(answer) => answer,
        Err(why) => return Ok(NotObservable(format!("a body of 2 MiB is not answered: {why}"))),
    };
    let facts = lab.facts();
    if !first.is_accepted() {
        let effects = lab.effects(watch, facts.unit, false).await?;
        return Ok(match effects.moved() {
            true => Broken(format!("a body of 2 MiB was refused with {}, and ran", first.status)),
            false => Held,
        });
    }
    let again = lab.send(&call).await?;
    Ok(match lab.effects(watch, facts.unit, true).await? {
        Effects::Count(1) => Held,
        Effects::Unseen if again.is_accepted() && facts.tells() => match facts.same_run(&again, &first) {
            true => Held,
            false => Broken("two sends of a body of 2 MiB got two answers".into()),
        },
        Effects::Unseen | Effects::Odd(_) => {
            NotObservable("whether the second send ran cannot be seen".into())
        }
        effects => Broken(format!("a body of 2 MiB sent twice: {}", effects.text())),
    })
}
