//! A master that Sentinels know, and the one that takes its place.

mod common;

use std::time::Duration;

use common::*;
use onlyonce_core::{ClaimOutcome, CompleteOutcome, Reply, Store, StoreErrorKind};
use onlyonce_store_redis::Options;
use testkit::{Redis, RedisSentinels, wait_for};

#[tokio::test]
async fn a_failover_is_followed_and_keeps_what_a_replica_confirmed() {
    let servers = RedisSentinels::start(&Redis::options(), 2).await;
    // One of the Sentinels is down; any that answers will do.
    servers.sentinels()[0].kill_9().await;
    let options = Options::from_url(&servers.url()).unwrap();
    let store =
        options.min_replicas(2).replica_timeout(Duration::from_secs(5)).timeout(Duration::from_secs(5));
    let store = store.open().await.unwrap();
    let location = store.capabilities().location;
    assert!(
        location.starts_with("redis+sentinel://127.0.0.1:") && location.ends_with("/mymaster"),
        "{location}"
    );
    acquire(&store, &operation("held"), 1).await;
    acquire(&store, &operation("done"), 1).await;
    finish(&store, &operation("done"), 1, Reply::ok("charged")).await;
    servers.sentinels()[0].start().await;
    servers.server(0).kill_9().await;
    let new = servers.failed_over(0).await;
    assert_ne!(new, 0);
    // Back, so that there are two replicas again.
    servers.server(0).start().await;
    let again =
        wait_for("the new master answers", async || store.claim(&operation("done"), &request(2)).await.ok());
    match again.await {
        ClaimOutcome::Completed(stored) => assert_eq!(stored.reply, Reply::ok("charged")),
        other => panic!("a reply that two replicas had is gone: {other:?}"),
    }
    let other = store.claim(&operation("held"), &request(2)).await.unwrap();
    assert!(matches!(other, ClaimOutcome::InProgress { .. }), "{other:?}");
    let end = wait_for("its owner completes", async || {
        store.complete(&operation("held"), &completion(1, Reply::ok("late"))).await.ok()
    });
    let end = end.await;
    assert!(matches!(end, CompleteOutcome::Stored(_) | CompleteOutcome::AlreadyStored(_)), "{end:?}");
}

/// A master that was demoted while its connections stayed answers no claim and no look: what it knows is old.
#[tokio::test]
async fn a_demoted_master_is_left_at_once() {
    let servers = RedisSentinels::start(&Redis::options(), 1).await;
    let store = patient(&servers.url()).open().await.unwrap();
    acquire(&store, &operation("k"), 1).await;
    assert_eq!(servers.server(0).cli(["wait", "1", "5000"]).await, "1");
    assert_eq!(servers.sentinels()[0].cli(["sentinel", "failover", "mymaster"]).await, "OK");
    let new = servers.failed_over(0).await;
    finish(&store, &operation("k"), 1, Reply::ok("done")).await;
    assert_eq!(servers.server(new).cli(["exists", "idem@8d9001d32c6a703d95921a77115050f3:k"]).await, "1");
    assert_eq!(replay(&store, &operation("k")).await, Reply::ok("done"));
}

#[tokio::test]
async fn what_the_sentinels_do_not_know_is_said() {
    let servers = RedisSentinels::start(&Redis::options(), 1).await;
    let url = servers.url();
    let unknown = Options::from_url(&url.replace("mymaster", "another")).unwrap().open().await.unwrap_err();
    assert_eq!(unknown.kind(), StoreErrorKind::Unfit, "{unknown}");
    assert!(unknown.to_string().contains("another"), "{unknown}");
    let server =
        Options::from_url(&format!("redis+sentinel://{}/mymaster", servers.server(0).addr())).unwrap();
    assert!(server.open().await.is_err(), "a server is no Sentinel");
    let sentinel = Options::from_url(&format!("redis://{}", servers.sentinels()[0].addr())).unwrap();
    let error = sentinel.open().await.unwrap_err();
    assert!(error.to_string().contains("redis+sentinel"), "{error}");
}
