//! A client socket that is closed so that the client can read the last answer.
//!
//! Closing a socket with unread input resets the connection, and the reset may destroy an answer that is still on its
//! way: a 400 to a bad head, a 413 to an upload. So the sending side is ended first, and what still comes is thrown
//! away for a while.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep};

use crate::server::Peer;

/// How long at most.
const LINGER: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub(crate) struct Lingering {
    stream: TcpStream,
    peer: Peer,
    end_seen: bool,
    until: Option<Pin<Box<Sleep>>>,
}

impl Lingering {
    pub(crate) fn new(stream: TcpStream, peer: Peer) -> Self {
        Self { stream, peer, end_seen: false, until: None }
    }

    /// Throws away what comes, until the client closes or the time is over.
    fn poll_drain(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let until = self.until.get_or_insert_with(|| Box::pin(tokio::time::sleep(LINGER)));
        let mut scratch = [0; 4096];
        // Looked at by the clock: a sender that never pauses uses up the task's budget, and the timer has none left.
        while Instant::now() < until.deadline() {
            let mut buf = ReadBuf::new(&mut scratch);
            match Pin::new(&mut self.stream).poll_read(cx, &mut buf) {
                Poll::Ready(Ok(())) if !buf.filled().is_empty() => {}
                Poll::Ready(_) => break,
                // In a shutdown nobody waits for what an idle client may still say.
                Poll::Pending if self.peer.is_stopping() => break,
                Poll::Pending => return until.as_mut().poll(cx),
            }
        }
        Poll::Ready(())
    }
}

impl AsyncRead for Lingering {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(cx, buf))?;
        self.end_seen |= buf.filled().len() == before && buf.remaining() > 0;
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Lingering {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        // A tunnel ends its directions one by one, and what comes belongs to the other.
        if self.until.is_none() || self.peer.is_tunnelled() {
            ready!(Pin::new(&mut self.stream).poll_shutdown(cx))?;
        }
        if !self.end_seen && !self.peer.is_tunnelled() {
            ready!(self.poll_drain(cx));
            self.end_seen = true;
        }
        Poll::Ready(Ok(()))
    }
}
