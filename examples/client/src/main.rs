//! `PAY_URL=http://127.0.0.1:8080/pay PAY_KEY=order-7 client`: pays once, however often it is run.

use std::env::var;
use std::time::Duration;

use anyhow::{Context, Result};
use client::{Operation, send};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let url = var("PAY_URL").context("PAY_URL: where the payments go")?.parse()?;
    let key = var("PAY_KEY").context("PAY_KEY: make it once and keep it")?;
    let operation = Operation { key, body: r#"{"amount":100}"#.into() };
    let (status, body) = send(&url, &operation, Duration::from_secs(120)).await?;
    println!("{} {}", status.as_u16(), String::from_utf8_lossy(&body));
    Ok(())
}
