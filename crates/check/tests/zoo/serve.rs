//! The HTTP side of a shop: `POST`, `PUT` or `PATCH /pay…` pays, `GET /effects` tells what was paid.

use std::fmt;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::http::request::Parts;
use hyper::service::service_fn;
use hyper::{Method, Request, Response};
use hyper_util::rt::TokioIo;
use tokio::net::TcpListener;
use tokio::task::{JoinHandle, JoinSet};

use crate::defect::Defect;
use crate::key;
use crate::nature::{Breed, Nature};
use crate::shop::{Call, Shop};
use crate::wire::Reply;

const BODY_MAX: usize = 1 << 20;

/// A running server; its connections end when it is dropped.
#[derive(Debug)]
pub(crate) struct Server {
    pub(crate) addr: SocketAddr,
    pub(crate) shop: Arc<Shop>,
    accept: JoinHandle<()>,
}

impl Server {
    /// Starts one on a free port.
    pub(crate) async fn start(nature: impl Into<Nature>) -> Self {
        let nature = nature.into();
        Self::start_on("127.0.0.1:0".parse().unwrap(), Shop::new(nature), nature).await
    }

    pub(crate) async fn start_on(addr: SocketAddr, shop: Shop, nature: Nature) -> Self {
        let listener = TcpListener::bind(addr).await.expect("the address is free");
        let addr = listener.local_addr().unwrap();
        let shop = Arc::new(shop);
        let accept = tokio::spawn(accept(listener, shop.clone(), nature));
        Self { addr, shop, accept }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.accept.abort();
    }
}

async fn accept(listener: TcpListener, shop: Arc<Shop>, nature: Nature) {
    let mut connections = JoinSet::new();
    // Connections are dealt to two workers in turn, those that pay.
    let dealt = Arc::new(AtomicUsize::new(0));
    while let Ok((stream, _)) = listener.accept().await {
        while connections.try_join_next().is_some() {}
        let _ = stream.set_nodelay(true);
        let (shop, dealt) = (shop.clone(), dealt.clone());
        connections.spawn(async move {
            let worker = Arc::new(OnceLock::new());
            let service = service_fn(move |request: Request<Incoming>| {
                let shop = shop.clone();
                let pays = request.method() != Method::GET;
                let worker = pays.then(|| *worker.get_or_init(|| dealt.fetch_add(1, Ordering::Relaxed) % 2));
                handle(request, worker.unwrap_or_default(), shop, nature)
            });
            let http = hyper::server::conn::http1::Builder::new();
            // A client may go at any moment; that is what is tested.
            let _ = http.serve_connection(TokioIo::new(stream), service).await;
        });
    }
}

async fn handle(
    request: Request<Incoming>,
    worker: usize,
    shop: Arc<Shop>,
    nature: Nature,
) -> Result<Response<Full<Bytes>>, Gone> {
    let (head, body) = request.into_parts();
    if head.uri.path() == "/effects" {
        let body = shop.effects().to_string();
        return Ok(Reply::new(200, body).header("content-type", "application/json").into());
    }
    let deaf = match nature.defect {
        Some(Defect::Constant) => {
            Some(Reply::new(200, r#"{"ok":true}"#).header("content-type", "application/json"))
        }
        Some(Defect::NotFound) => Some(Reply::new(404, "Not Found")),
        Some(Defect::Broken) => Some(Reply::new(500, "Internal Server Error")),
        _ => None,
    };
    if let Some(reply) = deaf {
        // Read, so that the connection can be used again.
        body.collect().await.map_err(|_| Gone)?;
        return Ok(reply.into());
    }
    let pays = matches!(head.method, Method::POST | Method::PUT | Method::PATCH);
    if !pays || !head.uri.path().starts_with("/pay") {
        return Ok(Reply::problem(404, "not-found", "POST /pay, or GET /effects.").into());
    }
    if nature.is(Breed::Auth) && !head.headers.contains_key("authorization") {
        return Ok(Reply::problem(401, "unauthorized", "Who are you?").into());
    }
    if nature.is(Breed::RateLimited) && !shop.has_a_place() {
        return Ok(Reply::problem(429, "too-many", "Not so fast.").header("retry-after", "1").into());
    }
    if nature.is(Breed::StandsStill) && shop.stands_still() {
        let reply = Reply::problem(503, "store-unavailable", "Nothing was done. Come back.");
        return Ok(reply.header("retry-after", "1").into());
    }
    let claims_replay = nature.has(Defect::MarkerForged) && head.headers.contains_key("idempotency-replayed");
    let mut reply = pay(&head, body, worker, shop.clone(), nature).await?;
    if claims_replay {
        reply = reply.without("idempotency-replayed").header("idempotency-replayed", "true");
    }
    Ok(of_the_moment(reply, &shop, nature).into())
}

/// Headers that are no part of what is stored.
fn of_the_moment(reply: Reply, shop: &Shop, nature: Nature) -> Reply {
    match nature.breed {
        Breed::Closes => reply.header("connection", "close"),
        Breed::Volatile => {
            let number = shop.begun.get();
            reply
                .header("x-request-id", &format!("req-{number}"))
                .header("x-amzn-requestid", &format!("a-{number}"))
                .header("x-ratelimit-remaining", &format!("{}", 100_000 - number))
                .header("x-runtime", &format!("0.{number:06}"))
                .header("server-timing", &format!("app;dur={number}"))
        }
        _ => reply,
    }
}

async fn pay(
    head: &Parts,
    body: Incoming,
    worker: usize,
    shop: Arc<Shop>,
    nature: Nature,
) -> Result<Reply, Gone> {
    let _open = shop.open.enter();
    std::mem::forget(shop.begun.enter());
    let path = head.uri.path().to_owned();
    let id = match key::read(head, nature) {
        _ if matches!(nature.defect, Some(Defect::NoKeys | Defect::Echo)) => None,
        Ok(id) => id,
        Err(refusal) if refusal.is("application/problem+json") => {
            return Ok(shop.refusal(refusal));
        }
        Err(failure) => return Ok(failure),
    };
    let Some(mut id) = id else {
        let body = whole(body).await?;
        if nature.has(Defect::Echo) {
            return Ok(Reply::new(200, body).header("content-type", "application/json"));
        }
        return Ok(shop.unguarded(&path, &body).await);
    };
    if nature.has(Defect::PerWorker) {
        id.scope.push_str(&format!("/{worker}"));
    }
    let mut call = Call { id, fingerprint: Vec::new(), path, body: Bytes::new() };
    if nature.has(Defect::StuckAfterHalf) {
        return early(head, call, body, shop, nature).await;
    }
    call.body = match nature.defect {
        Some(Defect::HalfBodyPoisons) => whatever(body).await,
        _ => whole(body).await?,
    };
    if call.body.len() > BODY_MAX && nature.has(Defect::UnguardedBig) {
        return Ok(shop.unguarded(&call.path, &call.body).await);
    }
    if call.body.len() > BODY_MAX {
        return Ok(Reply::problem(413, "too-large", "A body has 1 MiB at most."));
    }
    call.fingerprint = key::fingerprint(head, &call.body, nature);
    let work = async move { shop.answer(&call).await };
    let attached = nature.has(Defect::StuckAfterDisconnect)
        || nature.has(Defect::RunsAgainAfterDisconnect)
        || nature.is(Breed::Cancels);
    match attached {
        // The work is a part of the connection's own future, which is dropped with the connection.
        true => Ok(work.await),
        false => tokio::spawn(work).await.map_err(|_| Gone),
    }
}

async fn whole(body: Incoming) -> Result<Bytes, Gone> {
    Ok(body.collect().await.map_err(|_| Gone)?.to_bytes())
}

/// What has come when the body ends, or the connection does.
async fn whatever(mut body: Incoming) -> Bytes {
    let mut read = Vec::new();
    while let Some(Ok(frame)) = body.frame().await {
        if let Ok(data) = frame.into_data() {
            read.extend_from_slice(&data);
        }
    }
    read.into()
}

/// Holds the key from the head of a request on.
async fn early(
    head: &Parts,
    mut call: Call,
    body: Incoming,
    shop: Arc<Shop>,
    nature: Nature,
) -> Result<Reply, Gone> {
    let Some(token) = shop.claim_early(&call) else {
        call.body = whole(body).await?;
        call.fingerprint = key::fingerprint(head, &call.body, nature);
        return Ok(shop.answer(&call).await);
    };
    call.body = whole(body).await?;
    call.fingerprint = key::fingerprint(head, &call.body, nature);
    let work = async move { shop.run_early(&call, token).await };
    tokio::spawn(work).await.map_err(|_| Gone)
}

/// Makes hyper close the connection.
#[derive(Debug)]
struct Gone;

impl fmt::Display for Gone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the client is gone")
    }
}

impl std::error::Error for Gone {}
