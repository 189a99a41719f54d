//! A replica that has to confirm: while it hears nothing, nothing is told that a failover would forget.

mod common;

use std::time::Duration;

use common::*;
use onlyonce_core::{
    ClaimOutcome, CompleteOutcome, ReleaseOutcome, RenewOutcome, Reply, Store, StoreError, StoreErrorKind,
};
use onlyonce_store_redis::{OnceOutcome, Plan, RedisStore};
use testkit::{Redis, wait_for};

async fn replica_of(master: &Redis) -> Redis {
    let replica = Redis::options().setting(&format!("replicaof 127.0.0.1 {}", master.port())).start().await;
    wait_for("it is in step", async || {
        replica.cli(["info", "replication"]).await.contains("master_link_status:up").then_some(())
    })
    .await;
    replica
}

/// As long as a busy machine may take.
const LONG: Duration = Duration::from_secs(20);
/// Where it is waited for in vain.
const SHORT: Duration = Duration::from_secs(1);

/// A store that waits for one replica for so long.
async fn careful(master: &Redis, replica_timeout: Duration) -> RedisStore {
    let options = || patient(&master.url()).min_replicas(1).replica_timeout(replica_timeout);
    wait_for("a replica confirms what the store tries out", async || options().open().await.ok()).await
}

fn unconfirmed(error: &StoreError, may_have_applied: bool) {
    assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{error}");
    assert!(error.to_string().contains("0 of 1 replicas"), "{error}");
    assert_eq!(error.may_have_applied(), may_have_applied, "{error}");
}

#[tokio::test]
async fn what_no_replica_has_is_not_told() {
    let master = Redis::private().await;
    let replica = replica_of(&master).await;
    // A connection that waited in vain for one write waits with the next: each question is asked by a store of its own.
    let (calm, owner) = (careful(&master, LONG).await, careful(&master, SHORT).await);
    let (reader, again) = (careful(&master, SHORT).await, careful(&master, SHORT).await);
    let (effects, effect_reader) = (careful(&master, SHORT).await, careful(&master, SHORT).await);
    let [new, done, marked, kept, left, paid] =
        ["new", "done", "marked", "kept", "left", "paid"].map(|key| scoped("", key));
    for op in [&done, &marked, &kept, &left] {
        acquire(&calm, op, 1).await;
    }
    let effect = Plan::new("return {status = 200, body = 'paid', writes = {{'INCR', KEYS[1]}}}").effect();
    let effect = effect.key("paid");

    replica.pause();
    let (claim, completion_1) = (request(1), completion(1, Reply::ok("charged")));
    let (refused, unsure, unmarked, renewed, released, ran) = tokio::join!(
        owner.claim(&new, &claim),
        owner.complete(&done, &completion_1),
        owner.mark_unknown(&marked, token(1)),
        owner.renew(&kept, token(1), Duration::from_secs(60)),
        owner.release(&left, token(1)),
        effects.once(&paid, &effect),
    );
    unconfirmed(&refused.unwrap_err(), false);
    assert_eq!(master.cli(["exists", "idem:new"]).await, "0", "the claim is taken back");
    unconfirmed(&unsure.unwrap_err(), true);
    unconfirmed(&unmarked.unwrap_err(), true);
    unconfirmed(&ran.unwrap_err(), true);
    // Forgotten, they cost no second run: an earlier end of the lease, or a key that is held for longer.
    assert_eq!(renewed.unwrap(), RenewOutcome::Renewed);
    assert_eq!(released.unwrap(), ReleaseOutcome::Applied);

    // What the master has by now is not told to others either, nor to the owner who asks again.
    let other = request(2);
    let (read, repeated, replayed) = tokio::join!(
        reader.claim(&done, &other),
        again.complete(&done, &completion_1),
        effect_reader.once(&paid, &effect),
    );
    unconfirmed(&read.unwrap_err(), false);
    unconfirmed(&repeated.unwrap_err(), true);
    unconfirmed(&replayed.unwrap_err(), false);

    replica.resume();
    assert_eq!(acquire(&calm, &new, 1).await, 1);
    assert_eq!(replay(&calm, &done).await, Reply::ok("charged"));
    let end = calm.complete(&done, &completion_1).await.unwrap();
    assert!(matches!(end, CompleteOutcome::AlreadyStored(_)), "{end:?}");
    let outcome = calm.once(&paid, &effect).await.unwrap();
    assert!(
        matches!(&outcome, OnceOutcome::Replayed(stored) if stored.reply == Reply::ok("paid")),
        "{outcome:?}"
    );
    assert_eq!(master.cli(["get", "paid"]).await, "1");
}

/// WAIT is about what its own connection wrote: what others wrote, or the same caller on another connection, is written
/// again before it is told.
#[tokio::test]
async fn what_was_written_elsewhere_is_written_again_before_it_is_told() {
    let master = Redis::private().await;
    let _replica = replica_of(&master).await;
    let (owner, other) = (careful(&master, LONG).await, careful(&master, LONG).await);
    let op = scoped("", "k");
    acquire(&owner, &op, 1).await;
    finish(&owner, &op, 1, Reply::ok("done")).await;
    let changes = async || {
        let said = master.cli(["info", "persistence"]).await;
        let count = said.lines().find_map(|line| line.strip_prefix("rdb_changes_since_last_save:"));
        count.and_then(|count| count.trim().parse::<u64>().ok()).expect("it counts changes")
    };
    let ends = master.cli(["pexpiretime", "idem:k"]).await;
    let before = changes().await;
    assert_eq!(replay(&other, &op).await, Reply::ok("done"));
    assert_eq!(changes().await, before + 1, "a reply is told");
    let end = other.complete(&op, &completion(1, Reply::ok("again"))).await.unwrap();
    assert!(matches!(end, CompleteOutcome::AlreadyStored(_)), "{end:?}");
    assert_eq!(changes().await, before + 2, "an owner asks again");
    assert_eq!(master.cli(["pexpiretime", "idem:k"]).await, ends, "and nothing is changed by it");
}

#[tokio::test]
async fn as_many_replicas_as_were_asked_for_are_enough_and_fewer_are_not() {
    let master = Redis::private().await;
    let _replica = replica_of(&master).await;
    let store = careful(&master, LONG).await;
    acquire(&store, &operation("k"), 1).await;
    finish(&store, &operation("k"), 1, Reply::ok("done")).await;
    let two = patient(&master.url()).min_replicas(2).replica_timeout(SHORT);
    let error = two.open().await.unwrap_err();
    assert!(error.to_string().contains("1 of 2 replicas"), "{error}");
    match store.claim(&operation("k"), &request(2)).await.unwrap() {
        ClaimOutcome::Completed(stored) => assert_eq!(stored.reply, Reply::ok("done")),
        other => panic!("{other:?}"),
    }
}
