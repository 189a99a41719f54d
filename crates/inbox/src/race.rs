//! A race of processes: all are started, wait at one barrier, and go at once.

use std::io::{self, Read, Write};
use std::process::{Child, Command, Stdio};

use onlyonce_core::{Clock, SystemClock};
use serde::{Deserialize, Serialize};

/// Says that a racer has come to the barrier.
const READY: u8 = b'r';

/// What one racer did, and when.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Attempt {
    started_ns: u64,
    ended_ns: u64,
    /// How it ended.
    pub result: AttemptResult,
}

/// How one racer ended.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum AttemptResult {
    /// It applied the message.
    Applied,
    /// It found it applied.
    Duplicate,
    /// The work failed for good.
    Failed,
    /// It was kept from an answer; why.
    Error(String),
}

/// What came out of a race.
#[derive(Clone, Debug)]
pub struct RaceReport {
    /// Each racer, in the order in which they were started.
    pub attempts: Vec<Attempt>,
    /// The greatest number of racers that were at it at the same moment.
    pub active_together_max: usize,
}

/// Starts `attempts` processes, waits until all of them stand at the barrier, opens it, and waits for their ends.
///
/// `command` makes the command of a racer, which calls [`racer`]; its standard input is the barrier, the same for all.
///
/// # Errors
/// When a process cannot be started, or ends before the barrier.
pub fn race(attempts: usize, mut command: impl FnMut() -> io::Result<Command>) -> io::Result<RaceReport> {
    let (gate, hold) = io::pipe()?;
    let mut racers = Racers(Vec::new());
    for _ in 0..attempts {
        let mut command = command()?;
        command.stdin(Stdio::from(gate.try_clone()?)).stdout(Stdio::piped());
        racers.0.push(command.spawn()?);
    }
    for racer in &mut racers.0 {
        let mut ready = [0];
        racer.stdout.as_mut().expect("it is piped").read_exact(&mut ready)?;
    }
    // The end of the pipe is the start for all of them.
    drop(hold);
    let attempts: Vec<Attempt> = racers.0.iter_mut().map(result).collect::<io::Result<_>>()?;
    let active_together_max = most_together(&attempts);
    Ok(RaceReport { attempts, active_together_max })
}

/// What a racer does: prepares, waits at the barrier that is its standard input, goes, and says on standard output what
/// came out.
///
/// # Errors
/// When the race is over before it began.
pub fn racer(go: impl FnOnce() -> AttemptResult) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(&[READY])?;
    out.flush()?;
    io::copy(&mut io::stdin().lock(), &mut io::sink())?;
    let started_ns = now_ns();
    let result = go();
    let attempt = Attempt { started_ns, ended_ns: now_ns(), result };
    serde_json::to_writer(&mut out, &attempt)?;
    out.flush()
}

fn result(racer: &mut Child) -> io::Result<Attempt> {
    let mut said = String::new();
    racer.stdout.as_mut().expect("it is piped").read_to_string(&mut said)?;
    let status = racer.wait()?;
    serde_json::from_str(&said)
        .map_err(|error| io::Error::other(format!("a process of the race ended with {status}: {error}")))
}

/// Ends what is left of them when the race cannot be held.
struct Racers(Vec<Child>);

impl Drop for Racers {
    fn drop(&mut self) {
        for racer in &mut self.0 {
            // Fails for one that has ended, and that is what is wanted.
            let _ = racer.kill();
            let _ = racer.wait();
        }
    }
}

fn most_together(attempts: &[Attempt]) -> usize {
    // At the same instant an end comes first.
    let starts = attempts.iter().map(|attempt| (attempt.started_ns, true));
    let ends = attempts.iter().map(|attempt| (attempt.ended_ns, false));
    let mut moments: Vec<(u64, bool)> = starts.chain(ends).collect();
    moments.sort_unstable_by_key(|(at, is_start)| (*at, *is_start));
    let (mut active, mut most) = (0_usize, 0);
    for (_, is_start) in moments {
        active = if is_start { active + 1 } else { active.saturating_sub(1) };
        most = most.max(active);
    }
    most
}

fn now_ns() -> u64 {
    u64::try_from(SystemClock.boot().as_nanos()).unwrap_or(u64::MAX)
}

#[test]
fn the_most_at_the_same_moment_are_counted() {
    let attempt = |started_ns, ended_ns| Attempt { started_ns, ended_ns, result: AttemptResult::Duplicate };
    assert_eq!(most_together(&[attempt(0, 10), attempt(5, 20), attempt(10, 30), attempt(12, 13)]), 3);
    assert_eq!(most_together(&[attempt(0, 10), attempt(10, 20)]), 1);
    assert_eq!(most_together(&[]), 0);
}
