//! How much memory `onlyonce serve` holds with many connections at work on a store of many records.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Args;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde::Serialize;

use crate::Plan;
use crate::gateway::{self, Server};
use crate::keys::Keys;
use crate::load::{self, Request};
use crate::{store, upstream};

/// How many, and which program.
#[derive(Clone, Debug, Args)]
pub(crate) struct MemoryPlan {
    /// Connections, which stay open.
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    connections: u32,
    /// Requests under way at once all the time; the connections take turns.
    #[arg(long, default_value_t = load::CONNECTIONS as u32, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    at_work: u32,
    /// Records in the store at the start.
    #[arg(long, default_value_t = 1_000_000)]
    rows: u64,
    /// How long the load lasts: long enough to fill what is bounded.
    #[arg(long = "for", value_name = "TIME", default_value = "60s", value_parser = humantime::parse_duration)]
    time: Duration,
    /// More at the peak is an error, in MiB.
    #[arg(long, value_name = "MIB", default_value_t = 64)]
    ceiling: u64,
    /// The gateway, as a release build. Default: `onlyonce` beside this program.
    #[arg(long = "memory-program", value_name = "FILE")]
    program: Option<PathBuf>,
    /// More options for the gateway, such as --cache-bytes=64MiB
    #[arg(last = true)]
    serve: Vec<String>,
}

/// Resident memory of the process, in MiB.
#[derive(Debug, Serialize)]
struct Held {
    connections: u32,
    at_work: u32,
    rows: u64,
    requests_a_second: f64,
    ready_mib: f64,
    peak_mib: f64,
    afterwards_mib: f64,
    /// Of it, what is mapped from the program's file and shared with others.
    file_mib: f64,
}

impl MemoryPlan {
    /// As short as shows that it runs.
    pub(crate) fn quick(program: Option<PathBuf>) -> Self {
        let time = Duration::from_secs(1);
        Self { connections: 100, at_work: 10, rows: 1000, time, ceiling: 64, program, serve: Vec::new() }
    }
}

pub(crate) fn run(plan: &Plan, memory: &MemoryPlan) -> Result<()> {
    // Two sockets a connection are here: the client's and the service's.
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit })?;
    let folder = plan.folder()?;
    store::filled(&folder.path().join("gateway.db"), memory.rows)?;
    let upstream = upstream::start()?;
    let mut start = gateway::gateway(memory.program.as_deref(), folder.path(), upstream)?;
    start.command.args(&memory.serve);
    let server = Server::start(start)?;
    let of = |field: &str| resident_mib(server.pid(), field);
    let ready_mib = of("VmRSS:")?;
    let (post, keys) = (Request::new("POST"), Arc::new(Keys::unique()));
    let (connections, at_work) = (memory.connections, memory.at_work.min(memory.connections));
    let sample =
        load::run_on(connections as usize, at_work as usize, server.addr, &post, &keys, memory.time)?;
    let held = Held {
        connections,
        at_work,
        rows: memory.rows,
        requests_a_second: sample.rate,
        ready_mib,
        peak_mib: of("VmHWM:")?,
        afterwards_mib: of("VmRSS:")?,
        file_mib: of("RssFile:")?,
    };
    match plan.json {
        true => println!("{}", serde_json::to_string_pretty(&held)?),
        false => println!(
            "{} connections, {} at work, {} records, {:.0} requests a second: {:.1} MiB when ready, {:.1} at the peak, {:.1} afterwards; {:.1} of it the \
             program's file",
            held.connections,
            held.at_work,
            held.rows,
            held.requests_a_second,
            ready_mib,
            held.peak_mib,
            held.afterwards_mib,
            held.file_mib
        ),
    }
    ensure!(held.peak_mib <= memory.ceiling as f64, "more than {} MiB at the peak", memory.ceiling);
    Ok(())
}

fn resident_mib(pid: u32, field: &str) -> Result<f64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).context("the gateway has ended")?;
    let value = status.lines().find_map(|line| line.strip_prefix(field)).context("it has ended")?;
    let kib: f64 = value.trim_end_matches("kB").trim().parse()?;
    Ok(kib / 1024.0)
}
