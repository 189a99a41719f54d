//! Addresses, times and limits.

use std::fmt;
use std::net::SocketAddr;
use std::num::NonZero;
use std::str::FromStr;
use std::time::Duration;

use http::HeaderName;
use http::uri::Authority;
use onlyonce_http::headers::IDEMPOTENCY_KEY;
use onlyonce_http::{Cors, DocsUrl};
use onlyonce_tls::ClientTls;

use crate::counters::Counters;
use crate::trust::TrustedProxies;

/// What the gateway may be told. [`GatewayOptions::new`] gives the defaults named here.
#[derive(Clone, Debug)]
pub struct GatewayOptions {
    /// Where it listens: HTTP/1.1 and prior-knowledge h2c on one port.
    pub listen: SocketAddr,
    /// Where everything is forwarded to.
    pub upstream: UpstreamUrl,
    /// Whom an upstream with TLS is trusted by. The authorities of the system.
    pub upstream_tls: ClientTls,
    /// How long a connection to the upstream may take to come up, TLS included. 5 s.
    pub connect_timeout: Duration,
    /// How long the upstream may take until its response head, counted from the last piece of request body that moved.
    /// Then 504 `upstream-timeout`. 60 s. The response body is not timed: a stream may be silent for hours.
    pub upstream_timeout: Duration,
    /// A guarded request only uses an upstream connection idle for less than this, so that an upstream that closes it
    /// at the same moment does not make the outcome unknown. 500 ms; must stay under 1 s.
    pub pool_idle_guarded: Duration,
    /// The same for other requests. 800 ms: under every idle timeout in common use, of which 1 s is the shortest.
    pub pool_idle: Duration,
    /// How many idle connections to the upstream are kept. 256.
    pub pool_idle_max: usize,
    /// Sends the upstream's own address as `Host`; by default the client's `Host` goes on unchanged.
    pub rewrite_host: bool,
    /// Proxies in front: what they say in `X-Forwarded-Proto` and `X-Forwarded-Host` goes on; from anybody else these are
    /// set anew, since a client may have made them up. To `X-Forwarded-For` the peer is appended; where there are trusted
    /// proxies, what anybody else says there is dropped. None.
    pub trusted_proxies: TrustedProxies,
    /// How long a connection may be silent before a request, its first or its next, or over HTTP/2 be without one; then it
    /// is closed. 75 s: longer than the 60 s for which common load balancers keep idle connections.
    pub client_idle_timeout: Duration,
    /// How long a request head may take from its first byte to its end; then 408 `head-timeout`. 30 s. Over HTTP/2
    /// `client_idle_timeout` holds for it.
    pub header_timeout: Duration,
    /// How long a request body may pause, or bring less than 1 KiB, on its way to the upstream; then 408
    /// `body-timeout`. 60 s. That of a guarded request, which is read before anything runs, is timed as a whole, by the
    /// layer.
    pub body_timeout: Duration,
    /// The longest head, in bytes: of a request, then 431; of the upstream's answer, then it is invalid. 64 KiB; at least
    /// 8 KiB and at most 16 MiB, in whose place others are taken.
    pub max_header_bytes: usize,
    /// The most lines of a head, in the same way. 100; at most 4096.
    pub max_headers: usize,
    /// Connections served at once; past it they are answered 503 `overloaded` and closed, 256 at a time, while more wait in
    /// the listen queue of the system. 10 000.
    pub max_connections: usize,
    /// Requests of all kinds at once, over all connections; then 503 `overloaded`. 10 000.
    pub max_requests: usize,
    /// Requests in flight on one HTTP/2 connection. 200.
    pub max_streams: u32,
    /// Threads that serve connections, each with a runtime of its own; one for each core. HTTP/2 connections are served on the
    /// caller's runtime, and with 0 all are.
    pub workers: usize,
    /// Which pages may read what is refused before the layer sees the request: what the layer has. None.
    pub cors: Option<Cors>,
    /// The header with the key: no client can have it taken off as hop-by-hop. `Idempotency-Key`.
    pub key_header: HeaderName,
    /// How long running requests get to finish after the stop signal. 30 s.
    pub shutdown_timeout: Duration,
    /// Counts what happens.
    pub counters: Counters,
    /// Where the error codes are documented, for a `Link` on the gateway's own refusals. None.
    pub docs_url: Option<DocsUrl>,
}

impl GatewayOptions {
    /// The defaults.
    pub fn new(listen: SocketAddr, upstream: UpstreamUrl) -> Self {
        Self {
            listen,
            upstream,
            upstream_tls: ClientTls::default(),
            connect_timeout: Duration::from_secs(5),
            upstream_timeout: Duration::from_secs(60),
            pool_idle_guarded: Duration::from_millis(500),
            pool_idle: Duration::from_millis(800),
            pool_idle_max: 256,
            rewrite_host: false,
            trusted_proxies: TrustedProxies::default(),
            client_idle_timeout: Duration::from_secs(75),
            header_timeout: Duration::from_secs(30),
            body_timeout: Duration::from_secs(60),
            max_header_bytes: 64 * 1024,
            max_headers: 100,
            max_connections: 10_000,
            max_requests: 10_000,
            max_streams: 200,
            workers: std::thread::available_parallelism().map_or(1, NonZero::get),
            cors: None,
            key_header: IDEMPOTENCY_KEY,
            shutdown_timeout: Duration::from_secs(30),
            counters: Counters::default(),
            docs_url: None,
        }
    }

    /// Up to the lines that the HTTP implementation makes room for with each request, whether they come or not.
    pub(crate) fn headers_max(&self) -> usize {
        self.max_headers.min(HEADERS_MAX)
    }

    pub(crate) fn header_bytes_max(&self) -> usize {
        self.max_header_bytes.clamp(HEADER_BYTES_MIN, HEADER_BYTES_MAX)
    }

    /// How long a guarded operation may take before its client is told that the outcome is unknown: what connecting and
    /// the upstream may take, and a second, so that it is the proxy that gives up first and says why; past it a reply
    /// whose body trickles in.
    pub fn work_timeout(&self) -> Duration {
        // Connecting is TCP and, for h2c, a handshake.
        let connecting = self.connect_timeout.saturating_mul(2);
        self.upstream_timeout.saturating_add(connecting).saturating_add(Duration::from_secs(1))
    }
}

/// The most lines of a head that may be allowed.
pub const HEADERS_MAX: usize = 4096;

/// The shortest bound of a head, in bytes: hyper's own lower one.
pub const HEADER_BYTES_MIN: usize = 8 << 10;

/// The longest, in bytes.
pub const HEADER_BYTES_MAX: usize = 16 << 20;

/// The upstream: `http://HOST[:PORT]`, `https://` with TLS, `h2c://` for HTTP/2 with prior knowledge, `h2://` for HTTP/2 in
/// TLS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UpstreamUrl {
    tls: bool,
    http2: bool,
    authority: Authority,
}

impl UpstreamUrl {
    /// Whether it speaks HTTP/2.
    pub fn is_http2(&self) -> bool {
        self.http2
    }

    /// Whether it is reached by TLS.
    pub fn is_tls(&self) -> bool {
        self.tls
    }

    /// Host and port as given.
    pub fn authority(&self) -> &Authority {
        &self.authority
    }

    /// The host, an IPv6 address without its brackets.
    pub(crate) fn host(&self) -> &str {
        self.authority.host().trim_start_matches('[').trim_end_matches(']')
    }

    /// The port; unless given 80, and 443 with TLS.
    pub(crate) fn port(&self) -> u16 {
        self.authority.port_u16().unwrap_or(if self.tls { 443 } else { 80 })
    }
}

impl fmt::Display for UpstreamUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = match (self.tls, self.http2) {
            (false, false) => "http",
            (true, false) => "https",
            (false, true) => "h2c",
            (true, true) => "h2",
        };
        write!(f, "{scheme}://{}", self.authority)
    }
}

/// Why an upstream was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("upstream {given:?}: {reason}")]
pub struct InvalidUpstream {
    given: String,
    reason: &'static str,
}

impl FromStr for UpstreamUrl {
    type Err = InvalidUpstream;

    fn from_str(given: &str) -> Result<Self, InvalidUpstream> {
        let refuse = |reason| InvalidUpstream { given: given.to_owned(), reason };
        let (scheme, rest) = given.split_once("://").ok_or_else(|| refuse("give http://HOST:PORT"))?;
        let (tls, http2) = match scheme {
            "http" => (false, false),
            "https" => (true, false),
            "h2c" => (false, true),
            "h2" => (true, true),
            _ => return Err(refuse("the scheme must be http, https, h2c or h2")),
        };
        let rest = rest.strip_suffix('/').unwrap_or(rest);
        if rest.contains(['/', '?', '#']) {
            return Err(refuse("paths go on as received, so it cannot have one"));
        }
        let authority: Authority = rest.parse().map_err(|_| refuse("not a host and port"))?;
        if rest.contains('@') {
            return Err(InvalidUpstream { given: "…@…".into(), reason: "it cannot hold credentials" });
        }
        let host = authority.host();
        let port_text = rest.strip_prefix(host).unwrap_or_default();
        if host.is_empty() || !(port_text.is_empty() || authority.port_u16().is_some_and(|port| port > 0)) {
            return Err(refuse("not a host and port"));
        }
        Ok(Self { tls, http2, authority })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn upstreams_are_parsed_or_refused_with_the_reason() {
        for (given, host, port, http2) in [
            ("http://127.0.0.1:3000", "127.0.0.1", 3000, false),
            ("http://api.internal/", "api.internal", 80, false),
            ("https://api.internal", "api.internal", 443, false),
            ("https://api.internal:8443", "api.internal", 8443, false),
            ("h2://api.internal", "api.internal", 443, true),
            ("h2c://[::1]:50051", "::1", 50051, true),
        ] {
            let url: UpstreamUrl = given.parse().unwrap();
            assert_eq!((url.host(), url.port(), url.is_http2()), (host, port, http2));
            assert_eq!(url.is_tls(), given.starts_with("https") || given.starts_with("h2:"));
            assert_eq!(url.to_string(), given.trim_end_matches('/'));
        }
        for given in [
            "127.0.0.1:3000",
            "https://",
            "ftp://x",
            "http://",
            "http://x/base",
            "http://x?a",
            "http://x:0",
            "http://x:99999",
            "http://x:",
            "http://a b",
        ] {
            assert!(given.parse::<UpstreamUrl>().unwrap_err().to_string().contains(given), "{given}");
        }
        let secret = "http://user:secret@x".parse::<UpstreamUrl>().unwrap_err().to_string();
        assert!(!secret.contains("secret"), "{secret}");
    }
}
