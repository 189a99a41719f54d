//! Many copies at once.

use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::TcpStream;

use crate::harness::{Gate, Hit, Server, TestStore, on_every_store, reply};

on_every_store! {
    a_crowd_of_copies_gets_the_one_answer,
    fifty_copies_at_once_run_once_round_after_round,
}

const ROUNDS: usize = 200;
const COPIES: usize = 50;

async fn fifty_copies_at_once_run_once_round_after_round(store: TestStore) {
    let server = Server::start(
        &store,
        |layer| layer.wait(testkit::PATIENCE),
        |hit: Hit| async move {
            // Long enough for copies to meet it in flight, in half of the rounds.
            if hit.number.is_multiple_of(2) {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
            reply(201, format!("run {}", hit.number))
        },
    )
    .await;
    let mut connections = Vec::new();
    for _ in 0..COPIES {
        connections.push(server.client().connect().await.unwrap());
    }
    let (mut first_answers, mut replays) = (0, 0);
    for round in 1..=ROUNDS {
        let mut copies = Vec::new();
        for mut connection in connections.drain(..) {
            let request = server.client().post("/pay").key(&format!("round-{round}")).body("100");
            copies.push(tokio::spawn(async move {
                let answer = connection.send(request).await.unwrap();
                (connection, answer)
            }));
        }
        for copy in copies {
            let (connection, answer) = copy.await.unwrap();
            assert_eq!((answer.status, answer.text()), (201, &*format!("run {round}")));
            match answer.header("idempotency-replayed") {
                None => first_answers += 1,
                Some(_) => replays += 1,
            }
            connections.push(connection);
        }
        assert_eq!(server.runs(), round, "the effect happened once in each round");
        assert_eq!(first_answers, round);
    }
    assert_eq!(store.records().await.min(ROUNDS), ROUNDS.min(100), "a page of the records");
    println!(
        "{ROUNDS} rounds of {COPIES} copies: {} runs, {first_answers} first answers, {replays} replays",
        server.runs()
    );
}

/// Thousands of copies of one key: each gets the one answer, for a handful of questions to the store.
async fn a_crowd_of_copies_gets_the_one_answer(store: TestStore) {
    // As many as one connection may have open.
    const STREAMS: usize = 200;
    const CROWD: usize = 50 * STREAMS;
    let gate = Gate::closed();
    let at = gate.clone();
    let server = Server::start(
        &store,
        |layer| layer.wait(testkit::PATIENCE),
        move |hit: Hit| {
            let at = at.clone();
            async move {
                at.pass().await;
                reply(201, format!("run {}", hit.number))
            }
        },
    )
    .await;
    let mut copies = tokio::task::JoinSet::new();
    for _ in 0..CROWD / STREAMS {
        let io = TokioIo::new(TcpStream::connect(server.addr()).await.unwrap());
        let (sender, connection) =
            http2::handshake::<_, _, Full<Bytes>>(TokioExecutor::new(), io).await.unwrap();
        tokio::spawn(connection);
        for _ in 0..STREAMS {
            let mut sender = sender.clone();
            copies.spawn(async move {
                let request = http::Request::post("http://localhost/pay").header("idempotency-key", "k");
                let answer = sender.send_request(request.body(Full::from("100")).unwrap()).await.unwrap();
                let status = answer.status();
                (status, answer.into_body().collect().await.unwrap().to_bytes())
            });
        }
    }
    testkit::wait_until("all but one wait", || server.idem.waiting() == CROWD - 1).await;
    gate.open();
    let mut answers = 0;
    while let Some(answer) = copies.join_next().await {
        let (status, body) = answer.unwrap();
        assert_eq!((status.as_u16(), &body[..]), (201, &b"run 1"[..]));
        answers += 1;
    }
    assert_eq!((answers, server.runs()), (CROWD, 1));
    let claims = store.faults.claims.lock().len();
    assert!(claims <= 10, "{claims} questions to the store");
    println!("{CROWD} copies of one key: 1 run, {claims} questions to the store");
}
