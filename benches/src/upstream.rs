//! The service behind the proxies: one thread that reads a request and answers at once, as cheaply as can be.

use std::net::SocketAddr;

use anyhow::{Context, Result};
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};

use crate::http1::Reader;
use crate::runtime::on_this_thread;

/// What every request is answered with.
pub(crate) const REPLY_BODY: &str =
    r#"{"id":"ch_0123456789abcdef","amount":100,"currency":"EUR","status":"succeeded"}"#;

/// Starts it; it lives as long as the program.
pub(crate) fn start() -> Result<SocketAddr> {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").context("listen")?;
    listener.set_nonblocking(true)?;
    let addr = listener.local_addr()?;
    std::thread::Builder::new().name("upstream".into()).spawn(move || {
        on_this_thread(async {
            let listener = TcpListener::from_std(listener)?;
            loop {
                let (stream, _) = listener.accept().await?;
                tokio::spawn(async move {
                    // A proxy that goes away in mid-request is its own affair.
                    let _ = serve(stream).await;
                });
            }
            #[expect(unreachable_code, reason = "names the type")]
            Ok(())
        })
    })?;
    Ok(addr)
}

async fn serve(mut stream: TcpStream) -> Result<()> {
    stream.set_nodelay(true)?;
    let reply = format!(
        "HTTP/1.1 201 Created\r\nContent-Type: application/json\r\nLocation: /charges/ch_0123456789abcdef\r\n\
         Content-Length: {}\r\n\r\n{REPLY_BODY}",
        REPLY_BODY.len()
    );
    let mut reader = Reader::new();
    while reader.read(&mut stream).await?.is_some() {
        stream.write_all(reply.as_bytes()).await?;
    }
    Ok(())
}
