//! What clients do: most behave, some send a key again, some send it with something else, some go away.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use parking_lot::Mutex;
use serde::Serialize;
use testkit::{Client, ClientResponse, Connection, RawConnection, RequestBuilder};

use crate::keys::Keys;
use crate::load::REQUEST_BODY;
use crate::measure::now;

/// What was sent so far, by all callers.
#[derive(Debug, Default)]
pub(crate) struct Exchanged {
    times: Mutex<Vec<Duration>>,
    requests: AtomicU64,
    runs_due: AtomicU64,
    kinds: [AtomicU64; KINDS.len()],
}

/// How often one kind was done.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Count {
    pub(crate) kind: &'static str,
    pub(crate) count: u64,
}

/// The kinds in the order of [`Kind`].
const KINDS: [&str; 9] = [
    "new key",
    "replay",
    "another body under the key",
    "the key while it is in flight",
    "768 KiB body, 256 KiB reply, replayed",
    "unguarded, 2 MiB up",
    "reply longer than is stored, replayed",
    "client gone in its body",
    "client gone before its answer, then again",
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    New,
    Replay,
    Mismatch,
    InFlight,
    Big,
    Upload,
    Omitted,
    CutBody,
    Impatient,
}

/// One round; which kind comes how often.
const ROUND: [Kind; 24] = {
    use Kind::{Big, CutBody, Impatient, InFlight, Mismatch, New, Omitted, Replay, Upload};
    [
        New, Replay, New, Mismatch, New, Replay, InFlight, New, New, Replay, CutBody, New, Mismatch, Replay,
        New, Big, New, Replay, Impatient, New, Mismatch, Upload, Replay, Omitted,
    ]
};

/// After so many exchanges a caller comes on a new connection.
const EXCHANGES_A_CONNECTION: u64 = 50;

impl Exchanged {
    /// The times of those that were to be answered at once, since the last call.
    pub(crate) fn take_times(&self) -> Vec<Duration> {
        std::mem::take(&mut *self.times.lock())
    }

    /// How many the service behind had to run.
    pub(crate) fn runs_due(&self) -> u64 {
        self.runs_due.load(Ordering::Relaxed)
    }

    pub(crate) fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }

    pub(crate) fn counts(&self) -> Vec<Count> {
        let count =
            |(kind, count): (&&'static str, &AtomicU64)| Count { kind, count: count.load(Ordering::Relaxed) };
        KINDS.iter().zip(&self.kinds).map(count).collect()
    }
}

/// A client with a connection that it keeps for a while.
pub(crate) struct Caller {
    client: Client,
    gateway: SocketAddr,
    connection: Option<Connection>,
    exchanged: Arc<Exchanged>,
    keys: Keys,
    last_key: String,
    number: u64,
}

impl Caller {
    pub(crate) fn new(gateway: SocketAddr, number: u32, exchanged: Arc<Exchanged>) -> Self {
        let client = if number.is_multiple_of(2) { Client::new(gateway) } else { Client::h2c(gateway) };
        let keys = Keys::unique();
        let last_key = keys.next();
        // Each begins somewhere else in the round.
        Self { client, gateway, connection: None, exchanged, keys, last_key, number: u64::from(number) * 5 }
    }

    /// The next in turn.
    pub(crate) async fn exchange(&mut self) -> Result<()> {
        let first = self.connection.is_none();
        if self.number.is_multiple_of(EXCHANGES_A_CONNECTION) {
            self.connection = None;
        }
        // What is replayed has to be there.
        let kind = if first { Kind::New } else { ROUND[self.number as usize % ROUND.len()] };
        self.number += 1;
        self.exchanged.kinds[kind as usize].fetch_add(1, Ordering::Relaxed);
        let done = match kind {
            Kind::New => self.new_key().await,
            Kind::Replay => self.again(REQUEST_BODY, 201).await,
            Kind::Mismatch => self.again(r#"{"amount":101}"#, 422).await,
            Kind::InFlight => self.in_flight().await,
            Kind::Big => self.twice("/long", 768 << 10, 256 << 10, None).await,
            Kind::Omitted => self.twice("/longer-than-stored", 1000, 1536 << 10, Some("omitted")).await,
            Kind::Upload => self.upload().await,
            Kind::CutBody => self.cut_body().await,
            Kind::Impatient => self.impatient().await,
        };
        done.with_context(|| format!("{kind:?}"))
    }

    fn charge(&self, path: &str, key: &str, body: impl Into<bytes::Bytes>) -> RequestBuilder {
        let request = self.client.post(path).key(key).header("authorization", "Bearer soak");
        request.header("content-type", "application/json").body(body)
    }

    async fn send(&mut self, request: RequestBuilder) -> Result<ClientResponse> {
        if self.connection.as_ref().is_none_or(Connection::is_closed) {
            self.connection = Some(self.client.connect().await?);
        }
        let connection = self.connection.as_mut().expect("there is one now");
        self.exchanged.requests.fetch_add(1, Ordering::Relaxed);
        connection.send(request).await
    }

    async fn timed(&mut self, request: RequestBuilder) -> Result<ClientResponse> {
        let sent = now();
        let answer = self.send(request).await?;
        self.exchanged.times.lock().push(now() - sent);
        Ok(answer)
    }

    async fn new_key(&mut self) -> Result<()> {
        self.last_key = self.keys.next();
        self.exchanged.runs_due.fetch_add(1, Ordering::Relaxed);
        let answer = self.timed(self.charge("/charges", &self.last_key, REQUEST_BODY)).await?;
        ensure!(answer.status == 201 && !is_replay(&answer), "{answer:?}");
        Ok(())
    }

    async fn again(&mut self, body: &'static str, status: u16) -> Result<()> {
        let answer = self.timed(self.charge("/charges", &self.last_key, body)).await?;
        ensure!(answer.status == status && is_replay(&answer) == (status == 201), "{answer:?}");
        Ok(())
    }

    async fn in_flight(&mut self) -> Result<()> {
        let key = self.keys.next();
        self.exchanged.runs_due.fetch_add(1, Ordering::Relaxed);
        self.exchanged.requests.fetch_add(2, Ordering::Relaxed);
        let request = || self.charge("/slow", &key, REQUEST_BODY);
        let (one, two) = tokio::join!(request().send(), request().send());
        let answers = [one?, two?];
        let ran = answers.iter().filter(|answer| answer.status == 201 && !is_replay(answer)).count();
        let waits =
            answers.iter().filter(|answer| answer.code() == "in-progress" || is_replay(answer)).count();
        ensure!((ran, waits) == (1, 1), "{answers:?}");
        Ok(())
    }

    /// A long body or a long reply, and what its replay has of it.
    async fn twice(&mut self, path: &str, up: usize, down: usize, marked: Option<&str>) -> Result<()> {
        let key = self.keys.next();
        let body = bytes::Bytes::from(vec![b'7'; up]);
        self.exchanged.runs_due.fetch_add(1, Ordering::Relaxed);
        let first = self.send(self.charge(path, &key, body.clone())).await?;
        ensure!(
            first.status == 201 && first.body.len() == down,
            "{}, {} bytes",
            first.status,
            first.body.len()
        );
        let again = self.send(self.charge(path, &key, body)).await?;
        let kept = if marked.is_some() { 0 } else { down };
        ensure!(
            again.status == 201 && again.body.len() == kept,
            "{}, {} bytes",
            again.status,
            again.body.len()
        );
        ensure!(again.header("idempotency-replay") == marked, "{:?}", again.headers);
        Ok(())
    }

    async fn upload(&mut self) -> Result<()> {
        let body = vec![b'7'; 2 << 20];
        self.exchanged.runs_due.fetch_add(1, Ordering::Relaxed);
        let answer = self.send(self.client.request(http::Method::PUT, "/files/1").body(body)).await?;
        ensure!(answer.status == 201, "{answer:?}");
        Ok(())
    }

    /// Never reaches the service behind.
    async fn cut_body(&mut self) -> Result<()> {
        self.exchanged.requests.fetch_add(1, Ordering::Relaxed);
        let mut connection = RawConnection::open(self.gateway).await;
        connection.write(self.raw("/charges", &self.keys.next(), 100_000)).await;
        connection.write(vec![b'7'; 30_000]).await;
        Ok(())
    }

    /// Goes away, and finds the answer when it comes back.
    async fn impatient(&mut self) -> Result<()> {
        let key = self.keys.next();
        self.exchanged.runs_due.fetch_add(1, Ordering::Relaxed);
        self.exchanged.requests.fetch_add(1, Ordering::Relaxed);
        let mut connection = RawConnection::open(self.gateway).await;
        connection.write(self.raw("/slow", &key, REQUEST_BODY.len())).await;
        connection.write(REQUEST_BODY).await;
        tokio::time::sleep(Duration::from_millis(50)).await;
        drop(connection);
        let give_up = now() + testkit::PATIENCE;
        loop {
            let answer = self.send(self.charge("/slow", &key, REQUEST_BODY)).await?;
            match answer.status {
                // The first may be no further than on its way when it is gone: then this is what runs.
                201 => return Ok(()),
                409 if answer.code() == "in-progress" && now() < give_up => {
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
                _ => anyhow::bail!("{answer:?}"),
            }
        }
    }

    fn raw(&self, path: &str, key: &str, length: usize) -> String {
        format!(
            "POST {path} HTTP/1.1\r\nHost: soak\r\nAuthorization: Bearer soak\r\nContent-Type: application/json\r\n\
             Idempotency-Key: {key}\r\nContent-Length: {length}\r\n\r\n"
        )
    }
}

fn is_replay(answer: &ClientResponse) -> bool {
    answer.header("idempotency-replayed") == Some("true")
}
