//! What is refused charges nothing and uses no key up.

use testkit::Redis;

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn a_body_that_is_no_charge_is_a_400_and_leaves_the_key_alone() {
    let redis = Redis::private().await;
    let pay = Pay::start(&redis.url(), &[]).await;
    for body in [
        "",
        "{",
        "null",
        "[100]",
        "{}",
        r#"{"amount":0}"#,
        r#"{"amount":-100}"#,
        r#"{"amount":-0}"#,
        r#"{"amount":0.5}"#,
        r#"{"amount":100.0}"#,
        r#"{"amount":1e2}"#,
        r#"{"amount":"100"}"#,
        r#"{"amount":null}"#,
        r#"{"amount":true}"#,
        r#"{"amount":99999999999999999999}"#,
        r#"{"amount":1e400}"#,
        r#"{"amount":100,"amount":1}"#,
        r#"{"amount":100} x"#,
        r#"{"Amount":100}"#,
        "amount=100",
    ] {
        let refused = pay.pay("order-1", body).await;
        assert_eq!((refused.status, refused.code().as_str()), (400, "charge-malformed"), "{body}");
        assert_eq!(refused.header("content-type"), Some("application/problem+json"));
        assert!(!refused.json()["detail"].as_str().expect("a detail").is_empty());
    }
    assert_eq!(balance(&redis).await, 10_000);
    assert_eq!(redis.cli(["exists", "idem:order-1"]).await, "0");
    assert_eq!(pay.charge("order-1", 100).await.status, 200, "the key is still unused");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_is_required_well_formed_and_of_one_request() {
    let redis = Redis::private().await;
    let pay = Pay::start(&redis.url(), &[]).await;
    let keyless = pay.client().post("/pay").body(r#"{"amount":100}"#).send().await.expect("an answer");
    assert_eq!((keyless.status, keyless.code().as_str()), (400, "key-missing"));
    for bad in ["", "\"\"", "a b", "\"open", "a,b", &"k".repeat(256)] {
        let refused = pay.charge(bad, 100).await;
        assert_eq!((refused.status, refused.code().as_str()), (400, "key-malformed"), "{bad:?}");
    }
    assert_eq!(pay.charge(&"k".repeat(255), 1).await.status, 200);
    assert_eq!(pay.charge("order-1", 100).await.status, 200);
    let other = pay.charge("order-1", 200).await;
    assert_eq!((other.status, other.code().as_str()), (422, "key-reused"));
    let query = pay
        .client()
        .post("/pay?x=1")
        .key("order-1")
        .body(r#"{"amount":100}"#)
        .send()
        .await
        .expect("an answer");
    assert_eq!(query.status, 422);
    assert!(is_replay(&pay.charge("order-1", 100).await), "the first answer stands");
    assert_eq!(pay.charge("Order-1", 100).await.text(), r#"{"charged":100,"balance":9799}"#, "another key");
    assert_eq!(balance(&redis).await, 9_799);
}

#[tokio::test(flavor = "multi_thread")]
async fn other_paths_methods_and_sizes_are_told() {
    let redis = Redis::private().await;
    let pay = Pay::start(&redis.url(), &[]).await;
    let client = pay.client();
    let get = client.get("/pay").send().await.expect("an answer");
    assert_eq!((get.status, get.header("allow")), (405, Some("POST")));
    assert_eq!(client.get("/").send().await.expect("an answer").status, 404);
    let large = format!("{{\"amount\":100,\"memo\":\"{}\"}}", "x".repeat(70_000));
    let refused = pay.pay("order-1", &large).await;
    assert_eq!((refused.status, refused.code().as_str()), (413, "body-too-large"));
    assert_eq!(balance(&redis).await, 10_000);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_balance_that_is_none_charges_nothing_and_records_nothing() {
    let redis = Redis::private().await;
    let pay = Pay::start(&redis.url(), &[]).await;
    redis.cli(["del", "balance"]).await;
    assert_eq!(pay.charge("order-1", 100).await.status, 503);
    redis.cli(["rpush", "balance", "10000"]).await;
    assert_eq!(pay.charge("order-1", 100).await.status, 503);
    assert_eq!(redis.cli(["lrange", "balance", "0", "-1"]).await, "10000");
    for no_number in ["1e4", "-5", "12.5", "many", "", "0010000", "00", "1000000000000000"] {
        redis.cli(["set", "balance", no_number]).await;
        assert_eq!(pay.charge("order-1", 100).await.status, 503, "{no_number}");
        assert_eq!(redis.cli(["get", "balance"]).await, no_number);
    }
    assert_eq!(redis.cli(["exists", "idem:order-1"]).await, "0");
    redis.cli(["set", "balance", "10000"]).await;
    assert_eq!(pay.charge("order-1", 100).await.text(), r#"{"charged":100,"balance":9900}"#);
}

#[tokio::test(flavor = "multi_thread")]
async fn without_redis_it_says_what_to_do_and_tells_no_password() {
    let nobody = format!("redis://:s3cret-pass@{}", testkit::free_addr());
    let error = Pay::try_start(&nobody, &[]).await.err().expect("no Redis").to_string();
    assert!(error.contains("is redis-server running there?"), "{error}");
    assert!(!error.contains("s3cret-pass"), "{error}");
    let redis = Redis::private().await;
    let taken = Pay::start(&redis.url(), &[]).await;
    let folder = TempDir::new().expect("a folder");
    let listen = taken.addr.to_string();
    let mut second = Process::spawn(
        env!("CARGO_BIN_EXE_pay"),
        ["--listen", &listen, "--redis", &redis.url(), "--keep-balance"],
        folder.path(),
    )
    .expect("a process");
    assert_eq!(second.wait_exit().await.expect("it ends").code(), Some(1));
    testkit::wait_until("its error", || second.stderr().contains("--listen takes another address")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn while_redis_is_away_a_charge_is_a_503_and_goes_through_later() {
    let redis = durable().await;
    let pay = Pay::start(&redis.url(), &[]).await;
    assert_eq!(pay.charge("order-1", 100).await.status, 200);
    redis.kill_9().await;
    let away = pay.charge("order-2", 100).await;
    assert_eq!((away.status, away.code().as_str()), (503, "store-unavailable"));
    assert!(away.header("retry-after").is_some());
    redis.start().await;
    let client = pay.client();
    let later = testkit::wait_for("Redis is back", async || {
        super::pay(&client, "order-2", r#"{"amount":100}"#).await.ok().filter(|answer| answer.status == 200)
    })
    .await;
    assert_eq!(later.text(), r#"{"charged":100,"balance":9800}"#);
    assert!(is_replay(&pay.charge("order-1", 100).await), "what was answered is on disk");
}
