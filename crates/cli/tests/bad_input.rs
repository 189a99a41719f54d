//! A hundred thousand malformed requests from a seed, over raw sockets, at a real gateway: none of them stops it, none of them
//! leaves anything behind, and who asks properly beside them is answered.
#![allow(clippy::unwrap_used, reason = "a test fails by it")]

mod common;

use std::net::SocketAddr;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use common::{Gateway, pay};
use onlyonce_prove::Random;
use testkit::{Answer, RawConnection, Upstream, wait_until};

const REQUESTS: usize = 100_000;
/// By then everything is filled that fills: caches, pools, what the allocator keeps.
const FILLED: usize = 20_000;
const SENDERS: usize = 24;
const SEED: u64 = 7;

/// What a gateway may grow by once everything is filled; a leak of a hundred bytes a request would be as much.
const GROWTH_BYTES_MAX: u64 = 8 << 20;

/// Requests as they should be; the malformed ones are made of them.
const SOUND: &[&[u8]] = &[
    b"POST /pay HTTP/1.1\r\nHost: h\r\nIdempotency-Key: \"KEY\"\r\nContent-Type: application/json\r\nContent-Length: 14\r\n\r\n{\"amount\":100}",
    b"POST /pay HTTP/1.1\r\nHost: h\r\nIdempotency-Key: KEY\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{\"amo\r\n9;a=b\r\nunt\":100}\r\n0\r\nX-Sum: 9f\r\n\r\n",
    b"POST http://h/pay HTTP/1.1\r\nHost: h\r\nIdempotency-Key: \"a \\\"KEY\\\"\"\r\nAuthorization: Bearer t\r\nContent-Length: 0\r\n\r\n",
    b"PATCH /pay?a=%20&b=1 HTTP/1.1\r\nHost: h:80\r\nidempotency-key: KEY\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\n{}",
    b"PUT /things/KEY HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\nabc",
    b"GET /things?x=KEY HTTP/1.1\r\nHost: h\r\nAccept: */*\r\nCookie: a=b; c=d\r\n\r\n",
    b"POST /pay HTTP/1.0\r\nHost: h\r\nIdempotency-Key: KEY\r\nContent-Length: 3\r\n\r\nabc",
    b"OPTIONS * HTTP/1.1\r\nHost: h\r\nOrigin: http://page\r\nAccess-Control-Request-Method: POST\r\n\r\n",
    b"GET /.well-known/idempotency/KEY HTTP/1.1\r\nHost: h\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\x0c\x04\0\0\0\0\0\0\x03\0\0\0\x64\0\x04\0\0\x40\0\0\x06\x01\x05\0\0\0\x01\x82\x84\x86\x41\x01h",
];

/// What turns up in the middle.
const PIECES: &[&[u8]] = &[
    b"\r\n",
    b"\r",
    b"\n",
    b"\r\n\r\n",
    b" ",
    b"\t",
    b"\0",
    b":",
    b": ",
    b",",
    b";",
    b"\"",
    b"\\",
    b"%",
    b"%00",
    b"..",
    b"//",
    b"?",
    b"#",
    b"\x7f",
    b"\xff",
    b"\xe2\x80\xae",
    b"HTTP/1.1",
    b"HTTP/9.9",
    b"Content-Length: 5\r\n",
    b"Content-Length: 99999999999999999999\r\n",
    b"Content-Length: -1\r\n",
    b"Content-Length: 1000000000\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Transfer-Encoding: gzip, chunked\r\n",
    b"Idempotency-Key: x\r\n",
    b"Idempotency-Key: \"\r\n",
    b"Idempotency-Key: a, b\r\n",
    b"Host: other\r\n",
    b"Connection: close, upgrade\r\n",
    b"Upgrade: websocket\r\n",
    b"Expect: 100-continue\r\n",
    b"Cookie: session=1\r\n",
    b"ffffffffffffffff\r\n",
    b"0\r\n\r\n",
    b"7fffffff\r\n",
    &[b'a'; 300],
    &[b'z'; 20_000],
];

/// One as it should be, under one of so many keys.
fn sound(random: &mut Random) -> Vec<u8> {
    let mut request = random.pick(SOUND).to_vec();
    if let Some(at) = request.windows(3).position(|three| three == b"KEY") {
        request.splice(at..at + 3, format!("bad-{}", random.below(2000)).into_bytes());
    }
    request
}

/// The request of this number: the same in every run.
fn malformed(number: usize) -> Vec<u8> {
    let mut random = Random::new(SEED).fork(number as u64);
    let mut request = sound(&mut random);
    for _ in 0..=random.below(4) {
        let at = random.below(request.len() + 1);
        match random.below(8) {
            0 if at < request.len() => request[at] ^= 1 << random.below(8),
            1 if at < request.len() => drop(request.remove(at)),
            2 => request.truncate(at),
            3 => {
                let end = (at + random.below(200)).min(request.len());
                let again = request[at..end].to_vec();
                request.splice(at..at, again);
            }
            4 => {
                let other = sound(&mut random);
                request.truncate(at);
                request.extend_from_slice(&other[random.below(other.len())..]);
            }
            5 if at < request.len() => request[at] = random.below(256) as u8,
            _ => drop(request.splice(at..at, random.pick(PIECES).iter().copied())),
        }
    }
    request
}

/// How many files the process has open.
fn descriptors(gateway: &Gateway) -> usize {
    std::fs::read_dir(format!("/proc/{}/fd", gateway.process.pid())).unwrap().count()
}

/// Sends the requests of these numbers, several at a time; answers how many of them were answered.
async fn send_all(addr: SocketAddr, numbers: Range<usize>) -> usize {
    let next = Arc::new(AtomicUsize::new(numbers.start));
    let senders: Vec<_> = (0..SENDERS).map(|_| tokio::spawn(send(addr, next.clone(), numbers.end))).collect();
    let mut answered = 0;
    for sender in senders {
        answered += sender.await.unwrap();
    }
    answered
}

async fn send(addr: SocketAddr, next: Arc<AtomicUsize>, end: usize) -> usize {
    let mut answered = 0;
    loop {
        let number = next.fetch_add(1, Ordering::SeqCst);
        if number >= end {
            return answered;
        }
        let request = malformed(number);
        let mut connection = RawConnection::open(addr).await;
        // One that is refused at once may be closed while the rest is written.
        connection.write(&request).await;
        connection.shutdown().await;
        let answer = connection.read_to_end().await;
        // Its place among the ports is needed again soon.
        connection.reset();
        if !answer.is_empty() {
            let is_http_2 = answer.get(3..5) == Some(b"\x04\0");
            assert!(
                answer.starts_with(b"HTTP/1.") || is_http_2,
                "request {number}, {:?}: {:?}",
                String::from_utf8_lossy(&request),
                String::from_utf8_lossy(&answer)
            );
            answered += 1;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hundred_thousand_malformed_requests_stop_nothing_and_leave_nothing() {
    let runs = AtomicUsize::new(0);
    let upstream =
        Upstream::start(move |_| Answer::new(201, format!("run {}", runs.fetch_add(1, Ordering::SeqCst))))
            .await;
    let folder = tempfile::tempdir().unwrap();
    // Records in a file: they may grow.
    let store = ["--store", "sqlite:onlyonce.db?synchronous=off", "--cache-bytes", "1MiB", "--log", "quiet"];
    let more = [&store[..], &["--header-timeout", "5s", "--body-timeout", "5s"]].concat();
    let mut gateway = Gateway::start(&upstream.url(), folder.path(), &more).await;
    let first = pay(gateway.client(), "sound").await.unwrap();
    assert_eq!(first.status, 201);
    let files = descriptors(&gateway);

    let over = Arc::new(AtomicBool::new(false));
    let (client, ended, reply) = (gateway.client(), over.clone(), first.body.clone());
    let beside = tokio::spawn(async move {
        let mut asked = 0;
        while !ended.load(Ordering::SeqCst) {
            let (old, new) = (pay(client, "sound").await, pay(client, &format!("s-{asked}")).await);
            assert_eq!(old.unwrap().body, reply, "a replay");
            assert_eq!(new.unwrap().status, 201);
            asked += 2;
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        asked
    });
    let mut answered = send_all(gateway.addr, 0..FILLED).await;
    wait_until("the first connections are gone", || descriptors(&gateway) <= files + 8).await;
    let filled = gateway.process.rss_bytes();
    answered += send_all(gateway.addr, FILLED..REQUESTS).await;
    over.store(true, Ordering::SeqCst);
    let asked = beside.await.unwrap();

    wait_until("its connections are gone", || descriptors(&gateway) <= files + 2).await;
    let end = gateway.process.rss_bytes();
    println!(
        "{REQUESTS} malformed requests, {answered} of them answered, {asked} others beside; {files} files open before, {} \
         after; memory {} KiB after {FILLED}, {} KiB at the end",
        descriptors(&gateway),
        filled >> 10,
        end >> 10
    );
    assert!(end <= filled + GROWTH_BYTES_MAX, "from {filled} to {end} bytes");
    assert!(answered > REQUESTS / 2 && asked > 20);
    gateway.process.sigterm().unwrap();
    assert!(gateway.process.wait_exit().await.unwrap().success());
    let said = gateway.process.stderr() + &gateway.process.stdout();
    assert!(!said.contains("panicked"), "{said}");
}
