//! The operator's own listener: `/healthz`, `/readyz`, `/metrics`.
//!
//! | path | 200 when | needs the token |
//! |---|---|---|
//! | `/healthz` | the process answers | no |
//! | `/readyz` | the store answers and the gateway is not stopping; else 503 with the reasons | no, but for the reasons |
//! | `/metrics` | always, as OpenMetrics text; neither keys nor scopes are in it | yes, where there is one |

mod health;
mod metrics;
mod server;

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use onlyonce_core::StoreAdmin;
use onlyonce_engine::Idempotency;
use onlyonce_http::{IdempotencyLayer, Report};
use tokio::net::TcpListener;

use crate::counters::Counters;
use health::Health;
pub(crate) use metrics::BUCKETS;
use metrics::Metrics;

/// What the operator's listener tells of.
#[derive(Clone, Debug)]
pub struct Admin(Arc<State>);

#[derive(Debug)]
struct State {
    metrics: Metrics,
    health: Option<Health>,
    stopping: AtomicBool,
    token: Option<AdminToken>,
}

/// A secret without which the operator's listener tells little.
#[derive(Clone)]
pub struct AdminToken(Vec<u8>);

/// Why a listener or a token was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidAdmin {
    /// Anybody could guess it.
    #[error("an admin token has at least 16 bytes, this one has {bytes}")]
    TokenTooShort {
        /// How many there are.
        bytes: usize,
    },
    /// Anybody in reach could read it.
    #[error("{addr} is reached from beyond this machine: the admin listener then needs a token")]
    NeedsToken {
        /// Where it was to listen.
        addr: SocketAddr,
    },
}

impl AdminToken {
    /// Takes the token's bytes: what comes after `Bearer `.
    ///
    /// # Errors
    /// [`InvalidAdmin::TokenTooShort`] under 16 bytes.
    pub fn new(token: &[u8]) -> Result<Self, InvalidAdmin> {
        match token.len() {
            bytes @ ..16 => Err(InvalidAdmin::TokenTooShort { bytes }),
            _ => Ok(Self(token.to_vec())),
        }
    }

    /// Whether it is this one, in a time that does not tell how much of it is.
    fn is(&self, given: &[u8]) -> bool {
        let differ = |(a, b): (&u8, &u8)| a ^ b;
        given.len() == self.0.len() && self.0.iter().zip(given).map(differ).fold(0, |all, one| all | one) == 0
    }
}

impl fmt::Debug for AdminToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("AdminToken(…)")
    }
}

impl Admin {
    /// Whether a listener there may do without a token.
    ///
    /// # Errors
    /// [`InvalidAdmin::NeedsToken`].
    pub fn check(addr: SocketAddr, token: Option<&AdminToken>) -> Result<(), InvalidAdmin> {
        let beyond = !addr.ip().to_canonical().is_loopback();
        if beyond && token.is_none() { Err(InvalidAdmin::NeedsToken { addr }) } else { Ok(()) }
    }

    /// Tells of a gateway that guards nothing.
    pub fn of_proxy(counters: &Counters, token: Option<AdminToken>) -> Self {
        let metrics = Metrics::new(counters);
        Self(Arc::new(State { metrics, health: None, stopping: AtomicBool::new(false), token }))
    }

    /// Tells of a whole gateway; `store` is the engine's own, and `layer` is made on it and reports to
    /// `verdicts`.
    pub fn of_gateway(
        counters: &Counters,
        idem: &Idempotency,
        layer: &IdempotencyLayer,
        verdicts: &Verdicts,
        store: Arc<dyn StoreAdmin>,
        token: Option<AdminToken>,
    ) -> Self {
        let mut metrics = Metrics::new(counters);
        let health = Health::new(store, idem.limits().store_timeout);
        metrics.tell_of(idem, layer, verdicts, &health);
        Self(Arc::new(State { metrics, health: Some(health), stopping: AtomicBool::new(false), token }))
    }

    /// From here on it is not ready.
    pub fn stopping(&self) {
        self.0.stopping.store(true, Ordering::Relaxed);
    }

    /// Serves until it is dropped.
    pub async fn serve(self, listener: TcpListener) {
        server::serve(listener, self.0).await;
    }
}

/// Counts what a layer reports, for [`Admin`]. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Verdicts(Arc<metrics::Verdicts>);

impl Verdicts {
    /// Counts one request on a guarded route.
    pub fn count(&self, report: &Report) {
        self.0.count(report);
    }
}
