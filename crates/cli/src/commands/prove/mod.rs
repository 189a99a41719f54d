//! `onlyonce prove`: breaks gateways and their store on purpose, and judges what came of it.

mod shop;

use std::fs::File;
use std::io::{self, Write, stderr, stdout};
use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, ValueEnum};
use indicatif::{ProgressBar, ProgressStyle};
use onlyonce_prove::plan::{Gateways, Inbox};
use onlyonce_prove::{Fault, OnUnknown, Plan, ProveError, Report, Target, Work, WorkAt};

use super::units::duration;
use crate::failure::Failure;

/// Try to break it: that nothing runs twice and nothing acknowledged is lost.
///
/// Starts gateways of this program on one store, before an upstream that writes every execution down and has no uniqueness of
/// its own; callers that retry as real ones do; and a nemesis. Then it heals, waits until all converges, and checks the
/// history. All of it is on this machine, and ends with the command; in a store of your own the records of the run stay.
/// With `--door inbox` each message is delivered three times
/// and more by processes of `onlyonce inbox`, which are killed and stopped at any point.
#[derive(Debug, Args)]
#[command(after_help = "\
Faults:
  kill           kill -9 of a gateway, and a new one in its place; or of a process that delivers a message
  pause          a gateway, or such a process, is stopped for longer than its lease, and goes on
  restart-store  the command of --restart-store-cmd
  cut            connections to the store break, or nothing passes for longer than a lease
  lose-reply     a change of the store is made, and its answer is lost
  slow           everything between a gateway and its store takes longer
  The last three need a store behind a network; an inbox has the first two. Without --faults: all that there are.

Exit codes:
  0   every promise held
  1   one did not: the history of the operation at fault is printed
  2   the command line is wrong
  3   the store or the target cannot be reached, or a gateway does not start
  74  a file or the terminal failed

Examples:
  onlyonce prove --for 60s
  onlyonce prove --store postgres://localhost/test --faults kill,pause,cut,lose-reply --seed 7
  onlyonce prove --door inbox --work exec
  onlyonce prove --door transaction --store mysql://root@localhost/test
  onlyonce prove --for 1h --rate 20 --plot soak.svg
  onlyonce prove --target http://127.0.0.1:3000/charges --for 30s")]
pub(crate) struct Prove {
    /// What is put to the proof: gateways before a service; an inbox; or shops of this program, whose work is in the
    /// transaction of its record in a database of SQLite, PostgreSQL, MySQL or MariaDB (reached without TLS)
    #[arg(long, value_name = "DOOR", default_value = "gateway")]
    door: Door,
    /// What the inbox does with a message: a statement in the transaction of its record (exactly once), or a command (at
    /// least once, with one response for all)
    #[arg(long, value_name = "WORK", default_value = "sql")]
    work: WorkArg,
    /// Where the gateways keep their records; by default a SQLite file that is removed afterwards
    #[arg(long, value_name = "URL", env = "ONLYONCE_PROVE_STORE", hide_env_values = true)]
    store: Option<String>,
    /// The number that decides what is random; by default another one each time, which is printed
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// How long to break
    #[arg(long = "for", value_name = "TIME", default_value = "30s", value_parser = duration)]
    breaking: Duration,
    /// How long it may take to converge afterwards
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = duration)]
    healing: Duration,
    /// Heal, judge and forget after so much of it each time, and go on with the same gateways: of what was judged some
    /// operations are kept, and asked again. A long run takes the memory of one round
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = duration)]
    round: Duration,
    /// Which faults, separated by commas
    #[arg(long, value_name = "FAULT", value_delimiter = ',')]
    faults: Option<Vec<Fault>>,
    /// Gateways on the store
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u8).range(1..=64))]
    gateways: u8,
    /// Callers at work at the same time
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..=1024))]
    callers: u16,
    /// Begin so many operations a second at most, each of them a request or more; without it, as many as the callers can
    #[arg(long, value_name = "N")]
    rate: Option<NonZeroU32>,
    /// What the gateways do with an outcome that nobody knows: hold it, or run it again, which may be more than once
    #[arg(long, value_name = "HOW", default_value = "hold", value_parser = on_unknown)]
    on_unknown: OnUnknown,
    /// The lease of the gateways: short, so that it is over before a pause is
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = duration)]
    lease: Duration,
    /// A shell command that restarts the store, or kills and starts it, and ends when it is back
    #[arg(long, value_name = "COMMAND")]
    restart_store_cmd: Option<String>,
    /// A server that is there, in place of gateways: callers alone misbehave, and its answers are judged. It must take
    /// JSON, and answer each execution with a body of its own
    #[arg(long, value_name = "URL", conflicts_with_all = ["door", "store", "faults", "gateways", "on_unknown", "lease", "restart_store_cmd"])]
    target: Option<http::Uri>,
    /// Be one of the shops of `--door transaction`
    #[arg(long, value_name = "ADDRESS", hide = true, requires = "ledger")]
    shop: Option<SocketAddr>,
    /// The table that a shop writes what it did into
    #[arg(long, value_name = "NAME", hide = true)]
    ledger: Option<String>,
    /// Print the report as JSON
    #[arg(long)]
    json: bool,
    /// Draw the memory and the descriptors of the gateways, and the latency of answers, over time: a file of SVG
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Door {
    Gateway,
    Inbox,
    Transaction,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum WorkArg {
    Sql,
    Exec,
}

impl Prove {
    pub(crate) fn run(self) -> Result<(), Failure> {
        if let (Some(listen), Some(ledger)) = (self.shop, &self.ledger) {
            let runtime = super::runtime(tokio::runtime::Builder::new_multi_thread())?;
            return runtime.block_on(shop::serve(listen, &self.store_url(), ledger));
        }
        let folder = tempfile::tempdir().map_err(|error| Failure::io("a temporary folder", &error))?;
        let plan = self.plan(folder.path().to_owned())?;
        plan.check().map_err(|error| Failure::Usage(error.to_string()))?;
        // What cannot be written is found out before an hour is over.
        let unwritable = |error: &io::Error| {
            Failure::io(&self.plot.as_deref().unwrap_or(Path::new("")).display().to_string(), error)
        };
        let plot = self.plot.as_ref().map(File::create).transpose().map_err(|error| unwritable(&error))?;
        self.announce(&plan)?;
        let runtime = super::runtime(tokio::runtime::Builder::new_multi_thread())?;
        let report = runtime.block_on(watched(&plan))?;
        if let Some((mut file, drawn)) = plot.zip(report.plot(&subject(&plan))) {
            file.write_all(drawn.as_bytes()).map_err(|error| unwritable(&error))?;
        }
        let text = if self.json { report.json() } else { report.text() };
        match stdout().lock().write_all(text.as_bytes()).map_err(Failure::from) {
            // Whoever reads no further must still not take it for a success.
            Ok(()) | Err(Failure::ReaderGone) if !report.holds() => Err(Failure::Found),
            printed => printed,
        }
    }

    fn plan(&self, folder: PathBuf) -> Result<Plan, Failure> {
        let seed = match self.seed {
            Some(seed) => seed,
            None => random_seed()?,
        };
        let program = || std::env::current_exe().map_err(|error| Failure::io("this program", &error));
        let target = match &self.target {
            Some(url) => server(url)?,
            None if self.door == Door::Inbox => {
                self.refuse_what_is_no_inboxs()?;
                let work = if self.work == WorkArg::Exec { Work::Exec } else { Work::Sql };
                Target::Inbox(Inbox { program: program()?, work, lease: self.lease, folder })
            }
            None => Target::Gateways(Gateways {
                program: program()?,
                work_at: if self.door == Door::Transaction { WorkAt::Transaction } else { WorkAt::Upstream },
                store: self.store_url(),
                count: self.gateways.into(),
                lease: self.lease,
                on_unknown: self.on_unknown,
                environment: Vec::new(),
                folder,
                restart_store: self.restart_store_cmd.clone(),
            }),
        };
        let plan = |faults| Plan {
            target: target.clone(),
            seed,
            breaking: self.breaking,
            healing: self.healing,
            round: self.round,
            callers: self.callers.into(),
            rate: self.rate,
            faults,
        };
        Ok(match &self.faults {
            Some(faults) => plan(faults.clone()),
            None => plan(Fault::ALL.into_iter().filter(|fault| plan(vec![*fault]).check().is_ok()).collect()),
        })
    }

    fn store_url(&self) -> String {
        self.store.clone().unwrap_or_else(|| "sqlite:prove.db".into())
    }

    fn refuse_what_is_no_inboxs(&self) -> Result<(), Failure> {
        let of_gateways =
            [("--store", self.store.is_some()), ("--restart-store-cmd", self.restart_store_cmd.is_some())];
        match of_gateways.into_iter().find(|(_, given)| *given) {
            Some((option, _)) => Err(Failure::Usage(format!(
                "{option} is of no use with --door inbox: it makes a file of its own"
            ))),
            None if self.lease < Duration::from_secs(1) => {
                Err(Failure::Usage("--lease of an inbox is a second or more".into()))
            }
            None => Ok(()),
        }
    }

    fn announce(&self, plan: &Plan) -> Result<(), Failure> {
        let names: Vec<_> = plan.faults.iter().map(|fault| fault.name()).collect();
        let faults =
            if names.is_empty() { "no faults but those of callers".into() } else { names.join(", ") };
        let what = subject(plan);
        writeln!(stderr(), "seed {}: {what} for {:?}; {faults}", plan.seed, plan.breaking)?;
        Ok(())
    }
}

/// Who asks whom. A store by its scheme: its URL may hold a password.
fn subject(plan: &Plan) -> String {
    match &plan.target {
        Target::Server { authority, .. } => format!("{} callers of {authority}", plan.callers),
        Target::Gateways(gateways) => {
            let scheme = gateways.store.split(':').next().unwrap_or_default();
            format!("{} callers of {} {}s on {scheme}", plan.callers, gateways.count, gateways.work_at.of())
        }
        Target::Inbox(inbox) => format!("{} senders to an inbox, with --{}", plan.callers, inbox.work.name()),
    }
}

fn server(url: &http::Uri) -> Result<Target, Failure> {
    match (url.scheme_str(), url.authority()) {
        (Some("http"), Some(authority)) => {
            let port = if authority.port().is_some() { "" } else { ":80" };
            let path = url.path_and_query().map_or("/", |path| path.as_str());
            Ok(Target::Server { authority: format!("{authority}{port}"), path: path.to_owned() })
        }
        _ => {
            Err(Failure::Usage("--target takes an http:// URL, such as http://127.0.0.1:3000/charges".into()))
        }
    }
}

fn on_unknown(text: &str) -> Result<OnUnknown, String> {
    match text {
        "hold" => Ok(OnUnknown::Hold),
        "retry" => Ok(OnUnknown::Retry),
        _ => Err("hold or retry".into()),
    }
}

fn random_seed() -> Result<u64, Failure> {
    let mut bytes = [0; 4];
    getrandom::fill(&mut bytes).map_err(|error| Failure::Io(format!("no random bytes: {error}")))?;
    Ok(u32::from_le_bytes(bytes).into())
}

async fn watched(plan: &Plan) -> Result<Report, Failure> {
    // Draws on a terminal alone.
    let bar = ProgressBar::new_spinner();
    let style = ProgressStyle::with_template("{spinner} {elapsed} breaking, then healing");
    bar.set_style(style.expect("a constant template is valid"));
    bar.enable_steady_tick(Duration::from_millis(100));
    let report = onlyonce_prove::prove(plan).await;
    bar.finish_and_clear();
    report.map_err(|error| match error {
        ProveError::Plan(error) => Failure::Usage(error.to_string()),
        other => Failure::Unreachable(other.to_string()),
    })
}
