//! TLS in front of a server without it.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;

use crate::authority::{Authority, Identity};

/// TLS in front of a plain server, HTTP/1.1 or HTTP/2 as the client likes; ends with the test's runtime.
#[derive(Debug)]
pub struct TlsFront {
    addr: SocketAddr,
    connections: Arc<AtomicUsize>,
}

impl TlsFront {
    /// `clients` is whom clients must have a certificate of, `polite` whether the end of a connection is said.
    ///
    /// # Panics
    /// When the identity is none, or there is no port.
    pub async fn start(
        behind: SocketAddr,
        identity: &Identity,
        clients: Option<&Authority>,
        polite: bool,
    ) -> Self {
        let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(identity.cert.as_bytes()).collect();
        let key = PrivateKeyDer::from_pem_slice(identity.key.as_bytes()).expect("a key");
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let builder = ServerConfig::builder_with_provider(provider.clone())
            .with_safe_default_protocol_versions()
            .expect("the provider has them");
        let builder = match clients {
            None => builder.with_no_client_auth(),
            Some(authority) => {
                let mut roots = RootCertStore::empty();
                let root = CertificateDer::from_pem_slice(authority.pem().as_bytes()).expect("a certificate");
                roots.add(root).expect("a root");
                let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider).build();
                builder.with_client_cert_verifier(verifier.expect("a verifier"))
            }
        };
        let mut config = builder.with_single_cert(chain.expect("certificates"), key).expect("an identity");
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        let acceptor = TlsAcceptor::from(Arc::new(config));
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a loopback port");
        let addr = listener.local_addr().expect("a bound socket has an address");
        let connections = Arc::new(AtomicUsize::new(0));
        let counter = connections.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (acceptor, counter) = (acceptor.clone(), counter.clone());
                tokio::spawn(async move {
                    let Ok(mut client) = acceptor.accept(stream).await else { return };
                    counter.fetch_add(1, Ordering::SeqCst);
                    let Ok(mut server) = TcpStream::connect(behind).await else { return };
                    if polite {
                        let _ = tokio::io::copy_bidirectional(&mut client, &mut server).await;
                        return;
                    }
                    let (mut from_server, mut to_server) = server.split();
                    let (mut from_client, mut to_client) = tokio::io::split(client);
                    tokio::select! {
                        _ = tokio::io::copy(&mut from_server, &mut to_client) => {}
                        _ = tokio::io::copy(&mut from_client, &mut to_server) => {}
                    }
                    let _ = to_client.flush().await;
                    // Both halves are dropped here: the socket is closed and nothing is said.
                });
            }
        });
        Self { addr, connections }
    }

    /// Connections that came so far, with their handshake done.
    pub fn connections(&self) -> usize {
        self.connections.load(Ordering::SeqCst)
    }

    /// `SCHEME://127.0.0.1:PORT`.
    pub fn url(&self, scheme: &str) -> String {
        format!("{scheme}://{}", self.addr)
    }
}
