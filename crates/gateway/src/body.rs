//! Bodies on their way through, piece by piece.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::{Buf, Bytes};
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use pin_project_lite::pin_project;
use tokio::time::Instant;

use crate::forward;
use crate::pool::{Idle, Pool};

/// A response body on its way from the upstream to the client: nothing is read ahead of the reader.
///
/// Dropped before its end it closes the upstream connection (HTTP/2: resets the stream).
///
/// # Errors
/// When the upstream breaks off before the end.
pub struct UpstreamBody<B: Body + 'static>(Kind<B>);

enum Kind<B: Body + 'static> {
    /// Drives its own upstream connection, in the reader's task: no hop between tasks.
    Owned {
        incoming: Incoming,
        connection: Option<Box<Idle<B>>>,
        pool: Arc<Pool<B>>,
    },
    /// Another task drives the connection.
    Driven(Incoming),
    Problem(Option<Bytes>),
}

impl<B> UpstreamBody<B>
where
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    pub(crate) fn owned(incoming: Incoming, connection: Box<Idle<B>>, pool: Arc<Pool<B>>) -> Self {
        let mut this = Self(Kind::Owned { incoming, connection: Some(connection), pool });
        if this.is_end_stream() {
            // Nobody will poll an empty body. The connection is idle already, so no wake-up is lost here.
            this.give_back(&mut Context::from_waker(Waker::noop()));
        }
        this
    }

    pub(crate) fn driven(incoming: Incoming) -> Self {
        Self(Kind::Driven(incoming))
    }

    pub(crate) fn problem(body: Bytes) -> Self {
        Self(Kind::Problem(Some(body)))
    }

    fn give_back(&mut self, cx: &mut Context<'_>) {
        if let Kind::Owned { connection, pool, .. } = &mut self.0
            && let Some(connection) = connection.take()
        {
            pool.give_back(connection, cx);
        }
    }
}

impl<B> Body for UpstreamBody<B>
where
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let (incoming, connection) = match &mut self.0 {
            Kind::Problem(body) => return Poll::Ready(body.take().map(|body| Ok(Frame::data(body)))),
            Kind::Driven(incoming) => return Pin::new(incoming).poll_frame(cx),
            Kind::Owned { incoming, connection: None, .. } => return Pin::new(incoming).poll_frame(cx),
            Kind::Owned { incoming, connection: Some(connection), .. } => (incoming, connection),
        };
        // Only the connection, polled right here, feeds `incoming`: its own wake-ups would be to ourselves.
        let quiet = &mut Context::from_waker(Waker::noop());
        let mut frame = Pin::new(&mut *incoming).poll_frame(quiet);
        if frame.is_pending() {
            connection.drive(cx);
            frame = Pin::new(&mut *incoming).poll_frame(quiet);
            if frame.is_pending() {
                return Poll::Pending;
            }
        }
        if matches!(frame, Poll::Ready(None)) || incoming.is_end_stream() {
            self.give_back(cx);
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        match &self.0 {
            Kind::Owned { incoming, .. } | Kind::Driven(incoming) => incoming.is_end_stream(),
            Kind::Problem(body) => body.is_none(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.0 {
            Kind::Owned { incoming, .. } | Kind::Driven(incoming) => incoming.size_hint(),
            Kind::Problem(body) => SizeHint::with_exact(body.as_ref().map_or(0, |body| body.len() as u64)),
        }
    }
}

impl<B: Body + 'static> fmt::Debug for UpstreamBody<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UpstreamBody").finish_non_exhaustive()
    }
}

pin_project! {
    /// A request body on its way to the upstream, which tells how it gets on.
    pub(crate) struct OutgoingBody<B> {
        #[pin]
        inner: B,
        progress: Option<Arc<Progress>>,
    }
}

impl<B: Body> OutgoingBody<B> {
    pub(crate) fn new(inner: B, progress: Option<Arc<Progress>>) -> Self {
        Self { inner, progress }
    }
}

impl<B: Body> Body for OutgoingBody<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        let mut this = self.project();
        let mut frame = this.inner.as_mut().poll_frame(cx);
        if let Poll::Ready(Some(Ok(frame))) = &mut frame
            && let Some(trailers) = frame.trailers_mut()
        {
            forward::trailers(trailers);
        }
        if let Some(progress) = this.progress {
            match &frame {
                Poll::Pending => progress.waiting.store(true, Ordering::Relaxed),
                Poll::Ready(Some(Err(_))) => progress.failed.store(true, Ordering::Relaxed),
                Poll::Ready(Some(Ok(frame))) => {
                    let len = frame.data_ref().map_or(0, |data| data.remaining() as u64);
                    progress.moved(len, this.inner.is_end_stream());
                }
                Poll::Ready(None) => progress.moved(0, true),
            }
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

/// A client that brings less than this counts as pausing.
const PROGRESS_BYTES: u64 = 1024;

/// How far a request body has got.
#[derive(Debug)]
pub(crate) struct Progress {
    start: Instant,
    last_moved_ms: AtomicU64,
    /// When the client had brought [`PROGRESS_BYTES`] since the time before, or the end.
    client_moved_ms: AtomicU64,
    /// What it has brought since then.
    client_bytes: AtomicU64,
    waiting: AtomicBool,
    failed: AtomicBool,
    ended: AtomicBool,
}

impl Progress {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self {
            start: Instant::now(),
            last_moved_ms: AtomicU64::new(0),
            client_moved_ms: AtomicU64::new(0),
            client_bytes: AtomicU64::new(0),
            waiting: AtomicBool::new(false),
            failed: AtomicBool::new(false),
            ended: AtomicBool::new(false),
        })
    }

    fn moved(&self, bytes: u64, end: bool) {
        let since = u64::try_from(self.start.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.last_moved_ms.store(since, Ordering::Relaxed);
        let brought = self.client_bytes.load(Ordering::Relaxed) + bytes;
        let enough = end || brought >= PROGRESS_BYTES;
        self.client_bytes.store(if enough { 0 } else { brought }, Ordering::Relaxed);
        if enough {
            self.client_moved_ms.store(since, Ordering::Relaxed);
        }
        self.waiting.store(false, Ordering::Relaxed);
        self.ended.store(end, Ordering::Relaxed);
    }

    /// Whether all of it went on.
    pub(crate) fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Relaxed)
    }

    /// When what is waited for is late: the client with its body, or the upstream with its answer.
    pub(crate) fn due(&self, body_timeout: Duration, answer_timeout: Duration) -> Instant {
        let (since, timeout) = if self.waits_for_client() {
            (&self.client_moved_ms, body_timeout)
        } else {
            (&self.last_moved_ms, answer_timeout)
        };
        self.start + Duration::from_millis(since.load(Ordering::Relaxed)) + timeout
    }

    /// Whether the client, not the upstream, is what is waited for.
    pub(crate) fn waits_for_client(&self) -> bool {
        self.waiting.load(Ordering::Relaxed)
    }

    /// Whether the client broke off.
    pub(crate) fn client_failed(&self) -> bool {
        self.failed.load(Ordering::Relaxed)
    }
}
