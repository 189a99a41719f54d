//! What becomes of a claim, its work and its reply.

use std::time::Duration;

use onlyonce_core::{
    ClaimOutcome, OnLeaseEnd, OnceOutcome, OperatorAction, OperatorOutcome, Reply, Store, StoreAdmin,
    StoreErrorKind,
};
use onlyonce_store_postgres::tokio_postgres::Transaction;
use onlyonce_store_postgres::{TxClaim, TxFailure, TxOptions};

use crate::common::*;
use crate::{has_no_savepoint, place_order, ran, replayed, setting, shop};

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_its_work_and_its_reply_are_one_transaction() {
    let shop = shop().await;
    let mut client = shop.client().await;
    let options = TxOptions::default();
    // The token form.
    let mut tx = client.transaction().await.unwrap();
    let TxClaim::Acquired(claim) = shop.store.claim_in(&mut tx, &op("token"), &options).await.unwrap() else {
        panic!("not acquired")
    };
    assert_eq!(claim.attempt(), 1);
    let reply = place_order(&mut tx, "token").await.unwrap();
    let pending = claim.complete(&mut tx, reply.clone()).await.unwrap();
    // Nobody sees any of it.
    assert_eq!((shop.count("token").await, shop.record("token").await.as_str()), (0, ""));
    assert!(!format!("{pending:?}").contains("201"), "{pending:?}");
    tx.commit().await.unwrap();
    let stored = pending.after_commit();
    assert_eq!(stored.reply, reply);
    assert!(stored.remaining <= options.retention && stored.remaining > options.retention / 2);
    // The closure form.
    let reply = ran(shop.order(&mut client, &op("closure")).await.unwrap());
    for key in ["token", "closure"] {
        let same = format!(
            "select o.xmin = k.xmin, k.status, k.on_lease_end from orders o join idempotency_keys k on k.key = o.item
             where o.item = '{key}'"
        );
        assert_eq!(shop.place.psql(&same).await, "t|completed|hold");
    }
    // What is stored is replayed, by the leased mode too.
    let again = replayed(shop.order(&mut client, &op("closure")).await.unwrap());
    assert_eq!(again, reply);
    assert_eq!(completed(shop.store.claim(&op("closure"), &hold()).await.unwrap()), reply);
    assert_eq!(shop.count("closure").await, 1);
    // Rolled back: neither.
    let mut tx = client.transaction().await.unwrap();
    let TxClaim::Acquired(claim) = shop.store.claim_in(&mut tx, &op("rolled"), &options).await.unwrap()
    else {
        panic!("not acquired")
    };
    place_order(&mut tx, "rolled").await.unwrap();
    let _pending = claim.complete(&mut tx, Reply::ok("never")).await.unwrap();
    tx.rollback().await.unwrap();
    assert_eq!((shop.count("rolled").await, shop.record("rolled").await.as_str()), (0, ""));
    ran(shop.order(&mut client, &op("rolled")).await.unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_definitive_failure_takes_the_work_back_and_keeps_its_reply() {
    let shop = shop().await;
    let mut client = shop.client().await;
    let mut runs = 0;
    for round in 0..3 {
        let outcome = shop
            .store
            .once(&mut client, &op("declined"), async |tx| {
                runs += 1;
                place_order(tx, "declined").await?;
                Err(TxFailure::Definitive(Reply::new(402, "declined")))
            })
            .await
            .unwrap();
        let reply = if round == 0 { ran(outcome) } else { replayed(outcome) };
        assert_eq!((reply.status(), &reply.body()[..]), (402, &b"declined"[..]));
    }
    assert_eq!((runs, shop.count("declined").await), (1, 0));
    // Also after a statement that failed, by which the transaction itself would be lost.
    let outcome = shop
        .store
        .once(&mut client, &op("taken"), async |tx| {
            place_order(tx, "taken").await?;
            tx.execute("insert into orders (item) values (null)", &[]).await.unwrap_err();
            Err(TxFailure::Definitive(Reply::new(409, "taken")))
        })
        .await
        .unwrap();
    assert_eq!(ran(outcome).status(), 409);
    assert_eq!((shop.count("taken").await, shop.record("taken").await.as_str()), (0, "completed"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transient_failure_leaves_nothing_and_the_key_free() {
    let shop = shop().await;
    let mut client = shop.client().await;
    let outcome = shop
        .store
        .once(&mut client, &op("k"), async |tx| {
            place_order(tx, "k").await?;
            Err(TxFailure::transient("the bank is closed"))
        })
        .await
        .unwrap();
    assert!(matches!(&outcome, OnceOutcome::Transient(why) if why.to_string() == "the bank is closed"));
    // A failed statement is one, by `?`.
    let outcome = shop
        .store
        .once(&mut client, &op("k"), async |tx| {
            place_order(tx, "k").await?;
            tx.execute("insert into nowhere values (1)", &[]).await?;
            Ok(Reply::ok("never"))
        })
        .await
        .unwrap();
    assert!(matches!(outcome, OnceOutcome::Transient(_)), "{outcome:?}");
    assert_eq!((shop.count("k").await, shop.record("k").await.as_str()), (0, ""));
    ran(shop.order(&mut client, &op("k")).await.unwrap());
    assert_eq!(shop.count("k").await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn work_that_takes_no_notice_of_a_failure_or_ends_the_transaction_is_an_error() {
    let shop = shop().await;
    let mut client = shop.client().await;
    let error = shop
        .store
        .once(&mut client, &op("deaf"), async |tx| {
            place_order(tx, "deaf").await?;
            let _ = tx.execute("insert into nowhere values (1)", &[]).await;
            Ok(Reply::ok("fine"))
        })
        .await
        .unwrap_err();
    assert_eq!(
        (error.kind(), error.may_have_applied()),
        (StoreErrorKind::Internal, false),
        "{}",
        chain(&error)
    );
    assert_eq!((shop.count("deaf").await, shop.record("deaf").await.as_str()), (0, ""));
    let mut runs = 0;
    let error = shop
        .store
        .once(&mut client, &op("rollback"), async |tx| {
            runs += 1;
            tx.batch_execute("ROLLBACK").await?;
            place_order(tx, "rollback").await
        })
        .await
        .unwrap_err();
    assert_eq!((error.kind(), runs), (StoreErrorKind::Internal, 1), "{}", chain(&error));
    // It committed by itself: the record says that something may have happened, and it is not run again.
    for (key, transient) in [("definitive", false), ("transient", true)] {
        let mut work = async || {
            shop.store
                .once(&mut client, &op(key), async |tx| {
                    place_order(tx, key).await?;
                    tx.batch_execute("COMMIT").await?;
                    Err(match transient {
                        true => TxFailure::transient("told as nothing"),
                        false => TxFailure::Definitive(Reply::ok("never")),
                    })
                })
                .await
        };
        assert_eq!(work().await.unwrap_err().kind(), StoreErrorKind::Internal, "{key}");
        assert!(matches!(work().await.unwrap(), OnceOutcome::Unknown { .. }), "{key}");
        assert_eq!(shop.count(key).await, 1, "{key}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_that_is_committed_without_a_reply_is_unknown() {
    let shop = shop().await;
    let mut client = shop.client().await;
    let mut tx = client.transaction().await.unwrap();
    let claimed = shop.store.claim_in(&mut tx, &op("k"), &TxOptions::default()).await.unwrap();
    let TxClaim::Acquired(claim) = claimed else { panic!("{claimed:?}") };
    tx.commit().await.unwrap();
    assert!(matches!(shop.order(&mut client, &op("k")).await.unwrap(), OnceOutcome::Unknown { .. }));
    let leased = shop.store.claim(&op("k"), &take_over()).await.unwrap();
    assert!(matches!(leased, ClaimOutcome::Unknown { .. }), "{leased:?}");
    // Its claim may still say what came of it.
    let mut tx = client.transaction().await.unwrap();
    let pending = claim.complete(&mut tx, Reply::ok("late")).await.unwrap();
    tx.commit().await.unwrap();
    assert_eq!(pending.after_commit().reply.body(), "late");
    assert_eq!(replayed(shop.order(&mut client, &op("k")).await.unwrap()).body(), "late");
    // And not in another transaction than the claim's, once that is gone.
    let mut tx = client.transaction().await.unwrap();
    let claimed = shop.store.claim_in(&mut tx, &op("gone"), &TxOptions::default()).await.unwrap();
    let TxClaim::Acquired(claim) = claimed else { panic!("{claimed:?}") };
    tx.rollback().await.unwrap();
    let mut tx = client.transaction().await.unwrap();
    let error = claim.complete(&mut tx, Reply::ok("never")).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Conflict);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_leased_mode_left_is_met_as_the_policies_say() {
    let shop = shop().await;
    let mut client = shop.client().await;
    let leased = |on_lease_end, lease| {
        let request = request(on_lease_end);
        onlyonce_core::ClaimRequest { lease, ..request }
    };
    // A living owner; another request; a dead owner; one whose outcome nobody knows.
    let (long, short) = (Duration::from_secs(60), Duration::from_millis(1));
    acquired(shop.store.claim(&op("alive"), &leased(OnLeaseEnd::TakeOver, long)).await.unwrap());
    let met = shop.order(&mut client, &op("alive")).await.unwrap();
    assert!(matches!(met, OnceOutcome::InProgress { lease_left, .. } if lease_left > long / 2), "{met:?}");
    let met = shop.order(&mut client, &op_of("shop", "alive", "another body")).await.unwrap();
    assert!(matches!(met, OnceOutcome::Mismatch { .. }), "{met:?}");
    acquired(shop.store.claim(&op("held"), &leased(OnLeaseEnd::Hold, short)).await.unwrap());
    shop.dead_owner(&op("dead")).await;
    let created = async |key: &str| shop.store.show(op(key).id()).await.unwrap().unwrap().created_at;
    let first_claimed = created("dead").await;
    let mut tx = client.transaction().await.unwrap();
    let claimed = shop.store.claim_in(&mut tx, &op("dead"), &TxOptions::default()).await.unwrap();
    let TxClaim::Acquired(claim) = claimed else { panic!("{claimed:?}") };
    assert_eq!(claim.attempt(), 2);
    let pending = claim.complete(&mut tx, Reply::ok("second")).await.unwrap();
    tx.commit().await.unwrap();
    drop(pending);
    assert_eq!(replayed(shop.order(&mut client, &op("dead")).await.unwrap()).body(), "second");
    assert_eq!(created("dead").await, first_claimed, "taken over, it is as old as it was");
    let met = shop.order(&mut client, &op("held")).await.unwrap();
    assert!(matches!(met, OnceOutcome::Unknown { .. }), "{met:?}");
    // Freed by an operator: a new attempt, of any request.
    let action = OperatorAction {
        actor: "tests".into(),
        reason: "nothing happened".into(),
        target: onlyonce_core::Target::Undecided,
    };
    let freed = shop.store.free(op("held").id(), &action).await.unwrap();
    assert!(matches!(freed, OperatorOutcome::Done(_)), "{freed:?}");
    let mut tx = client.transaction().await.unwrap();
    let other = op_of("shop", "held", "another body");
    let claimed = shop.store.claim_in(&mut tx, &other, &TxOptions::default()).await.unwrap();
    let TxClaim::Acquired(claim) = claimed else { panic!("{claimed:?}") };
    assert_eq!(claim.attempt(), 2);
    drop((claim, tx));
    // Expired: as new.
    let options = TxOptions { retention: Duration::from_millis(1), ..TxOptions::default() };
    let mut made = Vec::new();
    for _ in 0..2 {
        let work = async |tx: &mut Transaction<'_>| place_order(tx, "expired").await;
        ran(shop.store.once_with(&mut client, &op("expired"), &options, work).await.unwrap());
        made.push(created("expired").await);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(shop.count("expired").await, 2);
    assert!(made[0] < made[1], "made anew: {made:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_callers_settings_stay_and_a_weak_commit_is_made_durable() {
    let shop = shop().await;
    let mut client = shop.client().await;
    client.batch_execute("set lock_timeout = '7s'; set synchronous_commit = off").await.unwrap();
    let mut settings = async |key: &str| {
        let mut tx = client.transaction().await.unwrap();
        tx.batch_execute("set local lock_timeout = '3s'").await.unwrap();
        let claimed = shop.store.claim_in(&mut tx, &op(key), &TxOptions::default()).await.unwrap();
        let TxClaim::Acquired(claim) = claimed else { panic!("{claimed:?}") };
        let inside = setting(&tx).await;
        drop(claim.complete(&mut tx, Reply::ok("")).await.unwrap());
        has_no_savepoint(tx).await;
        (inside, setting(&client).await)
    };
    let expected = ("3s|on".to_owned(), "7s|off".to_owned());
    assert_eq!(settings("new").await, expected);
    // A record is taken over after a wait for its lock.
    shop.dead_owner(&op("dead")).await;
    assert_eq!(settings("dead").await, expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_to_another_database_is_refused() {
    let (shop, other, empty) = (shop().await, shop().await, place().await);
    empty.psql("create table orders (item text)").await;
    for (url, place) in [(&other.place.url, &other.place), (&empty.url, &empty)] {
        let mut client = crate::client(url).await;
        let error = shop.order(&mut client, &op("k")).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Unfit, "{}", chain(&error));
        assert!(error.to_string().contains("another database"), "{error}");
        assert_eq!(place.psql("select count(*) from orders").await, "0");
    }
}

/// The end of the server's calendar is not that of a duration.
#[tokio::test(flavor = "multi_thread")]
async fn a_retention_without_end_is_a_long_one() {
    let shop = shop().await;
    let mut client = shop.client().await;
    let options = TxOptions { retention: Duration::MAX, ..TxOptions::default() };
    let mut order = async || {
        let work = async |tx: &mut Transaction<'_>| place_order(tx, "ever").await;
        shop.store.once_with(&mut client, &op("ever"), &options, work).await.unwrap()
    };
    let first = ran(order().await);
    assert_eq!(replayed(order().await), first);
    assert_eq!(shop.count("ever").await, 1);
}
