//! `kill -9` anywhere: what clients were told and what the balance lost agree.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use testkit::{FaultProxy, wait_for};
use tokio::task::JoinSet;

use super::*;

/// How long the network in front of or behind the service holds a piece back: longer than a kill takes by far.
const HELD: Duration = Duration::from_secs(20);

/// The charge after the crash: one is made in all, and every answer from now on is its answer.
async fn charged_once_after(redis: &Redis) {
    let pay = Pay::start(&redis.url(), &["--keep-balance"]).await;
    for _ in 0..3 {
        let answer = pay.charge("order-1", 100).await;
        assert_eq!((answer.status, answer.text()), (200, r#"{"charged":100,"balance":9900}"#));
    }
    assert_eq!(balance(redis).await, 9_900);
}

/// Sends the charge to a service and kills it with `kill -9` once `ready`; the client gets no answer.
async fn killed_when(mut pay: Pay, at: SocketAddr, ready: impl AsyncFnOnce()) {
    let client = Client::new(at);
    let request = tokio::spawn(async move { super::pay(&client, "order-1", r#"{"amount":100}"#).await });
    ready().await;
    pay.process.kill_9().await.expect("it runs");
    request.abort();
    // Broken off, or still waiting behind a network that holds its answer back.
    if let Ok(Ok(answer)) = request.await {
        panic!("nobody was to be answered: {} {}", answer.status, answer.text());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_before_the_charge_reaches_redis() {
    let redis = durable().await;
    let network = FaultProxy::start(redis.addr()).await;
    let pay = Pay::start(&format!("redis://{}", network.addr()), &[]).await;
    network.silence(true);
    let (at, passed) = (pay.addr, network.stalled());
    killed_when(pay, at, async || {
        testkit::wait_until("the charge is on its way", || network.stalled() > passed).await;
    })
    .await;
    assert_eq!(balance(&redis).await, 10_000);
    charged_once_after(&redis).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_after_the_charge_before_its_answer_from_redis() {
    let redis = durable().await;
    let network = FaultProxy::start(redis.addr()).await;
    let pay = Pay::start(&format!("redis://{}", network.addr()), &[]).await;
    // The server knows the script from then on, and runs it at the first asking.
    assert_eq!(pay.charge("too-much", 1_000_000).await.status, 402);
    network.hold_replies(HELD);
    let at = pay.addr;
    killed_when(pay, at, async || {
        wait_for("the charge is made", async || (balance(&redis).await == 9_900).then_some(())).await;
    })
    .await;
    charged_once_after(&redis).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_after_the_charge_before_its_answer_to_the_client() {
    let redis = durable().await;
    let pay = Pay::start(&redis.url(), &[]).await;
    let network = FaultProxy::start(pay.addr).await;
    network.hold_replies(HELD);
    killed_when(pay, network.addr(), async || {
        wait_for("the charge is made", async || (balance(&redis).await == 9_900).then_some(())).await;
    })
    .await;
    charged_once_after(&redis).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_of_redis_that_is_lost_is_asked_for_again() {
    let redis = durable().await;
    let network = FaultProxy::start(redis.addr()).await;
    let pay = Pay::start(&format!("redis://{}", network.addr()), &[]).await;
    network.lose_reply_to("idem:order-1");
    let answer = pay.charge("order-1", 100).await;
    assert_eq!((answer.status, answer.text()), (200, r#"{"charged":100,"balance":9900}"#));
    assert_eq!(network.lost_replies(), 1);
    assert_eq!(balance(&redis).await, 9_900);
}

/// Clients that pay until they are told, each order with one key; the service is killed and started again all the while.
#[tokio::test(flavor = "multi_thread")]
async fn three_hundred_kills_under_load() {
    const KILLS: usize = 300;
    let redis = durable().await;
    // Enough for however many orders the kills leave time for.
    redis.cli(["set", "balance", "1000000"]).await;
    let mut pay = Pay::start(&redis.url(), &["--keep-balance"]).await;
    let at = Arc::new(Mutex::new(pay.addr));
    let over = Arc::new(AtomicBool::new(false));
    let told = Arc::new(Mutex::new(BTreeMap::new()));
    let answers = Arc::new(AtomicU64::new(0));
    let mut clients = JoinSet::new();
    for client in 0..4 {
        let (at, over, told, answers) = (at.clone(), over.clone(), told.clone(), answers.clone());
        clients.spawn(async move {
            for order in 0.. {
                if over.load(Ordering::SeqCst) {
                    break;
                }
                let key = format!("client-{client}-order-{order}");
                let body = paid(&at, &key).await;
                answers.fetch_add(1, Ordering::SeqCst);
                told.lock().insert(key, body);
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        });
    }
    for kill in 0..KILLS {
        // Somewhere else in the work each time.
        tokio::time::sleep(Duration::from_millis(1 + (kill as u64 * 7) % 23)).await;
        pay.process.kill_9().await.expect("it runs");
        pay = Pay::start(&redis.url(), &["--keep-balance"]).await;
        *at.lock() = pay.addr;
    }
    over.store(true, Ordering::SeqCst);
    while let Some(client) = clients.join_next().await {
        client.expect("a client");
    }
    let told = std::mem::take(&mut *told.lock());
    assert!(told.len() >= 100, "{} orders were paid between the kills", told.len());
    assert_eq!(
        balance(&redis).await,
        1_000_000 - told.len() as u64,
        "what clients were told is what the balance lost"
    );
    let balances: std::collections::BTreeSet<_> = told.values().collect();
    assert_eq!(balances.len(), told.len(), "no two orders were told of one charge");
    for (key, body) in told.iter().step_by(told.len() / 50 + 1) {
        assert_eq!(pay.charge(key, 1).await.text(), body, "{key}: told the same for ever");
    }
}

/// Sends an order until it is answered, wherever the service is now.
async fn paid(at: &Mutex<SocketAddr>, key: &str) -> String {
    for _ in 0..6_000 {
        let client = Client::new(*at.lock());
        match super::pay(&client, key, r#"{"amount":1}"#).await {
            Ok(answer) if answer.status == 200 => return answer.text().to_owned(),
            Ok(answer) => assert_eq!(answer.status, 503, "{key}: {}", answer.text()),
            Err(_) => {}
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("{key} was never answered");
}
