//! The listener: connections, their limits, and their end.

use std::convert::Infallible;
use std::future::Future;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt;
use http::{HeaderValue, Request, Response};
use http_body::Body;
use hyper::server::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use parking_lot::Mutex;
use tokio::io::Interest;
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tower_service::Service;
use tracing::{debug, warn};

use crate::admission::{Admission, Limits};
use crate::client_body::ClientBody;
use crate::counters::{Counters, OpenConnection};
use crate::exchange::{Exchange, Phase};
use crate::options::GatewayOptions;
use crate::socket::{ClientSocket, SocketOptions};
use crate::workers::Workers;

/// What a shutdown did not finish in time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Drained {
    /// Connections and tunnels that were cut.
    pub connections_cut: usize,
    /// Operations that still run: they keep their leases.
    pub operations_left: usize,
}

/// The client of a request: an extension of every request that [`serve`] passes on.
#[derive(Clone, Debug)]
pub struct Peer(Arc<PeerState>);

#[derive(Debug)]
struct PeerState {
    addr: SocketAddr,
    forwarded_for: HeaderValue,
    running: Running,
    counters: Counters,
    exchange: Exchange,
    tunnelled: AtomicBool,
    streams: AtomicUsize,
    /// Since when no stream is open, where none is.
    quiet_since: Mutex<Instant>,
    // A tunnel outlives its connection's task and keeps its place.
    _place: OwnedSemaphorePermit,
    _open: OpenConnection,
}

/// What runs, and how it is told to end.
#[derive(Clone, Debug)]
struct Running {
    tasks: TaskTracker,
    stop: CancellationToken,
    cut: CancellationToken,
}

impl Peer {
    /// Its address; IPv4 is IPv4 on a dual-stack listener too.
    pub fn addr(&self) -> SocketAddr {
        self.0.addr
    }

    pub(crate) fn forwarded_for(&self) -> &HeaderValue {
        &self.0.forwarded_for
    }

    pub(crate) fn counters(&self) -> &Counters {
        &self.0.counters
    }

    /// Whether the server is shutting down.
    pub(crate) fn is_stopping(&self) -> bool {
        self.0.running.stop.is_cancelled()
    }

    /// Until the server shuts down.
    pub(crate) async fn stopping(&self) {
        self.0.running.stop.cancelled().await;
    }

    /// Whether its connection has become a tunnel.
    pub(crate) fn is_tunnelled(&self) -> bool {
        self.0.tunnelled.load(Ordering::Relaxed)
    }

    /// Where its exchange stands; of an HTTP/1.1 connection.
    pub(crate) fn exchange(&self) -> &Exchange {
        &self.0.exchange
    }

    /// One more stream of its HTTP/2 connection, from the head to the last byte of the answer.
    pub(crate) fn open_stream(&self) -> OpenStream {
        self.0.streams.fetch_add(1, Ordering::Relaxed);
        OpenStream(self.clone())
    }

    /// Until no stream has been open for so long. Frames without one, such as PING, are no request.
    async fn quiet_for(&self, time: Duration) {
        loop {
            let now = Instant::now();
            let since = match self.0.streams.load(Ordering::Relaxed) {
                0 => *self.0.quiet_since.lock(),
                _ => now,
            };
            if now >= since + time {
                return;
            }
            tokio::time::sleep_until(since + time).await;
        }
    }

    /// Runs its connection's tunnel, which has the socket from now on.
    pub(crate) fn tunnel(&self, task: impl Future<Output = ()> + Send + 'static) {
        // Over HTTP/2 it is one stream of many, and the socket goes on as it was.
        if self.0.exchange.phase() != Phase::Opaque {
            self.0.tunnelled.store(true, Ordering::Relaxed);
            self.0.exchange.enter(Phase::Opaque);
        }
        let stream = self.open_stream();
        self.spawn(async move {
            task.await;
            drop(stream);
        });
    }

    /// Runs something of its connection's: the server waits for it at its shutdown and then cuts it.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let peer = self.clone();
        self.0.running.tasks.spawn(async move {
            tokio::select! {
                () = task => {}
                () = peer.0.running.cut.cancelled() => {}
            }
        });
    }
}

/// Counts as a stream until it is dropped.
#[derive(Debug)]
pub(crate) struct OpenStream(Peer);

impl Drop for OpenStream {
    fn drop(&mut self) {
        *self.0.0.quiet_since.lock() = Instant::now();
        self.0.0.streams.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Serves HTTP/1.1 and prior-knowledge h2c on `listener` until `stop` is over, then lets what runs finish.
///
/// # Guarantees
/// A request whose framing or host could be read in two ways never reaches `service`: it is answered 400 and its
/// connection is closed. After `stop` no connection is accepted, idle ones are closed, running requests and tunnels get
/// `options.shutdown_timeout`; then they are cut.
///
/// # Limits
/// `max_connections`, `max_streams`, `max_header_bytes`, `max_headers`, `header_timeout`, `client_idle_timeout` of the
/// options.
///
/// # Cancellation
/// Dropping the future stops accepting and leaves the connections running.
pub async fn serve<S, B>(
    listener: TcpListener,
    service: S,
    options: &GatewayOptions,
    stop: impl Future<Output = ()>,
) -> Drained
where
    S: Service<Request<ClientBody>, Response = Response<B>, Error = Infallible> + Clone + Send + 'static,
    S::Future: Send,
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let mut workers = Workers::start(options.workers).await;
    let drained = serve_with(&mut workers, listener, service, options, stop).await;
    workers.end().await;
    drained
}

/// [`serve`] on workers that the caller ends when nothing is left to be done on them.
pub(crate) async fn serve_with<S, B>(
    workers: &mut Workers,
    listener: TcpListener,
    service: S,
    options: &GatewayOptions,
    stop: impl Future<Output = ()>,
) -> Drained
where
    S: Service<Request<ClientBody>, Response = Response<B>, Error = Infallible> + Clone + Send + 'static,
    S::Future: Send,
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let running = Running {
        tasks: workers.tasks().clone(),
        stop: CancellationToken::new(),
        cut: CancellationToken::new(),
    };
    let places = Arc::new(Semaphore::new(options.max_connections.min(Semaphore::MAX_PERMITS)));
    let protocols = Arc::new(Protocols::new(options));
    let limits = Arc::new(Limits::new(options));
    // Each connection is accepted with one of these in hand, so that there is always an answer for it.
    let refusals = Arc::new(Semaphore::new(REFUSALS_MAX));
    let mut stop = pin!(stop);
    loop {
        let accepted = async {
            let refusal = refusals.clone().acquire_owned().await.expect("the semaphore is never closed");
            (refusal, listener.accept().await)
        };
        let (refusal, accepted) = tokio::select! {
            biased;
            () = stop.as_mut() => break,
            accepted = accepted => accepted,
        };
        // It is served on another runtime.
        let accepted = accepted.and_then(|(stream, addr)| Ok((stream.into_std()?, addr)));
        let (stream, addr) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                // Out of file handles, most likely: accepting again at once would only burn the processor.
                warn!(%error, "no connection can be accepted");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let addr = SocketAddr::new(addr.ip().to_canonical(), addr.port());
        let forwarded_for =
            HeaderValue::from_str(&addr.ip().to_string()).expect("an address is a header value");
        let (place, crowded) = match places.clone().try_acquire_owned() {
            Ok(place) => (place, false),
            Err(_) => (refusal, true),
        };
        let peer = Peer(Arc::new(PeerState {
            addr,
            forwarded_for,
            running: running.clone(),
            exchange: Exchange::default(),
            counters: options.counters.clone(),
            tunnelled: AtomicBool::new(false),
            streams: AtomicUsize::new(0),
            quiet_since: Mutex::new(Instant::now()),
            _place: place,
            _open: options.counters.connection(),
        }));
        let service = Admission::new(service.clone(), peer, limits.clone(), crowded);
        // Of what is refused there is one request at most.
        let home = (!crowded).then(|| workers.home().clone());
        let connection = protocols.clone().connection(stream, service, home);
        if crowded {
            workers.spawn(tokio::time::timeout(REFUSAL_TIME_MAX, connection).map(drop));
        } else {
            workers.spawn(connection);
        }
    }
    drop(listener);
    running.stop.cancel();
    running.tasks.close();
    if tokio::time::timeout(options.shutdown_timeout, running.tasks.wait()).await.is_ok() {
        return Drained::default();
    }
    let connections_cut = running.tasks.len();
    running.cut.cancel();
    running.tasks.wait().await;
    Drained { connections_cut, operations_left: 0 }
}

struct Protocols {
    http1: http1::Builder,
    http2: http2::Builder<TokioExecutor>,
    socket: Arc<SocketOptions>,
    idle_timeout: Duration,
    head_timeout: Duration,
}

impl Protocols {
    fn new(options: &GatewayOptions) -> Self {
        let mut http1 = http1::Builder::new();
        http1
            .timer(TokioTimer::new())
            // The socket times heads, and sees when a client ends its side.
            .header_read_timeout(None)
            .half_close(true)
            .max_headers(options.headers_max())
            .max_header_size(options.header_bytes_max())
            .max_buf_size(options.header_bytes_max())
            // With it, hyper closes without having written its answer when unread input is left.
            .pipeline_flush(false);
        let mut http2 = http2::Builder::new(TokioExecutor::new());
        http2
            .timer(TokioTimer::new())
            // Past this the implementation answers by itself, with a bare status; up to it we do.
            .max_header_list_size(u32::try_from(2 * options.header_bytes_max()).unwrap_or(u32::MAX))
            .max_concurrent_streams(options.max_streams)
            // What a client may send before anybody has read it; of a body that is refused nobody does.
            .initial_stream_window_size(STREAM_WINDOW_BYTES)
            .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
            .keep_alive_interval(Duration::from_secs(20))
            .keep_alive_timeout(Duration::from_secs(20))
            .enable_connect_protocol();
        Self {
            http1,
            http2,
            socket: Arc::new(SocketOptions::new(options)),
            idle_timeout: options.client_idle_timeout,
            head_timeout: options.header_timeout,
        }
    }

    /// Serves one connection to its end; one of HTTP/2 `at_home`, where that is given.
    async fn connection<S, B>(
        self: Arc<Self>,
        stream: std::net::TcpStream,
        service: Admission<S>,
        at_home: Option<Handle>,
    ) where
        S: Service<Request<ClientBody>, Response = Response<B>, Error = Infallible> + Clone + Send + 'static,
        S::Future: Send,
        B: Body<Data = Bytes> + Send + 'static,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let Some(stream) = here(stream) else { return };
        // Only a matter of speed.
        let _ = stream.set_nodelay(true);
        let peer = service.peer().clone();
        let running = &peer.0.running;
        let first = tokio::select! {
            biased;
            () = running.stop.cancelled() => return,
            first = self.first_bytes(&stream) => first,
        };
        let Some((protocol, since)) = first else { return };
        match (protocol, at_home) {
            (Protocol::Http1, _) => self.over_http1(stream, service, since).await,
            (Protocol::Http2, None) => self.over_http2(stream, service, since).await,
            (Protocol::Http2, Some(home)) => {
                let Ok(stream) = stream.into_std() else { return };
                let connection = async move {
                    let Some(stream) = here(stream) else { return };
                    self.over_http2(stream, service, since).await;
                };
                running.tasks.spawn_on(connection, &home);
            }
        }
    }

    async fn over_http1<S, B>(&self, stream: TcpStream, service: Admission<S>, since: Instant)
    where
        S: Service<Request<ClientBody>, Response = Response<B>, Error = Infallible> + Clone + Send + 'static,
        S::Future: Send,
        B: Body<Data = Bytes> + Send + 'static,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let peer = service.peer().clone();
        let Running { stop, cut, .. } = &peer.0.running;
        let io = TokioIo::new(ClientSocket::new(stream, peer.clone(), self.socket.clone(), since));
        let mut connection = pin!(self.http1.serve_connection(io, service).with_upgrades());
        let ended = tokio::select! {
            biased;
            ended = connection.as_mut() => ended,
            () = stop.cancelled() => {
                connection.as_mut().graceful_shutdown();
                tokio::select! { ended = connection => ended, () = cut.cancelled() => Ok(()) }
            }
        };
        tell_of_its_end(ended);
    }

    async fn over_http2<S, B>(&self, stream: TcpStream, service: Admission<S>, since: Instant)
    where
        S: Service<Request<ClientBody>, Response = Response<B>, Error = Infallible> + Clone + Send + 'static,
        S::Future: Send,
        B: Body<Data = Bytes> + Send + 'static,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let peer = service.peer().clone();
        let Running { stop, cut, .. } = &peer.0.running;
        peer.exchange().enter(Phase::Opaque);
        let io = TokioIo::new(ClientSocket::new(stream, peer.clone(), self.socket.clone(), since));
        let mut connection = pin!(self.http2.serve_connection(io, service));
        let ended = tokio::select! {
            biased;
            ended = connection.as_mut() => ended,
            () = stop.cancelled() => {
                connection.as_mut().graceful_shutdown();
                tokio::select! { ended = connection => ended, () = cut.cancelled() => Ok(()) }
            }
            () = peer.quiet_for(self.idle_timeout) => {
                connection.as_mut().graceful_shutdown();
                // A request that was on its way still gets its answer.
                let closing = async {
                    tokio::time::sleep(CLOSING_TIME_MAX).await;
                    peer.quiet_for(CLOSING_TIME_MAX).await;
                };
                tokio::select! {
                    ended = connection => ended,
                    () = closing => Ok(()),
                    () = cut.cancelled() => Ok(()),
                }
            }
        };
        tell_of_its_end(ended);
    }
}

/// The socket, on the runtime of the caller.
fn here(stream: std::net::TcpStream) -> Option<TcpStream> {
    let stream = TcpStream::from_std(stream);
    stream.inspect_err(|error| warn!(%error, "a connection cannot be served")).ok()
}

fn tell_of_its_end(ended: hyper::Result<()>) {
    if let Err(error) = ended {
        debug!(error = &error as &dyn std::error::Error, "a client connection broke");
    }
}

impl Protocols {
    /// Tells the protocol by the first bytes, leaves them unread, and says when the first one came; `None` when none
    /// did. What may still become a preface when its time is over, or its client has ended its side, is HTTP/1, which answers
    /// it.
    async fn first_bytes(&self, stream: &TcpStream) -> Option<(Protocol, Instant)> {
        const PREFACE: &[u8; PREFACE_LEN] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
        let mut bytes = [0; PREFACE_LEN];
        let looked = tokio::time::timeout(self.idle_timeout, stream.peek(&mut bytes)).await;
        let mut len = looked.ok()?.ok().filter(|len| *len > 0)?;
        let since = Instant::now();
        let (mut pause, mut ended) = (Duration::from_millis(5), false);
        loop {
            if len == PREFACE_LEN && bytes == *PREFACE {
                return Some((Protocol::Http2, since));
            }
            if bytes[..len] != PREFACE[..len] || ended || since.elapsed() >= self.head_timeout {
                return Some((Protocol::Http1, since));
            }
            // A preface in pieces: rare, and a socket with unread bytes cannot be waited on.
            tokio::time::sleep(pause).await;
            pause = (2 * pause).min(Duration::from_millis(250));
            ended = stream.ready(Interest::READABLE).await.ok()?.is_read_closed();
            len = stream.peek(&mut bytes).await.ok()?;
        }
    }
}

/// Connections past the bound that are answered at once.
const REFUSALS_MAX: usize = 256;

/// How long one of them may take to send its request and to read why it is refused.
const REFUSAL_TIME_MAX: Duration = Duration::from_secs(5);

/// How long the client of an idle HTTP/2 connection may take to see that it is closed.
const CLOSING_TIME_MAX: Duration = Duration::from_secs(5);

/// A body of HTTP/2 may be ahead of who reads it by this much.
const STREAM_WINDOW_BYTES: u32 = 64 * 1024;

/// And all bodies of one connection together.
const CONNECTION_WINDOW_BYTES: u32 = 256 * 1024;

enum Protocol {
    Http1,
    Http2,
}

const PREFACE_LEN: usize = 24;
