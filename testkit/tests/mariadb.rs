//! The private MariaDB does what it says.
#![allow(clippy::unwrap_used, reason = "a test fails by it")]

use std::time::Duration;

use testkit::{Mariadb, wait_until};

#[tokio::test]
async fn one_server_is_shared_and_its_databases_are_apart() {
    let server = Mariadb::shared().await;
    let again = Mariadb::shared().await;
    assert_eq!(server.addr(), again.addr());
    let (one, two) = (server.database().await, again.database().await);
    server.sql(&one, "create table t (x int); insert into t values (1), (2)").await;
    assert_eq!(again.sql(&one, "select count(*), 'a' from t").await, "2\ta");
    assert!(server.try_sql(&two, "select * from t").await.is_err());
    assert_eq!(server.sql(&two, "select @@innodb_flush_log_at_trx_commit").await, "1");
}

#[tokio::test]
async fn a_private_server_is_stopped_killed_paused_and_started_again() {
    let server = Mariadb::options().setting("max_connections=17").start().await;
    assert_eq!(server.sql("mysql", "select @@max_connections").await, "17");
    let name = server.database().await;
    server.sql(&name, "create table t (x int) engine=innodb; insert into t values (7)").await;
    server.kill_9().await;
    assert!(server.try_sql(&name, "select 1").await.is_err());
    server.start().await;
    assert_eq!(server.sql(&name, "select x from t").await, "7", "what was committed outlives SIGKILL");
    server.stop().await;
    assert!(server.try_sql(&name, "select 1").await.is_err());
    server.start().await;
    assert_eq!(server.sql(&name, "select x from t").await, "7");
    server.pause();
    let silent = tokio::time::timeout(Duration::from_millis(300), server.sql(&name, "select 1")).await;
    server.resume();
    assert!(silent.is_err(), "a paused server does not answer");
    assert_eq!(server.sql(&name, "select x from t").await, "7");
}

#[tokio::test]
async fn nothing_is_left_of_a_server_that_nobody_uses() {
    let server = Mariadb::private().await;
    let folder = server.socket().parent().unwrap().to_owned();
    assert!(folder.join("data").is_dir());
    let addr = server.addr();
    drop(server);
    wait_until("the server ends and its folder goes", || {
        std::net::TcpStream::connect(addr).is_err() && !folder.exists()
    })
    .await;
}

#[tokio::test]
async fn a_server_that_cannot_start_says_why() {
    let start = Mariadb::options().setting("no-such-setting=1").start();
    let failed = tokio::spawn(start).await.unwrap_err().into_panic();
    let said = failed.downcast_ref::<String>().unwrap();
    assert!(said.contains("no-such-setting"), "{said}");
}
