//! What a process holds, looked at from outside, and whether that stays.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use onlyonce_prove::gauge::{Held, TELLS_AFTER, Trend, held, median, share_ms};
use serde::Serialize;

use super::mix::{Count, Exchanged};

const MIB: f64 = 1024.0 * 1024.0;
/// A file of records may end so much above where it was: it is filled page by page.
const STORE_MIB: f64 = 2.0;

/// Looks at one process.
pub(crate) struct Gauge {
    pid: u32,
    folder: PathBuf,
}

/// One look.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Look {
    seconds: f64,
    #[serde(flatten)]
    held: Held,
    store_mib: f64,
    answers: usize,
    p50_ms: f64,
    p99_ms: f64,
}

impl Gauge {
    pub(crate) fn new(pid: u32, folder: PathBuf) -> Self {
        Self { pid, folder }
    }

    /// The times are those of the answers since the last look.
    pub(crate) fn look(&self, after: Duration, mut times: Vec<Duration>) -> Result<Look> {
        let held = held(self.pid).context("the gateway has ended")?;
        let store: u64 = ["gateway.db", "gateway.db-wal"]
            .iter()
            .filter_map(|name| Some(fs::metadata(self.folder.join(name)).ok()?.len()))
            .sum();
        let mut at = |share| share_ms(&mut times, share).unwrap_or(f64::NAN);
        let (p50_ms, p99_ms) = (at(0.5), at(0.99));
        Ok(Look {
            seconds: after.as_secs_f64(),
            held,
            store_mib: store as f64 / MIB,
            answers: times.len(),
            p50_ms,
            p99_ms,
        })
    }
}

/// What came out.
#[derive(Debug, Serialize)]
pub(crate) struct Soaked {
    seconds: f64,
    exchanges_a_second: u32,
    requests: u64,
    ran: u64,
    kinds: Vec<Count>,
    looks: Vec<Look>,
    memory: Option<Trend>,
    descriptors: Option<Trend>,
    store: Option<Trend>,
    p99: Option<Trend>,
}

impl Soaked {
    pub(crate) fn new(time: Duration, exchanges_a_second: u32) -> Self {
        Self {
            seconds: time.as_secs_f64(),
            exchanges_a_second,
            requests: 0,
            ran: 0,
            kinds: Vec::new(),
            looks: Vec::new(),
            memory: None,
            descriptors: None,
            store: None,
            p99: None,
        }
    }

    pub(crate) fn add(&mut self, look: Look) {
        eprintln!(
            "soak: {:>5.0} s, {:.1} MiB, {} descriptors, store {:.1} MiB, p99 {:.1} ms of {}",
            look.seconds,
            look.held.memory_mib,
            look.held.descriptors,
            look.store_mib,
            look.p99_ms,
            look.answers
        );
        self.looks.push(look);
    }

    pub(crate) fn finish(&mut self, exchanged: &Exchanged, ran: u64) {
        self.requests = exchanged.requests();
        self.ran = ran;
        self.kinds = exchanged.counts();
        if self.seconds < TELLS_AFTER.as_secs_f64() {
            return;
        }
        self.memory = self.trend(|look| look.held.memory_mib, Trend::of_memory);
        self.descriptors = self.trend(|look| look.held.descriptors as f64, Trend::of_descriptors);
        let of_store = |early, late| Trend { early, late, flat: late <= early * 1.25 + STORE_MIB };
        self.store = self.trend(|look| look.store_mib, of_store);
        self.p99 = self.trend(|look| look.p99_ms, Trend::of_time);
    }

    fn trend(&self, of: fn(&Look) -> f64, judged: impl Fn(f64, f64) -> Trend) -> Option<Trend> {
        let fifth = |n: usize| {
            let len = self.looks.len();
            median(self.looks[len * n / 5..len * (n + 1) / 5].iter().map(of))
        };
        Some(judged(fifth(1)?, fifth(4)?))
    }

    /// Fails when memory or descriptors grew; times are a matter of the machine.
    pub(crate) fn print(&self, json: bool) -> Result<()> {
        if json {
            println!("{}", serde_json::to_string_pretty(self)?);
        } else {
            self.print_tables();
        }
        let grew = |trend: Option<Trend>| trend.is_some_and(|trend| !trend.flat);
        anyhow::ensure!(!grew(self.memory), "memory is not flat");
        anyhow::ensure!(!grew(self.descriptors), "open descriptors are not flat");
        Ok(())
    }

    fn print_tables(&self) {
        println!(
            "| minutes | memory MiB | descriptors | store MiB | p50 ms | p99 ms |\n| --- | --- | --- | --- | --- | --- |"
        );
        let step = self.looks.len().div_ceil(12).max(1);
        for look in self.looks.iter().skip(step - 1).step_by(step) {
            println!(
                "| {:.1} | {:.1} | {} | {:.1} | {:.1} | {:.1} |",
                look.seconds / 60.0,
                look.held.memory_mib,
                look.held.descriptors,
                look.store_mib,
                look.p50_ms,
                look.p99_ms
            );
        }
        println!("\n| what clients did | times |\n| --- | --- |");
        for Count { kind, count } in &self.kinds {
            println!("| {kind} | {count} |");
        }
        println!("\n{} requests in {:.0} s; {} ran, each once", self.requests, self.seconds, self.ran);
        let trends = [
            ("memory MiB", self.memory),
            ("descriptors", self.descriptors),
            ("store MiB", self.store),
            ("p99 ms", self.p99),
        ];
        for (what, trend) in trends {
            match trend {
                None => println!("{what}: too short to say"),
                Some(Trend { early, late, flat }) => {
                    let verdict = if flat { "flat" } else { "NOT FLAT" };
                    println!("{what}: {early:.1} in the second fifth, {late:.1} in the last: {verdict}");
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn soaked(memory: impl Fn(usize) -> f64) -> Soaked {
        let mut soaked = Soaked::new(Duration::from_secs(3600), 1);
        soaked.looks = (0..100)
            .map(|n| Look {
                seconds: n as f64,
                held: Held { memory_mib: memory(n), descriptors: n as u64 },
                store_mib: 1.0,
                answers: 1,
                p50_ms: 1.0,
                p99_ms: f64::NAN,
            })
            .collect();
        soaked.finish(&Exchanged::default(), 0);
        soaked
    }

    #[test]
    fn what_fills_at_first_is_flat_and_what_goes_on_growing_is_not() {
        let filled = soaked(|n| 30.0 - 20.0 / (1.0 + n as f64));
        assert!(filled.memory.unwrap().flat && filled.p99.is_none() && filled.store.unwrap().flat);
        assert!(!filled.descriptors.unwrap().flat);
        assert!(filled.print(true).unwrap_err().to_string().contains("descriptors"));
        assert!(!soaked(|n| 30.0 + n as f64 / 10.0).memory.unwrap().flat);
    }
}
