//! The Redis store against `redis-benchmark`, and the layer on Redis against a bare handler.

use std::cell::Cell;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use onlyonce_core::{OnLeaseEnd, Store};
use onlyonce_store_redis::RedisStore;
use testkit::{Redis, RedisOptions};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::runtime::Runtime;

use crate::Plan;
use crate::callers::{Caller, on_connections};
use crate::measure::{Comparison, Sample, Subject, Target, series};
use crate::report::Report;
use crate::runtime::workers;
use crate::store::callers_of;

const CLIENTS: usize = 64;
/// As long as a completed record of the benchmark.
const VALUE_BYTES: usize = 330;

/// A private server that keeps nothing on disk, and one that syncs every write.
pub(crate) fn run(plan: &Plan, report: &mut Report) -> Result<()> {
    let runtime = workers()?;
    let _context = runtime.enter();
    for (kind, options) in [("in memory", Redis::options()), ("synced", Redis::options().durable())] {
        let server = start(&runtime, options);
        let store: Arc<dyn Store> = Arc::new(runtime.block_on(RedisStore::open(&server.url()))?);
        let sets = format!("redis-benchmark SET NX, {CLIENTS} clients, {kind}");
        let pairs = format!("redis, {CLIENTS} callers, {kind}");
        let one = format!("redis, 1 caller, {kind}");
        let by_hand = format!("by hand, SET NX and SET XX, {CLIENTS} connections, {kind}");
        let connections = runtime.block_on(ByHand::some(server.port()))?;
        let subjects = vec![
            benchmark(&runtime, &server, &sets),
            on_connections(&runtime, &by_hand, connections),
            emptied(&runtime, &server, &store, &pairs, CLIENTS),
            emptied(&runtime, &server, &store, &one, 1),
        ];
        let comparisons = [
            Comparison::new(&pairs, &sets, Target::Rate(0.6, 1.0)),
            // Two commands, each answered before the next: what one gets without owner, fingerprint or reply.
            Comparison::new(&by_hand, &sets, Target::None),
            Comparison::new(&pairs, &by_hand, Target::None),
        ];
        series(plan, report, &format!("redis, {kind}"), subjects, &comparisons)?;
    }
    Ok(())
}

pub(crate) fn start(runtime: &Runtime, options: RedisOptions) -> Redis {
    runtime.block_on(options.start())
}

fn emptied<'a>(
    runtime: &'a Runtime,
    server: &Redis,
    store: &Arc<dyn Store>,
    name: &str,
    callers: usize,
) -> Subject<'a> {
    let (server, store) = (server.clone(), Arc::clone(store));
    callers_of(runtime, name, callers, OnLeaseEnd::TakeOver, move || {
        runtime.block_on(server.cli(["flushall"]));
        Ok(Arc::clone(&store))
    })
}

/// `SET key value NX PX …` by the server's own benchmark, one command under way on each connection.
fn benchmark<'a>(runtime: &'a Runtime, server: &Redis, name: &str) -> Subject<'a> {
    let server = server.clone();
    // Its length is told in commands: as many as the last rate makes in the time.
    let rate = Cell::new(20_000.0);
    Subject::new(name, move |time: Duration| {
        runtime.block_on(server.cli(["flushall"]));
        let count = (rate.get() * time.as_secs_f64()).max(1000.0) as u64;
        let mut command = server.tool("redis-benchmark")?;
        command.args(["-p", &server.port().to_string(), "-c", &CLIENTS.to_string(), "--csv"]);
        command.args(["-n", &count.to_string(), "-r", "1000000000000"]);
        command.args(["SET", "bench:__rand_int__", &"x".repeat(VALUE_BYTES), "NX", "PX", "86400000"]);
        let sample = sample_of(&mut command)?;
        rate.set(sample.rate);
        Ok(sample)
    })
}

/// The last line of its table: name, rate, then latencies in ms: mean, least, p50, p95, p99, greatest.
fn sample_of(command: &mut Command) -> Result<Sample> {
    let output = command.output().context("run redis-benchmark")?;
    let text = String::from_utf8_lossy(&output.stdout);
    ensure!(output.status.success(), "redis-benchmark: {text}{}", String::from_utf8_lossy(&output.stderr));
    let line = text.lines().last().context("redis-benchmark says nothing")?;
    // The name is the whole command, which holds no quotation mark.
    let fields: Vec<f64> = line.rsplit('"').filter_map(|field| field.parse().ok()).collect();
    let [_, p99, _, p50, _, _, rate] = fields[..] else {
        bail!("redis-benchmark says something else: {line}");
    };
    Ok(Sample { rate, p50_us: p50 * 1000.0, p99_us: p99 * 1000.0, cpu_us: 0.0 })
}

/// A connection that sets a new key and then sets it again.
struct ByHand(TcpStream);

impl ByHand {
    async fn some(port: u16) -> Result<Vec<Self>> {
        let mut some = Vec::with_capacity(CLIENTS);
        for _ in 0..CLIENTS {
            let stream = TcpStream::connect(("127.0.0.1", port)).await.context("connect")?;
            stream.set_nodelay(true)?;
            some.push(Self(stream));
        }
        Ok(some)
    }

    async fn set(&mut self, key: &str, condition: &str) -> Result<()> {
        let value = "x".repeat(VALUE_BYTES);
        let parts = ["SET", key, &value, condition, "PX", "86400000"];
        let command = parts.iter().fold(format!("*{}\r\n", parts.len()), |command, part| {
            command + &format!("${}\r\n{part}\r\n", part.len())
        });
        self.0.write_all(command.as_bytes()).await?;
        let mut answer = [0; 5];
        self.0.read_exact(&mut answer).await?;
        if &answer != b"+OK\r\n" {
            bail!("SET {condition}: {}", String::from_utf8_lossy(&answer));
        }
        Ok(())
    }
}

impl Caller for ByHand {
    async fn once(&mut self, key: String) -> Result<()> {
        self.set(&key, "NX").await?;
        self.set(&key, "XX").await
    }
}
