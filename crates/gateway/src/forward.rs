//! Which requests are admitted, and which headers go on: RFC 9110 §7.6 and RFC 9112 §3 and §6.

use http::header::{
    CONNECTION, CONTENT_LENGTH, COOKIE, EXPECT, HOST, HeaderMap, HeaderName, HeaderValue, TE, TRAILER,
    TRANSFER_ENCODING, UPGRADE, VIA,
};
use http::uri::{Authority, PathAndQuery, Scheme};
use http::{Method, Uri, Version, request, response};
use hyper::ext::ReasonPhrase;
use onlyonce_http::Problem;
use onlyonce_http::headers::{IDEMPOTENCY_ATTEMPT, IDEMPOTENCY_KEY};

use crate::options::GatewayOptions;
use crate::problem;
use crate::server::Peer;
use crate::trust::TrustedProxies;
use crate::websocket;

const KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");
const PROXY_CONNECTION: HeaderName = HeaderName::from_static("proxy-connection");
const HTTP2_SETTINGS: HeaderName = HeaderName::from_static("http2-settings");
const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const X_FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");
const X_FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");

/// Refuses what two readers could read in two ways. hyper has refused bad lengths and chunks before, and has marked
/// the connection for closing where both a length and chunks were given.
pub(crate) fn admit(head: &request::Parts) -> Result<(), Problem> {
    if head.method == Method::CONNECT && !websocket::is_connect(head) {
        return Err(problem::connect());
    }
    target_has_one_meaning(head)?;
    if head.version >= Version::HTTP_2 {
        return host_agrees(head);
    }
    let mut codings = head.headers.get_all(TRANSFER_ENCODING).iter();
    if let Some(coding) = codings.next()
        && (codings.next().is_some() || !coding.as_bytes().trim_ascii().eq_ignore_ascii_case(b"chunked"))
    {
        return Err(problem::malformed("Transfer-Encoding may only be chunked, given once."));
    }
    let mut hosts = head.headers.get_all(HOST).iter();
    match (hosts.next(), hosts.next()) {
        (None, None) if head.version == Version::HTTP_11 => {
            Err(problem::malformed("An HTTP/1.1 request needs a Host header."))
        }
        (Some(_), Some(_)) => Err(problem::malformed("More than one Host header.")),
        (Some(host), None) if !is_host(host) => Err(problem::malformed("Host is not a host and port.")),
        _ => Ok(()),
    }
}

/// A path, a whole URL, or `OPTIONS *`: RFC 9112 §3.2.
fn target_has_one_meaning(head: &request::Parts) -> Result<(), Problem> {
    let uri = &head.uri;
    let scheme = uri.scheme().is_none_or(|scheme| *scheme == Scheme::HTTP || *scheme == Scheme::HTTPS);
    // A host alone is how a tunnel is asked for.
    let form = match uri.authority() {
        Some(authority) => {
            let path = uri.path().starts_with('/') || head.method == Method::OPTIONS;
            uri.scheme().is_some() && !authority.host().is_empty() && path
        }
        None => uri.path().starts_with('/') || (uri.path() == "*" && head.method == Method::OPTIONS),
    };
    if scheme && form { Ok(()) } else { Err(problem::malformed("The request target is not a path.")) }
}

/// HTTP/2 has the host in `:authority`; a Host header beside it must say the same (RFC 9113 §8.3.1).
fn host_agrees(head: &request::Parts) -> Result<(), Problem> {
    let mut hosts = head.headers.get_all(HOST).iter();
    let Some(host) = hosts.next() else { return Ok(()) };
    let same = |authority: &Authority| authority.as_str().as_bytes().eq_ignore_ascii_case(host.as_bytes());
    if hosts.next().is_some() || !is_host(host) || !head.uri.authority().is_none_or(same) {
        return Err(problem::malformed("Host is not one host and port, the same as :authority."));
    }
    Ok(())
}

fn is_host(host: &HeaderValue) -> bool {
    // Empty is what RFC 9112 §3.2 prescribes when there is no authority.
    host.is_empty() || (!host.as_bytes().contains(&b'@') && Authority::try_from(host.as_bytes()).is_ok())
}

/// Makes a received request head one to be sent; `attempt` is of a guarded one.
pub(crate) fn request(
    head: &mut request::Parts,
    peer: Option<&Peer>,
    attempt: Option<u32>,
    options: &GatewayOptions,
) {
    let trailers = tokens(&head.headers, &TE).any(|token| token.eq_ignore_ascii_case("trailers"));
    let via = via(head.version);
    strip_hop_by_hop(&mut head.headers, Some(&options.key_header));
    head.headers.remove(EXPECT);
    head.headers.remove(IDEMPOTENCY_ATTEMPT);
    if let Some(attempt) = attempt {
        head.headers.insert(IDEMPOTENCY_ATTEMPT, HeaderValue::from(attempt));
    }
    let h2c = options.upstream.is_http2();
    if trailers {
        head.headers.insert(TE, HeaderValue::from_static("trailers"));
        if !h2c {
            head.headers.insert(CONNECTION, HeaderValue::from_static("te"));
        }
    }
    if !h2c && head.version == Version::HTTP_2 {
        join_cookies(&mut head.headers);
    }
    let host = host_of(head);
    forwarded(&mut head.headers, peer, host.as_ref(), &options.trusted_proxies);
    head.headers.append(VIA, via);
    target(head, host, options);
    head.version = if h2c { Version::HTTP_2 } else { Version::HTTP_11 };
}

/// Makes a received response head one to be sent.
pub(crate) fn response(head: &mut response::Parts) {
    // Chunks win over a length (RFC 9112 §6.3); sent on, the length would contradict the new framing.
    if head.headers.contains_key(TRANSFER_ENCODING) {
        head.headers.remove(CONTENT_LENGTH);
    }
    strip_hop_by_hop(&mut head.headers, None);
    head.headers.append(VIA, via(head.version));
    head.version = Version::HTTP_11;
    let reason = head.extensions.remove::<ReasonPhrase>();
    head.extensions.clear();
    if let Some(reason) = reason {
        head.extensions.insert(reason);
    }
}

/// Removes from request trailers what would frame, route or name the request: it was read before they came.
pub(crate) fn trailers(trailers: &mut HeaderMap) {
    strip_hop_by_hop(trailers, None);
    for name in [HOST, CONTENT_LENGTH, TRAILER, IDEMPOTENCY_KEY] {
        trailers.remove(name);
    }
    strip_ours(trailers);
}

fn strip_ours(headers: &mut HeaderMap) {
    let is_ours = |name: &&HeaderName| name.as_str().starts_with("idempoten") && **name != IDEMPOTENCY_KEY;
    let ours: Vec<HeaderName> = headers.keys().filter(is_ours).cloned().collect();
    for name in ours {
        headers.remove(name);
    }
}

/// Whether `Connection` names this option.
pub(crate) fn names(headers: &HeaderMap, option: &str) -> bool {
    tokens(headers, &CONNECTION).any(|token| token.eq_ignore_ascii_case(option))
}

/// The headers of an interim answer (1xx) to be sent on. Nobody but us says what became of a key.
pub(crate) fn interim(headers: &HeaderMap, version: Version) -> HeaderMap {
    let mut headers = headers.clone();
    strip_hop_by_hop(&mut headers, None);
    headers.remove(CONTENT_LENGTH);
    strip_ours(&mut headers);
    headers.append(VIA, via(version));
    headers
}

fn via(version: Version) -> HeaderValue {
    HeaderValue::from_static(match version {
        Version::HTTP_2 => "2 onlyonce",
        Version::HTTP_10 => "1.0 onlyonce",
        _ => "1.1 onlyonce",
    })
}

fn strip_hop_by_hop(headers: &mut HeaderMap, key: Option<&HeaderName>) {
    if headers.contains_key(CONNECTION) {
        let named: Vec<HeaderName> =
            tokens(headers, &CONNECTION).filter_map(|token| HeaderName::try_from(token).ok()).collect();
        for name in named {
            // What frames, routes or guards the request is never hop-by-hop, whatever the sender says.
            if ![HOST, CONTENT_LENGTH, IDEMPOTENCY_KEY].contains(&name) && Some(&name) != key {
                headers.remove(name);
            }
        }
        headers.remove(CONNECTION);
    }
    for name in [&KEEP_ALIVE, &PROXY_CONNECTION, &TE, &TRANSFER_ENCODING, &UPGRADE, &HTTP2_SETTINGS] {
        headers.remove(name);
    }
}

fn forwarded(
    headers: &mut HeaderMap,
    peer: Option<&Peer>,
    host: Option<&HeaderValue>,
    proxies: &TrustedProxies,
) {
    let trust = peer.is_some_and(|peer| proxies.contains(peer.addr().ip()));
    if let Some(peer) = peer {
        let keeps = trust || proxies.is_empty();
        let chain = if keeps && headers.contains_key(X_FORWARDED_FOR) {
            // One line, since many readers look at one line alone.
            let mut lines: Vec<&[u8]> =
                headers.get_all(X_FORWARDED_FOR).iter().map(HeaderValue::as_bytes).collect();
            lines.push(peer.forwarded_for().as_bytes());
            HeaderValue::from_bytes(&lines.join(&b", "[..])).expect("header values, joined, are one")
        } else {
            peer.forwarded_for().clone()
        };
        headers.insert(X_FORWARDED_FOR, chain);
    }
    if !trust || !headers.contains_key(X_FORWARDED_PROTO) {
        headers.insert(X_FORWARDED_PROTO, HeaderValue::from_static("http"));
    }
    if !trust || !headers.contains_key(X_FORWARDED_HOST) {
        match host {
            Some(host) => drop(headers.insert(X_FORWARDED_HOST, host.clone())),
            None => drop(headers.remove(X_FORWARDED_HOST)),
        }
    }
}

/// The host asked for: an absolute target and `:authority` win over the Host header (RFC 9112 §3.2.2).
fn host_of(head: &request::Parts) -> Option<HeaderValue> {
    match head.uri.authority() {
        Some(authority) => {
            // Credentials in a target are not for the upstream's logs.
            let host = authority.as_str().rsplit('@').next().unwrap_or_default();
            HeaderValue::from_str(host).ok()
        }
        None => head.headers.get(HOST).cloned(),
    }
}

/// Path and query byte for byte; the host as the client gave it, or the upstream's own.
fn target(head: &mut request::Parts, host: Option<HeaderValue>, options: &GatewayOptions) {
    let own = || {
        HeaderValue::from_str(options.upstream.authority().as_str()).expect("an authority is a header value")
    };
    let host = if options.rewrite_host { own() } else { host.unwrap_or_else(own) };
    // A URL without a path asks for the root (RFC 9110 §4.2.3), whatever follows its host.
    let path = head.uri.path_and_query().filter(|path| path.as_str() != "/").cloned();
    let path = path.unwrap_or_else(|| PathAndQuery::from_static("/"));
    if options.upstream.is_http2() {
        head.headers.remove(HOST);
        let authority =
            Authority::try_from(host.as_bytes()).unwrap_or_else(|_| options.upstream.authority().clone());
        let mut uri = std::mem::take(&mut head.uri).into_parts();
        uri.scheme = Some(if options.upstream.is_tls() { Scheme::HTTPS } else { Scheme::HTTP });
        uri.authority = Some(authority);
        uri.path_and_query = Some(path);
        head.uri = Uri::from_parts(uri).expect("scheme, authority and path make a URI");
        return;
    }
    head.headers.insert(HOST, host);
    if head.uri.authority().is_some() {
        head.uri = Uri::from(path);
    }
}

/// HTTP/2 may split cookies over lines; HTTP/1.1 may not (RFC 9113 §8.2.3).
fn join_cookies(headers: &mut HeaderMap) {
    let lines: Vec<&[u8]> = headers.get_all(COOKIE).iter().map(HeaderValue::as_bytes).collect();
    if lines.len() > 1 {
        let joined =
            HeaderValue::from_bytes(&lines.join(&b"; "[..])).expect("header values, joined, are one");
        headers.insert(COOKIE, joined);
    }
}

fn tokens<'a>(headers: &'a HeaderMap, name: &HeaderName) -> impl Iterator<Item = &'a str> {
    let values = headers.get_all(name).iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).map(str::trim).filter(|token| !token.is_empty())
}
