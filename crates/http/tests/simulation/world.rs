//! One seed: gateways, a store, a ledger, callers and a nemesis, a millisecond at a time.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt;
use futures_util::future::join_all;
use http::Response;
use onlyonce_core::{
    ClaimOutcome, ClaimRequest, Completion, Fingerprint, Key, LeaseToken, MemoryStore, OnLeaseEnd, Operation,
    Reply, Scope, Store,
};
use onlyonce_prove::{Callers, Door, Fault, History, Pace, Random, Report, judge};
use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::ledger::Ledger;
use crate::network::Network;
use crate::process::{Arrived, Process, Stepped};
use crate::store::Remote;
use crate::{BREAKING, CALLERS, HEALING, LEASE, PROCESSES};

/// What came of a seed.
pub(crate) struct Outcome {
    pub(crate) report: Report,
    pub(crate) history: History,
    /// Records of passers-by that the purge took.
    pub(crate) purged: u64,
}

/// Plays this seed. Equal seeds, equal outcomes.
pub(crate) fn play(seed: u64) -> Outcome {
    let mut random = Random::new(seed);
    let network = Network::new(random.fork(1), PROCESSES);
    let began_ms = network.now_ms();
    let (store, ledger) = (MemoryStore::with_clock(Arc::new(network.clone())), Ledger::new(began_ms));
    let retried = random.percent(33);
    let on_lease_end = if retried { OnLeaseEnd::TakeOver } else { OnLeaseEnd::Hold };
    let wait = if random.percent(50) { Duration::ZERO } else { LEASE / 3 };
    let mut processes: Vec<_> = (0..PROCESSES)
        .map(|link| {
            let remote = Remote { network: network.clone(), link, store: store.clone() };
            Process::new(remote, ledger.clone(), on_lease_end, wait)
        })
        .collect();

    let outside = Stepped::new(began_ms);
    let began = outside.runtime.block_on(async { Instant::now() });
    let callers =
        Arc::new(Callers::new(SimulatedDoor(network.clone()), began, seed.to_string(), true, pace()));
    let asking = outside.runtime.spawn(ask(callers.clone(), network.clone(), random.fork(2)));

    let mut nemesis = Nemesis { network: network.clone(), random: random.fork(3), next_ms: 0 };
    let mut passers = Passers { network: network.clone(), store: store.clone(), count: 0 };
    let mut order: Vec<usize> = (0..PROCESSES).collect();
    while !asking.is_finished() {
        let now_ms = network.tick();
        if now_ms - began_ms < BREAKING.as_millis() as u64 {
            nemesis.step(&mut processes);
            passers.step(now_ms);
        }
        while let Some(event) = network.arrival() {
            event(&mut processes);
        }
        // Which of them is first in a millisecond is chance.
        for at in 0..order.len() {
            let with = at + random.below(order.len() - at);
            order.swap(at, with);
        }
        order.iter().for_each(|number| processes[*number].step());
        outside.step(now_ms);
    }
    let healed = outside.runtime.block_on(asking).unwrap();
    let history = callers.history(Some(ledger.executions()), retried, healed);
    let violations = judge(&history);
    let took = callers.elapsed();
    let report = Report::new(seed, callers.begun(), network.counts(), took, history.clone(), violations);
    Outcome { report, history, purged: network.purged() }
}

/// Everything is some ten times as fast as in the world.
fn pace() -> Pace {
    let ms = Duration::from_millis;
    Pace {
        patience: [ms(4), ms(30), ms(120), ms(900), ms(900)],
        patience_healed: ms(2000),
        pause: (ms(1), ms(40)),
        pause_healed: ms(20),
        between: Duration::ZERO,
    }
}

async fn ask(callers: Arc<Callers<SimulatedDoor>>, network: Network, random: Random) -> Duration {
    let end = Instant::now() + BREAKING;
    join_all((0..CALLERS).map(|caller| callers.work(random.fork(10 + caller as u64), end))).await;
    network.heal();
    let healed = callers.elapsed();
    callers.converge(&random.fork(1), CALLERS * 4, Instant::now() + HEALING).await;
    healed
}

struct SimulatedDoor(Network);

/// A caller that goes away before its answer is there hangs up.
struct Connection {
    network: Network,
    gateway: usize,
    number: u64,
}

impl Drop for Connection {
    fn drop(&mut self) {
        let (gateway, number) = (self.gateway, self.number);
        let after_ms = self.network.draw(|random| random.draw() % 3);
        self.network.after(after_ms, Box::new(move |processes| processes[gateway].hang_up(number)));
    }
}

impl Door for SimulatedDoor {
    fn count(&self) -> usize {
        PROCESSES
    }

    fn exchange(
        &self,
        gateway: usize,
        key: &str,
        body: Bytes,
    ) -> impl Future<Output = Result<Response<Bytes>, String>> + Send {
        let (network, key) = (self.0.clone(), key.to_owned());
        async move {
            let (to, answer) = oneshot::channel();
            let (connection, there_ms) = network.draw(|random| (random.draw(), random.draw() % 3));
            let arrived = Arrived { connection, key, body, to };
            network.after(there_ms, Box::new(move |processes| processes[gateway].serve(arrived)));
            let _connection = Connection { network, gateway, number: connection };
            answer.await.map_err(|_| "the connection broke".to_owned())
        }
    }
}

/// What breaks things.
struct Nemesis {
    network: Network,
    random: Random,
    next_ms: u64,
}

impl Nemesis {
    fn step(&mut self, processes: &mut [Process]) {
        let now_ms = self.network.now_ms();
        if self.next_ms > now_ms {
            return;
        }
        let first = self.next_ms == 0;
        self.next_ms = now_ms + 5 + self.random.draw() % 90;
        if first {
            return;
        }
        let number = self.random.below(processes.len());
        let long_ms = LEASE.as_millis() as u64 / 4 + self.random.draw() % (2 * LEASE.as_millis() as u64);
        let fault =
            *self.random.pick(&[Fault::Kill, Fault::Pause, Fault::Cut, Fault::RestartStore, Fault::Slow]);
        match fault {
            Fault::Kill => processes[number].kill(self.random.draw() % 60),
            Fault::Pause => processes[number].hold(long_ms),
            Fault::Cut => self.network.cut(number, self.random.percent(50), long_ms),
            Fault::Slow => self.network.slow_down(number, long_ms),
            // Nobody reaches it for a while; what it acknowledged it has.
            Fault::RestartStore => {
                for link in 0..processes.len() {
                    self.network.cut(link, false, long_ms / 4);
                }
            }
            Fault::LoseReply => {}
        }
        self.network.count(fault);
    }
}

/// Others on the same store, whose records expire soon: what the purge is there for.
struct Passers {
    network: Network,
    store: MemoryStore,
    count: usize,
}

impl Passers {
    fn step(&mut self, now_ms: u64) {
        if !now_ms.is_multiple_of(40) {
            return;
        }
        let key = Key::new(format!("passer {}", self.count)).unwrap();
        let operation = Operation::new(Scope::anonymous(), key, Fingerprint::of("passer"));
        let token = self.network.draw(|random| LeaseToken::from_bytes([random.draw() as u8; 16]));
        let retention = Duration::from_millis(30);
        let (lease, on_lease_end, max_attempts) = (LEASE, OnLeaseEnd::Hold, 1);
        let request =
            ClaimRequest { token, lease, retention, on_lease_end, takeover_now: false, max_attempts };
        let completion = Completion { token, attempt: 1, reply: Reply::ok(""), retention };
        let passing = async {
            if let Ok(ClaimOutcome::Acquired(_)) = self.store.claim(&operation, &request).await {
                self.store.complete(&operation, &completion).await.unwrap();
                self.count += 1;
            }
        };
        let _ = passing.now_or_never();
    }
}
