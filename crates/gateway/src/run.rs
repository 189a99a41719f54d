//! The gateway as a whole.

use std::future::Future;
use std::sync::Arc;
use std::sync::OnceLock;

use onlyonce_core::Store;
use onlyonce_engine::{Builder, Idempotency};
use onlyonce_http::IdempotencyLayer;
use tokio::net::TcpListener;
use tokio::time::Instant;
use tower_layer::Layer;

use crate::options::GatewayOptions;
use crate::proxy::ProxyService;
use crate::server::{Drained, serve_with};
use crate::workers::Workers;

/// The engine of a gateway on this store: an unknown outcome is held, since a proxy cannot know that an upstream is safe
/// to repeat, and the work may take as long as the upstream. Everything else is the builder's to set.
pub fn engine(store: Arc<dyn Store>, options: &GatewayOptions) -> Builder {
    Idempotency::builder_for(store).hold().work_timeout(options.work_timeout())
}

/// Serves until `stop` is over: guarded requests run once, everything else passes through.
///
/// `layer` must be made on `idem`.
///
/// # Guarantees
/// Those of [`serve`](crate::serve). Operations that run when `stop` comes get what is left of `options.shutdown_timeout`, their
/// clients present or not; those that outlive it keep their leases and are not released.
pub async fn run(
    listener: TcpListener,
    options: &GatewayOptions,
    idem: &Idempotency,
    layer: &IdempotencyLayer,
    stop: impl Future<Output = ()>,
) -> Drained {
    let stopped_at = OnceLock::new();
    let stop = async {
        stop.await;
        stopped_at.get_or_init(Instant::now);
    };
    let mut workers = Workers::start(options.workers).await;
    let service = layer.layer(ProxyService::new(options));
    let drained = serve_with(&mut workers, listener, service, options, stop).await;
    let spent = stopped_at.get().map_or_else(Default::default, Instant::elapsed);
    // Operations whose clients are gone run on the workers.
    let operations_left = idem.shutdown(options.shutdown_timeout.saturating_sub(spent)).await;
    workers.end().await;
    Drained { operations_left, ..drained }
}
