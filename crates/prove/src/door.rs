//! The way from a caller to a gateway.

use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderValue, Request, Response, header};
use http_body_util::{BodyExt, Full, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

use crate::fleet::Fleet;
use crate::random::Random;

/// More of a body than this is not read.
const BODY_BYTES_MAX: usize = 64 * 1024;

/// How callers reach gateways: over TCP, or in a simulation.
pub trait Door: Send + Sync {
    /// How many gateways there are.
    fn count(&self) -> usize;

    /// One that tells what became of an operation: any of them, unless said otherwise.
    fn telling(&self, random: &mut Random) -> usize {
        random.below(self.count())
    }

    /// Posts `body` under `key`. Dropped half-way, the caller is gone.
    ///
    /// # Errors
    /// Why there is no whole answer.
    fn exchange(
        &self,
        gateway: usize,
        key: &str,
        body: Bytes,
    ) -> impl Future<Output = Result<Response<Bytes>, String>> + Send;
}

/// Over TCP, with a connection for each request: one that broke is no excuse.
pub(crate) struct OverTcp {
    pub(crate) fleet: Arc<Fleet>,
    pub(crate) path: String,
}

impl Door for OverTcp {
    fn count(&self) -> usize {
        self.fleet.count()
    }

    async fn exchange(&self, gateway: usize, key: &str, body: Bytes) -> Result<Response<Bytes>, String> {
        let request = Request::post(&*self.path)
            .header(header::CONTENT_TYPE, "application/json")
            .header("idempotency-key", key)
            .body(Full::new(body))
            .map_err(|error| error.to_string())?;
        send(self.fleet.addr(gateway), request).await
    }
}

/// One request on a connection of its own.
pub(crate) async fn send(
    addr: SocketAddr,
    mut request: Request<Full<Bytes>>,
) -> Result<Response<Bytes>, String> {
    let host = HeaderValue::from_str(&addr.to_string()).map_err(|error| error.to_string())?;
    request.headers_mut().insert(header::HOST, host);
    let stream = TcpStream::connect(addr).await.map_err(|error| format!("connect: {error}"))?;
    let (mut sender, connection) =
        http1::handshake(TokioIo::new(stream)).await.map_err(|error| error.to_string())?;
    let exchange = async {
        let response = sender.send_request(request).await.map_err(|error| error.to_string())?;
        let (head, body) = response.into_parts();
        let body = Limited::new(body, BODY_BYTES_MAX).collect().await.map_err(|error| error.to_string())?;
        Ok(Response::from_parts(head, body.to_bytes()))
    };
    tokio::select! {
        answer = exchange => answer,
        // It ends when the exchange does, or breaks before.
        broken = connection => match broken {
            Ok(()) => Err("the connection was closed".into()),
            Err(error) => Err(error.to_string()),
        },
    }
}
