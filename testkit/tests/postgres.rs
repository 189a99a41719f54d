//! The private PostgreSQL, tested.

use std::path::Path;
use std::time::Duration;

use testkit::{PgBouncer, PoolMode, Postgres, wait_until};

#[tokio::test]
async fn a_shared_server_gives_everybody_a_database() {
    let server = Postgres::shared().await;
    let again = Postgres::shared().await;
    assert_eq!(server.addr(), again.addr());
    let (one, two) = (server.database().await, again.database().await);
    assert_ne!(one, two);
    server.psql(&one, "create table t (x int); insert into t values (7)").await;
    assert_eq!(server.psql(&one, "select x, 'a' from t").await, "7|a");
    let error = server.try_psql(&two, "select x from t").await.unwrap_err();
    assert!(format!("{error:#}").contains("does not exist"), "{error:#}");
    assert_eq!(server.psql(&one, "show fsync").await, "on");
    assert_eq!(server.psql(&one, "select 'a' < 'B'").await, "t", "sorted by a language");
}

#[tokio::test]
async fn a_private_server_is_stopped_killed_and_started_again() {
    let server = Postgres::options().setting("max_connections = 17").start().await;
    assert_eq!(server.psql("postgres", "show max_connections").await, "17");
    server.psql("postgres", "create table t (x int); insert into t values (7)").await;
    server.kill_9().await;
    assert!(server.try_psql("postgres", "select 1").await.is_err());
    server.start().await;
    assert_eq!(server.psql("postgres", "select x from t").await, "7", "what was committed outlives SIGKILL");
    server.stop().await;
    assert!(server.try_psql("postgres", "select 1").await.is_err());
    server.start().await;
    assert_eq!(server.psql("postgres", "select x from t").await, "7");
    server.pause();
    let silent = tokio::time::timeout(Duration::from_millis(300), server.psql("postgres", "select 1")).await;
    assert!(silent.is_err(), "a paused server does not answer");
    server.resume();
    assert_eq!(server.psql("postgres", "select x from t").await, "7");
}

#[tokio::test]
async fn nothing_is_left_of_a_private_server() {
    let server = Postgres::private().await;
    let folder = server.psql("postgres", "show data_directory").await;
    let process = format!(
        "/proc/{}",
        std::fs::read_to_string(format!("{folder}/postmaster.pid")).unwrap().lines().next().unwrap()
    );
    assert!(Path::new(&process).exists());
    drop(server);
    wait_until("its process is gone", || {
        // A zombie of this process has no folder any more.
        std::fs::read_link(format!("{process}/cwd")).is_err()
    })
    .await;
    wait_until("its folder is gone", || !Path::new(&folder).parent().unwrap().exists()).await;
}

#[tokio::test]
async fn a_server_that_cannot_start_says_why() {
    let start = Postgres::options().setting("shared_buffers = 'none'").start();
    let error = tokio::spawn(start).await.unwrap_err().into_panic();
    let reason = error.downcast_ref::<String>().unwrap();
    assert!(reason.contains("shared_buffers"), "{reason}");
}

#[tokio::test]
async fn a_pooler_lends_a_connection_for_a_transaction() {
    let server = Postgres::shared().await;
    let database = server.database().await;
    let pooler = PgBouncer::start(&server, PoolMode::Transaction).await;
    let psql = |sql: &'static str| {
        let mut psql = server.tool("psql").unwrap();
        psql.args(["-XAt", "-d", &pooler.url(&database), "-c", sql]);
        String::from_utf8(psql.output().unwrap().stdout).unwrap()
    };
    assert_eq!(psql("select 1").trim(), "1");
    assert_ne!(pooler.addr(), server.addr());
}
