//! Requests: methods, targets, headers, bodies.

use crate::case::{Act, Case, Rep, Req, Step};

pub(super) fn methods() -> Vec<Case> {
    let mut cases: Vec<Case> = ["GET", "DELETE", "OPTIONS", "TRACE", "PROPFIND", "QUERY", "X-CUSTOM", "get"]
        .iter()
        .map(|method| Req::new(method, "/resource").case(format!("method {method}")))
        .collect();
    for method in ["PUT", "POST", "PATCH"] {
        let request = Req::new(method, "/resource").line("Content-Type: application/json").body("{\"a\":1}");
        cases.push(request.case(format!("method {method}")));
    }
    cases.push(
        Req::new("HEAD", "/resource")
            .case("method HEAD")
            .answered(&Rep::new("200 OK").line("Content-Length: 1234")),
    );
    cases.push(Req::new("OPTIONS", "*").case("OPTIONS *"));
    cases.push(
        Req::new("CONNECT", "corpus.test:80")
            .case("method CONNECT")
            .answered(&Rep::new("405 Method Not Allowed").body("")),
    );
    cases
}

pub(super) fn targets() -> Vec<Case> {
    let long = format!("/{}", "a".repeat(6000));
    let long_query = format!("/?q={}", "b".repeat(6000));
    let targets: [(&str, &[u8]); 30] = [
        ("query", b"/search?q=1&r=2"),
        ("an empty query", b"/search?"),
        ("a query of its own form", b"/search?a=b?c=d&&=;x"),
        ("two slashes", b"//a//b"),
        ("a trailing slash", b"/a/"),
        ("dots", b"/a/./b/../c"),
        ("dots past the root", b"/../../etc/passwd"),
        ("encoded dots", b"/a/%2e%2e/b"),
        ("an encoded slash", b"/a%2Fb"),
        ("lower case in escapes", b"/a%2fb%c3%a9"),
        ("an encoded NUL", b"/a%00b"),
        ("an encoded newline", b"/a%0d%0aX:1"),
        ("an encoded percent", b"/a%2541"),
        ("a bad escape", b"/a%zz"),
        ("a lone percent", b"/100%"),
        ("sub-delimiters", b"/a!$&'()*+,;=:@b"),
        ("a tilde and friends", b"/~user/-._"),
        ("brackets", b"/a[1]/b"),
        ("braces", b"/a{b}"),
        ("a pipe", b"/a|b"),
        ("a caret and a backtick", b"/a^b`c"),
        ("a backslash", b"/a\\b"),
        ("quotes", b"/a\"b'"),
        ("angle brackets", b"/a<b>"),
        ("UTF-8, not encoded", "/caf\u{e9}?q=\u{fc}".as_bytes()),
        ("Latin-1, not encoded", b"/caf\xe9"),
        ("a plus", b"/a+b?c+d"),
        ("a colon in the first segment", b"/a:b/c"),
        ("a long path", long.as_bytes()),
        ("a long query", long_query.as_bytes()),
    ];
    let mut cases: Vec<Case> = targets
        .iter()
        .map(|(name, target)| {
            let bytes = [b"GET ", *target, b" HTTP/1.1\r\nHost: corpus.test\r\n\r\n"].concat();
            Req::get("/")
                .case(format!("target: {name}"))
                .acts(vec![Act::Send(bytes), Act::Answer("GET".into())])
        })
        .collect();
    cases.push(Req::get("/page#part").case("target: a fragment"));
    cases.push(Req::get("http://corpus.test/absolute?x=1").case("target: absolute"));
    cases.push(Req::get("http://other.test:81/absolute").case("target: absolute, another host"));
    cases.push(Req::get("http://corpus.test").case("target: absolute, no path"));
    cases
}

pub(super) fn headers() -> Vec<Case> {
    let many: Vec<String> = (0..80).map(|n| format!("X-Header-{n}: value {n}")).collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    let long = format!("X-Long: {}", "v".repeat(6000));
    let headers: &[(&str, &[&str])] = &[
        (
            "ordinary ones",
            &["Accept: text/html,*/*;q=0.8", "Accept-Language: de, en;q=0.5", "User-Agent: corpus/1"],
        ),
        ("repeated", &["X-A: 1", "X-B: 2", "X-A: 3"]),
        ("a list", &["X-A: 1, 2,3 ,4"]),
        ("an empty value", &["X-Empty:", "X-Blank:   "]),
        ("white space around", &["X-A:   1  ", "X-B:\t2\t"]),
        ("no space after the colon", &["X-A:1"]),
        ("white space inside", &["X-A: a  b\tc"]),
        ("names of all letters", &["X-lower: 1", "X-UPPER: 2", "x-a!#$%&'*+-.^_`|~9: 3"]),
        ("underscores", &["X_Under_Score: 1"]),
        ("cookies", &["Cookie: a=1; b=\"two\"; c=%20"]),
        ("two lines of cookies", &["Cookie: a=1", "Cookie: b=2"]),
        ("authorization", &["Authorization: Bearer abc.def-ghi_jkl=="]),
        ("accept-encoding", &["Accept-Encoding: gzip, br;q=0.9, *;q=0"]),
        ("origin and referer", &["Origin: https://app.test", "Referer: https://app.test/x?y"]),
        (
            "a forwarded chain",
            &[
                "X-Forwarded-For: 203.0.113.7, 10.0.0.1",
                "X-Forwarded-Proto: https",
                "X-Forwarded-Host: pay.test",
            ],
        ),
        ("the standard forwarded", &["Forwarded: for=203.0.113.7;proto=https"]),
        ("a real IP", &["X-Real-IP: 203.0.113.7"]),
        ("a via", &["Via: 1.1 edge"]),
        ("named by connection", &["Connection: X-Hop", "X-Hop: 1"]),
        ("keep-alive", &["Connection: keep-alive", "Keep-Alive: timeout=5"]),
        ("proxy-connection", &["Proxy-Connection: keep-alive"]),
        ("TE: trailers", &["Connection: TE", "TE: trailers"]),
        ("TE: gzip", &["Connection: TE", "TE: gzip"]),
        (
            "upgrade to h2c",
            &[
                "Connection: Upgrade, HTTP2-Settings",
                "Upgrade: h2c",
                "HTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA",
            ],
        ),
        ("upgrade to something", &["Connection: Upgrade", "Upgrade: foo/2"]),
        ("upgrade not named by connection", &["Upgrade: websocket"]),
        ("proxy-authorization", &["Proxy-Authorization: Basic YTpi"]),
        ("max-forwards", &["Max-Forwards: 3"]),
        ("cache-control and pragma", &["Cache-Control: no-cache", "Pragma: no-cache"]),
        ("method override", &["X-HTTP-Method-Override: DELETE"]),
        (
            "tracing",
            &[
                "traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
                "tracestate: a=b",
                "X-Request-Id: r-1",
            ],
        ),
        ("a key on a request that is not guarded", &["Idempotency-Key: \"k-1\""]),
        ("markers that are ours", &["Idempotency-Replayed: true", "Idempotency-Attempt: 9"]),
        ("an empty expectation", &["Content-Length: 0", "Expect: 100-continue"]),
        ("many", &many),
        ("a long one", &[&long]),
    ];
    let mut cases: Vec<Case> = headers
        .iter()
        .map(|(name, lines)| Req::get("/").lines(lines).case(format!("request headers: {name}")))
        .collect();
    cases.push(Req::get("/").line(b"X-Latin: caf\xe9").case("request headers: Latin-1"));
    cases.push(Req::get("/").line("X-Utf8: caf\u{e9} \u{2713}").case("request headers: UTF-8"));
    cases
}

pub(super) fn hosts() -> Vec<Case> {
    ["corpus.test:8080", "CORPUS.test", "127.0.0.1", "[::1]:80", "a_b.test", "xn--bcher-kva.test", ""]
        .iter()
        .map(|host| {
            Req::get("/").without_host().line(format!("Host: {host}")).case(format!("host: {host:?}"))
        })
        .collect()
}

pub(super) fn bodies() -> Vec<Case> {
    let put = || Req::new("PUT", "/body");
    let pattern: Vec<u8> = (0..=255).collect();
    let chunks: String = (1..200).map(|n| format!("{n:x}\r\n{}\r\n", "c".repeat(n))).collect();
    let mut cases = vec![
        put().body("").case("request body: length 0"),
        put().body("x").case("request body: one byte"),
        put().body(pattern.repeat(400)).case("request body: 100 KiB of every byte"),
        put().body(pattern.repeat(8192)).case("request body: 2 MiB"),
        put().chunked("3\r\nabc\r\n0\r\n\r\n").case("request body: one chunk"),
        put().chunked(&format!("{chunks}0\r\n\r\n")).case("request body: many chunks"),
        put().chunked("0\r\n\r\n").case("request body: no chunk"),
        put()
            .chunked("A\r\n0123456789\r\n0a\r\n0123456789\r\n000\r\n\r\n")
            .case("request body: odd sizes of chunks"),
        put().chunked("3;a=1;b=\"x\"\r\nabc\r\n0;last\r\n\r\n").case("request body: chunk extensions"),
        put()
            .line("Trailer: X-Sum")
            .chunked("3\r\nabc\r\n0\r\nX-Sum: 1\r\n\r\n")
            .case("request body: trailers"),
        put().chunked("3\r\nabc\r\n0\r\nX-Sum: 1\r\n\r\n").case("request body: trailers, not announced"),
        Req::get("/").body("abc").case("request body: of a GET"),
        Req::get("/").chunked("3\r\nabc\r\n0\r\n\r\n").case("request body: of a GET, in chunks"),
        Req::new("DELETE", "/").body("abc").case("request body: of a DELETE"),
        put().line("Content-Encoding: gzip").body(b"\x1f\x8b\x08\x00\x00").case("request body: encoded"),
        put().body("GET /inner HTTP/1.1\r\nHost: h\r\n\r\n").case("request body: a request"),
        put()
            .line("Content-Type: multipart/form-data; boundary=x")
            .body("--x\r\n\r\na\r\n--x--\r\n")
            .case("request body: a form"),
        Req::new("POST", "/").body("").case("request body: an empty POST"),
        Req::new("POST", "/").case("request body: a POST without a length"),
    ];
    let expecting = put().line("Expect: 100-continue").body("abc");
    cases.push(
        expecting
            .case("request body: after 100 (Continue)")
            .acts(vec![
                Act::Send(expecting.head()),
                Act::Interim(100),
                Act::Send(expecting.body_bytes()),
                Act::Answer("PUT".into()),
            ])
            .steps(vec![
                Step::Write(b"HTTP/1.1 100 Continue\r\n\r\n".to_vec()),
                Step::Body,
                Step::Write(Rep::ok().bytes()),
            ]),
    );
    let slow = put().body("abcdef");
    let mut acts = Vec::new();
    for piece in slow.bytes().chunks(19) {
        acts.extend([Act::Send(piece.to_vec()), Act::Pause]);
    }
    acts.push(Act::Answer("PUT".into()));
    cases.push(slow.case("request body: in pieces, head and all").acts(acts));
    let early = put().body("x".repeat(300));
    cases.push(
        early
            .case("request body: answered before it came")
            .acts(vec![Act::Send(early.head()), Act::Answer("PUT".into())])
            .steps(vec![
                Step::Write(Rep::new("413 Content Too Large").line("Connection: close").body("no").bytes()),
                Step::Close,
            ]),
    );
    let crlf = [b"\r\n".to_vec(), Req::get("/").bytes()].concat();
    cases.push(
        Req::get("/")
            .case("an empty line before the request")
            .acts(vec![Act::Send(crlf), Act::Answer("GET".into())]),
    );
    cases
}
