//! Gateways and the operator's commands with their records in Redis.

#![allow(clippy::unwrap_used, reason = "a test program")]

mod common;

use common::{Gateway, pay, run};
use futures_util::future::join_all;
use testkit::{Answer, Redis, Upstream};

/// Two gateways serve one store; a reply outlives the gateways and a crash of the server; keys are looked at and freed.
#[tokio::test(flavor = "multi_thread")]
async fn two_gateways_on_one_server_run_it_once_and_remember_it() {
    let (folder, upstream) = (tempfile::tempdir().unwrap(), Upstream::start(|_| Answer::ok("paid")).await);
    let server = Redis::options().durable().start().await;
    let url = server.url();
    let start =
        async || Gateway::start(&upstream.url(), folder.path(), &["--wait", "30s", "--store", &url]).await;
    let (one, two) = (start().await, start().await);
    assert!(one.process.stderr().contains("redis redis://"), "{}", one.process.stderr());
    for round in 0..20 {
        let key = format!("round-{round}");
        let answers =
            join_all((0..20).map(|n| pay(if n % 2 == 0 { one.client() } else { two.client() }, &key)));
        for answer in answers.await {
            let answer = answer.unwrap();
            assert_eq!((answer.status, answer.text()), (200, "paid"), "round {round}");
        }
        assert_eq!(upstream.count(), round + 1);
    }
    drop((one, two));
    server.kill_9().await;
    server.start().await;
    let again = start().await;
    let replay = pay(again.client(), "round-7").await.unwrap();
    assert_eq!((replay.status, replay.header("idempotency-replayed")), (200, Some("true")));

    let keys = async |args: &[&str]| run(&[&["keys"], args, &["--store", &url]].concat()).await;
    let (listed, text) = keys(&["list"]).await;
    assert!(listed && text.contains("round-0") && text.contains("round-19"), "{text}");
    let (counted, text) = keys(&["stats"]).await;
    assert!(counted && text.contains("20"), "{text}");
    let (freed, text) = keys(&["release", "round-3", "--reason", "the bank shows none", "--force"]).await;
    assert!(freed, "{text}");
    let (noted, text) = keys(&["audit"]).await;
    assert!(noted && text.contains("the bank shows none"), "{text}");
}

#[tokio::test]
async fn a_server_that_may_not_be_used_is_refused_with_the_reason_and_without_the_password() {
    let server =
        Redis::options().setting("maxmemory-policy allkeys-lru").setting("requirepass hunter2").start().await;
    let upstream = ["--upstream", "http://127.0.0.1:9"];
    let url = format!("redis://:hunter2@{}", server.addr());
    let (served, text) =
        run(&[&["serve", "--listen", "127.0.0.1:0", "--store", &url], &upstream[..]].concat()).await;
    assert!(!served && text.contains("allkeys-lru") && text.contains("noeviction"), "{text}");
    assert!(!text.contains("hunter2"), "{text}");
    let (listed, text) = run(&["keys", "list", "--store", &url.replace("hunter2", "hunter3")]).await;
    assert!(!listed && !text.contains("hunter"), "{text}");
}
