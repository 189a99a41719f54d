//! Browsers: whose answers a page may read.

use onlyonce_http::{Cors, IdempotencyLayer};
use testkit::ClientResponse;

use crate::harness::{Hit, Server, TestStore, assert_problem, on_every_store, reply, with};

on_every_store! {
    a_refusal_has_the_headers_that_replies_have,
    a_replay_is_for_the_page_that_asks_now,
    our_headers_are_exposed,
    preflights_pass_and_allow_the_key,
    without_a_policy_nothing_is_allowed_that_was_not,
}

const APP: &str = "https://app.example";
const SHOP: &str = "https://shop.example";
const EVIL: &str = "https://evil.example";

fn list(layer: IdempotencyLayer) -> IdempotencyLayer {
    layer.cors(Cors::new([APP, SHOP], true).unwrap())
}

/// A service that allows the page that asks, as most do.
async fn echoing(hit: Hit) -> http::Response<axum::body::Body> {
    let answer = reply(201, format!("run {}", hit.number));
    let Some(origin) = hit.headers.get("origin") else { return answer };
    let answer = with(answer, "access-control-allow-origin", origin.to_str().unwrap());
    let answer = with(answer, "access-control-allow-credentials", "true");
    with(with(answer, "access-control-expose-headers", "X-Total"), "vary", "Accept-Encoding, Origin")
}

async fn from(server: &Server, origin: &str, key: &str) -> ClientResponse {
    let request = server.client().post("/pay").header("origin", origin).body("1");
    let request = if key.is_empty() { request } else { request.key(key) };
    request.send().await.unwrap()
}

#[track_caller]
fn assert_allowed(answer: &ClientResponse, origin: Option<&str>) {
    assert_eq!(
        answer.headers.get_all("access-control-allow-origin").iter().count(),
        usize::from(origin.is_some())
    );
    assert_eq!(answer.header("access-control-allow-origin"), origin, "{answer:?}");
    let credentials = origin.filter(|origin| *origin != "*").map(|_| "true");
    assert_eq!(answer.header("access-control-allow-credentials"), credentials, "{answer:?}");
    if origin != Some("*") {
        let vary = answer.headers.get_all("vary").iter().flat_map(|line| line.to_str().unwrap().split(','));
        assert_eq!(vary.filter(|item| item.trim().eq_ignore_ascii_case("origin")).count(), 1, "{answer:?}");
    }
}

fn exposed(answer: &ClientResponse) -> Vec<String> {
    let lines = answer.headers.get_all("access-control-expose-headers").iter();
    let names = lines.flat_map(|line| line.to_str().unwrap().split(','));
    names.map(|name| name.trim().to_ascii_lowercase()).collect()
}

async fn a_refusal_has_the_headers_that_replies_have(store: TestStore) {
    let server = Server::start(&store, list, echoing).await;
    for (origin, allowed) in [(APP, Some(APP)), (SHOP, Some(SHOP)), (EVIL, None), ("null", None)] {
        let refused = from(&server, origin, "").await;
        assert_problem(&refused, 400, "key-missing");
        assert_allowed(&refused, allowed);
    }
    let nobody = server.client().post("/pay").send().await.unwrap();
    assert_eq!(nobody.header("access-control-allow-origin"), None, "no page asks");
    let any = Server::start(&store, |layer| layer.cors(Cors::new(["*"], false).unwrap()), echoing).await;
    assert_allowed(&from(&any, EVIL, "").await, Some("*"));
    assert_eq!(server.runs() + any.runs(), 0);
}

async fn a_replay_is_for_the_page_that_asks_now(store: TestStore) {
    let server = Server::start(&store, list, echoing).await;
    let first = from(&server, APP, "k").await;
    assert_eq!((first.status, first.header("access-control-allow-origin")), (201, Some(APP)));
    for _ in 0..2 {
        for (origin, allowed) in [(SHOP, Some(SHOP)), (EVIL, None), (APP, Some(APP))] {
            let replay = from(&server, origin, "k").await;
            assert_eq!((replay.text(), replay.header("idempotency-replayed")), (first.text(), Some("true")));
            assert_allowed(&replay, allowed);
        }
    }
    // What the service behind says of its own reply is its own affair.
    assert_eq!(from(&server, EVIL, "other").await.header("access-control-allow-origin"), Some(EVIL));
}

async fn our_headers_are_exposed(store: TestStore) {
    let layer = |layer: IdempotencyLayer| list(layer).advertise_expiry();
    let server = Server::start(&store, layer, echoing).await;
    assert_eq!(exposed(&from(&server, APP, "k").await), ["x-total", "idempotency-key-expires"]);
    let mut replay = exposed(&from(&server, APP, "k").await);
    replay.sort();
    assert_eq!(replay, ["idempotency-key-expires", "idempotency-replayed", "x-total"]);
    assert!(exposed(&from(&server, EVIL, "k").await) == ["x-total"], "nobody there to read them");
    let refused = server.client().post("/pay").header("origin", APP).key("k").body("2").send().await.unwrap();
    assert_problem(&refused, 422, "key-reused");
    assert!(exposed(&refused).is_empty(), "there is nothing of ours: {refused:?}");
    let named = || {
        let request = server.client().post("/pay").header("origin", APP).key("named");
        request.header("x-request-id", "req-1").send()
    };
    named().await.unwrap();
    assert!(exposed(&named().await.unwrap()).contains(&"idempotency-original-request".into()));
}

async fn preflights_pass_and_allow_the_key(store: TestStore) {
    let preflight = async |hit: Hit| {
        let answer = with(reply(204, ""), "access-control-allow-origin", APP);
        match hit.headers.get("x-allow") {
            Some(allow) => with(answer, "access-control-allow-headers", allow.to_str().unwrap()),
            None => answer,
        }
    };
    let server = Server::start(&store, list, preflight).await;
    let plain = Server::start(&store, |layer| layer, preflight).await;
    let ask = async |server: &Server, names: &str, allow: &str| {
        let request = server.client().request(http::Method::OPTIONS, "/pay").header("origin", APP);
        let request = request.header("access-control-request-method", "POST");
        let answer = request.header("access-control-request-headers", names).header("x-allow", allow).send();
        let answer = answer.await.unwrap();
        assert_eq!((answer.status, answer.header("access-control-allow-origin")), (204, Some(APP)));
        let lines = answer.headers.get_all("access-control-allow-headers").iter();
        lines.map(|line| line.to_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(
        ask(&server, "content-type,idempotency-key", "content-type").await,
        ["content-type", "idempotency-key"]
    );
    assert_eq!(ask(&server, "content-type", "content-type").await, ["content-type"], "not asked for");
    assert_eq!(ask(&server, "Idempotency-Key", "X-A, Idempotency-Key").await, ["X-A, Idempotency-Key"]);
    assert_eq!(ask(&server, "idempotency-key", "*").await, ["*"]);
    assert_eq!(ask(&plain, "idempotency-key", "x-a").await, ["x-a"], "without a policy it is the service's");
    assert_eq!(server.runs(), 4);
}

async fn without_a_policy_nothing_is_allowed_that_was_not(store: TestStore) {
    let server = Server::start(&store, |layer| layer, echoing).await;
    assert_eq!(from(&server, APP, "").await.header("access-control-allow-origin"), None);
    from(&server, APP, "k").await;
    assert_allowed(&from(&server, APP, "k").await, Some(APP));
    assert_allowed(&from(&server, EVIL, "k").await, None);
    let nobody = server.client().post("/pay").key("k").body("1").send().await.unwrap();
    assert_allowed(&nobody, None);
    let any = Server::start(
        &store,
        |layer| layer,
        async |_| with(reply(201, "done"), "access-control-allow-origin", "*"),
    )
    .await;
    from(&any, APP, "any").await;
    assert_allowed(&from(&any, EVIL, "any").await, Some("*"));
}
