//! `onlyonce serve`: the gateway.

mod banner;
mod log;
mod options;

use std::sync::Arc;

use onlyonce_core::{OnLeaseEnd, Store};
use onlyonce_engine::{Idempotency, Limits, Policy};
use onlyonce_gateway::{GatewayOptions, ProxyService, serve};
use onlyonce_http::{IdempotencyLayer, OnStoreFailure};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};

use crate::failure::Failure;
pub(crate) use options::Serve;

impl Serve {
    pub(crate) fn run(self) -> Result<(), Failure> {
        let runtime = super::runtime(tokio::runtime::Builder::new_multi_thread())?;
        // Kept to the end: dropped, it writes what is still queued.
        let _log = log::start(self.log);
        runtime.block_on(self.serve())
    }

    async fn serve(self) -> Result<(), Failure> {
        // Everything that can be wrong is found before anything is opened or bound.
        let options = self.gateway_options();
        let policy = self.policy(&options)?;
        let scope = self.scope_source()?;
        let secret = self.scope_secret()?;
        let store = self.store.open().await?;
        let capabilities = store.capabilities();
        if self.require_durable && !capabilities.durable {
            let hazard = capabilities.hazard.unwrap_or_default();
            return Err(Failure::Refused(format!(
                "the store is not durable, and --require-durable is given: {hazard}"
            )));
        }
        let listener = TcpListener::bind(options.listen)
            .await
            .map_err(|error| Failure::io(&format!("cannot listen on {}", options.listen), &error))?;
        let address = listener.local_addr().map_err(|error| Failure::io("the listener", &error))?;

        let idempotency = self.engine(store, policy)?;
        banner::print(&self, &capabilities, idempotency.policy());
        let stop = stop_signal()?;
        // The line that says it is ready is the last of the banner; its form is relied on by scripts.
        eprintln!("listening on http://{address}");
        let drained = if self.unguarded {
            serve(listener, ProxyService::new(&options), &options, stop).await
        } else {
            let mut layer = self.layer(&idempotency).scope_source(scope);
            if let Some(secret) = secret {
                layer = layer.scope_secret(secret);
            }
            onlyonce_gateway::run(listener, &options, &idempotency, &layer, stop).await
        };
        if drained.connections_cut > 0 || drained.operations_left > 0 {
            eprintln!(
                "stopped: {} connection(s) cut; {} guarded operation(s) still running keep their leases",
                drained.connections_cut, drained.operations_left
            );
        }
        Ok(())
    }

    fn engine(&self, store: Arc<dyn Store>, policy: Policy) -> Result<Idempotency, Failure> {
        let limits =
            Limits { max_in_flight: self.max_in_flight, cache_bytes: self.cache_bytes, ..Limits::default() };
        Idempotency::builder_for(store)
            .policy(policy)
            .limits(limits)
            .try_build()
            .map_err(|error| Failure::Usage(error.to_string()))
    }

    fn policy(&self, options: &GatewayOptions) -> Result<Policy, Failure> {
        let policy = Policy {
            lease: self.lease,
            retention: self.retention,
            wait: self.wait,
            on_lease_end: self.on_unknown.on_lease_end(),
            max_attempts: self.max_attempts,
            // The gateway's work is the call of the upstream.
            work_timeout: options.work_timeout(),
        };
        policy.check().map_err(|error| Failure::Usage(error.to_string()))?;
        Ok(policy)
    }

    fn gateway_options(&self) -> GatewayOptions {
        GatewayOptions {
            connect_timeout: self.connect_timeout,
            upstream_timeout: self.upstream_timeout,
            header_timeout: self.header_timeout,
            body_timeout: self.body_timeout,
            max_header_bytes: self.max_header_bytes,
            max_connections: self.max_connections,
            shutdown_timeout: self.shutdown_timeout,
            docs_url: self.docs_url.clone(),
            ..GatewayOptions::new(self.listen, self.upstream.clone())
        }
    }

    fn layer(&self, idempotency: &Idempotency) -> IdempotencyLayer {
        let mut layer = IdempotencyLayer::new(idempotency)
            .preset(self.preset)
            .fingerprint(self.fingerprint.definition())
            .max_request_body(self.max_request_body)
            .body_timeout(self.body_timeout)
            .max_stored_body(self.max_stored_body)
            .max_buffered(self.buffer_budget)
            .on_store_failure(self.on_store_failure())
            .join_traces()
            .report(log::request);
        if self.optional {
            layer = layer.optional();
        }
        if self.expires {
            layer = layer.advertise_expiry();
        }
        if let Some(docs) = &self.docs_url {
            layer = layer.docs_url(docs.clone());
        }
        layer
    }
}

impl Serve {
    fn on_store_failure(&self) -> OnStoreFailure {
        if self.fail_open { OnStoreFailure::RunUnguarded } else { OnStoreFailure::FailClosed }
    }
}

/// SIGTERM or Ctrl-C; a Ctrl-C after that waits for nothing.
fn stop_signal() -> Result<impl Future<Output = ()>, Failure> {
    let error = |error| Failure::io("waiting for signals", &error);
    let mut terminate = signal(SignalKind::terminate()).map_err(error)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(error)?;
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        eprintln!("stopping: no new connections; waiting for what runs (Ctrl-C ends it at once)");
        tokio::spawn(async move {
            interrupt.recv().await;
            eprintln!("ended at once: what runs keeps its lease");
            std::process::exit(130);
        });
    })
}

/// What a retry gets after an outcome that nobody knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum OnUnknown {
    /// 409 outcome-unknown until an operator resolves it or the late owner comes back
    Hold,
    /// It runs again after the lease: for upstreams that tell a repeated key themselves
    Retry,
}

impl OnUnknown {
    fn on_lease_end(self) -> OnLeaseEnd {
        match self {
            Self::Hold => OnLeaseEnd::Hold,
            Self::Retry => OnLeaseEnd::TakeOver,
        }
    }
}
