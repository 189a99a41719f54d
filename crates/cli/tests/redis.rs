//! Gateways and the operator's commands with their records in Redis.

#![allow(clippy::unwrap_used, reason = "a test program")]

mod common;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use common::{Gateway, pay, run};
use futures_util::future::join_all;
use parking_lot::Mutex;
use testkit::{Answer, Redis, RedisCluster, Upstream};
use tokio::task::JoinSet;

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

/// Clients pay through two gateways, each order under one key until it is answered, while a master is killed and its replica
/// takes its place. With a replica that confirms, what was answered stays answered, and nothing runs twice.
#[tokio::test(flavor = "multi_thread")]
async fn a_master_that_dies_under_load_costs_no_answer_and_no_second_run() {
    let cluster =
        RedisCluster::start(&Redis::options().durable().setting("repl-ping-replica-period 1")).await;
    let url = format!("{}?min_replicas=1&replica_timeout_ms=2000", cluster.url());
    let runs = Arc::new(Mutex::new(BTreeMap::<String, usize>::new()));
    let seen_runs = Arc::clone(&runs);
    let upstream = Upstream::start(move |seen| {
        let key = seen.header("idempotency-key").unwrap_or_default().trim_matches('"').to_owned();
        let mut runs = seen_runs.lock();
        *runs.entry(key.clone()).or_default() += 1;
        Answer::new(201, format!("{key}: run {}", runs[&key]))
    })
    .await;
    let folder = tempfile::tempdir().unwrap();
    let options = ["--cache-bytes", "0", "--store", &url];
    let gateways = [
        Gateway::start(&upstream.url(), folder.path(), &options).await,
        Gateway::start(&upstream.url(), folder.path(), &options).await,
    ];
    let (over, told) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(BTreeMap::new())));
    let mut clients = JoinSet::new();
    for client in 0..6 {
        let (over, told) = (Arc::clone(&over), Arc::clone(&told));
        let at = [gateways[client % 2].addr, gateways[(client + 1) % 2].addr];
        clients.spawn(async move {
            for order in 0.. {
                if over.load(Ordering::SeqCst) {
                    break;
                }
                let key = format!("client-{client}-order-{order}");
                let answer = answered(at, &key).await;
                told.lock().insert(key, answer);
            }
        });
    }
    let more = async |what| {
        let before = told.lock().len();
        testkit::wait_until(what, || told.lock().len() > before + 100).await;
    };
    more("work goes on").await;
    let probe = cluster.key_on("idem:probe", 0).await;
    cluster.node(0).kill_9().await;
    cluster.failed_over(&probe, 0).await;
    // Back as a replica, so that its successor has one to confirm again.
    cluster.node(0).start().await;
    more("work goes on after the failover").await;
    over.store(true, Ordering::SeqCst);
    clients.join_all().await;
    let told = std::mem::take(&mut *told.lock());
    assert!(told.values().filter(|(status, _)| *status == 201).count() > 200, "{told:?}");
    for (key, (status, text)) in &told {
        // An outage that parts the work from its record ends in an outcome that nobody knows, never in a second run.
        assert!(
            *status == 201 && *text == format!("{key}: run 1") || *status == 409,
            "{key}: {status} {text}"
        );
    }
    assert!(runs.lock().values().all(|runs| *runs == 1), "{:?}", runs.lock());
    for (key, said) in told.iter().filter(|(_, (status, _))| *status == 201).step_by(7) {
        assert_eq!(answered([gateways[0].addr, gateways[1].addr], key).await, *said, "it stays answered");
    }
}

/// The first answer that is an end: status and body.
async fn answered(at: [std::net::SocketAddr; 2], key: &str) -> (u16, String) {
    for send in 0..600 {
        match pay(testkit::Client::new(at[send % 2]), key).await {
            Ok(answer) if answer.status == 201 => return (201, answer.text().to_owned()),
            Ok(answer) if answer.code() == "outcome-unknown" => return (409, String::new()),
            Ok(answer) => assert!(
                ["store-unavailable", "in-progress"].contains(&answer.code().as_str()),
                "{key}: {} {}",
                answer.status,
                answer.text()
            ),
            Err(error) => panic!("{key}: {error:#}"),
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("{key} was never answered")
}
