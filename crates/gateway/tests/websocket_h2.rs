//! H23: WebSocket with HTTP/2 on either side (RFC 8441), in the words of each side.

#![allow(clippy::unwrap_used, reason = "a failing test says where")]

mod common;

use std::convert::Infallible;
use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use common::{Gateway, QUIET};
use http::{HeaderMap, Method, Request, Response, StatusCode};
use http_body_util::Empty;
use hyper::body::Incoming;
use hyper::client::conn::http2::SendRequest;
use hyper::ext::Protocol;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use parking_lot::Mutex;
use testkit::{RawConnection, RawUpstream, send_raw, wait_for, wait_until, within};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

const HANDSHAKE: &str = "GET /chat?x=1 HTTP/1.1\r\nHost: h\r\nConnection: keep-alive, Upgrade\r\nUpgrade: websocket\r\n\
                         Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\
                         Sec-WebSocket-Protocol: chat\r\n\r\n";

/// A service of HTTP/2 that echoes through a WebSocket, if it takes one.
struct Service {
    addr: SocketAddr,
    seen: Arc<Mutex<Vec<(Method, String, HeaderMap)>>>,
}

impl Service {
    async fn start(takes: bool) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let log = seen.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let mut builder = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
                if takes {
                    builder.enable_connect_protocol();
                }
                let log = log.clone();
                let service = service_fn(move |request| std::future::ready(serve(request, &log)));
                tokio::spawn(builder.serve_connection(TokioIo::new(stream), service));
            }
        });
        Self { addr, seen }
    }

    fn url(&self) -> String {
        format!("h2c://{}", self.addr)
    }
}

type Seen = Mutex<Vec<(Method, String, HeaderMap)>>;

fn serve(mut request: Request<Incoming>, seen: &Seen) -> Result<Response<Empty<Bytes>>, Infallible> {
    let path = request.uri().path_and_query().map(ToString::to_string).unwrap_or_default();
    seen.lock().push((request.method().clone(), path.clone(), request.headers().clone()));
    let mut response = Response::new(Empty::new());
    let protocol = request.extensions().get::<Protocol>().map(|p| p.as_str().to_owned());
    if protocol.as_deref() != Some("websocket") {
        *response.status_mut() = StatusCode::UPGRADE_REQUIRED;
    } else if path == "/refused" {
        *response.status_mut() = StatusCode::FORBIDDEN;
    } else {
        response.headers_mut().insert("sec-websocket-protocol", "chat".parse().unwrap());
        let upgrade = hyper::upgrade::on(&mut request);
        tokio::spawn(async move {
            let mut tunnel = TokioIo::new(upgrade.await.unwrap());
            let mut buffer = [0; 4];
            while tunnel.read_exact(&mut buffer).await.is_ok() {
                tunnel.write_all(&buffer).await.unwrap();
            }
        });
    }
    Ok(response)
}

/// A client of HTTP/2, once the gateway has said that it takes extended CONNECT.
async fn client(addr: SocketAddr) -> SendRequest<Empty<Bytes>> {
    let stream = TcpStream::connect(addr).await.unwrap();
    let builder = hyper::client::conn::http2::Builder::new(TokioExecutor::new());
    let (sender, connection) = builder.handshake::<_, Empty<Bytes>>(TokioIo::new(stream)).await.unwrap();
    let connection = Arc::new(Mutex::new(Box::pin(connection)));
    let driven = connection.clone();
    tokio::spawn(std::future::poll_fn(move |cx| driven.lock().as_mut().poll(cx)));
    wait_until("extended CONNECT is on offer", || connection.lock().is_extended_connect_protocol_enabled())
        .await;
    sender
}

fn connect(path: &str) -> Request<Empty<Bytes>> {
    let mut request = Request::new(Empty::new());
    *request.method_mut() = Method::CONNECT;
    *request.uri_mut() = format!("http://h{path}").parse().unwrap();
    request.headers_mut().insert("sec-websocket-version", "13".parse().unwrap());
    request.headers_mut().insert("sec-websocket-protocol", "chat".parse().unwrap());
    request.extensions_mut().insert(Protocol::from_static("websocket"));
    request
}

async fn echoes(response: &mut Response<Incoming>) {
    let mut tunnel = TokioIo::new(within("the tunnel is up", hyper::upgrade::on(response)).await.unwrap());
    for round in 0..50u8 {
        let message = [round, 0xff, 0, 13];
        tunnel.write_all(&message).await.unwrap();
        let mut back = [0; 4];
        within("an echo", tunnel.read_exact(&mut back)).await.unwrap();
        assert_eq!(back, message);
    }
}

#[tokio::test]
async fn a_client_of_http_1_reaches_a_service_of_http_2() {
    let service = Service::start(true).await;
    let gateway = Gateway::start(&service.url()).await;
    let mut client = RawConnection::open(gateway.addr).await;
    client.write(HANDSHAKE).await;
    let head = String::from_utf8(client.read_head().await.unwrap()).unwrap().to_lowercase();
    assert!(head.starts_with("http/1.1 101"), "{head}");
    for line in [
        "connection: upgrade\r\n",
        "upgrade: websocket\r\n",
        "sec-websocket-accept: s3pplmbitxaq9kygzzhzrbk+xoo=\r\n",
        "sec-websocket-protocol: chat\r\n",
    ] {
        assert!(head.contains(line), "{line} not in {head}");
    }
    for round in 0..50u8 {
        let message = [round, 0xff, 0, 13];
        client.write(message).await;
        assert_eq!(client.read_exact(4).await.unwrap(), message);
    }
    let (method, path, headers) = service.seen.lock()[0].clone();
    assert_eq!((method, path.as_str()), (Method::CONNECT, "/chat?x=1"));
    assert!(!headers.contains_key("sec-websocket-key") && !headers.contains_key("upgrade"), "{headers:?}");
    assert_eq!(headers["sec-websocket-version"], "13");
    assert_eq!(headers["x-forwarded-for"], "127.0.0.1");
}

#[tokio::test]
async fn a_client_of_http_2_reaches_a_service_of_http_1_and_its_connection_goes_on() {
    let upstream = RawUpstream::start(|_, mut connection| async move {
        let head = String::from_utf8(connection.read_head().await.unwrap()).unwrap();
        if !head.to_lowercase().contains("upgrade: websocket") {
            connection.write("HTTP/1.1 204 No Content\r\n\r\n").await;
            return;
        }
        if head.contains("/refused") {
            connection.write("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello").await;
            return;
        }
        let key = head.lines().find_map(|line| line.strip_prefix("sec-websocket-key: ")).unwrap();
        let accept = match head.contains("/wrong") {
            true => "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=".to_owned(),
            false => accept(key),
        };
        let answer = format!(
            "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
             Sec-WebSocket-Accept: {accept}\r\nSec-WebSocket-Protocol: chat\r\n\r\n"
        );
        connection.write(answer).await;
        while let Some(bytes) = connection.read_exact(4).await {
            connection.write(bytes).await;
        }
    })
    .await;
    let gateway = Gateway::start(&upstream.url()).await;
    let mut client = client(gateway.addr).await;
    let mut response = client.send_request(connect("/chat?x=1")).await.unwrap();
    assert_eq!(response.status(), 200);
    assert_eq!(response.headers()["sec-websocket-protocol"], "chat");
    assert!(!response.headers().contains_key("sec-websocket-accept"), "{:?}", response.headers());
    echoes(&mut response).await;
    let get = Request::get("http://h/plain").body(Empty::new()).unwrap();
    assert_eq!(client.send_request(get).await.unwrap().status(), 204, "beside the tunnel");
    assert!(upstream.text().starts_with("GET /chat?x=1 HTTP/1.1\r\n"), "{}", upstream.text());
    let wrong = client.send_request(connect("/wrong")).await.unwrap();
    assert_eq!(wrong.status(), 502, "a yes to another key");
    let no = client.send_request(connect("/refused")).await.unwrap();
    assert_eq!(no.status(), 502, "a 2xx would say that the tunnel is there");
}

/// As RFC 6455 has it, by another hand than the gateway's.
fn accept(key: &str) -> String {
    let script = "import sys,hashlib,base64;\
                  print(base64.b64encode(hashlib.sha1((sys.argv[1]+'258EAFA5-E914-47DA-95CA-C5AB0DC85B11').encode()).digest()).decode())";
    let output = std::process::Command::new("python3").args(["-c", script, key.trim()]).output().unwrap();
    assert!(output.status.success(), "python3: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

#[tokio::test]
async fn http_2_on_both_sides_passes_it_on_and_a_refusal_too() {
    let service = Service::start(true).await;
    let gateway = Gateway::start(&service.url()).await;
    let mut client = client(gateway.addr).await;
    let mut response = client.send_request(connect("/chat")).await.unwrap();
    assert_eq!(response.status(), 200);
    echoes(&mut response).await;
    let refused = client.send_request(connect("/refused")).await.unwrap();
    assert_eq!(refused.status(), 403);
    let back =
        String::from_utf8(send_raw(gateway.addr, HANDSHAKE.replace("/chat?x=1", "/refused"), QUIET).await);
    assert!(back.unwrap().starts_with("HTTP/1.1 403"));
}

#[tokio::test]
async fn a_service_of_http_2_without_websocket_gets_a_plain_request() {
    let service = Service::start(false).await;
    let gateway = Gateway::start(&service.url()).await;
    let back = String::from_utf8(send_raw(gateway.addr, HANDSHAKE, 8 * QUIET).await).unwrap();
    assert!(back.starts_with("HTTP/1.1 426"), "{back}");
    assert_eq!(service.seen.lock()[0].0, Method::GET);
    let mut client = client(gateway.addr).await;
    let response = client.send_request(connect("/chat")).await.unwrap();
    assert_eq!(response.status(), 502, "there is no plain form of it");
}

#[tokio::test]
async fn the_end_of_either_side_ends_the_tunnel() {
    let service = Service::start(true).await;
    let gateway = Gateway::start(&service.url()).await;
    let mut client = RawConnection::open(gateway.addr).await;
    client.write(HANDSHAKE).await;
    client.read_head().await.unwrap();
    client.write("ping").await;
    assert_eq!(client.read_exact(4).await.unwrap(), b"ping");
    client.shutdown().await;
    // The service sees the end, ends its side, and the gateway closes.
    assert_eq!(client.read_to_end().await, b"");
    let plain = wait_for("the connection behind still serves", async || {
        let response = gateway.client().get("/plain").send().await.ok()?;
        (response.status == 426).then_some(())
    });
    plain.await;
}
