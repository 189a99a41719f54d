//! TLS, with certificates of an authority that nobody else trusts.

mod common;

use common::*;
use onlyonce_core::{Reply, Store};
use onlyonce_store_redis::RedisStore;
use testkit::{Authority, Redis, RedisCluster};

fn url(port: u16, more: &str) -> String {
    format!("rediss://127.0.0.1:{port}?connect_timeout_ms=20000&timeout_ms=20000{more}")
}

#[tokio::test]
async fn a_server_is_reached_when_its_certificate_is_trusted_and_only_then() {
    let authority = Authority::new();
    let server = Redis::options().tls(&authority).start().await;
    let ca = format!("&ca={}", authority.path().display());
    let store = RedisStore::open(&url(server.tls_port(), &ca)).await.unwrap();
    assert_eq!(store.capabilities().location, format!("rediss://127.0.0.1:{}", server.tls_port()));
    acquire(&store, &operation("k"), 1).await;
    finish(&store, &operation("k"), 1, Reply::ok("done")).await;
    assert_eq!(replay(&store, &operation("k")).await, Reply::ok("done"));
    // Not signed by anybody that the system trusts, nor by this other authority; nor is the name its own.
    let stranger = Authority::new();
    let other = format!("&ca={}", stranger.path().display());
    for url in [
        url(server.tls_port(), ""),
        url(server.tls_port(), &other),
        url(server.tls_port(), &ca).replace("127.0.0.1", "localhost"),
    ] {
        let error = RedisStore::open(&url).await.unwrap_err();
        let said = format!("{error} {:?}", std::error::Error::source(&error));
        assert!(said.to_lowercase().contains("certificate"), "{url}: {said}");
    }
    // Plain text on a port for TLS, and TLS on a port for plain text.
    let soon = |url: String| url.replace("20000", "2000");
    assert!(RedisStore::open(&soon(url(server.tls_port(), "").replace("rediss", "redis"))).await.is_err());
    assert!(RedisStore::open(&soon(url(server.port(), &ca))).await.is_err());
}

#[tokio::test]
async fn a_server_that_wants_a_certificate_of_its_clients_gets_one() {
    let authority = Authority::new();
    let server = Redis::options().tls(&authority).setting("tls-auth-clients yes").start().await;
    let folder = std::env::temp_dir().join(format!("onlyonce-store-redis-tls-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let identity = authority.identity("DNS:client");
    let [cert, key] = [("cert.pem", identity.cert), ("key.pem", identity.key)].map(|(name, pem)| {
        std::fs::write(folder.join(name), pem).unwrap();
        folder.join(name).display().to_string()
    });
    let ca = format!("&ca={}", authority.path().display());
    assert!(RedisStore::open(&url(server.tls_port(), &ca)).await.is_err(), "without a certificate");
    let store =
        RedisStore::open(&url(server.tls_port(), &format!("{ca}&cert={cert}&key={key}"))).await.unwrap();
    acquire(&store, &operation("k"), 1).await;
    assert!(!format!("{store:?}").contains("PRIVATE KEY"));
    std::fs::remove_dir_all(&folder).unwrap();
}

#[tokio::test]
async fn a_cluster_speaks_tls_on_every_node() {
    let authority = Authority::new();
    let options = Redis::options().tls(&authority).setting("tls-cluster yes").setting("tls-replication yes");
    let cluster = RedisCluster::start(&options).await;
    let nodes: Vec<_> = cluster.nodes().iter().map(|node| format!("127.0.0.1:{}", node.tls_port())).collect();
    let url = format!(
        "rediss+cluster://{}?connect_timeout_ms=20000&timeout_ms=20000&ca={}",
        nodes[0],
        authority.path().display()
    );
    let store = RedisStore::open(&url).await.unwrap();
    for n in 0..30 {
        let op = operation(&format!("k{n}"));
        acquire(&store, &op, 1).await;
        finish(&store, &op, 1, Reply::ok("done")).await;
    }
    cluster.node(1).kill_9().await;
    for n in 0..30 {
        let op = operation(&format!("k{n}"));
        let answer = testkit::wait_for("it is answered after the failover", async || {
            store.claim(&op, &request(2)).await.ok()
        });
        // Replication may have been behind; it is answered all the same.
        answer.await;
    }
}
