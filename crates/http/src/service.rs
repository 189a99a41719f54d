//! The service: decides, refuses early, reads the body, answers from memory, and leaves the rest to work that outlives the client.

use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::request::Parts;
use http::{Request, Response, StatusCode};
use http_body::Body;
use http_body_util::BodyExt;
use onlyonce_core::{Key, Operation, Scope};
use onlyonce_engine::{Begin, Idempotency};
use pin_project_lite::pin_project;
use tokio::sync::oneshot;
use tokio::time::timeout;
use tower_service::Service;
use tracing::Instrument;

use crate::answer::{self, ClientTraits, GuardStatus};
use crate::body::{BoxError, ReplyBody, RequestBody, Whole};
use crate::budget::Permit;
use crate::collect::{Cut, Room, collect, is_malformed};
use crate::cors::{self, Page};
use crate::detached::Detached;
use crate::execute::{Job, execute};
use crate::fingerprint::Comparison;
use crate::headers::strip_ours;
use crate::lookup::Lookup;
use crate::origin::TRACEPARENT;
use crate::problem::{Code, Problem};
use crate::report::{KeyHash, Verdict};
use crate::reporter::{Answer, Reporter};
use crate::settings::{Guarded, Settings};

/// What a guarded request counts for besides its body, in bytes: its head and its task.
const HEAD_BYTES: usize = 1 << 10;

/// A service behind idempotency keys; made by [`IdempotencyLayer`](crate::IdempotencyLayer).
///
/// The service behind gets a [`RequestBody`]; in the extensions of a guarded request it finds a
/// [`onlyonce_engine::Context`]: the attempt, the operation, downstream keys.
#[derive(Clone, Debug)]
pub struct IdempotencyService<S> {
    inner: S,
    shared: Arc<Shared>,
}

#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) idem: Idempotency,
    pub(crate) settings: Arc<Settings>,
}

impl<S> IdempotencyService<S> {
    pub(crate) fn new(inner: S, idem: Idempotency, settings: Arc<Settings>) -> Self {
        Self { inner, shared: Arc::new(Shared { idem, settings }) }
    }
}

/// What the head of a request on a guarded route says.
pub(crate) enum Admission {
    /// Guarded: whose key, and which; with a share of the budget.
    Guarded(Scope, Key, Permit),
    /// No key, and none needed.
    Ignored,
}

impl<S, B, RB> Service<Request<B>> for IdempotencyService<S>
where
    S: Service<Request<RequestBody<B>>, Response = Response<RB>> + Clone + Send + 'static,
    S::Future: Send + 'static,
    S::Error: Into<BoxError> + Send,
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
    RB: Body<Data = Bytes> + Send + 'static,
    RB::Error: Into<BoxError>,
{
    type Response = Response<ReplyBody<RB>>;
    type Error = S::Error;
    type Future = ResponseFuture<S::Future, RB>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let settings = &self.shared.settings;
        let (mut parts, body) = request.into_parts();
        strip_ours(&mut parts.headers, &settings.names);
        let page = Page::of(&parts, settings).map(Box::new);
        let settings = settings.clone();
        ResponseFuture { kind: self.answer(parts, body), page, settings }
    }
}

impl<S> IdempotencyService<S> {
    fn answer<B, RB>(&mut self, mut parts: Parts, body: B) -> FutureKind<S::Future, RB>
    where
        S: Service<Request<RequestBody<B>>, Response = Response<RB>> + Clone + Send + 'static,
        S::Future: Send + 'static,
        S::Error: Into<BoxError> + Send,
        B: Body<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
        RB: Body<Data = Bytes> + Send + 'static,
        RB::Error: Into<BoxError>,
    {
        let settings = &self.shared.settings;
        if let Some(lookup) = settings.lookup.as_ref().filter(|_| Lookup::is_for(&parts, settings)) {
            let answer = lookup.clone().answer(parts, self.shared.idem.clone(), settings.clone());
            return FutureKind::Boxed { future: Box::pin(answer) };
        }
        let guarded = settings.guard.decide(&parts);
        if guarded == Guarded::No {
            return self.pass(parts, body, None);
        }
        let mut reporter = Reporter::new(settings, &parts);
        if let Some(onward) = reporter.origin.onward().and_then(|trace| trace.to_string().parse().ok()) {
            parts.headers.insert(TRACEPARENT, onward);
        }
        // Nothing of the body is asked for before this: a client that waits for 100 (Continue) is refused at once.
        match admit(settings, &parts, &body, guarded) {
            Ok(Admission::Ignored) => self.pass(parts, body, Some(reporter)),
            Err(problem) => FutureKind::Ready { response: Some(reporter.refuse(problem, settings)) },
            Ok(Admission::Guarded(scope, key, permit)) => {
                // The service that said it is ready is the one to call; its clone takes its place.
                let clone = self.inner.clone();
                let service = std::mem::replace(&mut self.inner, clone);
                let request = Admitted { parts, body, scope, key, permit, reporter };
                FutureKind::Boxed { future: Box::pin(guard(self.shared.clone(), service, request)) }
            }
        }
    }
}

impl<S> IdempotencyService<S> {
    /// Lets a request through that is not guarded; with a reporter, its answer says so.
    fn pass<B, RB>(&mut self, parts: Parts, body: B, ignored: Option<Reporter>) -> FutureKind<S::Future, RB>
    where
        S: Service<Request<RequestBody<B>>, Response = Response<RB>>,
    {
        let request = Request::from_parts(parts, RequestBody::pass(body));
        FutureKind::Pass { future: self.inner.call(request), ignored }
    }
}

pub(crate) fn admit<B: Body>(
    settings: &Settings,
    parts: &Parts,
    body: &B,
    guarded: Guarded,
) -> Result<Admission, Problem> {
    let key = match settings.key.read(&parts.headers) {
        Ok(Some(key)) => key,
        Ok(None) if guarded == Guarded::Optional => return Ok(Admission::Ignored),
        Ok(None) => return Err(Problem::new(Code::KeyMissing)),
        Err(malformed) => return Err(Problem::new(Code::KeyMalformed).detail(malformed.to_string())),
    };
    let scope = settings.scope.scope(parts)?;
    let at_least = usize::try_from(body.size_hint().lower()).unwrap_or(usize::MAX);
    if at_least > settings.request_bytes_max {
        return Err(too_large(settings));
    }
    let permit = settings.budget.take(at_least + HEAD_BYTES);
    permit.map(|permit| Admission::Guarded(scope, key, permit)).ok_or_else(answer::overloaded)
}

fn too_large(settings: &Settings) -> Problem {
    Problem::new(Code::BodyTooLarge).detail(format!(
        "The body of a guarded request has at most {} bytes. Nothing was run.",
        settings.request_bytes_max
    ))
}

/// A guarded request whose head was accepted.
struct Admitted<B> {
    parts: Parts,
    body: B,
    scope: Scope,
    key: Key,
    permit: Permit,
    reporter: Reporter,
}

async fn guard<S, B, RB>(shared: Arc<Shared>, service: S, request: Admitted<B>) -> Response<ReplyBody<RB>>
where
    S: Service<Request<RequestBody<B>>, Response = Response<RB>> + Send + 'static,
    S::Future: Send + 'static,
    S::Error: Into<BoxError> + Send,
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
    RB: Body<Data = Bytes> + Send + 'static,
    RB::Error: Into<BoxError>,
{
    let settings = &shared.settings;
    let Admitted { parts, body, scope, key, mut permit, mut reporter } = request;
    let client = ClientTraits::of(parts.version, &parts.headers);
    let read = read_body(settings, body, &mut permit).await.and_then(|body| {
        let fingerprint = settings.fingerprint.of(&parts, &body.data);
        let fingerprint = fingerprint
            .map_err(|error| Problem::new(Code::BodyMalformed).detail(format!("The body is {error}.")))?;
        Ok((body, fingerprint))
    });
    let (body, fingerprint) = match read {
        Ok(read) => read,
        Err(problem) => return reporter.refuse(problem, settings),
    };
    let operation = Operation::new(scope, key, fingerprint).with_origin(reporter.origin.encode());
    if reporter.is_asked_for() {
        reporter.key_hash = Some(KeyHash::of(&operation));
    }
    if let Some(from_memory) = from_memory(&shared, &operation, &parts, &body.data) {
        return match from_memory {
            Ok(stored) => reporter.replay(&stored, settings, client),
            Err(problem) => reporter.refuse(problem, settings),
        };
    }
    let (to, answer) = oneshot::channel();
    let job = Job { shared: shared.clone(), service, parts, body, operation, permit, client };
    let span = reporter.span.clone();
    let work = Detached::new(execute(job, Answer::new(to, reporter)).instrument(span), answer);
    // Without an answer something of ours has failed in the middle of it.
    let unknown = || Problem::new(Code::OutcomeUnknown).status(StatusCode::GATEWAY_TIMEOUT);
    work.await.unwrap_or_else(|| answer::refuse(unknown(), settings))
}

pub(crate) async fn read_body<B>(settings: &Settings, body: B, permit: &mut Permit) -> Result<Whole, Problem>
where
    B: Body<Data = Bytes>,
    B::Error: Into<BoxError>,
{
    if body.is_end_stream() {
        return Ok(Whole::default());
    }
    let body = pin!(body.map_err(Into::into));
    let reading = collect(body, settings.request_bytes_max, permit, Room::Request);
    match timeout(settings.body_timeout, reading).await {
        Ok(Ok(whole)) => Ok(whole),
        Ok(Err(Cut::TooLong(_))) => Err(too_large(settings)),
        Ok(Err(Cut::OverBudget(_))) => Err(answer::overloaded()),
        Ok(Err(Cut::Failed(error))) => {
            tracing::debug!(error = %error, "a request body broke off");
            let malformed = || {
                Problem::new(Code::RequestMalformed)
                    .detail("The body's framing is not what RFC 9112 §7.1 allows.")
            };
            Err(if is_malformed(&*error) { malformed() } else { Problem::new(Code::BodyIncomplete) })
        }
        Err(_) => Err(Problem::new(Code::BodyTimeout)),
    }
}

/// A replay, or the refusal of another request under the key, without a task and without the store.
fn from_memory(
    shared: &Shared,
    operation: &Operation,
    parts: &Parts,
    body: &[u8],
) -> Option<Result<onlyonce_core::StoredReply, Problem>> {
    let (stored, origin) = match shared.idem.replay_from_memory(operation)? {
        Begin::Completed(stored) => return Some(Ok(stored)),
        Begin::Mismatch { stored, origin } => (stored, origin),
        _ => return None,
    };
    let refused = |code| Some(Err(Problem::new(code).of_request(origin)));
    match shared.settings.fingerprint.compare(&stored, parts, body) {
        Comparison::Other => refused(Code::KeyReused),
        Comparison::UnknownDefinition => refused(Code::FingerprintUnknown),
        Comparison::Same(theirs) => {
            match shared.idem.replay_from_memory(&operation.with_fingerprint(theirs))? {
                Begin::Completed(stored) => Some(Ok(stored)),
                _ => None,
            }
        }
    }
}

type Boxed<RB> = Pin<Box<dyn Future<Output = Response<ReplyBody<RB>>> + Send>>;

pin_project! {
    /// The answer to come.
    pub struct ResponseFuture<F, RB> {
        #[pin]
        kind: FutureKind<F, RB>,
        page: Option<Box<Page>>,
        settings: Arc<Settings>,
    }
}

pin_project! {
    #[project = FutureProjection]
    enum FutureKind<F, RB> {
        Pass { #[pin] future: F, ignored: Option<Reporter> },
        Ready { response: Option<Response<ReplyBody<RB>>> },
        Boxed { future: Boxed<RB> },
    }
}

impl<F, RB> std::fmt::Debug for ResponseFuture<F, RB> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ResponseFuture")
    }
}

impl<F, RB, E> Future for ResponseFuture<F, RB>
where
    F: Future<Output = Result<Response<RB>, E>>,
{
    type Output = Result<Response<ReplyBody<RB>>, E>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        let settings = &**this.settings;
        let (mut parts, body) = match this.kind.project() {
            FutureProjection::Ready { response } => {
                response.take().expect("a future is not polled after its end").into_parts()
            }
            FutureProjection::Boxed { future } => ready!(future.as_mut().poll(cx)).into_parts(),
            FutureProjection::Pass { future, ignored } => {
                let (mut parts, body) = ready!(future.poll(cx))?.into_parts();
                answer::clean(&mut parts, settings);
                if let Some(mut reporter) = ignored.take() {
                    GuardStatus::Ignored.mark(&mut parts.headers);
                    reporter.work = reporter.since_start();
                    reporter.report(Verdict::Ignored, parts.status);
                }
                (parts, ReplyBody::pass(body))
            }
        };
        match this.page {
            Some(page) => page.fit(&mut parts, settings),
            None => cors::fit_for_nobody(&mut parts, settings),
        }
        Poll::Ready(Ok(Response::from_parts(parts, body)))
    }
}
