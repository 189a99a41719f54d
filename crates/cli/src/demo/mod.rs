//! `onlyonce demo`: a payment API that charges twice, and the gateway that ends it. Every figure that is printed was
//! read from a socket.

mod child;
mod payment_api;
mod story;
mod wire;

use std::net::SocketAddr;

use anyhow::{Context, Result};

/// Runs the demo; false when a figure was not as it must be.
pub(crate) async fn run(listen: SocketAddr, once: bool, unguarded: bool) -> Result<bool> {
    let folder =
        tempfile::Builder::new().prefix("onlyonce-demo-").tempdir().context("no temporary folder")?;
    let api = payment_api::start().await?;
    let mut story = story::Story::new(api, listen, folder.path(), unguarded);
    let good = story.tell().await?;
    if !once {
        story.stay().await?;
    }
    story.end().await?;
    Ok(good)
}
