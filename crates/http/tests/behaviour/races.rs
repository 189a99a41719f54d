//! Many copies at once.

use std::time::Duration;

use crate::harness::{Hit, Server, TestStore, on_every_store, reply};

on_every_store! {
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
