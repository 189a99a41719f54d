//! Calls to the upstream: one connection each over HTTP/1.1, one shared over HTTP/2.

use std::fmt;
use std::future::Future;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body::Body;
use hyper::body::Incoming;
use hyper::client::conn::{TrySendError, http2};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use onlyonce_engine::{Context, NotOwner};
use onlyonce_http::is_malformed;
use onlyonce_tls::InvalidTls;
use tokio::net::TcpStream;
use tokio::sync::Mutex;
use tokio::time::Instant;
use tracing::warn;

use crate::body::{OutgoingBody, Progress, UpstreamBody};
use crate::options::{GatewayOptions, UpstreamUrl};
use crate::pool::{HeadLimits, Idle, Pool, exchange};
use crate::stream::UpstreamStream;
use crate::tls::Connector;

/// A process that was paused sees its deadline before what came meanwhile: so long a socket is looked at once more.
const LAST_LOOK: Duration = Duration::from_millis(50);

/// How a call failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Failure {
    /// Nothing was sent.
    Unreachable,
    /// Nothing was sent, for the operation has another owner by now, or may have.
    NotOwner,
    /// Sent, and the connection broke before a valid answer.
    Broken,
    /// Sent, and no answer in time.
    Timeout,
    /// The client's body is not what its framing says.
    ClientMalformed,
    /// The client broke off in the middle of its body.
    ClientCutShort,
    /// The client stopped in the middle of its body.
    ClientTimeout,
}

/// An extension of a response that came before the request body had gone on whole.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Early;

/// The connections to one upstream.
#[derive(Debug)]
pub(crate) struct Upstream<B: Body + 'static> {
    url: UpstreamUrl,
    tls: Result<Option<Connector>, InvalidTls>,
    connect_timeout: Duration,
    answer_timeout: Duration,
    body_timeout: Duration,
    heads: HeadLimits,
    pool: Arc<Pool<B>>,
    /// Held while connecting, so that a burst opens one connection.
    shared: Mutex<Option<Shared<B>>>,
}

/// One connection for all.
struct Shared<B: Body + 'static> {
    sender: http2::SendRequest<OutgoingBody<B>>,
    since: Instant,
    /// Whether the upstream takes an extended CONNECT; it says so soon after the connection is up.
    takes_tunnels: Box<dyn Fn() -> bool + Send>,
}

impl<B: Body + 'static> fmt::Debug for Shared<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("since", &self.since).finish_non_exhaustive()
    }
}

/// How long an upstream may take to say what it takes.
const SETTINGS_PATIENCE: Duration = Duration::from_secs(1);

impl<B> Upstream<B>
where
    B: Body<Data = Bytes> + Send + Unpin + 'static,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    pub(crate) fn new(options: &GatewayOptions) -> Self {
        Self {
            url: options.upstream.clone(),
            tls: Connector::new(&options.upstream_tls, &options.upstream),
            connect_timeout: options.connect_timeout,
            answer_timeout: options.upstream_timeout,
            body_timeout: options.body_timeout,
            heads: HeadLimits { bytes: options.header_bytes_max(), lines: options.headers_max() },
            pool: Pool::new(
                options.pool_idle.max(options.pool_idle_guarded),
                options.pool_idle_max,
                options.workers,
            ),
            shared: Mutex::new(None),
        }
    }

    /// Sends the request, at most twice and the second time only when nothing was sent before, and returns with the
    /// response head. Uses no HTTP/1.1 connection idle for `idle_for` or longer. A guarded request is only sent with
    /// more than half of its owner's lease left.
    ///
    /// Dropped before that, it closes the connection (HTTP/2: resets the stream).
    pub(crate) async fn call(
        &self,
        request: Request<B>,
        idle_for: Duration,
        owner: Option<&Context>,
    ) -> Result<Response<UpstreamBody<B>>, Failure> {
        let progress = (!request.body().is_end_stream()).then(Progress::new);
        let request = request.map(|body| OutgoingBody::new(body, progress.clone()));
        if self.url.is_http2() {
            self.call_shared(request, owner, progress.as_deref()).await
        } else {
            self.call_owned(request, idle_for, owner, progress.as_deref()).await
        }
    }

    async fn call_owned(
        &self,
        request: Request<OutgoingBody<B>>,
        idle_for: Duration,
        owner: Option<&Context>,
        progress: Option<&Progress>,
    ) -> Result<Response<UpstreamBody<B>>, Failure> {
        let (mut connection, used) = match self.pool.take(idle_for) {
            Some(connection) => (connection, true),
            None => (self.connect_owned().await?, false),
        };
        ensure(owner).await?;
        let mut sent = self.in_time(progress, exchange(&mut connection, request)).await?;
        if used
            && let Err(error) = &mut sent
            && let Some(request) = error.take_message()
        {
            connection = self.connect_owned().await?;
            ensure(owner).await?;
            sent = self.in_time(progress, exchange(&mut connection, request)).await?;
        }
        let mut response = sent.map_err(|error| self.failure(error, progress))?;
        // hyper's buffer holds more at times.
        if head_bytes(&response) > self.heads.bytes {
            self.warn_of_long_head();
            return Err(Failure::Broken);
        }
        if progress.is_some_and(|progress| !progress.has_ended()) {
            response.extensions_mut().insert(Early);
        }
        Ok(response.map(|incoming| UpstreamBody::owned(incoming, connection, self.pool.clone())))
    }

    async fn call_shared(
        &self,
        request: Request<OutgoingBody<B>>,
        owner: Option<&Context>,
        progress: Option<&Progress>,
    ) -> Result<Response<UpstreamBody<B>>, Failure> {
        let mut sender = self.shared_sender().await?;
        ensure(owner).await?;
        let mut sent = self.in_time(progress, sender.try_send_request(request)).await?;
        if let Err(error) = &mut sent
            && let Some(request) = error.take_message()
        {
            // Given back unwritten: that connection is over.
            *self.shared.lock().await = None;
            let mut sender = self.shared_sender().await?;
            ensure(owner).await?;
            sent = self.in_time(progress, sender.try_send_request(request)).await?;
        }
        let response = sent.map_err(|error| self.failure(error, progress))?;
        Ok(response.map(UpstreamBody::driven))
    }

    /// Whether it can be asked for a WebSocket. False too where it cannot be asked at all.
    pub(crate) async fn takes_tunnels(&self) -> bool {
        if !self.url.is_http2() {
            return true;
        }
        if self.shared_sender().await.is_err() {
            return false;
        }
        loop {
            match &*self.shared.lock().await {
                Some(shared) if (shared.takes_tunnels)() => return true,
                Some(shared) if shared.since.elapsed() < SETTINGS_PATIENCE => {}
                _ => return false,
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Asks for a tunnel. Over HTTP/1.1 on a connection of its own, which is never used again.
    pub(crate) async fn call_tunnel(&self, request: Request<B>) -> Result<Response<Incoming>, Failure> {
        let request = request.map(|body| OutgoingBody::new(body, None));
        if self.url.is_http2() {
            let mut sender = self.shared_sender().await?;
            let sent = self.in_time(None, sender.try_send_request(request)).await?;
            return sent.map_err(|error| self.failure(error, None));
        }
        let mut sender = self.connect_owned().await?.into_driven();
        let sent = self.in_time(None, sender.try_send_request(request)).await?;
        sent.map_err(|error| self.failure(error, None))
    }

    async fn connect_owned(&self) -> Result<Box<Idle<B>>, Failure> {
        let stream = self.connect().await?;
        match Idle::new(stream, self.heads).await {
            Ok(connection) => Ok(Box::new(connection)),
            Err(error) => Err(self.unreachable(&error)),
        }
    }

    async fn shared_sender(&self) -> Result<http2::SendRequest<OutgoingBody<B>>, Failure> {
        let mut shared = self.shared.lock().await;
        if let Some(Shared { sender, .. }) = &*shared
            && !sender.is_closed()
        {
            return Ok(sender.clone());
        }
        let stream = self.connect().await?;
        let mut builder = http2::Builder::new(TokioExecutor::new());
        // Finds out that a silent upstream is gone.
        builder.timer(TokioTimer::new()).keep_alive_interval(Duration::from_secs(20)).adaptive_window(true);
        builder.max_header_list_size(u32::try_from(self.heads.bytes).unwrap_or(u32::MAX));
        let handshake = tokio::time::timeout(self.connect_timeout, builder.handshake(TokioIo::new(stream)));
        let (sender, connection) = match handshake.await {
            Ok(Ok(made)) => made,
            Ok(Err(error)) => return Err(self.unreachable(&error)),
            Err(_) => return Err(self.unreachable(&self.too_slow())),
        };
        // Never held across a wait.
        let connection = Arc::new(parking_lot::Mutex::new(Box::pin(connection)));
        let driven = connection.clone();
        // Ends when the last sender is gone; its errors reach the requests through their own channels.
        tokio::spawn(std::future::poll_fn(move |cx| driven.lock().as_mut().poll(cx)));
        let takes_tunnels = Box::new(move || connection.lock().is_extended_connect_protocol_enabled());
        *shared = Some(Shared { sender: sender.clone(), since: Instant::now(), takes_tunnels });
        Ok(sender)
    }

    async fn connect(&self) -> Result<UpstreamStream, Failure> {
        let tls = self.tls.as_ref().map_err(|error| self.unreachable(error))?;
        let connecting = async {
            let stream = TcpStream::connect((self.url.host(), self.url.port())).await?;
            // Only a matter of speed.
            let _ = stream.set_nodelay(true);
            Ok(match tls {
                None => UpstreamStream::Plain(stream),
                Some(tls) => UpstreamStream::Tls(Box::new(tls.connect(stream).await?)),
            })
        };
        let connected: Result<io::Result<_>, _> =
            tokio::time::timeout(self.connect_timeout, connecting).await;
        match connected {
            Ok(Ok(stream)) => Ok(stream),
            Ok(Err(error)) => Err(self.unreachable(&error)),
            Err(_) => Err(self.unreachable(&self.too_slow())),
        }
    }

    fn too_slow(&self) -> io::Error {
        let within = format!("no connection within {:?}, the connect timeout", self.connect_timeout);
        io::Error::new(io::ErrorKind::TimedOut, within)
    }

    /// Waits for the answer as long as the request body moves, and the timeout after that.
    async fn in_time<T>(
        &self,
        progress: Option<&Progress>,
        answer: impl Future<Output = T>,
    ) -> Result<T, Failure> {
        let mut answer = std::pin::pin!(answer);
        let start = Instant::now();
        // Whose turn it is may change meanwhile, and with it what is due.
        let look_again = progress.map_or(self.answer_timeout, |_| self.answer_timeout.min(self.body_timeout));
        let mut deadline = start + look_again;
        loop {
            if let Ok(answer) = tokio::time::timeout_at(deadline, answer.as_mut()).await {
                return Ok(answer);
            }
            let due = match progress {
                Some(progress) => progress.due(self.body_timeout, self.answer_timeout),
                None => start + self.answer_timeout,
            };
            let now = Instant::now();
            if due > now {
                deadline = due.min(now + look_again);
                continue;
            }
            if let Ok(answer) = tokio::time::timeout(LAST_LOOK, answer.as_mut()).await {
                return Ok(answer);
            }
            match progress {
                Some(progress) if progress.waits_for_client() => return Err(Failure::ClientTimeout),
                _ => {
                    warn!(upstream = %self.url, "no answer within --upstream-timeout");
                    return Err(Failure::Timeout);
                }
            }
        }
    }

    fn unreachable(&self, error: &(dyn std::error::Error + 'static)) -> Failure {
        warn!(upstream = %self.url, error, "the upstream cannot be reached");
        Failure::Unreachable
    }

    fn failure(
        &self,
        mut error: TrySendError<Request<OutgoingBody<B>>>,
        progress: Option<&Progress>,
    ) -> Failure {
        let given_back = error.take_message().is_some();
        let error = error.into_error();
        if given_back || was_refused(&error) {
            return self.unreachable(&error);
        }
        if progress.is_some_and(Progress::client_failed) {
            return if is_malformed(&error) { Failure::ClientMalformed } else { Failure::ClientCutShort };
        }
        if error.is_parse_too_large() {
            self.warn_of_long_head();
        } else {
            warn!(upstream = %self.url, error = &error as &dyn std::error::Error, "the upstream broke off");
        }
        Failure::Broken
    }

    fn warn_of_long_head(&self) {
        let HeadLimits { bytes, lines } = self.heads;
        warn!(upstream = %self.url, bytes, lines, "the head of the upstream's answer is longer than --max-header-bytes, or has more lines than --max-headers");
    }
}

/// As it came over HTTP/1.1, but for the first line.
fn head_bytes<B>(response: &Response<B>) -> usize {
    let lines = response.headers().iter().map(|(name, value)| name.as_str().len() + value.len() + 4);
    lines.sum()
}

/// Nothing is sent on a lease that may be over before it arrives.
async fn ensure(owner: Option<&Context>) -> Result<(), Failure> {
    match owner {
        Some(owner) => owner.ensure_lease().await.map_err(|NotOwner| Failure::NotOwner),
        None => Ok(()),
    }
}

/// Whether the upstream says that it did not touch the request (RFC 9113 §8.7): it refused the stream, or it said GOAWAY
/// with a last stream below this one. A stream that GOAWAY leaves alone ends by its own answer or by the connection's end.
fn was_refused(error: &hyper::Error) -> bool {
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        if let Some(error) = error.downcast_ref::<h2::Error>() {
            let refused = error.is_reset() && error.reason() == Some(h2::Reason::REFUSED_STREAM);
            return error.is_remote() && (refused || error.is_go_away());
        }
        cause = error.source();
    }
    false
}
