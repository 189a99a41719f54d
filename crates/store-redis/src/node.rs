//! One server as callers see it: connected when needed, and again when the connection broke.

use std::sync::Arc;
use std::time::Duration;

use onlyonce_core::StoreErrorKind;
use parking_lot::Mutex;
use redis::Value;
use redis::aio::ConnectionLike;
use tokio::time::timeout;

use crate::clock_ms;
use crate::error::Fault;
use crate::link::Link;
use crate::open::{Address, Kind, Options};
use crate::request::Request;

/// After a failed attempt to connect, callers are told the same for so long.
const PAUSE_MS: u64 = 20;

/// A server, or whichever server the Sentinels call the master.
#[derive(Debug)]
pub(crate) struct Node {
    // None: the Sentinels know.
    address: Option<Address>,
    options: Arc<Options>,
    state: Mutex<State>,
    connecting: tokio::sync::Mutex<()>,
    contact: Mutex<Contact>,
}

#[derive(Debug)]
enum State {
    New,
    Up(Arc<Link>),
    Failed { at_ms: u64, why: Fault },
}

/// Since when the server answered without a break that was seen here, by the boot clock.
#[derive(Clone, Copy, Debug)]
struct Contact {
    unbroken_since_ms: Option<u64>,
}

impl Node {
    pub(crate) fn new(address: Option<Address>, options: &Arc<Options>) -> Arc<Self> {
        Arc::new(Self {
            address,
            options: Arc::clone(options),
            state: Mutex::new(State::New),
            connecting: tokio::sync::Mutex::default(),
            // What was before this process looked is for its engine to judge.
            contact: Mutex::new(Contact { unbroken_since_ms: Some(0) }),
        })
    }

    pub(crate) fn address(&self) -> Option<&Address> {
        self.address.as_ref()
    }

    /// A connection that is not known to be broken.
    pub(crate) async fn link(&self) -> Result<Arc<Link>, Fault> {
        if let Some(known) = self.known() {
            return known;
        }
        let _turn = self.connecting.lock().await;
        // Somebody may have connected, or failed to, in the meantime.
        if let Some(known) = self.known() {
            return known;
        }
        let opened = self.connect().await;
        *self.state.lock() = match &opened {
            Ok(link) => State::Up(Arc::clone(link)),
            Err(why) => State::Failed { at_ms: clock_ms(), why: why.clone() },
        };
        self.note(opened.is_ok());
        opened
    }

    fn known(&self) -> Option<Result<Arc<Link>, Fault>> {
        match &*self.state.lock() {
            State::Up(link) if !link.is_broken() => Some(Ok(Arc::clone(link))),
            State::Failed { at_ms, why } if clock_ms() < at_ms + PAUSE_MS => Some(Err(why.clone())),
            State::New | State::Up(_) | State::Failed { .. } => None,
        }
    }

    async fn connect(&self) -> Result<Arc<Link>, Fault> {
        match &self.address {
            Some(address) => Link::open(&self.options, address).await,
            None => Link::open(&self.options, &self.master().await?).await,
        }
    }

    /// Asks the Sentinels in turn who the master is.
    async fn master(&self) -> Result<Address, Fault> {
        let Kind::Sentinel(name) = &self.options.kind else {
            return Err(Fault::unfit("no address of a server"));
        };
        let mut last = Fault::unfit("no address of a Sentinel");
        for sentinel in &self.options.servers {
            let asked = timeout(self.options.connect_timeout, self.ask_sentinel(sentinel, name)).await;
            match asked {
                Ok(Ok(master)) => return Ok(master),
                Ok(Err(fault)) => last = fault,
                Err(_) => {
                    let why = format!("the Sentinel {sentinel} does not answer");
                    last = Fault::new(StoreErrorKind::Unavailable, why);
                }
            }
        }
        Err(last)
    }

    async fn ask_sentinel(&self, sentinel: &Address, name: &str) -> Result<Address, Fault> {
        let client = self.options.sentinel_client(sentinel)?;
        let mut connection = client.get_multiplexed_async_connection().await.map_err(Fault::unreachable)?;
        let mut question = redis::cmd("SENTINEL");
        question.arg("GET-MASTER-ADDR-BY-NAME").arg(name);
        let answer = connection.req_packed_command(&question).await.map_err(Fault::unreachable)?;
        let strange = || Fault::strange("to SENTINEL GET-MASTER-ADDR-BY-NAME");
        match answer {
            Value::Array(parts) => {
                let [Value::BulkString(host), Value::BulkString(port)] = parts.as_slice() else {
                    return Err(strange());
                };
                let port = std::str::from_utf8(port).ok().and_then(|port| port.parse().ok());
                let host = String::from_utf8(host.clone()).ok();
                host.zip(port).map(|(host, port)| Address::Tcp(host, port)).ok_or_else(strange)
            }
            Value::Nil => Err(Fault::unfit(format!("the Sentinel {sentinel} knows no master {name:?}"))),
            Value::ServerError(error) => Err(Fault::refused(&error)),
            _ => Err(strange()),
        }
    }

    /// Sends the commands; an answer may be an error of the server.
    pub(crate) async fn ask(
        &self,
        request: &Request<'_>,
        replicated: bool,
        asking: bool,
    ) -> Result<(Vec<Value>, Arc<Link>), Fault> {
        let link = self.link().await?;
        let answers = self.ask_on(&link, request, replicated, asking).await?;
        Ok((answers, link))
    }

    /// The same on a connection of this server that is known already.
    pub(crate) async fn ask_on(
        &self,
        link: &Link,
        request: &Request<'_>,
        replicated: bool,
        asking: bool,
    ) -> Result<Vec<Value>, Fault> {
        let answers = link.ask(request, replicated, asking).await;
        // An error is an answer too; but a server that serves nothing is as good as away.
        let served = answers.as_ref().is_ok_and(|values| !values.iter().any(serves_nothing));
        self.note(served);
        answers
    }

    /// Keeps the contact up, or finds out that it broke: asks a server that nobody asked anything for so long.
    pub(crate) async fn look_after(&self, idle_ms: u64) {
        match self.link().await {
            Ok(link) if link.silent_ms() >= idle_ms => self.note(link.ping().await.is_ok()),
            Ok(_) | Err(_) => {}
        }
    }

    /// Looks whether the server is still fit. One that is not is not used again before it is.
    pub(crate) async fn check_again(&self) -> Result<(), Fault> {
        let link = self.link().await?;
        let checked = link.check_again(&self.options).await;
        if checked.is_err() {
            link.give_up();
        }
        checked
    }

    fn note(&self, answered: bool) {
        let mut contact = self.contact.lock();
        contact.unbroken_since_ms = match (answered, contact.unbroken_since_ms) {
            (true, since) => Some(since.unwrap_or_else(clock_ms)),
            (false, _) => None,
        };
    }

    /// Whether no break of the contact was seen for this long.
    pub(crate) fn unbroken_for(&self, time: Duration) -> bool {
        let since = self.contact.lock().unbroken_since_ms;
        let time_ms = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        since.is_some_and(|since| since == 0 || clock_ms().saturating_sub(since) >= time_ms)
    }
}

fn serves_nothing(value: &Value) -> bool {
    matches!(value, Value::ServerError(error)
        if matches!(error.code(), "LOADING" | "CLUSTERDOWN" | "MASTERDOWN" | "READONLY" | "NOREPLICAS" | "MISCONF"))
}
