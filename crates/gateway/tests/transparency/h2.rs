//! The same with HTTP/2 on either side: to a service that speaks HTTP/1.1, to one that speaks HTTP/2, and from clients of
//! HTTP/1.1 to one that speaks HTTP/2.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method};
use http_body::Frame;
use testkit::client::RequestBuilder;
use testkit::{Answer, Client, ClientResponse, Nginx, Seen, Upstream};

use crate::compare::messages;
use crate::wire::{Framing, Message, latin1};
use crate::{Found, gateway};

/// What the client sends.
#[derive(Clone, Copy, Debug)]
struct Case {
    name: &'static str,
    method: &'static str,
    path: &'static str,
    headers: &'static [(&'static str, &'static str)],
    body: Body,
}

#[derive(Clone, Copy, Debug)]
enum Body {
    None,
    Whole(usize),
    Streamed,
    Trailers,
}

const fn case(name: &'static str, method: &'static str, path: &'static str) -> Case {
    Case { name, method, path, headers: &[], body: Body::None }
}

impl Case {
    const fn headers(mut self, headers: &'static [(&'static str, &'static str)]) -> Self {
        self.headers = headers;
        self
    }

    const fn body(mut self, body: Body) -> Self {
        self.body = body;
        self
    }
}

/// A key of its own for each way.
const KEYED: (&str, &str) = ("idempotency-key", "");

const CASES: &[Case] = &[
    case("GET", "GET", "/plain?a=1&b=%2F"),
    case("HEAD", "HEAD", "/head"),
    case("OPTIONS", "OPTIONS", "/plain"),
    case("a method of its own", "PURGE", "/plain"),
    case("PUT with a body", "PUT", "/echo").body(Body::Whole(300)),
    case("PUT with an empty body", "PUT", "/echo").body(Body::Whole(0)),
    case("PUT with 2 MiB", "PUT", "/count").body(Body::Whole(2 << 20)),
    case("PUT with a body in pieces", "PUT", "/echo").body(Body::Streamed),
    case("PUT with trailers", "PUT", "/echo").headers(&[("trailer", "x-sum")]).body(Body::Trailers),
    case("GET with a body", "GET", "/echo").body(Body::Whole(3)),
    case("POST without a key", "POST", "/plain").body(Body::Whole(3)),
    case("a guarded POST", "POST", "/plain")
        .headers(&[("authorization", "Bearer c"), KEYED])
        .body(Body::Whole(3)),
    case("cookies in pieces", "GET", "/plain").headers(&[("cookie", "a=1"), ("cookie", "b=2")]),
    case("repeated headers", "GET", "/repeated").headers(&[("x-a", "1"), ("x-b", "2"), ("x-a", "3")]),
    case("an empty header", "GET", "/plain").headers(&[("x-empty", "")]),
    case("a forwarded chain", "GET", "/plain").headers(&[("x-forwarded-for", "203.0.113.7")]),
    case("an odd path", "GET", "//a/../b/%2e%2e/{x}|y?\"q\""),
    case("status 204", "GET", "/204"),
    case("status 304", "GET", "/304"),
    case("status 500", "GET", "/500"),
    case("4 MiB back", "GET", "/big"),
    case("a body in pieces back", "GET", "/pieces"),
    case("events", "GET", "/events"),
    case("trailers back", "GET", "/trailers").headers(&[("te", "trailers")]),
    case("trailers that nobody asked for", "GET", "/trailers"),
    case("a gRPC call", "POST", "/grpc")
        .headers(&[("content-type", "application/grpc"), ("te", "trailers")])
        .body(Body::Whole(5)),
    case("a reply that breaks off", "GET", "/cut"),
    case("no reply", "GET", "/reset"),
];

/// How many cases, by the way they go.
pub(crate) const WAYS: usize = 3;

pub(crate) fn len() -> usize {
    CASES.len()
}

/// The service behind, for either protocol.
async fn service() -> Upstream {
    let answer = |seen: &Seen| match seen.path() {
        "/head" => Answer::ok("").header("content-type", "text/plain"),
        "/echo" => Answer::ok(seen.body.clone()),
        "/count" => Answer::ok(seen.body.len().to_string()),
        "/repeated" => {
            Answer::ok("").header("set-cookie", "a=1").header("set-cookie", "b=2").header("vary", "x")
        }
        "/204" => Answer::new(204, ""),
        "/304" => Answer::new(304, "").header("etag", "\"x\""),
        "/500" => Answer::new(500, "broken"),
        "/big" => Answer::bytes(4 << 20),
        "/pieces" => Answer::chunks(["one", "two", "three"], Duration::from_millis(20)),
        "/events" => Answer::sse(["1", "2"], Duration::from_millis(20)),
        "/trailers" => Answer::chunks(["body"], Duration::ZERO).trailer("x-sum", "1"),
        "/grpc" => Answer::chunks(["\0\0\0\0\0"], Duration::ZERO)
            .header("content-type", "application/grpc")
            .trailer("grpc-status", "0"),
        "/cut" => Answer::cut_short(100, "part"),
        "/reset" => Answer::reset(),
        _ => Answer::ok("ok").header("content-type", "text/plain"),
    };
    Upstream::start(move |seen| answer(seen).header("date", "Tue, 01 Dec 2026 00:00:00 GMT")).await
}

/// Plays all of it and adds what is different.
pub(crate) async fn play(ours: &mut Found, theirs: &mut Found) {
    let upstream = service().await;
    let to_h1 = gateway(&upstream.url()).await;
    let to_h2 = gateway(&upstream.url().replace("http:", "h2c:")).await;
    let nginx = Nginx::proxy(upstream.addr()).await;
    let (h1, h2) = (Client::new as fn(SocketAddr) -> Client, Client::h2c as fn(SocketAddr) -> Client);
    for case in CASES {
        for (way, client, through, is_ours) in [
            ("HTTP/2 to HTTP/1.1", h2, to_h1, true),
            ("HTTP/2 to HTTP/2", h2, to_h2, true),
            ("HTTP/1.1 to HTTP/2", h1, to_h2, true),
            ("HTTP/2 to HTTP/1.1", h2, nginx.h2_addr(), false),
        ] {
            let direct = send(case, way, client(upstream.addr()), &upstream).await;
            let other = send(case, way, client(through), &upstream).await;
            let found = if is_ours { &mut *ours } else { &mut *theirs };
            for difference in differences(&direct, &other) {
                found.entry(difference).or_default().push(format!("{way}: {}", case.name));
            }
        }
    }
}

type Played = (Option<Seen>, Result<ClientResponse, String>);

async fn send(case: &Case, way: &str, client: Client, upstream: &Upstream) -> Played {
    let before = upstream.count();
    let mut request = client.request(Method::from_bytes(case.method.as_bytes()).unwrap(), case.path);
    request = request.header("host", "corpus.test");
    for header in case.headers {
        let (name, value) = *header;
        let key = format!("\"{way}\"");
        request = request.header(name, if *header == KEYED { &key } else { value });
    }
    let answer = with_body(request, case.body).await.map_err(|error| error.to_string());
    let seen = (upstream.count() > before).then(|| upstream.seen()[before].clone());
    (seen, answer)
}

async fn with_body(request: RequestBuilder, body: Body) -> anyhow::Result<ClientResponse> {
    match body {
        Body::None => request.send().await,
        Body::Whole(len) => request.body(testkit::upstream::pattern(len)).send().await,
        Body::Streamed | Body::Trailers => {
            let (frames, request) = request.frames();
            let sending = tokio::spawn(async move {
                for piece in ["one", "two", "three"] {
                    frames.send(Frame::data(Bytes::from_static(piece.as_bytes()))).await?;
                }
                if matches!(body, Body::Trailers) {
                    let mut trailers = HeaderMap::new();
                    trailers.insert("x-sum", HeaderValue::from_static("1"));
                    frames.send(Frame::trailers(trailers)).await?;
                }
                anyhow::Ok(())
            });
            let answer = request.send().await;
            sending.await??;
            answer
        }
    }
}

fn differences(direct: &Played, through: &Played) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    match (&direct.0, &through.0) {
        (Some(a), Some(b)) => messages("request", &request(a), &request(b), &mut found),
        (None, None) => {}
        _ => drop(found.insert("the request does not go on".into())),
    }
    match (&direct.1, &through.1) {
        (Ok(a), Ok(b)) => messages("reply", &reply(a), &reply(b), &mut found),
        (Err(_), Err(_)) => {}
        (Err(_), Ok(b)) => drop(found.insert(format!("silence becomes an answer: {}", b.status))),
        (Ok(_), Err(_)) => drop(found.insert("an answer is missing".into())),
    }
    found
}

/// The protocol itself is another on purpose; what it carries is compared.
pub(crate) fn message(start: String, headers: &HeaderMap, body: &Bytes, trailers: &HeaderMap) -> Message {
    let lines = |map: &HeaderMap| -> Vec<(String, String)> {
        map.iter().map(|(name, value)| (name.to_string(), latin1(value.as_bytes()))).collect()
    };
    let mut headers = lines(headers);
    // Framing is that of each connection.
    headers
        .retain(|(name, _)| !["transfer-encoding", "content-length", "connection"].contains(&name.as_str()));
    Message {
        start,
        headers,
        framing: Framing::None,
        body: body.to_vec(),
        extensions: false,
        trailers: lines(trailers),
        complete: true,
    }
}

fn request(seen: &Seen) -> Message {
    let mut headers = seen.headers.clone();
    if let Some(authority) = seen.uri.authority()
        && !headers.contains_key("host")
    {
        headers.insert("host", HeaderValue::from_str(authority.as_str()).unwrap());
    }
    message(format!("{} {} HTTP", seen.method, seen.path()), &headers, &seen.body, &seen.trailers)
}

fn reply(response: &ClientResponse) -> Message {
    message(format!("HTTP {} -", response.status), &response.headers, &response.body, &response.trailers)
}
