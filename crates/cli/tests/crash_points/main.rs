//! A process dies at each named place of each store and door, the first time it comes there and the second; another takes its
//! place, and everything is asked again. Nothing ran twice, nothing that was answered is lost, nothing is stuck.
//!
//! The places are in `crates/core/src/crash.rs`.
#![cfg(feature = "mutants")]
#![allow(clippy::unwrap_used, reason = "a test fails by it")]

#[path = "../common/mod.rs"]
mod common;
mod gateway;
mod inbox;
mod shop;

use std::collections::BTreeMap;
use std::future::Future;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::sync::Arc;

use futures_util::StreamExt;
use onlyonce_core::CrashPoint;
use parking_lot::Mutex;
use testkit::Process;
use tokio::process::Command;

/// Each place is to be come to for the first time, and for the second.
const TIMES: [usize; 2] = [1, 2];

/// Cases under way at the same time.
const AT_ONCE: usize = 6;

/// Where and when a process is to die.
#[derive(Clone, Copy, Debug)]
struct Death {
    place: CrashPoint,
    time: usize,
}

impl Death {
    fn name(self) -> String {
        format!("{}@{}", self.place.name(), self.time)
    }
}

/// Every death at these places, several cases at once.
async fn each<F: Future<Output = ()>>(
    places: impl IntoIterator<Item = CrashPoint>,
    case: impl Fn(Death) -> F,
) {
    let deaths = places.into_iter().flat_map(|place| TIMES.map(|time| Death { place, time }));
    futures_util::stream::iter(deaths.map(case)).buffer_unordered(AT_ONCE).collect::<()>().await;
}

/// The program, to die there; to live on, if nowhere.
fn program(folder: &Path, args: &[&str], death: Option<Death>, more: &[(&str, &str)]) -> Process {
    let mut command = Command::new(common::PROGRAM);
    command.args(args).current_dir(folder).envs(more.iter().copied());
    if let Some(death) = death {
        command.env(CrashPoint::VARIABLE, death.name());
    }
    Process::from_command(command).unwrap()
}

/// It died, and there: not by itself, and not elsewhere.
async fn died(process: &mut Process, death: Death) {
    let status = process.wait_exit().await.unwrap_or_else(|error| panic!("{}: {error:#}", death.name()));
    let said = process.stderr();
    assert_eq!(status.signal(), Some(6), "{}: {status}, {said}", death.name());
}

/// How often each key ran, as whoever did the work counted it.
#[derive(Clone, Debug, Default)]
struct Runs(Arc<Mutex<BTreeMap<String, usize>>>);

impl Runs {
    fn add(&self, key: &str) -> usize {
        let mut runs = self.0.lock();
        let count = runs.entry(key.to_owned()).or_default();
        *count += 1;
        *count
    }

    fn of(&self, key: &str) -> usize {
        self.0.lock().get(key).copied().unwrap_or(0)
    }
}
