//! A shop whose orders, payments and idempotency records are one transaction in PostgreSQL.
//!
//! `orders serve` is the shop; `orders provider` is a fake payment provider with idempotency keys of its own.

mod provider;
mod shop;

use std::net::SocketAddr;
use std::process::ExitCode;

use anyhow::{Context, Result};
use axum::Router;
use clap::{Parser, Subcommand};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};

use crate::shop::Shop;

/// A shop that takes each order once, however often it is sent
#[derive(Debug, Parser)]
#[command(name = "orders", version)]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// The shop: POST /orders with an Idempotency-Key
    Serve {
        /// Where to listen
        #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:8140")]
        listen: SocketAddr,

        /// The database: its tables are made at the first start
        #[arg(long, value_name = "URL", env = "ORDERS_DATABASE", hide_env_values = true)]
        database: String,

        /// Where the payment provider is
        #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:8141")]
        provider: SocketAddr,

        /// Stop for good once an order is charged and before it is committed, to be killed there
        #[arg(long)]
        stop_before_commit: bool,
    },
    /// The fake payment provider: POST /charges, and GET /charges to look
    Provider {
        /// Where to listen
        #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:8141")]
        listen: SocketAddr,
    },
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
            eprintln!("orders: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    let args = Args::parse();
    rustls::crypto::aws_lc_rs::default_provider()
        .install_default()
        .map_err(|_| anyhow::anyhow!("a TLS provider is installed already"))?;
    tokio::runtime::Runtime::new().context("start the runtime")?.block_on(async {
        match args.command {
            Command::Serve { listen, database, provider, stop_before_commit } => {
                let shop = Shop::open(&database, provider, stop_before_commit).await?;
                serve("orders", listen, shop::router(shop)).await
            }
            Command::Provider { listen } => serve("provider", listen, provider::router()).await,
        }
    })
}

async fn serve(name: &str, listen: SocketAddr, router: Router) -> Result<()> {
    let listener = TcpListener::bind(listen).await.with_context(|| {
        format!("listen on {listen}: is another program there? --listen takes another address")
    })?;
    println!("{name}: listening on http://{}", listener.local_addr()?);
    let mut terminate = signal(SignalKind::terminate()).context("wait for signals")?;
    let stop = async move {
        tokio::select! {
            _ = tokio::signal::ctrl_c() => {}
            _ = terminate.recv() => {}
        }
    };
    axum::serve(listener, router).with_graceful_shutdown(stop).await.context("serve")
}
