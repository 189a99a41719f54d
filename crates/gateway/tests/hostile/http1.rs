//! Shapes of HTTP/1.1.

use testkit::RawConnection;

use crate::{SMUGGLED, arrived, gateway, say, service, still_serves};

/// What must become of a shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// Nothing of it arrives; the answer is a refusal, and nothing is answered after it.
    Refused,
    /// The one request that it begins with arrives, once.
    One,
    /// Either of them.
    Either,
}
use End::{Either, One, Refused};

/// After the request line and a good host, before what follows.
const FRAMING: &[(&str, End, &str)] = &[
    // A length and chunks.
    ("a length, then chunks", One, "Content-Length: 50\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
    ("chunks, then a length", One, "Transfer-Encoding: chunked\r\nContent-Length: 50\r\n\r\n0\r\n\r\n"),
    (
        "chunks and length 0",
        One,
        "Content-Length: 0\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
    ),
    (
        "chunks between two lengths",
        One,
        "Content-Length: 5\r\nTransfer-Encoding: chunked\r\nContent-Length: 44\r\n\r\n0\r\n\r\n",
    ),
    ("chunks and a bad length", Either, "Transfer-Encoding: chunked\r\nContent-Length: x\r\n\r\n0\r\n\r\n"),
    // Two codings, or one that is hidden.
    ("an unknown coding", Refused, "Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n"),
    ("a coding cut off", Refused, "Transfer-Encoding: chunke\r\n\r\n0\r\n\r\n"),
    ("an empty coding", Refused, "Transfer-Encoding:\r\n\r\n0\r\n\r\n"),
    ("chunked, identity", Refused, "Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n"),
    ("identity, chunked", Refused, "Transfer-Encoding: identity, chunked\r\n\r\n0\r\n\r\n"),
    ("identity", Refused, "Transfer-Encoding: identity\r\n\r\n"),
    ("gzip, chunked", Refused, "Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n"),
    ("chunked twice in a line", Refused, "Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n"),
    (
        "chunked in two lines",
        Refused,
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    ),
    ("chunked and a cow", Refused, "Transfer-Encoding: chunked\r\nTransfer-encoding: cow\r\n\r\n0\r\n\r\n"),
    ("a cow and chunked", Refused, "Transfer-Encoding: cow\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
    ("a parameter", Refused, "Transfer-Encoding: chunked;q=1\r\n\r\n0\r\n\r\n"),
    ("quoted", Refused, "Transfer-Encoding: \"chunked\"\r\n\r\n0\r\n\r\n"),
    ("a comma before", Refused, "Transfer-Encoding: ,chunked\r\n\r\n0\r\n\r\n"),
    ("a vertical tab before", Refused, "Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n"),
    ("a form feed after", Refused, "Transfer-Encoding: chunked\x0c\r\n\r\n0\r\n\r\n"),
    ("a NUL after", Refused, "Transfer-Encoding: chunked\0\r\n\r\n0\r\n\r\n"),
    ("a CR inside", Refused, "Transfer-Encoding: chun\rked\r\n\r\n0\r\n\r\n"),
    ("space before the colon", Refused, "Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n"),
    ("a tab before the colon", Refused, "Transfer-Encoding\t: chunked\r\n\r\n0\r\n\r\n"),
    ("space before a length's colon", Refused, "Content-Length : 3\r\n\r\nabc"),
    ("a folded coding", Refused, "Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n"),
    ("folded into the host", Refused, " Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
    ("a line of white space", Refused, "X-A: 1\r\n \r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
    ("upper case, and tabs around", One, "TRANSFER-ENCODING:\tChunked \t\r\n\r\n0\r\n\r\n"),
    ("an underscore is no hyphen", Either, "Transfer_Encoding: chunked\r\nContent-Length: 0\r\n\r\n"),
    ("after a bare CR", Refused, "X-A: a\rTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
    ("after a bare LF", Either, "X-A: a\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
    ("a name of nothing", Refused, ": x\r\n\r\n"),
    ("a line without a colon", Refused, "Transfer-Encoding chunked\r\n\r\n0\r\n\r\n"),
    // Lengths.
    ("two lengths", Refused, "Content-Length: 0\r\nContent-Length: 40\r\n\r\n"),
    ("the same length twice", Either, "Content-Length: 0\r\nContent-Length: 0\r\n\r\n"),
    ("a list of lengths", Refused, "Content-Length: 0, 40\r\n\r\n"),
    ("a list of one length", Refused, "Content-Length: 0, 0\r\n\r\n"),
    ("plus", Refused, "Content-Length: +3\r\n\r\nabc"),
    ("minus", Refused, "Content-Length: -1\r\n\r\n"),
    ("hexadecimal", Refused, "Content-Length: 0x3\r\n\r\nabc"),
    ("a fraction", Refused, "Content-Length: 3.0\r\n\r\nabc"),
    ("an exponent", Refused, "Content-Length: 3e0\r\n\r\nabc"),
    ("underscored", Refused, "Content-Length: 1_0\r\n\r\n0123456789"),
    ("white space inside", Refused, "Content-Length: 1 0\r\n\r\n0123456789"),
    ("too big for 64 bits", Refused, "Content-Length: 18446744073709551619\r\n\r\nabc"),
    ("empty", Refused, "Content-Length: \r\n\r\nabc"),
    ("digits of another script", Refused, "Content-Length: \u{0663}\r\n\r\nabc"),
    ("a list in two lines", Refused, "Content-Length: 3\r\nContent-Length: 3,3\r\n\r\nabc"),
    // Upgrades and expectations.
    (
        "upgrade to h2c",
        One,
        "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\nContent-Length: 0\r\n\r\n",
    ),
    ("WebSocket by POST", One, "Connection: Upgrade\r\nUpgrade: websocket\r\nContent-Length: 0\r\n\r\n"),
    (
        "a length named by connection",
        One,
        "Connection: close, Content-Length\r\nContent-Length: 3\r\n\r\nabc",
    ),
    ("the key named by connection", One, "Connection: close, Idempotency-Key\r\nContent-Length: 0\r\n\r\n"),
    (
        "chunks named by connection",
        One,
        "Connection: close, Transfer-Encoding\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    ),
    ("an expectation of another kind", Either, "Expect: y 100-continue\r\nContent-Length: 3\r\n\r\nabc"),
    ("an expectation, and the body at once", One, "Expect: 100-continue\r\nContent-Length: 3\r\n\r\nabc"),
    // Chunks.
    ("no size", Refused, "Transfer-Encoding: chunked\r\n\r\n\r\nabc\r\n0\r\n\r\n"),
    ("not hexadecimal", Refused, "Transfer-Encoding: chunked\r\n\r\nzz\r\nabc\r\n0\r\n\r\n"),
    ("a signed size", Refused, "Transfer-Encoding: chunked\r\n\r\n+3\r\nabc\r\n0\r\n\r\n"),
    ("a negative size", Refused, "Transfer-Encoding: chunked\r\n\r\n-3\r\nabc\r\n0\r\n\r\n"),
    ("a prefixed size", Refused, "Transfer-Encoding: chunked\r\n\r\n0x3\r\nabc\r\n0\r\n\r\n"),
    ("a size that wraps", Refused, "Transfer-Encoding: chunked\r\n\r\n10000000000000003\r\nabc\r\n0\r\n\r\n"),
    ("a chunk too short", Refused, "Transfer-Encoding: chunked\r\n\r\n5\r\nabc\r\n0\r\n\r\n"),
    ("a chunk too long", Refused, "Transfer-Encoding: chunked\r\n\r\n2\r\nabc\r\n0\r\n\r\n"),
    ("a bare LF after a size", Refused, "Transfer-Encoding: chunked\r\n\r\n3\nabc\r\n0\r\n\r\n"),
    ("a bare LF after a chunk", Refused, "Transfer-Encoding: chunked\r\n\r\n3\r\nabc\n0\r\n\r\n"),
    ("a bare CR after a size", Refused, "Transfer-Encoding: chunked\r\n\r\n3\rXabc\r\n0\r\n\r\n"),
    ("a bare LF in an extension", Refused, "Transfer-Encoding: chunked\r\n\r\n3;a\nb\r\nabc\r\n0\r\n\r\n"),
    (
        "an extension with a quoted line end",
        Refused,
        "Transfer-Encoding: chunked\r\n\r\n3;a=\"\r\n\"\r\nabc\r\n0\r\n\r\n",
    ),
    ("extensions", One, "Transfer-Encoding: chunked\r\n\r\n3;a=\"b\";c\r\nabc\r\n0;x\r\n\r\n"),
    ("white space after a size", Either, "Transfer-Encoding: chunked\r\n\r\n3 \r\nabc\r\n0\r\n\r\n"),
    (
        "a length in the trailers",
        One,
        "Transfer-Encoding: chunked\r\nTrailer: Content-Length\r\n\r\n3\r\nabc\r\n0\r\nContent-Length: 50\r\n\r\n",
    ),
    (
        "chunks in the trailers",
        One,
        "Transfer-Encoding: chunked\r\nTrailer: Transfer-Encoding\r\n\r\n0\r\nTransfer-Encoding: chunked\r\n\r\n",
    ),
    (
        "a host in the trailers",
        One,
        "Transfer-Encoding: chunked\r\nTrailer: Host\r\n\r\n0\r\nHost: evil\r\n\r\n",
    ),
    ("a bad trailer", Refused, "Transfer-Encoding: chunked\r\n\r\n0\r\nX : y\r\n\r\n"),
    ("a bare LF in the trailers", Either, "Transfer-Encoding: chunked\r\n\r\n0\r\nX: y\n\r\n"),
];

/// Whole first lines and hosts.
const HEADS: &[(&str, End, &str)] = &[
    ("two versions", Refused, "POST / HTTP/1.1 HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n"),
    ("two spaces", Refused, "POST  / HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n"),
    ("a tab", Refused, "POST\t/ HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n"),
    ("a space first", Refused, " POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n"),
    ("a space in the target", Refused, "POST /a b HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n"),
    ("a CR in the target", Refused, "POST /a\rb HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n"),
    ("a NUL in the target", Refused, "POST /a\0b HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n"),
    ("a method with a colon", Refused, "PO:ST / HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n"),
    ("no version", Refused, "POST /\r\nHost: h\r\nContent-Length: 0\r\n\r\n"),
    ("version 0.9", Refused, "POST / HTTP/0.9\r\nHost: h\r\nContent-Length: 0\r\n\r\n"),
    ("version 2", Refused, "POST / HTTP/2.0\r\nHost: h\r\nContent-Length: 0\r\n\r\n"),
    ("version 1.11", Refused, "POST / HTTP/1.11\r\nHost: h\r\nContent-Length: 0\r\n\r\n"),
    ("a version in lower case", Refused, "POST / http/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n"),
    (
        "chunks in version 1.0",
        Refused,
        "POST / HTTP/1.0\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    ),
    ("no target", Refused, "POST HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n"),
    ("a target without a slash", Refused, "POST pay HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n"),
    (
        "a target that is a host",
        Refused,
        "POST evil.test:80 HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n",
    ),
    ("a target that is a query", Refused, "POST ?a HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n"),
    ("a star", Refused, "POST * HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n"),
    ("a tunnel", Refused, "CONNECT evil.test:80 HTTP/1.1\r\nHost: h\r\n\r\n"),
    (
        "an absolute target of no host",
        Refused,
        "POST http:///pay HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n",
    ),
    (
        "an absolute target, a bad host",
        Refused,
        "POST http://a b/pay HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n",
    ),
    (
        "an absolute target with credentials",
        Either,
        "POST http://u:p@h/pay HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n",
    ),
    (
        "an absolute target of another scheme",
        Either,
        "POST ftp://h/pay HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n",
    ),
    ("no host", Refused, "POST / HTTP/1.1\r\nContent-Length: 0\r\n\r\n"),
    ("two hosts", Refused, "POST / HTTP/1.1\r\nHost: h\r\nHost: other\r\nContent-Length: 0\r\n\r\n"),
    ("the same host twice", Refused, "POST / HTTP/1.1\r\nHost: h\r\nHost: h\r\nContent-Length: 0\r\n\r\n"),
    ("a list of hosts", Refused, "POST / HTTP/1.1\r\nHost: h, other\r\nContent-Length: 0\r\n\r\n"),
    ("a host with a path", Refused, "POST / HTTP/1.1\r\nHost: h/x\r\nContent-Length: 0\r\n\r\n"),
    ("a host with credentials", Refused, "POST / HTTP/1.1\r\nHost: a@h\r\nContent-Length: 0\r\n\r\n"),
    ("a host with a space", Refused, "POST / HTTP/1.1\r\nHost: h x\r\nContent-Length: 0\r\n\r\n"),
    ("a host with two ports", Refused, "POST / HTTP/1.1\r\nHost: h:80:81\r\nContent-Length: 0\r\n\r\n"),
    ("a folded host", Refused, "POST / HTTP/1.1\r\nHost: h\r\n x\r\nContent-Length: 0\r\n\r\n"),
    ("bare LFs all over", Either, "POST / HTTP/1.1\nHost: h\nIdempotency-Key: k\nContent-Length: 0\n\n"),
    (
        "a body in a GET",
        One,
        "GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\nContent-Length: 3\r\n\r\nabc",
    ),
    (
        "chunks in a GET",
        One,
        "GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
    ),
    ("TLS on a plain port", Refused, "\x16\x03\x01\x02\0\x01\0\x01\x7c\x03\x03"),
];

fn statuses(back: &str) -> Vec<&str> {
    let answers = back.split("HTTP/1.").skip(1).filter_map(|rest| rest.get(2..5));
    answers.filter(|status| status.bytes().all(|b| b.is_ascii_digit()) && *status != "100").collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn no_shape_becomes_two_requests_or_passes_by_a_guard() {
    let framing = FRAMING.iter().map(|(what, end, rest)| {
        let key = "Idempotency-Key: k\r\n";
        // A folded line must follow the host directly.
        let (before, after) = if rest.starts_with(' ') { (key, "") } else { ("", key) };
        (*what, *end, format!("POST /outer HTTP/1.1\r\n{before}Host: h\r\n{after}{rest}"))
    });
    let heads = HEADS.iter().map(|(what, end, head)| {
        let keyed = head.replacen("\r\n", "\r\nIdempotency-Key: k\r\n", 1);
        (*what, *end, keyed)
    });
    let shapes: Vec<_> = framing.chain(heads).collect();
    assert!(shapes.len() >= 40);
    for (what, end, request) in shapes {
        let service = service().await;
        let gateway = gateway(&service.url(), |_| {}).await;
        let back = say(&gateway, format!("{request}{SMUGGLED}")).await;
        let lines = arrived(&service, what);
        let statuses = statuses(&back);
        assert!(!back.is_empty(), "{what}: no answer");
        assert!(lines.iter().all(|line| !line.contains("smuggled")), "{what}: {lines:?}");
        let whole = lines.iter().filter(|line| !line.starts_with("begun")).count();
        // A refusal in the middle of a body leaves what had gone on; a guarded body goes on when it is whole.
        let refused = lines.is_empty() && statuses.len() == 1 && statuses[0].starts_with(['4', '5']);
        let one = whole == 1 && lines.len() == 1 && statuses.first() == Some(&"200");
        match end {
            Refused => assert!(refused, "{what}: {lines:?} {back}"),
            One => assert!(one, "{what}: {lines:?} {back}"),
            Either => assert!(one || refused, "{what}: {lines:?} {back}"),
        }
        still_serves(&gateway, what).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn on_an_unguarded_route_a_bad_body_never_ends_at_the_service() {
    // The body streams, so that a beginning may arrive; its end must not.
    for (what, _, rest) in
        FRAMING.iter().filter(|(_, end, rest)| *end == Refused && rest.contains("chunked\r\n\r\n"))
    {
        let service = service().await;
        let gateway = gateway(&service.url(), |_| {}).await;
        let back = say(&gateway, format!("PUT /outer HTTP/1.1\r\nHost: h\r\n{rest}{SMUGGLED}")).await;
        assert!(!statuses(&back).contains(&"200") && !back.is_empty(), "{what}: {back}");
        assert!(!service.text().contains("\r\n0\r\n\r\n"), "{what}: {}", service.text());
        assert!(!service.text().contains("POST /smuggled"), "{what}: {}", service.text());
        still_serves(&gateway, what).await;
    }
}

#[tokio::test]
async fn what_follows_on_the_connection_is_guarded_for_itself() {
    let service = service().await;
    let gateway = gateway(&service.url(), |_| {}).await;
    let keyed = "POST /outer HTTP/1.1\r\nHost: h\r\nIdempotency-Key: k\r\nContent-Length: 3\r\n\r\nabc";
    let back = say(&gateway, format!("{keyed}{SMUGGLED}GET /x HTTP/1.1\r\nHost: h\r\n\r\n")).await;
    assert_eq!(statuses(&back), ["200", "400", "200"], "{back}");
    assert!(back.contains("key-missing"), "{back}");
    // A refused request's body is no request either, whether it is there already or comes later.
    let inner = format!("POST /refused HTTP/1.1\r\nHost: h\r\nContent-Length: {}\r\n\r\n", SMUGGLED.len());
    let back = say(&gateway, format!("{inner}{SMUGGLED}")).await;
    assert_eq!(statuses(&back), ["400"], "{back}");
    let mut client = RawConnection::open(gateway.addr).await;
    client.write(&inner).await;
    assert!(client.read_head().await.unwrap().starts_with(b"HTTP/1.1 400"));
    client.write(SMUGGLED).await;
    let rest = client.read_to_end().await;
    assert!(!String::from_utf8_lossy(&rest).contains("HTTP/1.1"), "{}", String::from_utf8_lossy(&rest));
    assert_eq!(arrived(&service, "what follows"), ["POST /outer HTTP/1.1", "GET /x HTTP/1.1"]);
}

#[tokio::test]
async fn a_key_in_the_trailers_is_no_key_and_markers_cannot_be_smuggled() {
    let service = service().await;
    let gateway = gateway(&service.url(), |_| {}).await;
    let back = say(
        &gateway,
        "POST /a HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\nTrailer: Idempotency-Key\r\n\r\n0\r\nIdempotency-Key: k\r\n\r\n",
    )
    .await;
    assert!(back.contains("key-missing"), "{back}");
    let back = say(
        &gateway,
        "PUT /b HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\nTrailer: Idempotency-Attempt\r\nTE: trailers\r\n\
         Idempotency-Attempt: 7\r\n\r\n3\r\nabc\r\n0\r\nIdempotency-Attempt: 9\r\n\r\n",
    )
    .await;
    assert_eq!(statuses(&back), ["200"], "{back}");
    let text = service.text().to_lowercase();
    assert!(!text.contains("idempotency-attempt: "), "{text}");
}

#[tokio::test]
async fn heads_without_end_are_refused_and_cost_no_more_than_the_limit() {
    let service = service().await;
    let gateway = gateway(&service.url(), |_| {}).await;
    let start = "GET / HTTP/1.1\r\nHost: h\r\n";
    for (what, opening, piece) in [
        ("a value", format!("{start}X-A: "), "a".repeat(8192)),
        ("a name", start.to_owned(), "a".repeat(8192)),
        ("a target", "GET /".to_owned(), "a".repeat(8192)),
        ("a method", String::new(), "A".repeat(8192)),
        ("lines", start.to_owned(), "X-A: a\r\n".repeat(1024)),
        ("empty lines", String::new(), "\r\n".repeat(4096)),
    ] {
        let mut client = RawConnection::open(gateway.addr).await;
        client.write(&opening).await;
        let (mut sent, mut back, mut closed) = (0, Vec::new(), false);
        while back.is_empty() && !closed && client.write(&piece).await {
            sent += piece.len();
            assert!(sent < 32 << 20, "{what}: {sent} bytes, and still read");
            (back, closed) = client.read_until_quiet(std::time::Duration::from_millis(20)).await;
        }
        back.extend(client.read_until_quiet(std::time::Duration::from_millis(300)).await.0);
        let back = String::from_utf8_lossy(&back).into_owned();
        let code = back.get(9..12).unwrap_or_default();
        assert!(["431", "414", "400"].contains(&code), "{what}: {back:?}");
    }
    assert_eq!(service.text(), "");
}
