//! The private Redis servers, tested.

use std::time::Duration;

use testkit::{Redis, ToldClock, wait_until};

#[tokio::test]
async fn a_durable_server_is_killed_and_started_again() {
    let server = Redis::options().durable().start().await;
    assert_eq!(server.cli(["set", "a", "7"]).await, "OK");
    server.kill_9().await;
    let refused = tokio::net::TcpStream::connect(server.addr()).await;
    assert!(refused.is_err(), "killed, it does not answer");
    server.start().await;
    assert_eq!(server.cli(["get", "a"]).await, "7", "what was answered outlives SIGKILL");
    server.stop().await;
    server.start().await;
    assert_eq!(server.cli(["get", "a"]).await, "7");
    server.pause();
    let silent = tokio::time::timeout(Duration::from_millis(300), server.cli(["ping"])).await;
    assert!(silent.is_err(), "a paused server does not answer");
    server.resume();
    assert_eq!(server.cli(["ping"]).await, "PONG");
}

#[tokio::test]
async fn without_persistence_a_restart_forgets() {
    let server = Redis::options().setting("maxmemory 50mb").start().await;
    assert_eq!(server.cli(["config", "get", "maxmemory"]).await, "maxmemory\n52428800");
    server.cli(["set", "a", "7"]).await;
    server.kill_9().await;
    server.start().await;
    assert_eq!(server.cli(["get", "a"]).await, "");
}

#[tokio::test]
async fn a_told_clock_moves_a_servers_time_to_the_millisecond() {
    let clock = ToldClock::stopped();
    let server = Redis::options().durable().clock(&clock).start().await;
    let time = server.cli(["time"]).await;
    assert_eq!(server.cli(["set", "a", "7", "px", "1000"]).await, "OK");
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(server.cli(["time"]).await, time, "it stands still");
    clock.advance(Duration::from_millis(999));
    assert_eq!(server.cli(["pttl", "a"]).await, "1");
    server.kill_9().await;
    server.start().await;
    assert_eq!(server.cli(["pttl", "a"]).await, "1", "over a restart too");
    clock.advance(Duration::from_millis(1));
    assert_eq!(server.cli(["pttl", "a"]).await, "0", "a key lives through the millisecond of its end");
    clock.advance(Duration::from_millis(1));
    assert_eq!(server.cli(["get", "a"]).await, "");
    clock.step_back(Duration::from_millis(1001));
    assert_eq!(server.cli(["time"]).await, time);
}

#[tokio::test]
async fn nothing_is_left_of_a_private_server() {
    let server = Redis::private().await;
    let folder = server.cli(["config", "get", "dir"]).await.lines().last().expect("its folder").to_owned();
    assert!(std::path::Path::new(&folder).exists());
    let addr = server.addr();
    drop(server);
    wait_until("its folder is gone", || !std::path::Path::new(&folder).exists()).await;
    assert!(std::net::TcpStream::connect(addr).is_err());
}

#[tokio::test]
async fn a_server_that_cannot_start_says_why() {
    let start = Redis::options().setting("maxmemory-policy sometimes").start();
    let error = tokio::spawn(start).await.unwrap_err().into_panic();
    let reason = error.downcast_ref::<String>().unwrap();
    assert!(reason.contains("maxmemory-policy"), "{reason}");
}
