//! One checked connection to one server.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use onlyonce_core::StoreErrorKind;
use redis::aio::{ConnectionLike, MultiplexedConnection};
use redis::{AsyncConnectionConfig, Cmd, Pipeline, ServerErrorKind, Value};
use tokio::sync::{mpsc, oneshot};
use tokio::task::AbortHandle;
use tokio::time::timeout;

use crate::clock_ms;
use crate::error::Fault;
use crate::fitness::{self, Fitness};
use crate::open::{Address, Options};
use crate::scripts::Text;

/// Commands that wait for the driver; past it callers wait for room.
const PIPELINE_MAX: usize = 1024;

/// Commands that are sent together, with one answer each.
pub(crate) struct Request<'a> {
    pipeline: Pipeline,
    count: usize,
    script: Option<&'a str>,
}

impl<'a> Request<'a> {
    pub(crate) fn of(commands: impl IntoIterator<Item = Cmd>) -> Self {
        let mut pipeline = Pipeline::new();
        let mut count = 0;
        for command in commands {
            pipeline.add_command(command);
            count += 1;
        }
        Self { pipeline, count, script: None }
    }

    /// A script with its keys and arguments.
    pub(crate) fn script(text: &'static Text, keys: &[&[u8]], args: &[&[u8]]) -> Self {
        Self::code(text.hash(), text.code, keys, args)
    }

    /// A script by its hash and code.
    pub(crate) fn code(hash: &str, code: &'a str, keys: &[&[u8]], args: &[&[u8]]) -> Self {
        let mut command = redis::cmd("EVALSHA");
        command.arg(hash).arg(keys.len()).arg(keys).arg(args);
        Self { script: Some(code), ..Self::of([command]) }
    }

    /// The same, each command allowed on a slot that the server is about to take over.
    fn asking(&self) -> (Pipeline, usize) {
        let mut pipeline = Pipeline::new();
        for command in self.pipeline.cmd_iter() {
            pipeline.cmd("ASKING").add_command(command.clone());
        }
        (pipeline, self.count * 2)
    }
}

/// A connection that was checked when it was made, and serves any number of callers at once.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) fitness: Fitness,
    address: Address,
    calm: MultiplexedConnection,
    replicated: Option<Replicated>,
    timeout: Duration,
    broken: AtomicBool,
    last_answer_ms: AtomicU64,
}

/// A second connection, for writes that replicas must confirm: WAIT counts the writes of its own connection alone, and
/// holds back whatever is sent behind it, renewals too.
#[derive(Debug)]
struct Replicated {
    connection: MultiplexedConnection,
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
            let mut calm = connect(&client).await?;
            let fitness = fitness::check(&mut calm, options, address).await?;
            let replicated = match options.min_replicas {
                0 => None,
                replicas => Some(Replicated::start(connect(&client).await?, replicas, options)),
            };
            Ok(Self {
                fitness,
                address: address.clone(),
                calm,
                replicated,
                timeout: options.timeout,
                broken: AtomicBool::new(false),
                last_answer_ms: AtomicU64::new(clock_ms()),
            })
        };
        match timeout(options.connect_timeout, open).await {
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
        let connection = match &self.replicated {
            Some(its) if replicated => &its.connection,
            _ => &self.calm,
        };
        let mut connection = connection.clone();
        let answered = if asking {
            let (pipeline, count) = request.asking();
            let all = self.bounded(connection.req_packed_commands(&pipeline, 0, count)).await?;
            // Every second one is the answer to ASKING.
            all.into_iter().skip(1).step_by(2).collect()
        } else {
            self.bounded(connection.req_packed_commands(&request.pipeline, 0, request.count)).await?
        };
        if answered.len() != request.count {
            self.give_up();
            return Err(Fault::strange("another number of answers than of commands"));
        }
        Ok(answered)
    }

    async fn bounded<T>(&self, call: impl Future<Output = redis::RedisResult<T>>) -> Result<T, Fault> {
        match timeout(self.timeout, call).await {
            Ok(Ok(answer)) => {
                self.last_answer_ms.store(clock_ms(), Ordering::Relaxed);
                Ok(answer)
            }
            Ok(Err(error)) => {
                self.give_up();
                Err(Fault::lost(error))
            }
            Err(_) => {
                self.give_up();
                let why = format!("no answer within {:?}", self.timeout);
                Err(Fault::new(StoreErrorKind::Timeout, why).with_sent(true))
            }
        }
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

    /// Whether it still answers.
    pub(crate) async fn ping(&self) -> Result<(), Fault> {
        let answers = self.ask(&Request::of([redis::cmd("PING")]), false, false).await?;
        match answers.first() {
            Some(Value::ServerError(error)) => {
                self.give_up();
                Err(Fault::refused(error))
            }
            _ => Ok(()),
        }
    }

    /// Whether the server is still what it was found to be.
    pub(crate) async fn check_again(&self, options: &Options) -> Result<(), Fault> {
        let mut connection = self.calm.clone();
        match timeout(self.timeout, fitness::check(&mut connection, options, &self.address)).await {
            Ok(checked) => checked.map(|_| ()),
            Err(_) => Err(Fault::new(StoreErrorKind::Timeout, "no answer to INFO")),
        }
    }

    /// How long ago it answered last, in ms.
    pub(crate) fn silent_ms(&self) -> u64 {
        clock_ms().saturating_sub(self.last_answer_ms.load(Ordering::Relaxed))
    }

    /// Marks it as not to be used again.
    pub(crate) fn give_up(&self) {
        self.broken.store(true, Ordering::Release);
    }

    pub(crate) fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Acquire)
    }
}

impl Replicated {
    fn start(connection: MultiplexedConnection, replicas: u32, options: &Options) -> Self {
        let (confirm, asked) = mpsc::channel(PIPELINE_MAX);
        let task = tokio::spawn(confirm_all(
            connection.clone(),
            asked,
            replicas,
            options.replica_timeout,
            options.timeout,
        ));
        Self { connection, confirm, task: task.abort_handle() }
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
    while asked.recv_many(&mut waiting, PIPELINE_MAX).await > 0 {
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
    let config = AsyncConnectionConfig::new()
        .set_connection_timeout(None)
        .set_response_timeout(None)
        .set_pipeline_buffer_size(PIPELINE_MAX);
    client.get_multiplexed_async_connection_with_config(&config).await.map_err(Fault::unreachable)
}

/// Whether an answer is an error of this kind.
pub(crate) fn is_error(value: &Value, kind: ServerErrorKind) -> bool {
    matches!(value, Value::ServerError(error) if error.kind() == Some(kind))
}
