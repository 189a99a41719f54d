//! H26: what SIGTERM and Ctrl-C do.

use std::time::Duration;

use testkit::{Answer, Process, Upstream, wait_for, wait_until};

use crate::common::{Gateway, pay};
use crate::numbered;

#[tokio::test(flavor = "multi_thread")]
async fn a_signal_finishes_what_runs_accepts_nothing_more_and_exits_0() {
    type Signal = fn(&Process) -> anyhow::Result<()>;
    let signals: [(&str, Signal); 2] = [("SIGTERM", Process::sigterm), ("SIGINT", Process::sigint)];
    for (name, signal) in signals {
        let folder = tempfile::tempdir().unwrap();
        let upstream = numbered(Duration::from_secs(1)).await;
        let mut gateway = Gateway::start(&upstream.url(), folder.path(), &[]).await;
        let client = gateway.client();
        let running = tokio::spawn(pay(client, "k"));
        wait_until("the upstream runs", || upstream.count() == 1).await;
        signal(&gateway.process).unwrap();
        wait_for("no connection is accepted", async || client.connect().await.is_err().then_some(())).await;
        let answer = running.await.unwrap().expect("the running request is answered");
        assert_eq!((answer.status, answer.text()), (201, "run 1"), "{name}");
        let status = gateway.process.wait_exit().await.unwrap();
        assert_eq!(status.code(), Some(0), "{name}: {}", gateway.process.stderr());

        let next = Gateway::start(&upstream.url(), folder.path(), &[]).await;
        let retry = pay(next.client(), "k").await.unwrap();
        assert_eq!((retry.text(), retry.header("idempotency-replayed")), ("run 1", Some("true")), "{name}");
        assert_eq!(upstream.count(), 1, "{name}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn work_that_outlives_the_bound_keeps_its_lease_and_the_exit_code_is_0() {
    let folder = tempfile::tempdir().unwrap();
    let upstream = Upstream::start(|_| Answer::hang()).await;
    let options = ["--shutdown-timeout", "300ms"];
    let mut gateway = Gateway::start(&upstream.url(), folder.path(), &options).await;
    let running = tokio::spawn(pay(gateway.client(), "k"));
    wait_until("the upstream runs", || upstream.count() == 1).await;
    gateway.process.sigterm().unwrap();
    let status = gateway.process.wait_exit().await.unwrap();
    let said = gateway.process.stderr();
    assert_eq!(status.code(), Some(0), "{said}");
    assert!(said.contains("1 guarded operation(s) still running keep their leases"), "{said}");
    assert!(running.await.unwrap().is_err(), "its client gets no answer");

    // Not released: a retry does not run while the lease lasts.
    let next = Gateway::start(&upstream.url(), folder.path(), &[]).await;
    let retry = pay(next.client(), "k").await.unwrap();
    assert_eq!((retry.status, retry.code().as_str()), (409, "in-progress"));
    let (ok, listed) = next.keys(&["list", "--json"]).await;
    assert!(ok && listed.contains("\"in_progress\""), "{listed}");
    assert_eq!(upstream.count(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_ctrl_c_waits_for_nothing_and_releases_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let upstream = Upstream::start(|_| Answer::hang()).await;
    let mut gateway = Gateway::start(&upstream.url(), folder.path(), &["--shutdown-timeout", "1h"]).await;
    let running = tokio::spawn(pay(gateway.client(), "k"));
    wait_until("the upstream runs", || upstream.count() == 1).await;
    gateway.process.sigint().unwrap();
    gateway.process.wait_output("Ctrl-C ends it at once").await.unwrap();
    gateway.process.sigint().unwrap();
    let status = gateway.process.wait_exit().await.unwrap();
    assert_eq!(status.code(), Some(130), "{}", gateway.process.stderr());
    assert!(running.await.unwrap().is_err());
    let next = Gateway::start(&upstream.url(), folder.path(), &[]).await;
    assert_eq!(pay(next.client(), "k").await.unwrap().code(), "in-progress");
}
