//! Random histories of a few owners on a few operations, checked twice at every step: against a reference model that
//! knows nothing of the product's own state machine, and against the invariants, judged by the store's answers alone.

mod driver;
mod history;
mod invariants;
mod spec;

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::Ordering;

use proptest::test_runner::{Config, TestCaseError, TestError, TestRunner};
use proptest_state_machine::strategy::Sequential;

use crate::{Harness, Subject, Time};

/// How many histories [`conformance!`](crate::conformance) runs; an eighth of them where time is real.
pub const HISTORIES: u32 = 64;

/// Runs this many random histories, each on a fresh subject; panics with the shortest one that fails.
///
/// Where time is real a history is shorter, and one that the machine was too busy to run in time is drawn again; too many
/// of those fail the test.
///
/// # Panics
/// When an answer of the store is not the model's, when an invariant is broken, or when the store fails.
pub fn check<S: Subject>(factory: impl AsyncFn() -> S, histories: u32) {
    let runtime = crate::harness::runtime();
    let harness = || runtime.block_on(async { Harness::new(factory().await).await });
    let traits = runtime.block_on(async { driver::traits_of(&Harness::new(factory().await).await) });
    let (steps, histories) = match traits.time {
        Time::Told => (1..60, histories),
        Time::Real { .. } => (1..20, (histories / 8).max(1)),
    };
    let config = Config {
        cases: histories,
        max_global_rejects: histories * 4,
        max_shrink_iters: if traits.time == Time::Told { 2000 } else { 20 },
        failure_persistence: None,
        ..Config::default()
    };
    let strategy = Sequential::new(
        steps.into(),
        move || proptest::strategy::Just(spec::Spec::new(traits)),
        |_: &spec::Spec, _: &history::Step| true,
        move |_| history::steps(traits),
        |mut spec, step| {
            spec.apply(step);
            spec
        },
    );
    let result = TestRunner::new(config).run(&strategy, |(spec, history, seen)| {
        let harness = harness();
        let mut run = driver::Run::new(&harness, spec);
        for step in &history {
            if let Some(seen) = &seen {
                seen.fetch_add(1, Ordering::SeqCst);
            }
            let taken = catch_unwind(AssertUnwindSafe(|| runtime.block_on(Box::pin(run.step(step)))));
            // Late within the step is late too: what it saw is of another moment than the model's.
            if run.is_late() {
                return Err(TestCaseError::reject("the machine is too busy for real time"));
            }
            if let Err(failed) = taken {
                resume_unwind(failed);
            }
        }
        Ok(())
    });
    match result {
        Ok(()) => {}
        Err(TestError::Abort(reason)) => panic!("{reason}"),
        Err(TestError::Fail(reason, (_, history, _))) => {
            let steps: Vec<_> = history.iter().map(|step| format!("  {step:?}\n")).collect();
            panic!("{reason}\nthe shortest history that fails:\n{}", steps.concat())
        }
    }
}
