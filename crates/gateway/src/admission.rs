//! The way of a request from its connection to the service, and of the answer back.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONNECTION, HeaderValue, ORIGIN};
use http::{Request, Response, StatusCode, Version, request};
use http_body::{Body, Frame, SizeHint};
use http_body_util::{Either, Full};
use hyper::body::Incoming;
use hyper_util::service::{TowerToHyperService, TowerToHyperServiceFuture};
use onlyonce_http::{Code, Cors, DocsUrl, Problem};
use pin_project_lite::pin_project;
use tower_service::Service;

use crate::client_body::ClientBody;
use crate::counters::OpenRequest;
use crate::exchange::{Phase, Unread};
use crate::forward;
use crate::options::GatewayOptions;
use crate::problem;
use crate::server::{OpenStream, Peer};

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Answers what must not be let in, tells the service who the client is, and the socket how far the exchange has got.
pub(crate) struct Admission<S> {
    service: TowerToHyperService<S>,
    peer: Peer,
    limits: Arc<Limits>,
    crowded: bool,
}

impl<S> Admission<S> {
    /// For a crowded connection there is no place: all it gets is an answer that says so.
    pub(crate) fn new(service: S, peer: Peer, limits: Arc<Limits>, crowded: bool) -> Self {
        Self { service: TowerToHyperService::new(service), peer, limits, crowded }
    }

    pub(crate) fn peer(&self) -> &Peer {
        &self.peer
    }
}

/// What a request is held to beyond HTTP.
#[derive(Debug)]
pub(crate) struct Limits {
    requests_max: usize,
    head_bytes_max: usize,
    headers_max: usize,
    docs: Option<DocsUrl>,
    cors: Option<Cors>,
}

impl<S, B> hyper::service::Service<Request<Incoming>> for Admission<S>
where
    S: Service<Request<ClientBody>, Response = Response<B>, Error = Infallible> + Clone,
    B: Body<Data = Bytes>,
{
    type Response = Response<Told<Either<B, Full<Bytes>>>>;
    type Error = Infallible;
    type Future = Admitted<TowerToHyperServiceFuture<S, Request<ClientBody>>>;

    fn call(&self, request: Request<Incoming>) -> Self::Future {
        self.peer.exchange().begin(request.version());
        let (head, body) = request.into_parts();
        let peer = self.peer.clone();
        let body = ClientBody::new(&head, body, peer.clone());
        let stream = (head.version == Version::HTTP_2).then(|| peer.open_stream());
        let open = peer.counters().request(self.limits.requests_max).filter(|_| !self.crowded);
        let admitted = match &open {
            None => Err(Problem::new(Code::Overloaded).retry_after(Duration::from_secs(1))),
            Some(_) => forward::admit(&head).and_then(|()| self.limits.admit(&head)),
        };
        if let Err(problem) = admitted {
            peer.counters().problem(problem.code());
            let (origin, limits) = (head.headers.get(ORIGIN).cloned(), self.limits.clone());
            return Admitted::Refused { problem: Some(problem), origin, limits, peer, stream };
        }
        let mut request = Request::from_parts(head, body);
        request.extensions_mut().insert(self.peer.clone());
        Admitted::Served { future: hyper::service::Service::call(&self.service, request), peer, open, stream }
    }
}

impl Limits {
    pub(crate) fn new(options: &GatewayOptions) -> Self {
        Self {
            requests_max: options.max_requests,
            head_bytes_max: options.header_bytes_max(),
            headers_max: options.headers_max(),
            docs: options.docs_url.clone(),
            cors: options.cors.clone(),
        }
    }

    /// HTTP/1.1 heads were held to this as they came; of HTTP/2 only the double of it was refused, without saying why.
    fn admit(&self, head: &request::Parts) -> Result<(), Problem> {
        if head.version < Version::HTTP_2 {
            return Ok(());
        }
        // As RFC 9113 §6.5.2 counts it.
        let lines = head.headers.iter().map(|(name, value)| name.as_str().len() + value.len() + 32);
        let target = head.uri.path_and_query().map_or(0, |target| target.as_str().len());
        if head.headers.len() > self.headers_max || lines.sum::<usize>() + target > self.head_bytes_max {
            return Err(Problem::new(Code::HeadTooLarge));
        }
        Ok(())
    }
}

pin_project! {
    #[project = AdmittedProjected]
    pub(crate) enum Admitted<F> {
        Served { #[pin] future: F, peer: Peer, open: Option<OpenRequest>, stream: Option<OpenStream> },
        Refused {
            problem: Option<Problem>,
            origin: Option<HeaderValue>,
            limits: Arc<Limits>,
            peer: Peer,
            stream: Option<OpenStream>,
        },
    }
}

impl<F, B> Future for Admitted<F>
where
    F: Future<Output = Result<Response<B>, Infallible>>,
    B: Body<Data = Bytes>,
{
    type Output = Result<Response<Told<Either<B, Full<Bytes>>>>, Infallible>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let (response, peer, open, stream) = match self.project() {
            AdmittedProjected::Served { future, peer, open, stream } => match ready!(future.poll(cx)) {
                Ok(mut response) => {
                    if ends_connection(peer.exchange().unread(), response.status()) {
                        response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
                    }
                    (response.map(Either::Left), peer, open.take(), stream.take())
                }
                Err(never) => match never {},
            },
            AdmittedProjected::Refused { problem, origin, limits, peer, stream } => {
                let problem = problem.take().expect("a future is not polled after its end");
                let mut refusal = problem::closing(problem, limits.docs.as_ref());
                if let Some(cors) = &limits.cors {
                    cors.fit_refusal(origin.as_ref(), refusal.headers_mut());
                }
                (refusal.map(|body| Either::Right(Full::new(body))), peer, None, stream.take())
            }
        };
        peer.exchange().enter(Phase::Answering);
        let peer = peer.clone();
        Poll::Ready(Ok(response.map(|inner| Told {
            inner,
            peer,
            failed: None,
            _open: open,
            _stream: stream,
        })))
    }
}

/// Whether the connection is closed behind this answer, for there is more of the request that nobody reads. The client is
/// told (RFC 9112 §9.6): else it might send its next request into a connection that ends.
fn ends_connection(unread: Unread, status: StatusCode) -> bool {
    // Refused for what has not come yet.
    let too_late = status == StatusCode::PAYLOAD_TOO_LARGE || status == StatusCode::REQUEST_TIMEOUT;
    status != StatusCode::SWITCHING_PROTOCOLS
        && (unread == Unread::TooMuch || unread == Unread::Some && too_late)
}

pin_project! {
    /// A response body that tells the socket when all of it was given to the connection.
    pub(crate) struct Told<B> {
        #[pin]
        inner: B,
        peer: Peer,
        failed: Option<BoxError>,
        _open: Option<OpenRequest>,
        _stream: Option<OpenStream>,
    }

    impl<B> PinnedDrop for Told<B> {
        fn drop(this: Pin<&mut Self>) {
            this.peer.exchange().enter(Phase::Answered);
        }
    }
}

impl<B> Body for Told<B>
where
    B: Body,
    B::Error: Into<BoxError>,
{
    type Data = B::Data;
    type Error = BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, BoxError>>> {
        let this = self.project();
        if let Some(error) = this.failed.take() {
            return Poll::Ready(Some(Err(error)));
        }
        match ready!(this.inner.poll_frame(cx)) {
            // At an error the connection is closed as it stands: first it writes what came before.
            Some(Err(error)) => {
                *this.failed = Some(error.into());
                cx.waker().wake_by_ref();
                Poll::Pending
            }
            Some(Ok(frame)) => Poll::Ready(Some(Ok(frame))),
            None => Poll::Ready(None),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}
