//! The listener: connections, their limits, and their end.

use std::convert::Infallible;
use std::future::Future;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, Request, Response};
use http_body::Body;
use http_body_util::{Either, Full};
use hyper::body::Incoming;
use hyper::server::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::service::{TowerToHyperService, TowerToHyperServiceFuture};
use onlyonce_http::{DocsUrl, Problem};
use pin_project_lite::pin_project;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tower_service::Service;
use tracing::{debug, warn};

use crate::forward;
use crate::linger::Lingering;
use crate::options::GatewayOptions;
use crate::problem;

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
    tunnelled: AtomicBool,
    // A tunnel outlives its connection's task and keeps its place.
    _place: OwnedSemaphorePermit,
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

    /// Whether the server is shutting down.
    pub(crate) fn is_stopping(&self) -> bool {
        self.0.running.stop.is_cancelled()
    }

    /// Whether its connection has become a tunnel.
    pub(crate) fn is_tunnelled(&self) -> bool {
        self.0.tunnelled.load(Ordering::Relaxed)
    }

    /// Runs its connection's tunnel: the server waits for it at its shutdown and then cuts it.
    pub(crate) fn tunnel(self, task: impl Future<Output = ()> + Send + 'static) {
        self.0.tunnelled.store(true, Ordering::Relaxed);
        let running = self.0.running.clone();
        running.tasks.spawn(async move {
            tokio::select! {
                () = task => {}
                () = self.0.running.cut.cancelled() => {}
            }
        });
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
/// `max_connections`, `max_streams`, `max_header_bytes`, `max_headers`, `client_idle_timeout` of the options.
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
    S: Service<Request<Incoming>, Response = Response<B>, Error = Infallible> + Clone + Send + 'static,
    S::Future: Send,
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let running =
        Running { tasks: TaskTracker::new(), stop: CancellationToken::new(), cut: CancellationToken::new() };
    let places = Arc::new(Semaphore::new(options.max_connections));
    let protocols = Arc::new(Protocols::new(options));
    let docs = options.docs_url.clone().map(Arc::new);
    let mut stop = pin!(stop);
    loop {
        let accepted = async {
            let place = places.clone().acquire_owned().await.expect("the semaphore is never closed");
            (place, listener.accept().await)
        };
        let (place, accepted) = tokio::select! {
            biased;
            () = stop.as_mut() => break,
            accepted = accepted => accepted,
        };
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
        let tunnelled = AtomicBool::new(false);
        let running_too = running.clone();
        let peer = PeerState { addr, forwarded_for, running: running_too, tunnelled, _place: place };
        let peer = Peer(Arc::new(peer));
        let service = TowerToHyperService::new(service.clone());
        let service = Admission { service, peer, docs: docs.clone() };
        running.tasks.spawn(protocols.clone().connection(stream, service));
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
    first_bytes_timeout: Duration,
}

impl Protocols {
    fn new(options: &GatewayOptions) -> Self {
        let mut http1 = http1::Builder::new();
        http1
            .timer(TokioTimer::new())
            .header_read_timeout(options.client_idle_timeout)
            .max_headers(options.max_headers)
            .max_header_size(options.max_header_bytes)
            .max_buf_size(options.max_header_bytes.max(MIN_BUFFER_BYTES))
            // With it, hyper closes without having written its answer when unread input is left.
            .pipeline_flush(false);
        let mut http2 = http2::Builder::new(TokioExecutor::new());
        http2
            .timer(TokioTimer::new())
            .max_header_list_size(u32::try_from(options.max_header_bytes).unwrap_or(u32::MAX))
            .max_concurrent_streams(options.max_streams)
            .keep_alive_interval(Duration::from_secs(20))
            .keep_alive_timeout(Duration::from_secs(20));
        Self { http1, http2, first_bytes_timeout: options.client_idle_timeout }
    }

    /// Serves one connection to its end.
    async fn connection<S, B>(self: Arc<Self>, stream: TcpStream, service: Admission<S>)
    where
        S: Service<Request<Incoming>, Response = Response<B>, Error = Infallible> + Clone + Send + 'static,
        S::Future: Send,
        B: Body<Data = Bytes> + Send + 'static,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        // Only a matter of speed.
        let _ = stream.set_nodelay(true);
        let Running { stop, cut, .. } = service.peer.0.running.clone();
        let first = tokio::select! {
            biased;
            () = stop.cancelled() => return,
            first = tokio::time::timeout(self.first_bytes_timeout, first_bytes(&stream)) => first,
        };
        let io = TokioIo::new(Lingering::new(stream, service.peer.clone()));
        let ended = match first {
            Err(_) | Ok(None) => return,
            Ok(Some(Protocol::Http1)) => {
                let mut connection = pin!(self.http1.serve_connection(io, service).with_upgrades());
                tokio::select! {
                    biased;
                    ended = connection.as_mut() => ended,
                    () = stop.cancelled() => {
                        connection.as_mut().graceful_shutdown();
                        tokio::select! { ended = connection => ended, () = cut.cancelled() => Ok(()) }
                    }
                }
            }
            Ok(Some(Protocol::Http2)) => {
                let mut connection = pin!(self.http2.serve_connection(io, service));
                tokio::select! {
                    biased;
                    ended = connection.as_mut() => ended,
                    () = stop.cancelled() => {
                        connection.as_mut().graceful_shutdown();
                        tokio::select! { ended = connection => ended, () = cut.cancelled() => Ok(()) }
                    }
                }
            }
        };
        if let Err(error) = ended {
            debug!(error = &error as &dyn std::error::Error, "a client connection broke");
        }
    }
}

/// hyper's own lower bound.
const MIN_BUFFER_BYTES: usize = 8 * 1024;

enum Protocol {
    Http1,
    Http2,
}

/// Tells the protocol by the first bytes and leaves them unread; `None` when the client closed.
async fn first_bytes(stream: &TcpStream) -> Option<Protocol> {
    const PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    let mut bytes = [0; PREFACE.len()];
    loop {
        match stream.peek(&mut bytes).await {
            Ok(0) | Err(_) => return None,
            Ok(PREFACE_LEN) if bytes == *PREFACE => return Some(Protocol::Http2),
            Ok(len) if bytes[..len] != PREFACE[..len] => return Some(Protocol::Http1),
            // A preface in pieces: rare, and a socket with unread bytes cannot be waited on.
            Ok(_) => tokio::time::sleep(Duration::from_millis(5)).await,
        }
    }
}

const PREFACE_LEN: usize = 24;

/// Answers what must not be let in, and tells the service who the client is.
struct Admission<S> {
    service: TowerToHyperService<S>,
    peer: Peer,
    docs: Option<Arc<DocsUrl>>,
}

impl<S, B> hyper::service::Service<Request<Incoming>> for Admission<S>
where
    S: Service<Request<Incoming>, Response = Response<B>, Error = Infallible> + Clone,
{
    type Response = Response<Either<B, Full<Bytes>>>;
    type Error = Infallible;
    type Future = Admitted<TowerToHyperServiceFuture<S, Request<Incoming>>>;

    fn call(&self, mut request: Request<Incoming>) -> Self::Future {
        let (head, body) = request.into_parts();
        if let Err(problem) = forward::admit(&head) {
            return Admitted::Refused { problem: Some(problem), docs: self.docs.clone() };
        }
        request = Request::from_parts(head, body);
        request.extensions_mut().insert(self.peer.clone());
        Admitted::Served { future: hyper::service::Service::call(&self.service, request) }
    }
}

pin_project! {
    #[project = AdmittedProjected]
    enum Admitted<F> {
        Served { #[pin] future: F },
        Refused { problem: Option<Problem>, docs: Option<Arc<DocsUrl>> },
    }
}

impl<F, B> Future for Admitted<F>
where
    F: Future<Output = Result<Response<B>, Infallible>>,
{
    type Output = Result<Response<Either<B, Full<Bytes>>>, Infallible>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        Poll::Ready(Ok(match self.project() {
            AdmittedProjected::Served { future } => match ready!(future.poll(cx)) {
                Ok(response) => response.map(Either::Left),
                Err(never) => match never {},
            },
            AdmittedProjected::Refused { problem, docs } => {
                let problem = problem.take().expect("a future is not polled after its end");
                problem::closing(problem, docs.as_deref()).map(|body| Either::Right(Full::new(body)))
            }
        }))
    }
}
