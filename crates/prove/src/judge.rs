//! The rules, over a history. Pure: the same history, the same verdict.

use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;

use crate::history::{Answer, Event, Execution, History, Kept, Sent};

/// What must hold, whatever broke.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Rule {
    /// It ran at most once.
    Once,
    /// What a client was answered, the ledger did.
    Acknowledged,
    /// Every answer for one operation is the same.
    Identical,
    /// Once it was answered, it is never again unknown, under way or another request's.
    Kept,
    /// The same key with another body is refused, and never runs.
    Mismatch,
    /// After healing everything gets its answer, or is known to be unknown.
    Converged,
    /// No answer that no client could make sense of.
    Sane,
    /// Of all that an inbox answers about a message, one at most is `applied`; and one record is left of it.
    Applied,
    /// An inbox has every delivery that it answered in its log.
    Logged,
}

impl Rule {
    /// Every rule.
    pub const ALL: [Self; 9] = [
        Self::Once,
        Self::Acknowledged,
        Self::Identical,
        Self::Kept,
        Self::Mismatch,
        Self::Converged,
        Self::Sane,
        Self::Applied,
        Self::Logged,
    ];

    /// Whether only an inbox can break it.
    pub fn is_of_inbox(self) -> bool {
        matches!(self, Self::Applied | Self::Logged)
    }

    /// What it promises.
    pub fn promise(self) -> &'static str {
        match self {
            Self::Once => "an operation runs at most once",
            Self::Acknowledged => "what a client was answered, the ledger did",
            Self::Identical => "every answer for one operation is the same",
            Self::Kept => "what was answered once is answered ever after",
            Self::Mismatch => "the same key with another body is refused and never runs",
            Self::Converged => "after healing nothing is stuck",
            Self::Sane => "a refusal is one that the documentation names",
            Self::Applied => "a message is said to be applied once, and has one record",
            Self::Logged => "every delivery that was answered is in the log",
        }
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self:?}")
    }
}

/// A rule that does not hold for an operation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Violation {
    /// Which rule.
    pub rule: Rule,
    /// The operation's number.
    pub operation: usize,
    /// What is wrong.
    pub what: String,
}

/// Refusals that tell a client to come again, or that nobody may run it. None of them is an answer to the operation.
const PASSING: &[&str] = &[
    "in-progress",
    "store-unavailable",
    "upstream-unreachable",
    "upstream-failed",
    "upstream-timeout",
    "overloaded",
    "shutting-down",
    "superseded",
];

/// Judges a history: no violation, or all of them, those of one operation together.
pub fn judge(history: &History) -> Vec<Violation> {
    let mut of: BTreeMap<usize, (Vec<&Event>, Vec<&Execution>)> = BTreeMap::new();
    for event in &history.events {
        of.entry(event.operation).or_default().0.push(event);
    }
    for execution in history.executions.iter().flatten() {
        of.entry(execution.operation).or_default().1.push(execution);
    }
    let mut violations = Vec::new();
    for (operation, (events, executions)) in of {
        let mut found = |rule, what: String| violations.push(Violation { rule, operation, what });
        if let Some(ledger) = history.executions.is_some().then_some(&executions) {
            check_executions(&events, ledger, history.retried, &mut found);
        }
        check_answers(&events, history.retried, &mut found);
        check_end(&events, history, &mut found);
        if let Some(kept) = &history.kept {
            check_kept(operation, &events, kept, &mut found);
        }
    }
    violations
}

fn check_executions(
    events: &[&Event],
    executions: &[&Execution],
    retried: bool,
    found: &mut impl FnMut(Rule, String),
) {
    if executions.len() > 1 && !retried {
        found(Rule::Once, format!("it ran {} times", executions.len()));
    }
    if executions.iter().any(|execution| execution.sent == Sent::Changed) {
        found(Rule::Mismatch, "the changed body ran".into());
    }
    for event in events {
        let Answer::Reply { body, .. } = &event.answer else { continue };
        if !executions.iter().any(|execution| execution.body == *body) {
            found(Rule::Acknowledged, format!("answered {body}, which the ledger never said"));
        }
    }
}

fn check_answers(events: &[&Event], retried: bool, found: &mut impl FnMut(Rule, String)) {
    let mut first: Option<(u16, &str)> = None;
    // When the earliest reply that is on record came back.
    let mut acknowledged = None;
    for event in events {
        match (&event.answer, event.sent) {
            (Answer::Reply { .. }, Sent::Changed) => {
                found(Rule::Mismatch, "the changed body was answered like the operation".into());
            }
            // What is run again on purpose and was said not to be on record may have another answer later.
            (Answer::Reply { unrecorded: true, .. }, Sent::Original) if retried => {}
            (Answer::Reply { status, body, unrecorded, .. }, Sent::Original) => {
                let (known, text) = *first.get_or_insert((*status, body));
                if known != *status || text != body {
                    found(Rule::Identical, format!("answered {status} {body}, and {known} {text} before"));
                }
                if !unrecorded && acknowledged.is_none_or(|at| event.ended < at) {
                    acknowledged = Some(event.ended);
                }
            }
            _ => {}
        }
    }
    for event in events {
        let Answer::Refused { status, code } = &event.answer else { continue };
        let known =
            PASSING.contains(&code.as_str()) || matches!(code.as_str(), "outcome-unknown" | "key-reused");
        if !known {
            found(Rule::Sane, format!("refused with {status} {code:?}"));
        }
        if event.sent == Sent::Original && code == "key-reused" {
            found(Rule::Kept, "the operation was told that its key is another request's".into());
        }
        let after = acknowledged.is_some_and(|at| event.began > at);
        if !after || !matches!(code.as_str(), "outcome-unknown" | "in-progress") {
            continue;
        }
        match event.sent {
            Sent::Original => found(Rule::Kept, format!("answered before, and told {code} afterwards")),
            // The body is compared before anything else is looked at.
            Sent::Changed => found(Rule::Mismatch, format!("a changed body is told {code}")),
        }
    }
}

fn check_end(events: &[&Event], history: &History, found: &mut impl FnMut(Rule, String)) {
    let after = events.iter().filter(|event| event.began >= history.healed && event.sent == Sent::Original);
    match after.max_by_key(|event| event.ended).map(|event| &event.answer) {
        None => found(Rule::Converged, "it was never asked after healing".into()),
        Some(Answer::Reply { .. }) => {}
        Some(answer) if answer.is_code("outcome-unknown") && !history.exactly_once => {}
        Some(answer) => found(Rule::Converged, format!("its last answer is {answer:?}")),
    }
}

fn check_kept(operation: usize, events: &[&Event], kept: &Kept, found: &mut impl FnMut(Rule, String)) {
    let answered = |event: &&&Event| event.answer.is_reply();
    let applied =
        events.iter().filter(|event| matches!(event.answer, Answer::Reply { replayed: false, .. })).count();
    if applied > 1 {
        found(Rule::Applied, format!("said to be applied {applied} times"));
    }
    let records = kept.records.get(&operation).copied().unwrap_or(0);
    if records != 1 {
        found(Rule::Applied, format!("it has {records} records"));
    }
    let logged = kept.deliveries.get(&operation).copied().unwrap_or(0);
    let answers = events.iter().filter(answered).count();
    if logged < answers {
        found(Rule::Logged, format!("{answers} deliveries were answered, and {logged} are in the log"));
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn at(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn event(began: u64, sent: Sent, answer: Answer) -> Event {
        Event { operation: 1, gateway: 0, sent, began: at(began), ended: at(began + 5), answer }
    }

    fn reply(body: &str) -> Answer {
        Answer::Reply { status: 201, body: body.into(), replayed: false, unrecorded: false }
    }

    fn refused(status: u16, code: &str) -> Answer {
        Answer::Refused { status, code: code.into() }
    }

    fn ran(number: usize, sent: Sent, body: &str) -> Execution {
        Execution { operation: 1, number, sent, at: at(1), body: body.into() }
    }

    /// One operation that went well, under faults, and was asked again after healing.
    fn sound() -> History {
        History {
            events: vec![
                event(10, Sent::Original, Answer::Lost("broken".into())),
                event(20, Sent::Original, refused(409, "in-progress")),
                event(30, Sent::Original, reply("one")),
                event(40, Sent::Changed, refused(422, "key-reused")),
                event(50, Sent::Original, refused(503, "store-unavailable")),
                event(110, Sent::Original, reply("one")),
            ],
            executions: Some(vec![ran(0, Sent::Original, "one")]),
            healed: at(100),
            ..History::default()
        }
    }

    fn rules(history: &History) -> Vec<Rule> {
        judge(history).into_iter().map(|violation| violation.rule).collect()
    }

    #[test]
    fn a_sound_history_has_no_violation() {
        assert_eq!(judge(&sound()), []);
        // A target without a ledger is judged by its answers alone.
        assert_eq!(judge(&History { executions: None, ..sound() }), []);
    }

    #[test]
    fn each_rule_can_fail_by_itself() {
        let broken = |change: fn(&mut History)| {
            let mut history = sound();
            change(&mut history);
            rules(&history)
        };
        assert_eq!(
            broken(|h| h.executions.as_mut().expect("one").push(ran(1, Sent::Original, "two"))),
            [Rule::Once]
        );
        assert_eq!(broken(|h| h.executions = Some(vec![ran(0, Sent::Changed, "one")])), [Rule::Mismatch]);
        assert_eq!(broken(|h| h.executions = Some(Vec::new())), [Rule::Acknowledged, Rule::Acknowledged]);
        assert_eq!(
            broken(|h| {
                h.events[5].answer = reply("two");
                h.executions = None;
            }),
            [Rule::Identical]
        );
        assert_eq!(broken(|h| h.events[3].answer = reply("one")), [Rule::Mismatch]);
        assert_eq!(broken(|h| h.events[3].answer = refused(409, "in-progress")), [Rule::Mismatch]);
        assert_eq!(broken(|h| h.events[4].answer = refused(409, "in-progress")), [Rule::Kept]);
        assert_eq!(broken(|h| h.events[4].answer = refused(409, "outcome-unknown")), [Rule::Kept]);
        assert_eq!(broken(|h| h.events[4].answer = refused(422, "key-reused")), [Rule::Kept]);
        assert_eq!(broken(|h| h.events[5].answer = refused(503, "store-unavailable")), [Rule::Converged]);
        assert_eq!(broken(|h| drop(h.events.pop())), [Rule::Converged]);
        assert_eq!(broken(|h| h.events[4].answer = refused(500, "")), [Rule::Sane]);
    }

    #[test]
    fn an_inbox_says_applied_once_and_keeps_what_it_said() {
        let kept = |records, deliveries| Kept {
            records: [(1, records)].into(),
            deliveries: [(1, deliveries)].into(),
        };
        let mut history = sound();
        let Answer::Reply { replayed, .. } = &mut history.events[5].answer else { panic!() };
        *replayed = true;
        let of = |kept| rules(&History { kept: Some(kept), ..history.clone() });
        assert_eq!(of(kept(1, 2)), []);
        assert_eq!(of(kept(1, 1)), [Rule::Logged]);
        assert_eq!(of(kept(2, 2)), [Rule::Applied]);
        assert_eq!(of(Kept::default()), [Rule::Applied, Rule::Logged]);
        let twice = History { kept: Some(kept(1, 2)), ..sound() };
        assert_eq!(rules(&twice), [Rule::Applied]);
    }

    #[test]
    fn what_may_be_is_no_violation() {
        // Held: nobody knows, it was never answered, and it ran once or not at all.
        for executions in [vec![], vec![ran(0, Sent::Original, "one")]] {
            let history = History {
                events: vec![
                    event(10, Sent::Original, Answer::Lost("killed".into())),
                    event(110, Sent::Original, refused(409, "outcome-unknown")),
                ],
                executions: Some(executions),
                healed: at(100),
                ..History::default()
            };
            assert_eq!(judge(&history), []);
            // But not where effect and record are one transaction.
            assert_eq!(rules(&History { exactly_once: true, ..history }), [Rule::Converged]);
        }
        // Run again on purpose: more than once, with one answer for all.
        let mut history = History { retried: true, ..sound() };
        history.executions.as_mut().expect("one").push(ran(1, Sent::Original, "two"));
        assert_eq!(judge(&history), []);
        // What was said not to be on record may be unknown later.
        let mut history = sound();
        let Answer::Reply { unrecorded, .. } = &mut history.events[2].answer else { panic!() };
        *unrecorded = true;
        history.events[5].answer = refused(409, "outcome-unknown");
        assert_eq!(judge(&history), []);
        // Nor, where it is run again on purpose, its answer the last one.
        let mut history = History { retried: true, ..sound() };
        history.executions.as_mut().expect("one").push(ran(1, Sent::Original, "two"));
        let first = Answer::Reply { status: 201, body: "two".into(), replayed: false, unrecorded: true };
        history.events[0].answer = first;
        assert_eq!(judge(&history), []);
        history.retried = false;
        history.executions = None;
        assert_eq!(rules(&history), [Rule::Identical, Rule::Identical]);
        // A copy that was sent before the answer came back may be told that it is under way.
        let mut history = sound();
        history.events[1].ended = at(60);
        assert_eq!(judge(&history), []);
    }
}
