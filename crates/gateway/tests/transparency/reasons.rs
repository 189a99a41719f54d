//! Why the gateway does not pass everything on as it came.

/// Reasons, each with the differences that it explains.
pub(crate) const REASONS: &[(&str, &[&str])] = &[
    (
        "A gateway says that it was there: RFC 9110 §7.6.3 (`Via`).",
        &[
            "request header `via` is added",
            "request header `via` is changed",
            "reply header `via` is added",
            "reply header `via` is changed",
            "interim answer header `via` is added",
        ],
    ),
    (
        "The service behind is told who the client is and what it asked for. A chain that came is added to; protocol and host \
         are set anew unless `--trust-proxy` names the proxy that sets them.",
        &[
            "request header `x-forwarded-for` is added",
            "request header `x-forwarded-for` is changed",
            "request header `x-forwarded-host` is added",
            "request header `x-forwarded-host` is changed",
            "request header `x-forwarded-proto` is added",
            "request header `x-forwarded-proto` is changed",
        ],
    ),
    (
        "Names of headers are the same in any case of letters (RFC 9110 §5.1), and in lower case in HTTP/2 and HTTP/3.",
        &[
            "request header names are in lower case",
            "request trailer names are in lower case",
            "reply header names are in lower case",
            "reply trailer names are in lower case",
            "interim answer header names are in lower case",
        ],
    ),
    (
        "The order of headers with different names says nothing (RFC 9110 §5.3); that of one name's values is kept.",
        &["request header lines are in another order", "reply header lines are in another order"],
    ),
    (
        "Of one connection, not of the message: RFC 9110 §7.6.1. Each side of the gateway has its own.",
        &[
            "request header `connection` is missing",
            "request header `keep-alive` is missing",
            "request header `proxy-connection` is missing",
            "request header `te` is missing",
            "request header `upgrade` is missing",
            "request header `http2-settings` is missing",
            "request header `x-hop` is missing",
            "reply header `connection` is added",
            "reply header `connection` is missing",
            "reply header `keep-alive` is missing",
            "reply header `proxy-connection` is missing",
            "reply header `upgrade` is missing",
            "reply header `x-hop` is missing",
        ],
    ),
    (
        "A GET or DELETE with a body goes on a connection that is used for nothing else: a service that ignores such a body would \
         read it as the next request (RFC 9110 §9.3.1).",
        &["request header `connection` is added"],
    ),
    (
        "How a body is framed is a matter of each connection (RFC 9112 §6); chunk extensions too (§7.1.1).",
        &[
            "request body: chunk extensions are missing",
            "reply body: chunk extensions are missing",
            "reply body: all until the connection closes becomes chunks",
        ],
    ),
    (
        "A client of HTTP/1.0 cannot read chunks: RFC 9112 §6.1.",
        &["reply body: chunks becomes all until the connection closes"],
    ),
    (
        "A guarded reply is recorded before it leaves, so that its length is known; nothing of it, hints either, leaves before.",
        &[
            "reply body: chunks becomes a length",
            "reply body: all until the connection closes becomes a length",
            "interim answer 103 is missing",
        ],
    ),
    (
        "A message says the version of whoever sends it: RFC 9110 §2.5, §6.2.",
        &[
            "request version is changed: HTTP/1.0 becomes HTTP/1.1",
            "reply version is changed: HTTP/1.0 becomes HTTP/1.1",
            "reply version is changed: HTTP/1.1 becomes HTTP/1.0",
        ],
    ),
    (
        "Each protocol has its own words for a WebSocket (RFC 6455 §4, RFC 8441 §5), and it goes on in those of the service behind. \
         HTTP/2 has no key of the handshake: where the client has none, it is made and checked here.",
        &["an extended CONNECT goes on as an `Upgrade`", "an `Upgrade` goes on as an extended CONNECT"],
    ),
    ("A reply without a date gets one on its way: RFC 9110 §6.6.1.", &["reply header `date` is added"]),
    (
        "The gateway asks for the body itself, after its own checks: `Expect` ends here, and so does 100 (RFC 9110 §10.1.1).",
        &["request header `expect` is missing", "interim answer 100 is missing"],
    ),
    (
        "A length says nothing where there is no body: RFC 9110 §8.6 forbids it with 204; with 304, and the coding in a reply \
         to HEAD, it may be left out (RFC 9112 §6.1).",
        &["reply header `content-length` is missing", "reply header `transfer-encoding` is missing"],
    ),
    (
        "Trailers go to those who say `TE: trailers`, and when they were announced by `Trailer` (RFC 9110 §6.5.1, §6.6.2). Without \
         that a receiver may drop them, and this one does.",
        &["request trailer `x-sum` is missing", "reply trailer `x-sum` is missing"],
    ),
    (
        "Only the gateway says what became of a key: what looks like its own headers is taken off, so that nobody can forge it.",
        &[
            "request header `idempotency-attempt` is missing",
            "request header `idempotency-replayed` is missing",
            "reply header `idempotency-replayed` is missing",
            "reply header `idempotency-status` is missing",
        ],
    ),
    (
        "The service behind tells the gateway, not the client, how the operation ended.",
        &["reply header `idempotency-outcome` is missing"],
    ),
    (
        "The service behind is told which attempt of a guarded operation it is.",
        &["request header `idempotency-attempt` is added"],
    ),
    (
        "A POST or PATCH without a key, let through by `--optional`: its answer says that it was not guarded.",
        &["reply header `idempotency-status` is added"],
    ),
    (
        "An absolute target goes on as a path, its host in `Host`: RFC 9112 §3.2.2. A fragment is no part of a target (§3.2) and \
         is left out. The rest of a target goes on byte for byte.",
        &["request target is changed", "request header `host` is changed"],
    ),
    (
        "A request to a service of HTTP/1.1 needs a host: one of HTTP/1.0 without gets the service's own.",
        &["request header `host` is added"],
    ),
    (
        "Neither of RFC 3986 nor UTF-8 (a backtick in the path, `<`, `>`, bytes of other character sets): what two readers could \
         read in two ways is refused, RFC 9112 §3.2.",
        &["the request does not go on: 400 `request-malformed`"],
    ),
    (
        "A tunnel through a reverse proxy would pass by every guard.",
        &["the request does not go on: 405 `request-malformed`"],
    ),
    (
        "RFC 9112 §5.2 and §5.1: folded lines of a reply become one, and a space before the colon is taken off.",
        &[
            "reply header `x-folded` is changed",
            "reply header `x-a ` is missing",
            "reply header `x-a` is added",
        ],
    ),
    (
        "A reason phrase with bytes beyond ASCII is left out; clients do not read it (RFC 9112 §4).",
        &["reply reason is changed"],
    ),
    (
        "HTTP/2 may split cookies over lines, HTTP/1.1 may not: RFC 9113 §8.2.3.",
        &["request header `cookie` lines are joined"],
    ),
    (
        "Where the service behind says nothing, or nothing that has one meaning, the client is told so.",
        &["silence becomes an answer: 502", "the reply does not go on: 502 `upstream-failed`"],
    ),
];

/// The reason for a difference; `None` is a fault of the gateway.
pub(crate) fn reason(difference: &str) -> Option<&'static str> {
    REASONS.iter().find(|(_, differences)| differences.contains(&difference)).map(|(reason, _)| *reason)
}
