//! The upstream that believes nobody: every request that arrives runs, and is written down.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::history::{Execution, Sent};
use crate::random::Random;

/// What a caller posts.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Order {
    /// The operation's number.
    pub operation: usize,
    /// [`Order::AMOUNT`], or another in a changed body.
    pub amount: u64,
}

impl Order {
    /// What the operation is about.
    pub const AMOUNT: u64 = 100;

    /// The order as it is sent.
    pub fn new(operation: usize, sent: Sent) -> Self {
        Self { operation, amount: if sent == Sent::Original { Self::AMOUNT } else { Self::AMOUNT + 1 } }
    }

    /// What it was sent as.
    pub fn sent(self) -> Sent {
        if self.amount == Self::AMOUNT { Sent::Original } else { Sent::Changed }
    }
}

pub(crate) struct Ledger {
    addr: SocketAddr,
    book: Arc<Book>,
    accepting: JoinHandle<()>,
}

struct Book {
    began: Instant,
    seed: Random,
    // How long work may take at most.
    longest: Duration,
    executions: Mutex<Vec<Execution>>,
    count: AtomicUsize,
}

impl Ledger {
    /// Listens on a free loopback port.
    pub(crate) async fn start(began: Instant, seed: Random, longest: Duration) -> std::io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let addr = listener.local_addr()?;
        let book =
            Arc::new(Book { began, seed, longest, executions: Mutex::default(), count: AtomicUsize::new(0) });
        let its = Arc::clone(&book);
        let accepting = tokio::spawn(async move {
            loop {
                let Ok((stream, _)) = listener.accept().await else { continue };
                let book = Arc::clone(&its);
                // Work that began goes on when its caller is gone, as in most servers of the world: it is spawned.
                let service = service_fn(move |request| {
                    let book = Arc::clone(&book);
                    async move {
                        let done = tokio::spawn(async move { book.execute(request).await }).await;
                        Ok::<_, Infallible>(done.unwrap_or_else(|_| answer(500, Bytes::new())))
                    }
                });
                tokio::spawn(async move {
                    let _ = hyper::server::conn::http1::Builder::new()
                        .serve_connection(TokioIo::new(stream), service)
                        .await;
                });
            }
        });
        Ok(Self { addr, book, accepting })
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.addr)
    }

    /// What was written down since the last time that this was asked.
    pub(crate) fn take_executions(&self) -> Vec<Execution> {
        std::mem::take(&mut *self.book.executions.lock())
    }
}

impl Drop for Ledger {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

impl Book {
    async fn execute(&self, request: Request<Incoming>) -> Response<Full<Bytes>> {
        let Ok(body) = request.into_body().collect().await else { return answer(400, Bytes::new()) };
        let Ok(order) = serde_json::from_slice::<Order>(&body.to_bytes()) else {
            return answer(400, Bytes::new());
        };
        let mut random = self.seed.fork(order.operation as u64);
        // Written down when it begins: work that nobody hears of has happened all the same.
        let (number, said) = {
            let mut executions = self.executions.lock();
            let number = self.count.fetch_add(1, Ordering::SeqCst);
            let said = format!("{{\"operation\":{},\"execution\":{number}}}", order.operation);
            executions.push(Execution {
                operation: order.operation,
                number,
                sent: order.sent(),
                at: self.began.elapsed(),
                body: said.clone(),
            });
            (number, said)
        };
        let most = if random.percent(4) { self.longest } else { self.longest / 30 };
        tokio::time::sleep(random.between(Duration::ZERO, most)).await;
        let status = if random.percent(10) { 422 } else { 201 };
        let mut response = answer(status, said.into());
        let location = format!("/executions/{number}");
        if let Ok(value) = location.parse() {
            response.headers_mut().insert(http::header::LOCATION, value);
        }
        response
    }
}

fn answer(status: u16, body: Bytes) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(body));
    *response.status_mut() = http::StatusCode::from_u16(status).unwrap_or_default();
    let json = http::HeaderValue::from_static("application/json");
    response.headers_mut().insert(http::header::CONTENT_TYPE, json);
    response
}
