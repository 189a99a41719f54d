//! Which requests are guarded, as the operator says: options, files of options, and `--explain-route`.

use std::path::Path;
use std::time::Duration;

use http::Method;
use testkit::{Client, ClientResponse, Upstream};

use crate::common::{Gateway, run};
use crate::numbered;

const RULES: [&str; 10] = [
    "--guard",
    "POST /v1/charges/*",
    "--guard",
    "PUT /v1/charges/*",
    "--exempt",
    "POST /v1/charges/search",
    "--optional-for",
    "POST /v1/charges/*/notes",
    "--exempt",
    "POST /v1/charges/*/preview",
];

/// What becomes of a request without a key.
async fn fate(client: Client, method: &str, path: &str) -> &'static str {
    let method = Method::from_bytes(method.as_bytes()).unwrap();
    let answer: ClientResponse = client.request(method, path).body("x").send().await.unwrap();
    match (answer.status, answer.header("idempotency-status")) {
        (400, _) if answer.code() == "key-missing" => "required",
        (201, Some("ignored")) => "optional",
        (201, None) => "passes",
        _ => panic!("{answer:?}"),
    }
}

async fn gateway(upstream: &Upstream, folder: &Path, options: &[&str]) -> Gateway {
    Gateway::start(&upstream.url(), folder, options).await
}

#[tokio::test(flavor = "multi_thread")]
async fn rules_guard_exempt_and_make_optional_over_both_protocols() {
    let upstream = numbered(Duration::ZERO).await;
    let folder = tempfile::tempdir().unwrap();
    let gateway = gateway(&upstream, folder.path(), &RULES).await;
    for client in [gateway.client(), Client::h2c(gateway.addr)] {
        for (method, path, expected) in [
            ("POST", "/v1/charges", "required"),
            ("POST", "/v1/charges/7", "required"),
            ("PUT", "/v1/charges/7?x=1", "required"),
            ("POST", "/v1/charges/search", "passes"),
            ("POST", "/v1/charges/7/notes", "optional"),
            ("POST", "/v1/charges/7/preview", "passes"),
            ("POST", "/login", "passes"),
            ("PATCH", "/login", "passes"),
            ("GET", "/v1/charges/7", "passes"),
            // Other spellings of what is guarded, or of what would be exempt.
            ("POST", "/V1/Charges/7", "required"),
            ("POST", "//v1/charges/7", "required"),
            ("POST", "/v1/%63harges/7", "required"),
            ("POST", "/v1/x/../charges/7", "required"),
            ("POST", "/v1/charges/search/../7", "required"),
            ("POST", "/v1/charges/search/", "required"),
        ] {
            assert_eq!(fate(client, method, path).await, expected, "{method} {path}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn grpc_passes_and_the_banner_says_so() {
    let upstream = numbered(Duration::ZERO).await;
    let folder = tempfile::tempdir().unwrap();
    let gateway = gateway(&upstream, folder.path(), &[]).await;
    assert!(gateway.process.stderr().contains("passes    application/grpc over HTTP/2, unguarded"));
    // There is no gRPC over HTTP/1.1.
    for (client, passes) in [(gateway.client(), 400), (Client::h2c(gateway.addr), 201)] {
        for (content_type, status) in
            [("application/grpc", passes), ("application/grpc+proto", passes), ("application/json", 400)]
        {
            let request = client.post("/pkg.Service/Pay").header("content-type", content_type).body("x");
            assert_eq!(request.send().await.unwrap().status, status, "{content_type}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_route_is_explained_and_nothing_is_started() {
    let explain = async |options: &[&str], route: &str| {
        run(&[&["serve", "--explain-route", route], options].concat()).await
    };
    for (options, route, said) in [
        (
            &[][..],
            "POST /pay",
            &[
                "guarded      yes; a key is required\n",
                "because      POST is guarded by default",
                "Authorization",
                "but          application/grpc over HTTP/2 passes unguarded",
            ][..],
        ),
        (&[], "get /pay", &["guarded      no", "get is not, and no rule names it"]),
        (&RULES, "POST /v1/charges/7", &["guarded      yes", "because      --guard 'POST /v1/charges/*'\n"]),
        (
            &RULES,
            "POST /v1/charges/search",
            &["guarded      no", "because      --exempt 'POST /v1/charges/search'\n"],
        ),
        (
            &RULES,
            "POST /v1/charges/7/notes",
            &["when it has a key", "--optional-for 'POST /v1/charges/*/notes'"],
        ),
        (&RULES, "POST /login", &["guarded      no", "there are --guard rules, and none names it"]),
        (&["--unguarded"], "POST /pay", &["guarded      no", "because      --unguarded\n"]),
        (
            &[
                "--scope-header",
                "X-Account",
                "--wait",
                "2s",
                "--fingerprint",
                "members=/amount",
                "--quoted-only",
            ],
            "POST /pay",
            &["idempotency-key, quoted\n", "x-account\n", "body (members=/amount)", "a copy waits up to 2s"],
        ),
    ] {
        let (ok, text) = explain(options, route).await;
        assert!(ok, "{text}");
        for part in said {
            assert!(text.contains(part), "{part:?} is not in\n{text}");
        }
    }
    for wrong in ["", "POST", "POST pay", "POST http://x/", "PO ST /x"] {
        let (ok, text) = explain(&[], wrong).await;
        assert!(!ok && text.contains("write for example 'POST /v1/charges'"), "{wrong:?}: {text}");
    }
    assert!(!Path::new("onlyonce.db").exists(), "no store was made");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_holds_the_options_and_the_command_line_goes_before_it() {
    let upstream = numbered(Duration::ZERO).await;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("onlyonce.toml");
    let text =
        "guard = [\"POST /v1/*\"]\nexempt = [\"POST /v1/login\"]\nexpires = true\nretention = \"1h\"\n";
    std::fs::write(&file, text).unwrap();
    let file = file.to_str().unwrap();
    let gateway = gateway(&upstream, folder.path(), &["--config", file, "--retention", "2h"]).await;
    let said = gateway.process.stderr();
    for part in ["config    ", "guarded   POST /v1/*;", "exempt    POST /v1/login\n", "retention 2h"] {
        assert!(said.contains(part), "{part:?} is not in\n{said}");
    }
    assert_eq!(fate(gateway.client(), "POST", "/v1/pay").await, "required");
    assert_eq!(fate(gateway.client(), "POST", "/v1/login").await, "passes");
    assert_eq!(fate(gateway.client(), "POST", "/pay").await, "passes");
    let first = gateway.client().post("/v1/pay").key("k").send().await.unwrap();
    assert!(first.header("idempotency-key-expires").is_some(), "{first:?}");

    std::fs::write(file, "guard = [\"POST /v1/*\"]\n\nretenton = \"1h\"\n").unwrap();
    let (ok, said) = run(&["serve", "--upstream", "http://127.0.0.1:1", "--config", file]).await;
    assert!(!ok && said.contains("onlyonce.toml:3: retenton: no such option; is it retention?"), "{said}");
    let (ok, said) = run(&["serve", "--config", "/nowhere/onlyonce.toml"]).await;
    assert!(!ok && said.contains("/nowhere/onlyonce.toml"), "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_library_can_tell_apart_the_options_can_too() {
    let upstream = numbered(Duration::ZERO).await;
    let folder = tempfile::tempdir().unwrap();
    let options = [
        &["--fingerprint", "members=/amount", "--fingerprint-header", "X-Currency", "--quoted-only"][..],
        &["--key-header", "X-Key", "--not-stored", "Via", "--replayed-header", "X-Again"],
        &["--request-id-header", "X-Correlation-Id"],
    ];
    let gateway = gateway(&upstream, folder.path(), &options.concat()).await;
    let send = async |key: &str, currency: &str, body: &'static str| {
        let request = gateway.client().post("/pay").header("x-key", key).header("x-currency", currency);
        let request = request.header("x-correlation-id", "c-1").header("connection", "x-key");
        request.header("content-type", "application/json").body(body).send().await.unwrap()
    };
    assert_eq!(send("k", "EUR", "{}").await.code(), "key-malformed");
    let first = send("\"k\"", "EUR", r#"{"amount": 1, "sent": 1}"#).await;
    assert_eq!(first.status, 201);
    assert_eq!(upstream.last().header("x-key"), Some("\"k\""), "nobody has the key taken off");
    let replay = send("\"k\"", "EUR", r#"{"sent": 2, "amount": 1}"#).await;
    assert_eq!((replay.text(), replay.header("x-again")), (first.text(), Some("true")));
    assert_eq!((first.header("via").is_some(), replay.header("via")), (true, None));
    assert_eq!(replay.header("idempotency-original-request"), Some("c-1"));
    assert_eq!(send("\"k\"", "USD", r#"{"amount": 1}"#).await.code(), "key-reused");
    assert_eq!(send("\"k\"", "EUR", r#"{"amount": 2}"#).await.code(), "key-reused");

    // Another form, that knows the old one, understands the record; one that does not says so.
    let known = ["--fingerprint", "json", "--key-header", "X-Key", "--cache-bytes", "0"];
    let same = async |gateway: &Gateway| {
        let request = gateway.client().post("/pay").header("x-key", "k").header("x-currency", "EUR");
        request.header("content-type", "application/json").body(r#"{"amount":1}"#).send().await.unwrap()
    };
    let stranger = Gateway::start(&upstream.url(), folder.path(), &known).await;
    assert_eq!(same(&stranger).await.code(), "fingerprint-unknown");
    let definition = ["--known-fingerprint", "members=/amount;headers=x-currency"];
    let knows = Gateway::start(&upstream.url(), folder.path(), &[&known[..], &definition].concat()).await;
    assert_eq!(same(&knows).await.text(), first.text());
    assert_eq!(upstream.count(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn browsers_and_look_ups_are_options() {
    let upstream = numbered(Duration::ZERO).await;
    let folder = tempfile::tempdir().unwrap();
    let options = ["--cors-origin", "https://app.example", "--cors-credentials", "--status-lookup"];
    let gateway = gateway(&upstream, folder.path(), &options).await;
    for client in [gateway.client(), Client::h2c(gateway.addr)] {
        let refused = client.post("/pay").header("origin", "https://app.example").send().await.unwrap();
        assert_eq!(refused.code(), "key-missing");
        assert_eq!(refused.header("access-control-allow-origin"), Some("https://app.example"));
        assert_eq!(refused.header("access-control-allow-credentials"), Some("true"));
        let look = |method: &str| {
            let method = method.parse().unwrap();
            let request = client.request(method, "/.well-known/idempotency/other");
            request.header("origin", "https://app.example")
        };
        let absent = look("GET").send().await.unwrap();
        assert_eq!((absent.status, &absent.json()["state"]), (200, &"absent".into()));
        assert_eq!(absent.header("access-control-allow-origin"), Some("https://app.example"));
        let preflight = look("OPTIONS")
            .header("access-control-request-method", "GET")
            .header("access-control-request-headers", "authorization")
            .send()
            .await
            .unwrap();
        assert_eq!((preflight.status, preflight.body.len()), (204, 0));
        for (name, value) in [
            ("access-control-allow-origin", "https://app.example"),
            ("access-control-allow-credentials", "true"),
            ("access-control-allow-methods", "GET, HEAD"),
            ("access-control-allow-headers", "authorization"),
        ] {
            assert_eq!(preflight.header(name), Some(value), "{name}");
        }
    }
    gateway.client().post("/pay").key("k").send().await.unwrap();
    let found = gateway.client().get("/.well-known/idempotency/k").send().await.unwrap();
    assert_eq!((&found.json()["state"], &found.json()["status"]), (&"completed".into(), &201.into()));
    let without = gateway_without(&upstream, folder.path()).await;
    let passed = without.client().get("/.well-known/idempotency/k").send().await.unwrap();
    assert!(passed.text().starts_with("run "), "the path is the upstream's: {passed:?}");
    for wrong in [
        &["--cors-origin", "*", "--cors-credentials"][..],
        &["--cors-origin", "app.example"],
        &["--cors-credentials"],
    ] {
        let (ok, said) = run(&[&["serve", "--upstream", "http://127.0.0.1:1"], wrong].concat()).await;
        assert!(!ok && said.contains("--cors-"), "{said}");
    }
}

async fn gateway_without(upstream: &Upstream, folder: &Path) -> Gateway {
    gateway(upstream, folder, &[]).await
}
