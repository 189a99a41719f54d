//! The gateway: idempotency keys in front of any HTTP API.
//!
//! | module | what it holds |
//! |---|---|
//! | [`options`] | [`GatewayOptions`]: addresses, times and limits |
//! | [`server`] | [`serve`]: listener, connections, graceful shutdown |
//! | [`proxy`] | [`ProxyService`]: forwards one request to the upstream and says how the call ended |
//! | [`body`] | [`UpstreamBody`]: a response body, streamed |
//!
//! Inside: `forward` (which headers go on), `pool` and `upstream` (connections), `tunnel` (WebSocket), `linger`
//! (the end of a connection), `problem` (refusals).
//!
//! ```no_run
//! use onlyonce_gateway::{GatewayOptions, ProxyService, serve};
//!
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! let options = GatewayOptions::new("127.0.0.1:8080".parse()?, "http://127.0.0.1:3000".parse()?);
//! let listener = tokio::net::TcpListener::bind(options.listen).await?;
//! let stop = async { tokio::time::sleep(std::time::Duration::from_secs(3600)).await };
//! serve(listener, ProxyService::new(&options), &options, stop).await;
//! # Ok(())
//! # }
//! ```

pub mod body;
pub mod options;
pub mod proxy;
pub mod server;

mod forward;
mod linger;
mod pool;
mod problem;
mod tunnel;
mod upstream;

pub use body::UpstreamBody;
pub use options::{GatewayOptions, InvalidUpstream, UpstreamUrl};
pub use proxy::{CallEnd, Guarded, ProxyService};
pub use server::{Drained, Peer, serve};
