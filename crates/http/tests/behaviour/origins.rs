//! Which request a record is of: its id and trace are kept, told on replays, 409 and 422, and linked in spans.

use std::sync::Arc;

use onlyonce_http::{Preset, Report, RequestOrigin};
use parking_lot::Mutex;
use testkit::{ClientResponse, wait_until};
use tracing::span;
use tracing::subscriber::with_default;

use crate::harness::{Gate, Hit, Server, TestStore, assert_problem, assert_replay_of, on_every_store, reply};

on_every_store! {
    the_request_that_ran_is_told_on_replays_409_and_422,
    an_unknown_outcome_and_the_store_name_the_request,
    the_names_of_the_headers_are_settings,
    what_names_no_request_is_not_kept,
    nobody_forges_what_names_the_request,
}

const PARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";

async fn pay(server: &Server, id: &str, parent: Option<&str>, body: &'static str) -> ClientResponse {
    let request = server.client().post("/pay").key("k").header("x-request-id", id).body(body);
    let request = match parent {
        Some(parent) => request.header("traceparent", parent),
        None => request,
    };
    request.send().await.unwrap()
}

#[track_caller]
fn assert_original(answer: &ClientResponse, id: Option<&str>, parent: Option<&str>) {
    let told = |name| answer.header(name);
    assert_eq!(
        (told("idempotency-original-request"), told("idempotency-original-traceparent")),
        (id, parent),
        "{answer:?}"
    );
}

async fn the_request_that_ran_is_told_on_replays_409_and_422(store: TestStore) {
    let gate = Gate::closed();
    let handler = {
        let gate = gate.clone();
        move |hit: Hit| {
            let gate = gate.clone();
            async move {
                gate.pass().await;
                reply(201, format!("run {}", hit.number))
            }
        }
    };
    let one = Server::start(&store, |layer| layer, handler.clone()).await;
    let other = Server::start(&store, |layer| layer, handler).await;
    let first = {
        let request = one.client().post("/pay").key("k").header("x-request-id", "req-1");
        tokio::spawn(request.header("traceparent", PARENT).body("1").send())
    };
    wait_until("the first runs", || one.runs() == 1).await;
    // From memory of the process that works on it, and from the store.
    for server in [&one, &other] {
        let copy = pay(server, "req-2", None, "1").await;
        assert_problem(&copy, 409, "in-progress");
        assert_original(&copy, Some("req-1"), Some(PARENT));
        let reused = pay(server, "req-3", None, "2").await;
        assert_problem(&reused, 422, "key-reused");
        assert_original(&reused, Some("req-1"), Some(PARENT));
    }
    gate.open();
    let first = first.await.unwrap().unwrap();
    assert_original(&first, None, None);
    for server in [&one, &other, &other] {
        let replay = pay(server, "req-4", Some(&PARENT.replace("00f0", "11f1")), "1").await;
        assert_replay_of(&replay, &first);
        assert_original(&replay, Some("req-1"), Some(PARENT));
        assert_original(&pay(server, "req-5", None, "2").await, Some("req-1"), Some(PARENT));
    }
    assert_eq!((one.runs(), other.runs()), (1, 0));
}

async fn an_unknown_outcome_and_the_store_name_the_request(store: TestStore) {
    let hold = crate::harness::ServerOptions::new(&store).hold();
    let server = hold.start(|layer| layer, async |_| reply(504, "")).await;
    let first = pay(&server, "req-1", Some(PARENT), "1").await;
    assert_original(&first, None, None);
    let retry = pay(&server, "req-2", None, "1").await;
    assert_problem(&retry, 409, "outcome-unknown");
    assert_original(&retry, Some("req-1"), Some(PARENT));
    let kept = store.admin.list(&Default::default()).await.unwrap().records;
    let origin = kept[0].origin.as_ref().and_then(RequestOrigin::decode).expect("an origin");
    assert_eq!((origin.request_id(), origin.span()), (Some("req-1"), None));
    assert_eq!(origin.trace().map(ToString::to_string).as_deref(), Some(PARENT));
}

async fn the_names_of_the_headers_are_settings(store: TestStore) {
    let layer = |layer: onlyonce_http::IdempotencyLayer| {
        layer.request_id_header("x-correlation-id".parse().unwrap()).preset(Preset::Stripe)
    };
    let server = Server::counting(&store, layer).await;
    let send = |id: &str| {
        let request = server.client().post("/pay").key("k").header("x-correlation-id", id);
        request.header("x-request-id", "another").send()
    };
    send("c-1").await.unwrap();
    let replay = send("c-2").await.unwrap();
    assert_eq!(
        (replay.header("original-request"), replay.header("idempotent-replayed")),
        (Some("c-1"), Some("true"))
    );
    assert_original(&replay, None, None);
}

async fn what_names_no_request_is_not_kept(store: TestStore) {
    let server = Server::counting(&store, |layer| layer).await;
    for (key, name, value) in [
        ("long", "x-request-id", &"x".repeat(129)[..]),
        ("bytes", "x-request-id", "\u{e9}"),
        ("other version", "traceparent", "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"),
        ("zero", "traceparent", "00-00000000000000000000000000000000-00f067aa0ba902b7-01"),
    ] {
        let send = || server.client().post("/pay").key(&format!("\"{key}\"")).header(name, value).send();
        send().await.unwrap();
        let replay = send().await.unwrap();
        assert_eq!(replay.header("idempotency-replayed"), Some("true"), "{key}");
        assert_original(&replay, None, None);
    }
    assert!(
        server
            .hits()
            .iter()
            .all(|hit| hit.headers.contains_key("x-request-id") || hit.headers.contains_key("traceparent")),
        "they pass all the same"
    );
}

async fn nobody_forges_what_names_the_request(store: TestStore) {
    let server = Server::start(
        &store,
        |layer| layer,
        async |hit: Hit| {
            assert!(!hit.headers.contains_key("idempotency-original-request"));
            crate::harness::with(reply(201, "done"), "idempotency-original-request", "forged")
        },
    )
    .await;
    let send = || {
        let request = server.client().post("/pay").key("k").header("idempotency-original-request", "forged");
        request.header("x-request-id", "true").send()
    };
    assert_original(&send().await.unwrap(), None, None);
    assert_original(&send().await.unwrap(), Some("true"), None);
}

#[tokio::test]
async fn a_layer_that_joins_traces_passes_a_span_of_its_own_on() {
    let store = TestStore::memory();
    let reports: Arc<Mutex<Vec<Report>>> = Arc::default();
    let log = reports.clone();
    let joins = move |layer: onlyonce_http::IdempotencyLayer| {
        layer.join_traces().report(move |report| log.lock().push(report.clone()))
    };
    let server = Server::counting(&store, joins).await;
    pay(&server, "req-1", Some(PARENT), "1").await;
    pay(&server, "req-2", Some(&PARENT.replace("4bf9", "5bf9")), "1").await;
    pay(&server, "req-3", None, "2").await;
    server.client().get("/").header("traceparent", PARENT).send().await.unwrap();
    let hits = server.hits();
    let onward = hits[0].headers["traceparent"].to_str().unwrap();
    assert!(onward.starts_with(&format!("00-{TRACE}-")) && onward.ends_with("-01"), "{onward}");
    assert_ne!(onward, PARENT, "the span is ours");
    assert_eq!(hits[1].headers["traceparent"], PARENT, "what is not guarded passes as it is");
    let reports = reports.lock();
    let [first, replay, reused] = &reports[..] else { panic!("{reports:?}") };
    assert_eq!(first.origin.request_id(), Some("req-1"));
    assert_eq!(onward.split('-').nth(2), first.origin.span().map(|span| span.to_string()).as_deref());
    assert_eq!(first.original, None);
    for (report, id) in [(replay, "req-2"), (reused, "req-3")] {
        assert_eq!(report.origin.request_id(), Some(id));
        let original = report.original.as_ref().expect("the first request");
        assert_eq!((original.request_id(), original.span()), (Some("req-1"), first.origin.span()));
    }
    assert_eq!(reused.origin.span(), None, "no trace is begun for a caller that has none");
}

/// The fields of one span.
type SpanFields = Vec<(String, String)>;

/// Keeps the fields of spans.
#[derive(Clone, Default)]
struct Spans(Arc<Mutex<Vec<SpanFields>>>);

struct Fields<'a>(&'a mut SpanFields);

impl tracing::field::Visit for Fields<'_> {
    fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
        self.0.push((field.name().into(), format!("{value:?}").trim_matches('"').into()));
    }
}

impl tracing::Subscriber for Spans {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        metadata.target() == "onlyonce::trace"
    }

    fn new_span(&self, attributes: &span::Attributes<'_>) -> span::Id {
        let mut fields = Vec::new();
        attributes.record(&mut Fields(&mut fields));
        let mut spans = self.0.lock();
        spans.push(fields);
        span::Id::from_u64(spans.len() as u64)
    }

    fn record(&self, span: &span::Id, values: &span::Record<'_>) {
        values.record(&mut Fields(&mut self.0.lock()[span.into_u64() as usize - 1]));
    }

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
    fn event(&self, _: &tracing::Event<'_>) {}
    fn enter(&self, _: &span::Id) {}
    fn exit(&self, _: &span::Id) {}
}

#[test]
fn a_replays_span_links_to_the_first_one() {
    let spans = Spans::default();
    with_default(spans.clone(), || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let server = Server::counting(&TestStore::memory(), |layer| layer.join_traces()).await;
            pay(&server, "req-1", Some(PARENT), "1").await;
            pay(&server, "req-2", Some(&PARENT.replace("4bf9", "5bf9")), "1").await;
        });
    });
    let spans = spans.0.lock();
    let field = |n: usize, name: &str| {
        let fields: &SpanFields = &spans[n];
        fields.iter().find(|(field, _)| field == name).map(|(_, value)| value.clone())
    };
    assert_eq!(spans.len(), 2, "{spans:?}");
    for (n, id, verdict) in [(0, "req-1", "ran"), (1, "req-2", "replayed")] {
        assert_eq!(field(n, "request_id").as_deref(), Some(id));
        assert_eq!(field(n, "verdict").as_deref(), Some(verdict));
        assert_eq!(field(n, "http.response.status_code").as_deref(), Some("201"));
    }
    assert_eq!((field(0, "trace_id").as_deref(), field(0, "link.span_id")), (Some(TRACE), None));
    assert_eq!(field(1, "link.trace_id").as_deref(), Some(TRACE));
    assert_eq!(field(1, "link.span_id"), field(0, "span_id"));
    assert!(field(0, "span_id").is_some() && field(1, "original_request_id").as_deref() == Some("req-1"));
}
