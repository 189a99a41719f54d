//! A claim that was taken back stays taken back, though a copy of it still waits behind WAIT on another connection.

mod common;

use std::time::Duration;

use common::*;
use onlyonce_core::{Operation, Store, StoreErrorKind};
use onlyonce_store_redis::RedisStore;
use testkit::{Redis, wait_for};
use tokio::task::JoinHandle;

/// How long a WAIT holds back what comes behind it, and how long a call is waited for: much shorter.
const WAIT: Duration = Duration::from_secs(8);
const CALL: Duration = Duration::from_secs(2);

/// A server whose one replica is paused, a store that waits for it, and a connection of that store that waits now.
async fn held_up() -> (Redis, Redis, RedisStore, JoinHandle<()>) {
    let master = Redis::private().await;
    let replica = Redis::options().setting(&format!("replicaof 127.0.0.1 {}", master.port())).start().await;
    wait_for("it is in step", async || {
        replica.cli(["info", "replication"]).await.contains("master_link_status:up").then_some(())
    })
    .await;
    let options = || patient(&master.url()).timeout(CALL).min_replicas(1).replica_timeout(WAIT);
    let store = wait_for("a replica confirms", async || options().open().await.ok()).await;
    replica.pause();
    let first = store.clone();
    let waiting = tokio::spawn(async move {
        first.claim(&scoped("", "first"), &request(9)).await.expect_err("no replica has it");
    });
    assert_eq!(waits(&master, 1).await.len(), 1);
    (master, replica, store, waiting)
}

/// The connections that are in a WAIT, the oldest first.
async fn waits(master: &Redis, count: usize) -> Vec<String> {
    wait_for("so many wait", async || {
        let said = master.cli(["client", "list"]).await;
        let waiting = said.lines().filter(|line| line.contains("cmd=wait") && line.contains("flags=b"));
        let ids: Vec<_> = waiting
            .filter_map(|line| line.split(' ').next()?.strip_prefix("id="))
            .map(str::to_owned)
            .collect();
        (ids.len() == count).then_some(ids)
    })
    .await
}

async fn is_there(master: &Redis, key: &str) -> bool {
    master.cli(["exists", &format!("idem:{key}")]).await == "1"
}

/// Sends a copy that is not answered in time, for it waits behind a WAIT.
async fn send_a_copy(store: &RedisStore, op: &Operation) {
    let lost = store.claim(op, &request(1)).await.expect_err("its answer is held up");
    assert!(lost.may_have_applied(), "{lost}");
}

/// As an engine does: until it is answered.
async fn release(store: &RedisStore, op: &Operation) {
    wait_for("it is released", async || store.release(op, token(1)).await.ok()).await;
}

#[tokio::test]
async fn a_release_waits_for_the_copies_of_its_claim() {
    let (master, replica, store, first) = held_up().await;
    let op = scoped("", "k");
    send_a_copy(&store, &op).await;
    // Again on another connection, where it is carried out; and nobody waits for that any more.
    let (again, its) = (store.clone(), op.clone());
    let again = tokio::spawn(async move { again.claim(&its, &request(1)).await });
    wait_for("it is claimed", async || is_there(&master, "k").await.then_some(())).await;
    again.abort();
    release(&store, &op).await;
    assert!(!is_there(&master, "k").await);
    first.await.unwrap();
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(!is_there(&master, "k").await, "no copy of it came alive");
    replica.resume();
    wait_for("another is free to claim it", async || store.claim(&op, &request(2)).await.ok()).await;
}

#[tokio::test]
async fn a_refused_claim_says_that_a_copy_of_it_may_still_arrive() {
    let (master, _replica, store, first) = held_up().await;
    let op = scoped("", "k");
    send_a_copy(&store, &op).await;
    let (again, its) = (store.clone(), op.clone());
    let again = tokio::spawn(async move { again.claim(&its, &request(1)).await });
    // Its own WAIT ends long before the one that holds back the first copy.
    let newest = waits(&master, 2).await.pop().unwrap();
    assert_eq!(master.cli(["client", "unblock", &newest]).await, "1");
    let refused = again.await.unwrap().unwrap_err();
    assert_eq!(refused.kind(), StoreErrorKind::Unavailable, "{refused}");
    assert!(refused.to_string().contains("0 of 1 replicas"), "{refused}");
    assert!(refused.may_have_applied(), "whoever hears it goes on releasing: {refused}");
    assert!(!is_there(&master, "k").await, "what arrived is taken back meanwhile");
    release(&store, &op).await;
    first.await.unwrap();
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(!is_there(&master, "k").await, "no copy of it came alive");
}
