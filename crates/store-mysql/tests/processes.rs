//! Several real processes on one database. They are this test binary, asked by an environment variable to play a role.
#![allow(clippy::unwrap_used, reason = "a test fails by it")]

mod common;

use std::collections::{BTreeMap, HashSet};
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use common::*;
use mysql_async::Conn;
use mysql_async::prelude::Queryable;
use onlyonce_core::{ClaimOutcome, CompleteOutcome, Store};
use onlyonce_store_mysql::{MysqlStore, mysql_async};
use testkit::{Mariadb, PATIENCE, wait_for};

const ROLE: &str = "ONLYONCE_MYSQL_TEST_ROLE";
const URL: &str = "ONLYONCE_MYSQL_TEST_URL";
const ROUNDS: usize = 200;

/// Plays the role that another test of this file asks for; by itself, it plays each of them in this process.
#[tokio::test(flavor = "multi_thread")]
async fn role() {
    match std::env::var(ROLE) {
        Ok(role) => play(&role, &std::env::var(URL).unwrap()).await,
        Err(_) => {
            let (server, database) = database().await;
            server.sql(&database, "create table effects (k varchar(20) not null)").await;
            for role in ["open", "race", "turns"] {
                play(role, &server.url(&database)).await;
            }
            assert_eq!(server.sql(&database, "select count(*) from effects").await, (2 * ROUNDS).to_string());
        }
    }
}

async fn play(role: &str, url: &str) {
    let store = match MysqlStore::open(url).await {
        Ok(store) => store,
        Err(error) => return println!("\nfailed {error}"),
    };
    match role {
        "open" => println!("\nopened"),
        "race" => race(&store, url).await,
        "turns" => turns(&store, url).await,
        "load" => load(&store).await,
        other => panic!("no role {other}"),
    }
}

// The same keys as everybody else, in the same order; says which it won.
async fn race(store: &MysqlStore, url: &str) {
    let mut conn = Conn::from_url(format!("{url}?prefer_socket=false")).await.unwrap();
    for n in 0..ROUNDS {
        let (operation, mine) = (op(&format!("race {n}")), hold());
        loop {
            match store.claim(&operation, &mine).await.unwrap() {
                ClaimOutcome::Acquired(_) => {
                    conn.exec_drop("insert into effects values (?)", (format!("race {n}"),)).await.unwrap();
                    let reply = format!("{n} of {}", std::process::id());
                    let stored = store.complete(&operation, &done(mine.token, reply)).await.unwrap();
                    assert!(matches!(stored, CompleteOutcome::Stored(_)), "{stored:?}");
                    println!("\nwon {n}");
                    break;
                }
                ClaimOutcome::Completed(stored) => {
                    println!("\nseen {n} {}", String::from_utf8_lossy(stored.reply.body()));
                    break;
                }
                ClaimOutcome::InProgress { .. } => tokio::time::sleep(Duration::from_millis(2)).await,
                other => panic!("{other:?}"),
            }
        }
    }
}

// One key, again and again: whoever has it does what two at once would do wrong.
async fn turns(store: &MysqlStore, url: &str) {
    let mut conn = Conn::from_url(format!("{url}?prefer_socket=false")).await.unwrap();
    loop {
        let (operation, mine) = (op("turns"), hold());
        match store.claim(&operation, &mine).await.unwrap() {
            ClaimOutcome::Acquired(_) => {
                let count: usize = conn
                    .query_first("select count(*) from effects where k like 'turn %'")
                    .await
                    .unwrap()
                    .unwrap();
                if count < ROUNDS {
                    conn.exec_drop("insert into effects values (?)", (format!("turn {count}"),))
                        .await
                        .unwrap();
                }
                store.release(&operation, mine.token).await.unwrap();
                if count >= ROUNDS {
                    return;
                }
                println!("\nwon {count}");
            }
            ClaimOutcome::InProgress { .. } => tokio::time::sleep(Duration::from_millis(1)).await,
            other => panic!("{other:?}"),
        }
    }
}

// New keys without end, from many callers; says which are acknowledged.
async fn load(store: &MysqlStore) {
    let run = std::process::id();
    let callers = (0..16).map(|caller| {
        let store = store.clone();
        tokio::spawn(async move {
            for n in 0.. {
                let (key, mine) = (format!("{run}-{caller}-{n}"), hold());
                acquired(store.claim(&op(&key), &mine).await.unwrap());
                println!("\nclaimed {key}");
                store.complete(&op(&key), &done(mine.token, key.clone())).await.unwrap();
                println!("\nacked {key}");
            }
        })
    });
    futures_util::future::join_all(callers).await;
}

/// A process that plays a role; killed when dropped.
struct Player(Child);

impl Drop for Player {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Player {
    fn start(role: &str, url: &str) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "role", "--nocapture"]).env(ROLE, role).env(URL, url);
        Self(command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap())
    }

    // What it says, line by line: two words and the rest.
    fn lines(&mut self) -> impl Iterator<Item = (String, String)> + use<> {
        let output = BufReader::new(self.0.stdout.take().unwrap());
        output.lines().map_while(Result::ok).filter_map(|line| {
            let (word, rest) = line.split_once(' ').unwrap_or((&line, ""));
            let known = ["opened", "failed", "won", "seen", "claimed", "acked"].contains(&word);
            known.then(|| (word.to_owned(), rest.to_owned()))
        })
    }

    fn finished(mut self) -> Vec<(String, String)> {
        let said = self.lines().collect();
        assert!(self.0.wait().unwrap().success(), "a process failed: {said:?}");
        said
    }
}

fn at_once(role: &str, url: &str, count: usize) -> Vec<Vec<(String, String)>> {
    let players: Vec<_> = (0..count).map(|_| Player::start(role, url)).collect();
    // Each on a thread of its own, or one that nobody reads would stop.
    let readers: Vec<_> =
        players.into_iter().map(|player| std::thread::spawn(|| player.finished())).collect();
    readers.into_iter().map(|reader| reader.join().unwrap()).collect()
}

async fn with_effects() -> (Mariadb, String, String) {
    let (server, database) = database().await;
    server.sql(&database, "create table effects (k varchar(20) not null)").await;
    let url = server.url(&database);
    (server, database, url)
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_processes_make_the_tables_at_once() {
    let (_server, _, url) = with_effects().await;
    for said in at_once("open", &url, 10) {
        assert_eq!(said, [("opened".to_owned(), String::new())]);
    }
}

/// Each round has one winner, whose effect is there once and whose reply everybody sees.
#[tokio::test(flavor = "multi_thread")]
async fn ten_processes_race_for_each_of_two_hundred_keys() {
    let (server, database, url) = with_effects().await;
    let mut replies: BTreeMap<String, HashSet<String>> = BTreeMap::new();
    let mut wins = Vec::new();
    for said in at_once("race", &url, 10) {
        for (word, rest) in said {
            match word.as_str() {
                "won" => wins.push(rest),
                "seen" => {
                    let (round, reply) = rest.split_once(' ').unwrap();
                    replies.entry(round.into()).or_default().insert(reply.into());
                }
                _ => panic!("{word} {rest}"),
            }
        }
    }
    let winners: HashSet<_> = wins.iter().collect();
    assert_eq!((wins.len(), winners.len()), (ROUNDS, ROUNDS), "one winner a round");
    assert_eq!(replies.len(), ROUNDS);
    assert!(replies.values().all(|of_round| of_round.len() == 1), "one reply a round");
    let effects = server.sql(&database, "select count(*), count(distinct k) from effects").await;
    assert_eq!(effects, format!("{ROUNDS}\t{ROUNDS}"));
}

/// One key for two hundred rounds: never two at a time.
#[tokio::test(flavor = "multi_thread")]
async fn ten_processes_take_turns_on_one_key() {
    let (server, database, url) = with_effects().await;
    let won: usize = at_once("turns", &url, 10).iter().map(Vec::len).sum();
    assert_eq!(won, ROUNDS);
    let effects = server.sql(&database, "select count(*), count(distinct k) from effects").await;
    assert_eq!(effects, format!("{ROUNDS}\t{ROUNDS}"), "two at once would have counted one turn twice");
}

/// A process is killed in the middle of its work, again and again: what it was told is so, and what it held is unknown.
#[tokio::test(flavor = "multi_thread")]
async fn what_a_killed_process_was_told_is_so() {
    let (server, database, url) = with_effects().await;
    let (mut acked, mut claimed) = (HashSet::new(), HashSet::new());
    for _ in 0..5 {
        let mut player = Player::start("load", &url);
        let lines = player.lines();
        let reader = std::thread::spawn(move || lines.collect::<Vec<_>>());
        wait_for("it works", async || {
            let counted = server.try_sql(&database, "select count(*) > 200 from idempotency_keys").await;
            counted.is_ok_and(|counted| counted == "1").then_some(())
        })
        .await;
        tokio::time::sleep(Duration::from_millis(200)).await;
        player.0.kill().unwrap();
        player.0.wait().unwrap();
        for (word, key) in reader.join().unwrap() {
            if word == "acked" { &mut acked } else { &mut claimed }.insert(key);
        }
    }
    assert!(acked.len() > 100, "{} acknowledged", acked.len());
    let store = MysqlStore::open(&url).await.unwrap();
    for key in &acked {
        assert_eq!(completed(store.claim(&op(key), &hold()).await.unwrap()).body(), key.as_bytes());
    }
    let mut held = 0;
    for key in claimed.difference(&acked) {
        match store.claim(&op(key), &hold()).await.unwrap() {
            ClaimOutcome::InProgress { .. } => held += 1,
            // The answer to its completion was on its way.
            ClaimOutcome::Completed(_) => {}
            other => panic!("{key}: {other:?}"),
        }
    }
    println!("{} acknowledged, {held} held by the dead, patience {PATIENCE:?}", acked.len());
}
