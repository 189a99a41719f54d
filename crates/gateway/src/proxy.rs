//! One request: forwarded, and answered with the response or with what went wrong.

use std::convert::Infallible;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::header::{CONNECTION, CONTENT_LENGTH, HeaderValue, TRANSFER_ENCODING, UPGRADE};
use http::{Request, Response, StatusCode, request};
use http_body::Body;
use tower_service::Service;

use crate::body::UpstreamBody;
use crate::forward;
use crate::options::GatewayOptions;
use crate::problem::Problem;
use crate::server::Peer;
use crate::tunnel;
use crate::upstream::{Failure, Upstream};

/// Marks a request, as an extension, whose outcome is guarded by an idempotency key.
///
/// Its upstream connection is fresh or hardly idle, and `Idempotency-Attempt` tells the upstream the attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Guarded {
    /// Grows with each takeover or new run of the operation; 1 at first.
    pub attempt: u32,
}

/// How the call ended, as an extension of every response of a [`ProxyService`].
///
/// A body that breaks off later is the reader's to see: the call was answered, though not whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallEnd {
    /// The response head is the upstream's.
    Answered,
    /// The upstream got nothing, or said that it did not touch it: sending again is safe.
    NotSent,
    /// The upstream got the request or a part of it, and no valid answer came: it may have taken effect.
    SentNoAnswer,
}

/// A reverse proxy for one upstream, as a tower service. Cheap to clone; clones share their connections.
///
/// It never fails: what goes wrong becomes a problem document (`upstream-unreachable`, `upstream-timeout`,
/// `upstream-reset`), and the [`CallEnd`] extension says what the upstream got. Bodies stream both ways and hold a few
/// buffers each. A request is sent again, once, only when the connection gave it back unwritten.
///
/// Dropping the future before the response head closes the upstream connection: to outlive its client, a call must run
/// in a task of its own.
pub struct ProxyService<B: Body + 'static> {
    inner: Arc<Inner<B>>,
}

#[derive(Debug)]
struct Inner<B: Body + 'static> {
    options: GatewayOptions,
    upstream: Upstream<B>,
}

impl<B> ProxyService<B>
where
    B: Body<Data = Bytes> + Send + Unpin + 'static,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    /// A proxy to `options.upstream`. Connects when a request comes, not before.
    pub fn new(options: &GatewayOptions) -> Self {
        Self { inner: Arc::new(Inner { options: options.clone(), upstream: Upstream::new(options) }) }
    }
}

impl<B> Service<Request<B>> for ProxyService<B>
where
    B: Body<Data = Bytes> + Send + Unpin + 'static,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    type Response = Response<UpstreamBody<B>>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let inner = self.inner.clone();
        Box::pin(async move { Ok(inner.forward(request).await) })
    }
}

impl<B> Inner<B>
where
    B: Body<Data = Bytes> + Send + Unpin + 'static,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    async fn forward(&self, request: Request<B>) -> Response<UpstreamBody<B>> {
        let (mut head, body) = request.into_parts();
        // The server has done this already; another server in front of this service may not have.
        if let Err(problem) = forward::admit(&head) {
            return refuse(problem, CallEnd::NotSent);
        }
        let websocket =
            forward::wants_websocket(&head) && body.is_end_stream() && !self.options.upstream.is_h2c();
        let peer = head.extensions.get::<Peer>().cloned();
        let guarded = head.extensions.get::<Guarded>().copied();
        let client = head.extensions.remove::<hyper::upgrade::OnUpgrade>();
        let repeatable = head.method.is_idempotent();
        head.extensions.clear();
        forward::request(&mut head, peer.as_ref(), &self.options);
        if let Some(Guarded { attempt }) = guarded {
            head.headers.insert(forward::IDEMPOTENCY_ATTEMPT, HeaderValue::from(attempt));
        }
        frame(&mut head, &body, self.options.upstream.is_h2c());
        let answered = match client {
            Some(client) if websocket => self.upgrade(head, body, client, peer).await,
            _ => {
                let options = &self.options;
                let idle_for = if guarded.is_some() { options.pool_idle_guarded } else { options.pool_idle };
                self.upstream.call(Request::from_parts(head, body), idle_for).await
            }
        };
        match answered {
            Ok(response) => finish(response, repeatable),
            Err(failure) => failed(failure, repeatable),
        }
    }

    async fn upgrade(
        &self,
        mut head: request::Parts,
        body: B,
        client: hyper::upgrade::OnUpgrade,
        peer: Option<Peer>,
    ) -> Result<Response<UpstreamBody<B>>, Failure> {
        head.headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
        head.headers.insert(UPGRADE, HeaderValue::from_static("websocket"));
        let mut response = self.upstream.call_upgrade(Request::from_parts(head, body)).await?;
        if response.status() != StatusCode::SWITCHING_PROTOCOLS {
            return Ok(response.map(UpstreamBody::driven));
        }
        tunnel::spawn(client, hyper::upgrade::on(&mut response), peer);
        let mut response = response.map(UpstreamBody::driven);
        response.extensions_mut().insert(Switched);
        Ok(response)
    }
}

impl<B: Body + 'static> Clone for ProxyService<B> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone() }
    }
}

impl<B: Body + 'static> fmt::Debug for ProxyService<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProxyService").field("upstream", &self.inner.options.upstream).finish_non_exhaustive()
    }
}

/// The tunnel is up: a 101 that was asked for.
#[derive(Clone, Copy)]
struct Switched;

/// Frames the request body by what the body itself knows, never by what the client claimed.
fn frame<B: Body>(head: &mut request::Parts, body: &B, h2c: bool) {
    if body.is_end_stream() {
        // `Content-Length: 0` may stay; anything else would promise a body.
        if head.headers.get(CONTENT_LENGTH).is_some_and(|len| len != "0") {
            head.headers.remove(CONTENT_LENGTH);
        }
        return;
    }
    match body.size_hint().exact() {
        Some(len) => {
            let same = head
                .headers
                .get(CONTENT_LENGTH)
                .is_some_and(|given| given.to_str().ok().and_then(|given| given.parse().ok()) == Some(len));
            if !same {
                head.headers.insert(CONTENT_LENGTH, HeaderValue::from(len));
            }
        }
        None => {
            head.headers.remove(CONTENT_LENGTH);
            if !h2c {
                // Said outright, or hyper leaves out the body of a GET.
                head.headers.insert(TRANSFER_ENCODING, HeaderValue::from_static("chunked"));
            }
        }
    }
}

fn finish<B>(response: Response<UpstreamBody<B>>, repeatable: bool) -> Response<UpstreamBody<B>>
where
    B: Body<Data = Bytes> + Send + Unpin + 'static,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let (mut head, body) = response.into_parts();
    let switched = head.extensions.get::<Switched>().is_some();
    if head.status == StatusCode::SWITCHING_PROTOCOLS && !switched {
        // Nobody asked to switch, so what follows cannot be read.
        return refuse(Problem::reset(repeatable), CallEnd::SentNoAnswer);
    }
    forward::response(&mut head);
    if switched {
        head.headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
        head.headers.insert(UPGRADE, HeaderValue::from_static("websocket"));
    }
    head.extensions.insert(CallEnd::Answered);
    Response::from_parts(head, body)
}

fn failed<B>(failure: Failure, repeatable: bool) -> Response<UpstreamBody<B>>
where
    B: Body<Data = Bytes> + Send + Unpin + 'static,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    match failure {
        Failure::Unreachable => refuse(Problem::UNREACHABLE, CallEnd::NotSent),
        Failure::Reset => refuse(Problem::reset(repeatable), CallEnd::SentNoAnswer),
        Failure::Timeout => refuse(Problem::timeout(repeatable), CallEnd::SentNoAnswer),
        Failure::ClientCutShort => refuse(Problem::REQUEST_CUT_SHORT, CallEnd::SentNoAnswer),
        Failure::ClientTimeout => refuse(Problem::REQUEST_TIMEOUT, CallEnd::SentNoAnswer),
    }
}

fn refuse<B>(problem: Problem, end: CallEnd) -> Response<UpstreamBody<B>>
where
    B: Body<Data = Bytes> + Send + Unpin + 'static,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let mut response = problem.into_response(UpstreamBody::problem);
    response.extensions_mut().insert(end);
    response
}
