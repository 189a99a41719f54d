//! A payment service on plain hyper, HTTP/1.1 and HTTP/2.
//!
//! ```sh
//! cargo run -p onlyonce --example hyper
//! curl -i 127.0.0.1:3000/charges -H 'idempotency-key: "order-42"' -d 100
//! ```

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use hyper_util::service::TowerToHyperService;
use onlyonce::http::RequestBody;
use onlyonce::{Idempotency, IdempotencyLayer};
use tokio::net::TcpListener;
use tower::{Layer, service_fn};

/// Takes the amount in the body from the balance.
async fn charge(
    balance: Arc<AtomicI64>,
    request: Request<RequestBody<Incoming>>,
) -> Result<Response<Full<Bytes>>, Infallible> {
    let body = request.into_body().collect().await.map(|body| body.to_bytes()).unwrap_or_default();
    let amount = std::str::from_utf8(&body).ok().and_then(|text| text.trim().parse::<i64>().ok());
    let (status, text) = match amount {
        Some(amount) => {
            let left = balance.fetch_sub(amount, Ordering::SeqCst) - amount;
            (StatusCode::CREATED, format!("charged {amount}, {left} left\n"))
        }
        None => (StatusCode::UNPROCESSABLE_ENTITY, "an amount is needed\n".to_owned()),
    };
    let mut response = Response::new(Full::from(text));
    *response.status_mut() = status;
    Ok(response)
}

/// Serves connections until the listener fails.
pub(crate) async fn serve(
    listener: TcpListener,
    idem: &Idempotency,
    balance: Arc<AtomicI64>,
) -> std::io::Result<()> {
    let service =
        IdempotencyLayer::new(idem).layer(service_fn(move |request| charge(balance.clone(), request)));
    loop {
        let (stream, _) = listener.accept().await?;
        let service = TowerToHyperService::new(service.clone());
        tokio::spawn(async move {
            // A client that goes away is its own affair.
            let _ = auto::Builder::new(TokioExecutor::new())
                .serve_connection(TokioIo::new(stream), service)
                .await;
        });
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let listener = TcpListener::bind("127.0.0.1:3000").await?;
    println!("listening on {}", listener.local_addr()?);
    serve(listener, &Idempotency::in_memory(), Arc::new(AtomicI64::new(10_000))).await?;
    Ok(())
}
