//! HTTP/1.1 connections to the upstream, kept for the next request.

use std::fmt;
use std::future::Future;
use std::io;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body::Body;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use rustix::net::{RecvFlags, recv};
use tokio::time::Instant;

use crate::body::OutgoingBody;
use crate::stream::UpstreamStream;
use crate::workers;

/// The lines of a response head for which hyper has room without asking for any.
const HEADERS_DEFAULT: usize = 100;

/// What the head of a response is held to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeadLimits {
    pub(crate) bytes: usize,
    pub(crate) lines: usize,
}

/// A connection that is driven by whoever holds it.
pub(crate) struct Idle<B: Body + 'static> {
    pub(crate) sender: http1::SendRequest<OutgoingBody<B>>,
    connection: http1::Connection<TokioIo<UpstreamStream>, OutgoingBody<B>>,
    closed: bool,
    /// A second handle on the socket, for a look at it that does not wait for the runtime's poller.
    socket: OwnedFd,
    since: Instant,
}

impl<B> Idle<B>
where
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    pub(crate) async fn new(stream: UpstreamStream, heads: HeadLimits) -> io::Result<Self> {
        let socket = stream.socket()?;
        let mut builder = http1::Builder::new();
        // The longest head, and the most that is read ahead of a slow client.
        builder.max_buf_size(heads.bytes);
        if heads.lines != HEADERS_DEFAULT {
            builder.max_headers(heads.lines);
        }
        // RFC 9112 §5: a gateway mends both on the way.
        builder.allow_obsolete_multiline_headers_in_responses(true);
        builder.allow_spaces_after_header_name_in_responses(true);
        let handshake = builder.handshake(TokioIo::new(stream));
        let (sender, connection) = handshake.await.map_err(io::Error::other)?;
        Ok(Self { sender, connection, closed: false, socket, since: Instant::now() })
    }

    /// Hands the connection to a task that also carries what it is upgraded to; it ends with the response or the
    /// tunnel.
    pub(crate) fn into_driven(self) -> http1::SendRequest<OutgoingBody<B>> {
        // Its errors reach response and tunnel through their own channels.
        tokio::spawn(self.connection.with_upgrades());
        self.sender
    }

    /// Moves bytes both ways as far as they go now.
    pub(crate) fn drive(&mut self, cx: &mut Context<'_>) {
        // An error reaches the request in flight through its own channel.
        if !self.closed && Pin::new(&mut self.connection).poll(cx).is_ready() {
            self.closed = true;
        }
    }

    /// Whether the upstream has closed it, or said something unasked.
    fn is_stale(&self) -> bool {
        let mut byte = [0u8; 1];
        let look = recv(&self.socket, &mut byte, RecvFlags::PEEK | RecvFlags::DONTWAIT);
        !matches!(look, Err(rustix::io::Errno::AGAIN))
    }
}

/// The idle connections.
pub(crate) struct Pool<B: Body + 'static> {
    /// One for each worker and one for all other threads: who uses a connection waits for it on its own runtime.
    shelves: Box<[Mutex<Shelf<B>>]>,
    idle_for_max: Duration,
    /// On all shelves.
    len: AtomicUsize,
    len_max: usize,
}

/// The latest used last.
struct Shelf<B: Body + 'static> {
    #[allow(clippy::vec_box, reason = "every request moves one in and out: a pointer, not the connection")]
    idle: Vec<Box<Idle<B>>>,
    sweeping: bool,
}

impl<B> Pool<B>
where
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    pub(crate) fn new(idle_for_max: Duration, len_max: usize, workers: usize) -> Arc<Self> {
        let shelf = || Mutex::new(Shelf { idle: Vec::new(), sweeping: false });
        let shelves = (0..=workers).map(|_| shelf()).collect();
        Arc::new(Self { shelves, idle_for_max, len: AtomicUsize::new(0), len_max })
    }

    // A worker of another listener's may be more than these.
    fn shelf(&self) -> usize {
        workers::number() % self.shelves.len()
    }

    /// A live connection idle for less than `idle_for`, if there is one.
    pub(crate) fn take(&self, idle_for: Duration) -> Option<Box<Idle<B>>> {
        let shelf = &self.shelves[self.shelf()];
        loop {
            let connection = {
                let idle = &mut shelf.lock().idle;
                // The latest used is last: when it is too old, all are.
                if idle.last()?.since.elapsed() >= idle_for {
                    return None;
                }
                idle.pop()?
            };
            self.len.fetch_sub(1, Ordering::Relaxed);
            if !connection.is_stale() {
                return Some(connection);
            }
        }
    }

    /// Keeps the connection when its exchange is over and it may carry another.
    pub(crate) fn give_back(self: &Arc<Self>, mut connection: Box<Idle<B>>, cx: &mut Context<'_>) {
        connection.drive(cx);
        if connection.closed || !connection.sender.is_ready() {
            return;
        }
        connection.since = Instant::now();
        if self.len.fetch_add(1, Ordering::Relaxed) >= self.len_max {
            self.len.fetch_sub(1, Ordering::Relaxed);
            return;
        }
        let number = self.shelf();
        let mut shelf = self.shelves[number].lock();
        shelf.idle.push(connection);
        if !std::mem::replace(&mut shelf.sweeping, true) {
            tokio::spawn(sweep(Arc::downgrade(self), number, self.idle_for_max));
        }
    }

    /// Closes what nobody may use any more; returns when to look again, `None` when the shelf is empty.
    fn close_old(&self, number: usize) -> Option<Instant> {
        let old: Vec<_>;
        let next;
        {
            let mut shelf = self.shelves[number].lock();
            let fresh = shelf.idle.partition_point(|c| c.since.elapsed() >= self.idle_for_max);
            old = shelf.idle.drain(..fresh).collect();
            next = shelf.idle.first().map(|c| c.since + self.idle_for_max);
            shelf.sweeping = next.is_some();
        }
        self.len.fetch_sub(old.len(), Ordering::Relaxed);
        drop(old);
        next
    }
}

impl<B: Body + 'static> fmt::Debug for Pool<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool").field("idle", &self.len).finish_non_exhaustive()
    }
}

/// Runs while the shelf holds anything, so that an idle gateway holds no connection and no timer.
async fn sweep<B>(pool: std::sync::Weak<Pool<B>>, number: usize, first: Duration)
where
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let mut next = Instant::now() + first;
    loop {
        tokio::time::sleep_until(next).await;
        match pool.upgrade().and_then(|pool| pool.close_old(number)) {
            Some(again) => next = again,
            None => return,
        }
    }
}

/// Sends a request and drives the connection until the response head, in the caller's task.
pub(crate) async fn exchange<B>(
    connection: &mut Idle<B>,
    request: http::Request<OutgoingBody<B>>,
) -> Result<
    http::Response<hyper::body::Incoming>,
    hyper::client::conn::TrySendError<http::Request<OutgoingBody<B>>>,
>
where
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    // Only the connection, polled right here, completes the answer: its own wake-up would be to ourselves. It must
    // not be held up by the task's budget either, whose wake-up would then be lost.
    let mut answer = std::pin::pin!(tokio::task::unconstrained(connection.sender.try_send_request(request)));
    std::future::poll_fn(|cx| {
        connection.drive(cx);
        match answer.as_mut().poll(&mut Context::from_waker(std::task::Waker::noop())) {
            Poll::Ready(answer) => Poll::Ready(answer),
            Poll::Pending => Poll::Pending,
        }
    })
    .await
}
