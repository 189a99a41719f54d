//! The tools of the tests, tested.

use std::time::Duration;

use bytes::Bytes;
use http_body::Frame;
use testkit::{Answer, Client, Process, RawConnection, RawUpstream, Upstream, send_raw, wait_until};

#[tokio::test]
async fn the_upstream_counts_logs_and_answers() {
    let upstream = Upstream::start(|seen| match seen.path() {
        "/bin" => Answer::bytes(70_000),
        "/trailers" => Answer::chunks(["a", "b"], Duration::ZERO).trailer("sum", "9"),
        "/cut" => Answer::cut_short(10, "abc"),
        "/cut-chunked" => Answer::cut_chunked("abc"),
        "/reset" => Answer::reset(),
        _ => Answer::new(201, seen.body.clone()).header("x-a", "1").header("x-a", "2"),
    })
    .await;
    for client in [Client::new(upstream.addr()), Client::h2c(upstream.addr())] {
        let before = upstream.count();
        let response = client.post("/pay?x=1").key("k").body("hello").send().await.unwrap();
        assert_eq!((response.status, response.text()), (201, "hello"));
        assert_eq!(response.header_all("x-a"), ["1", "2"]);
        assert_eq!(upstream.count(), before + 1);
        let seen = upstream.last();
        assert_eq!((seen.path(), seen.header("idempotency-key")), ("/pay?x=1", Some("k")));
        assert_eq!(client.get("/bin").send().await.unwrap().body, testkit::upstream::pattern(70_000));
        let response = client.get("/trailers").header("te", "trailers").send().await.unwrap();
        assert_eq!((response.text(), response.trailers["sum"].to_str().unwrap()), ("ab", "9"));
        assert!(client.get("/cut-chunked").send().await.is_err());
        assert!(client.get("/reset").send().await.is_err());
    }
    let raw =
        send_raw(upstream.addr(), "GET /cut HTTP/1.1\r\nhost: x\r\n\r\n", Duration::from_secs(20)).await;
    assert!(String::from_utf8(raw).unwrap().ends_with("\r\n\r\nabc"));
}

#[tokio::test]
async fn events_and_uploads_stream() {
    let upstream = Upstream::start(|_| Answer::sse(["1", "2"], Duration::from_millis(10))).await;
    let client = Client::new(upstream.addr());
    let (sender, request) = client.post("/").header("trailer", "sum").frames();
    let (response, ()) = tokio::join!(request.send_streaming(), async move {
        sender.send(Frame::data(Bytes::from_static(b"up"))).await.unwrap();
        let trailers = [("sum".parse().unwrap(), "9".parse().unwrap())].into_iter().collect();
        sender.send(Frame::trailers(trailers)).await.unwrap();
    });
    let mut response = response.unwrap();
    assert_eq!(response.chunk().await.unwrap().unwrap(), "data: 1\n\n");
    assert_eq!(response.chunk().await.unwrap().unwrap(), "data: 2\n\n");
    assert_eq!(response.chunk().await.unwrap(), None);
    assert_eq!(upstream.last().body, "up");
    assert_eq!(upstream.last().trailers["sum"], "9");
}

#[tokio::test]
async fn keep_alive_and_idle_close() {
    let upstream = Upstream::options().idle_close(Duration::from_millis(50)).start(|_| Answer::ok("x")).await;
    let client = Client::new(upstream.addr());
    let mut connection = client.connect().await.unwrap();
    connection.send(client.get("/")).await.unwrap();
    wait_until("the idle connection is closed", || connection.is_closed()).await;
    wait_until("the upstream counts it as closed", || upstream.open_connections() == 0).await;
}

#[tokio::test]
async fn raw_sockets_record_every_byte() {
    let upstream = RawUpstream::answering("HTTP/1.1 204 No Content\r\n\r\n").await;
    let mut connection = RawConnection::open(upstream.addr()).await;
    for _ in 0..2 {
        connection.write("GET / HTTP/1.1\r\n\r\n").await;
        assert_eq!(connection.read_head().await.unwrap(), b"HTTP/1.1 204 No Content\r\n\r\n");
    }
    assert_eq!(upstream.received(), [b"GET / HTTP/1.1\r\n\r\nGET / HTTP/1.1\r\n\r\n"]);
}

#[tokio::test]
async fn a_process_is_watched_stopped_and_killed() {
    let script = "echo ready; echo oops >&2; trap 'exit 7' TERM; while :; do sleep 0.01; done";
    let dir = tempfile::tempdir().unwrap();
    let mut process = Process::spawn("sh", ["-c", script], dir.path()).unwrap();
    process.wait_output("ready").await.unwrap();
    process.wait_output("oops").await.unwrap();
    assert!(process.rss_bytes() > 0 && process.peak_rss_bytes() >= process.rss_bytes() / 2);
    process.sigstop().await.unwrap();
    process.sigcont().unwrap();
    process.sigterm().unwrap();
    assert_eq!(process.wait_exit().await.unwrap().code(), Some(7));
    assert!(process.sigterm().is_err(), "its id may be another's now");

    let mut process = Process::spawn("sleep", ["100"], dir.path()).unwrap();
    process.kill_9().await.unwrap();
    let mut process = Process::spawn("true", [] as [&str; 0], dir.path()).unwrap();
    assert!(process.wait_output("never").await.is_err());
}
