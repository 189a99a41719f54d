//! The gateway: idempotency keys in front of any HTTP API.
//!
//! | module | what it holds |
//! |---|---|
//! | [`run`](mod@run) | [`run()`]: the gateway as a whole; [`engine`]: its engine |
//! | [`options`] | [`GatewayOptions`]: addresses, times and limits |
//! | [`routes`] | [`Routes`]: which requests are guarded, and why |
//! | [`server`] | [`serve`]: listener, connections, graceful shutdown |
//! | [`proxy`] | [`ProxyService`]: forwards one request to the upstream, and tells the layer when it failed |
//! | [`tls`] | TLS to the upstream; [`ClientTls`]: whom it is trusted by |
//! | [`trust`] | [`TrustedProxies`]: whose word is taken for where a request came from |
//! | [`admin`] | [`Admin`]: the operator's listener, health and metrics |
//! | [`counters`] | [`Counters`]: what happened |
//! | [`body`] | [`UpstreamBody`]: a response body, streamed |
//!
//! Inside: `admission` (between a connection and the service), `client_body` (what is done with what nobody reads of it), `forward` (which headers go on), `pool` and `upstream` (connections), `websocket` and `tunnel` (WebSocket), `socket` and
//! `exchange` (the client's end: times, interim answers, half-closed clients), `problem` (refusals), `workers` (the threads).
//!
//! ```no_run
//! use std::sync::Arc;
//!
//! use onlyonce_core::MemoryStore;
//! use onlyonce_gateway::{GatewayOptions, engine, run};
//! use onlyonce_http::IdempotencyLayer;
//!
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! let options = GatewayOptions::new("127.0.0.1:8080".parse()?, "http://127.0.0.1:3000".parse()?);
//! let idem = engine(Arc::new(MemoryStore::new()), &options).try_build()?;
//! let listener = tokio::net::TcpListener::bind(options.listen).await?;
//! let stop = async { tokio::time::sleep(std::time::Duration::from_secs(3600)).await };
//! run(listener, &options, &idem, &IdempotencyLayer::new(&idem), stop).await;
//! # Ok(())
//! # }
//! ```

pub mod admin;
pub mod body;
pub mod counters;
pub mod options;
pub mod proxy;
pub mod routes;
pub mod run;
pub mod server;
pub mod tls;
pub mod trust;

mod admission;
mod client_body;
mod exchange;
mod forward;
mod pool;
mod problem;
mod socket;
mod stream;
mod tunnel;
mod upstream;
mod websocket;
mod workers;

pub use admin::{Admin, AdminToken, InvalidAdmin, Verdicts};
pub use body::UpstreamBody;
pub use client_body::ClientBody;
pub use counters::Counters;
pub use onlyonce_tls::{ClientTls, InvalidTls};
pub use options::{GatewayOptions, InvalidUpstream, UpstreamUrl};
pub use proxy::ProxyService;
pub use routes::{InvalidRoute, RoutePattern, Routes};
pub use run::{engine, run};
pub use server::{Drained, Peer, serve};
pub use trust::{InvalidNetwork, TrustedProxies, TrustedProxy};
