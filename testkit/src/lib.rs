//! Private servers, upstreams and clients for tests: real sockets and real processes, nothing simulated.
//!
//! | module | what it holds |
//! |---|---|
//! | [`upstream`] | [`Upstream`]: an HTTP server that counts and logs what reaches it, and answers as told |
//! | [`raw`] | [`RawUpstream`], [`RawConnection`]: both ends of a socket, byte by byte |
//! | [`client`] | [`Client`], [`Connection`]: an HTTP/1.1 and h2c client |
//! | [`fault`] | [`FaultProxy`]: a network that delays, goes silent, cuts, and loses replies |
//! | [`process`] | [`Process`]: a program that is started, signalled and killed |
//! | [`service`] | servers of others: private or shared by a run, ended when nobody uses them any more |
//! | [`postgres`] | [`Postgres`], [`PgBouncer`] |
//! | [`redis`] | [`Redis`], [`RedisCluster`], [`RedisSentinels`], [`ToldClock`] |
//! | [`mariadb`] | [`Mariadb`] |
//! | [`tls`] | [`TlsFront`]: TLS in front of a server without it |
//! | [`authority`] | [`Authority`]: signs certificates for servers that speak TLS |
//! | [`nginx`] | [`Nginx`] |
//!
//! Every wait is bounded by [`PATIENCE`] and panics past it, naming what was waited for.
#![allow(clippy::disallowed_methods, reason = "tests wait in real time")]

pub mod authority;
pub mod client;
pub mod mariadb;
pub mod nginx;
pub mod postgres;
pub mod process;
pub mod raw;
pub mod redis;
pub mod service;
pub mod tls;
pub mod upstream;

use std::future::Future;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

pub use authority::{Authority, Identity};
pub use client::{Client, ClientResponse, Connection, RequestBuilder, StreamingResponse};
pub use mariadb::Mariadb;
pub use nginx::Nginx;
pub use onlyonce_prove::fault::{self, FaultProxy};
pub use onlyonce_prove::quiet_port;
pub use postgres::{PgBouncer, PoolMode, Postgres};
pub use process::Process;
pub use raw::{RawConnection, RawUpstream, send_raw};
pub use redis::{Redis, RedisCluster, RedisOptions, RedisSentinels, ToldClock, ToldCluster};
pub use tls::TlsFront;
pub use upstream::{Answer, Seen, Upstream};

/// How long any wait may take before the test fails.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// A free loopback port, of this process alone: for a server that is started there, and again when it is killed.
pub fn free_port() -> u16 {
    quiet_port().expect("a loopback port")
}

/// A loopback address that was free a moment ago; nobody listens on it.
pub fn free_addr() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], free_port()))
}

/// Waits until `condition` holds.
///
/// # Panics
/// After [`PATIENCE`], naming `what`.
pub async fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    wait_for(what, async || condition().then_some(())).await;
}

/// Waits until `probe` gives something.
///
/// # Panics
/// After [`PATIENCE`], naming `what`.
pub async fn wait_for<T>(what: &str, mut probe: impl AsyncFnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(found) = probe().await {
            return found;
        }
        assert!(start.elapsed() < PATIENCE, "waited {PATIENCE:?} in vain: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// The value of `future`.
///
/// # Panics
/// After [`PATIENCE`], naming `what`.
pub async fn within<T>(what: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(PATIENCE, future).await {
        Ok(value) => value,
        Err(_) => panic!("waited {PATIENCE:?} in vain: {what}"),
    }
}
