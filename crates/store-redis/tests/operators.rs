//! What an operator does when the server is in trouble, which is when he is needed.
#![allow(clippy::unwrap_used, reason = "a test program")]

mod common;

use std::time::Duration;

use common::*;
use onlyonce_core::{
    ListQuery, OperatorAction, OperatorOutcome, Reply, Store, StoreAdmin, StoreErrorKind, Target,
};
use onlyonce_store_redis::Options;
use testkit::Redis;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

fn by() -> OperatorAction {
    OperatorAction { actor: "alice".into(), reason: "r".into(), target: Target::Any }
}

/// Every question of an operator who only looks.
async fn looks(options: Options) {
    let store = options.reading().open().await.unwrap();
    assert_eq!(store.list(&ListQuery::default()).await.unwrap().records.len(), 2);
    assert_eq!(store.stats().await.unwrap().unknown, 1);
    assert!(store.show(scoped("", "marked").id()).await.unwrap().is_some());
    store.audit(None, 10).await.unwrap();
    for error in [
        store.free(scoped("", "marked").id(), &by()).await.unwrap_err(),
        store.claim(&scoped("", "new"), &request(1)).await.unwrap_err(),
    ] {
        assert_eq!(error.kind(), StoreErrorKind::Unfit, "{error}");
        assert!(error.to_string().contains("looking alone"), "{error}");
    }
}

#[tokio::test]
async fn a_full_server_is_looked_at_and_decided_about() {
    let server = Redis::private().await;
    let store = patient(&server.url()).open().await.unwrap();
    acquire(&store, &scoped("", "marked"), 1).await;
    store.mark_unknown(&scoped("", "marked"), token(1)).await.unwrap();
    acquire(&store, &scoped("", "held"), 1).await;
    server.cli(["config", "set", "maxmemory", "1"]).await;
    // A gateway that starts now says why it does not.
    let error = patient(&server.url()).open().await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Full, "{error}");
    assert!(error.to_string().contains("maxmemory"), "{error}");
    looks(patient(&server.url())).await;

    let operator = patient(&server.url()).operating().open().await.unwrap();
    let reply = Reply::ok("the bank shows the charge");
    let id = scoped("", "marked").id().clone();
    let done = operator.resolve(&id, &reply, Duration::from_secs(86_400), &by()).await.unwrap();
    assert!(matches!(done, OperatorOutcome::Done(_)), "{done:?}");
    let freed = operator.free(scoped("", "held").id(), &by()).await.unwrap();
    assert!(matches!(freed, OperatorOutcome::Done(_)), "{freed:?}");
    assert_eq!(operator.audit(None, 10).await.unwrap().len(), 2);
    server.cli(["config", "set", "maxmemory", "0"]).await;
    assert_eq!(replay(&store, &scoped("", "marked")).await, reply);
}

#[tokio::test]
async fn a_server_that_may_throw_records_away_or_has_no_replicas_is_looked_at() {
    let server = Redis::private().await;
    let store = patient(&server.url()).open().await.unwrap();
    acquire(&store, &scoped("", "marked"), 1).await;
    store.mark_unknown(&scoped("", "marked"), token(1)).await.unwrap();
    acquire(&store, &scoped("", "held"), 1).await;
    let careful = || patient(&server.url()).min_replicas(1).replica_timeout(Duration::from_millis(100));
    careful().open().await.unwrap_err();
    looks(careful()).await;
    server.cli(["config", "set", "maxmemory-policy", "allkeys-lru"]).await;
    looks(careful()).await;
    let error = careful().operating().open().await.unwrap_err();
    assert!(error.to_string().contains("allkeys-lru"), "{error}");
    server.cli(["config", "set", "maxmemory-policy", "noeviction"]).await;
    let freed = careful().operating().open().await.unwrap().free(scoped("", "held").id(), &by()).await;
    assert!(matches!(freed, Ok(OperatorOutcome::Done(_))), "{freed:?}");
}

#[tokio::test]
async fn a_change_that_cannot_be_noted_is_not_made() {
    let server = Redis::private().await;
    let store = patient(&server.url()).open().await.unwrap();
    let op = scoped("", "marked");
    acquire(&store, &op, 1).await;
    store.mark_unknown(&op, token(1)).await.unwrap();
    server.cli(["set", "idem!audit", "somebody's"]).await;
    store.free(op.id(), &by()).await.unwrap_err();
    assert_eq!(store.stats().await.unwrap().unknown, 1);
    server.cli(["del", "idem!audit"]).await;
    store.free(op.id(), &by()).await.unwrap();
    assert_eq!(store.audit(None, 10).await.unwrap().len(), 1);
}

#[tokio::test]
async fn an_audit_entry_that_cannot_be_read_hides_no_other() {
    let server = Redis::private().await;
    let store = patient(&server.url()).open().await.unwrap();
    for number in 1..=2 {
        let op = scoped("", &format!("k{number}"));
        acquire(&store, &op, number).await;
        store.mark_unknown(&op, token(number)).await.unwrap();
        store.free(op.id(), &by()).await.unwrap();
        // Of a later release, cut short, and somebody else's.
        for strange in ["\x02later", "\x01", "{}"] {
            server.cli(["lpush", "idem!audit", strange]).await;
        }
    }
    let entries = store.audit(None, 10).await.unwrap();
    let keys: Vec<_> = entries.iter().map(|entry| entry.id.key.as_str()).collect();
    assert_eq!(keys, ["k2", "k1"]);
    assert_eq!(store.audit(Some(scoped("", "k1").id()), 10).await.unwrap().len(), 1);
}

fn said(error: &dyn std::error::Error) -> Vec<String> {
    std::iter::successors(Some(error), |error| error.source()).map(ToString::to_string).collect()
}

#[tokio::test]
async fn a_cause_is_said_once_and_in_one_line() {
    let nobody = patient(&format!("redis://{}", testkit::free_addr())).timeout(Duration::from_millis(300));
    let chain = said(&nobody.open().await.unwrap_err()).join(": ");
    assert_eq!(chain.matches("onnection refused").count(), 1, "{chain}");

    let web = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = web.local_addr().unwrap();
    let serve = tokio::spawn(async move {
        while let Ok((mut caller, _)) = web.accept().await {
            let mut asked = [0; 64];
            let _ = caller.read(&mut asked).await;
            let _ = caller.write_all(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n").await;
        }
    });
    let other = patient(&format!("redis://{address}")).timeout(Duration::from_millis(300));
    let chain = said(&other.open().await.unwrap_err()).join(": ");
    assert!(!chain.contains('\n') && chain.contains("does not speak the protocol of Redis"), "{chain}");
    serve.abort();
}

#[tokio::test]
async fn a_socket_is_logged_in_at_too() {
    let folder = std::env::temp_dir().join(format!("onlyonce-redis-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let socket = folder.join("s.sock");
    let setting = format!("unixsocket {}", socket.display());
    let _server = Redis::options().setting(&setting).setting("user app on >p@ss ~* +@all").start().await;
    let store = patient(&format!("redis+unix://app:p%40ss@{}", socket.display())).open().await.unwrap();
    acquire(&store, &operation("k"), 1).await;
    let wrong = patient(&format!("redis+unix://app:hunter2@{}", socket.display())).open().await.unwrap_err();
    assert_eq!(wrong.kind(), StoreErrorKind::Unfit, "{wrong}");
    std::fs::remove_dir_all(&folder).unwrap();
}
