//! `onlyonce serve`: the gateway.

mod args;
mod banner;
mod config;
mod explain_route;
mod files;
mod fingerprint;
mod log;
mod voice;

use std::net::SocketAddr;
use std::sync::Arc;

use onlyonce_core::{Store, StoreAdmin};
use onlyonce_engine::{Idempotency, Policy};
use onlyonce_gateway::{Admin, GatewayOptions, ProxyService, Verdicts, serve};
use onlyonce_http::IdempotencyLayer;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};

use crate::failure::Failure;
pub(crate) use args::Serve;
pub(crate) use config::with_file;
use voice::Voice;

impl Serve {
    pub(crate) fn run(self) -> Result<(), Failure> {
        if let Some(route) = &self.explain_route {
            return explain_route::print(&self, route);
        }
        let runtime = super::runtime(tokio::runtime::Builder::new_multi_thread())?;
        // Kept to the end: dropped, it writes what is still queued.
        let _log = log::start(self.log);
        let voice = Voice::of(self.log);
        runtime.block_on(self.serve(voice)).map_err(|failure| voice.failed(failure))
    }

    async fn serve(self, voice: Voice) -> Result<(), Failure> {
        // Everything that can be wrong is found before anything is opened or bound.
        let options = self.gateway_options()?;
        let policy = self.policy.checked(options.work_timeout())?;
        self.limits.check()?;
        let layer = self.layer()?;
        let admin = self.admin.listener()?;
        let (store, note) = self.store.open().await?;
        let capabilities = store.capabilities();
        if self.require_durable && !capabilities.durable {
            let hazard = capabilities.hazard.unwrap_or_default();
            return Err(Failure::Refused(format!(
                "the store is not durable, and --require-durable is given: {hazard}"
            )));
        }
        let (listener, address) = bind(options.listen).await?;
        let admin_listener = match admin {
            Some((addr, token)) => Some((bind(addr).await?, token)),
            None => None,
        };

        let idempotency = self.engine(store.clone(), policy)?;
        let verdicts = Verdicts::default();
        let layer = layer(&idempotency, store.clone(), verdicts.clone());
        let files = files::hazard(files::raise_limit(), options.max_connections);
        let mut hazards = banner::hazards(&self, &capabilities);
        hazards.extend([note, files].into_iter().flatten());
        voice.banner(&banner::told(&self, &options, &capabilities, idempotency.policy()), &hazards);
        let admin = admin_listener.map(|((listener, addr), token)| {
            voice.admin(&format!("http://{addr}"));
            let counters = &options.counters;
            let admin = match self.guard.unguarded {
                true => Admin::of_proxy(counters, token),
                false => Admin::of_gateway(counters, &idempotency, &layer, &verdicts, store, token),
            };
            (tokio::spawn(admin.clone().serve(listener)), admin)
        });
        let signalled = stop_signal(voice)?;
        let stop = async {
            signalled.await;
            if let Some((_, admin)) = &admin {
                admin.stopping();
            }
        };
        // The line that says it is ready is the last of the banner; its form is relied on by scripts.
        voice.say(&format!("listening on http://{address}"));
        let drained = if self.guard.unguarded {
            serve(listener, ProxyService::new(&options), &options, stop).await
        } else {
            onlyonce_gateway::run(listener, &options, &idempotency, &layer, stop).await
        };
        if let Some((serving, _)) = admin {
            serving.abort();
        }
        if drained.connections_cut > 0 || drained.operations_left > 0 {
            voice.say(&format!(
                "stopped: {} connection(s) cut; {} guarded operation(s) still running keep their leases",
                drained.connections_cut, drained.operations_left
            ));
        }
        Ok(())
    }

    fn engine(&self, store: Arc<dyn Store>, policy: Policy) -> Result<Idempotency, Failure> {
        Idempotency::builder_for(store)
            .policy(policy)
            .limits(self.limits.of_engine())
            .try_build()
            .map_err(|error| Failure::Usage(error.to_string()))
    }

    fn gateway_options(&self) -> Result<GatewayOptions, Failure> {
        let options = self.limits.of_gateway(self.network.options()?);
        Ok(GatewayOptions {
            key_header: self.guard.key_header.clone(),
            docs_url: self.policy.docs_url.clone(),
            cors: self.browsers.cors()?,
            ..options
        })
    }

    /// What makes the layer, once there is an engine and a store; what can be wrong about it is found before.
    fn layer(
        &self,
    ) -> Result<impl FnOnce(&Idempotency, Arc<dyn StoreAdmin>, Verdicts) -> IdempotencyLayer + use<'_>, Failure>
    {
        let (definition, secret) = self.guard.check()?;
        let cors = self.browsers.cors()?;
        Ok(move |idempotency: &Idempotency, store, verdicts: Verdicts| {
            let layer = IdempotencyLayer::new(idempotency).join_traces().report(move |report| {
                verdicts.count(report);
                log::request(report);
            });
            let layer = self.guard.apply(layer, definition, secret);
            let mut layer = self.limits.apply(self.policy.apply(layer));
            if let Some(cors) = cors {
                layer = layer.cors(cors);
            }
            if self.policy.status_lookup { layer.status_lookup(store) } else { layer }
        })
    }
}

/// A listener, and where it really is.
async fn bind(addr: SocketAddr) -> Result<(TcpListener, SocketAddr), Failure> {
    let listener = TcpListener::bind(addr).await;
    let listener = listener.map_err(|error| Failure::io(&format!("cannot listen on {addr}"), &error))?;
    let address = listener.local_addr().map_err(|error| Failure::io("the listener", &error))?;
    Ok((listener, address))
}

/// SIGTERM or Ctrl-C; a Ctrl-C after that waits for nothing.
fn stop_signal(voice: Voice) -> Result<impl Future<Output = ()>, Failure> {
    let error = |error| Failure::io("waiting for signals", &error);
    let mut terminate = signal(SignalKind::terminate()).map_err(error)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(error)?;
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        voice.say("stopping: no new connections; waiting for what runs (Ctrl-C ends it at once)");
        tokio::spawn(async move {
            interrupt.recv().await;
            voice.say("ended at once: what runs keeps its lease");
            std::process::exit(130);
        });
    })
}
