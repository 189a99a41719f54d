//! What a run never does: send to another host, send more than it may, hand credentials on, wait for ever.
#![allow(clippy::unwrap_used, reason = "a test fails by it")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use onlyonce_check::{EffectSource, Options, Plan, Target, Verdict, check};
use testkit::{Answer, RawUpstream, Upstream};

fn options(url: &str) -> Options {
    let mut options = Options::new(Target::parse(&format!("{url}/pay")).unwrap());
    options.body = r#"{"amount":100}"#.into();
    options.headers.push(("Authorization".into(), "Bearer hush".into()));
    (options.rounds, options.concurrency) = (2, 4);
    options
}

/// Answers each request with its number.
async fn numbered() -> Upstream {
    Upstream::start(|seen| Answer::new(201, seen.number.to_string())).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_redirect_is_an_answer_and_is_not_followed() {
    let elsewhere = numbered().await;
    let (to, runs) = (format!("{}/pay", elsewhere.url()), AtomicU64::new(0));
    for status in [303, 307] {
        let (to, run) = (to.clone(), runs.fetch_add(1, Ordering::SeqCst));
        let server = Upstream::start(move |seen| {
            Answer::new(status, format!("{run} {}", seen.number)).header("location", &to)
        })
        .await;
        let report = check(&options(&server.url()), &mut |_| {}).await.unwrap();
        assert_eq!(report.results[0].verdict, Verdict::Pass, "{status} is an answer like any other");
        assert!(server.count() > 10);
    }
    assert_eq!(elsewhere.connections(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn credentials_go_to_the_host_that_they_are_for() {
    let (server, count) = (numbered().await, Arc::new(AtomicU64::new(0)));
    let probed = Upstream::start(move |_| Answer::new(200, count.load(Ordering::SeqCst).to_string())).await;
    let mut options = options(&server.url());
    options.only.insert("missing-key".into());
    let effect = |url: &str, headers: &[(&str, &str)]| EffectSource::Url {
        url: Target::parse(&format!("{url}/effect")).unwrap(),
        pointer: None,
        headers: headers.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect(),
    };
    options.effect = Some(effect(&probed.url(), &[("X-Probe", "mine")]));
    check(&options, &mut |_| {}).await.unwrap();
    assert!(probed.seen().iter().all(|seen| seen.header("authorization").is_none()));
    assert!(probed.seen().iter().all(|seen| seen.header("x-probe") == Some("mine")));
    assert!(server.seen().iter().all(|seen| seen.header("authorization") == Some("Bearer hush")));
    assert!(server.seen().iter().all(|seen| seen.header("x-probe").is_none()));

    options.effect = Some(effect(&server.url(), &[("Authorization", "Basic other")]));
    check(&options, &mut |_| {}).await.unwrap();
    let seen = server.seen();
    let probes: Vec<_> = seen.iter().filter(|seen| seen.path() == "/effect").collect();
    assert!(
        !probes.is_empty() && probes.iter().all(|seen| seen.header_all("authorization") == ["Basic other"])
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_is_cut_short_at_its_number_of_requests() {
    let server = numbered().await;
    let mut options = options(&server.url());
    options.requests_max = 7;
    let report = check(&options, &mut |_| {}).await.unwrap();
    assert_eq!((server.count(), report.requests), (7, 7));
    assert!(report.is_cut_short && !report.holds());
    let cut: Vec<_> = report.of(Verdict::NotObservable).map(|result| result.reason.as_str()).collect();
    assert!(cut.contains(&"the number of requests for the whole run was reached"), "{cut:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_is_cut_short_at_its_time_whatever_the_server_does() {
    // Says "in progress" to every retry, so that each is waited for.
    let server = Upstream::start(|seen| match seen.number {
        1 | 2 => Answer::new(201, seen.number.to_string()),
        _ => Answer::new(409, "in progress"),
    })
    .await;
    let mut options = options(&server.url());
    options.time_max = Duration::from_secs(1);
    options.patience = Duration::from_secs(600);
    options.restart_command = Some("sleep 600".into());
    let report = testkit::within("the run ends", check(&options, &mut |_| {})).await.unwrap();
    assert!(report.is_cut_short, "{}", report.text(true));

    // Never answers at all.
    let silent = RawUpstream::start(|_, connection| async move {
        let _open = connection;
        std::future::pending().await
    })
    .await;
    options.url = Target::parse(&silent.url()).unwrap();
    options.timeout = Duration::from_millis(300);
    let error = testkit::within("the run ends", check(&options, &mut |_| {})).await.unwrap_err();
    assert!(error.to_string().contains("no answer within"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_plan_is_not_below_what_is_sent() {
    let server = numbered().await;
    let options = options(&server.url());
    let plan = Plan::of(&options).unwrap();
    assert_eq!(plan.hosts, [server.url()]);
    check(&options, &mut |_| {}).await.unwrap();
    assert!(server.count() <= plan.requests as usize, "{} of {}", server.count(), plan.requests);
    assert!(server.seen().iter().all(|seen| seen.path() == "/pay"
        || seen.path().starts_with("/pay/onlyonce-check")
        || seen.path().starts_with("/pay?")));
}
