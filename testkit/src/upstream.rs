//! An HTTP server with a side-effect counter, programmable per request.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::fmt;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, Uri, Version};
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use parking_lot::Mutex;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::Sleep;

/// One request as it reached the upstream, its body read to the end (unless told not to).
#[derive(Clone, Debug)]
pub struct Seen {
    /// The method.
    pub method: Method,
    /// The request target as received.
    pub uri: Uri,
    /// The protocol version.
    pub version: Version,
    /// The headers; values of one name in their order.
    pub headers: HeaderMap,
    /// The body.
    pub body: Bytes,
    /// The trailers.
    pub trailers: HeaderMap,
    /// On which connection, counted from 0.
    pub connection: usize,
    /// The how-many-th request on this upstream, counted from 1.
    pub number: usize,
}

impl Seen {
    /// Path and query as received.
    pub fn path(&self) -> &str {
        self.uri.path_and_query().map_or("", |p| p.as_str())
    }

    /// The first value of a header, as text.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).and_then(|v| v.to_str().ok())
    }

    /// All values of a header, in their order.
    pub fn header_all(&self, name: &str) -> Vec<&str> {
        self.headers.get_all(name).iter().filter_map(|v| v.to_str().ok()).collect()
    }
}

/// What the upstream does with a request.
pub struct Answer {
    status: StatusCode,
    headers: HeaderMap,
    trailers: Option<HeaderMap>,
    delay: Duration,
    script: Script,
}

enum Script {
    Whole(Bytes),
    Chunks(VecDeque<Bytes>, Duration),
    Channel(mpsc::UnboundedReceiver<Bytes>),
    CutShort(Bytes),
    Hang,
    Reset,
}

impl Answer {
    /// An answer with this status and body, with a Content-Length.
    pub fn new(status: u16, body: impl Into<Bytes>) -> Self {
        Self {
            status: StatusCode::from_u16(status).expect("a status"),
            headers: HeaderMap::new(),
            trailers: None,
            delay: Duration::ZERO,
            script: Script::Whole(body.into()),
        }
    }

    /// 200 with this body.
    pub fn ok(body: impl Into<Bytes>) -> Self {
        Self::new(200, body)
    }

    /// A JSON body.
    pub fn json(status: u16, value: &serde_json::Value) -> Self {
        Self::new(status, value.to_string()).header("content-type", "application/json")
    }

    /// 200 with `len` bytes that follow a pattern, so that a shifted or lost byte shows.
    pub fn bytes(len: usize) -> Self {
        Self::ok(pattern(len))
    }

    /// 200, chunked (no Content-Length), a pause before every chunk but the first.
    pub fn chunks<T: Into<Bytes>>(chunks: impl IntoIterator<Item = T>, pause: Duration) -> Self {
        let mut answer = Self::ok("");
        answer.script = Script::Chunks(chunks.into_iter().map(Into::into).collect(), pause);
        answer
    }

    /// 200, an event stream, a pause before every event but the first.
    pub fn sse<'a>(events: impl IntoIterator<Item = &'a str>, pause: Duration) -> Self {
        let events = events.into_iter().map(|event| format!("data: {event}\n\n"));
        Self::chunks(events, pause).header("content-type", "text/event-stream")
    }

    /// 200, chunked; each message sent is a chunk, and dropping the sender ends the body.
    pub fn channel() -> (mpsc::UnboundedSender<Bytes>, Self) {
        let (sender, receiver) = mpsc::unbounded_channel();
        let mut answer = Self::ok("");
        answer.script = Script::Channel(receiver);
        (sender, answer)
    }

    /// Reads the request and never answers.
    pub fn hang() -> Self {
        let mut answer = Self::ok("");
        answer.script = Script::Hang;
        answer
    }

    /// Closes the connection (HTTP/2: resets the stream) instead of answering.
    pub fn reset() -> Self {
        let mut answer = Self::ok("");
        answer.script = Script::Reset;
        answer
    }

    /// 200 with a Content-Length of `declared`; sends `body` and closes the connection.
    pub fn cut_short(declared: u64, body: impl Into<Bytes>) -> Self {
        let mut answer = Self::ok("").header("content-length", &declared.to_string());
        answer.script = Script::CutShort(body.into());
        answer
    }

    /// 200, chunked; sends `body` as a chunk and closes the connection without the last chunk.
    pub fn cut_chunked(body: impl Into<Bytes>) -> Self {
        let mut answer = Self::ok("");
        answer.script = Script::CutShort(body.into());
        answer
    }

    /// Another status.
    #[must_use]
    pub fn status(mut self, status: u16) -> Self {
        self.status = StatusCode::from_u16(status).expect("a status");
        self
    }

    /// Adds a header line.
    #[must_use]
    pub fn header(mut self, name: &str, value: &str) -> Self {
        append(&mut self.headers, name, value);
        self
    }

    /// Adds a trailer; the body is then chunked, and announced by a `Trailer` header.
    #[must_use]
    pub fn trailer(mut self, name: &str, value: &str) -> Self {
        append(&mut self.headers, "trailer", name);
        append(self.trailers.get_or_insert_default(), name, value);
        self
    }

    /// Waits before the answer begins.
    #[must_use]
    pub fn delay(mut self, delay: Duration) -> Self {
        self.delay = delay;
        self
    }
}

impl fmt::Debug for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Answer").field("status", &self.status).finish_non_exhaustive()
    }
}

/// `len` bytes that follow a pattern of period 251.
pub fn pattern(len: usize) -> Bytes {
    (0..len).map(|i| (i % 251) as u8).collect()
}

type Respond = dyn Fn(&Seen) -> Answer + Send + Sync;

/// How an [`Upstream`] is to be started.
#[derive(Clone, Debug, Default)]
pub struct UpstreamOptions {
    idle_close: Option<Duration>,
    read_pause: Option<Duration>,
    answer_first: bool,
    forget: bool,
}

impl UpstreamOptions {
    /// Closes a connection on which no request came for this long.
    #[must_use]
    pub fn idle_close(mut self, after: Duration) -> Self {
        self.idle_close = Some(after);
        self
    }

    /// Waits this long before each piece of a request body.
    #[must_use]
    pub fn read_pause(mut self, pause: Duration) -> Self {
        self.read_pause = Some(pause);
        self
    }

    /// Answers without having read the request body ([`Seen::body`] is empty).
    #[must_use]
    pub fn answer_first(mut self) -> Self {
        self.answer_first = true;
        self
    }

    /// Keeps only the count and the number of body bytes of what it saw: for load and for big uploads.
    #[must_use]
    pub fn forget(mut self) -> Self {
        self.forget = true;
        self
    }

    /// Starts it on a free loopback port.
    pub async fn start(self, respond: impl Fn(&Seen) -> Answer + Send + Sync + 'static) -> Upstream {
        self.start_on(SocketAddr::from(([127, 0, 0, 1], 0)), respond).await
    }

    /// Starts it on this address.
    ///
    /// # Panics
    /// When the address is taken.
    pub async fn start_on(
        self,
        addr: SocketAddr,
        respond: impl Fn(&Seen) -> Answer + Send + Sync + 'static,
    ) -> Upstream {
        let listener = TcpListener::bind(addr).await.expect("the upstream's address is free");
        let addr = listener.local_addr().expect("a bound socket has an address");
        let shared = Arc::new(Shared {
            respond: Box::new(respond),
            options: self,
            started: AtomicUsize::new(0),
            body_bytes: AtomicUsize::new(0),
            answered: AtomicUsize::new(0),
            connections: AtomicUsize::new(0),
            open: AtomicUsize::new(0),
            seen: Mutex::new(Vec::new()),
        });
        let accept = tokio::spawn(accept(listener, shared.clone()));
        Upstream { addr, shared, accept }
    }
}

/// A running HTTP/1.1 and h2c server; stops accepting when dropped.
pub struct Upstream {
    addr: SocketAddr,
    shared: Arc<Shared>,
    accept: JoinHandle<()>,
}

struct Shared {
    respond: Box<Respond>,
    options: UpstreamOptions,
    started: AtomicUsize,
    body_bytes: AtomicUsize,
    answered: AtomicUsize,
    connections: AtomicUsize,
    open: AtomicUsize,
    seen: Mutex<Vec<Seen>>,
}

impl Upstream {
    /// Starts one that answers as `respond` says, on a free loopback port.
    pub async fn start(respond: impl Fn(&Seen) -> Answer + Send + Sync + 'static) -> Self {
        UpstreamOptions::default().start(respond).await
    }

    /// How to start another kind.
    pub fn options() -> UpstreamOptions {
        UpstreamOptions::default()
    }

    /// Where it listens.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// `http://127.0.0.1:PORT`.
    pub fn url(&self) -> String {
        format!("http://{}", self.addr)
    }

    /// The side-effect counter: requests that reached it whole (or, answering first, at all).
    pub fn count(&self) -> usize {
        self.shared.started.load(Ordering::SeqCst)
    }

    /// Answers whose head was given to the connection.
    pub fn answered(&self) -> usize {
        self.shared.answered.load(Ordering::SeqCst)
    }

    /// Bytes of request bodies read so far.
    pub fn body_bytes(&self) -> usize {
        self.shared.body_bytes.load(Ordering::SeqCst)
    }

    /// Connections accepted so far.
    pub fn connections(&self) -> usize {
        self.shared.connections.load(Ordering::SeqCst)
    }

    /// Connections open now.
    pub fn open_connections(&self) -> usize {
        self.shared.open.load(Ordering::SeqCst)
    }

    /// What it saw, in order.
    pub fn seen(&self) -> Vec<Seen> {
        self.shared.seen.lock().clone()
    }

    /// The last request it saw.
    ///
    /// # Panics
    /// When there was none.
    pub fn last(&self) -> Seen {
        self.shared.seen.lock().last().cloned().expect("the upstream saw a request")
    }
}

impl Drop for Upstream {
    fn drop(&mut self) {
        self.accept.abort();
    }
}

impl fmt::Debug for Upstream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Upstream").field("addr", &self.addr).field("count", &self.count()).finish()
    }
}

async fn accept(listener: TcpListener, shared: Arc<Shared>) {
    // Dropping the set with the task closes the connections too: a stopped upstream answers nobody.
    let mut connections = tokio::task::JoinSet::new();
    while let Ok((stream, _)) = listener.accept().await {
        while connections.try_join_next().is_some() {}
        connections.spawn(serve(stream, shared.clone()));
    }
}

async fn serve(stream: TcpStream, shared: Arc<Shared>) {
    // A test may let the peer close at any moment.
    let _ = stream.set_nodelay(true);
    let connection = shared.connections.fetch_add(1, Ordering::SeqCst);
    shared.open.fetch_add(1, Ordering::SeqCst);
    let _open = OpenGuard(shared.clone());
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(shared.options.idle_close);
    builder.http2().timer(TokioTimer::new());
    let service = service_fn(move |request| handle(request, connection, shared.clone()));
    let _ = builder.serve_connection(TokioIo::new(stream), service).await;
}

struct OpenGuard(Arc<Shared>);

impl Drop for OpenGuard {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Ordering::SeqCst);
    }
}

async fn handle(
    request: Request<Incoming>,
    connection: usize,
    shared: Arc<Shared>,
) -> Result<Response<AnswerBody>, Broken> {
    let (head, body) = request.into_parts();
    let (body, trailers) = if shared.options.answer_first {
        (Bytes::new(), HeaderMap::new())
    } else {
        read(body, &shared).await?
    };
    let number = shared.started.fetch_add(1, Ordering::SeqCst) + 1;
    let seen = Seen {
        method: head.method,
        uri: head.uri,
        version: head.version,
        headers: head.headers,
        body,
        trailers,
        connection,
        number,
    };
    let answer = (shared.respond)(&seen);
    if !shared.options.forget {
        shared.seen.lock().push(seen);
    }
    tokio::time::sleep(answer.delay).await;
    match answer.script {
        Script::Hang => std::future::pending().await,
        Script::Reset => return Err(Broken),
        _ => {}
    }
    let mut response = Response::new(AnswerBody::new(answer.script, answer.trailers));
    *response.status_mut() = answer.status;
    *response.headers_mut() = answer.headers;
    shared.answered.fetch_add(1, Ordering::SeqCst);
    Ok(response)
}

async fn read(mut body: Incoming, shared: &Shared) -> Result<(Bytes, HeaderMap), Broken> {
    let (mut whole, mut trailers) = (Vec::new(), HeaderMap::new());
    loop {
        if let Some(pause) = shared.options.read_pause {
            tokio::time::sleep(pause).await;
        }
        let Some(frame) = body.frame().await else { return Ok((whole.into(), trailers)) };
        match frame.map_err(|_| Broken)?.into_data() {
            Ok(data) => {
                shared.body_bytes.fetch_add(data.len(), Ordering::SeqCst);
                if !shared.options.forget {
                    whole.extend_from_slice(&data);
                }
            }
            Err(frame) => trailers = frame.into_trailers().unwrap_or_default(),
        }
    }
}

/// Makes hyper close the connection.
#[derive(Debug)]
struct Broken;

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("broken on purpose")
    }
}

impl std::error::Error for Broken {}

impl From<Infallible> for Broken {
    fn from(never: Infallible) -> Self {
        match never {}
    }
}

struct AnswerBody {
    script: Script,
    trailers: Option<HeaderMap>,
    pause: Option<Pin<Box<Sleep>>>,
    finished: bool,
}

impl AnswerBody {
    fn new(script: Script, trailers: Option<HeaderMap>) -> Self {
        Self { script, trailers, pause: None, finished: false }
    }

    fn next_data(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, Broken>>> {
        match &mut self.script {
            Script::Whole(body) if body.is_empty() => Poll::Ready(None),
            Script::Whole(body) => Poll::Ready(Some(Ok(std::mem::take(body)))),
            Script::Channel(receiver) => receiver.poll_recv(cx).map(|data| data.map(Ok)),
            Script::Chunks(chunks, pause) => {
                if let Some(sleep) = &mut self.pause {
                    std::task::ready!(sleep.as_mut().poll(cx));
                }
                self.pause = (!pause.is_zero()).then(|| Box::pin(tokio::time::sleep(*pause)));
                Poll::Ready(chunks.pop_front().map(Ok))
            }
            // The piece goes out first; the break comes with a later poll, so that the piece is flushed.
            Script::CutShort(body) if !body.is_empty() => Poll::Ready(Some(Ok(std::mem::take(body)))),
            Script::CutShort(_) => {
                let sleep = self.pause.get_or_insert_with(|| Box::pin(tokio::time::sleep(FLUSH)));
                std::task::ready!(sleep.as_mut().poll(cx));
                Poll::Ready(Some(Err(Broken)))
            }
            Script::Hang | Script::Reset => Poll::Ready(None),
        }
    }
}

const FLUSH: Duration = Duration::from_millis(20);

impl Body for AnswerBody {
    type Data = Bytes;
    type Error = Broken;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        if !self.finished {
            if let Some(data) = std::task::ready!(self.next_data(cx)) {
                return Poll::Ready(Some(data.map(Frame::data)));
            }
            self.finished = true;
        }
        Poll::Ready(self.trailers.take().map(|trailers| Ok(Frame::trailers(trailers))))
    }

    fn is_end_stream(&self) -> bool {
        self.trailers.is_none() && matches!(&self.script, Script::Whole(body) if body.is_empty())
    }

    fn size_hint(&self) -> SizeHint {
        match &self.script {
            Script::Whole(body) if self.trailers.is_none() => SizeHint::with_exact(body.len() as u64),
            _ => SizeHint::default(),
        }
    }
}

fn append(headers: &mut HeaderMap, name: &str, value: &str) {
    headers.append(
        HeaderName::from_bytes(name.as_bytes()).expect("a header name"),
        HeaderValue::from_bytes(value.as_bytes()).expect("a header value"),
    );
}
