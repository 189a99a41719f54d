//! The zoo's own proof, without the checker: each server has its defect, and but for what follows from it no other.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use testkit::{Client, ClientResponse, RawConnection};
use tokio::sync::Semaphore;
use tokio::task::{JoinHandle, JoinSet};

use crate::defect::Defect::{self, *};
use crate::nature::Nature;
use crate::serve::Server;
use crate::shop::Shop;

const BODY: &str = r#"{"amount":100}"#;
/// Runs until the gate is opened.
const GATED: &str = r#"{"amount":100,"slow":"gate"}"#;
/// By then a short lock has ended.
const AFTER_A_LOCK: Duration = Duration::from_millis(1000);
/// Servers that are looked at side by side.
const AT_ONCE: usize = 4;

/// A server and a client of it.
struct Site {
    server: Server,
    keys: AtomicUsize,
}

impl Site {
    fn key(&self) -> String {
        format!("Key-{}", self.keys.fetch_add(1, Ordering::Relaxed))
    }

    fn count(&self) -> u64 {
        self.server.shop.count()
    }

    /// Waits until something is so; each probe as a whole is bounded.
    async fn until(&self, so: impl Fn(&Shop) -> bool) {
        while !so(&self.server.shop) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Sends a copy and waits until it is answered, runs, or waits for one that does.
    async fn copy(&self, key: &str, body: &'static str) -> JoinHandle<ClientResponse> {
        let busy = |shop: &Shop| shop.running.get() + shop.waiting.get();
        let before = busy(&self.server.shop);
        let request = Client::new(self.server.addr).post("/pay").key(key).body(body);
        let sent = tokio::spawn(async move { request.send().await.unwrap() });
        self.until(|shop| sent.is_finished() || busy(shop) > before).await;
        sent
    }

    async fn send_to(&self, method: &str, path: &str, keys: &[&str], body: &str) -> ClientResponse {
        let mut request = Client::new(self.server.addr).request(method.parse().unwrap(), path);
        for key in keys {
            request = request.header("idempotency-key", key);
        }
        request.body(body.to_owned()).send().await.unwrap()
    }

    async fn send(&self, key: &str, body: &str) -> ClientResponse {
        self.send_to("POST", "/pay", &[key], body).await
    }

    /// Twice with a fresh key.
    async fn twice(&self, body: &str) -> (ClientResponse, ClientResponse) {
        let key = self.key();
        (self.send(&key, body).await, self.send(&key, body).await)
    }

    async fn as_principal(&self, name: &str, key: &str) -> u16 {
        let request = Client::new(self.server.addr).post("/pay").key(key).header("authorization", name);
        request.body(BODY).send().await.unwrap().status
    }

    /// A request whose connection ends as soon as the server has begun with it; the body is `cut` bytes short.
    async fn leave(&self, key: &str, body: &str, cut: usize) {
        let head = format!(
            "POST /pay HTTP/1.1\r\nHost: zoo\r\nIdempotency-Key: {key}\r\nContent-Length: {}\r\n\r\n",
            body.len()
        );
        let mut connection = RawConnection::open(self.server.addr).await;
        connection.write(format!("{head}{}", &body[..body.len() - cut])).await;
        self.until(|shop| shop.begun.get() == 1).await;
        match cut {
            0 => self.until(|shop| shop.running.get() == 1).await,
            // What was sent after the head.
            _ => tokio::time::sleep(Duration::from_millis(100)).await,
        }
        drop(connection);
        self.until(|shop| shop.open.get() == 0).await;
    }
}

fn big(last: char) -> String {
    format!(r#"{{"amount":100,"note":"{}{last}"}}"#, "x".repeat(40_000))
}

/// A question to a server: does it hold?
async fn holds(probe: &str, site: &Site) -> bool {
    match probe.split_once(' ').unwrap_or((probe, "")) {
        ("key", rest) => keys(rest, site).await,
        ("replay", rest) => replays(rest, site).await,
        ("mismatch", rest) => mismatches(rest, site).await,
        ("flight", rest) => in_flight(rest, site).await,
        ("end", rest) => ends(rest, site).await,
        _ => panic!("no probe {probe}"),
    }
}

const PROBES: &[&str] = &[
    "key missing",
    "key empty",
    "key two",
    "key case",
    "key blank",
    "key long",
    "key quoted",
    "key principal",
    "replay twice",
    "replay thrice",
    "replay many",
    "replay status",
    "replay headers",
    "replay location",
    "replay repeated",
    "replay cookie",
    "replay json",
    "replay binary",
    "replay big",
    "replay encoding",
    "replay later",
    "replay marker",
    "replay forged",
    "replay first",
    "replay expires",
    "mismatch body",
    "mismatch tail",
    "mismatch number",
    "mismatch query",
    "mismatch path",
    "mismatch method",
    "mismatch after",
    "mismatch flight",
    "mismatch problem",
    "mismatch link",
    "flight race",
    "flight losers",
    "flight others",
    "flight copies",
    "flight retry-after",
    "end definitive",
    "end transient",
    "end disconnect",
    "end half",
    "end huge",
];

async fn keys(probe: &str, site: &Site) -> bool {
    let (before, key) = (site.count(), site.key());
    match probe {
        "missing" => site.send_to("POST", "/pay", &[], BODY).await.status == 400,
        "empty" => site.send("\"\"", BODY).await.status == 400,
        "two" => {
            site.send_to("POST", "/pay", &[&key, "other"], BODY).await.status == 400
                && site.send(&format!("\"{key}\", \"other\""), BODY).await.status == 400
        }
        "principal" => {
            let statuses = (site.as_principal("alice", &key).await, site.as_principal("bob", &key).await);
            statuses == (201, 201) && site.count() == before + 2
        }
        "quoted" => {
            site.send(&key, BODY).await;
            site.send(&format!("\"{key}\""), BODY).await;
            site.count() == before + 1
        }
        _ => {
            let pad = "x".repeat(254 - key.len());
            let (one, other) = match probe {
                "case" => (format!("\"{key}\""), format!("\"{}\"", key.to_uppercase())),
                "blank" => (format!("\"{key}\""), format!("\"{key} \"")),
                "long" => (format!("{key}{pad}1"), format!("{key}{pad}2")),
                _ => panic!("{probe}"),
            };
            let statuses = (site.send(&one, BODY).await.status, site.send(&other, BODY).await.status);
            statuses == (201, 201) && site.count() == before + 2
        }
    }
}

async fn replays(probe: &str, site: &Site) -> bool {
    let before = site.count();
    let body = match probe {
        "binary" => r#"{"amount":100,"receipt":"binary"}"#,
        "big" => r#"{"amount":100,"receipt":"big"}"#,
        "encoding" => r#"{"amount":100,"receipt":"gzip"}"#,
        _ => BODY,
    };
    if let "thrice" | "many" | "later" = probe {
        let key = site.key();
        let first = site.send(&key, body).await;
        let others = match probe {
            "thrice" => 0,
            "later" => 1,
            _ => 12,
        };
        for _ in 0..others {
            site.send(&site.key(), body).await;
        }
        let second = site.send(&key, body).await;
        if probe == "thrice" {
            site.send(&key, body).await;
        }
        if probe == "later" {
            // Whole or not, it must not tell another balance.
            return balance(&second).is_none_or(|then| Some(then) == balance(&first));
        }
        return site.count() == before + 1 + others;
    }
    if probe == "forged" {
        let request = Client::new(site.server.addr)
            .post("/pay")
            .key(&site.key())
            .header("idempotency-replayed", "true");
        return request.body(body).send().await.unwrap().header("idempotency-replayed").is_none();
    }
    let (first, second) = site.twice(body).await;
    let same = |name: &str| first.header_all(name) == second.header_all(name) && first.header(name).is_some();
    match probe {
        "twice" => site.count() == before + 1,
        "status" => first.status == second.status,
        "headers" => ["content-type", "etag"].iter().all(|name| same(name)),
        "location" => same("location"),
        "encoding" => same("content-encoding") && first.body == second.body,
        "repeated" => same("link"),
        "cookie" => second.header("set-cookie").is_none(),
        "json" | "binary" | "big" => first.body == second.body && site.count() == before + 1,
        "marker" => second.header("idempotency-replayed") == Some("true"),
        "first" => first.header("idempotency-replayed").is_none(),
        "expires" => first.header("idempotency-key-expires").is_some(),
        _ => panic!("{probe}"),
    }
}

fn balance(answer: &ClientResponse) -> Option<i64> {
    serde_json::from_slice::<serde_json::Value>(&answer.body).ok()?["balance"].as_i64()
}

async fn mismatches(probe: &str, site: &Site) -> bool {
    let (before, key) = (site.count(), site.key());
    let (one, other) = match probe {
        "tail" => (big('1'), big('2')),
        "number" => (
            r#"{"amount":1,"order":653247040368672768}"#.into(),
            r#"{"amount":1,"order":653247040368672769}"#.into(),
        ),
        "query" | "path" | "method" => (BODY.into(), BODY.into()),
        _ => (BODY.to_owned(), r#"{"amount":200}"#.to_owned()),
    };
    if probe == "flight" {
        let first = site.copy(&key, GATED).await;
        let second = site.send(&key, BODY).await;
        site.server.shop.open_gate();
        first.await.unwrap();
        return second.status == 422;
    }
    let first = site.send(&key, &one).await;
    let second = match probe {
        "query" => site.send_to("POST", "/pay?dry-run=1", &[&key], &other).await,
        "path" => site.send_to("POST", "/pay/other", &[&key], &other).await,
        "method" => site.send_to("PUT", "/pay", &[&key], &other).await,
        _ => site.send(&key, &other).await,
    };
    match probe {
        "link" => second.status != 422 || second.header("link").is_some(),
        "problem" => second.header("content-type") == Some("application/problem+json"),
        "after" => {
            let third = site.send(&key, &one).await;
            first.status == 201 && third.status / 100 == 2 && site.count() == before + 1
        }
        _ => second.status == 422 && site.count() == before + 1,
    }
}

async fn in_flight(probe: &str, site: &Site) -> bool {
    let (before, key) = (site.count(), site.key());
    let shop = &site.server.shop;
    if let "race" | "losers" = probe {
        let mut copies = JoinSet::new();
        for _ in 0..8 {
            let request = Client::new(site.server.addr).post("/pay").key(&key).body(GATED);
            copies.spawn(async move { request.send().await.unwrap().status });
        }
        // Each of them is answered, runs, or waits for one that does.
        site.until(|shop| {
            shop.begun.get() == 8 && shop.open.get() == shop.running.get() + shop.waiting.get()
        })
        .await;
        shop.open_gate();
        let statuses = BTreeSet::from_iter(copies.join_all().await);
        let once = site.count() == before + 1;
        return if probe == "race" { once } else { statuses.is_subset(&BTreeSet::from([200, 201, 409])) };
    }
    let first = site.copy(&key, GATED).await;
    if probe == "others" {
        let other = site.send(&site.key(), BODY).await.status;
        shop.open_gate();
        first.await.unwrap();
        return other == 201;
    }
    tokio::time::sleep(AFTER_A_LOCK).await;
    let second = site.copy(&key, GATED).await;
    let third = site.copy(&key, GATED).await;
    shop.open_gate();
    let (_, second, _) = tokio::try_join!(first, second, third).unwrap();
    match probe {
        "retry-after" => second.header("retry-after").is_some(),
        _ => second.status == 409 && site.count() == before + 1,
    }
}

async fn ends(probe: &str, site: &Site) -> bool {
    let (before, key) = (site.count(), site.key());
    match probe {
        "definitive" => {
            let failing = r#"{"amount":2000000}"#;
            // A refusal looks the same twice; that its key is taken shows when it comes with another body.
            let (first, other) = (site.send(&key, failing).await, site.send(&key, BODY).await);
            first.status == 402 && matches!(other.status, 422 | 409)
        }
        "transient" => {
            let flaky = r#"{"amount":100,"flaky":true}"#;
            let first = site.send(&key, flaky).await.status;
            let second = site.send(&key, flaky).await.status;
            (first, second) == (503, 201) && site.count() == before + 1
        }
        "disconnect" => {
            site.leave(&key, GATED, 0).await;
            tokio::time::sleep(AFTER_A_LOCK).await;
            let second = site.copy(&key, GATED).await;
            site.server.shop.open_gate();
            second.await.unwrap();
            site.until(|shop| shop.running.get() == 0).await;
            site.send(&key, GATED).await.status / 100 == 2 && site.count() == before + 1
        }
        "huge" => {
            let body = format!("{}{BODY}", " ".repeat(1_500_000));
            site.send(&key, &body).await;
            site.send(&key, &body).await;
            site.count() <= before + 1
        }
        "half" => {
            site.leave(&key, BODY, 5).await;
            site.send(&key, BODY).await.status == 201 && site.count() == before + 1
        }
        _ => panic!("{probe}"),
    }
}

/// The probes that do not hold for a server with this defect; the first one is the defect itself.
fn expected(defect: Defect) -> &'static [&'static str] {
    match defect {
        CheckThenInsert => &["flight race"],
        NoClaim => &["flight copies", "flight race", "flight retry-after", "end disconnect"],
        LosersGet500 => &["flight losers"],
        RefusedDuplicateFrees => &["flight copies", "flight race", "end disconnect"],
        LockTooShort => &["flight copies", "flight retry-after", "end disconnect"],
        LockOutlivesWork => &["end transient"],
        PerWorker => &["replay twice"],
        FewKeys => &["replay many"],
        OneLockForAll => &["flight others"],
        WaiterGetsEmpty => &["flight copies", "flight retry-after"],
        MissingKeyRuns => &["key missing"],
        EmptyKeyIsAKey => &["key empty"],
        FirstOfTwoKeys => &["key two"],
        KeyTruncated | LongKeyIs500 => &["key long"],
        KeyCaseFolded => &["key case"],
        KeyTrimmed => &["key blank"],
        QuotedIsAnother => &["key quoted"],
        GlobalScope => &["key principal"],
        NoFingerprint => &[
            "mismatch body",
            "mismatch tail",
            "mismatch number",
            "mismatch query",
            "mismatch path",
            "mismatch method",
            "mismatch flight",
            "mismatch problem",
            "end definitive",
        ],
        FingerprintOfPrefix => &["mismatch tail"],
        FingerprintOfDoubles => &["mismatch number"],
        QueryIgnored => &["mismatch query"],
        PathIgnored => &["mismatch path"],
        MethodIgnored => &["mismatch method"],
        MismatchRuns => &[
            "mismatch body",
            "mismatch tail",
            "mismatch number",
            "mismatch query",
            "mismatch path",
            "mismatch method",
            "mismatch flight",
            "mismatch problem",
            "end definitive",
            "mismatch after",
        ],
        MismatchPoisons | MismatchFrees => &["mismatch after"],
        MismatchIs409 => &[
            "mismatch body",
            "mismatch tail",
            "mismatch number",
            "mismatch query",
            "mismatch path",
            "mismatch method",
            "mismatch flight",
        ],
        InFlightFirst => &["mismatch flight"],
        FivexxStored => &["end transient"],
        FourxxNotStored => &["end definitive"],
        BigAnswerNotStored => &["replay big"],
        StuckAfterDisconnect | RunsAgainAfterDisconnect => &["end disconnect"],
        StuckAfterHalf | HalfBodyPoisons => &["end half"],
        ReplayRuns => &[
            "replay twice",
            "replay thrice",
            "replay many",
            "replay json",
            "replay binary",
            "replay big",
            "key quoted",
            "mismatch after",
            "end disconnect",
        ],
        EverySecondRuns => &["replay thrice"],
        ReplayOfNow => &["replay later"],
        ReplayIs200 => &["replay status"],
        HeadersLost => &["replay headers", "replay location", "replay repeated", "replay encoding"],
        LocationLost => &["replay location"],
        RepeatedCollapsed => &["replay repeated"],
        EncodingLost => &["replay encoding"],
        UnguardedBig => &["end huge"],
        MarkerForged => &["replay forged"],
        NoLinks => &["mismatch link"],
        TextDecoded => &["replay binary", "replay encoding"],
        JsonRewritten => &["replay json"],
        ReplayTruncated => &["replay json", "replay binary", "replay big", "replay encoding"],
        SetCookieReplayed => &["replay cookie"],
        MarkerOnFirst => &["replay first", "replay forged"],
        NoMarker => &["replay marker"],
        NoRetryAfter => &["flight retry-after"],
        PlainRefusals => &["mismatch problem"],
        NoExpiry => &["replay expires"],
        StuckAfterCrash | RunsAgainAfterCrash | ForgetsOnRestart => &[],
        // What follows from these is nearly everything.
        LockHidesResult => &["replay status"],
        NoKeys => &["replay twice"],
        Constant | NotFound | Broken | Echo => &["key principal"],
    }
}

/// Those that fail so much that the rest says nothing.
fn is_sweeping(defect: Defect) -> bool {
    matches!(defect, LockHidesResult | NoKeys | Constant | NotFound | Broken | Echo | PerWorker)
}

async fn failing(nature: Nature, probes: &[&'static str]) -> BTreeSet<&'static str> {
    let mut running = JoinSet::new();
    for &probe in probes {
        // A server for each probe, so that none disturbs another.
        let site = Site { server: Server::start(nature).await, keys: AtomicUsize::new(0) };
        running.spawn(async move {
            let holds = tokio::time::timeout(testkit::PATIENCE, holds(probe, &site)).await;
            (!holds.unwrap_or_else(|_| panic!("{probe} of {nature:?} has no end"))).then_some(probe)
        });
    }
    running.join_all().await.into_iter().flatten().collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_right_server_is_right() {
    assert_eq!(failing(Nature::default(), PROBES).await, BTreeSet::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn each_wrong_server_is_wrong_in_one_thing() {
    let places = Arc::new(Semaphore::new(AT_ONCE));
    let mut running = JoinSet::new();
    for &defect in Defect::ALL {
        let places = places.clone();
        running.spawn(async move {
            let _place = places.acquire().await;
            let probes = if is_sweeping(defect) { expected(defect) } else { PROBES };
            let expected = BTreeSet::from_iter(expected(defect).iter().copied());
            let found = failing(defect.into(), probes).await;
            (found != expected).then(|| format!("{}: fails {found:?}, expected {expected:?}", defect.name()))
        });
    }
    let wrong: Vec<_> = running.join_all().await.into_iter().flatten().collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
