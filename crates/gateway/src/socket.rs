//! The client's socket, under the HTTP implementation: what that does not say or time, is said and timed here.
//!
//! - A request head has a time to arrive in; past it, and when it breaks off, the client is told.
//! - What the HTTP implementation refuses by itself, with a bare status, is refused with a problem document.
//! - Interim answers (103) are written when nothing of the final answer has begun.
//! - A client that has ended its side after its request gets its answer, as long as it is there.
//! - Closing a socket with unread input resets the connection, and the reset may destroy an answer that is still on its
//!   way: a 400 to a bad head, a 413 to an upload. So the sending side is ended first, and what still comes is thrown
//!   away for a while.

use std::future::Future;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf, Bytes};
use onlyonce_http::{Code, Cors, DocsUrl, Problem};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep};

use crate::client_body::{DISCARD_BYTES_MAX, DISCARD_SILENCE_MAX, DISCARD_TIME_MAX};
use crate::exchange::Phase;
use crate::options::GatewayOptions;
use crate::problem;
use crate::server::Peer;

/// When it is tried whether a client that ended its side is still there, counted from the try before; the last repeats.
const PROBES: [Duration; 3] = [Duration::from_millis(500), Duration::from_secs(1), Duration::from_secs(5)];

/// How long an answer that has begun may be silent towards a client that ended its side.
const SILENCE: Duration = Duration::from_secs(5);

/// RFC 9110 §15.2: every client skips it, asked for or not. A socket that is closed answers it with a reset.
const CONTINUE: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";

/// What all connections have in common.
#[derive(Debug)]
pub(crate) struct SocketOptions {
    idle_timeout: Duration,
    head_timeout: Duration,
    docs: Option<DocsUrl>,
    cors: Option<Cors>,
}

impl SocketOptions {
    pub(crate) fn new(options: &GatewayOptions) -> Self {
        Self {
            idle_timeout: options.client_idle_timeout,
            head_timeout: options.header_timeout,
            docs: options.docs_url.clone(),
            cors: options.cors.clone(),
        }
    }
}

#[derive(Debug)]
pub(crate) struct ClientSocket {
    stream: TcpStream,
    peer: Peer,
    options: Arc<SocketOptions>,
    /// Ours: written before anything else.
    ours: Bytes,
    /// The exchange of which the next byte to be written is the first.
    clear_for: Option<u32>,
    /// Of the wait for a head.
    deadline: Instant,
    head_begun: bool,
    /// Rings at the deadline or before it; one for the life of the connection.
    alarm: Option<Pin<Box<Sleep>>>,
    /// The last word is said here, and not by the HTTP implementation.
    refused: bool,
    end_seen: bool,
    left_open: Option<LeftOpen>,
    lingering: Option<Lingering>,
}

/// All is said, and what still comes is thrown away.
#[derive(Debug)]
struct Lingering {
    until: Instant,
    last_read: Instant,
    bytes: u64,
    /// Rings at the end or before it.
    alarm: Pin<Box<Sleep>>,
}

/// The client has ended its side in the middle of an exchange.
#[derive(Debug)]
struct LeftOpen {
    probes: usize,
    next: Pin<Box<Sleep>>,
    last_write: Instant,
}

impl ClientSocket {
    /// `head_since` is when the first byte came.
    pub(crate) fn new(
        stream: TcpStream,
        peer: Peer,
        options: Arc<SocketOptions>,
        head_since: Instant,
    ) -> Self {
        let deadline = head_since + options.head_timeout;
        Self {
            stream,
            peer,
            options,
            ours: Bytes::new(),
            clear_for: None,
            deadline,
            head_begun: true,
            alarm: None,
            refused: false,
            end_seen: false,
            left_open: None,
            lingering: None,
        }
    }

    fn phase(&self) -> Phase {
        self.peer.exchange().phase()
    }

    /// Reads a part of a request head, or ends the wait for it: the HTTP implementation sees an end of file when the
    /// client has been told.
    fn poll_read_head(&mut self, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        match Pin::new(&mut self.stream).poll_read(cx, buf) {
            Poll::Ready(Ok(())) if buf.filled().len() > before => {
                if !self.head_begun {
                    self.head_begun = true;
                    self.deadline = Instant::now() + self.options.head_timeout;
                }
                Poll::Ready(Ok(()))
            }
            Poll::Ready(Ok(())) => {
                self.end_seen = true;
                if self.head_begun {
                    return self
                        .refuse_now(cx, problem::malformed("The request ended in the middle of its head."));
                }
                Poll::Ready(Ok(()))
            }
            Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
            Poll::Pending => {
                ready!(self.poll_deadline(cx));
                if self.head_begun {
                    return self.refuse_now(cx, Problem::new(Code::HeadTimeout));
                }
                Poll::Ready(Ok(()))
            }
        }
    }

    fn refuse_now(&mut self, cx: &mut Context<'_>, problem: Problem) -> Poll<io::Result<()>> {
        self.refuse(problem);
        self.refused = true;
        self.poll_close(cx)
    }

    fn poll_deadline(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let deadline = self.deadline;
        let alarm = self.alarm.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(deadline)));
        // An alarm before the deadline is set anew when it rings, not with every request.
        if alarm.deadline() > deadline {
            alarm.as_mut().reset(deadline);
        }
        while alarm.as_mut().poll(cx).is_ready() {
            if Instant::now() >= deadline {
                return Poll::Ready(());
            }
            alarm.as_mut().reset(deadline);
        }
        Poll::Pending
    }

    /// The last thing that is said on this connection.
    fn refuse(&mut self, problem: Problem) {
        self.peer.counters().problem(problem.code());
        self.peer.exchange().enter(Phase::Answering);
        self.ours = problem::wire(problem, self.options.docs.as_ref(), self.options.cors.as_ref());
    }

    /// Writes what is ours.
    fn poll_ours(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while self.ours.has_remaining() {
            let written = ready!(Pin::new(&mut self.stream).poll_write(cx, &self.ours))?;
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.ours.advance(written);
        }
        Poll::Ready(Ok(()))
    }

    /// What is written while a head is waited for comes from no service: it is the HTTP implementation's own refusal,
    /// which says a status and nothing else. It is taken as written, and what is ours takes its place.
    fn replace(&mut self, bytes: &[u8]) -> bool {
        if self.phase() != Phase::Head {
            return false;
        }
        let Some(problem) = problem::of_bare_refusal(bytes) else { return false };
        self.refuse(problem);
        true
    }

    /// The connection has written all that it has.
    fn flushed(&mut self) {
        let exchange = self.peer.exchange();
        match exchange.phase() {
            Phase::Answered => {
                exchange.enter(Phase::Head);
                self.clear_for = Some(exchange.number() + 1);
                self.head_begun = false;
                self.deadline = Instant::now() + self.options.idle_timeout;
            }
            Phase::Head => self.clear_for = Some(exchange.number() + 1),
            Phase::Serving => {
                self.clear_for = Some(exchange.number());
                self.queue_interim();
            }
            _ => {}
        }
    }

    /// Interim answers may only be written where the answer would begin.
    fn queue_interim(&mut self) {
        if let Some(number) = self.clear_for
            && self.ours.is_empty()
        {
            self.ours = self.peer.exchange().take_interim(number);
        }
    }

    /// Sees when the client ends its side in the middle of an exchange, and then, whether it is still there.
    fn look_for_end(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        let phase = self.phase();
        if !matches!(phase, Phase::Serving | Phase::Serving10 | Phase::Answering) {
            return Ok(());
        }
        if self.left_open.is_none() {
            if self.end_seen {
                return Ok(());
            }
            let mut byte = [0];
            match self.stream.poll_peek(cx, &mut ReadBuf::new(&mut byte)) {
                Poll::Ready(Ok(0)) => self.end_seen = true,
                Poll::Ready(Err(error)) => return Err(error),
                Poll::Ready(Ok(_)) | Poll::Pending => return Ok(()),
            }
            let next = Box::pin(tokio::time::sleep(PROBES[0]));
            self.left_open = Some(LeftOpen { probes: 0, next, last_write: Instant::now() });
        }
        let left_open = self.left_open.as_mut().expect("it was just made");
        while left_open.next.as_mut().poll(cx).is_ready() {
            if let Some(error) = self.stream.take_error()? {
                return Err(error);
            }
            if phase == Phase::Answering && left_open.last_write.elapsed() >= SILENCE {
                return Err(io::ErrorKind::ConnectionAborted.into());
            }
            if phase == Phase::Serving && self.ours.is_empty() {
                self.ours = Bytes::from_static(CONTINUE);
            }
            left_open.probes += 1;
            let pause = PROBES[left_open.probes.min(PROBES.len() - 1)];
            left_open.next.as_mut().reset(Instant::now() + pause);
        }
        Ok(())
    }

    fn poll_close(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        // A tunnel ends its directions one by one, and what comes belongs to the other.
        let tunnelled = self.peer.is_tunnelled();
        if self.lingering.is_none() || tunnelled {
            ready!(self.poll_ours(cx))?;
            ready!(Pin::new(&mut self.stream).poll_shutdown(cx))?;
        }
        if !self.end_seen && !tunnelled {
            ready!(self.poll_drain(cx));
            self.end_seen = true;
        }
        Poll::Ready(Ok(()))
    }

    /// Throws away what comes, until the client closes or a bound is reached.
    fn poll_drain(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let lingering = self.lingering.get_or_insert_with(Lingering::begin);
        let mut scratch = [0; 16 * 1024];
        // Looked at by the clock: a sender that never pauses uses up the task's budget, and the timer has none left.
        while !lingering.is_over() {
            let mut buf = ReadBuf::new(&mut scratch);
            match Pin::new(&mut self.stream).poll_read(cx, &mut buf) {
                Poll::Ready(Ok(())) if !buf.filled().is_empty() => lingering.read(buf.filled().len()),
                Poll::Ready(_) => break,
                // In a shutdown nobody waits for what an idle client may still say.
                Poll::Pending if self.peer.is_stopping() => break,
                Poll::Pending => return lingering.poll_end(cx),
            }
        }
        Poll::Ready(())
    }
}

impl Lingering {
    fn begin() -> Self {
        let now = Instant::now();
        let alarm = Box::pin(tokio::time::sleep_until(now + DISCARD_SILENCE_MAX));
        Self { until: now + DISCARD_TIME_MAX, last_read: now, bytes: 0, alarm }
    }

    fn read(&mut self, bytes: usize) {
        self.last_read = Instant::now();
        self.bytes += bytes as u64;
    }

    fn end(&self) -> Instant {
        self.until.min(self.last_read + DISCARD_SILENCE_MAX)
    }

    fn is_over(&self) -> bool {
        self.bytes >= DISCARD_BYTES_MAX || Instant::now() >= self.end()
    }

    fn poll_end(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        while self.alarm.as_mut().poll(cx).is_ready() {
            if self.is_over() {
                return Poll::Ready(());
            }
            let end = self.end();
            self.alarm.as_mut().reset(end);
        }
        Poll::Pending
    }
}

impl AsyncRead for ClientSocket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.refused {
            return self.poll_close(cx);
        }
        if self.phase() == Phase::Head {
            return self.poll_read_head(cx, buf);
        }
        let before = buf.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(cx, buf))?;
        self.end_seen |= buf.filled().len() == before && buf.remaining() > 0;
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for ClientSocket {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(cx, &[IoSlice::new(buf)])
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        ready!(self.poll_ours(cx))?;
        if let [only] = bufs
            && self.replace(only)
        {
            return Poll::Ready(Ok(only.len()));
        }
        self.queue_interim();
        ready!(self.poll_ours(cx))?;
        let written = ready!(Pin::new(&mut self.stream).poll_write_vectored(cx, bufs))?;
        self.clear_for = None;
        if let Some(left_open) = &mut self.left_open {
            left_open.last_write = Instant::now();
        }
        Poll::Ready(Ok(written))
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_ours(cx))?;
        self.flushed();
        self.look_for_end(cx)?;
        self.poll_ours(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll_close(cx)
    }
}
