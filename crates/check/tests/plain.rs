//! Servers that know nothing of idempotency: none of them may pass anything that it does not show.
#![allow(clippy::unwrap_used, reason = "a test fails by it")]

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use onlyonce_check::{CheckError, EffectSource, Options, Profile, Report, Target, Verdict, check};
use testkit::{Answer, Upstream};

fn options(url: &str) -> Options {
    let mut options = Options::new(Target::parse(&format!("{url}/pay")).unwrap());
    options.body = r#"{"amount":100}"#.into();
    options.other_body = Some(r#"{"amount":250}"#.into());
    options.slow_body = Some(r#"{"amount":100,"slow":true}"#.into());
    options.failing_body = Some(r#"{"amount":-1}"#.into());
    options.transient_body = Some(r#"{"amount":7}"#.into());
    options.headers.push(("Authorization".into(), "Basic alice".into()));
    options.other_headers.push(("Authorization".into(), "Basic bob".into()));
    options.other_path = Some("/refund".into());
    options.restart_command = Some("true".into());
    (options.rounds, options.concurrency) = (2, 5);
    options.patience = Duration::from_secs(2);
    options
}

fn balance(url: &str) -> Option<EffectSource> {
    let url = Target::parse(&format!("{url}/balance")).unwrap();
    Some(EffectSource::Url { url, pointer: Some("/balance".into()), headers: Vec::new() })
}

async fn report(options: &Options) -> Report {
    check(options, &mut |_| {}).await.unwrap()
}

fn ids(report: &Report, verdict: Verdict) -> BTreeSet<&str> {
    report.of(verdict).map(|result| result.id.as_str()).collect()
}

/// A payment API without keys: each request takes 100 from the balance and gets the number of its run.
async fn payments() -> Upstream {
    let balance = Arc::new(AtomicI64::new(1_000_000));
    Upstream::start(move |seen| match seen.path() {
        "/balance" => Answer::json(200, &serde_json::json!({ "balance": balance.load(Ordering::SeqCst) })),
        _ => {
            let left = balance.fetch_sub(100, Ordering::SeqCst) - 100;
            Answer::json(201, &serde_json::json!({ "balance": left }))
        }
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_always_says_the_same_passes_nothing() {
    for (status, body) in
        [(200, r#"{"ok":true}"#), (404, "no"), (400, "no"), (500, "no"), (409, "no"), (422, "no")]
    {
        let server = Upstream::start(move |_| Answer::new(status, body)).await;
        for profile in Profile::ALL {
            // One profile is enough to wait in vain for an effect.
            for with_probe in [false, true].into_iter().filter(|with| !with || profile == Profile::Strict) {
                let mut options = options(&server.url());
                options.profile = profile;
                if with_probe {
                    options.effect = Some(EffectSource::Command("echo 5".into()));
                }
                let report = report(&options).await;
                assert_eq!(ids(&report, Verdict::Pass), BTreeSet::new(), "{status} {profile} {with_probe}");
                assert!(!report.holds(), "{status} {profile} {with_probe}");
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_without_keys_runs_twice_and_is_told_so() {
    let server = payments().await;
    let mut options = options(&server.url());
    options.effect = balance(&server.url());
    let report = report(&options).await;
    assert_eq!(ids(&report, Verdict::Fail), BTreeSet::from(["once-of-two"]));
    let found = report.of(Verdict::Fail).next().unwrap();
    assert_eq!(found.reason, "sent 2 times: it took effect 2 times");
    assert!(found.sent.contains("POST /pay") && found.got.contains("201") && !found.advice.is_empty());
    assert!(!report.json().contains("alice"), "credentials stay out of reports");
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_probe_once_is_not_observable() {
    let server = payments().await;
    let mut options = options(&server.url());
    options.only = ["once-of-two", "race-once", "disconnect-once", "half-sent"].map(String::from).into();
    options.slow_body = None;
    let report = report(&options).await;
    let unseen = ids(&report, Verdict::NotObservable);
    assert!(unseen.contains("once-of-two") && unseen.contains("half-sent"), "{unseen:?}");
    assert!(ids(&report, Verdict::Fail).contains("race-once"), "the copies got different answers");
    assert_eq!(ids(&report, Verdict::Pass), BTreeSet::from(["two-keys"]));
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_there_is_unreachable_and_not_a_verdict() {
    let url = format!("http://{}", testkit::free_addr());
    let error = check(&options(&url), &mut |_| {}).await.unwrap_err();
    assert!(matches!(error, CheckError::Unreachable { .. }), "{error}");
    let server = payments().await;
    let mut options = options(&server.url());
    options.effect = balance(&url);
    let error = check(&options, &mut |_| {}).await.unwrap_err();
    assert!(matches!(error, CheckError::Unreachable { .. }), "{error}");
    assert_eq!(server.count(), 0, "nothing is sent before the effect can be read");
}
