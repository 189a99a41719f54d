//! The load generator: one thread, keep-alive connections that each send a request, read the whole reply, and go on.
//!
//! Requests are serialised beforehand, all but the key; replies are parsed only as far as their length. So it costs
//! little, and the same for whatever is measured.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use crate::http1::Reader;
use crate::keys::{KEY_BYTES, Keys};
use crate::measure::{Sample, Stretch, now};
use crate::runtime::on_this_thread;

/// Connections that are open, and requests that are under way, at once.
pub(crate) const CONNECTIONS: usize = 64;

/// What is sent in every request.
pub(crate) const REQUEST_BODY: &str =
    r#"{"amount":100,"currency":"EUR","customer":"c-4711","reference":"order 2026-000123","capture":true}"#;

/// A request, as it goes over the wire, with a place for its key.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    bytes: Vec<u8>,
    key_at: usize,
}

impl Request {
    pub(crate) fn new(method: &str) -> Self {
        Self::to("/charges", method)
    }

    pub(crate) fn to(path: &str, method: &str) -> Self {
        let before = format!(
            "{method} {path} HTTP/1.1\r\nHost: bench.test\r\nAuthorization: Bearer token-of-merchant-1\r\n\
             Content-Type: application/json\r\nContent-Length: {}\r\nIdempotency-Key: ",
            REQUEST_BODY.len()
        );
        let key = "0".repeat(KEY_BYTES);
        let bytes = format!("{before}{key}\r\n\r\n{REQUEST_BODY}").into_bytes();
        Self { bytes, key_at: before.len() }
    }

    fn with_key_of(&mut self, keys: &Keys) -> &[u8] {
        keys.write(&mut self.bytes[self.key_at..self.key_at + KEY_BYTES]);
        &self.bytes
    }
}

/// Sends `request` with keys of `keys` to `server` for `time`.
///
/// # Errors
/// On the first reply that is not 2xx.
pub(crate) fn run(server: SocketAddr, request: &Request, keys: &Arc<Keys>, time: Duration) -> Result<Sample> {
    run_on(CONNECTIONS, CONNECTIONS, server, request, keys, time)
}

/// The same on so many connections, which take turns where fewer requests are to be under way.
pub(crate) fn run_on(
    connections: usize,
    at_work: usize,
    server: SocketAddr,
    request: &Request,
    keys: &Arc<Keys>,
    time: Duration,
) -> Result<Sample> {
    on_this_thread(async {
        let mut streams = Vec::with_capacity(connections);
        for _ in 0..connections {
            streams.push(connect(server).await?);
        }
        let stretch = Stretch::start();
        let end = now() + time;
        let turns = (at_work < connections).then(|| Arc::new(Semaphore::new(at_work)));
        let mut connections = JoinSet::new();
        for stream in streams {
            connections.spawn(converse(stream, request.clone(), keys.clone(), turns.clone(), end));
        }
        let mut times = Vec::new();
        while let Some(done) = connections.join_next().await {
            times.extend(done??);
        }
        Sample::new(times, &stretch)
    })
}

/// Sends every key of a cycle of `count` once, and makes sure that its second reply says `replayed`.
pub(crate) fn fill(server: SocketAddr, request: &Request, count: u64, replayed: &str) -> Result<()> {
    on_this_thread(async {
        let (mut stream, mut reader) = (connect(server).await?, Reader::new());
        let (mut request, keys) = (request.clone(), Keys::cycle(count));
        for n in 0..2 * count {
            stream.write_all(request.with_key_of(&keys)).await?;
            let reply = reader.read(&mut stream).await?.context("closed")?;
            let says_so = String::from_utf8_lossy(reply.head).to_ascii_lowercase().contains(replayed);
            ensure!(reply.is_success() && says_so == (n >= count), "unexpected: {}", reply.text());
        }
        Ok(())
    })
}

async fn connect(server: SocketAddr) -> Result<TcpStream> {
    let stream = TcpStream::connect(server).await.with_context(|| format!("connect to {server}"))?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

async fn converse(
    mut stream: TcpStream,
    mut request: Request,
    keys: Arc<Keys>,
    turns: Option<Arc<Semaphore>>,
    end: Duration,
) -> Result<Vec<Duration>> {
    let mut reader = Reader::new();
    let mut times = Vec::with_capacity(if turns.is_some() { 256 } else { 16 * 1024 });
    let mut sent = now();
    while sent < end {
        // In the order in which they asked for it: each connection has its turn.
        let _turn = match &turns {
            Some(turns) => {
                let turn = turns.acquire().await?;
                sent = now();
                Some(turn)
            }
            None => None,
        };
        stream.write_all(request.with_key_of(&keys)).await.context("write")?;
        let reply = reader.read(&mut stream).await?.context("the server closed the connection")?;
        ensure!(reply.is_success(), "not 2xx: {}", reply.text());
        let received = now();
        times.push(received - sent);
        sent = received;
    }
    Ok(times)
}
