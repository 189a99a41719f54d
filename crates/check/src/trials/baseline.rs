//! The baseline: two keys give two effects. Without it nothing else can be shown: a server that always says the same
//! would pass whatever only compares answers.

use super::Finding;
use crate::effect::Amount;
use crate::lab::{Lab, Measured, Payload};
use crate::options::KeyStyle;
use crate::profile::Profile;
use crate::seen::Parts;
use crate::stop::{Step, Stop};
use crate::story;
use crate::wire::Answer;

pub(super) async fn two_keys(lab: &Lab<'_>) -> Step<Finding> {
    stands_still(lab).await?;
    if lab.profile() == Profile::Stripe && lab.options.key_style == KeyStyle::Auto {
        lab.learn(|facts| facts.bare = true);
    }
    let watch = lab.watch().await?;
    let mut call = lab.call(Payload::Main, &lab.op())?;
    let mut first = lab.send(&call).await?;
    let may_try_bare = lab.options.key_style == KeyStyle::Auto && !lab.facts().bare;
    if may_try_bare && matches!(first.status, 400 | 422) {
        lab.learn(|facts| facts.bare = true);
        call = lab.call(Payload::Main, &lab.op())?;
        first = lab.send(&call).await?;
    }
    if !first.is_accepted() {
        return Ok(Finding::Broken(format!(
            "the request was not accepted: {}. {}",
            story::answer(&first),
            hint(&first)
        )));
    }
    *lab.cache.earliest.lock() = Some((call, first.clone()));
    if let Some(lag) = lab.arrival(watch).await? {
        lab.learn(|facts| facts.lag = lag);
    }
    let unit = lab.step(watch, false).await?;
    if let Some(unit) = unit.filter(|unit| !unit.is_zero()) {
        lab.learn(|facts| facts.unit = Some(unit));
    }

    let watch = lab.watch().await?;
    let second = lab.send(&lab.call(Payload::Main, &lab.op())?).await?;
    if !second.is_accepted() {
        return Ok(Finding::Broken(format!(
            "the second key's request was not accepted: {}",
            story::answer(&second)
        )));
    }
    lab.learn(|facts| facts.differs = Parts::ALL.without(Parts::alike(&first, &second)));
    let tells = lab.facts().tells();
    let Some(unit) = unit else { return Ok(without_probe(lab, tells, first)) };
    let other = lab.step(watch, !unit.is_zero()).await?.unwrap_or(unit);
    Ok(with_probe(lab, unit, other, first))
}

// Somebody else's traffic would be counted as ours.
async fn stands_still(lab: &Lab<'_>) -> Step<()> {
    let watch = lab.watch().await?;
    match lab.step(watch, false).await? {
        Some(step) if !step.is_zero() => Err(Stop::Unfit(format!(
            "the effect moved by {step} before anything was sent: check an instance that nobody else uses"
        ))),
        _ => Ok(()),
    }
}

fn with_probe(lab: &Lab<'_>, unit: Amount, other: Amount, first: Answer) -> Finding {
    if unit.is_zero() && other.is_zero() {
        return Finding::Broken("both requests were accepted, and the effect did not move".into());
    }
    if unit.is_zero() || other.is_zero() {
        return Finding::Broken("two keys, and it took effect once: another key is another operation".into());
    }
    if unit != other {
        return Finding::Broken(format!(
            "the effect moved by {unit} for the first key and by {other} for the second: it cannot be counted"
        ));
    }
    lab.learn_measured(Payload::Main, Measured { answer: first, unit: Some(unit) });
    Finding::Held
}

fn without_probe(lab: &Lab<'_>, tells: bool, first: Answer) -> Finding {
    if !tells {
        return Finding::NotObservable(
            "two keys got the same answer, and nothing shows the effect: a server that does nothing answers so too".into(),
        );
    }
    lab.learn_measured(Payload::Main, Measured { answer: first, unit: None });
    Finding::Held
}

fn hint(answer: &Answer) -> &'static str {
    match answer.status {
        401 | 403 => "Give the credentials: --header 'Authorization: …'",
        404 => "Is the URL that of the operation?",
        405 => "Is the method right? See --method",
        400 | 415 | 422 => {
            "Is the body one that the API accepts? See --body, --header 'Content-Type: …', --key-header"
        }
        429 | 503 => "It is overloaded or limits its callers: check an instance of your own",
        _ => "",
    }
}
