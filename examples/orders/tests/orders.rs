//! The shop and its provider as processes, on PostgreSQL.

use anyhow::{Context, Result};
use futures_util::future::join_all;
use tempfile::TempDir;
use testkit::{Client, ClientResponse, Postgres, Process};

/// A running program with its address.
struct Running {
    process: Process,
    client: Client,
    addr: String,
    _folder: TempDir,
}

async fn start(args: &[&str]) -> Running {
    try_start(args).await.expect("it starts")
}

async fn try_start(args: &[&str]) -> Result<Running> {
    let folder = TempDir::new()?;
    let args = [args, &["--listen", "127.0.0.1:0"]].concat();
    let mut process = Process::spawn(env!("CARGO_BIN_EXE_orders"), args, folder.path())?;
    process.wait_output("listening on http://").await?;
    let said = process.stdout();
    let addr = said.split("listening on http://").nth(1).context("an address")?.trim().to_owned();
    Ok(Running { client: Client::new(addr.parse()?), process, addr, _folder: folder })
}

/// The database and the provider, with as many shops as a test starts.
struct Town {
    server: Postgres,
    database: String,
    provider: Running,
}

async fn town() -> Town {
    let server = Postgres::shared().await;
    let database = server.database().await;
    Town { server, database, provider: start(&["provider"]).await }
}

impl Town {
    async fn shop(&self, more: &[&str]) -> Running {
        let url = self.server.url(&self.database);
        start(&[&["serve", "--database", &url, "--provider", &self.provider.addr], more].concat()).await
    }

    async fn rows(&self) -> String {
        let sql = "select (select count(*) from orders), (select count(*) from payments),
            (select count(*) from idempotency_keys where status = 'completed'),
            (select count(*) from idempotency_keys where status <> 'completed')";
        self.server.psql(&self.database, sql).await
    }

    /// How often the provider was called, and how often it charged.
    async fn provider(&self) -> (u64, u64) {
        let said = self.provider.client.get("/charges").send().await.expect("the provider").json();
        (said["calls"].as_u64().expect("calls"), said["charges"].as_u64().expect("charges"))
    }
}

async fn order(shop: &Running, key: &str, amount: u32) -> Result<ClientResponse> {
    let body = format!("{{\"item\":\"tea\",\"amount\":{amount}}}");
    shop.client.post("/orders").key(key).body(body).send().await
}

async fn ordered(shop: &Running, key: &str, amount: u32) -> ClientResponse {
    order(shop, key, amount).await.expect("an answer")
}

fn is_replay(answer: &ClientResponse) -> bool {
    answer.header("idempotency-replayed") == Some("true")
}

#[tokio::test(flavor = "multi_thread")]
async fn an_order_is_placed_and_charged_once_and_every_retry_gets_its_answer() {
    let town = town().await;
    let shops = [town.shop(&[]).await, town.shop(&[]).await];
    let copies = join_all((0..20).map(|n| ordered(&shops[n % 2], "order-1", 3))).await;
    for copy in &copies {
        assert_eq!((copy.status, copy.text()), (201, copies[0].text()), "{copy:?}");
    }
    assert_eq!(copies.iter().filter(|copy| !is_replay(copy)).count(), 1);
    assert_eq!(copies[0].header("content-type"), Some("application/json"));
    assert!(copies[0].header("idempotency-key-expires").is_some());
    assert_eq!((town.rows().await.as_str(), town.provider().await), ("1|1|1|0", (1, 1)));
    // One transaction wrote all three.
    let same = "select count(distinct x) from (select xmin::text x from orders union all select xmin::text from payments
        union all select xmin::text from idempotency_keys) rows";
    assert_eq!(town.server.psql(&town.database, same).await, "1");
    // Another order under the key, no key, no order.
    let refused = ordered(&shops[0], "order-1", 4).await;
    assert_eq!((refused.status, refused.code().as_str()), (422, "key-reused"));
    let refused = shops[0].client.post("/orders").body("{}").send().await.expect("an answer");
    assert_eq!((refused.status, refused.code().as_str()), (400, "key-missing"));
    let refused = shops[0].client.post("/orders").key("order-2").body("{}").send().await.expect("an answer");
    assert_eq!(refused.status, 400);
    assert_eq!(ordered(&shops[1], "order-2", 5).await.status, 201);
    assert_eq!((town.rows().await.as_str(), town.provider().await), ("2|2|2|0", (2, 2)));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_declined_order_is_taken_back_and_stays_declined() {
    let town = town().await;
    let shop = town.shop(&[]).await;
    for copy in 0..3 {
        let answer = ordered(&shop, "dear", 1001).await;
        assert_eq!((answer.status, is_replay(&answer)), (402, copy > 0));
    }
    assert_eq!((town.rows().await.as_str(), town.provider().await), ("0|0|1|0", (1, 0)));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crash_between_the_charge_and_the_commit_is_harmless() {
    let town = town().await;
    let mut shop = town.shop(&["--stop-before-commit"]).await;
    let client = shop.client;
    let asked = tokio::spawn(async move {
        client.post("/orders").key("order-1").body(r#"{"item":"tea","amount":3}"#).send().await
    });
    shop.process.wait_output("charged ch_1, and not committed").await.expect("it charges");
    shop.process.kill_9().await.expect("it is killed");
    assert!(asked.await.expect("a task").is_err(), "the client got no answer");
    // Charged, and nothing of it here.
    assert_eq!((town.rows().await.as_str(), town.provider().await), ("0|0|0|0", (1, 1)));
    // The retry meets another instance. No lease to wait for; the provider knows the key.
    let other = town.shop(&[]).await;
    let answer = ordered(&other, "order-1", 3).await;
    assert_eq!((answer.status, is_replay(&answer)), (201, false));
    assert_eq!(answer.json()["charge"], "ch_1");
    assert_eq!((town.rows().await.as_str(), town.provider().await), ("1|1|1|0", (2, 1)));
    assert!(is_replay(&ordered(&other, "order-1", 3).await));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_provider_that_is_away_leaves_the_key_free() {
    let mut town = town().await;
    let shop = town.shop(&[]).await;
    town.provider.process.kill_9().await.expect("it is killed");
    let answer = ordered(&shop, "order-1", 3).await;
    assert_eq!(answer.status, 503);
    assert!(answer.header("retry-after").is_some());
    assert_eq!(town.rows().await, "0|0|0|0");
    town.provider = start(&["provider"]).await;
    let shop = town.shop(&[]).await;
    assert_eq!(ordered(&shop, "order-1", 3).await.status, 201);
    assert_eq!((town.rows().await.as_str(), town.provider().await), ("1|1|1|0", (1, 1)));
}

#[test]
fn the_script_shows_it_on_a_private_server() {
    let script = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("run.sh");
    let mut command = std::process::Command::new(&script);
    let output = command.env("ORDERS", env!("CARGO_BIN_EXE_orders")).current_dir("/").output().expect("bash");
    let said =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {said}", output.status);
    for line in [
        "first: 201 {\"charge\":\"ch_1\",\"order\":1}",
        "again: 201 {\"charge\":\"ch_1\",\"order\":1}",
        "another order: 422",
        "declined: 402",
        "killed between charge and commit: orders=1 charges=2",
        "retried: 201 {\"charge\":\"ch_2\",",
        "at the end: orders=2 payments=2 charges=2",
    ] {
        assert!(said.contains(line), "{line}: {said}");
    }
}
