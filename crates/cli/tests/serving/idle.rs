//! H23: thousands of connections that do nothing do not stop others.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use testkit::{Process, RawConnection};

use crate::common::{Gateway, PROGRAM, pay};
use crate::numbered;

const IDLE: usize = 5000;

const SERVED: &str = "GET /served HTTP/1.1\r\nHost: h\r\n\r\n";
const BEGUN: &str = "GET /begun HTTP/1.1\r\nHost: h\r\n";

#[tokio::test(flavor = "multi_thread")]
async fn five_thousand_idle_connections_do_not_stop_others() {
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).unwrap();
    let enough = limit.maximum.is_none_or(|maximum| maximum > IDLE as u64 + 500);
    assert!(enough, "this test opens {IDLE} files, and may open {:?}: raise ulimit -Hn", limit.maximum);

    let upstream = numbered(std::time::Duration::ZERO).await;
    let folder = tempfile::tempdir().unwrap();
    // A shell that is told to allow as few as many systems do: the gateway helps itself.
    let script = "ulimit -S -n 1024; exec \"$0\" \"$@\"";
    let mut args = vec!["-c", script, PROGRAM, "serve", "--listen", "127.0.0.1:0", "--header-timeout", "10m"];
    let url = upstream.url();
    args.extend(["--upstream", &url, "--store", "sqlite:onlyonce.db"]);
    let process = Process::spawn("sh", args, folder.path()).unwrap();
    let gateway = Gateway::ready(process, folder.path()).await.unwrap();
    let before = gateway.process.rss_bytes();

    let mut idle = Vec::with_capacity(IDLE);
    for n in 0..IDLE {
        let mut connection = RawConnection::open(gateway.addr).await;
        match n % 4 {
            0 => drop(connection.write(BEGUN).await),
            1 => {
                connection.write(SERVED).await;
                assert!(connection.read_head().await.unwrap().starts_with(b"HTTP/1.1 201"));
                connection.read_until(b"run ").await.unwrap();
            }
            _ => {}
        }
        idle.push(connection);
    }
    let held = gateway.process.rss_bytes().saturating_sub(before);
    println!("{IDLE} idle connections: {} bytes of memory each", held / IDLE as u64);

    for n in 0..50 {
        let answer = pay(gateway.client(), &format!("k-{n}")).await.unwrap();
        assert_eq!(answer.status, 201);
        assert_eq!(pay(gateway.client(), &format!("k-{n}")).await.unwrap().body, answer.body, "a replay");
    }
    // They were not forgotten either.
    for (n, connection) in idle.iter_mut().take(8).enumerate() {
        let request = if n % 4 == 0 { "\r\n" } else { SERVED };
        connection.write(request).await;
        let head = connection.read_until(b"HTTP/1.1 201").await;
        assert!(head.is_some(), "connection {n} was not served after it had been idle");
    }
}
