//! One checked connection to one server.

use std::sync::Arc;
use std::time::Duration;

use onlyonce_core::StoreErrorKind;
use redis::aio::{ConnectionLike, MultiplexedConnection};
use redis::{AsyncConnectionConfig, ServerErrorKind, Value};
use tokio::sync::{mpsc, oneshot};
use tokio::task::AbortHandle;
use tokio::time::timeout;

use crate::error::Fault;
use crate::fitness::{self, Fitness};
use crate::lanes::{Health, Lanes};
use crate::open::{Address, Kind, Options, Purpose};
use crate::request::Request;
use crate::rights;

/// Callers who wait for replicas; past it they wait for room.
const CONFIRM_MAX: usize = 1024;

/// A connection that was checked when it was made, and serves any number of callers at once.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) fitness: Fitness,
    address: Address,
    connection: MultiplexedConnection,
    calm: Lanes,
    replicated: Option<Replicated>,
    timeout: Duration,
    health: Arc<Health>,
}

/// A second connection, for writes that replicas must confirm: WAIT counts the writes of its own connection alone, and
/// holds back whatever is sent behind it, renewals too.
#[derive(Debug)]
struct Replicated {
    lanes: Lanes,
    confirm: mpsc::Sender<oneshot::Sender<Result<i64, Fault>>>,
    task: AbortHandle,
}

impl Drop for Replicated {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Link {
    /// Connects and checks.
    pub(crate) async fn open(options: &Options, address: &Address) -> Result<Arc<Self>, Fault> {
        let client = options.client(address)?;
        let open = async {
            let mut connection = connect(&client).await?;
            let mut second = connection.clone();
            // Both in one round trip.
            let (fitness, rights) = tokio::join!(fitness::check(&mut connection, options, address), async {
                match options.purpose {
                    Purpose::Work => rights::check(&mut second, options, address).await,
                    Purpose::Look | Purpose::Operate => Ok(()),
                }
            });
            let fitness = fitness?;
            rights?;
            let health = Health::new();
            let replicated = match options.min_replicas {
                0 => None,
                replicas => {
                    let connection = connect(&client).await?;
                    let lanes = Lanes::start(&connection, &health, fitness.durability, options.timeout);
                    Some(Replicated::start(connection, lanes, replicas, options))
                }
            };
            Ok::<_, Fault>(Self {
                address: address.clone(),
                calm: Lanes::start(&connection, &health, fitness.durability, options.timeout),
                connection,
                fitness,
                replicated,
                timeout: options.timeout,
                health,
            })
        };
        match timeout(options.connect_timeout, open).await {
            Ok(Err(fault)) if options.kind != Kind::Single => Err(fault.at(address)),
            Ok(opened) => opened.map(Arc::new),
            Err(_) => Err(Fault::new(
                StoreErrorKind::Unavailable,
                format!("no connection to {address} within {:?}", options.connect_timeout),
            )),
        }
    }

    /// Sends the commands and waits for their answers; an answer may be an error of the server.
    pub(crate) async fn ask(
        &self,
        request: &Request<'_>,
        replicated: bool,
        asking: bool,
    ) -> Result<Vec<Value>, Fault> {
        let values = self.send(request, replicated, asking).await?;
        let unknown = values.iter().any(|value| is_error(value, ServerErrorKind::NoScript));
        let Some(code) = request.script.filter(|_| unknown) else { return Ok(values) };
        let mut load = redis::cmd("SCRIPT");
        load.arg("LOAD").arg(code);
        let loaded = self.send(&Request::of([load]), replicated, false).await?;
        if let Some(Value::ServerError(error)) = loaded.first() {
            return Err(Fault::refused(error));
        }
        self.send(request, replicated, asking).await
    }

    async fn send(&self, request: &Request<'_>, replicated: bool, asking: bool) -> Result<Vec<Value>, Fault> {
        let lanes = match &self.replicated {
            Some(its) if replicated => &its.lanes,
            _ => &self.calm,
        };
        lanes.ask(&request.what, asking).await
    }

    /// Waits until enough replicas have what was written on this link so far, and says how many have.
    pub(crate) async fn confirm(&self) -> Result<i64, Fault> {
        let Some(replicated) = &self.replicated else { return Ok(i64::MAX) };
        let (answer, answered) = oneshot::channel();
        let ended =
            || Fault::new(StoreErrorKind::Unavailable, "the connection failed before replicas confirmed");
        replicated.confirm.send(answer).await.map_err(|_| ended())?;
        answered.await.map_err(|_| ended())?
    }

    /// Whether whatever was sent for replicas to confirm has been carried out.
    pub(crate) async fn has_drained(&self, patience: Duration) -> bool {
        self.replicated.as_ref().map_or(&self.calm, |its| &its.lanes).have_drained(patience).await
    }

    /// Whether it still answers.
    pub(crate) async fn ping(&self) -> Result<(), Fault> {
        let answers = self.ask(&Request::of([redis::cmd("PING")]), false, false).await?;
        match answers.first() {
            // Forbidden is an answer too: the server is there.
            Some(Value::ServerError(error)) if error.code() != "NOPERM" => {
                self.give_up();
                Err(Fault::refused(error))
            }
            _ => Ok(()),
        }
    }

    /// Whether the server is still what it was found to be.
    pub(crate) async fn check_again(&self, options: &Options) -> Result<(), Fault> {
        let mut connection = self.connection.clone();
        match timeout(self.timeout, fitness::check(&mut connection, options, &self.address)).await {
            Ok(checked) => checked.map(|_| ()),
            Err(_) => Err(Fault::new(StoreErrorKind::Timeout, "no answer to INFO")),
        }
    }

    /// How long ago it answered last, in ms.
    pub(crate) fn silent_ms(&self) -> u64 {
        self.health.silent_ms()
    }

    /// Marks it as not to be used again.
    pub(crate) fn give_up(&self) {
        self.health.give_up();
    }

    pub(crate) fn is_broken(&self) -> bool {
        self.health.is_broken()
    }
}

impl Replicated {
    fn start(connection: MultiplexedConnection, lanes: Lanes, replicas: u32, options: &Options) -> Self {
        let (confirm, asked) = mpsc::channel(CONFIRM_MAX);
        let task =
            tokio::spawn(confirm_all(connection, asked, replicas, options.replica_timeout, options.timeout));
        Self { lanes, confirm, task: task.abort_handle() }
    }
}

/// One WAIT for everybody who asked while the last one was under way. What they wrote was answered before they asked, so
/// it is before the WAIT.
async fn confirm_all(
    mut connection: MultiplexedConnection,
    mut asked: mpsc::Receiver<oneshot::Sender<Result<i64, Fault>>>,
    replicas: u32,
    patience: Duration,
    slack: Duration,
) {
    let mut wait = redis::cmd("WAIT");
    // 0 would wait for ever.
    wait.arg(replicas).arg(u64::try_from(patience.as_millis()).unwrap_or(u64::MAX).max(1));
    let mut waiting = Vec::new();
    while asked.recv_many(&mut waiting, CONFIRM_MAX).await > 0 {
        let outcome = match timeout(patience + slack, connection.req_packed_command(&wait)).await {
            Ok(Ok(Value::Int(replicas))) => Ok(replicas),
            Ok(Ok(Value::ServerError(error))) => Err(Fault::refused(&error)),
            Ok(Ok(_)) => Err(Fault::strange("to WAIT")),
            Ok(Err(error)) => Err(Fault::lost(error)),
            Err(_) => Err(Fault::new(StoreErrorKind::Timeout, "no answer to WAIT")),
        };
        for caller in waiting.drain(..) {
            // Who is gone does not want to know.
            let _ = caller.send(outcome.clone());
        }
    }
}

async fn connect(client: &redis::Client) -> Result<MultiplexedConnection, Fault> {
    // Time is bounded here, not in the driver: its defaults are 1 s to connect and 500 ms for an answer.
    let config = AsyncConnectionConfig::new().set_connection_timeout(None).set_response_timeout(None);
    client.get_multiplexed_async_connection_with_config(&config).await.map_err(Fault::unreachable)
}

/// Whether an answer is an error of this kind.
pub(crate) fn is_error(value: &Value, kind: ServerErrorKind) -> bool {
    matches!(value, Value::ServerError(error) if error.kind() == Some(kind))
}
