//! The checker over TLS, with the trusted roots of the machine.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use testkit::Upstream;
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;

use super::*;

fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/check/tls").join(name)
}

/// TLS as `localhost` in front of a server; the port.
async fn in_front_of(upstream: &Upstream) -> u16 {
    let certificate = CertificateDer::from_pem_file(file("server.pem")).unwrap();
    let key = PrivateKeyDer::from_pem_file(file("server.key")).unwrap();
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![certificate], key)
        .unwrap();
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (port, behind) = (listener.local_addr().unwrap().port(), upstream.addr());
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let acceptor = acceptor.clone();
            tokio::spawn(async move {
                // A client that does not trust us leaves in the middle.
                let Ok(mut stream) = acceptor.accept(stream).await else { return };
                let mut behind = TcpStream::connect(behind).await.unwrap();
                let _ = tokio::io::copy_bidirectional(&mut stream, &mut behind).await;
            });
        }
    });
    port
}

async fn check_https(url: &str, roots: &str) -> Run {
    let args = [
        "--body",
        r#"{"amount":100}"#,
        "--only",
        "replay-body,race-once,half-sent",
        "--json",
        "--rounds",
        "1",
    ];
    run(Command::new(PROGRAM)
        .args(["check", url])
        .args(args)
        .env("SSL_CERT_FILE", file(roots))
        .env_remove("SSL_CERT_DIR"))
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn https_is_checked_like_http_and_only_with_a_trusted_certificate() {
    let upstream = payments().await;
    let port = in_front_of(&upstream).await;
    let run = check_https(&format!("https://localhost:{port}/pay"), "ca.pem").await;
    // No keys there: each answer is another one.
    assert_eq!(run.with("fail"), ["race-once", "replay-body"], "{}{}", run.stdout, run.stderr);
    assert_eq!(run.with("pass"), ["two-keys"], "{}", run.stdout);
    let before = upstream.count();

    // The name is not the certificate's; the roots are others.
    for (url, roots) in [
        (format!("https://127.0.0.1:{port}/pay"), "ca.pem"),
        (format!("https://localhost:{port}/pay"), "server.pem"),
    ] {
        let run = check_https(&url, roots).await;
        assert_eq!((run.code, run.stdout.as_str()), (3, ""), "{url}: {}", run.stderr);
        assert!(run.stderr.contains("certificate"), "{url}: {}", run.stderr);
    }
    assert_eq!(upstream.count(), before, "nothing is sent to whom nobody vouches for");
}
