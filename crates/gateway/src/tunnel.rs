//! WebSocket: once both sides have switched, bytes go through as they come.

use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tracing::debug;

use crate::server::Peer;

/// Runs until both sides have ended, or the server cuts it at the end of its shutdown.
pub(crate) fn spawn(client: OnUpgrade, upstream: OnUpgrade, peer: Option<Peer>) {
    let tunnel = async move {
        let (client, upstream) = match tokio::try_join!(client, upstream) {
            Ok(both) => both,
            Err(error) => return debug!(%error, "the tunnel did not come up"),
        };
        let (mut client, mut upstream) = (TokioIo::new(client), TokioIo::new(upstream));
        if let Err(error) = tokio::io::copy_bidirectional(&mut client, &mut upstream).await {
            debug!(%error, "the tunnel broke");
        }
    };
    match peer {
        Some(peer) => peer.tunnel(tunnel),
        None => drop(tokio::spawn(tunnel)),
    }
}
