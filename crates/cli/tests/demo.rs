//! The README's first command tells the truth, and can fail.

#![allow(clippy::unwrap_used, reason = "a test program")]

mod common;

#[tokio::test(flavor = "multi_thread")]
async fn every_figure_of_the_demo_is_as_it_must_be() {
    let (ok, said) = common::run(&["demo", "--once", "--listen", "127.0.0.1:0"]).await;
    assert!(ok, "{said}");
    for figure in
        ["balance: 9800", "balance: 9900", "ran: 1", "status: 422", "status: 400", "outcome-unknown"]
    {
        assert!(said.contains(figure), "{figure} is missing in\n{said}");
    }
    assert!(!said.contains('✗'), "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn with_the_guard_off_the_demo_fails() {
    let (ok, said) = common::run(&["demo", "--once", "--unguarded", "--listen", "127.0.0.1:0"]).await;
    assert!(!ok, "the demo must be able to fail:\n{said}");
    assert!(said.contains("must be 9900"), "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_port_in_use_is_a_clear_error() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let (ok, said) = common::run(&["demo", "--once", "--listen", &address]).await;
    assert!(!ok && said.contains(&address) && said.to_lowercase().contains("in use"), "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_ends_the_demo_ends_its_gateway_and_leaves_no_files() {
    type Signal = fn(&testkit::Process) -> anyhow::Result<()>;
    let signals: [(&str, Signal); 2] =
        [("SIGTERM", testkit::Process::sigterm), ("SIGINT", testkit::Process::sigint)];
    for (name, signal) in signals {
        let temp = tempfile::tempdir().unwrap();
        let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_onlyonce"));
        command.args(["demo", "--listen", "127.0.0.1:0"]).env("TMPDIR", temp.path());
        let mut demo = testkit::Process::from_command(command).unwrap();
        demo.wait_output("Ctrl-C ends it").await.unwrap();
        let said = demo.stdout();
        let (_, rest) = said.split_once("curl -i http://").unwrap();
        let address = rest.split('/').next().unwrap();
        assert!(tokio::net::TcpStream::connect(address).await.is_ok(), "{said}");
        signal(&demo).unwrap();
        let status = demo.wait_exit().await.unwrap();
        assert_eq!(status.code(), Some(0), "{name}: {}", demo.stderr());
        assert!(tokio::net::TcpStream::connect(address).await.is_err(), "{name}: the gateway still listens");
        assert_eq!(std::fs::read_dir(temp.path()).unwrap().count(), 0, "{name}: files are left");
    }
}
