//! Races: copies whose last bytes leave at the same moment, so that a check before an insert has its full chance.

use std::time::Duration;

use futures_util::future::join_all;

use super::Finding::{self, Broken, Held, NotApplicable, NotObservable, Weak};
use super::RaceAspect;
use crate::effect::Amount;
use crate::lab::{Facts, Lab, Payload};
use crate::seen::Effects;
use crate::stop::{Step, Stop};
use crate::story;
use crate::wire::{Answer, Call, NoAnswer};

/// Rounds of the race of two requests.
pub(super) const ROUNDS_OF_TWO: u32 = 5;
const LATE_MAX: Duration = Duration::from_secs(10);

/// What the rounds gave; the first fault of each kind.
#[derive(Default)]
pub(super) struct Race {
    rounds: u32,
    effects: Option<Effects>,
    runs: Option<String>,
    losers: Option<Finding>,
    late: Option<Finding>,
    /// Copies that were answered while the winner ran.
    conflicts: usize,
    accepted: usize,
}

pub(super) async fn race(lab: &Lab<'_>, aspect: RaceAspect) -> Step<Finding> {
    let race = lab.shared(&lab.cache.race, run(lab)).await?;
    Ok(match aspect {
        RaceAspect::Once => once(&race),
        RaceAspect::Losers => losers(&race),
        RaceAspect::Late => race.late.clone().unwrap_or_else(|| nothing_to_compare(&race)),
    })
}

fn once(race: &Race) -> Finding {
    match (race.effects, &race.runs) {
        (Some(Effects::Count(n)), _) if n != i64::from(race.rounds) => {
            Broken(format!("{} races, one key each, and {}", race.rounds, Effects::Count(n).text()))
        }
        (Some(Effects::Count(_)), _) => Held,
        (_, Some(runs)) => Broken(runs.clone()),
        (Some(odd @ Effects::Odd(_)), _) => NotObservable(odd.text()),
        _ => NotObservable("give --effect-url or --effect-cmd to see how often it took effect".into()),
    }
}

fn losers(race: &Race) -> Finding {
    match &race.losers {
        Some(fault) => fault.clone(),
        None if race.conflicts + race.accepted == 0 => NotApplicable("no copy was answered".into()),
        None => Held,
    }
}

fn nothing_to_compare(race: &Race) -> Finding {
    match race.accepted {
        0 => NotObservable("no copy was accepted, so that there is no winner to compare with".into()),
        _ => Held,
    }
}

async fn run(lab: &Lab<'_>) -> Step<Race> {
    let facts = lab.facts();
    let mut race = Race::default();
    let whole = lab.watch().await?;
    for round in 1..=lab.options.rounds {
        let watch = lab.watch().await?;
        let call = lab.call(Payload::Main, &lab.op())?;
        let copies = volley(lab, &vec![call.clone(); lab.options.concurrency as usize]).await?;
        let late = lab.settled(&call, LATE_MAX).await?;
        let ran = lab.step_now(watch).await?.map(|step| Effects::of(step, facts.unit));
        race.rounds = round;
        race.judge(&copies, &late, ran.unwrap_or(Effects::Unseen), &facts);
        if round == 1 || race.has_fault() {
            lab.tell(format!("round {round}: {} copies at once", copies.len()), tally(&copies));
        }
        if race.has_fault() {
            break;
        }
        rest(&copies).await;
    }
    race.effects = Some(lab.effects(whole, facts.unit, true).await?);
    if race.effects != Some(Effects::Unseen) {
        lab.tell(
            format!("{} rounds in all", race.rounds),
            race.effects.map_or_else(String::new, Effects::text),
        );
    }
    if race.losers.is_some() && !takes_as_many(lab).await? {
        race.losers = Some(NotObservable(format!(
            "{} requests at once are too many for the API, with different keys too: see --concurrency",
            lab.options.concurrency
        )));
    }
    Ok(race)
}

/// Whether as many requests at once, each with its own key, are all accepted.
async fn takes_as_many(lab: &Lab<'_>) -> Step<bool> {
    let calls = (0..lab.options.concurrency).map(|_| lab.call(Payload::Main, &lab.op()));
    let calls = calls.collect::<Step<Vec<Call>>>()?;
    let answers = match volley(lab, &calls).await {
        Ok(answers) => answers,
        Err(Stop::Silent(_)) => return Ok(false),
        Err(stop) => return Err(stop),
    };
    lab.tell(format!("{} requests at once, each with its own key", calls.len()), tally(&answers));
    Ok(answers.iter().all(|answer| answer.as_ref().is_ok_and(Answer::is_accepted)))
}

/// Sends requests so that their last bytes leave together.
async fn volley(lab: &Lab<'_>, calls: &[Call]) -> Step<Vec<Result<Answer, NoAnswer>>> {
    let armed = join_all(calls.iter().map(|call| lab.arm(call))).await;
    let armed = armed.into_iter().collect::<Step<Vec<_>>>()?;
    Ok(join_all(armed.into_iter().map(|armed| armed.fire())).await)
}

impl Race {
    fn has_fault(&self) -> bool {
        self.runs.is_some() || self.losers.is_some() || self.late.is_some()
    }

    fn judge(&mut self, copies: &[Result<Answer, NoAnswer>], late: &Answer, ran: Effects, facts: &Facts) {
        let accepted: Vec<&Answer> = copies.iter().flatten().filter(|answer| answer.is_accepted()).collect();
        self.accepted += accepted.len();
        self.conflicts += copies.iter().flatten().filter(|answer| answer.is_in_progress()).count();
        let distinct = distinct(&accepted, facts);
        let ran_often = match ran {
            Effects::Count(n) => n > 1,
            _ => distinct > 1 && facts.tells(),
        };
        if ran_often {
            self.runs = Some(match ran {
                Effects::Count(_) => format!("{} copies at once: {}", copies.len(), ran.text()),
                _ => format!("{} copies at once got {distinct} different answers", copies.len()),
            });
        }
        // Where it ran more than once the different answers are only what follows from that.
        if distinct > 1 && !ran_often {
            self.losers = Some(Broken(format!("{distinct} different answers of success to one operation")));
        }
        if let Some(fault) = copies.iter().find_map(loser_fault) {
            self.losers = Some(fault);
        }
        if !late.is_accepted() {
            self.late = Some(Broken(format!("the late retry was not accepted: {}", story::answer(late))));
        } else if !accepted.is_empty() && !accepted.iter().any(|answer| facts.same_run(answer, late)) {
            self.late = Some(Broken("the late retry got another answer than every copy in the race".into()));
        }
    }
}

fn distinct(answers: &[&Answer], facts: &Facts) -> usize {
    let mut kinds: Vec<&Answer> = Vec::new();
    for answer in answers {
        if !kinds.iter().any(|known| facts.same_run(known, answer)) {
            kinds.push(answer);
        }
    }
    kinds.len()
}

fn loser_fault(copy: &Result<Answer, NoAnswer>) -> Option<Finding> {
    let answer = match copy {
        Ok(answer) => answer,
        Err(why) => return Some(Broken(format!("a copy got no answer: {why}"))),
    };
    match answer.status {
        409 => None,
        _ if answer.is_accepted() => None,
        // A limit, or a service that is down for the moment, is not about the key.
        _ if answer.slow_down().is_some() => None,
        status if answer.is_in_progress() => {
            Some(Weak(format!("a copy was told to wait by {status}, not by 409")))
        }
        status => Some(Broken(format!("a copy of a good request was answered {status}"))),
    }
}

/// How many copies got which status.
fn tally(copies: &[Result<Answer, NoAnswer>]) -> String {
    let mut kinds: Vec<(String, usize)> = Vec::new();
    for copy in copies {
        let kind = match copy {
            Ok(answer) => format!("{} {}", answer.status, story::body(&answer.body)),
            Err(why) => why.to_string(),
        };
        match kinds.iter_mut().find(|(known, _)| *known == kind) {
            Some((_, count)) => *count += 1,
            None => kinds.push((kind, 1)),
        }
    }
    let shown = kinds.iter().take(5).map(|(kind, count)| format!("{count} × {kind}"));
    let more =
        if kinds.len() > 5 { format!(", and {} other answers", kinds.len() - 5) } else { String::new() };
    shown.collect::<Vec<_>>().join(", ") + &more
}

/// One key, two different requests, at the same moment: one of them runs.
pub(super) async fn of_two(lab: &Lab<'_>) -> Step<Finding> {
    let other_unit = lab.measure(Payload::Other).await?.unit;
    let unit = lab.facts().unit;
    let mut decided = 0;
    for round in 1..=ROUNDS_OF_TWO {
        let op = lab.op();
        let (ours, theirs) = (lab.call(Payload::Main, &op)?, lab.call(Payload::Other, &op)?);
        let calls: Vec<Call> = (0..lab.options.concurrency)
            .map(|n| if n % 2 == 0 { ours.clone() } else { theirs.clone() })
            .collect();
        let watch = lab.watch().await?;
        let copies = volley(lab, &calls).await?;
        let step = lab.step(watch, true).await?;
        lab.tell(format!("round {round}: {} copies of two requests at once", copies.len()), tally(&copies));
        let accepted = |remainder| {
            let copies = copies.iter().enumerate().filter(move |(index, _)| index % 2 == remainder);
            copies.filter_map(|(_, copy)| copy.as_ref().ok()).filter(|answer| answer.is_accepted()).count()
        };
        rest(&copies).await;
        if accepted(0) + accepted(1) == 0 && step.is_none_or(Amount::is_zero) {
            continue;
        }
        decided += 1;
        if accepted(0) > 0 && accepted(1) > 0 {
            return Ok(Broken("both requests were accepted under one key".into()));
        }
        match step {
            Some(step) if unit != Some(step) && other_unit != Some(step) => {
                return Ok(Broken(format!(
                    "the effect moved by {step}, which is neither the one request's nor the other's"
                )));
            }
            Some(_) => {}
            None => {
                return Ok(NotObservable(
                    "give --effect-url or --effect-cmd to see how often it took effect".into(),
                ));
            }
        }
    }
    match decided {
        0 => Ok(NotObservable("none of the copies was accepted".into())),
        _ => Ok(Held),
    }
}

/// Rests for as long as the API asks for.
async fn rest(copies: &[Result<Answer, NoAnswer>]) {
    let pauses = copies.iter().flatten().filter_map(Answer::slow_down);
    tokio::time::sleep(pauses.max().unwrap_or_default()).await;
}
