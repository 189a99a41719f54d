//! A payment service on Redis that charges once, however often it is asked.
//!
//! `balance` in Redis is the money. `POST /pay` with `{"amount":100}` takes it from there; the charge, its reply and the
//! record of its idempotency key are one script in Redis, so no crash can part them.

mod amount;
mod ledger;
mod service;

use std::net::SocketAddr;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::{Parser, ValueEnum};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};

use crate::ledger::Ledger;

/// A payment service on Redis that charges once, however often it is asked
#[derive(Debug, Parser)]
#[command(
    name = "pay",
    version,
    after_help = "Try it:\n  \
    curl -i -X POST http://127.0.0.1:8130/pay -H 'Idempotency-Key: \"order-1\"' -d '{\"amount\":100}'\n  \
    curl http://127.0.0.1:8130/balance"
)]
struct Args {
    /// Where to listen
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:8130")]
    listen: SocketAddr,

    /// Where Redis is (7.0 or later): the balance and the records of keys are there
    #[arg(
        long,
        value_name = "URL",
        default_value = "redis://127.0.0.1:6379",
        env = "PAY_REDIS",
        hide_env_values = true
    )]
    redis: String,

    /// Take no notice of keys: what a payment service does that nobody thought about
    #[arg(long)]
    unprotected: bool,

    /// Leave a balance that is there; without it the balance is 10000 at each start
    #[arg(long)]
    keep_balance: bool,

    /// Have the next charge fail for the moment, to see that its key is free afterwards
    #[arg(long, value_name = "FAULT")]
    fail_next: Option<Fault>,
}

/// What to try out.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Fault {
    /// The next charge times out, before anything happened.
    Timeout,
}

fn main() -> ExitCode {
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_max_level(tracing::Level::WARN)
        .without_time()
        .init();
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("pay: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    let args = Args::parse();
    rustls::crypto::aws_lc_rs::default_provider()
        .install_default()
        .map_err(|_| anyhow::anyhow!("a TLS provider is installed already"))?;
    tokio::runtime::Runtime::new().context("start the runtime")?.block_on(serve(&args))
}

async fn serve(args: &Args) -> Result<()> {
    // Before it listens: whoever is answered finds the balance set.
    let ledger = Ledger::open(&args.redis, args.keep_balance).await?;
    let listener = TcpListener::bind(args.listen).await.with_context(|| {
        format!("listen on {}: is another program there? --listen takes another address", args.listen)
    })?;
    let balance = ledger.balance().await?;
    let service = service::router(ledger, args.unprotected, args.fail_next.is_some());
    let how = if args.unprotected { ", UNPROTECTED: a request sent twice charges twice" } else { "" };
    println!("pay: balance {balance}{how}");
    println!("pay: listening on http://{}", listener.local_addr()?);
    let mut terminate = signal(SignalKind::terminate()).context("wait for signals")?;
    let stop = async move {
        tokio::select! {
            _ = tokio::signal::ctrl_c() => {}
            _ = terminate.recv() => {}
        }
    };
    axum::serve(listener, service).with_graceful_shutdown(stop).await.context("serve")
}
