//! The operator's listener: health, readiness, metrics, and who may see them.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use testkit::{Answer, Client, ClientResponse, Upstream, wait_for, wait_until};

use crate::common::{Gateway, pay, run};
use crate::{held, numbered};

/// A gateway with an admin listener, and where that is.
async fn gateway(upstream: &Upstream, folder: &Path, options: &[&str]) -> (Gateway, Client) {
    let options = [&["--admin-listen", "127.0.0.1:0"], options].concat();
    let gateway = Gateway::start(&upstream.url(), folder, &options).await;
    let said = gateway.process.stderr();
    let addr: SocketAddr =
        said.split("admin     http://").nth(1).unwrap().lines().next().unwrap().parse().unwrap();
    (gateway, Client::new(addr))
}

async fn get(admin: Client, path: &str) -> ClientResponse {
    admin.get(path).send().await.unwrap()
}

/// The value of one line of the metrics.
fn value(metrics: &str, line: &str) -> f64 {
    let found = metrics.lines().find_map(|text| text.strip_prefix(line)?.strip_prefix(' '));
    found.unwrap_or_else(|| panic!("{line} is not in\n{metrics}")).parse().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn metrics_tell_what_happened_and_name_nobody() {
    let upstream =
        Upstream::start(|seen| Answer::new(seen.header("x-status").unwrap_or("201").parse().unwrap(), "x"))
            .await;
    let folder = tempfile::tempdir().unwrap();
    let (gateway, admin) = gateway(&upstream, folder.path(), &["--max-header-bytes", "8KiB"]).await;
    let send = |key: &str, status: &str, body: &'static str| {
        let request = gateway.client().post("/S3CR3T-PATH").key(key).header("x-status", status).body(body);
        request.header("authorization", "Bearer S3CR3T-TOKEN").send()
    };
    for (key, status, body) in [
        ("S3CR3T-KEY", "201", "1"),
        ("S3CR3T-KEY", "201", "1"),
        ("S3CR3T-KEY", "201", "1"),
        ("S3CR3T-KEY", "201", "2"),
        ("released", "503", "1"),
        ("unknown", "502", "1"),
        ("bad key", "201", "1"),
    ] {
        send(key, status, body).await.unwrap();
    }
    testkit::Client::h2c(gateway.addr).get("/passes").send().await.unwrap();
    let long = gateway.client().get("/").header("x-long", vec![b'x'; 9000]).send().await.unwrap();
    assert_eq!(long.status, 431);

    let answer = get(admin, "/metrics").await;
    assert_eq!(answer.status, 200);
    assert!(answer.header("content-type").unwrap().starts_with("application/openmetrics-text"));
    let metrics = answer.text();
    assert!(metrics.ends_with("# EOF\n"), "{metrics}");
    let mut types: Vec<&str> = metrics.lines().filter(|line| line.starts_with("# TYPE")).collect();
    types.sort();
    types.windows(2).for_each(|two| assert_ne!(two[0], two[1], "a family is whole"));
    for (line, expected) in [
        (r#"onlyonce_guarded_requests_total{verdict="ran"}"#, 1.0),
        (r#"onlyonce_guarded_requests_total{verdict="replayed"}"#, 2.0),
        (r#"onlyonce_guarded_requests_total{verdict="key-reused"}"#, 1.0),
        (r#"onlyonce_guarded_requests_total{verdict="released"}"#, 1.0),
        (r#"onlyonce_guarded_requests_total{verdict="unknown"}"#, 1.0),
        (r#"onlyonce_guarded_requests_total{verdict="not-recorded"}"#, 0.0),
        (r#"onlyonce_guarded_requests_total{verdict="key-malformed"}"#, 1.0),
        (r#"onlyonce_problems_total{code="head-too-large"}"#, 1.0),
        (r#"onlyonce_upstream_seconds_count{guarded="true"}"#, 3.0),
        (r#"onlyonce_upstream_seconds_count{guarded="false"}"#, 1.0),
        (r#"onlyonce_upstream_seconds_bucket{le="60.0",guarded="true"}"#, 3.0),
        ("onlyonce_guarded_seconds_count", 7.0),
        ("onlyonce_store_seconds_count", 7.0),
        ("onlyonce_requests_total", 8.0),
        ("onlyonce_in_flight", 0.0),
        ("onlyonce_waiting", 0.0),
        ("onlyonce_unknown_records", 1.0),
        ("onlyonce_store_up", 1.0),
        ("onlyonce_cache_replies", 1.0),
        ("onlyonce_engine_completed_total", 1.0),
        ("onlyonce_engine_replayed_from_memory_total", 2.0),
        ("onlyonce_buffered_bytes", 0.0),
    ] {
        assert_eq!(value(metrics, line), expected, "{line}");
    }
    assert!(value(metrics, "onlyonce_cache_bytes") > 0.0);
    assert!(value(metrics, "onlyonce_purge_lag_seconds") < 120.0);
    assert!(value(metrics, "onlyonce_store_seconds_sum") > 0.0);
    assert!(metrics.contains(concat!("onlyonce_build_info{version=\"", env!("CARGO_PKG_VERSION"), "\"} 1")));
    assert!(!metrics.contains("S3CR3T"), "{metrics}");
}

#[tokio::test(flavor = "multi_thread")]
async fn it_is_ready_while_the_store_answers_and_nothing_stops() {
    let (upstream, first_run) = held().await;
    let folder = tempfile::tempdir().unwrap();
    let (mut gateway, admin) = gateway(&upstream, folder.path(), &["--require-durable"]).await;
    let status = async |path: &str| get(admin, path).await.status;
    assert_eq!((status("/healthz").await, status("/readyz").await), (200, 200));
    assert_eq!(get(admin, "/readyz").await.json()["ready"], true);
    assert_eq!(status("/").await, 404);
    assert_eq!(admin.post("/healthz").send().await.unwrap().status, 405);

    let file = folder.path().join("onlyonce.db");
    let aside = folder.path().join("aside.db");
    std::fs::rename(&file, &aside).unwrap();
    let unready = wait_for("not ready", async || {
        let answer = get(admin, "/readyz").await;
        (answer.status == 503).then_some(answer)
    })
    .await;
    assert!(
        unready.json()["reasons"][0].as_str().unwrap().starts_with("the store does not answer"),
        "{unready:?}"
    );
    assert_eq!(status("/healthz").await, 200, "the process is well");
    std::fs::rename(&aside, &file).unwrap();
    wait_for("ready again", async || (get(admin, "/readyz").await.status == 200).then_some(())).await;

    let first = tokio::spawn(pay(gateway.client(), "k"));
    wait_until("the upstream runs", || upstream.count() == 1).await;
    assert_eq!(value(get(admin, "/metrics").await.text(), "onlyonce_in_flight"), 1.0);
    gateway.process.sigterm().unwrap();
    let stopping = wait_for("it says that it stops", async || {
        let answer = get(admin, "/readyz").await;
        (answer.status == 503).then_some(answer)
    })
    .await;
    assert_eq!(stopping.json()["reasons"][0], "it is stopping");
    drop(first_run);
    assert_eq!(first.await.unwrap().unwrap().text(), "run 1");
    assert!(gateway.process.wait_exit().await.unwrap().success());
}

#[tokio::test(flavor = "multi_thread")]
async fn beyond_this_machine_and_by_choice_a_token_is_needed() {
    let upstream = numbered(Duration::ZERO).await;
    let folder = tempfile::tempdir().unwrap();
    let token = folder.path().join("token");
    std::fs::write(&token, "0123456789abcdef-token\n").unwrap();
    let token = token.to_str().unwrap();
    for (options, said) in [
        (&["--admin-listen", "0.0.0.0:0"][..], "needs a token; give --admin-token-file"),
        (&["--admin-listen", "[::]:0"], "needs a token"),
        (&["--admin-token-file", token], "--admin-listen"),
        (&["--admin-listen", "127.0.0.1:0", "--admin-token-file", "/nowhere/token"], "/nowhere/token"),
    ] {
        let (ok, text) = run(&[&["serve", "--upstream", "http://127.0.0.1:1"], options].concat()).await;
        assert!(!ok && text.contains(said), "{options:?}: {text}");
    }
    std::fs::write(folder.path().join("short"), "short").unwrap();
    let short = folder.path().join("short").display().to_string();
    let options = ["--admin-listen", "0.0.0.0:0", "--admin-token-file", &short];
    let (ok, text) = run(&[&["serve", "--upstream", "http://127.0.0.1:1"][..], &options].concat()).await;
    assert!(!ok && text.contains("at least 16 bytes"), "{text}");

    let (gateway, admin) = gateway(&upstream, folder.path(), &["--admin-token-file", token]).await;
    assert!(!gateway.process.stderr().contains("0123456789abcdef"), "the token is not shown");
    let with = |given: &str| admin.get("/metrics").header("authorization", given).send();
    for wrong in [
        "",
        "Bearer",
        "Bearer 0123456789abcdef-toke",
        "Bearer 0123456789abcdef-tokem",
        "Basic 0123456789abcdef-token",
    ] {
        let refused = with(wrong).await.unwrap();
        assert_eq!((refused.status, refused.header("www-authenticate")), (401, Some("Bearer")), "{wrong}");
    }
    assert_eq!(with("bearer 0123456789abcdef-token").await.unwrap().status, 200);
    assert_eq!((get(admin, "/healthz").await.status, get(admin, "/readyz").await.status), (200, 200));
    std::fs::rename(folder.path().join("onlyonce.db"), folder.path().join("aside.db")).unwrap();
    let unready = wait_for("not ready", async || {
        let answer = get(admin, "/readyz").await;
        (answer.status == 503).then_some(answer)
    })
    .await;
    assert_eq!(unready.json().get("reasons"), None, "the reasons are for who has the token");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gateway_that_guards_nothing_has_metrics_too() {
    let upstream = numbered(Duration::ZERO).await;
    let folder = tempfile::tempdir().unwrap();
    let (gateway, admin) = gateway(&upstream, folder.path(), &["--unguarded"]).await;
    pay(gateway.client(), "k").await.unwrap();
    let metrics = get(admin, "/metrics").await;
    assert_eq!(value(metrics.text(), r#"onlyonce_upstream_seconds_count{guarded="false"}"#), 1.0);
    assert_eq!(get(admin, "/readyz").await.status, 200);
}
