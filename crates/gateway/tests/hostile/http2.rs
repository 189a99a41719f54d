//! Shapes of HTTP/2, on their way to a service of HTTP/1.1: RFC 9113 §8.2, §8.3, §10.3.

use std::time::Duration;

use testkit::{RawUpstream, wait_until};

use crate::frames::{
    CONTINUATION, DATA, END_HEADERS, END_STREAM, Frames, HEADERS, PING, RST_STREAM, SETTINGS, block, frame,
};
use crate::{arrived, gateway, service, still_serves};

type Header = (&'static [u8], &'static [u8]);

const METHOD: Header = (b":method", b"POST");
const SCHEME: Header = (b":scheme", b"http");
const AUTHORITY: Header = (b":authority", b"h");
const PATH: Header = (b":path", b"/outer");
const KEY: Header = (b"idempotency-key", b"k");

const QUIET: Duration = Duration::from_millis(300);

/// Heads that must not arrive, in whole.
fn bad_heads() -> Vec<(&'static str, Vec<Header>)> {
    let with = |header: Header| vec![METHOD, SCHEME, AUTHORITY, PATH, KEY, header];
    let method = |value: &'static [u8]| vec![(METHOD.0, value), SCHEME, AUTHORITY, PATH, KEY];
    let path = |value: &'static [u8]| vec![METHOD, SCHEME, AUTHORITY, (PATH.0, value), KEY];
    let authority = |value: &'static [u8]| vec![METHOD, SCHEME, (AUTHORITY.0, value), PATH, KEY];
    vec![
        ("CR LF in a value", with((b"x-a", b"1\r\nTransfer-Encoding: chunked"))),
        ("LF in a value", with((b"x-a", b"1\nTransfer-Encoding: chunked"))),
        ("CR in a value", with((b"x-a", b"1\rX: y"))),
        ("NUL in a value", with((b"x-a", b"1\0"))),
        (
            "a whole request in a value",
            with((b"x-a", b"1\r\n\r\nPOST /smuggled HTTP/1.1\r\nHost: h\r\n\r\n")),
        ),
        ("CR LF in a name", with((b"x-a: 1\r\ntransfer-encoding", b"chunked"))),
        ("LF in a name", with((b"x\na", b"1"))),
        ("a colon in a name", with((b"transfer-encoding: chunked\r\nx", b"1"))),
        ("a space in a name", with((b"transfer-encoding ", b"chunked"))),
        ("an empty name", with((b"", b"1"))),
        ("a name in upper case", with((b"X-A", b"1"))),
        ("transfer-encoding", with((b"transfer-encoding", b"chunked"))),
        ("connection", with((b"connection", b"transfer-encoding"))),
        ("keep-alive", with((b"keep-alive", b"1"))),
        ("proxy-connection", with((b"proxy-connection", b"keep-alive"))),
        ("upgrade", with((b"upgrade", b"h2c"))),
        ("te: gzip", with((b"te", b"gzip"))),
        ("a length in words", with((b"content-length", b"three"))),
        ("a signed length", with((b"content-length", b"+0"))),
        (
            "two lengths",
            [with((b"content-length", b"0")), vec![(&b"content-length"[..], &b"40"[..])]].concat(),
        ),
        ("an unknown pseudo-header", with((b":x", b"1"))),
        ("a pseudo-header after others", [vec![METHOD, SCHEME, AUTHORITY, KEY], vec![PATH]].concat()),
        ("a status", with((b":status", b"200"))),
        (
            "two paths",
            [vec![METHOD, SCHEME, AUTHORITY, PATH], vec![(PATH.0, &b"/smuggled"[..]), KEY]].concat(),
        ),
        ("two methods", vec![METHOD, (METHOD.0, b"GET"), SCHEME, AUTHORITY, PATH, KEY]),
        ("no method", vec![SCHEME, AUTHORITY, PATH, KEY]),
        ("no path", vec![METHOD, SCHEME, AUTHORITY, KEY]),
        ("no scheme", vec![METHOD, AUTHORITY, PATH, KEY]),
        ("an empty path", path(b"")),
        ("a path without a slash", path(b"pay")),
        ("a path with CR LF", path(b"/ HTTP/1.1\r\nHost: h\r\n\r\nPOST /smuggled HTTP/1.1\r\nX: ")),
        ("a path with a space", path(b"/x HTTP/1.1")),
        ("a path with a NUL", path(b"/\0")),
        ("a method with a space", method(b"POST /smuggled HTTP/1.1\r\nX:")),
        ("a method with a line end", method(b"POST\r\n")),
        ("an empty method", method(b"")),
        ("a tunnel", vec![(METHOD.0, b"CONNECT"), AUTHORITY]),
        (
            "a tunnel with a protocol",
            vec![(METHOD.0, b"CONNECT"), (b":protocol", b"connect-udp"), SCHEME, AUTHORITY, PATH],
        ),
        ("an authority with CR LF", authority(b"h\r\nTransfer-Encoding: chunked")),
        ("an authority with a path", authority(b"h/x")),
        ("an authority with a space", authority(b"h x")),
        ("no authority, and a bad host", vec![METHOD, SCHEME, PATH, (b"host", b"h/x"), KEY]),
        (
            "no authority, and two hosts",
            vec![METHOD, SCHEME, PATH, (b"host", b"h"), (b"host", b"other"), KEY],
        ),
        ("an authority and another host", vec![METHOD, SCHEME, AUTHORITY, PATH, (b"host", b"other"), KEY]),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn no_head_of_http_2_becomes_two_requests_or_passes_by_a_guard() {
    for (what, head) in bad_heads() {
        let service = service().await;
        let gateway = gateway(&service.url(), |_| {}).await;
        let mut client = Frames::open(gateway.addr).await;
        client.head(1, &head, true).await;
        let came = client.read(QUIET).await;
        let lines = arrived(&service, what);
        // One whose other host is ignored in favour of the authority is whole too.
        let one = lines == ["POST /outer HTTP/1.1"] && came.statuses == [200];
        let text = service.text();
        assert!(
            lines.is_empty() || (one && what.contains("another host") && !text.contains("other")),
            "{what}: {text}"
        );
        let told = !came.statuses.is_empty() || came.resets > 0 || came.gone_away;
        assert!(told, "{what}: silence: {came:?}");
        still_serves(&gateway, what).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_length_and_the_body_of_http_2_agree_or_nothing_runs() {
    for (what, length, body, declared_end) in [
        ("more than its length", &b"3"[..], &b"abcPOST /smuggled HTTP/1.1\r\n\r\n"[..], true),
        ("less than its length", b"300", b"abc", true),
        ("a length, and no body", b"3", b"", true),
        ("length 0, and a body", b"0", b"POST /smuggled HTTP/1.1\r\nHost: h\r\n\r\n", true),
        ("never ended", b"3", b"ab", false),
    ] {
        for method in [&b"POST"[..], b"PUT"] {
            let service = service().await;
            let gateway = gateway(&service.url(), |options| {
                options.body_timeout = Duration::from_millis(300);
            })
            .await;
            let mut client = Frames::open(gateway.addr).await;
            let head = [(METHOD.0, method), SCHEME, AUTHORITY, PATH, KEY, (b"content-length", length)];
            client.head(1, &head, body.is_empty() && declared_end).await;
            if !body.is_empty() {
                client.send(DATA, if declared_end { END_STREAM } else { 0 }, 1, body).await;
            }
            let came = client.read(QUIET).await;
            // Of an unguarded one the beginning may have gone on; it never ends there.
            let text = service.text();
            let whole = text.contains("\r\n\r\nabc") && length == b"3";
            assert!(!whole && !text.contains("smuggled"), "{what}: {text}");
            assert!(!came.statuses.contains(&200), "{what}: {came:?}");
            drop(client);
            still_serves(&gateway, what).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_star_is_a_target_of_options_alone() {
    let service = service().await;
    let gateway = gateway(&service.url(), |_| {}).await;
    let mut client = Frames::open(gateway.addr).await;
    client.head(1, &[(METHOD.0, b"POST"), SCHEME, AUTHORITY, (PATH.0, b"*"), KEY], true).await;
    assert_eq!(client.read(QUIET).await.statuses.first(), Some(&400));
    assert_eq!(service.text(), "");
}

#[tokio::test(flavor = "multi_thread")]
async fn trailers_of_http_2_cannot_reframe_or_name_a_key() {
    for (what, trailer) in [
        ("a length", (&b"content-length"[..], &b"50"[..])),
        ("chunks", (b"transfer-encoding", b"chunked")),
        ("a pseudo-header", (b":path", b"/smuggled")),
        ("a line end", (b"x-sum", b"1\r\n\r\nPOST /smuggled HTTP/1.1\r\n\r\n")),
    ] {
        let service = service().await;
        let gateway = gateway(&service.url(), |_| {}).await;
        let mut client = Frames::open(gateway.addr).await;
        let head = [(METHOD.0, &b"PUT"[..]), SCHEME, AUTHORITY, PATH, (b"trailer", trailer.0)];
        client.head(1, &head, false).await;
        client.send(DATA, 0, 1, b"abc").await;
        client.head(1, &[trailer], true).await;
        client.read(QUIET).await;
        drop(client);
        assert!(!service.text().contains("smuggled"), "{what}: {}", service.text());
        assert!(arrived(&service, what).len() <= 1, "{what}");
        still_serves(&gateway, what).await;
    }
    let service = service().await;
    let gateway = gateway(&service.url(), |_| {}).await;
    let mut client = Frames::open(gateway.addr).await;
    client.head(1, &[METHOD, SCHEME, AUTHORITY, PATH, (b"trailer", b"idempotency-key")], false).await;
    client.send(DATA, 0, 1, b"abc").await;
    client.head(1, &[KEY], true).await;
    assert_eq!(client.read(QUIET).await.statuses.first(), Some(&400));
    assert_eq!(service.text(), "");
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_that_are_opened_and_reset_at_once_do_not_stop_others() {
    let service = service().await;
    let gateway = gateway(&service.url(), |_| {}).await;
    let mut client = Frames::open(gateway.addr).await;
    let get = block(&[(METHOD.0, b"GET"), SCHEME, AUTHORITY, PATH]);
    let mut gone = false;
    for burst in 0..100u32 {
        let mut bytes = Vec::new();
        for n in 0..100 {
            let stream = (burst * 100 + n) * 2 + 1;
            bytes.extend(frame(HEADERS, END_HEADERS | END_STREAM, stream, &get));
            bytes.extend(frame(RST_STREAM, 0, stream, &8u32.to_be_bytes()));
        }
        if !client.connection.write(bytes).await {
            gone = true;
            break;
        }
        still_serves(&gateway, "while streams are reset").await;
    }
    let came = client.read(QUIET).await;
    assert!(gone || came.closed || came.gone_away, "10 000 resets, and still served: {came:?}");
}

/// One that was refused and has not seen it yet: past a second, a stream that was reset is forgotten, and what comes on it ends
/// the connection.
#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_writes_on_to_who_refused_it_keeps_its_connection() {
    let service = service().await;
    let gateway = gateway(&service.url(), |_| {}).await;
    let mut client = Frames::open(gateway.addr).await;
    client.head(1, &[METHOD, SCHEME, AUTHORITY, PATH], false).await;
    let refused = client.read(QUIET).await;
    assert_eq!((refused.statuses.as_slice(), refused.resets), (&[400][..], 0), "without a key");
    for piece in 0..5 {
        tokio::time::sleep(Duration::from_millis(500)).await;
        assert!(client.send(DATA, if piece == 4 { END_STREAM } else { 0 }, 1, &[b'x'; 1000]).await);
    }
    client.head(3, &[(METHOD.0, b"GET"), SCHEME, AUTHORITY, PATH], true).await;
    let came = client.read(QUIET).await;
    assert_eq!(
        (came.statuses.as_slice(), came.gone_away, came.closed),
        (&[200][..], false, false),
        "{came:?}"
    );
    assert_eq!(arrived(&service, "after it"), ["GET /outer HTTP/1.1"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn floods_of_frames_that_ask_for_nothing_do_not_stop_others() {
    let service = service().await;
    let gateway = gateway(&service.url(), |_| {}).await;
    let continuation = frame(CONTINUATION, 0, 1, &block(&[(b"x-a", &[b'a'; 1000])]));
    let head = frame(HEADERS, END_STREAM, 1, &block(&[(METHOD.0, b"GET"), SCHEME, AUTHORITY, PATH]));
    for (what, opening, flood) in [
        ("pings", Vec::new(), frame(PING, 0, 0, &[0; 8])),
        ("settings", Vec::new(), frame(SETTINGS, 0, 0, &[])),
        ("a head without end", head, continuation),
    ] {
        let mut client = Frames::open(gateway.addr).await;
        client.connection.write(opening).await;
        for _ in 0..200 {
            // The answers are not read: they must not pile up either.
            let written = tokio::time::timeout(QUIET, client.connection.write(flood.repeat(20))).await;
            if written != Ok(true) {
                break;
            }
        }
        still_serves(&gateway, what).await;
        if what == "a head without end" {
            let came = client.read(QUIET).await;
            assert!(came.closed || came.gone_away || !came.statuses.is_empty(), "{what}: {came:?}");
        }
    }
    assert!(arrived(&service, "floods").iter().all(|line| line.starts_with("GET /after/")));
}

/// RFC 9113 §6.7: a PING is for the connection, and asks for nothing.
#[tokio::test(flavor = "multi_thread")]
async fn a_connection_without_requests_is_closed_however_alive_its_client_is() {
    let service = service().await;
    let idle = Duration::from_secs(1);
    let gateway = gateway(&service.url(), |options| options.client_idle_timeout = idle).await;
    let get = [(METHOD.0, &b"GET"[..]), SCHEME, AUTHORITY, PATH];
    let unfinished = frame(HEADERS, END_STREAM, 1, &block(&get));
    for (what, opening, trickle) in [
        ("pings", Vec::new(), frame(PING, 0, 0, &[0; 8])),
        ("a head in small pieces", unfinished, frame(CONTINUATION, 0, 1, &block(&[(b"x-a", b"1")]))),
        (
            "pings after a request",
            frame(HEADERS, END_HEADERS | END_STREAM, 1, &block(&get)),
            frame(PING, 0, 0, &[0; 8]),
        ),
    ] {
        let mut client = Frames::open(gateway.addr).await;
        client.connection.write(opening).await;
        let opened = tokio::time::Instant::now();
        let mut came = client.read(QUIET / 3).await;
        while !came.gone_away && opened.elapsed() < 20 * idle {
            client.connection.write(trickle.clone()).await;
            came = client.read(QUIET / 3).await;
        }
        assert!(came.gone_away, "{what}: open after {:?}", opened.elapsed());
    }
}

/// A request that takes longer is a request all the while.
#[tokio::test(flavor = "multi_thread")]
async fn a_connection_with_a_request_is_not_idle() {
    let service = RawUpstream::start(|_, mut connection| async move {
        connection.read_head().await;
        tokio::time::sleep(Duration::from_millis(1500)).await;
        connection.write("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").await;
    })
    .await;
    let idle = Duration::from_millis(300);
    let gateway = gateway(&service.url(), |options| options.client_idle_timeout = idle).await;
    let mut client = Frames::open(gateway.addr).await;
    client.head(1, &[(METHOD.0, b"GET"), SCHEME, AUTHORITY, PATH], true).await;
    let came = client.read(Duration::from_secs(2)).await;
    assert_eq!((came.statuses, came.data), (vec![200], b"ok".to_vec()));
    assert!(came.gone_away, "it was closed afterwards");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_takes_nothing_holds_up_nobody() {
    let service = service().await;
    let gateway = gateway(&service.url(), |_| {}).await;
    // No window for any answer: RFC 9113 §10.5.
    let mut client = Frames::open(gateway.addr).await;
    client.send(SETTINGS, 0, 0, &[0, 4, 0, 0, 0, 0]).await;
    let get = [(METHOD.0, &b"GET"[..]), SCHEME, AUTHORITY, PATH];
    for stream in 0..50 {
        client.head(stream * 2 + 1, &get, true).await;
    }
    wait_until("all are answered by the service", || service.text().matches("GET /outer").count() == 50)
        .await;
    still_serves(&gateway, "a closed window").await;
    let came = client.read(QUIET).await;
    assert_eq!((came.statuses.len(), came.data.len()), (50, 0));
}
