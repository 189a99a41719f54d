//! The payment service as a process, on a private Redis.

mod check;
mod crash;
mod refusals;
mod replays;

use std::net::SocketAddr;

use anyhow::{Context, Result};
use tempfile::TempDir;
use testkit::{Client, ClientResponse, Process, Redis};

/// A running service.
struct Pay {
    process: Process,
    addr: SocketAddr,
    _folder: TempDir,
}

impl Pay {
    async fn start(redis: &str, more: &[&str]) -> Self {
        Self::try_start(redis, more).await.expect("the service starts")
    }

    async fn try_start(redis: &str, more: &[&str]) -> Result<Self> {
        Self::try_start_at("127.0.0.1:0", redis, more).await
    }

    async fn try_start_at(listen: &str, redis: &str, more: &[&str]) -> Result<Self> {
        let folder = TempDir::new()?;
        let args = [&["--listen", listen, "--redis", redis], more].concat();
        let mut process = Process::spawn(env!("CARGO_BIN_EXE_pay"), args, folder.path())?;
        process.wait_output("listening on http://").await?;
        let said = process.stdout();
        let addr = said.split("listening on http://").nth(1).context("an address")?.trim().parse()?;
        Ok(Self { process, addr, _folder: folder })
    }

    fn client(&self) -> Client {
        Client::new(self.addr)
    }

    async fn pay(&self, key: &str, body: &str) -> ClientResponse {
        pay(&self.client(), key, body).await.expect("an answer")
    }

    async fn charge(&self, key: &str, amount: u64) -> ClientResponse {
        self.pay(key, &format!("{{\"amount\":{amount}}}")).await
    }
}

async fn pay(client: &Client, key: &str, body: &str) -> Result<ClientResponse> {
    let request = client.post("/pay").header("content-type", "application/json");
    request.key(key).body(body.to_owned()).send().await
}

fn is_replay(answer: &ClientResponse) -> bool {
    answer.header("idempotency-replayed") == Some("true")
}

async fn durable() -> Redis {
    Redis::options().durable().start().await
}

async fn balance(redis: &Redis) -> u64 {
    redis.cli(["get", "balance"]).await.parse().expect("a balance")
}
