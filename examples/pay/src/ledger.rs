//! The money: one number in Redis, and the script that takes from it.

use anyhow::{Context, Result};
use onlyonce::redis::{Effect, OnceOutcome, Options, Plan, RedisStore};
use onlyonce::{Operation, Reply, Store, StoreError};
use redis::aio::{ConnectionManager, ConnectionManagerConfig};

use crate::amount::Amount;

const KEY: &str = "balance";
const AT_START: u64 = 10_000;

/// Reads and decides; the writes that it names are made with the record. `ARGV[2]` is a fault to try out.
const CHARGE: &str = r#"
    if ARGV[2] ~= '' then return {transient = ARGV[2]} end
    local amount = tonumber(ARGV[1])
    local balance = redis.call('GET', KEYS[1])
    if not balance then return {transient = 'there is no balance'} end
    if not string.match(balance, '^%d+$') or #balance > 15 or string.match(balance, '^0%d') then return {transient = 'the balance is no whole number'} end
    if tonumber(balance) < amount then
        return {status = 402, body = string.format('{"error":"insufficient balance","balance":%s}', balance)}
    end
    return {
        status = 200,
        body = string.format('{"charged":%s,"balance":%.0f}', ARGV[1], tonumber(balance) - amount),
        writes = {{'DECRBY', KEYS[1], ARGV[1]}},
    }
"#;

/// The same without a record: what `--unprotected` shows.
const CHARGE_EACH_TIME: &str = r#"
    local balance = tonumber(redis.call('GET', KEYS[1]))
    if balance < tonumber(ARGV[1]) then
        return {402, string.format('{"error":"insufficient balance","balance":%.0f}', balance)}
    end
    return {200, string.format('{"charged":%s,"balance":%.0f}', ARGV[1], redis.call('DECRBY', KEYS[1], ARGV[1]))}
"#;

/// The balance, and the records of who was charged.
#[derive(Clone)]
pub(crate) struct Ledger {
    store: RedisStore,
    plan: Plan,
    each_time: redis::Script,
    connection: ConnectionManager,
}

impl Ledger {
    /// Connects, and sets the balance: always, or with `keep` only where there is none.
    pub(crate) async fn open(url: &str, keep: bool) -> Result<Self> {
        // The balance has a connection of its own, of a driver that does not know the store's options.
        anyhow::ensure!(
            !url.contains('?'),
            "--redis: one server, redis://HOST:PORT/DATABASE, without options after `?`"
        );
        let help = "is redis-server running there? --redis takes another URL";
        let store = Options::from_url(url)?.open().await.context(help)?;
        if let Some(hazard) = store.capabilities().hazard {
            tracing::warn!("{hazard}");
        }
        let client = redis::Client::open(url).context("--redis must be one server: redis://HOST:PORT")?;
        let patient = ConnectionManagerConfig::new()
            .set_response_timeout(Some(std::time::Duration::from_secs(2)))
            .set_connection_timeout(Some(std::time::Duration::from_secs(1)))
            .set_number_of_retries(1);
        let mut connection = client.get_connection_manager_with_config(patient).await.context(help)?;
        let mut set = redis::cmd("SET");
        set.arg(KEY).arg(AT_START);
        if keep {
            set.arg("NX");
        }
        set.query_async::<redis::Value>(&mut connection).await.context("set the balance")?;
        let each_time = redis::Script::new(CHARGE_EACH_TIME);
        Ok(Self { store, plan: Plan::new(CHARGE), each_time, connection })
    }

    /// What is left.
    pub(crate) async fn balance(&self) -> Result<u64> {
        let mut connection = self.connection.clone();
        redis::cmd("GET").arg(KEY).query_async(&mut connection).await.context("read the balance")
    }

    /// Charges once for each operation; `fault` is what goes wrong this time, for the moment.
    pub(crate) async fn charge(
        &self,
        operation: &Operation,
        amount: Amount,
        fault: Option<&str>,
    ) -> Result<OnceOutcome, StoreError> {
        self.store.once(operation, &self.effect(amount, fault)).await
    }

    fn effect(&self, amount: Amount, fault: Option<&str>) -> Effect {
        let json = Reply::ok("")
            .with_header(http::header::CONTENT_TYPE, http::HeaderValue::from_static("application/json"));
        let effect = self.plan.effect().headers_of(&json);
        effect.key(KEY).arg(amount.get().to_string()).arg(fault.unwrap_or_default())
    }

    /// Charges each time it is asked: status and body.
    pub(crate) async fn charge_each_time(&self, amount: Amount) -> Result<(u16, String)> {
        let mut connection = self.connection.clone();
        let mut call = self.each_time.key(KEY);
        call.arg(amount.get());
        call.invoke_async(&mut connection).await.context("charge")
    }
}
