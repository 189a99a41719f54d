//! Several real processes on one database: races and SIGKILL.
//!
//! The other processes are this test binary, asked by an environment variable to play a role.

#![allow(clippy::unwrap_used, reason = "a test fails by it")]

mod common;

use std::collections::HashMap;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use common::*;
use onlyonce_core::{ClaimOutcome, CompleteOutcome, Store};
use onlyonce_store_postgres::PostgresStore;

const ROLE: &str = "ONLYONCE_POSTGRES_TEST_ROLE";
const URL: &str = "ONLYONCE_POSTGRES_TEST_URL";
const ROUNDS: usize = 200;

/// Plays the role that another test of this file asks for; by itself, it plays one of them in this process.
#[tokio::test(flavor = "multi_thread")]
async fn role() {
    match std::env::var(ROLE) {
        Ok(role) => play(&role, &std::env::var(URL).unwrap()).await,
        Err(_) => {
            let place = place().await;
            play("race", &place.url).await;
            let completed = "select count(*) from idempotency_keys where status = 'completed'";
            assert_eq!(place.psql(completed).await, ROUNDS.to_string());
        }
    }
}

async fn play(role: &str, url: &str) {
    // A disk may stand still for longer than a gateway would wait.
    let options = PostgresStore::options(url).unwrap().patience(Duration::from_secs(60));
    let store = options.open().await.unwrap();
    match role {
        "race" => race(&store).await,
        "load" => load(&store).await,
        other => panic!("no role {other}"),
    }
}

// One key a round, the same as everybody else's, until it is done; says which it won.
async fn race(store: &PostgresStore) {
    for round in 0..ROUNDS {
        let op = op(&format!("round {round}"));
        let request = take_over();
        loop {
            match store.claim(&op, &request).await.unwrap() {
                ClaimOutcome::Acquired(lease) => {
                    assert_eq!(lease.attempt, 1);
                    let stored = store.complete(&op, &done(request.token, format!("{round}"))).await.unwrap();
                    assert!(matches!(stored, CompleteOutcome::Stored(_)), "{stored:?}");
                    println!("\nwon {round}");
                    break;
                }
                ClaimOutcome::Completed(stored) => {
                    assert_eq!(stored.reply.body(), format!("{round}").as_bytes());
                    break;
                }
                ClaimOutcome::InProgress { .. } => tokio::time::sleep(Duration::from_millis(1)).await,
                other => panic!("{other:?}"),
            }
        }
    }
}

// New keys without end, from many callers; says which are acknowledged.
async fn load(store: &PostgresStore) {
    let run = std::process::id();
    let callers = (0..16).map(|caller| {
        let store = store.clone();
        tokio::spawn(async move {
            for n in 0.. {
                let key = format!("{run}-{caller}-{n}");
                pair(&store, &key).await.unwrap();
                println!("\nacked {key}");
            }
        })
    });
    futures_util::future::join_all(callers).await;
}

fn spawn(role: &str, url: &str) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "role", "--nocapture"]).env(ROLE, role).env(URL, url);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap()
}

// The rest of each line that starts with `word`.
fn lines(child: &mut Child, word: &'static str) -> impl Iterator<Item = String> + use<> {
    let output = BufReader::new(child.stdout.take().unwrap());
    output
        .lines()
        .map_while(Result::ok)
        .filter_map(move |line| Some(line.strip_prefix(word)?.trim().to_owned()))
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_processes_on_one_key_two_hundred_rounds() {
    let place = place().await;
    let mut children: Vec<_> = (0..10).map(|_| spawn("race", &place.url)).collect();
    let mut won: HashMap<String, usize> = HashMap::new();
    for child in &mut children {
        for round in lines(child, "won ") {
            *won.entry(round).or_default() += 1;
        }
        assert!(child.wait().unwrap().success());
    }
    assert_eq!(won.len(), ROUNDS);
    assert!(won.values().all(|times| *times == 1), "{won:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_acknowledged_outlives_sigkill_and_locks_do_not() {
    let place = place().await;
    for round in 0..3 {
        let mut child = spawn("load", &place.url);
        let acked = lines(&mut child, "acked ");
        let mut keys: Vec<String> = Vec::new();
        for key in acked {
            keys.push(key);
            if keys.len() == 100 {
                child.kill().unwrap();
            }
        }
        child.wait().unwrap();
        assert!(keys.len() >= 100, "round {round}: {} acknowledged", keys.len());
        let store = place.open().await;
        for key in keys {
            let reply = completed(store.claim(&op(&key), &take_over()).await.unwrap());
            assert_eq!(reply.body(), key.as_bytes());
        }
    }
    testkit::wait_for("nobody holds a lock", async || {
        let locks = place.psql("select count(*) from pg_locks where locktype = 'advisory'").await;
        (locks == "0").then_some(())
    })
    .await;
}
