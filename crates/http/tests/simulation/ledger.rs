//! The service behind: it runs whatever arrives, and writes it down.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use http::Response;
use onlyonce_http::{Code, Ending};
use onlyonce_prove::{Execution, Order};
use parking_lot::Mutex;
use tokio::sync::oneshot;
use tokio::time::timeout;

use crate::network::Network;
use crate::{LEASE, UPSTREAM_TIMEOUT};

#[derive(Clone, Default)]
pub(crate) struct Ledger {
    executions: Arc<Mutex<Vec<Execution>>>,
    began_ms: u64,
}

impl Ledger {
    pub(crate) fn new(began_ms: u64) -> Self {
        Self { executions: Arc::default(), began_ms }
    }

    pub(crate) fn executions(&self) -> Vec<Execution> {
        self.executions.lock().clone()
    }

    /// What a gateway does: sends the request on, and says how it ended.
    pub(crate) async fn forward(self, network: Network, body: Bytes) -> Response<Body> {
        let order: Order = serde_json::from_slice(&body).unwrap();
        let healed = network.is_healed();
        let (chance, there_ms) = network.draw(|random| (random.draw() % 100, random.draw() % 4));
        if !healed && chance == 0 {
            return ended(Ending::Transient(Some(Code::UpstreamUnreachable)));
        }
        let (to, answer) = oneshot::channel();
        let its = network.clone();
        let arrive = move |_: &mut [_]| {
            let (work_ms, reply) = self.execute(order, &its);
            let back = Box::new(move |_: &mut [_]| match chance {
                // The work is done, and its answer breaks off.
                1 if !healed => drop(to),
                _ => drop(to.send(reply)),
            });
            its.after(work_ms, back);
        };
        network.after(there_ms, Box::new(arrive));
        match timeout(UPSTREAM_TIMEOUT, answer).await {
            Ok(Ok((status, body))) => Response::builder()
                .status(status)
                .header("content-type", "application/json")
                .body(Body::from(body))
                .unwrap(),
            // Nobody knows what became of it.
            Ok(Err(_)) | Err(_) => ended(Ending::Unknown(Some(Code::OutcomeUnknown))),
        }
    }

    // Written down when it arrives: work that nobody hears of has happened all the same.
    fn execute(&self, order: Order, network: &Network) -> (u64, (u16, String)) {
        let mut executions = self.executions.lock();
        let number = executions.len();
        let body = format!("{{\"operation\":{},\"execution\":{number}}}", order.operation);
        let at = Duration::from_millis(network.now_ms() - self.began_ms);
        let (operation, sent) = (order.operation, order.sent());
        executions.push(Execution { operation, number, sent, at, body: body.clone() });
        network.draw(|random| {
            let longest_ms = LEASE.as_millis() as u64 * 5 / 2;
            let work_ms = random.draw() % if random.percent(8) { longest_ms } else { 12 };
            (work_ms, (if random.percent(10) { 422 } else { 201 }, body))
        })
    }
}

fn ended(ending: Ending) -> Response<Body> {
    let mut response = Response::new(Body::empty());
    response.extensions_mut().insert(ending);
    response
}
