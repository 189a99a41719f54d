//! The service as a stranger sees it: `onlyonce check` under its strict profile, with the balance as the effect.

use std::collections::BTreeSet;
use std::time::Duration;

use onlyonce_check::{EffectSource, Options, Profile, Report, Target, Verdict, check};
use testkit::FaultProxy;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use super::*;

/// A service that is killed with `kill -9` and started again when a shell command asks for it.
struct OnDemand {
    addr: SocketAddr,
    command: String,
    obeys: JoinHandle<()>,
}

impl OnDemand {
    async fn start(redis: String) -> Self {
        let mut pay = Pay::start(&redis, &["--keep-balance"]).await;
        let bell = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let addr = pay.addr;
        let command = format!(
            "curl --fail --silent --show-error --max-time 60 http://{}/",
            bell.local_addr().expect("an address")
        );
        let obeys = tokio::spawn(async move {
            while let Ok((mut asker, _)) = bell.accept().await {
                let _ = asker.read(&mut [0; 1024]).await;
                pay.process.kill_9().await.expect("it runs");
                let listen = addr.to_string();
                pay = Pay::try_start_at(&listen, &redis, &["--keep-balance"]).await.expect("it starts again");
                let _ = asker.write_all(b"HTTP/1.1 204 No Content\r\n\r\n").await;
            }
        });
        Self { addr, command, obeys }
    }
}

impl Drop for OnDemand {
    fn drop(&mut self) {
        self.obeys.abort();
    }
}

fn options(pay: &OnDemand, redis: &Redis) -> Options {
    let mut options = Options::new(Target::parse(&format!("http://{}/pay", pay.addr)).expect("a URL"));
    options.body = r#"{"amount":100}"#.into();
    options.other_body = Some(r#"{"amount":200}"#.into());
    options.failing_body = Some(r#"{"amount":999999999999}"#.into());
    options.effect = Some(EffectSource::Command(format!("redis-cli -p {} get balance", redis.addr().port())));
    options.restart_command = Some(pay.command.clone());
    options.profile = Profile::Strict;
    (options.rounds, options.settle) = (3, Duration::from_millis(30));
    options
}

fn ids(report: &Report, verdict: Verdict) -> Vec<&str> {
    let found = report.results.iter().filter(|result| result.verdict == verdict);
    found.map(|result| result.id.as_str()).collect()
}

const WITH_SLOW_WORK: [&str; 9] = [
    "in-flight",
    "in-flight-settles",
    "in-flight-long",
    "mismatch-in-flight",
    "others-go-on",
    "disconnect-answered",
    "disconnect-once",
    "crash-answered",
    "crash-once",
];
/// Of the draft alone; and a charge is never refused as in progress.
const NOT_HERE: [&str; 3] = ["in-flight-conflict", "error-links", "in-flight-retry-after"];

/// Each scenario that is tried passes.
fn all_hold(report: &Report) {
    for verdict in [Verdict::Fail, Verdict::Warn, Verdict::NotObservable] {
        assert_eq!(ids(report, verdict), [""; 0], "{}", report.json());
    }
    assert!(report.holds());
}

#[tokio::test(flavor = "multi_thread")]
async fn it_holds_every_applicable_promise_of_the_strict_profile() {
    let redis = durable().await;
    redis.cli(["set", "balance", "1000000"]).await;
    let pay = OnDemand::start(redis.url()).await;
    let report = check(&options(&pay, &redis), &mut |_| {}).await.expect("it is there");
    all_hold(&report);
    // What needs work that takes long is below. It has one operation and one shop, keys of 255 characters at most, no
    // body that fails once (`--fail-next` does, see replays.rs), and its answers are short JSON without cookies.
    let idle: Vec<_> = ids(&report, Verdict::NotApplicable)
        .into_iter()
        .filter(|id| !WITH_SLOW_WORK.contains(id) && !NOT_HERE.contains(id))
        .collect();
    #[rustfmt::skip]
    assert_eq!(idle, [
        "key-long", "replay-binary", "replay-encoding", "replay-repeated-headers", "replay-set-cookie", "mismatch-path",
        "mismatch-method", "principals", "failure-transient",
    ]);
}

/// With a slow network to Redis a charge takes long enough to be met in flight, and to be killed in its midst.
#[tokio::test(flavor = "multi_thread")]
async fn slow_or_killed_in_the_middle_it_holds_too() {
    let redis = durable().await;
    redis.cli(["set", "balance", "1000000"]).await;
    let network = FaultProxy::start(redis.addr()).await;
    let pay = OnDemand::start(format!("redis://{}", network.addr())).await;
    network.delay(Duration::from_millis(200));
    let mut options = options(&pay, &redis);
    options.slow_body = Some(options.body.clone());
    options.only = WITH_SLOW_WORK.map(String::from).into();
    let report = check(&options, &mut |_| {}).await.expect("it is there");
    all_hold(&report);
    let passed = BTreeSet::from_iter(ids(&report, Verdict::Pass));
    assert_eq!(
        passed,
        BTreeSet::from_iter(WITH_SLOW_WORK.into_iter().chain(["two-keys"])),
        "{}",
        report.json()
    );
}
