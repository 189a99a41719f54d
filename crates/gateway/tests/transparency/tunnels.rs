//! WebSocket with HTTP/2 on either side (RFC 8441): echo, goodbyes and refusals, each asked for in the words of its protocol.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http::{HeaderMap, Method, Request, Response, StatusCode, Version};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::ext::Protocol;
use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use parking_lot::Mutex;
use sha1::{Digest, Sha1};
use testkit::{Nginx, within};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::compare::messages;
use crate::h2::message;
use crate::wire::Message;
use crate::{Found, gateway};

/// What the client asks for, and what goes through the tunnel.
#[derive(Clone, Copy, Debug)]
struct Case {
    name: &'static str,
    path: &'static str,
    headers: &'static [(&'static str, &'static str)],
    /// Pieces that the client sends, each followed by its echo.
    pieces: &'static [usize],
    /// The client ends its side, and reads on.
    ends: bool,
}

const fn case(name: &'static str, path: &'static str) -> Case {
    Case { name, path, headers: &[], pieces: &[], ends: false }
}

impl Case {
    const fn headers(mut self, headers: &'static [(&'static str, &'static str)]) -> Self {
        self.headers = headers;
        self
    }

    const fn echo(mut self, pieces: &'static [usize]) -> Self {
        self.pieces = pieces;
        self.ends = true;
        self
    }
}

const CASES: &[Case] = &[
    case("WebSocket: echo", "/echo?x=1").echo(&[11, 1, 125]),
    case("WebSocket: many bytes at once", "/echo").echo(&[1 << 20]),
    case("WebSocket: protocol and extensions", "/echo")
        .headers(&[
            ("sec-websocket-protocol", "chat, superchat"),
            ("sec-websocket-extensions", "permessage-deflate"),
            ("origin", "https://app.test"),
            ("cookie", "sid=1"),
        ])
        .echo(&[6]),
    case("WebSocket: the service speaks first and ends", "/greets"),
    case("WebSocket: refused", "/refused"),
    case("WebSocket: a redirect", "/moved"),
];

/// How many ways each goes.
pub(crate) const WAYS: usize = 3;

pub(crate) fn len() -> usize {
    CASES.len()
}

/// Plays all of it and adds what is different.
pub(crate) async fn play(ours: &mut Found, theirs: &mut Found) {
    let service = Service::start().await;
    let to_h1 = gateway(&format!("http://{}", service.addr)).await;
    let to_h2 = gateway(&format!("h2c://{}", service.addr)).await;
    let nginx = Nginx::proxy(service.addr).await;
    for case in CASES {
        for (way, by, through, is_ours) in [
            ("HTTP/2 to HTTP/1.1", By::Connect, to_h1, true),
            ("HTTP/2 to HTTP/2", By::Connect, to_h2, true),
            ("HTTP/1.1 to HTTP/2", By::Upgrade, to_h2, true),
            ("HTTP/2 to HTTP/1.1", By::Connect, nginx.h2_addr(), false),
        ] {
            let direct = service.play(case, by, service.addr).await;
            assert!(
                direct.is_offered && direct.request.is_some(),
                "{}: nothing on the direct way",
                case.name
            );
            let other = service.play(case, by, through).await;
            let found = if is_ours { &mut *ours } else { &mut *theirs };
            for difference in differences(direct, other) {
                found.entry(difference).or_default().push(format!("{way}: {}", case.name));
            }
        }
    }
}

/// In which words a tunnel is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum By {
    Upgrade,
    Connect,
}

/// What was seen of one case at both ends.
struct Played {
    is_offered: bool,
    request: Option<(By, Message)>,
    reply: Option<Message>,
    /// What the client got, all of it and then the end.
    tunnel: Vec<u8>,
    /// What the service got.
    arrived: Vec<u8>,
}

fn differences(direct: Played, through: Played) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    if direct.is_offered != through.is_offered {
        found.insert(
            "a WebSocket over HTTP/2 is not on offer: nothing is said of extended CONNECT (RFC 8441 §3)"
                .into(),
        );
        return found;
    }
    match (direct.request, through.request) {
        (Some((asked, a)), Some((passed_on, b))) => {
            match (asked, passed_on) {
                (By::Connect, By::Upgrade) => {
                    found.insert("an extended CONNECT goes on as an `Upgrade`".into())
                }
                (By::Upgrade, By::Connect) => {
                    found.insert("an `Upgrade` goes on as an extended CONNECT".into())
                }
                _ => false,
            };
            messages("request", &a, &b, &mut found);
        }
        _ => drop(found.insert("the request does not go on".into())),
    }
    match (&direct.reply, &through.reply) {
        (Some(a), Some(b)) => messages("reply", a, b, &mut found),
        _ => drop(found.insert("an answer is missing".into())),
    }
    if direct.tunnel != through.tunnel || direct.arrived != through.arrived {
        found.insert("bytes in the tunnel are changed".into());
    }
    found
}

/// The service behind, for either protocol.
struct Service {
    addr: SocketAddr,
    stage: Arc<Stage>,
}

#[derive(Default)]
struct Stage {
    requests: Mutex<Vec<(By, Message)>>,
    arrived: Mutex<Vec<u8>>,
}

impl Service {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let stage = Arc::<Stage>::default();
        let shared = stage.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serve(stream, shared.clone()));
            }
        });
        Self { addr, stage }
    }

    async fn play(&self, case: &Case, by: By, to: SocketAddr) -> Played {
        self.stage.requests.lock().clear();
        self.stage.arrived.lock().clear();
        let mut played =
            Played { is_offered: true, request: None, reply: None, tunnel: Vec::new(), arrived: Vec::new() };
        match within("an answer", ask(case, by, to)).await {
            None => played.is_offered = false,
            Some(mut response) => {
                let switched = response.status() == StatusCode::SWITCHING_PROTOCOLS
                    || by == By::Connect && response.status().is_success();
                if switched {
                    let tunnel = hyper::upgrade::on(&mut response).await.unwrap();
                    played.tunnel = within("the tunnel ends", talk(case, tunnel)).await;
                }
                let (head, body) = response.into_parts();
                let body = if switched { Bytes::new() } else { body.collect().await.unwrap().to_bytes() };
                let start = format!("HTTP {} -", head.status.as_u16());
                played.reply = Some(message(start, &head.headers, &body, &HeaderMap::new()));
            }
        }
        played.request = self.stage.requests.lock().pop();
        played.arrived.clone_from(&self.stage.arrived.lock());
        played
    }
}

async fn serve(stream: TcpStream, stage: Arc<Stage>) {
    let mut first = [0; 3];
    let is_h2 = stream.peek(&mut first).await.is_ok() && first == *b"PRI";
    let service = service_fn(move |request| std::future::ready(answer(request, &stage)));
    let io = TokioIo::new(stream);
    // Clients that go away are no concern of the service's.
    if is_h2 {
        let mut builder = http2::Builder::new(TokioExecutor::new());
        let _ = builder.enable_connect_protocol().serve_connection(io, service).await;
    } else {
        let _ = http1::Builder::new().serve_connection(io, service).with_upgrades().await;
    }
}

fn answer(mut request: Request<Incoming>, stage: &Arc<Stage>) -> Result<Response<Full<Bytes>>, Infallible> {
    let mut response = Response::new(Full::default());
    response.headers_mut().insert("date", "Tue, 01 Dec 2026 00:00:00 GMT".parse().unwrap());
    let Some((by, seen, key)) = asked(&request) else {
        return Ok(response);
    };
    stage.requests.lock().push((by, seen));
    let path = request.uri().path().to_owned();
    if path == "/refused" || path == "/moved" {
        *response.status_mut() = if path == "/moved" { StatusCode::FOUND } else { StatusCode::FORBIDDEN };
        response.headers_mut().insert("location", "/elsewhere".parse().unwrap());
        *response.body_mut() = Full::from("no");
        return Ok(response);
    }
    if request.headers().contains_key("sec-websocket-protocol") {
        response.headers_mut().insert("sec-websocket-protocol", "chat".parse().unwrap());
        response.headers_mut().insert("sec-websocket-extensions", "permessage-deflate".parse().unwrap());
    }
    if by == By::Upgrade {
        *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
        for (name, value) in
            [("connection", "upgrade"), ("upgrade", "websocket"), ("sec-websocket-accept", &accept(&key))]
        {
            response.headers_mut().insert(name, value.parse().unwrap());
        }
    }
    let upgrade = hyper::upgrade::on(&mut request);
    let stage = stage.clone();
    tokio::spawn(async move {
        let mut tunnel = TokioIo::new(upgrade.await.unwrap());
        if path == "/greets" {
            tunnel.write_all(b"\x81\x05hello\x88\x02\x03\xe8").await.unwrap();
            tunnel.shutdown().await.unwrap();
        }
        let mut buffer = vec![0; 64 * 1024];
        while let Ok(len @ 1..) = tunnel.read(&mut buffer).await {
            stage.arrived.lock().extend_from_slice(&buffer[..len]);
            tunnel.write_all(&buffer[..len]).await.unwrap();
        }
        if path != "/greets" {
            tunnel.write_all(b"bye").await.unwrap();
            tunnel.shutdown().await.unwrap();
        }
    });
    Ok(response)
}

/// A request for a tunnel: in which words, what it says beside them, and its key. `None`: it is none.
fn asked(request: &Request<Incoming>) -> Option<(By, Message, String)> {
    let connects = request.extensions().get::<Protocol>().is_some_and(|p| p.as_str() == "websocket");
    let mut headers = request.headers().clone();
    let mut taken = |name: &str| headers.remove(name).map(|value| value.to_str().unwrap().to_owned());
    // Of one protocol's words alone: what each has to be is looked at here.
    let (key, upgrade) = (taken("sec-websocket-key"), taken("upgrade"));
    let by = match (connects, &key, upgrade.as_deref()) {
        (true, None, None) => By::Connect,
        (false, Some(key), Some("websocket")) if STANDARD.decode(key).is_ok_and(|key| key.len() == 16) => {
            assert_eq!((request.method(), request.version()), (&Method::GET, Version::HTTP_11));
            By::Upgrade
        }
        _ => return None,
    };
    if let Some(authority) = request.uri().authority() {
        headers.entry("host").or_insert(authority.as_str().parse().unwrap());
    }
    let path = request.uri().path_and_query().unwrap();
    let seen = message(format!("WEBSOCKET {path} HTTP"), &headers, &Bytes::new(), &HeaderMap::new());
    Some((by, seen, key.unwrap_or_default()))
}

/// RFC 6455 §4.2.2.
fn accept(key: &str) -> String {
    STANDARD.encode(Sha1::digest(format!("{key}258EAFA5-E914-47DA-95CA-C5AB0DC85B11")))
}

/// Asks for the tunnel; `None` when it is not on offer.
async fn ask(case: &Case, by: By, to: SocketAddr) -> Option<Response<Incoming>> {
    let io = TokioIo::new(TcpStream::connect(to).await.unwrap());
    let mut request = Request::new(Full::<Bytes>::default());
    let headers = request.headers_mut();
    headers.insert("sec-websocket-version", "13".parse().unwrap());
    for (name, value) in case.headers {
        headers.append(*name, value.parse().unwrap());
    }
    match by {
        By::Upgrade => {
            headers.insert("host", "corpus.test".parse().unwrap());
            headers.insert("connection", "Upgrade".parse().unwrap());
            headers.insert("upgrade", "websocket".parse().unwrap());
            headers.insert("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ==".parse().unwrap());
            *request.uri_mut() = case.path.parse().unwrap();
            let (mut sender, connection) = hyper::client::conn::http1::handshake(io).await.unwrap();
            tokio::spawn(connection.with_upgrades());
            Some(sender.send_request(request).await.unwrap())
        }
        By::Connect => {
            *request.method_mut() = Method::CONNECT;
            *request.uri_mut() = format!("http://corpus.test{}", case.path).parse().unwrap();
            request.extensions_mut().insert(Protocol::from_static("websocket"));
            let executor = TokioExecutor::new();
            let (mut sender, connection) = hyper::client::conn::http2::handshake(executor, io).await.unwrap();
            let connection = Arc::new(Mutex::new(Box::pin(connection)));
            let driven = connection.clone();
            tokio::spawn(std::future::poll_fn(move |cx| driven.lock().as_mut().poll(cx)));
            // Its settings come before its first answer.
            let first = Request::get("http://corpus.test/").body(Full::default()).unwrap();
            sender.send_request(first).await.unwrap();
            let is_offered = connection.lock().is_extended_connect_protocol_enabled();
            if !is_offered {
                return None;
            }
            Some(sender.send_request(request).await.unwrap())
        }
    }
}

/// What comes back, to its end.
async fn talk(case: &Case, tunnel: hyper::upgrade::Upgraded) -> Vec<u8> {
    let mut tunnel = TokioIo::new(tunnel);
    let mut came = Vec::new();
    for len in case.pieces {
        let sent = testkit::upstream::pattern(*len);
        let (mut reader, mut writer) = tokio::io::split(&mut tunnel);
        let mut back = vec![0; *len];
        // At once, or each side's buffers fill up.
        let (written, read) = tokio::join!(writer.write_all(&sent), reader.read_exact(&mut back));
        written.unwrap();
        read.unwrap();
        came.extend(back);
    }
    if case.ends {
        tunnel.shutdown().await.unwrap();
    }
    tunnel.read_to_end(&mut came).await.unwrap();
    came
}
