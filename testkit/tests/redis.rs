//! The private Redis servers, tested.

use std::time::Duration;

use testkit::{Authority, Redis, RedisCluster, RedisSentinels, ToldClock, wait_until};

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

#[tokio::test]
async fn a_cluster_of_six_fails_over_and_moves_slots() {
    let cluster = RedisCluster::private().await;
    let key = cluster.key_on("k", 1).await;
    assert_eq!(cluster.master_of(&key).await, 1);
    assert_eq!(cluster.node(1).cli(["set", &key, "7"]).await, "OK");
    let slot = cluster.slot_of(&key).await;
    cluster.begin_move(slot, 1, 0).await;
    cluster.end_move(slot, 1, 0).await;
    assert_eq!(cluster.node(0).cli(["get", &key]).await, "7");
    assert!(cluster.node(1).cli(["get", &key]).await.contains("MOVED"));
    assert_eq!(cluster.node(0).cli(["wait", "1", "5000"]).await, "1");
    cluster.node(0).kill_9().await;
    assert_eq!(cluster.failed_over(&key, 0).await, 3);
    assert_eq!(cluster.node(3).cli(["get", &key]).await, "7");
    cluster.node(0).start().await;
    cluster.settled().await;
    assert!(cluster.node(0).cli(["role"]).await.starts_with("slave"));
}

#[tokio::test]
async fn sentinels_replace_a_master_that_was_killed() {
    let servers = RedisSentinels::start(&Redis::options(), 1).await;
    assert_eq!(servers.server(0).cli(["set", "a", "7"]).await, "OK");
    assert_eq!(servers.server(0).cli(["wait", "1", "5000"]).await, "1");
    servers.server(0).kill_9().await;
    assert_eq!(servers.failed_over(0).await, 1);
    assert_eq!(servers.server(1).cli(["get", "a"]).await, "7");
}

#[tokio::test]
async fn a_server_speaks_tls_on_a_port_of_its_own() {
    let authority = Authority::new();
    let server = Redis::options().tls(&authority).start().await;
    assert_eq!(server.cli(["set", "a", "7"]).await, "OK");
    let get = |ca: std::path::PathBuf| {
        let mut cli = server.tool("redis-cli").unwrap();
        cli.args(["--tls", "--cacert"]).arg(ca).args(["-p", &server.tls_port().to_string(), "get", "a"]);
        String::from_utf8(cli.output().unwrap().stdout).unwrap()
    };
    assert_eq!(get(authority.path()).trim(), "7");
    assert_eq!(get(Authority::new().path()).trim(), "", "signed by nobody that it knows");
}
