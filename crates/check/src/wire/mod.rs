//! The client: a fresh connection for each request, no redirects, every byte and every wait bounded.

mod request;
mod splice;
mod tls;

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, Method, Request};
use http_body_util::{BodyExt, Empty};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::clock::{self, Instant};
use crate::target::Endpoint;

pub(crate) use request::Call;
use splice::Splice;
pub(crate) use tls::TlsSetup;

/// An answer longer than this is not read to its end.
const ANSWER_BYTES_MAX: usize = 32 * 1024 * 1024;

/// What came back, its body read to the end.
#[derive(Clone, Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
    /// From the last byte of the request to the last byte of the answer.
    pub(crate) took: Duration,
    pub(crate) done: Instant,
}

/// Why there is no whole answer.
#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum NoAnswer {
    #[error("no connection: {0}")]
    Connect(#[source] Arc<io::Error>),
    #[error("no answer within {0:?}")]
    Timeout(Duration),
    #[error("the connection ended without an answer: {}", with_sources(&**.0))]
    Closed(#[source] Arc<dyn std::error::Error + Send + Sync>),
    #[error("the answer {status} broke off after {received} bytes of its body")]
    Short { status: u16, received: usize },
    #[error("the answer {status} is longer than {ANSWER_BYTES_MAX} bytes")]
    TooLong { status: u16 },
}

/// A limit of the whole run was reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Exhausted {
    #[error("the time for the whole run was over")]
    Time,
    #[error("the number of requests for the whole run was reached")]
    Requests,
}

/// How much a run may still send, and until when.
#[derive(Debug)]
pub(crate) struct Budget {
    started: Instant,
    time_max: Duration,
    requests_max: u32,
    sent: AtomicU32,
}

impl Budget {
    pub(crate) fn new(time_max: Duration, requests_max: u32) -> Self {
        Self { started: clock::now(), time_max, requests_max, sent: AtomicU32::new(0) }
    }

    /// Takes one request.
    fn take(&self) -> Result<(), Exhausted> {
        self.check_time()?;
        // One too many is given back, so that the count stays that of what was sent.
        if self.sent.fetch_add(1, Ordering::Relaxed) >= self.requests_max {
            self.sent.fetch_sub(1, Ordering::Relaxed);
            return Err(Exhausted::Requests);
        }
        Ok(())
    }

    pub(crate) fn check_time(&self) -> Result<(), Exhausted> {
        if self.time_left().is_zero() { Err(Exhausted::Time) } else { Ok(()) }
    }

    pub(crate) fn time_left(&self) -> Duration {
        self.time_max.saturating_sub(self.elapsed())
    }

    pub(crate) fn sent(&self) -> u32 {
        self.sent.load(Ordering::Relaxed)
    }

    pub(crate) fn elapsed(&self) -> Duration {
        clock::now().saturating_duration_since(self.started)
    }
}

pub(super) type Stream = Pin<Box<dyn Duplex>>;
pub(super) trait Duplex: AsyncRead + AsyncWrite + Send {}
impl<T: AsyncRead + AsyncWrite + Send> Duplex for T {}

/// A client of one endpoint.
#[derive(Clone, Debug)]
pub(crate) struct Wire {
    endpoint: Endpoint,
    tls: Option<TlsSetup>,
    timeout: Duration,
    budget: Arc<Budget>,
}

/// How much of a request is written before the client goes away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Until {
    /// The head and half of the body.
    HalfOfBody,
    /// All of it.
    End,
}

impl Wire {
    pub(crate) fn new(
        endpoint: Endpoint,
        tls: Option<TlsSetup>,
        timeout: Duration,
        budget: Arc<Budget>,
    ) -> Self {
        Self { endpoint, tls, timeout, budget }
    }

    pub(crate) fn budget(&self) -> &Budget {
        &self.budget
    }

    /// Sends a request and reads its answer.
    pub(crate) async fn send(&self, call: &Call) -> Result<Result<Answer, NoAnswer>, Exhausted> {
        self.budget.take()?;
        Ok(self.exchange(call).await)
    }

    async fn exchange(&self, call: &Call) -> Result<Answer, NoAnswer> {
        let mut stream = self.connect().await?;
        let head = call.head(&self.endpoint.authority());
        let started = clock::now();
        // Boxed, as are the others: a trial holds many exchanges, and hyper's state is large.
        let whole = Box::pin(async {
            // A server may refuse before the end of a long body: then its answer counts, not the failed write.
            let written = write(&mut stream, &[&head, &call.body]).await;
            match read_answer(stream, &call.method, started).await {
                Err(NoAnswer::Closed(_)) if written.is_err() => Err(closed(written.expect_err("checked"))),
                answer => answer,
            }
        });
        timeout(self.timeout, whole).await.unwrap_or(Err(NoAnswer::Timeout(self.timeout)))
    }

    /// Writes all but the last byte. [`Armed::fire`] sends that: many requests then arrive together.
    pub(crate) async fn arm(&self, call: &Call) -> Result<Result<Armed, NoAnswer>, Exhausted> {
        self.budget.take()?;
        let mut message = call.head(&self.endpoint.authority());
        message.extend_from_slice(&call.body);
        let last = message.split_off(message.len() - 1);
        let armed = async {
            let mut stream = self.connect().await?;
            write(&mut stream, &[&message]).await.map_err(closed)?;
            Ok(Armed { stream, last, method: call.method.clone(), timeout: self.timeout })
        };
        Ok(armed.await)
    }

    /// Writes a request as far as `until`; dropping the result is the client that goes away.
    pub(crate) async fn begin(
        &self,
        call: &Call,
        until: Until,
    ) -> Result<Result<Begun, NoAnswer>, Exhausted> {
        self.budget.take()?;
        let head = call.head(&self.endpoint.authority());
        let body = match until {
            Until::HalfOfBody => &call.body[..call.body.len() / 2],
            Until::End => &call.body[..],
        };
        let begun = async {
            let mut stream = self.connect().await?;
            write(&mut stream, &[&head, body]).await.map_err(closed)?;
            Ok(Begun { _stream: stream })
        };
        Ok(timeout(self.timeout, begun).await.unwrap_or(Err(NoAnswer::Timeout(self.timeout))))
    }

    /// Whether anybody listens; nothing is sent.
    pub(crate) async fn reach(&self) -> Result<(), NoAnswer> {
        self.connect().await.map(drop)
    }

    async fn connect(&self) -> Result<Stream, NoAnswer> {
        let connect = async {
            let stream = TcpStream::connect((self.endpoint.dial_host(), self.endpoint.port)).await?;
            stream.set_nodelay(true)?;
            match &self.tls {
                None => Ok(Box::pin(stream) as Stream),
                Some(tls) => Ok(Box::pin(tls.handshake(stream).await?) as Stream),
            }
        };
        match timeout(self.timeout, connect).await {
            Ok(connected) => connected.map_err(|error| NoAnswer::Connect(Arc::new(error))),
            Err(_) => Err(NoAnswer::Timeout(self.timeout)),
        }
    }
}

/// A request of which one byte is missing.
pub(crate) struct Armed {
    stream: Stream,
    last: Vec<u8>,
    method: Method,
    timeout: Duration,
}

impl Armed {
    /// Sends the last byte and reads the answer.
    pub(crate) async fn fire(mut self) -> Result<Answer, NoAnswer> {
        let started = clock::now();
        let whole = Box::pin(async {
            // The connection may be closed by now; reading says so.
            let _ = write(&mut self.stream, &[&self.last]).await;
            read_answer(self.stream, &self.method, started).await
        });
        timeout(self.timeout, whole).await.unwrap_or(Err(NoAnswer::Timeout(self.timeout)))
    }
}

/// A request that nobody reads the answer of.
pub(crate) struct Begun {
    _stream: Stream,
}

async fn write(stream: &mut Stream, parts: &[&[u8]]) -> io::Result<()> {
    for part in parts {
        stream.write_all(part).await?;
    }
    stream.flush().await
}

async fn read_answer(stream: Stream, method: &Method, started: Instant) -> Result<Answer, NoAnswer> {
    let (mut sender, connection) =
        http1::handshake(TokioIo::new(Splice::new(stream))).await.map_err(closed)?;
    let request = Request::builder()
        .method(method.clone())
        .uri("/")
        .header("host", "x")
        .body(Empty::<Bytes>::new())
        .expect("a constant request is valid");
    let answer = async {
        let response = sender.send_request(request).await.map_err(closed)?;
        collect(response, started).await
    };
    tokio::pin!(answer);
    tokio::pin!(connection);
    tokio::select! {
        biased;
        answer = &mut answer => answer,
        // Its error reaches the answer too.
        _ = &mut connection => answer.await,
    }
}

async fn collect(response: http::Response<Incoming>, started: Instant) -> Result<Answer, NoAnswer> {
    let (head, mut body) = response.into_parts();
    let status = head.status.as_u16();
    let mut whole = BytesMut::new();
    while let Some(frame) = body.frame().await {
        let Ok(frame) = frame else { return Err(NoAnswer::Short { status, received: whole.len() }) };
        if let Ok(data) = frame.into_data() {
            whole.extend_from_slice(&data);
        }
        if whole.len() > ANSWER_BYTES_MAX {
            return Err(NoAnswer::TooLong { status });
        }
    }
    let done = clock::now();
    let took = done.saturating_duration_since(started);
    Ok(Answer { status, headers: head.headers, body: whole.freeze(), took, done })
}

/// What hyper says is no more than "connection error"; what it was is behind that.
fn with_sources(error: &(dyn std::error::Error + 'static)) -> String {
    let sources = std::iter::successors(Some(error), |error| error.source());
    let mut texts: Vec<String> = sources.map(ToString::to_string).collect();
    texts.dedup();
    texts.join(": ")
}

fn closed(error: impl std::error::Error + Send + Sync + 'static) -> NoAnswer {
    NoAnswer::Closed(Arc::new(error))
}
