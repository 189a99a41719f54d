//! A gateway process: an engine and the layer on a runtime of its own, which is stepped, held, or dropped in the middle of
//! everything.

use std::collections::BTreeMap;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::routing::post;
use bytes::Bytes;
use http::{Request, Response};
use onlyonce_core::OnLeaseEnd;
use onlyonce_engine::Idempotency;
use onlyonce_http::IdempotencyLayer;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::oneshot;
use tokio::task::AbortHandle;
use tokio::time::{Instant, advance, sleep_until};
use tower_service::Service;

use crate::ledger::Ledger;
use crate::network::Network;
use crate::store::Remote;
use crate::{LEASE, STORE_TIMEOUT, WORK_TIMEOUT};

pub(crate) struct Process {
    network: Network,
    remote: Remote,
    ledger: Ledger,
    on_lease_end: OnLeaseEnd,
    wait: Duration,
    running: Option<Running>,
    held_until_ms: u64,
    dead_until_ms: u64,
}

struct Running {
    runtime: Stepped,
    router: Router,
    connections: BTreeMap<u64, AbortHandle>,
}

/// A runtime whose time goes on when it is told.
pub(crate) struct Stepped {
    pub(crate) runtime: Runtime,
    origin: Instant,
    began_ms: u64,
}

/// A request that arrived at a process.
pub(crate) struct Arrived {
    pub(crate) connection: u64,
    pub(crate) key: String,
    pub(crate) body: Bytes,
    pub(crate) to: oneshot::Sender<Response<Bytes>>,
}

impl Process {
    pub(crate) fn new(remote: Remote, ledger: Ledger, on_lease_end: OnLeaseEnd, wait: Duration) -> Self {
        let network = remote.network.clone();
        let (held_until_ms, dead_until_ms) = (0, 0);
        Self { network, remote, ledger, on_lease_end, wait, running: None, held_until_ms, dead_until_ms }
    }

    /// Everything that it does is gone at once; it is started again after that long.
    pub(crate) fn kill(&mut self, for_ms: u64) {
        self.running = None;
        self.dead_until_ms = self.network.now_ms() + for_ms;
    }

    /// It does nothing for that long, and does not know.
    pub(crate) fn hold(&mut self, for_ms: u64) {
        self.held_until_ms = self.network.now_ms() + for_ms;
    }

    /// One millisecond of its time.
    pub(crate) fn step(&mut self) {
        let now_ms = self.network.now_ms();
        let healed = self.network.is_healed();
        if !healed && self.dead_until_ms.max(self.held_until_ms) > now_ms {
            return;
        }
        if self.running.is_none() {
            self.running = Some(self.start());
        }
        if let Some(running) = &self.running {
            running.runtime.step(now_ms);
        }
    }

    fn start(&self) -> Running {
        let runtime = Stepped::new(self.network.now_ms());
        let inside = runtime.runtime.enter();
        let idem = Idempotency::builder(self.remote.clone())
            .clock(std::sync::Arc::new(self.network.clone()))
            .random(std::sync::Arc::new(self.network.clone()))
            .lease(LEASE)
            .retention(Duration::from_secs(3600))
            .on_lease_end(self.on_lease_end)
            .store_timeout(STORE_TIMEOUT)
            .work_timeout(WORK_TIMEOUT)
            .purge_interval(Duration::from_millis(150))
            .wait(self.wait)
            .build();
        let (ledger, network) = (self.ledger.clone(), self.network.clone());
        let handler = move |body: Bytes| {
            let (ledger, network) = (ledger.clone(), network.clone());
            async move { ledger.forward(network, body).await }
        };
        let layer = IdempotencyLayer::new(&idem).wait(self.wait).scope(|_| Some("merchant".into()));
        let router = Router::new().route("/orders", post(handler)).layer(layer);
        drop(inside);
        Running { runtime, router, connections: BTreeMap::new() }
    }

    /// A request arrives; nobody is there to take it where the process is dead.
    pub(crate) fn serve(&mut self, arrived: Arrived) {
        let Some(running) = &mut self.running else { return };
        let Arrived { connection, key, body, to } = arrived;
        let (network, mut router) = (self.network.clone(), running.router.clone());
        let task = running.runtime.runtime.spawn(async move {
            let request = Request::post("/orders")
                .header("content-type", "application/json")
                .header("idempotency-key", key)
                .body(Body::from(body))
                .unwrap();
            let (head, body) = router.call(request).await.unwrap().into_parts();
            let Ok(body) = to_bytes(body, usize::MAX).await else { return };
            let back_ms = network.draw(|random| random.draw() % 3);
            let response = Response::from_parts(head, body);
            network.after(back_ms, Box::new(move |_| drop(to.send(response))));
        });
        running.connections.retain(|_, task| !task.is_finished());
        running.connections.insert(connection, task.abort_handle());
    }

    /// The client is gone.
    pub(crate) fn hang_up(&mut self, connection: u64) {
        if let Some(task) = self.running.as_mut().and_then(|running| running.connections.remove(&connection))
        {
            task.abort();
        }
    }
}

impl Stepped {
    pub(crate) fn new(now_ms: u64) -> Self {
        let runtime = Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        let origin = runtime.block_on(async { Instant::now() });
        Self { runtime, origin, began_ms: now_ms }
    }

    /// Lets it work until this millisecond is over. One that was held finds its time gone, as a stopped process does.
    pub(crate) fn step(&self, now_ms: u64) {
        let millisecond = Duration::from_millis(1);
        let target = self.origin + Duration::from_millis(now_ms + 1 - self.began_ms);
        self.runtime.block_on(async {
            let behind = target.saturating_duration_since(Instant::now());
            if behind > millisecond {
                advance(behind - millisecond).await;
            }
            sleep_until(target).await;
        });
    }
}
