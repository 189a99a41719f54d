//! Gateways as processes, for the tests that kill, stop and watch them.
#![allow(dead_code, reason = "each test program uses its part")]

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use testkit::{Client, ClientResponse, Process};

pub(crate) const PROGRAM: &str = env!("CARGO_BIN_EXE_onlyonce");

/// `onlyonce serve` on a free port, its records in the SQLite file `onlyonce.db` of a folder.
pub(crate) struct Gateway {
    pub(crate) process: Process,
    pub(crate) addr: SocketAddr,
    folder: PathBuf,
}

impl Gateway {
    pub(crate) async fn start(upstream: &str, folder: &Path, more: &[&str]) -> Self {
        Self::start_on("127.0.0.1:0", upstream, folder, more).await.expect("the gateway starts")
    }

    pub(crate) async fn start_on(listen: &str, upstream: &str, folder: &Path, more: &[&str]) -> Result<Self> {
        let mut args = vec!["serve", "--listen", listen, "--upstream", upstream];
        if !more.contains(&"--store") {
            args.extend(["--store", "sqlite:onlyonce.db"]);
        }
        args.extend(more);
        Self::ready(Process::spawn(PROGRAM, args, folder)?, folder).await
    }

    /// Waits for a started program that is, or runs, a gateway.
    pub(crate) async fn ready(mut process: Process, folder: &Path) -> Result<Self> {
        process.wait_output("listening on http://").await?;
        let said = process.stderr() + &process.stdout();
        let addr =
            said.lines().find_map(|line| line.split_once("listening on http://")).context("an address")?.1;
        // In JSON a quote follows.
        let addr = addr.split('"').next().unwrap_or_default();
        Ok(Self { addr: addr.trim().parse().context("an address")?, process, folder: folder.to_owned() })
    }

    pub(crate) fn client(&self) -> Client {
        Client::new(self.addr)
    }

    /// The records, through the program's own command.
    pub(crate) async fn keys(&self, args: &[&str]) -> (bool, String) {
        let store = format!("sqlite:{}", self.folder.join("onlyonce.db").display());
        run(&[&["keys"], args, &["--store", &store]].concat()).await
    }

    /// Asks until the answer is not `in-progress`: until a dead owner's lease is over.
    pub(crate) async fn settled(
        &self,
        send: impl AsyncFn(Client) -> Result<ClientResponse>,
    ) -> ClientResponse {
        for _ in 0..300 {
            let answer = send(self.client()).await.expect("an answer");
            if answer.status != 409 || answer.code() != "in-progress" {
                return answer;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        panic!("still in progress after 30 s")
    }
}

/// Runs the program to its end: success, and what it wrote.
pub(crate) async fn run(args: &[&str]) -> (bool, String) {
    let output = tokio::process::Command::new(PROGRAM).args(args).output().await.expect("the program runs");
    let text = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8(text).expect("UTF-8"))
}

/// The payment that all these tests send.
pub(crate) async fn pay(client: Client, key: &str) -> Result<ClientResponse> {
    let body = r#"{"amount":100}"#;
    client.post("/pay").key(key).header("content-type", "application/json").body(body).send().await
}
