//! Gateways on one store, with everything that travels and all that breaks decided by a seed: engine, memory store and layer,
//! thousands of times, each the same again by its number.
//!
//! ```text
//! ONLYONCE_SEEDS=4711 cargo nextest run --workspace --all-features --test simulation every_seed_holds
//! ONLYONCE_SEEDS=0..100000 …
//! ```
//!
//! Each gateway has a runtime of its own, on which nothing happens but by its step: killed it is dropped, held it is not
//! stepped, and its time goes on without it. Whatever crosses from one to another is on the way for a time of chance, is lost,
//! or arrives when nobody waits for it any more. The rules are those of `onlyonce prove`.
#![allow(clippy::unwrap_used, reason = "a test program")]

mod ledger;
#[cfg(feature = "mutants")]
mod mutants;
mod network;
mod process;
mod store;
mod world;

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use world::{Outcome, play};

const PROCESSES: usize = 3;
const CALLERS: usize = 4;
const LEASE: Duration = Duration::from_millis(120);
const STORE_TIMEOUT: Duration = Duration::from_millis(50);
const UPSTREAM_TIMEOUT: Duration = Duration::from_millis(250);
const WORK_TIMEOUT: Duration = Duration::from_millis(300);
const BREAKING: Duration = Duration::from_millis(220);
const HEALING: Duration = Duration::from_secs(60);

/// Seeds of one run of the tests.
const SEEDS: Range<u64> = 0..2000;

/// The environment variable that names others: one, or `FROM..TO`.
const VARIABLE: &str = "ONLYONCE_SEEDS";

fn seeds() -> Range<u64> {
    let Ok(text) = std::env::var(VARIABLE) else { return SEEDS };
    let number = |text: &str| text.trim().parse::<u64>().expect("a number, or FROM..TO");
    match text.split_once("..") {
        Some((from, to)) => number(from)..number(to),
        None => number(&text)..number(&text) + 1,
    }
}

/// What was done in a run of seeds.
#[derive(Debug, Default)]
struct Done {
    operations: usize,
    requests: usize,
    faults: usize,
    purged: u64,
}

#[test]
fn every_seed_holds() {
    let seeds = seeds();
    let next = AtomicU64::new(seeds.start);
    let play_on = || {
        let mut done = Done::default();
        loop {
            let seed = next.fetch_add(1, Ordering::SeqCst);
            if seed >= seeds.end {
                return done;
            }
            let Outcome { report, purged, .. } = play(seed);
            assert!(
                report.holds(),
                "again: {VARIABLE}={seed} cargo nextest run --workspace --all-features --test simulation every_seed_holds\n{}",
                report.text()
            );
            done.operations += report.operations;
            done.requests += report.requests;
            done.faults += report.faults.values().sum::<usize>();
            done.purged += purged;
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let done = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(play_on)).collect();
        let done =
            threads.into_iter().map(|thread| thread.join().expect("a seed that does not hold is told above"));
        done.fold(Done::default(), |sum, one| Done {
            operations: sum.operations + one.operations,
            requests: sum.requests + one.requests,
            faults: sum.faults + one.faults,
            purged: sum.purged + one.purged,
        })
    });
    println!("{seeds:?}: {done:?}");
    // One alone may be a quiet one.
    let many = seeds.end - seeds.start >= 100;
    assert!(
        !many || (done.operations > 1000 && done.faults > 100 && done.purged > 100),
        "something was done: {done:?}"
    );
}

#[test]
fn a_seed_is_the_same_again() {
    for seed in 0..20 {
        let (first, second) = (play(seed), play(seed));
        assert_eq!(first.history.events, second.history.events, "seed {seed}");
        assert_eq!(first.history.executions, second.history.executions, "seed {seed}");
        assert_eq!(first.report.faults, second.report.faults, "seed {seed}");
    }
}
