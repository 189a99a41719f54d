//! Keys: missing, empty, malformed, nearly the same, spelled differently.

use super::Finding::{self, Broken, Held, NotApplicable, NotObservable, Weak};
use crate::lab::{Lab, Op, Payload, uuid};
use crate::seen::{self, Effects, Second};
use crate::stop::Step;
use crate::story;
use crate::wire::Answer;

pub(super) async fn missing(lab: &Lab<'_>) -> Step<Finding> {
    let call = lab.call(Payload::Main, &lab.op_without_key())?;
    let answer = lab.send(&call).await?;
    Ok(match answer.status {
        400 => Held,
        _ if answer.is_accepted() => Broken("a request without a key was accepted".into()),
        500.. => Broken(format!("a request without a key was answered {}", answer.status)),
        status => Weak(format!("a request without a key was refused with {status}, not with 400")),
    })
}

/// Refused, or treated as no key at all. What must not be: one key that everybody shares who forgot his.
pub(super) async fn empty(lab: &Lab<'_>, lines: &[String]) -> Step<Finding> {
    if lab.facts().bare && lines.iter().any(|line| !line.is_empty()) {
        return Ok(NotApplicable(
            "the API takes bare keys alone: two quotes are a key like any other".into(),
        ));
    }
    let watch = lab.watch().await?;
    let op = lab.op_with_lines(lines, &uuid());
    let first = lab.send(&lab.call(Payload::Main, &op)?).await?;
    match first.status {
        400 => return Ok(Held),
        500.. => return Ok(Broken(format!("an empty key was answered {}", first.status))),
        status if !first.is_accepted() => {
            return Ok(Weak(format!("an empty key was refused with {status}, not with 400")));
        }
        _ => {}
    }
    let op = lab.op_with_lines(lines, &uuid());
    let later = lab.send(&lab.call(Payload::Main, &op)?).await?;
    // The first may itself have been a replay of an earlier run's.
    let facts = lab.facts();
    let effects = lab.effects(watch, facts.unit, true).await?;
    let both_ran = match effects {
        Effects::Count(n) => n >= 2,
        _ if !facts.tells() => {
            return Ok(NotObservable(
                "an empty key is accepted, and whether it is one key cannot be seen".into(),
            ));
        }
        _ => !facts.same_run(&first, &later),
    };
    if !both_ran {
        return Ok(Broken(
            "an empty key is a key: whoever sends none gets the answer of the first who did".into(),
        ));
    }
    let without = lab.send(&lab.call(Payload::Main, &lab.op_without_key())?).await?;
    Ok(match without.is_accepted() {
        true => Held,
        false => {
            Broken("an empty key passes where none is refused, and nothing is remembered under it".into())
        }
    })
}

pub(super) async fn malformed(lab: &Lab<'_>, lines: &[String]) -> Step<Finding> {
    let op = lab.op_with_lines(lines, &uuid());
    let answer = match lab.try_send(&lab.call(Payload::Main, &op)?).await? {
        Ok(answer) => answer,
        Err(why) => return Ok(Weak(format!("a malformed key was not answered at all: {why}"))),
    };
    Ok(match answer.status {
        400 => Held,
        _ if answer.is_accepted() => Broken("a malformed key was accepted".into()),
        500.. => Broken(format!("a malformed key was answered {}", answer.status)),
        status => Weak(format!("a malformed key was refused with {status}, not with 400")),
    })
}

/// Two keys, the same request: two runs, or the second key is refused.
pub(super) async fn apart(lab: &Lab<'_>, first: &str, second: &str) -> Step<Finding> {
    let (first, second) = (in_style(lab, first), in_style(lab, second));
    if [&first, &second].iter().any(|line| line.trim() != line.as_str()) {
        // HTTP itself strips white space around a header's value.
        return Ok(NotApplicable(
            "the API takes bare keys alone, which cannot have white space at their ends".into(),
        ));
    }
    let unique = uuid();
    // The pair shares its text; what an order number stands for in the requests must not be shared.
    let one = lab.op_with_lines(&[first], &unique);
    let two = lab.op_with_lines(std::slice::from_ref(&second), &unique).with_another_request();
    let Some(earlier) = admitted(lab, &one).await? else {
        return Ok(NotApplicable("the API admits no key of this kind".into()));
    };
    if !earlier.is_accepted() {
        return Ok(Broken(format!("a key of this kind was answered {}", earlier.status)));
    }
    let watch = lab.watch().await?;
    let later = lab.send(&lab.call(Payload::Main, &two)?).await?;
    let facts = lab.facts();
    let effects = lab.effects(watch, facts.unit, later.is_accepted()).await?;
    Ok(match seen::second(&earlier, &later, effects, &facts) {
        Second::Ran if later.is_accepted() => Held,
        Second::Ran => Broken(format!("the second key's request ran, and was answered {}", later.status)),
        Second::Replayed => {
            Broken("two keys were taken for one: the second got the answer of the first".into())
        }
        Second::Refused if matches!(later.status, 400 | 413 | 431) && !is_admitted(lab, &second).await? => {
            Held
        }
        Second::Refused => {
            Broken(format!("the second key was not taken for a new one: {}", story::answer(&later)))
        }
        Second::Unclear => unclear(),
    })
}

/// Whether a key of this kind is taken when no other is near it. Then a refusal was meant for the pair.
async fn is_admitted(lab: &Lab<'_>, line: &String) -> Step<bool> {
    let alone = lab.op_with_lines(std::slice::from_ref(line), &uuid());
    Ok(admitted(lab, &alone).await?.is_some())
}

/// Two spellings of one key: one run.
pub(super) async fn same(lab: &Lab<'_>, first: &str, second: &str) -> Step<Finding> {
    let unique = uuid();
    let op = |line: &str| lab.op_with_lines(&[line.to_owned()], &unique);
    let Some(earlier) = admitted(lab, &op(first)).await? else {
        return Ok(NotApplicable("the API does not admit the first spelling".into()));
    };
    if !earlier.is_accepted() {
        return Ok(Broken(format!("the first spelling was answered {}", earlier.status)));
    }
    let watch = lab.watch().await?;
    let later = lab.send(&lab.call(Payload::Main, &op(second))?).await?;
    let facts = lab.facts();
    let effects = lab.effects(watch, facts.unit, false).await?;
    Ok(match seen::second(&earlier, &later, effects, &facts) {
        Second::Replayed => Held,
        Second::Ran => Broken("the second spelling ran as another key".into()),
        Second::Refused if later.status == 400 => {
            NotApplicable("the API does not admit the second spelling".into())
        }
        Second::Refused => Broken(format!("the second spelling was refused: {}", story::answer(&later))),
        Second::Unclear => unclear(),
    })
}

/// A quoted key without its quotes, for an API that takes bare keys alone.
fn in_style(lab: &Lab<'_>, line: &str) -> String {
    let bare = line.strip_prefix('"').and_then(|rest| rest.strip_suffix('"'));
    match bare {
        Some(bare) if lab.facts().bare => bare.to_owned(),
        _ => line.to_owned(),
    }
}

async fn admitted(lab: &Lab<'_>, op: &Op) -> Step<Option<Answer>> {
    let answer = lab.send(&lab.call(Payload::Main, op)?).await?;
    Ok(if answer.is_accepted() || answer.status >= 500 { Some(answer) } else { None })
}

fn unclear() -> Finding {
    NotObservable("whether the second request ran cannot be seen: give --effect-url or --effect-cmd".into())
}
