//! Where the answer of a guarded request goes, and what is told about it on the way: the report, and the span.

use std::time::Duration;

use http::request::Parts;
use http::{Response, StatusCode};
use onlyonce_core::{Origin, StoredReply};
use tokio::sync::oneshot;
use tokio::time::Instant;
use tracing::Span;
use tracing::field::{Empty, display};

use crate::answer::{self, ClientTraits};
use crate::body::ReplyBody;
use crate::origin::RequestOrigin;
use crate::problem::Problem;
use crate::report::{KeyHash, Report, ReportFn, Verdict};
use crate::settings::Settings;

/// Where the answer goes, once.
pub(crate) struct Answer<RB> {
    to: Option<oneshot::Sender<Response<ReplyBody<RB>>>>,
    pub(crate) reporter: Reporter,
}

/// Gathers what a report says.
#[derive(Debug)]
pub(crate) struct Reporter {
    function: Option<ReportFn>,
    started: Instant,
    pub(crate) key_hash: Option<KeyHash>,
    pub(crate) attempt: Option<u32>,
    pub(crate) store: Duration,
    pub(crate) work: Duration,
    pub(crate) origin: RequestOrigin,
    original: Option<RequestOrigin>,
    pub(crate) span: Span,
}

impl Reporter {
    /// For a request on a guarded route.
    pub(crate) fn new(settings: &Settings, parts: &Parts) -> Self {
        let mut origin = RequestOrigin::of(&parts.headers, &settings.request_id);
        if settings.joins_traces {
            origin.begin_span();
        }
        Self {
            function: settings.report.clone(),
            started: Instant::now(),
            key_hash: None,
            attempt: None,
            store: Duration::ZERO,
            work: Duration::ZERO,
            span: span(parts, &origin),
            origin,
            original: None,
        }
    }

    pub(crate) fn is_asked_for(&self) -> bool {
        self.function.is_some()
    }

    pub(crate) fn since_start(&self) -> Duration {
        self.started.elapsed()
    }

    /// Says whose run is answered with, where it is another request's.
    pub(crate) fn answers_with(&mut self, original: Option<&Origin>) {
        if self.function.is_some() || !self.span.is_disabled() {
            self.original = original.and_then(RequestOrigin::decode);
        }
    }

    pub(crate) fn report(&mut self, verdict: Verdict, status: StatusCode) {
        self.record(verdict, status);
        let Some(function) = self.function.take() else { return };
        let Self { key_hash, attempt, store, work, .. } = *self;
        let (status, total) = (status.as_u16(), self.started.elapsed());
        let (origin, original) = (std::mem::take(&mut self.origin), self.original.take());
        function.call(&Report { verdict, status, key_hash, attempt, store, work, total, origin, original });
    }

    /// Ends the span's story; a replay's is linked to that of the request whose reply it is.
    fn record(&self, verdict: Verdict, status: StatusCode) {
        if self.span.is_disabled() {
            return;
        }
        self.span.record("verdict", display(verdict)).record("http.response.status_code", status.as_u16());
        if let Some(attempt) = self.attempt {
            self.span.record("attempt", attempt);
        }
        let Some(original) = &self.original else { return };
        if let Some(id) = original.request_id() {
            self.span.record("original_request_id", id);
        }
        if let Some(trace) = original.trace() {
            self.span.record("link.trace_id", trace.trace_id());
            self.span.record("link.span_id", display(original.span().unwrap_or(trace.span())));
        }
    }

    pub(crate) fn refuse<RB>(&mut self, problem: Problem, settings: &Settings) -> Response<ReplyBody<RB>> {
        let verdict = Verdict::Refused(problem.code());
        self.answers_with(problem.original());
        let response = answer::refuse(problem, settings);
        self.report(verdict, response.status());
        response
    }

    pub(crate) fn replay<RB>(
        &mut self,
        stored: &StoredReply,
        settings: &Settings,
        client: ClientTraits,
    ) -> Response<ReplyBody<RB>> {
        self.answers_with(stored.origin.as_ref());
        let response = answer::replay(stored, settings, client);
        self.report(Verdict::Replayed, response.status());
        response
    }
}

/// The span of a request. Its target is not the module's, so that a subscriber can take the spans and leave the log.
fn span(parts: &Parts, origin: &RequestOrigin) -> Span {
    let span = tracing::info_span!(
        target: "onlyonce::trace",
        "idempotent request",
        "http.request.method" = %parts.method,
        trace_id = Empty,
        span_id = Empty,
        parent_id = Empty,
        request_id = Empty,
        verdict = Empty,
        "http.response.status_code" = Empty,
        attempt = Empty,
        original_request_id = Empty,
        "link.trace_id" = Empty,
        "link.span_id" = Empty,
    );
    if span.is_disabled() {
        return span;
    }
    if let Some(trace) = origin.trace() {
        span.record("trace_id", trace.trace_id()).record("parent_id", display(trace.span()));
    }
    if let Some(id) = origin.span() {
        span.record("span_id", display(id));
    }
    if let Some(id) = origin.request_id() {
        span.record("request_id", id);
    }
    span
}

impl<RB> Answer<RB> {
    pub(crate) fn new(to: oneshot::Sender<Response<ReplyBody<RB>>>, reporter: Reporter) -> Self {
        Self { to: Some(to), reporter }
    }

    /// Sends the answer; later ones are dropped, as are those to a client that went away.
    pub(crate) fn send(&mut self, verdict: Verdict, response: Response<ReplyBody<RB>>) {
        if let Some(to) = self.to.take() {
            self.reporter.report(verdict, response.status());
            let _ = to.send(response);
        }
    }

    /// Sends a recorded reply.
    pub(crate) fn replay(&mut self, stored: &StoredReply, settings: &Settings, client: ClientTraits) {
        self.reporter.answers_with(stored.origin.as_ref());
        self.send(Verdict::Replayed, answer::replay(stored, settings, client));
    }

    /// Sends a refusal.
    pub(crate) fn refuse(&mut self, verdict: Verdict, problem: Problem, settings: &Settings) {
        self.reporter.answers_with(problem.original());
        self.send(verdict, answer::refuse(problem, settings));
    }
}
