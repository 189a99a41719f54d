//! `onlyonce check` as a person runs it: the real program, on real servers.
#![allow(clippy::unwrap_used, reason = "a test fails by it")]

#[path = "../common/mod.rs"]
mod common;
mod https;
mod reports;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use common::{Gateway, PROGRAM};
use parking_lot::Mutex;
use serde_json::{Value, json};
use testkit::{Answer, Upstream};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::process::Command;
use tokio::task::JoinHandle;

/// A payment API that knows nothing of keys. Bodies say how it behaves: `slow_ms`, `fail`, `flaky`.
async fn payments() -> Upstream {
    let balance = Arc::new(AtomicI64::new(1_000_000_000));
    let runs = AtomicI64::new(0);
    let flaky: Mutex<Vec<String>> = Mutex::default();
    Upstream::start(move |seen| {
        if seen.path() == "/balance" {
            return Answer::json(200, &json!({ "balance": balance.load(Ordering::SeqCst) }));
        }
        let Ok(order) = serde_json::from_slice::<Value>(&seen.body) else {
            return Answer::json(400, &json!({ "error": "not JSON" }));
        };
        let run = runs.fetch_add(1, Ordering::SeqCst);
        if order["fail"] == true {
            return Answer::json(402, &json!({ "error": "declined", "run": run }));
        }
        let key = seen.header("idempotency-key").unwrap_or_default().to_owned();
        if order["flaky"] == true && !flaky.lock().contains(&key) {
            flaky.lock().push(key);
            return Answer::json(503, &json!({ "error": "try again" }));
        }
        let amount = order["amount"].as_i64().unwrap_or(0);
        let left = balance.fetch_sub(amount, Ordering::SeqCst) - amount;
        let answer = match order["receipt"].as_str() {
            // Bytes that are neither text nor what a decoder would take.
            Some("binary") => Answer::new(201, [&[0xff, 0xfe, 0, run as u8][..], &[0xc3; 40]].concat()),
            Some("encoded") => Answer::new(201, [&[0x1f, 0x8b, run as u8][..], &[7; 40]].concat())
                .header("content-encoding", "gzip"),
            _ => Answer::json(201, &json!({ "balance": left, "run": run })),
        };
        answer
            .header("location", &format!("/payments/{run}"))
            .header("link", "</a>; rel=\"self\"")
            .header("link", "</b>; rel=\"next\"")
            .header("set-cookie", "session=1")
            .delay(Duration::from_millis(order["slow_ms"].as_u64().unwrap_or(0)))
    })
    .await
}

/// What the program said.
struct Run {
    code: i32,
    stdout: String,
    stderr: String,
}

impl Run {
    /// The verdicts of `--json` by their ids.
    fn verdicts(&self) -> BTreeMap<String, String> {
        let results: Vec<Value> =
            serde_json::from_str(&self.stdout).unwrap_or_else(|e| panic!("{e}: {}", self.stderr));
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        results.iter().map(|result| (text(&result["id"]), text(&result["verdict"]))).collect()
    }

    fn with(&self, verdict: &str) -> Vec<String> {
        self.verdicts().into_iter().filter(|(_, found)| found == verdict).map(|(id, _)| id).collect()
    }
}

/// A whole check takes some ten seconds, and more on a busy machine.
const CHECK_MAX: Duration = Duration::from_secs(240);

async fn check(url: &str, args: &[&str]) -> Run {
    run(Command::new(PROGRAM).arg("check").arg(format!("{url}/pay")).args(args)).await
}

async fn run(command: &mut Command) -> Run {
    let output = command.stdin(Stdio::null()).kill_on_drop(true).output();
    let output = tokio::time::timeout(CHECK_MAX, output).await.expect("the check ends").unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Run { code: output.status.code().unwrap(), stdout: text(output.stdout), stderr: text(output.stderr) }
}

const BODY: &str = r#"{"amount":100}"#;

/// What the options of a whole check are, but for the body, the effect and the profile.
#[rustfmt::skip]
const WHOLE: [&str; 18] = [
    "--other-body", r#"{"amount":250}"#,
    "--slow-body", r#"{"amount":100,"slow_ms":800}"#,
    "--failing-body", r#"{"amount":100,"fail":true}"#,
    "--transient-body", r#"{"amount":100,"flaky":true}"#,
    "--header", "Authorization: Basic alice", "--other-header", "Authorization: Basic bob",
    "--other-path", "/refund", "--effect-pointer", "/balance", "--json", "--verbose",
];

/// Checks a gateway in front of an API that knows nothing of keys.
async fn check_gateway(gateway_options: &[&str], body: &str, more: &[&str]) -> Run {
    let upstream = payments().await;
    let folder = tempfile::tempdir().unwrap();
    let gateway = Gateway::start(&upstream.url(), folder.path(), gateway_options).await;
    let effect = format!("{}/balance", upstream.url());
    let args = [&WHOLE[..], &["--body", body, "--effect-url", &effect], more].concat();
    check(&format!("http://{}", gateway.addr), &args).await
}

/// Each scenario passed or is one of `idle`, in the order of the alphabet, which did not apply.
fn all_passed_but(run: &Run, idle: &[&str]) {
    assert_eq!(run.code, 0, "{}{}", run.stderr, run.stdout);
    assert_eq!(run.with("not applicable"), idle);
    assert_eq!(run.with("pass").len() + idle.len(), run.verdicts().len(), "{}", run.stdout);
}

#[tokio::test(flavor = "multi_thread")]
async fn our_gateway_holds_every_applicable_promise_of_the_strict_profile() {
    let run = check_gateway(&["--expires"], BODY, &["--profile", "strict", "--rounds", "3"]).await;
    // Without a restart command, an encoded or a binary body, and keys past 255 characters, which are refused.
    #[rustfmt::skip]
    all_passed_but(&run, &[
        "crash-answered", "crash-once", "error-links", "in-flight-conflict", "key-long", "replay-binary", "replay-encoding",
        "restart-replay",
    ]);
}

#[tokio::test(flavor = "multi_thread")]
async fn our_gateway_replays_binary_and_encoded_answers_to_the_byte() {
    for (receipt, id) in [("binary", "replay-binary"), ("encoded", "replay-encoding")] {
        let body = format!(r#"{{"amount":100,"receipt":"{receipt}"}}"#);
        let run = check_gateway(&[], &body, &["--profile", "strict", "--only", id]).await;
        assert_eq!(run.with("pass"), [id, "two-keys"], "{}", run.stdout);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn our_gateway_holds_the_draft_and_what_stripe_documents_when_it_is_set_to_them() {
    let run = check_gateway(
        &["--docs-url", "https://example.com/keys"],
        BODY,
        &["--profile", "draft", "--rounds", "3"],
    )
    .await;
    assert_eq!((run.code, run.with("fail").len(), run.with("warn").len()), (0, 0, 0), "{}", run.stdout);
    assert_eq!(run.with("not observable"), [""; 0]);
    assert!(run.with("pass").len() >= 30, "{}", run.stdout);
    let run =
        check_gateway(&["--preset", "stripe", "--optional"], BODY, &["--profile", "stripe", "--rounds", "3"])
            .await;
    assert_eq!((run.code, run.with("fail").len(), run.with("warn").len()), (0, 0, 0), "{}", run.stdout);
    assert_eq!(run.with("not observable"), [""; 0]);
    assert!(run.with("pass").len() >= 30, "{}", run.stdout);
}

#[tokio::test(flavor = "multi_thread")]
async fn our_gateway_with_its_guard_off_is_found_out() {
    let run = check_gateway(&["--unguarded"], BODY, &["--profile", "strict", "--rounds", "2"]).await;
    assert_eq!(run.code, 1);
    assert!(run.with("fail").contains(&"once-of-two".to_owned()), "{}", run.stdout);
}

/// A gateway that is killed and started again when anybody connects to the address given; the answer comes when it is up.
async fn killed_on_demand(
    upstream: &str,
    options: &'static [&'static str],
) -> (SocketAddr, SocketAddr, JoinHandle<()>) {
    let (upstream, folder) = (upstream.to_owned(), tempfile::tempdir().unwrap());
    let addr = testkit::free_addr();
    let mut gateway = Gateway::start_on(&addr.to_string(), &upstream, folder.path(), options).await.unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let control = listener.local_addr().unwrap();
    let obey = tokio::spawn(async move {
        while let Ok((mut asker, _)) = listener.accept().await {
            let mut request = [0; 4096];
            assert!(asker.read(&mut request).await.unwrap() > 0);
            gateway.process.kill_9().await.unwrap();
            gateway = Gateway::start_on(&addr.to_string(), &upstream, folder.path(), options).await.unwrap();
            asker.write_all(b"HTTP/1.0 200 OK\r\n\r\n").await.unwrap();
        }
    });
    (addr, control, obey)
}

#[tokio::test(flavor = "multi_thread")]
async fn our_gateway_holds_when_it_is_killed_and_the_outcome_unknown_counts_as_held() {
    let upstream = payments().await;
    let (addr, control, obey) = killed_on_demand(&upstream.url(), &["--lease", "1s", "--log", "quiet"]).await;
    let restart = format!("curl --fail --silent --max-time 60 http://{control}/");
    let effect = format!("{}/balance", upstream.url());
    #[rustfmt::skip]
    let run = check(&format!("http://{addr}"), &[
        "--body", r#"{"amount":100}"#, "--slow-body", r#"{"amount":100,"slow_ms":600}"#, "--restart-cmd", &restart,
        "--effect-url", &effect, "--effect-pointer", "/balance", "--profile", "strict", "--json",
        "--only", "restart-replay,crash-answered,crash-once",
    ]).await;
    obey.abort();
    assert_eq!(
        run.with("pass"),
        ["crash-answered", "crash-once", "restart-replay", "two-keys"],
        "{}",
        run.stdout
    );
    assert!(run.stdout.contains("outcome-unknown"), "{}", run.stdout);
    assert_eq!(run.code, 0, "{}", run.stderr);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_api_without_keys_is_found_out_and_nobody_there_is_another_thing() {
    let upstream = payments().await;
    let effect = format!("{}/balance", upstream.url());
    let body = ["--body", r#"{"amount":100}"#];
    let run = check(
        &upstream.url(),
        &[&body[..], &["--effect-url", &effect, "--effect-pointer", "/balance"]].concat(),
    )
    .await;
    assert_eq!(run.code, 1, "{}", run.stdout);
    assert!(run.stdout.contains("FAIL  once-of-two"), "{}", run.stdout);
    assert!(!run.stdout.contains('\u{1b}'), "no colours in a pipe");
    assert!(
        run.stdout.contains("One promise does not hold (profile practice): once-of-two"),
        "{}",
        run.stdout
    );

    let run = check(&format!("http://{}", testkit::free_addr()), &body).await;
    assert_eq!((run.code, run.stdout.as_str()), (3, ""));
    assert!(run.stderr.contains("cannot be reached"), "{}", run.stderr);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dry_run_says_what_it_would_send_and_sends_nothing() {
    let upstream = payments().await;
    let run = check(&upstream.url(), &["--body", "{}", "--dry-run", "--effect-cmd", "echo 1"]).await;
    assert_eq!(run.code, 0, "{}", run.stderr);
    assert!(run.stdout.contains("once-of-two") && run.stdout.contains("command: echo 1"), "{}", run.stdout);
    assert!(run.stderr.contains(&format!("to {} alone", upstream.url())), "{}", run.stderr);
    assert_eq!(upstream.connections(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_command_line_is_told_what_is_wrong() {
    let upstream = payments().await;
    for (args, expected) in [
        (&["--only", "no-such"][..], "no scenario \"no-such\""),
        (&["--header", "no colon"], "Name: value"),
        (&["--header", "Idempotency-Key: a"], "carries the key"),
        (&["--effect-pointer", "/a"], "--effect-url"),
        (&["--effect-cmd", "echo none"], "no number"),
        (&["--effect-cmd", "exit 3"], "failed"),
        (&["--concurrency", "1"], "2 to 1000"),
        (&["--other-path", "http://elsewhere/"], "slash"),
        (&["--profile", "lax"], "practice"),
    ] {
        let run = check(&upstream.url(), args).await;
        assert_eq!((run.code, run.stdout.as_str()), (2, ""), "{args:?}: {}", run.stderr);
        assert!(run.stderr.contains(expected), "{args:?}: {}", run.stderr);
    }
    assert_eq!(upstream.count(), 0);
}
