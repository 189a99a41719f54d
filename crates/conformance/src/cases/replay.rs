//! Every replay equals the first answer.

use http::{HeaderMap, HeaderName, HeaderValue};
use onlyonce_core::Reply;

use crate::Harness;
use crate::harness::fresh_token;

/// Status, headers with their repeats in order, any bytes, trailers: they come back as they were, on every handle and
/// after a restart.
pub async fn every_reply_comes_back_whole(h: &Harness) {
    let replies = [
        Reply::new(204, ""),
        Reply::new(100, "the least status"),
        Reply::new(999, "the greatest status"),
        Reply::new(200, "\0text\0 with \r\n ' \" \\ % :headers"),
        Reply::new(200, (0..=255).collect::<Vec<u8>>()),
        Reply::new(201, "{}").with_headers(headers()),
        Reply::new(200, "chunks").with_headers(headers()).with_trailers(headers()),
        Reply::new(200, "").with_trailers(headers()),
    ];
    for (n, reply) in replies.into_iter().enumerate() {
        store_and_compare(h, &format!("reply {n}"), reply).await;
    }
}

/// 1 MiB of bytes that are no text comes back byte for byte.
pub async fn a_large_binary_reply_comes_back_whole(h: &Harness) {
    // A multiplicative walk over the bytes: no period that a block size would hide.
    let body: Vec<u8> = (0u32..1 << 20).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    store_and_compare(h, "large", Reply::new(200, body)).await;
}

/// A reply whose body was left out on purpose is not mistaken for one with an empty body.
pub async fn an_omitted_body_stays_omitted(h: &Harness) {
    store_and_compare(h, "omitted", Reply::new(200, "a stream").with_headers(headers()).omitting_body())
        .await;
    store_and_compare(h, "empty", Reply::new(200, "")).await;
}

async fn store_and_compare(h: &Harness, key: &str, reply: Reply) {
    let (operation, owner) = (h.operation(key), fresh_token());
    h.acquire(&operation, owner).await;
    assert_eq!(h.finish(&operation, owner, reply.clone()).await.reply, reply);
    for store in h.handles(2).await {
        match store.claim(&operation, &h.request(fresh_token())).await {
            Ok(onlyonce_core::ClaimOutcome::Completed(stored)) => assert_same(&stored.reply, &reply),
            other => panic!("expected Completed, got {other:?}"),
        }
    }
    if h.survives_restart() {
        h.restart().await;
        assert_same(&h.replay(&operation).await.reply, &reply);
    }
}

fn assert_same(replayed: &Reply, first: &Reply) {
    assert_eq!(replayed.status(), first.status());
    assert_eq!(replayed.is_omitted(), first.is_omitted());
    assert!(replayed.body() == first.body(), "{} bytes, not the same", replayed.body().len());
    for (map, expected) in [(replayed.headers(), first.headers()), (replayed.trailers(), first.trailers())] {
        assert_eq!(map.len(), expected.len());
        for name in expected.keys() {
            let values = |map: &HeaderMap| map.get_all(name).iter().cloned().collect::<Vec<_>>();
            assert_eq!(values(map), values(expected), "values of {name}, in order");
        }
    }
}

fn headers() -> HeaderMap {
    let mut headers = HeaderMap::new();
    let lines: [(&'static str, &'static [u8]); 8] = [
        ("content-type", b"application/json; charset=\"utf-8\""),
        ("x-many", b"first"),
        ("location", b"/charges/1?a=b&c=%20"),
        ("x-many", b"second, with a comma"),
        ("x-many", b"first"),
        ("x-obs-text", b"caf\xe9 \xff\x80"),
        ("x-empty", b""),
        ("x-tab", b"a\tb: c"),
    ];
    for (name, value) in lines {
        headers.append(
            HeaderName::from_static(name),
            HeaderValue::from_bytes(value).expect("a valid header value"),
        );
    }
    headers
}
