//! One request: forwarded, and answered with the response or with what went wrong.

use std::convert::Infallible;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{self, Poll};

use bytes::Bytes;
use http::header::{CONNECTION, CONTENT_LENGTH, HeaderValue, TRANSFER_ENCODING};
use http::{Method, Request, Response, StatusCode, Version, request};
use http_body::Body;
use onlyonce_engine::Context;
use onlyonce_http::{Code, Ending, Problem};
use tokio::time::Instant;
use tower_service::Service;

use crate::body::UpstreamBody;
use crate::forward;
use crate::options::GatewayOptions;
use crate::problem;
use crate::server::Peer;
use crate::tunnel;
use crate::upstream::{Early, Failure, Upstream};
use crate::websocket::{self, Asked};

/// A reverse proxy for one upstream, as a tower service. Cheap to clone; clones share their connections.
///
/// It never fails: what goes wrong becomes a problem document (`upstream-unreachable`, `upstream-timeout`,
/// `upstream-failed`), and an [`Ending`] among its extensions tells an idempotency layer what the upstream got: nothing
/// (transient), or something without a valid answer (unknown). Bodies stream both ways and hold a few buffers each. A
/// request is sent again, once, only when the connection gave it back unwritten.
///
/// A request with an [`onlyonce_engine::Context`] among its extensions is guarded: it is only sent while its owner has
/// more than half of its lease, on a connection that is fresh or hardly idle, with its `Idempotency-Attempt`.
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

    fn poll_ready(&mut self, _: &mut task::Context<'_>) -> Poll<Result<(), Infallible>> {
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
            return problem::closing(problem, self.options.docs_url.as_ref()).map(UpstreamBody::problem);
        }
        let websocket = websocket::asked(&head).filter(|_| body.is_end_stream());
        let peer = head.extensions.get::<Peer>().cloned();
        let owner = head.extensions.get::<Context>().cloned();
        let client = head.extensions.remove::<hyper::upgrade::OnUpgrade>();
        let repeatable = head.method.is_idempotent();
        let http1 = head.version < Version::HTTP_2;
        head.extensions.clear();
        let attempt = owner.as_ref().map(Context::attempt);
        forward::request(&mut head, peer.as_ref(), attempt, &self.options);
        let h2c = self.options.upstream.is_http2();
        frame(&mut head, &body, h2c);
        if !h2c && !body.is_end_stream() && !has_defined_body(&head.method) {
            // A service that ignores such a body would read it as its next request (RFC 9110 §9.3.1): there is none.
            head.headers.append(CONNECTION, HeaderValue::from_static("close"));
        }
        let answered = match (client, websocket) {
            (Some(client), Some(asked)) if self.upstream.takes_tunnels().await => {
                self.websocket(&asked, Request::from_parts(head, body), client, peer).await
            }
            (_, Some(Asked::Connect)) => Err(Failure::Broken),
            _ => {
                let options = &self.options;
                let idle_for = if owner.is_some() { options.pool_idle_guarded } else { options.pool_idle };
                let mut request = Request::from_parts(head, body);
                // Nothing of a guarded reply leaves before it is recorded.
                if let Some(peer) = peer.filter(|peer| owner.is_none() && peer.exchange().takes_interim()) {
                    pass_interim(&mut request, peer);
                }
                let sent = Instant::now();
                let answered = self.upstream.call(request, idle_for, owner.as_ref()).await;
                let took = sent.elapsed().as_secs_f64();
                match owner {
                    Some(_) => options.counters.upstream_guarded().observe(took),
                    None => options.counters.upstream_passed().observe(took),
                }
                answered
            }
        };
        match answered {
            Ok(response) => self.finish(response, repeatable, http1),
            Err(failure) => self.failed(failure, repeatable),
        }
    }

    async fn websocket(
        &self,
        asked: &Asked,
        request: Request<B>,
        client: hyper::upgrade::OnUpgrade,
        peer: Option<Peer>,
    ) -> Result<Response<UpstreamBody<B>>, Failure> {
        let h2c = self.options.upstream.is_http2();
        let (mut head, body) = request.into_parts();
        let key = websocket::ask(&mut head, asked, h2c);
        let mut response = self.upstream.call_tunnel(Request::from_parts(head, body)).await?;
        if !websocket::is_granted(response.status(), h2c) {
            // To an extended CONNECT any 2xx says that the tunnel is there (RFC 8441 §5).
            if matches!(asked, Asked::Connect) && response.status().is_success() {
                return Err(Failure::Broken);
            }
            return Ok(response.map(UpstreamBody::driven));
        }
        let upstream = hyper::upgrade::on(&mut response);
        let (mut head, body) = response.into_parts();
        forward::response(&mut head);
        if !websocket::answer(asked, &key, &mut head.status, &mut head.headers, h2c) {
            return Err(Failure::Broken);
        }
        tunnel::spawn(client, upstream, peer);
        head.extensions.insert(Switched);
        Ok(Response::from_parts(head, UpstreamBody::driven(body)))
    }

    fn finish(
        &self,
        response: Response<UpstreamBody<B>>,
        repeatable: bool,
        http1: bool,
    ) -> Response<UpstreamBody<B>> {
        let (mut head, body) = response.into_parts();
        let switched = head.extensions.get::<Switched>().is_some();
        if switched {
            return Response::from_parts(head, body);
        }
        if head.status == StatusCode::SWITCHING_PROTOCOLS {
            // Nobody asked to switch, so what follows cannot be read.
            return self.failed(Failure::Broken, repeatable);
        }
        // It will not read the rest of the body, so that the client need not send it.
        let cut = http1 && head.extensions.get::<Early>().is_some() && forward::names(&head.headers, "close");
        forward::response(&mut head);
        if cut {
            head.headers.insert(CONNECTION, HeaderValue::from_static("close"));
        }
        Response::from_parts(head, body)
    }

    fn failed(&self, failure: Failure, repeatable: bool) -> Response<UpstreamBody<B>> {
        let docs = self.options.docs_url.as_ref();
        let unknown = Ending::Unknown(Some(Code::OutcomeUnknown));
        let transient = |code| Ending::Transient(Some(code));
        let (problem, ending) = match failure {
            Failure::Unreachable => {
                let code = Code::UpstreamUnreachable;
                (Problem::new(code), transient(code))
            }
            Failure::NotOwner => (Problem::new(Code::Superseded), transient(Code::Superseded)),
            Failure::Broken => (Problem::new(Code::UpstreamFailed).retryable(repeatable), unknown),
            Failure::Timeout => (Problem::new(Code::UpstreamTimeout).retryable(repeatable), unknown),
            // A part of the body is at the upstream, which may or may not have made something of it.
            Failure::ClientMalformed => (in_part(Code::RequestMalformed, false), unknown),
            Failure::ClientCutShort => (in_part(Code::BodyIncomplete, repeatable), unknown),
            Failure::ClientTimeout => (in_part(Code::BodyTimeout, repeatable), unknown),
        };
        self.options.counters.problem(problem.code());
        // What still comes of the body is not a request.
        let response = match failure {
            Failure::ClientMalformed | Failure::ClientCutShort | Failure::ClientTimeout => {
                problem::closing(problem, docs)
            }
            _ => problem.into_response(docs),
        };
        let mut response = response.map(UpstreamBody::problem);
        response.extensions_mut().insert(ending);
        response
    }
}

/// Sends on what the upstream says before its answer, for example 103 (Early Hints). 100 (Continue) is ours to say.
fn pass_interim<B>(request: &mut Request<B>, peer: Peer) {
    hyper::ext::on_informational(request, move |interim| {
        if interim.status() != StatusCode::CONTINUE {
            let headers = forward::interim(interim.headers(), interim.version());
            peer.exchange().interim(interim.status(), &headers);
        }
    });
}

fn in_part(code: Code, repeatable: bool) -> Problem {
    Problem::new(code)
        .retryable(repeatable)
        .detail("Only a part of the body came, and went on to the service behind.")
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

/// The tunnel is up, and the head says so.
#[derive(Clone, Copy)]
struct Switched;

/// Whether a body of it means something. Of methods that nobody here knows it may.
fn has_defined_body(method: &Method) -> bool {
    ![Method::GET, Method::HEAD, Method::DELETE, Method::OPTIONS, Method::TRACE].contains(method)
}

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
