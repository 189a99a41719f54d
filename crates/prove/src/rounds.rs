//! A long run in rounds: each is healed and judged by itself, and then forgotten but for what is needed to judge the next.

use std::collections::BTreeSet;

use crate::history::{Event, Execution, History, Sent};
use crate::judge::{Rule, Violation, judge};
use crate::random::Random;

/// So many operations of earlier rounds are asked again in later ones, with all that was seen of them.
const ELDERS_MAX: usize = 256;
/// Of them, so many make room for younger ones after each round.
const ELDERS_LEAVE: usize = 64;

/// What is kept from round to round: bounded, but for a byte an operation.
#[derive(Debug, Default)]
pub(crate) struct Rounds {
    /// The first operation that this round began.
    first: usize,
    elders: BTreeSet<usize>,
    // What was seen of the elders so far.
    events: Vec<Event>,
    executions: Vec<Execution>,
    /// How often each operation of earlier rounds ran; more than 255 times is 255.
    ran: Vec<u8>,
}

impl Rounds {
    /// Judges what a round saw, together with what was seen before of those that were asked again. The history that comes
    /// back has all of that.
    pub(crate) fn judge(&mut self, mut round: History) -> (History, Vec<Violation>) {
        round.events.splice(0..0, std::mem::take(&mut self.events));
        let mut late = Vec::new();
        if let Some(executions) = &mut round.executions {
            executions.splice(0..0, std::mem::take(&mut self.executions));
            let forgotten =
                |it: &Execution| it.operation < self.first && !self.elders.contains(&it.operation);
            late = executions.extract_if(.., |it| forgotten(it)).collect();
        }
        let mut violations = judge(&round);
        for execution in &late {
            violations.extend(self.judge_late(execution, round.retried));
        }
        round.executions.iter_mut().for_each(|executions| executions.extend(late.iter().cloned()));
        (round, violations)
    }

    // Its answers were judged; what it did then is told by the count alone.
    fn judge_late(&mut self, execution: &Execution, retried: bool) -> Option<Violation> {
        let operation = execution.operation;
        let ran = self.ran.get_mut(operation)?;
        *ran = ran.saturating_add(1);
        let found = |rule, what: String| Some(Violation { rule, operation, what });
        match execution.sent {
            Sent::Changed => found(Rule::Mismatch, "the changed body ran".into()),
            Sent::Original if *ran > 1 && !retried => {
                found(Rule::Once, format!("it ran {ran} times, the last time in a round after its own"))
            }
            Sent::Original => None,
        }
    }

    /// Ends the round: of its operations, up to `begun`, some become elders; the rest is forgotten.
    pub(crate) fn next(&mut self, history: History, begun: usize, random: &mut Random) {
        self.ran.resize(begun, 0);
        for execution in history.executions.iter().flatten().filter(|it| it.operation >= self.first) {
            if let Some(ran) = self.ran.get_mut(execution.operation) {
                *ran = ran.saturating_add(1);
            }
        }
        // An elder that leaves is counted as it is now.
        for elder in &self.elders {
            let times = history.executions.iter().flatten().filter(|it| it.operation == *elder).count();
            self.ran[*elder] = u8::try_from(times).unwrap_or(u8::MAX);
        }
        while self.elders.len() > ELDERS_MAX - ELDERS_LEAVE {
            let leaves = self.elders.iter().nth(random.below(self.elders.len())).copied();
            self.elders.remove(&leaves.unwrap_or_default());
        }
        let young = begun - self.first;
        for _ in 0..(ELDERS_MAX - self.elders.len()).min(young) {
            self.elders.insert(self.first + random.below(young));
        }
        self.first = begun;
        let stays = |operation: usize| self.elders.contains(&operation);
        self.events = history.events.into_iter().filter(|event| stays(event.operation)).collect();
        let executions = history.executions.into_iter().flatten();
        self.executions = executions.filter(|execution| stays(execution.operation)).collect();
    }

    /// Those of earlier rounds that are asked again.
    pub(crate) fn elders(&self) -> Vec<usize> {
        self.elders.iter().copied().collect()
    }

    /// Whether the operation is still asked, or one of the round that goes on.
    pub(crate) fn knows(&self, operation: usize) -> bool {
        operation >= self.first || self.elders.contains(&operation)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::history::Answer;

    fn reply(operation: usize, at: u64) -> Event {
        let (began, ended) = (Duration::from_millis(at), Duration::from_millis(at + 1));
        let answer = Answer::Reply { status: 201, body: body(operation), replayed: false, unrecorded: false };
        Event { operation, gateway: 0, sent: Sent::Original, began, ended, answer }
    }

    fn body(operation: usize) -> String {
        format!("the reply to {operation}")
    }

    fn ran(operation: usize) -> Execution {
        Execution { operation, number: 0, sent: Sent::Original, at: Duration::ZERO, body: body(operation) }
    }

    fn history(
        operations: impl Iterator<Item = usize> + Clone,
        executions: Vec<Execution>,
        at: u64,
    ) -> History {
        History {
            events: operations.map(|operation| reply(operation, at)).collect(),
            executions: Some(executions),
            healed: Duration::from_millis(at),
            ..History::default()
        }
    }

    /// A first round of a thousand operations, each of which ran once.
    fn after_a_round() -> Rounds {
        let mut rounds = Rounds::default();
        let (seen, violations) = rounds.judge(history(0..1000, (0..1000).map(ran).collect(), 10));
        assert_eq!(violations, []);
        rounds.next(seen, 1000, &mut Random::new(1));
        rounds
    }

    #[test]
    fn what_is_kept_is_bounded_and_judged_again_with_what_comes() {
        let mut rounds = after_a_round();
        let mut elders = rounds.elders();
        for round in 1..20 {
            let begun = 1000 * (round + 1);
            let again = elders.iter().copied().chain(1000 * round..begun);
            let executions = (1000 * round..begun).map(ran).collect();
            let (seen, violations) = rounds.judge(history(again, executions, 10 * round as u64 + 10));
            assert_eq!(violations, []);
            rounds.next(seen, begun, &mut Random::new(round as u64));
            assert!(rounds.elders.len() <= ELDERS_MAX && rounds.executions.len() == rounds.elders.len());
            let stayed = rounds.elders().iter().filter(|elder| elders.contains(elder)).count();
            assert!(stayed > ELDERS_MAX / 2 && stayed < elders.len(), "{stayed}");
            elders = rounds.elders();
        }
        assert!(rounds.events.len() < 20 * ELDERS_MAX);
    }

    #[test]
    fn an_elder_with_another_answer_and_one_that_is_forgotten_and_runs_again_are_found() {
        let mut rounds = after_a_round();
        let elder = rounds.elders()[0];
        let forgotten = (0..1000).find(|operation| !rounds.knows(*operation)).expect("most are");
        let mut changed = history(rounds.elders().into_iter(), vec![ran(forgotten), ran(elder)], 20);
        changed.events[0].answer =
            Answer::Reply { status: 500, body: body(elder), replayed: true, unrecorded: false };
        let (seen, violations) = rounds.judge(changed.clone());
        let found: Vec<_> = violations.iter().map(|found| (found.rule, found.operation)).collect();
        assert_eq!(found, [(Rule::Once, elder), (Rule::Identical, elder), (Rule::Once, forgotten)]);
        assert_eq!(seen.executions.map(|all| all.len()), Some(rounds.elders().len() + 2));
        // Where it is run again on purpose, it may.
        let mut rounds = after_a_round();
        let again =
            History { retried: true, ..history(rounds.elders().into_iter(), vec![ran(forgotten)], 20) };
        assert_eq!(rounds.judge(again).1, []);
        // One that nobody saw run may run once.
        let mut rounds = Rounds::default();
        let (seen, _) = rounds.judge(history(0..1000, Vec::new(), 10));
        rounds.next(seen, 1000, &mut Random::new(1));
        assert_eq!(rounds.judge_late(&ran(forgotten), false), None);
        assert!(rounds.judge_late(&ran(forgotten), false).is_some());
    }
}
