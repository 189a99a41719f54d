//! TLS to the upstream.

use std::io;

use onlyonce_tls::{ClientTls, InvalidTls};
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;

use crate::options::UpstreamUrl;

impl UpstreamUrl {
    /// Whether this will do for it: without it a proxy finds out with its first request.
    ///
    /// # Errors
    /// [`InvalidTls`].
    pub fn check_tls(&self, tls: &ClientTls) -> Result<(), InvalidTls> {
        Connector::new(tls, self).map(drop)
    }
}

/// Begins TLS with one upstream.
#[derive(Clone, Debug)]
pub(crate) struct Connector {
    tls: onlyonce_tls::Connector,
    http2: bool,
}

impl Connector {
    /// `None` for an upstream without TLS.
    pub(crate) fn new(tls: &ClientTls, upstream: &UpstreamUrl) -> Result<Option<Self>, InvalidTls> {
        if !upstream.is_tls() {
            return Ok(None);
        }
        let http2 = upstream.is_http2();
        let protocol: &[u8] = if http2 { b"h2" } else { b"http/1.1" };
        Ok(Some(Self { tls: tls.connector(upstream.host(), protocol)?, http2 }))
    }

    pub(crate) async fn connect(&self, stream: TcpStream) -> io::Result<TlsStream<TcpStream>> {
        let stream = self.tls.connect(stream).await?;
        let agreed = stream.get_ref().1.alpn_protocol();
        if self.http2 && agreed != Some(b"h2") {
            return Err(io::Error::other(
                "the upstream does not speak HTTP/2; give https:// instead of h2://",
            ));
        }
        Ok(stream)
    }
}
