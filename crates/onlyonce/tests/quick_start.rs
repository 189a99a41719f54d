//! What the README shows, run: through the facade alone, on a real file and a real socket.

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use axum::{Router, routing::post};
use onlyonce::sqlite::{OnceOutcome, TxFailure};
use onlyonce::{
    Failure, Fingerprint, Idempotency, IdempotencyLayer, Key, Operation, Outcome, Reply, Scope, SqliteStore,
};
use testkit::Client;

type TestResult = Result<(), Box<dyn Error>>;

fn operation(key: &str) -> Operation {
    Operation::new(Scope::anonymous(), Key::new(key).expect("a key"), Fingerprint::of("100"))
}

async fn serve(path: &std::path::Path, charged: Arc<AtomicU32>) -> Result<Client, Box<dyn Error>> {
    let idem = Idempotency::builder(SqliteStore::open(path).await?).build();
    let charge = async move |body: String| {
        let total = charged.fetch_add(1, Ordering::SeqCst) + 1;
        format!("charged {body}, {total} in all")
    };
    let router: Router = Router::new().route("/charges", post(charge)).layer(IdempotencyLayer::new(&idem));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let client = Client::new(listener.local_addr()?);
    tokio::spawn(async move { axum::serve(listener, router).await });
    Ok(client)
}

#[tokio::test]
async fn the_layer_replays_also_after_a_restart() -> TestResult {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("onlyonce.db");
    let charged = Arc::new(AtomicU32::new(0));
    for (restart, replayed) in [(0, None), (1, Some("true"))] {
        let client = serve(&path, charged.clone()).await?;
        for (send, replayed) in [(0, replayed), (1, Some("true"))] {
            let answer = client.post("/charges").key("order-7").body("100").send().await?;
            assert_eq!((answer.status, answer.text()), (200, "charged 100, 1 in all"), "{restart} {send}");
            assert_eq!(answer.header("idempotency-replayed"), replayed, "{restart} {send}");
        }
        let other = client.post("/charges").key("order-7").body("200").send().await?;
        assert_eq!((other.status, other.code().as_str()), (422, "key-reused"));
    }
    assert_eq!(charged.load(Ordering::SeqCst), 1);
    Ok(())
}

#[tokio::test]
async fn the_end_of_the_work_decides_what_a_retry_gets() -> TestResult {
    let idem = Idempotency::in_memory();
    let declined = operation("declined");
    let decline = async |_: &_| Err::<Reply, _>(Failure::definitive(Reply::new(402, "declined")));
    let first = idem.run(&declined, decline).await?;
    assert!(matches!(&first, Outcome::Ran(reply) if reply.status() == 402), "{first:?}");
    let again = idem.run(&declined, async |_| Ok(Reply::new(201, "must not run"))).await?;
    assert!(
        matches!(&again, Outcome::Replayed(stored) if stored.reply == Reply::new(402, "declined")),
        "{again:?}"
    );

    let busy = operation("busy");
    let first = idem.run(&busy, async |_| Err(Failure::transient("the provider is busy"))).await?;
    assert!(matches!(first, Outcome::Released(_)), "{first:?}");
    let again = idem.run(&busy, async |_| Ok(Reply::new(201, "ch_81"))).await?;
    assert!(matches!(&again, Outcome::Ran(reply) if reply.status() == 201), "{again:?}");

    let held = Idempotency::builder(onlyonce::MemoryStore::new()).hold().build();
    let timed_out = operation("timed out");
    let first = held.run(&timed_out, async |_| Err(Failure::unknown("no answer"))).await?;
    assert!(matches!(first, Outcome::Unknown { .. }), "{first:?}");
    let again = held.run(&timed_out, async |_| Ok(Reply::new(201, "must not run"))).await?;
    assert!(matches!(again, Outcome::Unknown { .. }), "{again:?}");
    Ok(())
}

#[tokio::test]
async fn rows_and_record_are_committed_together_or_not_at_all() -> TestResult {
    let folder = tempfile::tempdir()?;
    let store = SqliteStore::open(folder.path().join("shop.db")).await?;
    let db = onlyonce::sqlite::rusqlite::Connection::open(folder.path().join("shop.db"))?;
    db.execute_batch("create table orders (item text, amount integer)")?;
    let orders = || db.query_row("select count(*) from orders", [], |row| row.get::<_, i64>(0));

    let insert = |fail: bool| {
        move |tx: &onlyonce::sqlite::rusqlite::Transaction<'_>| {
            tx.execute("insert into orders values ('tea', 3)", [])
                .map_err(|e| TxFailure::Transient(e.into()))?;
            if fail { Err(TxFailure::Transient("out of tea".into())) } else { Ok(Reply::new(201, "ordered")) }
        }
    };
    let order = operation("order-7");
    let failed = store.once(&order, insert(true)).await?;
    assert!(matches!(failed, OnceOutcome::Transient(_)), "{failed:?}");
    assert_eq!(orders()?, 0);
    let ran = store.once(&order, insert(false)).await?;
    assert!(matches!(ran, OnceOutcome::Ran(_)), "{ran:?}");
    let replayed = store.once(&order, insert(false)).await?;
    assert!(matches!(&replayed, OnceOutcome::Replayed(stored) if stored.reply == Reply::new(201, "ordered")));
    assert_eq!(orders()?, 1);
    Ok(())
}
