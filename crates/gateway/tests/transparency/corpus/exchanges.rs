//! Exchanges of more than one message, and those of one kind of client.

use crate::case::{Act, Case, Rep, Req, Step};

pub(super) fn interim() -> Vec<Case> {
    let hints = "HTTP/1.1 103 Early Hints\r\nLink: </a.css>; rel=preload\r\n\r\n";
    let processing = "HTTP/1.1 102 Processing\r\n\r\n";
    let before = |name: &str, interim: &str| {
        let answer = [interim.as_bytes(), &Rep::ok().bytes()].concat();
        Req::get("/").case(name).steps(vec![Step::Body, Step::Write(answer)])
    };
    vec![
        before("interim: 103", hints),
        before("interim: 103 twice", &hints.repeat(2)),
        before("interim: 102", processing),
        before("interim: 102 and 103", &format!("{processing}{hints}")),
        before("interim: 100 that nobody asked for", "HTTP/1.1 100 Continue\r\n\r\n"),
        Req::get("/")
            .case("interim: 103 before the answer is there")
            .acts(vec![
                Act::Send(Req::get("/").bytes()),
                Act::Interim(103),
                Act::Piece(""),
                Act::Answer("GET".into()),
            ])
            .steps(vec![Step::Body, Step::Write(hints.into()), Step::Await, Step::Write(Rep::ok().bytes())]),
    ]
}

pub(super) fn connections() -> Vec<Case> {
    let get = |n: usize| Req::get(&format!("/{n}")).bytes();
    let answer = || Act::Answer("GET".into());
    let old = |lines: &[&str]| Req::get("/").version("HTTP/1.0").lines(lines);
    let put = Req::new("PUT", "/").body("abc");
    vec![
        Req::get("/")
            .case("connection: three requests, one after the other")
            .acts((1..=3).flat_map(|n| [Act::Send(get(n)), answer()]).collect()),
        Req::get("/").case("connection: a pipeline of three").acts(vec![
            Act::Send([get(1), get(2), get(3)].concat()),
            answer(),
            answer(),
            answer(),
        ]),
        Req::get("/").case("connection: a pipeline with a body in it").acts(vec![
            Act::Send([get(1), put.bytes(), get(3)].concat()),
            answer(),
            Act::Answer("PUT".into()),
            answer(),
        ]),
        Req::get("/").line("Connection: close").case("connection: close"),
        old(&[]).case("HTTP/1.0"),
        old(&["Connection: keep-alive"]).case("HTTP/1.0 with keep-alive"),
        old(&[]).without_host().case("HTTP/1.0 without a host"),
        old(&[])
            .case("HTTP/1.0 answered in chunks")
            .answered(&Rep::new("200 OK").chunked("2\r\nok\r\n0\r\n\r\n")),
        Req::get("/").case("a client that ends its side after its request").acts(vec![
            Act::Send(get(1)),
            Act::HalfClose,
            answer(),
        ]),
        Req::get("/")
            .case("a client that ends its side, answered in chunks, slowly")
            .acts(vec![Act::Send(get(1)), Act::HalfClose, Act::Piece("one"), answer()])
            .steps(vec![
                Step::Body,
                Step::Write(Rep::new("200 OK").chunked("3\r\none\r\n").bytes()),
                Step::Await,
                Step::Write(b"3\r\ntwo\r\n0\r\n\r\n".to_vec()),
            ]),
    ]
}

pub(super) fn representations() -> Vec<Case> {
    let gzip = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03\xcb\xcf\x06\x00\x47\xdd\xdc\x79\x02\x00\x00\x00";
    let get = |lines: &[&str]| Req::get("/file").lines(lines);
    let parts = "--b\r\nContent-Range: bytes 0-0/9\r\n\r\na\r\n--b--\r\n";
    vec![
        get(&["If-None-Match: \"x\", W/\"y\""])
            .case("if-none-match")
            .answered(&Rep::new("304 Not Modified").line("ETag: \"x\"")),
        get(&["If-Modified-Since: Mon, 30 Nov 2026 00:00:00 GMT"]).case("if-modified-since"),
        get(&["If-Match: *"])
            .case("if-match, failed")
            .answered(&Rep::new("412 Precondition Failed").body("")),
        get(&["Range: bytes=0-1"])
            .case("a range")
            .answered(&Rep::new("206 Partial Content").line("Content-Range: bytes 0-1/9").body("ab")),
        get(&["Range: bytes=0-0,-1", "If-Range: \"x\""]).case("several ranges").answered(
            &Rep::new("206 Partial Content")
                .line("Content-Type: multipart/byteranges; boundary=b")
                .body(parts),
        ),
        get(&["Range: bytes=99-"])
            .case("a range that is not there")
            .answered(&Rep::new("416 Range Not Satisfiable").line("Content-Range: bytes */9").body("")),
        get(&["Accept-Encoding: gzip"]).case("compressed, with a length").answered(
            &Rep::new("200 OK").lines(&["Content-Encoding: gzip", "Vary: Accept-Encoding"]).body(gzip),
        ),
        get(&["Accept-Encoding: gzip"]).case("compressed, in chunks").answered(
            &Rep::new("200 OK")
                .lines(&["Content-Encoding: gzip", "ETag: \"g\""])
                .chunked([b"16\r\n", &gzip[..], b"\r\n0\r\n\r\n"].concat()),
        ),
        get(&["Accept-Encoding: br"])
            .case("compressed in a way unknown here")
            .answered(&Rep::new("200 OK").line("Content-Encoding: br, x-custom").body(b"\x0b\x01\x80ok\x03")),
        get(&["Accept: text/html"])
            .case("compressible, not compressed")
            .answered(&Rep::new("200 OK").line("Content-Type: text/html").body("<p>".repeat(2000))),
    ]
}

pub(super) fn cors() -> Vec<Case> {
    let allowed = ["Access-Control-Allow-Origin: https://app.test", "Vary: Origin"];
    vec![
        Req::new("OPTIONS", "/pay")
            .lines(&[
                "Origin: https://app.test",
                "Access-Control-Request-Method: POST",
                "Access-Control-Request-Headers: idempotency-key,content-type",
            ])
            .case("CORS: preflight")
            .answered(
                &Rep::new("204 No Content")
                    .lines(&allowed)
                    .lines(&["Access-Control-Allow-Methods: POST", "Access-Control-Allow-Headers: *"])
                    .line("Access-Control-Max-Age: 600"),
            ),
        Req::get("/").line("Origin: https://app.test").case("CORS: a simple request").answered(
            &Rep::new("200 OK").lines(&allowed).line("Access-Control-Expose-Headers: X-A").body("ok"),
        ),
        Req::get("/").lines(&["Origin: null", "Cookie: s=1"]).case("CORS: with credentials").answered(
            &Rep::new("200 OK").lines(&allowed).line("Access-Control-Allow-Credentials: true").body("ok"),
        ),
        Req::get("/")
            .line("Origin: https://evil.test")
            .case("CORS: refused by the service")
            .answered(&Rep::new("403 Forbidden").body("")),
    ]
}

pub(super) fn streams() -> Vec<Case> {
    let events = Rep::new("200 OK").lines(&["Content-Type: text/event-stream", "Cache-Control: no-store"]);
    let chunk = |text: &str| format!("{:x}\r\n{text}\r\n", text.len()).into_bytes();
    let piece = |text: &'static str| Act::Piece(text);
    let send = || Act::Send(Req::get("/events").line("Accept: text/event-stream").bytes());
    vec![
        Req::get("/events")
            .case("server-sent events, one by one")
            .acts(vec![
                send(),
                piece("data: 1"),
                piece("data: 2"),
                piece("data: 3"),
                Act::Answer("GET".into()),
            ])
            .steps(vec![
                Step::Body,
                Step::Write(events.clone().chunked(chunk("data: 1\n\n")).bytes()),
                Step::Await,
                Step::Write(chunk("data: 2\n\n")),
                Step::Await,
                Step::Write(chunk(": comment\nid: 7\ndata: 3\n\n")),
                Step::Await,
                Step::Write(b"0\r\n\r\n".to_vec()),
            ]),
        Req::get("/events")
            .case("server-sent events until the connection closes")
            .acts(vec![send(), piece("data: 1"), Act::Answer("GET".into())])
            .steps(vec![
                Step::Body,
                Step::Write(events.raw_body("data: 1\n\n").bytes()),
                Step::Await,
                Step::Write(b"data: 2\n\n".to_vec()),
                Step::Close,
            ]),
        Req::get("/download")
            .case("a download whose pieces come one by one")
            .acts(vec![send(), piece("first"), Act::Answer("GET".into())])
            .steps(vec![
                Step::Body,
                Step::Write(Rep::new("200 OK").line("Content-Length: 11").raw_body("first").bytes()),
                Step::Await,
                Step::Write(b"second".to_vec()),
            ]),
    ]
}

pub(super) fn websocket() -> Vec<Case> {
    let handshake = |lines: &[&str]| {
        Req::get("/chat?x=1")
            .lines(&["Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13"])
            .lines(&["Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==", "Origin: https://app.test"])
            .lines(lines)
    };
    let switched = |lines: &[&str]| {
        Rep::new("101 Switching Protocols")
            .lines(&["Connection: Upgrade", "Upgrade: websocket"])
            .line("Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=")
            .lines(lines)
            .bytes()
    };
    let frame = b"\x81\x85\x37\xfa\x21\x3d\x7f\x9f\x4d\x51\x58".to_vec();
    let answer = || Act::Answer("GET".into());
    let big: Vec<u8> = (0..=255u8).cycle().take(100_000).collect();
    vec![
        handshake(&[])
            .case("WebSocket: echo")
            .acts(vec![
                Act::Send(handshake(&[]).bytes()),
                answer(),
                Act::Send(frame.clone()),
                Act::Tunnel(11),
            ])
            .steps(vec![Step::Write(switched(&[])), Step::Echo(11), Step::Close]),
        handshake(&[
            "Sec-WebSocket-Protocol: chat, superchat",
            "Sec-WebSocket-Extensions: permessage-deflate",
        ])
        .case("WebSocket: protocol and extensions")
        .acts(vec![
            Act::Send(
                handshake(&[
                    "Sec-WebSocket-Protocol: chat, superchat",
                    "Sec-WebSocket-Extensions: permessage-deflate",
                ])
                .bytes(),
            ),
            answer(),
            Act::TunnelEnd,
        ])
        .steps(vec![
            Step::Write(switched(&[
                "Sec-WebSocket-Protocol: chat",
                "Sec-WebSocket-Extensions: permessage-deflate",
            ])),
            Step::Write(b"\x88\x02\x03\xe8".to_vec()),
            Step::Close,
        ]),
        handshake(&[])
            .case("WebSocket: many bytes at once")
            .acts(vec![
                Act::Send(handshake(&[]).bytes()),
                answer(),
                Act::Send(big.clone()),
                Act::Tunnel(big.len()),
            ])
            .steps(vec![Step::Write(switched(&[])), Step::Echo(big.len()), Step::Close]),
        handshake(&[])
            .case("WebSocket: first bytes with the handshake")
            .acts(vec![Act::Send([handshake(&[]).bytes(), frame].concat()), answer(), Act::Tunnel(16)])
            .steps(vec![
                Step::Write([switched(&[]), b"hello".to_vec()].concat()),
                Step::Echo(11),
                Step::Close,
            ]),
        handshake(&[]).case("WebSocket: refused").answered(&Rep::new("403 Forbidden").body("no")),
    ]
}

/// What is guarded is the same to the client, but for what guarding is for.
pub(super) fn guarded() -> Vec<Case> {
    let mut number = 0;
    let mut case = |name: &str, reply: &Rep| {
        number += 1;
        let request = Req::new("POST", "/pay").line("Content-Type: application/json");
        let request =
            request.line(format!("Idempotency-Key: \"corpus-{number}\"")).line("Authorization: Bearer c");
        request.body("{\"amount\":100}").case(format!("guarded: {name}")).answered(reply)
    };
    let pattern: Vec<u8> = (0..=255).collect();
    vec![
        case(
            "a reply with a body",
            &Rep::new("201 Created")
                .lines(&["Location: /pay/1", "Set-Cookie: a=1", "Set-Cookie: b=2"])
                .body("{\"id\":1}"),
        ),
        case("a reply in chunks", &Rep::new("200 OK").chunked("3\r\nabc\r\n0\r\n\r\n")),
        case("an empty reply", &Rep::new("200 OK").body("")),
        case("204", &Rep::new("204 No Content")),
        case("a failure that is final", &Rep::new("402 Payment Required").body("{}")),
        case(
            "a failure that passes",
            &Rep::new("503 Service Unavailable").line("Retry-After: 1").body("later"),
        ),
        case("a redirect", &Rep::new("303 See Other").line("Location: /pay/1").body("")),
        case("every byte", &Rep::new("200 OK").line("Content-Encoding: gzip").body(&pattern)),
        case("longer than is stored", &Rep::new("200 OK").body(pattern.repeat(8192))),
        case(
            "headers of every kind",
            &Rep::new("200 OK")
                .lines(&[
                    "ETag: \"1\"",
                    "Vary: Accept",
                    "Vary: Origin",
                    "WWW-Authenticate: Basic",
                    "X-A: 1",
                    "Alt-Svc: clear",
                ])
                .body("ok"),
        ),
        case("another reason", &Rep::new("200 Fine By Me").body("ok")),
        case("until the connection closes", &Rep::new("200 OK").raw_body("end")).closed(),
        case(
            "an interim answer",
            &Rep::bare("HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\nHTTP/1.1 200 OK")
                .line("Date: Tue, 01 Dec 2026 00:00:00 GMT")
                .body("ok"),
        ),
    ]
}
