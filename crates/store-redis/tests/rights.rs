//! What a user may not do is named when the store is opened, and not found out when an effect has happened.

mod common;

use std::time::Duration;

use common::*;
use onlyonce_core::{ClaimOutcome, Store, StoreError, StoreErrorKind};
use onlyonce_store_redis::{Options, RedisStore};
use testkit::{Redis, RedisCluster};

/// The rules of the documentation, less this right.
fn rules_without(right: &str) -> Vec<String> {
    let rules = documented_rights();
    assert!(right.is_empty() || rules.iter().any(|rule| rule == right), "{right} is documented");
    let kept = rules.into_iter().filter(|rule| rule != right);
    ["acl", "setuser", "onlyonce", "reset"].map(str::to_owned).into_iter().chain(kept).collect()
}

async fn opened(url: &str, min_replicas: u32) -> Result<RedisStore, StoreError> {
    let options: Options = patient(url).min_replicas(min_replicas);
    options.open().await
}

#[tokio::test]
async fn every_right_that_is_missing_is_named_at_the_start() {
    let server = Redis::options().durable().start().await;
    // So that each script is in the cache of the server already.
    patient(&server.url()).open().await.unwrap();
    let url = format!("redis://onlyonce:secret@{}", server.addr());
    for right in ["+set", "+get", "+del", "+pttl", "+time", "+evalsha", "+script|load", "+ping"] {
        assert_eq!(server.cli_with(rules_without(right)).await, "OK");
        let error = opened(&url, 0).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Unfit, "{right}: {error}");
        assert!(error.to_string().contains(&format!("needs: {right};")), "{right}: {error}");
    }
    for right in ["+pexpireat", "+pexpiretime", "+wait"] {
        assert_eq!(server.cli_with(rules_without(right)).await, "OK");
        opened(&url, 0).await.unwrap_or_else(|error| panic!("without replicas nobody needs it: {error}"));
        let error = opened(&url, 1).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Unfit, "{right}: {error}");
        assert!(error.to_string().contains(&format!("needs: {right};")), "{right}: {error}");
    }
    assert_eq!(server.cli(["acl", "setuser", "onlyonce", "resetkeys", "~other*"]).await, "OK");
    let error = opened(&url, 0).await.unwrap_err();
    assert!(error.to_string().contains("the keys ~idem*"), "{error}");
    assert_eq!(server.cli(["dbsize"]).await, "0", "and nothing is left of it");
}

#[tokio::test]
async fn on_a_cluster_asking_is_one_of_them() {
    let cluster = RedisCluster::private().await;
    let set = async |rules: Vec<String>| {
        for node in cluster.nodes() {
            assert_eq!(node.cli_with(rules.clone()).await, "OK");
        }
    };
    let url = format!("redis+cluster://onlyonce:secret@{}", cluster.node(0).addr());
    set(rules_without("+asking")).await;
    let error = opened(&url, 0).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unfit, "{error}");
    assert!(error.to_string().contains("needs: +asking;"), "{error}");

    // With it a slot may be on its way.
    set(rules_without("")).await;
    let store = opened(&url, 0).await.unwrap().with_hash_tag("moving").unwrap();
    let (from, slot) = (cluster.master_of("{moving}").await, cluster.slot_of("{moving}").await);
    let to = (from + 1) % 3;
    cluster.begin_move(slot, from, to).await;
    acquire(&store, &scoped("", "new"), 1).await;
    // Taken away while the store is at work, it is what the error is about, and not the slot.
    for node in cluster.nodes() {
        node.cli(["acl", "setuser", "onlyonce", "-asking"]).await;
    }
    let error = store.claim(&scoped("", "newer"), &request(1)).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unfit, "{error}");
    assert!(error.to_string().contains("permission") && !error.may_have_applied(), "{error}");
    cluster.end_move(slot, from, to).await;

    set(rules_without("")).await;
    let node = cluster.node(1).addr();
    cluster.node(1).cli(["acl", "setuser", "onlyonce", "resetpass", ">another"]).await;
    let error = opened(&url, 0).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unfit, "{error}");
    assert!(error.to_string().contains(&node.to_string()), "it names {node}: {error}");
}

#[tokio::test]
async fn a_self_test_that_fails_leaves_nothing_for_long() {
    let server = Redis::private().await;
    let replicas = patient(&server.url()).min_replicas(1).replica_timeout(Duration::from_millis(100));
    let error = replicas.hold_retention(Duration::from_secs(86_400 * 30)).open().await.unwrap_err();
    assert!(error.to_string().contains("0 of 1 replicas"), "{error}");
    // A script that is refused for its second command is half done.
    server.cli(["acl", "setuser", "default", "-pttl"]).await;
    patient(&server.url()).open().await.unwrap_err();
    for name in server.cli(["keys", "idem*"]).await.lines() {
        let ttl: i64 = server.cli(["ttl", name]).await.parse().unwrap();
        assert!((0..=60).contains(&ttl), "{name}: {ttl}");
    }
}

#[tokio::test]
async fn without_ping_an_idle_server_still_counts_as_there() {
    let server = Redis::private().await;
    let store = patient(&server.url()).open().await.unwrap();
    let short = onlyonce_core::ClaimRequest { lease: Duration::from_millis(200), ..request(1) };
    store.claim(&operation("k"), &short).await.unwrap();
    // Taken away while the store is at work.
    server.cli(["acl", "setuser", "default", "-ping"]).await;
    tokio::time::sleep(Duration::from_millis(600)).await;
    let taken = store.claim(&operation("k"), &request(2)).await.unwrap();
    assert!(matches!(&taken, ClaimOutcome::Acquired(lease) if lease.attempt == 2), "{taken:?}");
}
