//! Replies: statuses, headers, bodies.

use crate::case::{Act, Case, Rep, Req, Step};

pub(super) fn statuses() -> Vec<Case> {
    let mut cases: Vec<Case> = [
        "200 OK",
        "201 Created",
        "202 Accepted",
        "203 Non-Authoritative Information",
        "207 Multi-Status",
        "300 Multiple Choices",
        "301 Moved Permanently",
        "302 Found",
        "303 See Other",
        "307 Temporary Redirect",
        "308 Permanent Redirect",
        "400 Bad Request",
        "401 Unauthorized",
        "402 Payment Required",
        "403 Forbidden",
        "404 Not Found",
        "409 Conflict",
        "410 Gone",
        "415 Unsupported Media Type",
        "422 Unprocessable Content",
        "425 Too Early",
        "429 Too Many Requests",
        "451 Unavailable For Legal Reasons",
        "500 Internal Server Error",
        "501 Not Implemented",
        "502 Bad Gateway",
        "503 Service Unavailable",
        "504 Gateway Timeout",
        "599 Custom",
        "799 Beyond",
    ]
    .iter()
    .map(|status| Rep::new(status).line("Location: /elsewhere").body("body").case(format!("status {status}")))
    .collect();
    cases.push(Rep::new("204 No Content").case("status 204"));
    cases.push(Rep::new("204 No Content").line("Content-Length: 0").case("status 204 with a length"));
    cases.push(Rep::new("205 Reset Content").line("Content-Length: 0").case("status 205"));
    cases.push(Rep::new("304 Not Modified").line("ETag: \"x\"").case("status 304"));
    cases.push(Rep::new("304 Not Modified").line("Content-Length: 1234").case("status 304 with a length"));
    cases.push(Rep::new("200 Fine By Me").body("ok").case("another reason"));
    cases.push(Rep::new("200 ").body("ok").case("no reason"));
    cases.push(Rep::new("200").body("ok").case("no reason, and no space"));
    cases.push(Rep::new(b"200 Tr\xe8s bien").body("ok").case("a reason in Latin-1"));
    cases
}

pub(super) fn headers() -> Vec<Case> {
    let many: Vec<String> = (0..80).map(|n| format!("X-Header-{n}: value {n}")).collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    let long = format!("X-Long: {}", "v".repeat(2500));
    let headers: &[(&str, &[&str])] = &[
        (
            "ordinary ones",
            &["Server: corpus", "Content-Type: text/plain; charset=utf-8", "X-Powered-By: rust"],
        ),
        (
            "cookies",
            &[
                "Set-Cookie: a=1; Path=/; HttpOnly",
                "X-Between: 1",
                "Set-Cookie: b=2; Expires=Wed, 09 Jun 2027 10:18:14 GMT",
            ],
        ),
        ("repeated", &["Link: </a>; rel=next", "Vary: Accept", "Link: </b>; rel=prev", "Vary: Origin"]),
        ("an empty value", &["X-Empty:"]),
        ("white space around", &["X-A:   1  ", "X-B:2"]),
        ("names of all letters", &["X-lower: 1", "X-UPPER: 2", "eTaG: \"1\""]),
        ("underscores", &["X_Under_Score: 1"]),
        ("named by connection", &["Connection: X-Hop", "X-Hop: 1"]),
        ("keep-alive", &["Connection: keep-alive", "Keep-Alive: timeout=5, max=100"]),
        ("proxy-connection", &["Proxy-Connection: keep-alive"]),
        ("an upgrade on offer", &["Connection: Upgrade", "Upgrade: h2c"]),
        ("a space before the colon", &["X-A : 1"]),
        ("a folded line", &["X-Folded: a", " b", "\tc"]),
        (
            "caching",
            &[
                "Cache-Control: max-age=60, private",
                "Age: 7",
                "Expires: Tue, 01 Dec 2026 01:00:00 GMT",
                "ETag: W/\"1\"",
                "Last-Modified: Mon, 30 Nov 2026 00:00:00 GMT",
            ],
        ),
        (
            "security",
            &[
                "Strict-Transport-Security: max-age=1",
                "Content-Security-Policy: default-src 'self'",
                "X-Frame-Options: DENY",
            ],
        ),
        ("authentication", &["WWW-Authenticate: Basic realm=\"a\"", "WWW-Authenticate: Bearer"]),
        ("alt-svc", &["Alt-Svc: h3=\":443\""]),
        ("a file name", &["Content-Disposition: attachment; filename*=UTF-8''%e2%82%ac.txt"]),
        ("a via", &["Via: 1.1 inner"]),
        (
            "a request id",
            &["X-Request-Id: r-1", "traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"],
        ),
        ("accelerating", &["X-Accel-Expires: 0", "X-Accel-Buffering: no"]),
        ("markers that are ours", &["Idempotency-Replayed: true", "Idempotency-Status: ignored"]),
        ("an outcome", &["Idempotency-Outcome: definitive"]),
        ("many", &many),
        ("a long one", &[&long]),
    ];
    let mut cases: Vec<Case> = headers
        .iter()
        .map(|(name, lines)| {
            Rep::new("200 OK").lines(lines).body("ok").case(format!("reply headers: {name}"))
        })
        .collect();
    cases.push(Rep::bare("HTTP/1.1 200 OK").body("ok").case("reply headers: no date"));
    cases.push(Rep::new("200 OK").line(b"X-Latin: caf\xe9").body("ok").case("reply headers: Latin-1"));
    cases.push(Rep::new("200 OK").line("X-Utf8: \u{2713}").body("ok").case("reply headers: UTF-8"));
    cases.push(Rep::new("200 OK").line("Connection: close").body("ok").case("reply headers: close").closed());
    cases
}

pub(super) fn bodies() -> Vec<Case> {
    let pattern: Vec<u8> = (0..=255).collect();
    let chunks: String = (1..200).map(|n| format!("{n:x}\r\n{}\r\n", "c".repeat(n))).collect();
    let ok = || Rep::new("200 OK");
    let trailers = |trailer: bool| {
        let reply = if trailer { ok().line("Trailer: X-Sum") } else { ok() };
        reply.chunked("3\r\nabc\r\n0\r\nX-Sum: 1\r\n\r\n")
    };
    let takes_trailers = || Req::get("/").lines(&["Connection: TE", "TE: trailers"]);
    let with_length = ok().line("Content-Length: 2");
    vec![
        ok().body("").case("reply body: length 0"),
        ok().body("x").case("reply body: one byte"),
        ok().body(pattern.repeat(400)).case("reply body: 100 KiB of every byte"),
        ok().body(pattern.repeat(16_384)).case("reply body: 4 MiB"),
        ok().chunked("3\r\nabc\r\n0\r\n\r\n").case("reply body: one chunk"),
        ok().chunked(format!("{chunks}0\r\n\r\n")).case("reply body: many chunks"),
        ok().chunked("0\r\n\r\n").case("reply body: no chunk"),
        ok().chunked("0A\r\n0123456789\r\n000\r\n\r\n").case("reply body: odd sizes of chunks"),
        ok().chunked("3;a=1\r\nabc\r\n0\r\n\r\n").case("reply body: chunk extensions"),
        takes_trailers().case("reply body: trailers, taken").answered(&trailers(true)),
        takes_trailers().case("reply body: trailers, taken, not announced").answered(&trailers(false)),
        Req::get("/").case("reply body: trailers, not asked for").answered(&trailers(true)),
        ok().raw_body("until the end").case("reply body: until the connection closes").closed(),
        Rep::bare("HTTP/1.0 200 OK")
            .raw_body("old")
            .case("reply body: HTTP/1.0, until the connection closes")
            .closed(),
        Rep::bare("HTTP/1.0 200 OK").body("old").case("reply body: HTTP/1.0 with a length").closed(),
        ok().line("Content-Length: 50")
            .chunked("2\r\nok\r\n0\r\n\r\n")
            .case("reply body: a length and chunks")
            .closed(),
        ok().line("Content-Length: 2").body("ok").case("reply body: the same length twice"),
        Req::new("HEAD", "/").case("reply to a HEAD: length").answered(&ok().line("Content-Length: 5000")),
        Req::new("HEAD", "/")
            .case("reply to a HEAD: chunks")
            .answered(&ok().line("Transfer-Encoding: chunked")),
        Req::new("HEAD", "/").case("reply to a HEAD: neither").answered(&ok()),
        Req::get("/").case("reply body: in pieces").steps(vec![
            Step::Body,
            Step::Write(with_length.bytes()),
            Step::Write(b"o".to_vec()),
            Step::Write(b"k".to_vec()),
        ]),
    ]
}

pub(super) fn broken() -> Vec<Case> {
    let until_closed = |name: &str, answer: &[u8]| {
        let steps = vec![Step::Body, Step::Write(answer.to_vec()), Step::Close];
        Req::get("/")
            .case(name)
            .acts(vec![Act::Send(Req::get("/").bytes()), Act::Answer("GET".into())])
            .steps(steps)
    };
    vec![
        until_closed("broken: no answer at all", b""),
        until_closed("broken: half a head", b"HTTP/1.1 200 OK\r\nContent-Le"),
        until_closed(
            "broken: less than its length",
            &Rep::new("200 OK").line("Content-Length: 100").raw_body("part").bytes(),
        ),
        until_closed("broken: chunks without an end", &Rep::new("200 OK").chunked("4\r\npart\r\n").bytes()),
        until_closed("broken: half a chunk", &Rep::new("200 OK").chunked("10\r\npart").bytes()),
        until_closed(
            "broken: two lengths",
            &Rep::new("200 OK").lines(&["Content-Length: 1", "Content-Length: 2"]).raw_body("ab").bytes(),
        ),
        until_closed(
            "broken: more than its length",
            &Rep::new("200 OK").line("Content-Length: 2").raw_body("okmore").bytes(),
        ),
    ]
}
