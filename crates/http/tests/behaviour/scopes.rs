//! H5: whose keys.

use http::HeaderName;
use onlyonce_core::ListQuery;
use onlyonce_http::{ScopeSecret, ScopeSource};
use testkit::{ClientResponse, client::RequestBuilder};

use crate::harness::{Server, TestStore, assert_problem, assert_replay_of, on_every_store};

on_every_store! {
    h5_keys_of_two_principals_never_meet,
    h5_a_request_without_its_principal_is_refused,
    h5_schemes_that_sign_each_request_are_refused,
    h5_sources_are_configurable,
    h5_no_credential_is_stored,
}

async fn pay(request: RequestBuilder) -> ClientResponse {
    request.key("k").body("1").send().await.unwrap()
}

async fn h5_keys_of_two_principals_never_meet(store: TestStore) {
    let server = Server::counting(&store, |layer| layer).await;
    let as_user = |credential| pay(server.client().post("/pay").header("authorization", credential));
    let alice = as_user("Bearer alice").await;
    let bob = as_user("Bearer bob").await;
    let nobody = pay(server.client().post("/pay")).await;
    assert_eq!([alice.text(), bob.text(), nobody.text()], ["run 1", "run 2", "run 3"]);
    assert_replay_of(&as_user("Bearer alice").await, &alice);
    assert_replay_of(&as_user("Bearer bob").await, &bob);
    assert_replay_of(&pay(server.client().post("/pay")).await, &nobody);
    assert_eq!(server.runs(), 3);
}

async fn h5_a_request_without_its_principal_is_refused(store: TestStore) {
    let server = Server::counting(&store, |layer| layer).await;
    for credential in ["cookie", "x-api-key"] {
        let answer = pay(server.client().post("/pay").header(credential, "session=SECRET")).await;
        assert_problem(&answer, 400, "scope-missing");
        assert!(answer.text().contains("scope-cookie") && !answer.text().contains("SECRET"));
    }
    let account = HeaderName::from_static("x-account");
    let by_account =
        Server::counting(&store, |layer| layer.scope_source(ScopeSource::Headers(vec![account]))).await;
    let answer = pay(by_account.client().post("/pay").header("authorization", "Bearer alice")).await;
    assert_problem(&answer, 400, "scope-missing");
    assert!(answer.text().contains("x-account"));
    assert_eq!((server.runs(), by_account.runs(), store.records().await), (0, 0, 0));
}

async fn h5_schemes_that_sign_each_request_are_refused(store: TestStore) {
    let server = Server::counting(&store, |layer| layer).await;
    let named = Server::counting(&store, |layer| {
        layer.scope_source(ScopeSource::Headers(vec![HeaderName::from_static("x-account")]))
    })
    .await;
    for scheme in ["Digest a", "DPoP a", "AWS4-HMAC-SHA256 a", "Signature a", "Hawk a", "OAuth a"] {
        let with = |server: &Server| {
            server.client().post("/pay").header("authorization", scheme).header("x-account", "a")
        };
        assert_problem(&pay(with(&server)).await, 400, "scope-unstable");
        assert_eq!(pay(with(&named)).await.status, 201);
    }
    assert_eq!((server.runs(), named.runs()), (0, 1));
}

async fn h5_sources_are_configurable(store: TestStore) {
    let cookie =
        Server::counting(&store, |layer| layer.scope_source(ScopeSource::Cookie("sid".into()))).await;
    let with_cookie = |value: &'static str| pay(cookie.client().post("/pay").header("cookie", value));
    let alice = with_cookie("theme=dark; sid=alice").await;
    assert_replay_of(&with_cookie("sid=alice; theme=light").await, &alice);
    assert_eq!(with_cookie("sid=bob").await.text(), "run 2");

    let everybody = Server::counting(&store, |layer| layer.scope_source(ScopeSource::None)).await;
    let first = pay(everybody.client().post("/pay").header("authorization", "Bearer alice")).await;
    assert_replay_of(&pay(everybody.client().post("/pay").header("cookie", "sid=bob")).await, &first);

    let function = Server::counting(&store, |layer| {
        layer.scope(|parts| Some(parts.headers.get("x-merchant")?.to_str().ok()?.to_owned()))
    })
    .await;
    assert_problem(&pay(function.client().post("/pay")).await, 400, "scope-missing");
    let merchant = |name| pay(function.client().post("/pay").header("x-merchant", name));
    let first = merchant("m1").await;
    assert_replay_of(&merchant("m1").await, &first);
    assert_eq!(merchant("m2").await.text(), "run 2");
}

async fn h5_no_credential_is_stored(store: TestStore) {
    let secret = ScopeSecret::new(b"0123456789abcdef").unwrap();
    let plain = Server::counting(&store, |layer| layer).await;
    let keyed = Server::counting(&store, |layer| layer.scope_secret(secret)).await;
    for server in [&plain, &keyed] {
        let answer = pay(server.client().post("/pay").header("authorization", "Bearer S3CR3T")).await;
        assert_eq!(answer.status, 201);
    }
    let records = store.admin.list(&ListQuery::default()).await.unwrap().records;
    assert_eq!(records.len(), 2, "a secret makes another scope");
    for record in &records {
        let scope = record.id.scope.as_str();
        assert!(scope.len() == 64 && scope.bytes().all(|b| b.is_ascii_hexdigit()), "{scope}");
        assert!(!format!("{record:?}").contains("S3CR3T"));
    }
    if let Some(folder) = &store.folder {
        for file in std::fs::read_dir(folder.path()).unwrap() {
            let bytes = std::fs::read(file.unwrap().path()).unwrap();
            assert!(!bytes.windows(6).any(|window| window == b"S3CR3T"));
        }
    }
}
