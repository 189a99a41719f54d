//! The detached work of a guarded request: claim, work, record, answer. No client can cancel it.

use std::panic::AssertUnwindSafe;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt;
use http::request;
use http::{HeaderMap, Method, Request, Response, response};
use http_body::{Body, Frame};
use http_body_util::BodyExt;
use onlyonce_core::{CrashPoint, Operation, Origin, Reply, StoreErrorKind, StoredReply, crash_point};
use onlyonce_engine::{Begin, Completed, EngineError, Execution, Idempotency};
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout_at};
use tower_service::Service;

use crate::answer::{self, ClientTraits, GuardStatus};
use crate::body::{BoxError, ReplyBody, RequestBody, Whole};
use crate::budget::Permit;
use crate::classify::Ending;
use crate::collect::{Cut, Room, collect};
use crate::fingerprint::Comparison;
use crate::headers::{storable, strip_body_headers, strip_ours};
use crate::problem::{Code, Problem};
use crate::report::Verdict;
use crate::reporter::Answer;
use crate::service::Shared;
use crate::settings::{OnStoreFailure, Settings};

/// How long a reply waits for room in the budget before it is treated like one that is too long to be stored.
const ROOM_PATIENCE: Duration = Duration::from_secs(5);
/// Pieces of a stream that wait for the client.
const STREAM_FRAMES_MAX: usize = 4;

/// A guarded request, read whole.
pub(crate) struct Job<S> {
    pub(crate) shared: Arc<Shared>,
    pub(crate) service: S,
    pub(crate) parts: request::Parts,
    pub(crate) body: Whole,
    pub(crate) operation: Operation,
    pub(crate) permit: Permit,
    pub(crate) client: ClientTraits,
}

/// Runs a guarded request to its end, whoever still listens.
pub(crate) async fn execute<S, B, RB>(mut job: Job<S>, mut answer: Answer<RB>)
where
    S: Service<Request<RequestBody<B>>, Response = Response<RB>>,
    S::Error: Into<BoxError>,
    RB: Body<Data = Bytes>,
    RB::Error: Into<BoxError>,
{
    let asked = Instant::now();
    let begun = begin(&mut job).await;
    answer.reporter.store = asked.elapsed();
    let settings = job.shared.settings.clone();
    let problem = match begun {
        Ok(Begun::Execution(execution)) => return work(job, execution, answer).await,
        Ok(Begun::Replay(stored)) => return answer.replay(&stored, &settings, job.client),
        Ok(Begun::InProgress { retry_after, last, origin }) => {
            if let Some(reply) = last {
                let mut response = answer::of_another_copy(&reply, retry_after, job.client);
                answer::mark_original(response.headers_mut(), origin.as_ref(), &settings);
                answer.reporter.answers_with(origin.as_ref());
                return answer.send(Verdict::Refused(Code::InProgress), response);
            }
            Problem::new(Code::InProgress).retry_after(retry_after).of_request(origin)
        }
        Ok(Begun::Refused(problem)) => problem,
        Err(error) if settings.on_store_failure == OnStoreFailure::RunUnguarded && is_outage(&error) => {
            tracing::error!(error = %error, "the store cannot be asked: a guarded request runs unguarded");
            return run_unguarded(job, answer).await;
        }
        Err(error) => {
            tracing::warn!(error = %error, "a guarded request is refused");
            answer::of_engine_error(&error)
        }
    };
    answer.refuse(Verdict::Refused(problem.code()), problem, &settings);
}

enum Begun {
    Execution(Execution),
    Replay(StoredReply),
    InProgress { retry_after: Duration, last: Option<Reply>, origin: Option<Origin> },
    Refused(Problem),
}

/// Claims under our fingerprint; under the record's own where that says that it is the same request.
async fn begin<S>(job: &mut Job<S>) -> Result<Begun, EngineError> {
    let shared = job.shared.clone();
    let idem: &Idempotency = &shared.idem;
    let mut begun = idem.begin(&job.operation).await?;
    if let Begin::Mismatch { stored, origin } = &begun {
        match shared.settings.fingerprint.compare(stored, &job.parts, &job.body.data) {
            Comparison::Same(theirs) => {
                job.operation = job.operation.with_fingerprint(theirs);
                begun = idem.begin(&job.operation).await?;
            }
            Comparison::Other => {}
            Comparison::UnknownDefinition => {
                let problem = Problem::new(Code::FingerprintUnknown).of_request(origin.clone());
                return Ok(Begun::Refused(problem));
            }
        }
    }
    Ok(match begun {
        Begin::Acquired(execution) => Begun::Execution(execution),
        Begin::Completed(stored) => Begun::Replay(stored),
        Begin::InProgress { retry_after, last, origin } => Begun::InProgress { retry_after, last, origin },
        Begin::Mismatch { origin, .. } => Begun::Refused(Problem::new(Code::KeyReused).of_request(origin)),
        Begin::Unknown { origin, .. } => {
            Begun::Refused(Problem::new(Code::OutcomeUnknown).of_request(origin))
        }
    })
}

/// Whether nobody could be asked: not a limit of ours, and not a record that is there and cannot be read.
fn is_outage(error: &EngineError) -> bool {
    matches!(error, EngineError::Store(error) if error.kind() != StoreErrorKind::Unreadable)
}

/// One run of the service behind.
struct Run<RB> {
    shared: Arc<Shared>,
    answer: Answer<RB>,
    client: ClientTraits,
    permit: Permit,
    deadline: Instant,
    is_head: bool,
}

/// Calls the service and reads its reply.
async fn work<S, B, RB>(job: Job<S>, execution: Execution, answer: Answer<RB>)
where
    S: Service<Request<RequestBody<B>>, Response = Response<RB>>,
    S::Error: Into<BoxError>,
    RB: Body<Data = Bytes>,
    RB::Error: Into<BoxError>,
{
    let Job { shared, mut service, parts, body, permit, client, .. } = job;
    let (started, is_head) = (Instant::now(), parts.method == Method::HEAD);
    let deadline = started + shared.idem.policy().work_timeout;
    let mut run = Run { shared, answer, client, permit, deadline, is_head };
    run.answer.reporter.attempt = Some(execution.attempt());

    let mut request = Request::from_parts(parts, RequestBody::whole(body));
    request.extensions_mut().insert(execution.context().clone());
    let call = AssertUnwindSafe(async move { service.call(request).await.map_err(Into::into) });
    crash_point(CrashPoint::WorkBefore);
    let called = patiently(pin!(call.catch_unwind()), deadline, &run.shared, &mut run.answer).await;
    run.answer.reporter.work = started.elapsed();
    let (mut parts, body) = match called {
        Ok(Ok(response)) => {
            crash_point(CrashPoint::WorkAfter);
            response.into_parts()
        }
        Ok(Err(error)) => {
            tracing::error!(error = %error, "the service behind gave no reply; the outcome is unknown");
            return run.end_unknown(execution, answer::outcome_unknown).await;
        }
        Err(_panic) => return run.end_panicked(execution).await,
    };
    let ending = run.shared.settings.classifier.classify(&parts, execution.attempt());
    parts.extensions.remove::<Ending>();
    answer::clean(&mut parts, &run.shared.settings);
    match ending {
        Ending::Transient(Some(code)) => return run.end_released(execution, Problem::new(code)).await,
        Ending::Unknown(Some(Code::OutcomeUnknown)) => {
            return run.end_unknown(execution, answer::outcome_unknown).await;
        }
        Ending::Unknown(Some(code)) => return run.end_unknown(execution, |_, _| Problem::new(code)).await,
        Ending::Definitive | Ending::NoStore | Ending::Transient(None) | Ending::Unknown(None) => {}
    }

    let mut body = pin!(body.map_err(Into::into));
    let read = run.read(&parts, body.as_mut()).await;
    run.answer.reporter.work = started.elapsed();
    match read {
        Read::Whole(whole) => run.end_whole(execution, ending, parts, whole).await,
        Read::Long(prefix) => run.end_long(execution, ending, parts, prefix, body).await,
        Read::Short(error) => {
            tracing::error!(error = %error, "a reply ended short; the outcome is unknown");
            run.end_unknown(execution, answer::outcome_unknown).await;
        }
        Read::Panicked => run.end_panicked(execution).await,
    }
}

/// Waits for the work. Past the work timeout the client is told that the outcome is unknown, and the work goes on: its
/// late end resolves the record unless somebody took over.
async fn patiently<F: Future, RB>(
    mut work: Pin<&mut F>,
    deadline: Instant,
    shared: &Shared,
    answer: &mut Answer<RB>,
) -> F::Output {
    if let Ok(output) = timeout_at(deadline, work.as_mut()).await {
        return output;
    }
    let attempt = answer.reporter.attempt.unwrap_or(1);
    let problem = answer::outcome_unknown(shared.idem.policy(), attempt);
    answer.refuse(Verdict::Unknown, problem, &shared.settings);
    work.await
}

/// What there is of a reply's body.
enum Read {
    Whole(Whole),
    /// Too long to be stored, or a stream: this much was read, and it goes on.
    Long(Bytes),
    Short(BoxError),
    Panicked,
}

impl<RB> Run<RB> {
    async fn read<R>(&mut self, parts: &response::Parts, body: Pin<&mut R>) -> Read
    where
        R: Body<Data = Bytes, Error = BoxError>,
    {
        let bytes_max = self.shared.settings.stored_bytes_max;
        let at_least = usize::try_from(body.size_hint().lower()).unwrap_or(usize::MAX);
        if at_least > bytes_max || answer::is_event_stream(&parts.headers) {
            return Read::Long(Bytes::new());
        }
        // What was the request's share is the reply's now.
        let Self { permit, answer, shared, deadline, .. } = self;
        let read =
            AssertUnwindSafe(collect(body, bytes_max, permit, Room::Reply(ROOM_PATIENCE))).catch_unwind();
        // A body that stalls would keep its key, its place in flight and its buffers for ever.
        let given_up = Instant::now().max(*deadline) + shared.idem.policy().work_timeout;
        let read = patiently(pin!(timeout_at(given_up, read)), *deadline, shared, answer).await;
        let Ok(read) = read else {
            return Read::Short("it did not end within twice the time for work".into());
        };
        match read {
            Ok(Ok(whole)) if !self.is_head && answer::is_short(&parts.headers, parts.status, &whole.data) => {
                Read::Short("its length is not the declared one".into())
            }
            Ok(Ok(whole)) => Read::Whole(whole),
            Ok(Err(Cut::TooLong(prefix))) => Read::Long(prefix),
            Ok(Err(Cut::OverBudget(prefix))) => {
                tracing::warn!(
                    key_hash = answer.reporter.key_hash.map(tracing::field::display),
                    "a reply is stored without its body, which its replays will lack: the buffer budget had no room for it within {ROOM_PATIENCE:?}"
                );
                Read::Long(prefix)
            }
            Ok(Err(Cut::Failed(error))) => Read::Short(error),
            Err(_panic) => Read::Panicked,
        }
    }

    async fn end_whole(
        mut self,
        execution: Execution,
        ending: Ending,
        mut parts: response::Parts,
        mut whole: Whole,
    ) {
        let settings = self.shared.settings.clone();
        if let Some(trailers) = &mut whole.trailers {
            strip_ours(trailers, &settings.names);
        }
        let reply = || {
            let stored = |fields: &HeaderMap| storable(fields, &settings.not_stored);
            Reply::new(parts.status.as_u16(), whole.data.clone())
                .with_headers(stored(&parts.headers))
                .with_trailers(whole.trailers.as_deref().map(stored).unwrap_or_default())
        };
        let verdict = match ending {
            Ending::Definitive | Ending::NoStore => {
                let reply = match ending {
                    Ending::NoStore => only_status(&parts),
                    _ => reply(),
                };
                match self.record(execution, reply, &mut parts.headers).await {
                    Some(verdict) => verdict,
                    None => return,
                }
            }
            Ending::Transient(_) => {
                execution.release_answering(Some(reply())).await;
                Verdict::Released
            }
            Ending::Unknown(_) => {
                execution.unknown().await;
                Verdict::Unknown
            }
        };
        self.permit.shrink_to(whole.data.len());
        let response = answer::first(parts, whole, self.client, self.permit);
        self.answer.send(verdict, response);
    }

    /// Records first, then streams; the body is read to its end even when the client goes.
    async fn end_long<R>(
        mut self,
        execution: Execution,
        ending: Ending,
        mut parts: response::Parts,
        prefix: Bytes,
        body: Pin<&mut R>,
    ) where
        R: Body<Data = Bytes, Error = BoxError>,
    {
        let verdict = match ending {
            Ending::Definitive | Ending::NoStore => {
                let reply = match ending {
                    Ending::NoStore => only_status(&parts),
                    _ => {
                        let mut headers = storable(&parts.headers, &self.shared.settings.not_stored);
                        strip_body_headers(&mut headers);
                        Reply::new(parts.status.as_u16(), Bytes::new()).with_headers(headers).omitting_body()
                    }
                };
                match self.record(execution, reply, &mut parts.headers).await {
                    Some(verdict) => verdict,
                    None => return,
                }
            }
            Ending::Transient(_) => {
                execution.release().await;
                Verdict::Released
            }
            Ending::Unknown(_) => {
                execution.unknown().await;
                Verdict::Unknown
            }
        };
        let (frames, to_client) = mpsc::channel(STREAM_FRAMES_MAX);
        let patience = self.shared.idem.policy().work_timeout;
        let accepts_trailers = self.client.accepts_trailers;
        self.permit.shrink_to(prefix.len());
        self.answer.send(verdict, Response::from_parts(parts, ReplyBody::stream(to_client)));
        let settings = self.shared.settings.clone();
        let body = pin!(body.map_frame(|frame| without_ours(frame, &settings)));
        let pump = AssertUnwindSafe(pump(body, prefix, frames.clone(), accepts_trailers, patience));
        if pump.catch_unwind().await.is_err() {
            let _ = frames.send(Err("the service behind panicked in the middle of its reply".into())).await;
        }
    }

    /// Records a reply. `None` when the client is answered already, with another owner's reply.
    async fn record(
        &mut self,
        execution: Execution,
        reply: Reply,
        headers: &mut HeaderMap,
    ) -> Option<Verdict> {
        let asked = Instant::now();
        crash_point(CrashPoint::RecordBefore);
        let completed = execution.complete(reply).await;
        crash_point(CrashPoint::RecordAfter);
        self.answer.reporter.store += asked.elapsed();
        let settings = self.shared.settings.clone();
        match completed {
            Completed::Recorded(stored) => {
                answer::mark_expiry(headers, &stored, &settings);
                Some(Verdict::Ran)
            }
            Completed::NotRecorded(_) => {
                GuardStatus::NotRecorded.mark(headers);
                Some(Verdict::NotRecorded)
            }
            Completed::Fenced(Some(stored)) => {
                self.answer.replay(&stored, &settings, self.client);
                None
            }
            Completed::Fenced(None) => {
                let problem = Problem::new(Code::Superseded).retry_after(Duration::from_secs(1));
                self.refuse(Verdict::Refused(Code::Superseded), problem);
                None
            }
        }
    }

    async fn end_unknown(
        mut self,
        execution: Execution,
        problem: impl FnOnce(&onlyonce_engine::Policy, u32) -> Problem,
    ) {
        let attempt = execution.attempt();
        execution.unknown().await;
        let problem = problem(self.shared.idem.policy(), attempt);
        self.refuse(Verdict::Unknown, problem);
    }

    async fn end_panicked(self, execution: Execution) {
        tracing::error!("the service behind panicked; the outcome is unknown");
        self.end_unknown(execution, answer::panicked).await;
    }

    async fn end_released(mut self, execution: Execution, problem: Problem) {
        let problem = problem.retry_after(Duration::from_secs(1));
        let reply = problem.clone().into_response(self.shared.settings.docs.as_ref());
        let (parts, body) = reply.into_parts();
        let reply = Reply::new(parts.status.as_u16(), body).with_headers(parts.headers);
        execution.release_answering(Some(reply)).await;
        self.refuse(Verdict::Released, problem);
    }

    fn refuse(&mut self, verdict: Verdict, problem: Problem) {
        self.answer.refuse(verdict, problem, &self.shared.settings);
    }
}

fn only_status(parts: &response::Parts) -> Reply {
    Reply::new(parts.status.as_u16(), Bytes::new()).omitting_body()
}

/// One piece of a stream; `None` is its end, so that a task that dies never looks like one.
pub(crate) type Piece = Result<Option<Frame<Bytes>>, BoxError>;

/// Passes a body on. When the client goes it is read to its end all the same, for at most `patience`.
async fn pump<R>(
    mut body: Pin<&mut R>,
    prefix: Bytes,
    frames: mpsc::Sender<Piece>,
    accepts_trailers: bool,
    patience: Duration,
) where
    R: Body<Data = Bytes, Error = BoxError>,
{
    let mut listening = prefix.is_empty() || frames.send(Ok(Some(Frame::data(prefix)))).await.is_ok();
    while listening {
        let frame = tokio::select! {
            frame = body.frame() => frame,
            () = frames.closed() => break,
        };
        let piece = match frame {
            None => Ok(None),
            Some(Ok(frame)) if frame.is_trailers() && !accepts_trailers => continue,
            Some(Ok(frame)) => Ok(Some(frame)),
            Some(Err(error)) => {
                tracing::warn!(%error, "a long reply that is recorded broke off on its way to the client");
                Err(error)
            }
        };
        let is_last = !matches!(piece, Ok(Some(_)));
        listening = frames.send(piece).await.is_ok();
        if is_last {
            return;
        }
    }
    let until = Instant::now() + patience;
    while let Ok(Some(Ok(_))) = timeout_at(until, body.frame()).await {}
}

/// Trailers without what only we may say.
fn without_ours(frame: Frame<Bytes>, settings: &Settings) -> Frame<Bytes> {
    match frame.into_trailers() {
        Ok(mut trailers) => {
            strip_ours(&mut trailers, &settings.names);
            Frame::trailers(trailers)
        }
        Err(frame) => frame,
    }
}

/// Runs a request whose store cannot be asked, as its settings allow.
async fn run_unguarded<S, B, RB>(job: Job<S>, mut answer: Answer<RB>)
where
    S: Service<Request<RequestBody<B>>, Response = Response<RB>>,
    S::Error: Into<BoxError>,
{
    let Job { shared, mut service, parts, body, .. } = job;
    let request = Request::from_parts(parts, RequestBody::whole(body));
    let started = Instant::now();
    let call = AssertUnwindSafe(async move { service.call(request).await.map_err(Into::into) });
    let called = call.catch_unwind().await;
    answer.reporter.work = started.elapsed();
    let mut response = match called {
        Ok(Ok(response)) => {
            let (mut parts, body) = response.into_parts();
            answer::clean(&mut parts, &shared.settings);
            Response::from_parts(parts, ReplyBody::pass(body))
        }
        Ok(Err(error)) => {
            let error: BoxError = error;
            tracing::error!(error = %error, "the service behind gave no reply to an unguarded request");
            answer::refuse(Problem::new(Code::UpstreamFailed), &shared.settings)
        }
        Err(_panic) => {
            tracing::error!("the service behind panicked on an unguarded request");
            answer::refuse(Problem::new(Code::HandlerPanicked), &shared.settings)
        }
    };
    GuardStatus::Degraded.mark(response.headers_mut());
    answer.send(Verdict::Degraded, response);
}
