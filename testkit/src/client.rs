//! A small HTTP client over hyper's connections: no pool, no retry, nothing hidden.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result};
use bytes::Bytes;
use futures_util::StreamExt;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, Version};
use http_body::Frame;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::Incoming;
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::net::TcpStream;
use tokio::sync::mpsc;

use crate::PATIENCE;

/// Sends each request on a connection of its own. Cheap to copy, so a thousand tasks may use one.
#[derive(Clone, Copy, Debug)]
pub struct Client {
    addr: SocketAddr,
    h2c: bool,
}

impl Client {
    /// Speaks HTTP/1.1.
    pub fn new(addr: SocketAddr) -> Self {
        Self { addr, h2c: false }
    }

    /// Speaks HTTP/2 with prior knowledge.
    pub fn h2c(addr: SocketAddr) -> Self {
        Self { addr, h2c: true }
    }

    /// A connection that is kept: for keep-alive, and for HTTP/2 streams side by side.
    ///
    /// # Errors
    /// When nobody listens.
    pub async fn connect(&self) -> Result<Connection> {
        let stream = TcpStream::connect(self.addr).await.context("connect")?;
        stream.set_nodelay(true)?;
        let io = TokioIo::new(stream);
        let sender = if self.h2c {
            let mut builder = http2::Builder::new(TokioExecutor::new());
            let (sender, connection) = builder.timer(TokioTimer::new()).handshake(io).await?;
            tokio::spawn(connection);
            Sender::H2(sender)
        } else {
            let (sender, connection) = http1::handshake(io).await?;
            tokio::spawn(connection.with_upgrades());
            Sender::H1(sender)
        };
        Ok(Connection { sender, addr: self.addr })
    }

    /// A GET of this path.
    pub fn get(&self, path: &str) -> RequestBuilder {
        self.request(Method::GET, path)
    }

    /// A POST to this path.
    pub fn post(&self, path: &str) -> RequestBuilder {
        self.request(Method::POST, path)
    }

    /// A request.
    pub fn request(&self, method: Method, path: &str) -> RequestBuilder {
        RequestBuilder::new(*self, method, path)
    }
}

/// A request in the making.
#[derive(Debug)]
pub struct RequestBuilder {
    client: Client,
    method: Method,
    path: String,
    headers: HeaderMap,
    body: UnsyncBoxBody<Bytes, std::convert::Infallible>,
}

impl RequestBuilder {
    fn new(client: Client, method: Method, path: &str) -> Self {
        let body = UnsyncBoxBody::new(Full::default());
        Self { client, method, path: path.to_owned(), headers: HeaderMap::new(), body }
    }

    /// Adds a header line. `Host` is set when not given; over HTTP/2 it is the authority.
    ///
    /// # Panics
    /// On a name or value that is no header.
    #[must_use]
    pub fn header(mut self, name: &str, value: impl AsRef<[u8]>) -> Self {
        self.headers.append(
            HeaderName::from_bytes(name.as_bytes()).expect("a header name"),
            HeaderValue::from_bytes(value.as_ref()).expect("a header value"),
        );
        self
    }

    /// The idempotency key.
    #[must_use]
    pub fn key(self, key: &str) -> Self {
        self.header("idempotency-key", key)
    }

    /// A body with a Content-Length.
    #[must_use]
    pub fn body(mut self, body: impl Into<Bytes>) -> Self {
        self.body = UnsyncBoxBody::new(Full::new(body.into()));
        self
    }

    /// A JSON body.
    #[must_use]
    pub fn json(self, value: &serde_json::Value) -> Self {
        self.header("content-type", "application/json").body(value.to_string())
    }

    /// A streamed body without a Content-Length: each message is a chunk, dropping the sender ends it. At most one
    /// chunk waits, so the sender feels backpressure.
    #[must_use]
    pub fn stream(self) -> (mpsc::Sender<Bytes>, Self) {
        let (sender, builder) = self.frames();
        let (data, mut queue) = mpsc::channel::<Bytes>(1);
        tokio::spawn(async move {
            while let Some(piece) = queue.recv().await {
                if sender.send(Frame::data(piece)).await.is_err() {
                    return;
                }
            }
        });
        (data, builder)
    }

    /// A streamed body given frame by frame, for trailers (announce them by `Trailer`).
    #[must_use]
    pub fn frames(mut self) -> (mpsc::Sender<Frame<Bytes>>, Self) {
        let (sender, receiver) = mpsc::channel::<Frame<Bytes>>(1);
        let frames = futures_util::stream::unfold(receiver, async |mut receiver| {
            receiver.recv().await.map(|frame| (frame, receiver))
        });
        self.body = UnsyncBoxBody::new(StreamBody::new(frames.map(Ok)));
        (sender, self)
    }

    /// Sends it on a new connection and reads the whole response.
    ///
    /// # Errors
    /// When the connection fails, the response is cut short, or nothing comes within [`PATIENCE`].
    pub async fn send(self) -> Result<ClientResponse> {
        tokio::time::timeout(PATIENCE, async { self.send_streaming().await?.whole().await })
            .await
            .context("no response in time")?
    }

    /// Sends it on a new connection and returns with the response head.
    ///
    /// # Errors
    /// When the connection fails or no head comes within [`PATIENCE`].
    pub async fn send_streaming(self) -> Result<StreamingResponse> {
        let mut connection = self.client.connect().await?;
        self.send_on(&mut connection).await
    }

    /// Sends it on `connection` and returns with the response head.
    ///
    /// # Errors
    /// When the connection fails or no head comes within [`PATIENCE`].
    pub async fn send_on(self, connection: &mut Connection) -> Result<StreamingResponse> {
        let h2c = matches!(connection.sender, Sender::H2(_));
        let mut headers = self.headers;
        let target = if h2c {
            let host = headers.remove("host");
            let addr = connection.addr.to_string();
            let authority = host.as_ref().map_or(Ok(addr.as_str()), HeaderValue::to_str)?;
            format!("http://{authority}{}", self.path)
        } else {
            self.path.clone()
        };
        let mut request = Request::builder().method(self.method).uri(target).body(self.body)?;
        *request.headers_mut() = headers;
        if !h2c && !request.headers().contains_key("host") {
            request.headers_mut().insert("host", HeaderValue::from_str(&connection.addr.to_string())?);
        }
        let response = tokio::time::timeout(PATIENCE, async {
            match &mut connection.sender {
                Sender::H1(sender) => {
                    sender.ready().await?;
                    sender.send_request(request).await
                }
                Sender::H2(sender) => sender.clone().send_request(request).await,
            }
        });
        StreamingResponse::new(response.await.context("no response head in time")??)
    }
}

type OutgoingBody = UnsyncBoxBody<Bytes, std::convert::Infallible>;

/// A connection kept open until dropped.
#[derive(Debug)]
pub struct Connection {
    sender: Sender,
    addr: SocketAddr,
}

#[derive(Debug)]
enum Sender {
    H1(http1::SendRequest<OutgoingBody>),
    H2(http2::SendRequest<OutgoingBody>),
}

impl Connection {
    /// Sends a request and reads the whole response.
    ///
    /// # Errors
    /// When the connection fails, the response is cut short, or nothing comes within [`PATIENCE`].
    pub async fn send(&mut self, request: RequestBuilder) -> Result<ClientResponse> {
        request.send_on(self).await?.whole().await
    }

    /// Whether the peer closed it.
    pub fn is_closed(&self) -> bool {
        match &self.sender {
            Sender::H1(sender) => sender.is_closed(),
            Sender::H2(sender) => sender.is_closed(),
        }
    }
}

/// A whole response.
#[derive(Clone, Debug)]
pub struct ClientResponse {
    /// The status.
    pub status: u16,
    /// The protocol version.
    pub version: Version,
    /// The headers; values of one name in their order.
    pub headers: HeaderMap,
    /// The body.
    pub body: Bytes,
    /// The trailers.
    pub trailers: HeaderMap,
}

impl ClientResponse {
    /// The first value of a header, as text.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).and_then(|v| v.to_str().ok())
    }

    /// All values of a header, in their order.
    pub fn header_all(&self, name: &str) -> Vec<&str> {
        self.headers.get_all(name).iter().filter_map(|v| v.to_str().ok()).collect()
    }

    /// The body as text.
    ///
    /// # Panics
    /// When it is not UTF-8.
    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.body).expect("a UTF-8 body")
    }

    /// The body as JSON.
    ///
    /// # Panics
    /// When it is not JSON.
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).expect("a JSON body")
    }

    /// The `code` member of a problem document; empty when there is none.
    pub fn code(&self) -> String {
        let body = serde_json::from_slice::<serde_json::Value>(&self.body).unwrap_or_default();
        body["code"].as_str().unwrap_or_default().to_owned()
    }
}

/// A response whose body is still to come.
#[derive(Debug)]
pub struct StreamingResponse {
    /// The status.
    pub status: StatusCode,
    /// The headers.
    pub headers: HeaderMap,
    response: Response<Incoming>,
}

impl StreamingResponse {
    fn new(response: Response<Incoming>) -> Result<Self> {
        Ok(Self { status: response.status(), headers: response.headers().clone(), response })
    }

    /// The next piece of the body, `None` at its end.
    ///
    /// # Errors
    /// When the body is cut short, or nothing comes within [`PATIENCE`].
    pub async fn chunk(&mut self) -> Result<Option<Bytes>> {
        loop {
            match self.frame_within(PATIENCE).await.context("no piece of the body in time")?? {
                None => return Ok(None),
                Some(frame) => match frame.into_data() {
                    Ok(data) => return Ok(Some(data)),
                    Err(_) => continue,
                },
            }
        }
    }

    async fn frame_within(&mut self, bound: Duration) -> Option<Result<Option<Frame<Bytes>>>> {
        let frame = tokio::time::timeout(bound, self.response.body_mut().frame()).await.ok()?;
        Some(frame.transpose().map_err(Into::into))
    }

    /// Reads the rest.
    ///
    /// # Errors
    /// When the body is cut short.
    pub async fn whole(self) -> Result<ClientResponse> {
        let (head, body) = self.response.into_parts();
        let collected = tokio::time::timeout(PATIENCE, body.collect()).await.context("no end in time")??;
        let trailers = collected.trailers().cloned().unwrap_or_default();
        Ok(ClientResponse {
            status: head.status.as_u16(),
            version: head.version,
            headers: head.headers,
            body: collected.to_bytes(),
            trailers,
        })
    }

    /// The response itself, for an upgrade.
    pub fn into_inner(self) -> Response<Incoming> {
        self.response
    }
}
