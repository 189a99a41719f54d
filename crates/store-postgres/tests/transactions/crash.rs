//! Crashes at each step: of the process, of the server, of the network. Business rows and replies agree, each once.

use std::collections::HashMap;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use onlyonce_core::{OnceOutcome, Operation, Reply, StoreError};
use onlyonce_store_postgres::tokio_postgres::{Client, NoTls, Transaction, connect};
use onlyonce_store_postgres::{PostgresStore, TxClaim};
use testkit::{FaultProxy, Postgres, wait_for};

use crate::common::*;
use crate::{Shop, place_order, ran, replayed, shop, wait};

const ROLE: &str = "ONLYONCE_POSTGRES_TX_TEST_ROLE";
const URL: &str = "ONLYONCE_POSTGRES_TX_TEST_URL";
const ROUNDS: usize = 200;
const LONG: Duration = Duration::from_secs(60);

/// Where something is killed.
const STEPS: [&str; 5] =
    ["before the claim", "after the claim", "in the work", "before the commit", "after the commit"];

/// Goes through a transaction by the token form and stops at each step for a moment.
async fn step_by_step(
    store: &PostgresStore,
    client: &mut Client,
    op: &Operation,
    mut at: impl AsyncFnMut(&str),
) -> Result<Option<Reply>, StoreError> {
    at(STEPS[0]).await;
    let Ok(mut tx) = client.transaction().await else { return Ok(None) };
    let claim = match store.claim_in(&mut tx, op, &wait(LONG)).await? {
        TxClaim::Acquired(claim) => claim,
        TxClaim::Completed(stored) => return Ok(Some(stored.reply)),
        other => panic!("{other:?}"),
    };
    at(STEPS[1]).await;
    let Ok(reply) = place_order(&mut tx, op.key().as_str()).await else { return Ok(None) };
    at(STEPS[2]).await;
    let pending = claim.complete(&mut tx, reply).await?;
    at(STEPS[3]).await;
    if tx.commit().await.is_err() {
        return Ok(None);
    }
    at(STEPS[4]).await;
    Ok(Some(pending.after_commit().reply))
}

/// What a client does: asks until there is an answer.
async fn retried(shop: &Shop, op: &Operation) -> OnceOutcome {
    wait_for("an answer", async || {
        let (mut client, connection) = connect(&shop.place.url, NoTls).await.ok()?;
        tokio::spawn(connection);
        let work = async |tx: &mut Transaction<'_>| place_order(tx, op.key().as_str()).await;
        match shop.store.once_with(&mut client, op, &wait(LONG), work).await {
            Ok(OnceOutcome::InProgress { .. }) => None,
            Ok(outcome) => Some(outcome),
            Err(error) => {
                assert!(error.retryable() || error.may_have_applied(), "{}", chain(&error));
                None
            }
        }
    })
    .await
}

/// One row, one completed record, and the reply is the row's.
async fn agrees(shop: &Shop, key: &str, reply: &Reply) {
    let sql = format!(
        "select string_agg(o.id::text, ','), (select string_agg(status || ' ' || convert_from(response_body, 'UTF8'), ',')
            from idempotency_keys where key = '{key}') from orders o where item = '{key}'"
    );
    let id = String::from_utf8(reply.body().to_vec()).unwrap();
    assert_eq!(shop.place.psql(&sql).await, format!("{id}|completed {id}"), "{key}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_killed_at_any_step_leaves_row_and_reply_or_neither() {
    let server = Postgres::private().await;
    let database = server.database().await;
    let place = Place { url: server.url(&database), server, database };
    let store = place.open().await;
    place
        .psql("create table orders (id bigint generated always as identity, item text not null, paid int)")
        .await;
    let shop = Shop { place, store };
    for step in STEPS {
        let op = op(step);
        let mut client = shop.client().await;
        let server = &shop.place.server;
        let answered = step_by_step(&shop.store, &mut client, &op, async |now| {
            if now == step {
                server.kill_9().await;
                server.start().await;
            }
        })
        .await;
        match retried(&shop, &op).await {
            OnceOutcome::Ran(stored) => {
                assert_ne!(step, STEPS[4]);
                assert!(!matches!(answered, Ok(Some(_))), "{step}: {answered:?}");
                agrees(&shop, step, &stored.reply).await;
            }
            OnceOutcome::Replayed(stored) => {
                assert_eq!(answered.unwrap().as_ref(), Some(&stored.reply), "{step}");
                agrees(&shop, step, &stored.reply).await;
            }
            other => panic!("{step}: {other:?}"),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_reply_of_the_commit_is_ambiguous_and_a_retry_gets_the_reply() {
    let shop = shop().await;
    let network = FaultProxy::start(shop.place.server.addr()).await;
    let url = format!("postgres://postgres@{}/{}", network.addr(), shop.place.database);
    for round in 0..5 {
        let op = op(&format!("lost {round}"));
        let mut client = crate::client(&url).await;
        network.lose_reply_to("COMMIT");
        let error = shop.order(&mut client, &op).await.unwrap_err();
        assert!(error.may_have_applied(), "{}", chain(&error));
        let reply = replayed(retried(&shop, &op).await);
        agrees(&shop, op.key().as_str(), &reply).await;
    }
    assert_eq!(network.lost_replies(), 5);
    // Before the commit nothing is ambiguous.
    for (needle, key) in [("idempotency_claim", "claim"), ("insert into orders", "work")] {
        let mut client = crate::client(&url).await;
        network.lose_reply_to(needle);
        match shop.order(&mut client, &op(key)).await {
            Ok(OnceOutcome::Transient(_)) => {}
            Err(error) => assert!(!error.may_have_applied() && error.retryable(), "{}", chain(&error)),
            other => panic!("{other:?}"),
        }
        let reply = ran(retried(&shop, &op(key)).await);
        agrees(&shop, key, &reply).await;
    }
}

/// Plays the role that another test of this file asks for; by itself, it plays one of them in this process.
#[tokio::test(flavor = "multi_thread")]
async fn role() {
    match std::env::var(ROLE) {
        Ok(role) => play(&role, &std::env::var(URL).unwrap()).await,
        Err(_) => {
            let shop = shop().await;
            play("race", &shop.place.url).await;
            assert_eq!(shop.place.psql("select count(*) from orders").await, ROUNDS.to_string());
        }
    }
}

async fn play(role: &str, url: &str) {
    let store = PostgresStore::open(url).await.unwrap();
    let mut client = crate::client(url).await;
    if role == "race" {
        return race(&store, &mut client).await;
    }
    // A step: says that it is there and waits to be killed.
    let done = step_by_step(&store, &mut client, &op(role), async |now| {
        if now == role {
            println!("\nat {now}");
            std::future::pending::<()>().await;
        }
    })
    .await;
    panic!("was not killed: {done:?}");
}

// One key a round, the same as everybody else's; says which it won.
async fn race(store: &PostgresStore, client: &mut Client) {
    for round in 0..ROUNDS {
        let key = format!("round {round}");
        let work = async |tx: &mut Transaction<'_>| place_order(tx, &key).await;
        match store.once_with(client, &op(&key), &wait(LONG), work).await.unwrap() {
            OnceOutcome::Ran(stored) => println!("\nwon {round} {:?}", stored.reply.body()),
            OnceOutcome::Replayed(stored) => println!("\ngot {round} {:?}", stored.reply.body()),
            other => panic!("{other:?}"),
        }
    }
}

fn spawn(role: &str, url: &str) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "crash::role", "--nocapture"]).env(ROLE, role).env(URL, url);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap()
}

fn lines(child: &mut Child) -> impl Iterator<Item = String> + use<> {
    BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_is_killed_at_any_step_leaves_row_and_reply_or_neither() {
    let shop = shop().await;
    for step in STEPS {
        let op = op(step);
        let mut child = spawn(step, &shop.place.url);
        let mut output = lines(&mut child);
        assert!(output.any(|line| line == format!("at {step}")), "{step}");
        // A copy that is waiting when the process dies gets the turn; before and after, there is nothing to wait for.
        let copy = retried(&shop, &op);
        let kill = async {
            if !matches!(step, "before the claim" | "after the commit") {
                shop.waits_for_a_lock().await;
                child.kill().unwrap();
            }
        };
        let (outcome, ()) = tokio::join!(copy, kill);
        child.kill().unwrap();
        child.wait().unwrap();
        let reply = if step == STEPS[4] { replayed(outcome) } else { ran(outcome) };
        agrees(&shop, step, &reply).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_processes_on_one_key_two_hundred_rounds() {
    let shop = shop().await;
    let mut children: Vec<_> = (0..10).map(|_| spawn("race", &shop.place.url)).collect();
    let (mut won, mut replies): (HashMap<String, usize>, HashMap<String, String>) = Default::default();
    for child in &mut children {
        for line in lines(child) {
            let words: Vec<&str> = line.split(' ').collect();
            let [what @ ("won" | "got"), round, reply] = words[..] else { continue };
            *won.entry(round.into()).or_default() += usize::from(what == "won");
            let first = replies.entry(round.into()).or_insert_with(|| reply.into());
            assert_eq!(first, reply, "round {round}");
        }
        assert!(child.wait().unwrap().success());
    }
    assert_eq!(won.len(), ROUNDS);
    assert!(won.values().all(|times| *times == 1), "{won:?}");
    assert_eq!(shop.place.psql("select count(*), count(distinct item) from orders").await, "200|200");
}
