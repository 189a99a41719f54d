//! One charge for one key, however often and however many at once ask for it.

use futures_util::future::join_all;
use testkit::Redis;

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn a_charge_is_made_once_and_every_retry_gets_its_answer() {
    let redis = Redis::private().await;
    redis.cli(["set", "balance", "3"]).await;
    let pay = Pay::start(&redis.url(), &[]).await;
    assert_eq!(balance(&redis).await, 10_000, "set at the start");
    let first = pay.charge("order-1", 100).await;
    assert_eq!((first.status, first.text()), (200, r#"{"charged":100,"balance":9900}"#));
    assert_eq!(first.header("content-type"), Some("application/json"));
    assert!(!is_replay(&first));
    for _ in 0..3 {
        let again = pay.charge("order-1", 100).await;
        assert_eq!((again.status, again.text()), (first.status, first.text()));
        assert_eq!(again.header("content-type"), Some("application/json"));
        assert!(is_replay(&again));
    }
    assert_eq!(balance(&redis).await, 9_900);
    let quoted = pay.charge("\"order-1\"", 100).await;
    assert!(is_replay(&quoted), "quoted and bare are one key");
    let ttl: u64 = redis.cli(["ttl", "idem:order-1"]).await.parse().expect("seconds");
    assert!((1..=86_400).contains(&ttl), "{ttl}");
    let left = pay.client().get("/balance").send().await.expect("an answer");
    assert_eq!(left.text(), r#"{"balance":9900}"#);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_definitive_failure_is_an_answer_like_any_other() {
    let redis = Redis::private().await;
    let pay = Pay::start(&redis.url(), &[]).await;
    let poor = pay.charge("order-1", 10_001).await;
    assert_eq!((poor.status, poor.text()), (402, r#"{"error":"insufficient balance","balance":10000}"#));
    redis.cli(["set", "balance", "20000"]).await;
    let again = pay.charge("order-1", 10_001).await;
    assert_eq!((again.status, again.text()), (402, poor.text()));
    assert!(is_replay(&again));
    assert_eq!(balance(&redis).await, 20_000);
    assert_eq!(
        pay.charge("order-2", 20_000).await.text(),
        r#"{"charged":20000,"balance":0}"#,
        "to the last one"
    );
    assert_eq!(pay.charge("order-3", 1).await.status, 402);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transient_failure_frees_the_key() {
    let redis = Redis::private().await;
    let pay = Pay::start(&redis.url(), &["--fail-next", "timeout"]).await;
    let failed = pay.charge("order-1", 100).await;
    assert_eq!((failed.status, failed.code().as_str()), (503, "not-charged"));
    assert!(failed.header("retry-after").is_some());
    assert_eq!(failed.json()["retryable"], true);
    assert_eq!(redis.cli(["exists", "idem:order-1"]).await, "0");
    assert_eq!(balance(&redis).await, 10_000);
    let ran = pay.charge("order-1", 100).await;
    assert_eq!((ran.status, is_replay(&ran)), (200, false), "a retry really runs");
    assert_eq!(balance(&redis).await, 9_900);
}

#[tokio::test(flavor = "multi_thread")]
async fn twenty_at_once_two_hundred_rounds() {
    const ROUNDS: u64 = 200;
    let redis = Redis::private().await;
    let pay = Pay::start(&redis.url(), &[]).await;
    let client = pay.client();
    let mut connections = Vec::new();
    for _ in 0..20 {
        connections.push(client.connect().await.expect("a connection"));
    }
    for round in 1..=ROUNDS {
        let key = format!("round-{round}");
        let sends = connections
            .iter_mut()
            .map(|connection| connection.send(client.post("/pay").key(&key).body(r#"{"amount":10}"#)));
        let answers: Vec<_> = join_all(sends).await.into_iter().map(|a| a.expect("an answer")).collect();
        let left = 10_000 - 10 * round;
        for answer in &answers {
            let body = format!("{{\"charged\":10,\"balance\":{left}}}");
            assert_eq!((answer.status, answer.text()), (200, body.as_str()), "round {round}");
        }
        assert_eq!(answers.iter().filter(|answer| !is_replay(answer)).count(), 1, "one of them ran");
        assert_eq!(balance(&redis).await, left);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn unprotected_it_charges_each_time() {
    let redis = Redis::private().await;
    let pay = Pay::start(&redis.url(), &["--unprotected"]).await;
    for left in [9_900, 9_800] {
        let answer = pay.charge("order-1", 100).await;
        assert_eq!(
            (answer.status, answer.text()),
            (200, format!("{{\"charged\":100,\"balance\":{left}}}").as_str())
        );
    }
    let keyless = pay.client().post("/pay").body(r#"{"amount":100}"#).send().await.expect("an answer");
    assert_eq!(keyless.status, 200);
    assert_eq!(pay.charge("order-1", 100_000).await.status, 402);
    assert_eq!(balance(&redis).await, 9_700);
    assert!(pay.process.stdout().contains("UNPROTECTED"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_balance_can_be_kept() {
    let redis = Redis::private().await;
    let first = Pay::start(&redis.url(), &["--keep-balance"]).await;
    assert_eq!(first.charge("order-1", 100).await.status, 200);
    drop(first);
    let second = Pay::start(&redis.url(), &["--keep-balance"]).await;
    assert_eq!(balance(&redis).await, 9_900);
    assert!(is_replay(&second.charge("order-1", 100).await), "the record outlives the service");
}
