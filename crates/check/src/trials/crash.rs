//! A server that is killed and started again.

use std::time::Duration;

use super::BreakAspect;
use super::Finding::{self, Broken as Bad, Held, NotApplicable, NotObservable};
use super::breakage::{self, Broken};
use super::in_flight::slow_time;
use crate::clock;
use crate::lab::{Lab, Payload};
use crate::seen::{Second, second};
use crate::shell;
use crate::stop::{Step, Stop};
use crate::story;
use crate::wire::{Answer, Call, NoAnswer, Until};

const UP_AGAIN_MAX: Duration = Duration::from_secs(60);

pub(super) async fn crash(lab: &Lab<'_>, aspect: BreakAspect) -> Step<Finding> {
    if lab.options.restart_command.is_none() {
        return Ok(no_command());
    }
    let broken = lab.shared(&lab.cache.crash, run_crash(lab)).await?;
    Ok(match aspect {
        BreakAspect::Answered => breakage::answered(lab, &broken),
        BreakAspect::Once => breakage::once(&broken),
    })
}

fn no_command() -> Finding {
    NotApplicable("give --restart-cmd, a command that kills the server and starts it again".into())
}

async fn run_crash(lab: &Lab<'_>) -> Step<Broken> {
    let time = slow_time(lab).await?;
    let unit = lab.measure(Payload::Slow).await?.unit;
    let call = lab.call(Payload::Slow, &lab.op())?;
    let watch = lab.watch().await?;
    let begun = lab.begin(&call, Until::End).await?;
    tokio::time::sleep(time / 2).await;
    restart_server(lab).await?;
    drop(begun);
    let retry = settled_after_restart(lab, &call).await?;
    let again = lab.settled(&call, Duration::from_secs(2)).await?;
    let effects = lab.effects(watch, unit, retry.is_accepted()).await?;
    is_its_own(lab, &retry).await?;
    Ok(Broken { retry, again, effects })
}

/// What was answered before the crash is replayed after it.
pub(super) async fn restart(lab: &Lab<'_>) -> Step<Finding> {
    if lab.options.restart_command.is_none() {
        return Ok(no_command());
    }
    let facts = lab.facts();
    let call = lab.call(Payload::Main, &lab.op())?;
    let watch = lab.watch().await?;
    let first = lab.accepted(&call).await?;
    lab.step(watch, true).await?;
    restart_server(lab).await?;
    let watch = lab.watch().await?;
    let retry = settled_after_restart(lab, &call).await?;
    let effects = lab.effects(watch, facts.unit, false).await?;
    is_its_own(lab, &retry).await?;
    Ok(match second(&first, &retry, effects, &facts) {
        Second::Replayed if facts.same_run(&retry, &first) => Held,
        Second::Replayed => Bad("after the restart a retry gets another answer".into()),
        Second::Ran => Bad("after the restart it ran again: the answer was forgotten".into()),
        Second::Refused => Bad(format!("after the restart a retry is refused: {}", story::answer(&retry))),
        Second::Unclear => {
            NotObservable("every run gives the same answer, and nothing shows the effect".into())
        }
    })
}

async fn restart_server(lab: &Lab<'_>) -> Step<()> {
    let Some(command) = &lab.options.restart_command else {
        return Err(Stop::Missing("give --restart-cmd".into()));
    };
    let ended = shell::run(command, false, UP_AGAIN_MAX).await;
    let status = ended.map_err(|why| Stop::Unfit(format!("the restart command {why}")))?.status;
    if !status.success() {
        return Err(Stop::Unfit(format!("the restart command failed: {status}")));
    }
    lab.tell("(the restart command)".into(), "(done)".into());
    up_again(lab).await
}

async fn up_again(lab: &Lab<'_>) -> Step<()> {
    let start = clock::now();
    loop {
        match lab.wire.reach().await {
            Ok(()) => return Ok(()),
            Err(NoAnswer::Connect(_)) if clock::now().saturating_duration_since(start) < UP_AGAIN_MAX => {
                lab.budget().check_time()?;
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            Err(why) => {
                return Err(Stop::Unfit(format!("after the restart command the server is not there: {why}")));
            }
        }
    }
}

/// Sends until the server itself answers: a proxy, or a port that is kept open for it, is there before it is.
async fn settled_after_restart(lab: &Lab<'_>, call: &Call) -> Step<Answer> {
    let start = clock::now();
    loop {
        let tried = lab.settled(call, lab.options.patience).await;
        let is_late = clock::now().saturating_duration_since(start) >= UP_AGAIN_MAX;
        match tried {
            Ok(answer) if answer.is_of_a_proxy() && !is_late => {}
            Err(Stop::Silent(NoAnswer::Connect(_) | NoAnswer::Closed(_))) if !is_late => {}
            ended => return ended,
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

/// A 502 is the API's own answer when another key gets better: else there is nobody behind the proxy.
async fn is_its_own(lab: &Lab<'_>, answer: &Answer) -> Step<()> {
    if !answer.is_of_a_proxy() {
        return Ok(());
    }
    let other = lab.send(&lab.call(Payload::Main, &lab.op())?).await?;
    match other.is_of_a_proxy() {
        false => Ok(()),
        true => Err(Stop::Unfit(format!(
            "{UP_AGAIN_MAX:?} after the restart command every request is answered {}: the server is not there",
            answer.status
        ))),
    }
}
