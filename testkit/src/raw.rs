//! Sockets byte by byte: for what a well-behaved client or server never sends.

use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{JoinHandle, JoinSet};

use crate::within;

/// A server that records every byte it gets, per connection; stops when dropped.
#[derive(Debug)]
pub struct RawUpstream {
    addr: SocketAddr,
    received: Received,
    accept: JoinHandle<()>,
}

type Received = Arc<Mutex<Vec<Vec<u8>>>>;

impl RawUpstream {
    /// Runs `script` on each connection; it gets the connection's number, counted from 0. The connection closes when
    /// the script ends.
    pub async fn start<F, Fut>(script: F) -> Self
    where
        F: Fn(usize, RawConnection) -> Fut + Send + 'static,
        Fut: Future<Output = ()> + Send + 'static,
    {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a loopback port");
        let addr = listener.local_addr().expect("a bound socket has an address");
        let received = Received::default();
        let log = received.clone();
        let accept = tokio::spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                let number = log.lock().len();
                log.lock().push(Vec::new());
                let connection = RawConnection::new(stream, Some((log.clone(), number)));
                connections.spawn(script(number, connection));
            }
        });
        Self { addr, received, accept }
    }

    /// Answers the same bytes after each request head, and keeps the connection open.
    pub async fn answering(answer: impl Into<Bytes>) -> Self {
        let answer = answer.into();
        Self::start(move |_, mut connection| {
            let answer = answer.clone();
            async move {
                while connection.read_head().await.is_some() {
                    connection.write(&answer).await;
                }
            }
        })
        .await
    }

    /// Where it listens.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// `http://127.0.0.1:PORT`.
    pub fn url(&self) -> String {
        format!("http://{}", self.addr)
    }

    /// The bytes received so far, per connection.
    pub fn received(&self) -> Vec<Vec<u8>> {
        self.received.lock().clone()
    }

    /// All bytes received so far as text, connection after connection.
    pub fn text(&self) -> String {
        self.received.lock().iter().map(|bytes| String::from_utf8_lossy(bytes).into_owned()).collect()
    }
}

impl Drop for RawUpstream {
    fn drop(&mut self) {
        self.accept.abort();
    }
}

/// One end of a socket.
#[derive(Debug)]
pub struct RawConnection {
    stream: TcpStream,
    log: Option<(Received, usize)>,
    buffer: Vec<u8>,
}

impl RawConnection {
    /// Connects.
    ///
    /// # Panics
    /// When nobody listens.
    pub async fn open(addr: SocketAddr) -> Self {
        let stream = within("connect", TcpStream::connect(addr)).await.expect("somebody listens");
        Self::new(stream, None)
    }

    fn new(stream: TcpStream, log: Option<(Received, usize)>) -> Self {
        stream.set_nodelay(true).expect("TCP_NODELAY");
        Self { stream, log, buffer: Vec::new() }
    }

    /// Writes; false when the peer is gone.
    pub async fn write(&mut self, bytes: impl AsRef<[u8]>) -> bool {
        within("write", self.stream.write_all(bytes.as_ref())).await.is_ok()
    }

    /// Up to and with the blank line after a head; `None` when the peer closed before it.
    pub async fn read_head(&mut self) -> Option<Vec<u8>> {
        loop {
            if let Some(at) = self.buffer.windows(4).position(|w| w == b"\r\n\r\n") {
                return Some(self.buffer.drain(..at + 4).collect());
            }
            self.fill().await?;
        }
    }

    /// Exactly `len` bytes; `None` when the peer closed before them.
    pub async fn read_exact(&mut self, len: usize) -> Option<Vec<u8>> {
        while self.buffer.len() < len {
            self.fill().await?;
        }
        Some(self.buffer.drain(..len).collect())
    }

    /// All bytes until `end` is among them (with it); `None` when the peer closed before.
    pub async fn read_until(&mut self, end: &[u8]) -> Option<Vec<u8>> {
        loop {
            if let Some(at) = self.buffer.windows(end.len()).position(|w| w == end) {
                return Some(self.buffer.drain(..at + end.len()).collect());
            }
            self.fill().await?;
        }
    }

    /// Waits until `bytes` are among those that came, and leaves all of them unread; false when the peer closed before.
    pub async fn wait_for(&mut self, bytes: &[u8]) -> bool {
        while !self.buffer.windows(bytes.len()).any(|w| w == bytes) {
            if self.fill().await.is_none() {
                return false;
            }
        }
        true
    }

    /// All bytes until the peer closes.
    ///
    /// # Panics
    /// When the peer does not close within [`PATIENCE`](crate::PATIENCE).
    pub async fn read_to_end(&mut self) -> Vec<u8> {
        within("the peer closes", async { while self.fill().await.is_some() {} }).await;
        std::mem::take(&mut self.buffer)
    }

    /// All bytes until the peer closes or is silent for `quiet`; true when it closed.
    pub async fn read_until_quiet(&mut self, quiet: Duration) -> (Vec<u8>, bool) {
        let closed = loop {
            match tokio::time::timeout(quiet, self.fill()).await {
                Err(_) => break false,
                Ok(None) => break true,
                Ok(Some(())) => {}
            }
        };
        (std::mem::take(&mut self.buffer), closed)
    }

    /// Ends the sending side: the peer reads an end of file.
    pub async fn shutdown(&mut self) {
        // A peer that is gone already is fine.
        let _ = self.stream.shutdown().await;
    }

    /// Closes with a TCP reset.
    pub fn reset(self) {
        // A peer that is gone already is fine.
        let _ = self.stream.set_zero_linger();
    }

    /// Some more bytes; `None` when the peer closed or nothing came in time.
    async fn fill(&mut self) -> Option<()> {
        let before = self.buffer.len();
        self.buffer.reserve(16 * 1024);
        let read = tokio::time::timeout(crate::PATIENCE, self.stream.read_buf(&mut self.buffer));
        if read.await.ok()?.ok()? == 0 {
            return None;
        }
        if let Some((log, number)) = &self.log {
            log.lock()[*number].extend_from_slice(&self.buffer[before..]);
        }
        Some(())
    }
}

/// Sends bytes on a new connection and reads until the peer closes or is silent for `quiet`.
pub async fn send_raw(addr: SocketAddr, bytes: impl AsRef<[u8]>, quiet: Duration) -> Vec<u8> {
    let mut connection = RawConnection::open(addr).await;
    connection.write(bytes).await;
    connection.read_until_quiet(quiet).await.0
}
