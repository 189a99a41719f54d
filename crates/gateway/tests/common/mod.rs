//! A gateway in this process, behind a real socket.
#![allow(dead_code, reason = "each test file uses a part")]

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use onlyonce_core::Store;
use onlyonce_engine::Builder;
use onlyonce_gateway::{ClientBody, Drained, GatewayOptions, ProxyService, engine, run, serve};
use onlyonce_http::IdempotencyLayer;
use testkit::{Client, within};
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

pub(crate) struct Gateway {
    pub(crate) addr: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    serving: JoinHandle<Drained>,
}

impl Gateway {
    pub(crate) async fn start(upstream: &str) -> Self {
        Self::with(upstream, |_| {}).await
    }

    pub(crate) async fn with(upstream: &str, change: impl FnOnce(&mut GatewayOptions)) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let mut options = GatewayOptions::new(addr, upstream.parse().unwrap());
        change(&mut options);
        let (stop, stopped) = oneshot::channel::<()>();
        let serving = tokio::spawn(async move {
            let service = ProxyService::<ClientBody>::new(&options);
            serve(listener, service, &options, async { drop(stopped.await) }).await
        });
        Self { addr, stop: Some(stop), serving }
    }

    /// The whole gateway, on this store.
    pub(crate) async fn guarded(
        upstream: &str,
        store: Arc<dyn Store>,
        change: impl FnOnce(&mut GatewayOptions),
        build: impl FnOnce(Builder) -> Builder,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let mut options = GatewayOptions::new(addr, upstream.parse().unwrap());
        change(&mut options);
        let idem = build(engine(store, &options)).build();
        let (stop, stopped) = oneshot::channel::<()>();
        let serving = tokio::spawn(async move {
            let layer = IdempotencyLayer::new(&idem).body_timeout(options.body_timeout);
            run(listener, &options, &idem, &layer, async { drop(stopped.await) }).await
        });
        Self { addr, stop: Some(stop), serving }
    }

    pub(crate) fn client(&self) -> Client {
        Client::new(self.addr)
    }

    pub(crate) fn h2c(&self) -> Client {
        Client::h2c(self.addr)
    }

    /// The stop signal, without waiting.
    pub(crate) fn signal(&mut self) {
        drop(self.stop.take());
    }

    pub(crate) async fn drained(self) -> Drained {
        within("the server returns", self.serving).await.unwrap()
    }
}

/// How long silence must last to count as the end of what a peer says.
pub(crate) const QUIET: Duration = Duration::from_millis(500);
