//! `onlyonce prove` on every store with every fault, for a bounded time; and on servers that are wrong, which it must find.
//!
//! A run that broke is a seed: it goes into `SEEDS`, and stays.
#![allow(clippy::unwrap_used, reason = "a test program")]

mod common;

use std::collections::HashMap;
use std::num::NonZeroU32;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use common::PROGRAM;
use onlyonce_core::Mutant;
use onlyonce_prove::plan::{Gateways, Inbox};
use onlyonce_prove::{Fault, OnUnknown, Plan, Report, Rule, Target, Work, WorkAt, prove};
use parking_lot::Mutex;
use testkit::{Answer, Mariadb, Postgres, Redis, Upstream};
use tokio::time::Instant;

/// How long each store is broken. The figures of long runs are in docs/reliability.md.
const BREAKING: Duration = Duration::from_secs(8);

/// Each is run on each store.
const SEEDS: &[u64] = &[7];

fn plan(store: &str, folder: &Path, seed: u64, faults: &[Fault]) -> Plan {
    Plan {
        target: Target::Gateways(Gateways {
            program: PROGRAM.into(),
            work_at: WorkAt::Upstream,
            store: store.into(),
            count: 3,
            lease: Duration::from_secs(2),
            on_unknown: OnUnknown::Hold,
            environment: Vec::new(),
            folder: folder.to_owned(),
            restart_store: Some(format!(
                "cd '{}' && touch want && until [ -e back ]; do sleep 0.02; done; rm back",
                folder.display()
            )),
        }),
        seed,
        breaking: BREAKING,
        healing: Duration::from_secs(60),
        round: Duration::from_secs(60),
        callers: 12,
        rate: None,
        faults: faults.into(),
    }
}

fn held(report: &Report, faults: &[Fault]) {
    println!("{}", report.text());
    assert!(report.holds(), "{}", report.text());
    assert!(report.operations > 10, "something was done");
    let made: usize = report.faults.values().sum();
    assert!(made > 3 && report.faults.keys().all(|fault| faults.contains(fault)), "{:?}", report.faults);
}

/// Runs a plan on each seed; when the store is to be restarted, `restart` does it.
async fn on_each_seed(store: &str, faults: &[Fault], restart: impl AsyncFn()) {
    for seed in SEEDS {
        let folder = tempfile::tempdir().unwrap();
        let plan = plan(store, folder.path(), *seed, faults);
        held(&restarting(&plan, folder.path(), &restart).await, faults);
    }
}

async fn restarting(plan: &Plan, folder: &Path, restart: impl AsyncFn()) -> Report {
    let restarting = async {
        loop {
            if std::fs::remove_file(folder.join("want")).is_ok() {
                restart().await;
                std::fs::write(folder.join("back"), "").unwrap();
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::select! {
        report = prove(plan) => report.unwrap(),
        () = restarting => unreachable!("it restarts for ever"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn sqlite_holds() {
    on_each_seed("sqlite:prove.db", &[Fault::Kill, Fault::Pause], async || {}).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn postgres_holds() {
    let server = Postgres::private().await;
    let url = format!("postgres://postgres@{}/{}", server.addr(), server.database().await);
    let restart = async || {
        server.kill_9().await;
        server.start().await;
    };
    on_each_seed(&url, &Fault::ALL, restart).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn mysql_holds() {
    let server = Mariadb::private().await;
    let url = server.url(&server.database().await);
    let restart = async || {
        server.kill_9().await;
        server.start().await;
    };
    on_each_seed(&url, &Fault::ALL, restart).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn redis_holds() {
    let server = Redis::options().durable().start().await;
    let restart = async || {
        server.kill_9().await;
        server.start().await;
    };
    on_each_seed(&server.url(), &Fault::ALL, restart).await;
}

fn shops(store: &str, folder: &Path, faults: &[Fault]) -> Plan {
    let mut plan = plan(store, folder, SEEDS[0], faults);
    let Target::Gateways(gateways) = &mut plan.target else { panic!() };
    gateways.work_at = WorkAt::Transaction;
    plan
}

/// Effect and record are one transaction: exactly once, whatever is killed, and no answer that nobody knows.
async fn shops_hold(store: &str, faults: &[Fault], restart: impl AsyncFn()) {
    let folder = tempfile::tempdir().unwrap();
    let plan = shops(store, folder.path(), faults);
    let report = restarting(&plan, folder.path(), restart).await;
    held(&report, faults);
    assert_eq!(report.executions, Some(report.operations), "every order, each once");
}

#[tokio::test(flavor = "multi_thread")]
async fn transactions_on_sqlite_hold() {
    shops_hold("sqlite:shop.db", &[Fault::Kill, Fault::Pause], async || {}).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn transactions_on_postgres_hold() {
    let server = Postgres::private().await;
    let database = server.database().await;
    let restart = async || {
        server.kill_9().await;
        server.start().await;
    };
    let url = format!("postgres://postgres@{}/{database}", server.addr());
    shops_hold(&url, &Fault::ALL, restart).await;
    let left =
        server.psql(&database, "select count(*) from pg_class where relname like 'onlyonce_prove%'").await;
    assert_eq!(left, "0", "nothing but records is left");
}

#[tokio::test(flavor = "multi_thread")]
async fn transactions_on_mysql_hold() {
    let server = Mariadb::private().await;
    let url = server.url(&server.database().await);
    let restart = async || {
        server.kill_9().await;
        server.start().await;
    };
    shops_hold(&url, &Fault::ALL, restart).await;
}

/// In rounds: what is judged is forgotten, but for some that are asked again.
#[tokio::test(flavor = "multi_thread")]
async fn a_long_run_is_judged_round_by_round_and_measured() {
    let folder = tempfile::tempdir().unwrap();
    let faults = [Fault::Kill, Fault::Pause];
    let mut plan = plan("sqlite:prove.db", folder.path(), SEEDS[0], &faults);
    plan.round = Duration::from_secs(2);
    plan.rate = NonZeroU32::new(20);
    let report = prove(&plan).await.unwrap();
    held(&report, &faults);
    assert!(report.rounds > 1 && report.operations <= 20 * 8 + 1, "{}", report.text());
    let series = report.series.as_ref().unwrap();
    let gateways = series.lives.iter().filter(|life| life.name.starts_with("gateway"));
    assert!(gateways.clone().count() > 3 && gateways.flat_map(|life| &life.looks).count() > 8);
    assert!(series.windows.iter().any(|window| window.p99_ms.is_some()));
    assert!(report.text().contains("too short to say") && report.plot("x").unwrap().contains("gateway 2"));
}

fn to_an_inbox(program: &Path, work: Work, folder: &Path, faults: &[Fault]) -> Plan {
    let (program, lease, folder) = (program.to_owned(), Duration::from_secs(2), folder.to_owned());
    let target = Target::Inbox(Inbox { program, work, lease, folder: folder.clone() });
    Plan { target, callers: 8, ..plan("", &folder, SEEDS[0], faults) }
}

/// The message and what is done with it are one transaction: exactly once, whatever is killed.
#[tokio::test(flavor = "multi_thread")]
async fn an_inbox_with_a_statement_holds() {
    let folder = tempfile::tempdir().unwrap();
    let faults = [Fault::Kill, Fault::Pause];
    let report = prove(&to_an_inbox(Path::new(PROGRAM), Work::Sql, folder.path(), &faults)).await.unwrap();
    held(&report, &faults);
    assert_eq!(report.executions, Some(report.operations), "every message, each once");
}

/// What is done with it is a command: at least once, with one response for all.
#[tokio::test(flavor = "multi_thread")]
async fn an_inbox_with_a_command_holds() {
    let folder = tempfile::tempdir().unwrap();
    let faults = [Fault::Kill, Fault::Pause];
    let report = prove(&to_an_inbox(Path::new(PROGRAM), Work::Exec, folder.path(), &faults)).await.unwrap();
    held(&report, &faults);
    assert!(report.executions >= Some(report.operations), "every message, each at least once");
}

/// A receiver that forgets before it looks.
#[tokio::test(flavor = "multi_thread")]
async fn an_inbox_that_forgets_is_broken() {
    let folder = tempfile::tempdir().unwrap();
    let script = format!(
        "#!/bin/sh\nkey=$(sed -n 's/.*\"msg_id\":\"\\([^\"]*\\)\".*/\\1/p' \"$4\" | head -n 1)\n\
         {PROGRAM} inbox forget \"$3\" \"$key\" --reason wrong >/dev/null 2>&1\nexec {PROGRAM} \"$@\"\n"
    );
    let wrong = script_in(folder.path(), &script);
    let report = prove(&to_an_inbox(&wrong, Work::Sql, folder.path(), &[])).await.unwrap();
    let broken = |rule| report.violations.iter().any(|found| found.rule == rule);
    assert!(broken(Rule::Once) && broken(Rule::Applied), "{}", report.text());
    assert!(report.text().contains("by itself"), "{}", report.text());
}

fn script_in(folder: &Path, script: &str) -> std::path::PathBuf {
    let wrong = folder.join("wrong");
    std::fs::write(&wrong, script).unwrap();
    std::fs::set_permissions(&wrong, std::fs::Permissions::from_mode(0o755)).unwrap();
    wrong
}

/// A gateway that runs again what it does not know of: what `--on-unknown retry` does on purpose is not once.
#[tokio::test(flavor = "multi_thread")]
async fn a_gateway_that_runs_unknown_outcomes_again_is_broken() {
    let folder = tempfile::tempdir().unwrap();
    let script =
        "#!/bin/sh\nfor arg; do shift; [ \"$arg\" = hold ] && arg=retry; set -- \"$@\" \"$arg\"; done\n";
    let wrong = script_in(folder.path(), &format!("{script}exec {PROGRAM} \"$@\"\n"));
    let mut plan = plan("sqlite:prove.db", folder.path(), SEEDS[0], &[Fault::Kill]);
    let Target::Gateways(gateways) = &mut plan.target else { panic!() };
    gateways.program = wrong;
    let report = prove(&plan).await.unwrap();
    assert!(report.violations.iter().any(|found| found.rule == Rule::Once), "{}", report.text());
    assert!(report.text().contains("BROKEN") && !report.histories.is_empty());
}

/// Runs it again on purpose, and gives one answer for all.
#[tokio::test(flavor = "multi_thread")]
async fn sqlite_holds_under_retry() {
    let folder = tempfile::tempdir().unwrap();
    let faults = [Fault::Kill, Fault::Pause];
    let mut plan = plan("sqlite:prove.db", folder.path(), SEEDS[0], &faults);
    let Target::Gateways(gateways) = &mut plan.target else { panic!() };
    gateways.on_unknown = OnUnknown::Retry;
    held(&prove(&plan).await.unwrap(), &faults);
}

/// Our own code with one fault at a time: each is found, by the rule that it breaks.
#[cfg(feature = "mutants")]
mod mutants {
    use super::*;

    // A minute is given: a few seeds, one after the other.
    async fn found(mutant: Mutant, (work_at, on_unknown): (WorkAt, OnUnknown), faults: &[Fault], rule: Rule) {
        for seed in 1..=5 {
            let folder = tempfile::tempdir().unwrap();
            let mut plan = plan("sqlite:prove.db", folder.path(), seed, faults);
            plan.callers = 24;
            let Target::Gateways(gateways) = &mut plan.target else { panic!() };
            gateways.work_at = work_at;
            gateways.on_unknown = on_unknown;
            gateways.environment = vec![(Mutant::VARIABLE.into(), mutant.name().into())];
            let report = prove(&plan).await.unwrap();
            println!("{}", report.text());
            if report.violations.iter().any(|violation| violation.rule == rule) {
                return;
            }
        }
        panic!("{} lives on", mutant.name());
    }

    macro_rules! each {
        ($($name:ident: $mutant:ident, $how:expr, $faults:expr, $rule:ident;)*) => {
            $(
                #[tokio::test(flavor = "multi_thread")]
                async fn $name() {
                    found(Mutant::$mutant, $how, $faults, Rule::$rule).await;
                }
            )*

            #[test]
            fn none_is_left_out() {
                let all = Mutant::LEASED.into_iter().chain(Mutant::TRANSACTIONAL);
                assert!([$(Mutant::$mutant),*].into_iter().eq(all));
            }
        };
    }

    const HOLD: (WorkAt, OnUnknown) = (WorkAt::Upstream, OnUnknown::Hold);
    const RETRY: (WorkAt, OnUnknown) = (WorkAt::Upstream, OnUnknown::Retry);
    const ONCE: (WorkAt, OnUnknown) = (WorkAt::Transaction, OnUnknown::Hold);

    each! {
        fencing_off: FencingOff, RETRY, &[Fault::Pause], Identical;
        token_is_a_counter: TokenIsACounter, HOLD, &[], Once;
        check_then_insert: CheckThenInsert, HOLD, &[], Once;
        answer_before_record: AnswerBeforeRecord, HOLD, &[Fault::Kill], Kept;
        release_on_disconnect: ReleaseOnDisconnect, HOLD, &[], Once;
        cache_before_fingerprint: CacheBeforeFingerprint, HOLD, &[], Mismatch;
        purge_by_age: PurgeByAge, HOLD, &[], Once;
        unique_dropped: UniqueDropped, HOLD, &[], Once;
        claim_before_transaction: ClaimBeforeTransaction, ONCE, &[Fault::Kill], Converged;
        record_after_commit: RecordAfterCommit, ONCE, &[Fault::Kill], Converged;
    }
}

/// A server without claims in flight looks whether the key is known, works, and then remembers it.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_without_claims_in_flight_is_broken() {
    let known: Mutex<HashMap<String, (Instant, String)>> = Mutex::default();
    let runs = AtomicUsize::new(0);
    let work = Duration::from_millis(100);
    let server = Upstream::start(move |seen| {
        let key = seen.header("idempotency-key").unwrap_or_default().to_owned();
        let now = Instant::now();
        let mut known = known.lock();
        if let Some((_, reply)) = known.get(&key).filter(|(remembered, _)| *remembered <= now) {
            return Answer::new(201, reply.clone());
        }
        let reply = format!("run {}", runs.fetch_add(1, Ordering::SeqCst));
        known.insert(key, (now + work, reply.clone()));
        Answer::new(201, reply).delay(work)
    })
    .await;
    let found = run_against(&server).await;
    assert!(found.contains(&Rule::Identical), "{found:?}");
}

/// A server that claims first, and compares: nothing is found.
#[tokio::test(flavor = "multi_thread")]
async fn a_right_server_is_not() {
    let known: Mutex<HashMap<String, (Vec<u8>, String)>> = Mutex::default();
    let server = Upstream::start(move |seen| {
        let key = seen.header("idempotency-key").unwrap_or_default().to_owned();
        let mut known = known.lock();
        let count = known.len();
        let (body, reply) = known.entry(key).or_insert_with(|| (seen.body.to_vec(), format!("run {count}")));
        if *body == seen.body { Answer::new(201, reply.clone()) } else { Answer::new(422, "another body") }
    })
    .await;
    assert_eq!(run_against(&server).await, []);
}

async fn run_against(server: &Upstream) -> Vec<Rule> {
    let plan = Plan {
        target: Target::Server { authority: server.addr().to_string(), path: "/charges".into() },
        seed: 3,
        breaking: Duration::from_secs(3),
        healing: Duration::from_secs(30),
        round: Duration::from_secs(60),
        callers: 8,
        rate: None,
        faults: Vec::new(),
    };
    let report = prove(&plan).await.unwrap();
    assert!(report.operations > 10, "{}", report.text());
    let mut found: Vec<_> = report.violations.iter().map(|violation| violation.rule).collect();
    found.dedup();
    // The history of an operation at fault is told.
    assert_eq!(report.histories.is_empty(), found.is_empty());
    found
}

/// The command: what it prints, and its exit codes.
#[tokio::test(flavor = "multi_thread")]
async fn the_command_prints_its_seed_and_counts_and_refuses_what_cannot_be() {
    let (held, text) =
        common::run(&["prove", "--for", "2s", "--seed", "11", "--gateways", "2", "--callers", "4"]).await;
    assert!(held, "{text}");
    for told in
        ["seed        11", "executions  ", "faults      ", "holds             an operation runs at most once"]
    {
        assert!(text.contains(told), "{text}");
    }
    let (held, text) = common::run(&["prove", "--for", "1s", "--json", "--faults", "kill"]).await;
    assert!(held && text.contains("\"violations\": []"), "{text}");
    let inbox = ["prove", "--door", "inbox", "--for", "1s", "--callers", "4"];
    let (held, text) = common::run(&inbox).await;
    assert!(
        held && text.contains("holds             every delivery that was answered is in the log"),
        "{text}"
    );
    for (args, why) in [
        (&["prove", "--faults", "cut"][..], "needs a store behind a network"),
        (&["prove", "--door", "inbox", "--faults", "slow"], "there are kill and pause"),
        (
            &["prove", "--door", "inbox", "--store", "redis://localhost"],
            "--store is of no use with --door inbox",
        ),
        (&["prove", "--door", "inbox", "--lease", "10ms"], "a second or more"),
        (&["prove", "--faults", "fire"], "there are kill, pause"),
        (&["prove", "--store", "memory:"], "do not outlive"),
        (&["prove", "--door", "transaction", "--store", "redis://localhost"], "needs SQLite, PostgreSQL"),
        (&["prove", "--round", "1ms"], "a round is a second or more"),
        (&["prove", "--plot", "/dev/null/plot.svg"], "/dev/null/plot.svg"),
        (&["prove", "--faults", "restart-store"], "needs a command"),
        (&["prove", "--target", "https://example.com/"], "takes an http:// URL"),
        (&["prove", "--target", "http://127.0.0.1:1/"], "cannot be reached"),
        (&["prove", "--store", "postgres://u:hunter2@127.0.0.1:1/d", "--for", "1s"], "does not start"),
    ] {
        let (held, text) = common::run(args).await;
        assert!(!held && text.contains(why), "{args:?}: {text}");
        assert!(!text.contains("hunter2"), "{text}");
    }
}
