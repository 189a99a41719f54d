//! TLS with a private authority.
#![allow(clippy::unwrap_used, reason = "a test fails by it")]

mod common;

use common::*;
use onlyonce_core::{Store, StoreErrorKind};
use onlyonce_store_mysql::MysqlStore;
use testkit::{Authority, Mariadb};

async fn server(authority: &Authority, name: &str) -> Mariadb {
    let identity = authority.identity(name);
    let options = Mariadb::options()
        .file("ca.pem", &authority.pem())
        .file("server.pem", &identity.cert)
        .file("server.key", &identity.key);
    options
        .setting("ssl-ca=ca.pem")
        .setting("ssl-cert=server.pem")
        .setting("ssl-key=server.key")
        .start()
        .await
}

#[tokio::test]
async fn the_server_is_who_its_authority_says() {
    let authority = Authority::new();
    let server = server(&authority, "IP:127.0.0.1").await;
    let database = server.database().await;
    server
        .sql(&database, "create user tls@'127.0.0.1' require ssl; grant all on *.* to tls@'127.0.0.1'")
        .await;
    let url = |more: &str| format!("mysql://tls@{}/{database}{more}", server.addr());
    let ca = authority.path().display().to_string();
    for more in ["?ssl-mode=preferred", "?ssl-mode=required", &format!("?ssl-ca={ca}")] {
        let store = MysqlStore::open(&url(more)).await.unwrap_or_else(|error| panic!("{more}: {error}"));
        acquired(store.claim(&op(more), &take_over()).await.unwrap());
    }
    // In plain text this user does not come in.
    for more in ["", "?ssl-mode=disabled"] {
        assert_eq!(MysqlStore::open(&url(more)).await.unwrap_err().kind(), StoreErrorKind::Unfit);
    }
    // Signed by somebody else; and by none that this machine trusts.
    let other = Authority::new().path().display().to_string();
    let unknown = Authority::new();
    let unknown = unknown.path().display().to_string();
    for more in [format!("?ssl-ca={unknown}"), "?ssl-mode=verify_identity".into()] {
        let error = MysqlStore::open(&url(&more)).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Unfit, "{more}: {error}");
        assert!(error.to_string().contains("certificate was not accepted"), "{more}: {error}");
    }
    let gone = MysqlStore::open(&url(&format!("?ssl-ca={other}"))).await.unwrap_err();
    assert!(gone.to_string().contains("cannot be read"), "{gone}");
}

#[tokio::test]
async fn a_certificate_for_another_host_is_refused() {
    let authority = Authority::new();
    let server = server(&authority, "DNS:db.example").await;
    let database = server.database().await;
    let ca = authority.path().display().to_string();
    let error = MysqlStore::open(&format!("{}?ssl-ca={ca}", server.url(&database))).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unfit);
    assert!(error.to_string().contains("certificate was not accepted"), "{error}");
    // TLS all the same where nobody asks who it is.
    MysqlStore::open(&format!("{}?ssl-mode=required", server.url(&database))).await.unwrap();
}

#[tokio::test]
async fn a_server_without_tls_serves_where_tls_is_only_preferred() {
    let (server, database) = database().await;
    MysqlStore::open(&format!("{}?ssl-mode=preferred", server.url(&database))).await.unwrap();
    let error = MysqlStore::open(&format!("{}?ssl-mode=required", server.url(&database))).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unfit);
    assert!(error.to_string().contains("offers no TLS"), "{error}");
}

#[tokio::test]
async fn a_client_shows_its_certificate() {
    let authority = Authority::new();
    let server = server(&authority, "IP:127.0.0.1").await;
    let database = server.database().await;
    server
        .sql(&database, "create user cert@'127.0.0.1' require x509; grant all on *.* to cert@'127.0.0.1'")
        .await;
    let identity = authority.identity("DNS:client");
    let folder = tempfile::tempdir().unwrap();
    let (cert, key) = (folder.path().join("cert"), folder.path().join("key"));
    std::fs::write(&cert, identity.cert).unwrap();
    std::fs::write(&key, identity.key).unwrap();
    let url = format!("mysql://cert@{}/{database}?ssl-ca={}", server.addr(), authority.path().display());
    assert_eq!(MysqlStore::open(&url).await.unwrap_err().kind(), StoreErrorKind::Unfit);
    let shown = format!("{url}&ssl-cert={}&ssl-key={}", cert.display(), key.display());
    MysqlStore::open(&shown).await.unwrap();
}

#[tokio::test]
async fn a_unix_socket_is_used_where_it_is_named() {
    let (server, database) = database().await;
    let url = format!("mysql://root@localhost/{database}?socket={}", server.socket().display());
    let store = MysqlStore::open(&url).await.unwrap();
    acquired(store.claim(&op("k"), &take_over()).await.unwrap());
    assert!(store.location().contains("socket"), "{}", store.location());
}
