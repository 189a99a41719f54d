//! Callers that retry as real ones do: too early, at once, elsewhere, with a changed body, and late.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::future::join_all;
use futures_util::stream;
use http::Response;
use parking_lot::Mutex;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::door::Door;
use crate::history::{Answer, Event, Execution, History, Sent};
use crate::ledger::Order;
use crate::random::Random;

/// How often an operation is tried while things break; what is open then is settled afterwards.
const TRIES: usize = 8;

/// How long an operation is asked after healing at least, however late its turn comes.
const SETTLE_LEAST: Duration = Duration::from_secs(10);

/// Callers, and what they saw.
#[derive(Debug)]
pub struct Callers<D> {
    door: D,
    began: Instant,
    // Part of every key: two runs on one store do not meet.
    run: String,
    // Whether the answers are those of our gateway, which says itself what they are.
    ours: bool,
    pace: Pace,
    events: Mutex<Vec<Event>>,
    begun: AtomicUsize,
    known: Mutex<Known>,
    // Of answers while things break, until somebody takes them.
    times: Mutex<Vec<Duration>>,
    turn: Mutex<Option<Instant>>,
}

/// What is asked again: everything from `first` on, and these.
#[derive(Debug, Default)]
struct Known {
    first: usize,
    elders: Vec<usize>,
}

/// How patient callers are.
#[derive(Clone, Debug)]
pub struct Pace {
    /// One of these is how long a caller waits for an answer.
    pub patience: [Duration; 5],
    /// How long it waits once all is healed.
    pub patience_healed: Duration,
    /// The shortest and the longest pause before it tries again.
    pub pause: (Duration, Duration),
    /// The pause once all is healed.
    pub pause_healed: Duration,
    /// From the begin of one operation to that of the next, over all callers, at least.
    pub between: Duration,
}

impl Default for Pace {
    /// That of real clients, in a hurry.
    fn default() -> Self {
        let ms = Duration::from_millis;
        Self {
            // Some give up long before the work is done.
            patience: [ms(60), ms(400), ms(1500), ms(10_000), ms(10_000)],
            patience_healed: ms(30_000),
            pause: (ms(5), ms(400)),
            pause_healed: ms(100),
            between: Duration::ZERO,
        }
    }
}

impl Known {
    fn pick(&self, newest: usize, random: &mut Random) -> usize {
        let drawn = random.below(self.elders.len() + newest + 1 - self.first);
        self.elders.get(drawn).copied().unwrap_or(self.first + drawn - self.elders.len().min(drawn))
    }
}

impl<D> Callers<D> {
    /// Nobody has asked anything yet; time is counted from `began`. `run` is part of every key. `ours` says whether the answers are those of our gateway,
    /// which says itself what they are.
    pub fn new(door: D, began: Instant, run: String, ours: bool, pace: Pace) -> Self {
        Self {
            door,
            began,
            run,
            ours,
            pace,
            events: Mutex::default(),
            begun: AtomicUsize::new(0),
            known: Mutex::default(),
            times: Mutex::default(),
            turn: Mutex::default(),
        }
    }

    /// How many operations were begun.
    pub fn begun(&self) -> usize {
        self.begun.load(Ordering::SeqCst)
    }

    /// How long ago they began, by their clock.
    pub fn elapsed(&self) -> Duration {
        self.began.elapsed()
    }

    /// What was seen so far, with what the ledger wrote down. See [`History`] for the rest.
    pub fn history(&self, executions: Option<Vec<Execution>>, retried: bool, healed: Duration) -> History {
        let events = self.events.lock().clone();
        History { events, executions, retried, healed, ..History::default() }
    }

    /// What was seen, and is not kept here any longer.
    pub(crate) fn take_events(&self) -> Vec<Event> {
        std::mem::take(&mut *self.events.lock())
    }

    /// Of the operations so far only `elders` are asked again.
    pub(crate) fn forget_all_but(&self, elders: Vec<usize>) {
        *self.known.lock() = Known { first: self.begun(), elders };
    }

    /// How long answers took while things were being broken, since the last time that this was asked.
    pub(crate) fn take_times(&self) -> Vec<Duration> {
        std::mem::take(&mut *self.times.lock())
    }
}

impl<D: Door> Callers<D> {
    /// One caller, at work until `end`.
    pub async fn work(&self, mut random: Random, end: Instant) {
        while self.turn(end).await {
            let operation = self.begun.fetch_add(1, Ordering::SeqCst);
            self.perform(operation, &mut random, end).await;
            // Somebody comes back to something old.
            if random.percent(20) {
                let old = self.known.lock().pick(operation, &mut random);
                self.ask(old, Sent::Original, &mut random).await;
            }
        }
    }

    /// Waits until the next operation may begin. Not past `end`.
    async fn turn(&self, end: Instant) -> bool {
        if self.pace.between > Duration::ZERO {
            let turn = {
                let mut next = self.turn.lock();
                let turn = next.unwrap_or_else(Instant::now).max(Instant::now());
                *next = Some(turn + self.pace.between);
                turn
            };
            sleep_until(turn.min(end)).await;
        }
        Instant::now() < end
    }

    async fn perform(&self, operation: usize, random: &mut Random, end: Instant) {
        for _ in 0..TRIES {
            let copies = if random.percent(25) { 2 + random.below(3) } else { 1 };
            let streams: Vec<_> = (0..copies).map(|copy| random.fork(copy as u64 + 1)).collect();
            random.draw();
            let asked = streams
                .into_iter()
                .map(|mut random| async move { self.ask(operation, Sent::Original, &mut random).await });
            let answers = join_all(asked).await;
            if answers.iter().any(Answer::is_reply) {
                // Only now: a changed body that comes first is the operation.
                if random.percent(20) {
                    self.ask(operation, Sent::Changed, random).await;
                }
                if random.percent(70) {
                    return;
                }
            } else if answers.iter().any(|answer| answer.is_code("outcome-unknown")) {
                return;
            }
            if Instant::now() >= end {
                return;
            }
            let (least, most) = self.pace.pause;
            sleep(random.between(least, most)).await;
        }
    }

    /// After healing: until each operation is answered, or known to be unknown; then once more.
    pub async fn converge(&self, random: &Random, at_once: usize, deadline: Instant) {
        let known: Vec<usize> = {
            let known = self.known.lock();
            known.elders.iter().copied().chain(known.first..self.begun()).collect()
        };
        // Once more after all: an owner that nobody heard of may have come back, and goes on with what was unknown.
        for round in [0, u64::MAX] {
            let settling = known
                .clone()
                .into_iter()
                .map(|operation| self.settle(operation, random.fork(operation as u64 ^ round), deadline));
            stream::iter(settling).buffer_unordered(at_once).collect::<()>().await;
        }
    }

    async fn settle(&self, operation: usize, mut random: Random, deadline: Instant) {
        // A store that is away for a moment, late in a long phase, is not an operation that is stuck.
        let deadline = deadline.max(Instant::now() + SETTLE_LEAST);
        loop {
            let answer = self.patiently(operation, &mut random).await;
            // By the record: whose own run ended so is told 504, and the next may run it again.
            let is_unknown =
                matches!(&answer, Answer::Refused { status: 409, code } if code == "outcome-unknown");
            if answer.is_reply() || is_unknown || Instant::now() >= deadline {
                return;
            }
            sleep(self.pace.pause_healed).await;
        }
    }

    async fn ask(&self, operation: usize, sent: Sent, random: &mut Random) -> Answer {
        let patience = *random.pick(&self.pace.patience);
        let gateway = random.below(self.door.count());
        let began = Instant::now();
        let answer = self.send(operation, sent, gateway, patience).await;
        if !matches!(answer, Answer::Lost(_)) {
            self.times.lock().push(began.elapsed());
        }
        answer
    }

    async fn patiently(&self, operation: usize, random: &mut Random) -> Answer {
        let gateway = self.door.telling(random);
        self.send(operation, Sent::Original, gateway, self.pace.patience_healed).await
    }

    async fn send(&self, operation: usize, sent: Sent, gateway: usize, patience: Duration) -> Answer {
        let key = format!("prove-{}-{operation}", self.run);
        let body = serde_json::to_vec(&Order::new(operation, sent)).unwrap_or_default();
        let began = self.began.elapsed();
        let answered = timeout(patience, self.door.exchange(gateway, &key, body.into())).await;
        let answer = match answered {
            Ok(Ok(response)) => self.read(&response),
            Ok(Err(why)) => Answer::Lost(why),
            Err(_) => Answer::Lost(format!("the client gave up after {} ms", patience.as_millis())),
        };
        let event =
            Event { operation, gateway, sent, began, ended: self.began.elapsed(), answer: answer.clone() };
        self.events.lock().push(event);
        answer
    }

    fn read(&self, response: &Response<Bytes>) -> Answer {
        let status = response.status().as_u16();
        let is = |name: &str, value: &str| {
            response.headers().get(name).is_some_and(|found| found.as_bytes() == value.as_bytes())
        };
        let refused = |code: &str| Answer::Refused { status, code: code.to_owned() };
        if self.ours && is("content-type", "application/problem+json") {
            let problem: serde_json::Value = serde_json::from_slice(response.body()).unwrap_or_default();
            return refused(problem["code"].as_str().unwrap_or_default());
        }
        if !self.ours && !response.status().is_success() {
            // The words of the draft, for servers that say it by the status alone.
            return refused(match status {
                409 => "in-progress",
                422 => "key-reused",
                429 | 500.. => "overloaded",
                _ => "",
            });
        }
        Answer::Reply {
            status,
            body: String::from_utf8_lossy(response.body()).into_owned(),
            replayed: is("idempotency-replayed", "true"),
            unrecorded: is("idempotency-status", "not-recorded"),
        }
    }
}
