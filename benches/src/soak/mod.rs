//! `onlyonce serve` under mixed load for an hour: does its memory stay, do its descriptors, and does everything run once?

mod gauges;
mod mix;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use testkit::{Answer, Seen, Upstream};
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval_at};

use crate::Plan;
use crate::gateway::{self, Server};
use crate::runtime::workers;
use gauges::{Gauge, Soaked};
use mix::{Caller, Exchanged};

/// How long, how hard, and which program.
#[derive(Clone, Debug, Args)]
pub(crate) struct SoakPlan {
    /// How long: 30s, 10m, 1h
    #[arg(long = "for", value_name = "TIME", default_value = "1h", value_parser = humantime::parse_duration)]
    time: Duration,
    /// Exchanges that are begun each second; one may be several requests.
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..))]
    rate: u32,
    /// The gateway, as a release build. Default: `onlyonce` beside this program.
    #[arg(long = "soak-program", value_name = "FILE")]
    program: Option<PathBuf>,
}

/// Connections that are kept, half of them HTTP/2.
const CALLERS: u32 = 16;

impl SoakPlan {
    /// As short as shows that it runs.
    pub(crate) fn quick(program: Option<PathBuf>) -> Self {
        Self { time: Duration::from_secs(3), rate: 100, program }
    }
}

pub(crate) fn run(plan: &Plan, soak: &SoakPlan) -> Result<Soaked> {
    let folder = plan.folder()?;
    workers()?.block_on(async {
        let upstream = Upstream::options().forget().start(answer).await;
        let mut start = gateway::gateway(soak.program.as_deref(), folder.path(), upstream.addr())?;
        // What is kept for a while only is full within minutes, so that an hour shows what stays.
        start.command.args(["--retention", "3m", "--cache-bytes", "4MiB", "--log", "json"]);
        let server = Server::start(start)?;
        let gauge = Gauge::new(server.pid(), folder.path().to_owned());
        let exchanged = Arc::new(Exchanged::default());
        let callers = begin(server.addr, soak, &exchanged);
        let mut soaked = watch(soak, &gauge, &exchanged, callers).await?;
        let (ran, due) = (upstream.count() as u64, exchanged.runs_due());
        ensure!(ran == due, "the service behind ran {ran} requests; {due} were due");
        soaked.finish(&exchanged, ran);
        Ok(soaked)
    })
}

/// The service behind: slow where the path says so, long where it says so.
fn answer(seen: &Seen) -> Answer {
    let answer = match seen.path() {
        "/slow" => Answer::new(201, "slowly").delay(Duration::from_millis(150)),
        "/long" => Answer::bytes(256 << 10).status(201),
        "/longer-than-stored" => Answer::bytes(1536 << 10).status(201),
        _ => Answer::new(201, crate::upstream::REPLY_BODY),
    };
    answer.header("content-type", "application/json")
}

/// Callers that begin an exchange each, in turn, until the time is over.
fn begin(gateway: SocketAddr, soak: &SoakPlan, exchanged: &Arc<Exchanged>) -> JoinSet<Result<()>> {
    let mut callers = JoinSet::new();
    let period = Duration::from_secs(1) * CALLERS / soak.rate;
    let start = Instant::now();
    let end = start + soak.time;
    for number in 0..CALLERS {
        let mut caller = Caller::new(gateway, number, exchanged.clone());
        callers.spawn(async move {
            let mut turn = interval_at(start + period * number / CALLERS, period);
            turn.set_missed_tick_behavior(MissedTickBehavior::Delay);
            while turn.tick().await < end {
                caller.exchange().await.with_context(|| format!("caller {number}"))?;
            }
            Ok(())
        });
    }
    callers
}

/// Looks at the process until the callers are done; the first of them that fails ends it all.
async fn watch(
    soak: &SoakPlan,
    gauge: &Gauge,
    exchanged: &Exchanged,
    mut callers: JoinSet<Result<()>>,
) -> Result<Soaked> {
    let mut soaked = Soaked::new(soak.time, soak.rate);
    let start = Instant::now();
    let every = (soak.time / 240).max(Duration::from_secs(1));
    let mut look = interval_at(start + every, every);
    loop {
        tokio::select! {
            done = callers.join_next() => match done {
                None => break,
                Some(Err(panic)) => bail!("a caller ended: {panic}"),
                Some(Ok(result)) => result?,
            },
            _ = look.tick() => {
                soaked.add(gauge.look(start.elapsed(), exchanged.take_times())?);
            }
        }
    }
    Ok(soaked)
}
