//! Callers that retry as real ones do: too early, at once, elsewhere, with a changed body, and late.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::future::join_all;
use futures_util::stream;
use http::{Request, Response, header};
use http_body_util::{BodyExt, Full, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep, timeout};

use crate::fleet::Fleet;
use crate::history::{Answer, Event, Sent};
use crate::ledger::Order;
use crate::random::Random;

/// More of a body than this is not read.
const BODY_BYTES_MAX: usize = 64 * 1024;

/// How often an operation is tried while things break; what is open then is settled afterwards.
const TRIES: usize = 8;

pub(crate) struct Callers {
    pub(crate) fleet: Arc<Fleet>,
    pub(crate) began: Instant,
    /// Part of every key: two runs on one store do not meet.
    pub(crate) run: String,
    pub(crate) path: String,
    /// Whether the answers are those of our gateway, which says itself what they are.
    pub(crate) ours: bool,
    pub(crate) events: Mutex<Vec<Event>>,
    pub(crate) begun: AtomicUsize,
}

impl Callers {
    /// One caller, at work until `end`.
    pub(crate) async fn work(&self, mut random: Random, end: Instant) {
        while Instant::now() < end {
            let operation = self.begun.fetch_add(1, Ordering::SeqCst);
            self.perform(operation, &mut random, end).await;
            // Somebody comes back to something old.
            if random.percent(20) {
                let old = random.below(operation + 1);
                self.ask(old, Sent::Original, &mut random).await;
            }
        }
    }

    async fn perform(&self, operation: usize, random: &mut Random, end: Instant) {
        for _ in 0..TRIES {
            let copies = if random.percent(25) { 2 + random.below(3) } else { 1 };
            let streams: Vec<_> = (0..copies).map(|copy| random.fork(copy as u64 + 1)).collect();
            random.next();
            let asked = streams
                .into_iter()
                .map(|mut random| async move { self.ask(operation, Sent::Original, &mut random).await });
            let answers = join_all(asked).await;
            if answers.iter().any(Answer::is_reply) {
                // Only now: a changed body that comes first is the operation.
                if random.percent(20) {
                    self.ask(operation, Sent::Changed, random).await;
                }
                if random.percent(70) {
                    return;
                }
            } else if answers.iter().any(|answer| answer.is_code("outcome-unknown")) {
                return;
            }
            if Instant::now() >= end {
                return;
            }
            sleep(random.between(Duration::from_millis(5), Duration::from_millis(400))).await;
        }
    }

    /// After healing: until each operation is answered, or known to be unknown; then each once more. Answers how many.
    pub(crate) async fn converge(&self, random: &Random, at_once: usize, deadline: Instant) {
        let count = self.begun.load(Ordering::SeqCst);
        let settle = |operation: usize| {
            let mut random = random.fork(operation as u64);
            async move {
                loop {
                    let answer = self.patiently(operation, &mut random).await;
                    if answer.is_reply() || answer.is_code("outcome-unknown") || Instant::now() >= deadline {
                        return;
                    }
                    sleep(Duration::from_millis(100)).await;
                }
            }
        };
        stream::iter((0..count).map(settle)).buffer_unordered(at_once).collect::<()>().await;
        let again = |operation: usize| {
            let mut random = random.fork(!(operation as u64));
            async move {
                self.patiently(operation, &mut random).await;
            }
        };
        stream::iter((0..count).map(again)).buffer_unordered(at_once).collect::<()>().await;
    }

    async fn ask(&self, operation: usize, sent: Sent, random: &mut Random) -> Answer {
        // Some give up long before the work is done.
        let patience = *random.pick(&[60, 400, 1500, 10_000, 10_000]);
        let gateway = random.below(self.fleet.count());
        self.send(operation, sent, gateway, Duration::from_millis(patience)).await
    }

    async fn patiently(&self, operation: usize, random: &mut Random) -> Answer {
        let gateway = random.below(self.fleet.count());
        self.send(operation, Sent::Original, gateway, Duration::from_secs(30)).await
    }

    async fn send(&self, operation: usize, sent: Sent, gateway: usize, patience: Duration) -> Answer {
        let key = format!("prove-{}-{operation}", self.run);
        let body = serde_json::to_vec(&Order::new(operation, sent)).unwrap_or_default();
        let began = self.began.elapsed();
        let answered = timeout(patience, self.exchange(self.fleet.addr(gateway), &key, body.into())).await;
        let answer = match answered {
            Ok(Ok(answer)) => answer,
            Ok(Err(why)) => Answer::Lost(why),
            Err(_) => Answer::Lost(format!("the client gave up after {} ms", patience.as_millis())),
        };
        let event =
            Event { operation, gateway, sent, began, ended: self.began.elapsed(), answer: answer.clone() };
        self.events.lock().push(event);
        answer
    }

    // A connection of its own: one that broke is no excuse.
    async fn exchange(&self, addr: SocketAddr, key: &str, body: Bytes) -> Result<Answer, String> {
        let stream = TcpStream::connect(addr).await.map_err(|error| format!("connect: {error}"))?;
        let (mut sender, connection) =
            http1::handshake(TokioIo::new(stream)).await.map_err(|error| error.to_string())?;
        let request = Request::post(&*self.path)
            .header(header::HOST, addr.to_string())
            .header(header::CONTENT_TYPE, "application/json")
            .header("idempotency-key", key)
            .body(Full::new(body))
            .map_err(|error| error.to_string())?;
        let exchange = async {
            let response = sender.send_request(request).await.map_err(|error| error.to_string())?;
            let (head, body) = response.into_parts();
            let body =
                Limited::new(body, BODY_BYTES_MAX).collect().await.map_err(|error| error.to_string())?;
            Ok(self.read(&Response::from_parts(head, body.to_bytes())))
        };
        tokio::select! {
            answer = exchange => answer,
            // It ends when the exchange does, or breaks before.
            broken = connection => match broken {
                Ok(()) => Err("the connection was closed".into()),
                Err(error) => Err(error.to_string()),
            },
        }
    }

    fn read(&self, response: &Response<Bytes>) -> Answer {
        let status = response.status().as_u16();
        let is = |name: &str, value: &str| {
            response.headers().get(name).is_some_and(|found| found.as_bytes() == value.as_bytes())
        };
        let refused = |code: &str| Answer::Refused { status, code: code.to_owned() };
        if self.ours && is("content-type", "application/problem+json") {
            let problem: serde_json::Value = serde_json::from_slice(response.body()).unwrap_or_default();
            return refused(problem["code"].as_str().unwrap_or_default());
        }
        if !self.ours && !response.status().is_success() {
            // The words of the draft, for servers that say it by the status alone.
            return refused(match status {
                409 => "in-progress",
                422 => "key-reused",
                429 | 500.. => "overloaded",
                _ => "",
            });
        }
        Answer::Reply {
            status,
            body: String::from_utf8_lossy(response.body()).into_owned(),
            replayed: is("idempotency-replayed", "true"),
            unrecorded: is("idempotency-status", "not-recorded"),
        }
    }
}
