//! An axum handler, bare and behind the layer.
//!
//! All of them are served by one runtime of two threads in this process; the load generator has a thread of its own.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use anyhow::{Context, Result};
use axum::Router;
use axum::response::IntoResponse;
use axum::routing::post;
use axum::serve::ListenerExt;
use bytes::Bytes;
use http::header::{CONTENT_TYPE, LOCATION};
use http::{HeaderValue, StatusCode};
use onlyonce_core::{MemoryStore, Store};
use onlyonce_engine::Idempotency;
use onlyonce_http::IdempotencyLayer;
use onlyonce_store_redis::RedisStore;
use onlyonce_store_sqlite::SqliteStore;
use testkit::Redis;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;

use crate::Plan;
use crate::keys::Keys;
use crate::load::{self, Request};
use crate::measure::{Comparison, Subject, Target, series};
use crate::report::Report;
use crate::runtime::workers;
use crate::upstream::REPLY_BODY;

/// How many keys are replayed over and over.
const REPLAYED_KEYS: u64 = 1000;

#[derive(Clone, Debug, Default, clap::Args)]
pub(crate) struct LayerPlan {
    /// The program of `benches/peer`, to be measured beside ours on the same Redis server.
    #[arg(long)]
    peer: Option<PathBuf>,
}

pub(crate) fn run(plan: &Plan, layer: &LayerPlan, report: &mut Report) -> Result<()> {
    let (runtime, folder) = (workers()?, plan.folder()?);
    // The engine starts tasks of its own.
    let _context = runtime.enter();
    let request = Request::new("POST");
    let sqlite = runtime.block_on(SqliteStore::open(folder.path().join("layer.db")))?;

    let redis_server = crate::redis::start(&runtime, Redis::options());
    let redis = runtime.block_on(RedisStore::open(&redis_server.url()))?;

    let bare_server = serve(&runtime, app())?;
    let memory_server = serve(&runtime, guarded(MemoryStore::new().records_max(usize::MAX)))?;
    let sqlite_server = serve(&runtime, guarded(sqlite))?;
    let redis_layer = serve(&runtime, guarded(redis))?;
    load::fill(memory_server, &request, REPLAYED_KEYS, "idempotency-replayed: true")?;

    let subject = |name, server: SocketAddr, keys| {
        let (request, keys) = (request.clone(), Arc::new(keys));
        Subject::new(name, move |time| load::run(server, &request, &keys, time))
    };
    let [bare, replay, memory, redis, sqlite] = [
        "axum, bare",
        "layer, replay",
        "layer, new key, memory",
        "layer, new key, redis",
        "layer, new key, sqlite",
    ];
    let mut subjects = vec![
        subject(bare, bare_server, Keys::unique()),
        subject(replay, memory_server, Keys::cycle(REPLAYED_KEYS)),
        subject(memory, memory_server, Keys::unique()),
        subject(redis, redis_layer, Keys::unique()),
        subject(sqlite, sqlite_server, Keys::unique()),
    ];
    let mut comparisons = vec![
        Comparison::new(replay, bare, Target::Rate(0.95, 1.0)),
        Comparison::new(memory, bare, Target::Rate(0.75, 0.85)),
        Comparison::new(redis, bare, Target::Rate(0.5, 0.6)),
        Comparison::new(sqlite, bare, Target::Rate(0.4, 0.5)),
    ];
    let peer = layer.peer.as_deref().map(|program| Peer::start(program, &redis_server.url())).transpose()?;
    if let Some(peer) = &peer {
        let [bare, guarded] = ["peer, bare", "peer, new key, redis"];
        for (name, path) in [(bare, "/bare"), (guarded, "/charges")] {
            let (request, keys, server) = (Request::to(path, "POST"), Arc::new(Keys::unique()), peer.address);
            subjects.push(Subject::new(name, move |time| load::run(server, &request, &keys, time)));
        }
        comparisons.push(Comparison::new(guarded, bare, Target::None));
        comparisons.push(Comparison::new(redis, guarded, Target::None));
    }
    series(plan, report, "layer", subjects, &comparisons)
}

/// A process that ends when its standard input does.
struct Peer {
    child: Child,
    address: SocketAddr,
}

impl Peer {
    fn start(program: &Path, redis: &str) -> Result<Self> {
        let mut command = Command::new(program);
        command.arg(redis).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().with_context(|| {
            format!(
                "run {}; build it with: cargo build --release --manifest-path benches/peer/Cargo.toml",
                program.display()
            )
        })?;
        let mut line = String::new();
        if let Some(stdout) = child.stdout.take() {
            BufReader::new(stdout).read_line(&mut line)?;
        }
        let address = line.trim().parse().with_context(|| format!("the peer says {line:?}, and no address"));
        match address {
            Ok(address) => Ok(Self { child, address }),
            Err(error) => {
                child.kill()?;
                child.wait()?;
                Err(error)
            }
        }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}

fn guarded(store: impl Store) -> Router {
    app().layer(IdempotencyLayer::new(&Idempotency::builder(store).build()))
}

fn app() -> Router {
    Router::new().route("/charges", post(charge))
}

async fn charge(body: Bytes) -> impl IntoResponse {
    // What a handler does at the least: look at what it was sent.
    let status = if body.starts_with(b"{") { StatusCode::CREATED } else { StatusCode::BAD_REQUEST };
    let headers = [
        (CONTENT_TYPE, HeaderValue::from_static("application/json")),
        (LOCATION, HeaderValue::from_static("/charges/ch_0123456789abcdef")),
    ];
    (status, headers, REPLY_BODY)
}

fn serve(runtime: &Runtime, app: Router) -> Result<SocketAddr> {
    let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).context("listen")?;
    let addr = listener.local_addr()?;
    let listener = listener.tap_io(|stream| {
        // Latency as in production; a socket that refuses it is served all the same.
        let _ = stream.set_nodelay(true);
    });
    runtime.spawn(async move { axum::serve(listener, app).await });
    Ok(addr)
}
