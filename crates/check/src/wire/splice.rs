//! A connection whose request was written by us and whose answer is read by hyper.
//!
//! hyper frames answers well (chunks, 1xx, early ends) and rightly refuses to write a malformed request, which is what
//! a checker sometimes has to send. So its own request goes nowhere, and the bytes written before it are what counts.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::Stream;

pub(super) struct Splice {
    stream: Stream,
    // hyper takes bytes that come before its request for a protocol error: they are held back until it has written.
    has_written: bool,
    reader: Option<Waker>,
}

impl Splice {
    pub(super) fn new(stream: Stream) -> Self {
        Self { stream, has_written: false, reader: None }
    }
}

impl AsyncRead for Splice {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if !self.has_written {
            self.reader = Some(cx.waker().clone());
            return Poll::Pending;
        }
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for Splice {
    fn poll_write(mut self: Pin<&mut Self>, _cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.has_written = true;
        if let Some(reader) = self.reader.take() {
            reader.wake();
        }
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    // The answer may still be on its way.
    fn poll_shutdown(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}
