//! Clocks that step, replies that expire, and a disk that fills up: through the whole path, on each store.

use std::time::Duration;

use onlyonce_core::{OnLeaseEnd, PurgeRequest, StateName, StoreErrorKind, TestClock};
use testkit::{wait_for, wait_until};

use crate::harness::{
    Fault, Faults, Gate, Hit, Server, ServerOptions, TestStore, assert_problem, assert_replay_of, reply,
};

const HOUR: Duration = Duration::from_secs(3600);
const LEASE: Duration = Duration::from_secs(30);
const RETENTION: Duration = Duration::from_secs(24 * 3600);

type Step = fn(&TestClock, Duration);
const STEPS: [(&str, Step); 2] =
    [("forward", TestClock::step_wall_forward), ("back", TestClock::step_wall_back)];
const POLICIES: [OnLeaseEnd; 2] = [OnLeaseEnd::TakeOver, OnLeaseEnd::Hold];

/// An owner that waits at a gate, and another process on the same store.
async fn two(store: &TestStore, clock: &TestClock, policy: OnLeaseEnd, gate: &Gate) -> (Server, Server) {
    let options = || ServerOptions::new(store).clock(clock).lease(LEASE).policy(|p| p.on_lease_end = policy);
    let at = gate.clone();
    let owner = options().start(
        |layer| layer,
        move |hit: Hit| {
            let at = at.clone();
            async move {
                at.pass().await;
                reply(201, format!("owner {}", hit.number))
            }
        },
    );
    let other = options()
        .sound(store)
        .start(|layer| layer, |hit: Hit| async move { reply(201, format!("other {}", hit.number)) });
    tokio::join!(owner, other)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_step_of_the_wall_clock_between_claim_and_complete_takes_nothing_over() {
    for (direction, step) in STEPS {
        for policy in POLICIES {
            let clock = TestClock::new();
            for (name, store) in TestStore::each_on(&clock).await {
                let case = format!("{name}, {direction}, {policy:?}");
                let gate = Gate::closed();
                let (owner, other) = two(&store, &clock, policy, &gate).await;
                let first = tokio::spawn(owner.client().post("/pay").key("k").body("1").send());
                wait_until("the owner works", || owner.runs() == 1).await;
                step(&clock, HOUR);
                for server in [&owner, &other] {
                    let copy = server.pay("k", "1").await;
                    assert_eq!((copy.status, &*copy.code()), (409, "in-progress"), "{case}");
                    let after: u64 = copy.header("retry-after").unwrap().parse().unwrap();
                    assert!((1..=5).contains(&after), "{case}: {after}");
                }
                gate.open();
                let first = first.await.unwrap().unwrap();
                assert_eq!((first.status, first.text()), (201, "owner 1"), "{case}");
                assert_eq!(first.header("idempotency-status"), None, "{case}");
                for server in [&owner, &other] {
                    assert_replay_of(&server.pay("k", "1").await, &first);
                }
                assert_eq!((owner.runs(), other.runs()), (1, 0), "{case}");
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn h8_retry_after_grows_with_the_works_age_and_never_passes_the_lease() {
    let clock = TestClock::new();
    for (name, store) in TestStore::each_on(&clock).await {
        let gate = Gate::closed();
        let (owner, other) = two(&store, &clock, OnLeaseEnd::TakeOver, &gate).await;
        Faults::set(&store.faults.renew, Fault::Refused(StoreErrorKind::Unavailable));
        let first = tokio::spawn(owner.client().post("/pay").key("k").body("1").send());
        wait_until("the owner works", || owner.runs() == 1).await;
        // At an age of 0 s, 12 s and 28 s of a lease of 30 s.
        for (by, least, most) in [(0, 1, 2), (12, 4, 5), (16, 2, 2)] {
            clock.advance(Duration::from_secs(by));
            for server in [&owner, &other] {
                for _ in 0..5 {
                    let copy = server.pay("k", "1").await;
                    let after: u64 = copy.header("retry-after").expect("a Retry-After").parse().unwrap();
                    assert!((least..=most).contains(&after), "{name}: {after}, not {least} to {most}");
                }
            }
        }
        gate.open();
        first.await.unwrap().unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_step_of_the_wall_clock_a_dead_owners_lease_still_ends() {
    for (direction, step) in STEPS {
        for policy in POLICIES {
            let clock = TestClock::new();
            for (name, store) in TestStore::each_on(&clock).await {
                let case = format!("{name}, {direction}, {policy:?}");
                let gate = Gate::closed();
                let (owner, other) = two(&store, &clock, policy, &gate).await;
                Faults::set(&store.faults.renew, Fault::Refused(StoreErrorKind::Unavailable));
                let first = tokio::spawn(owner.client().post("/pay").key("k").body("1").send());
                wait_until("the owner works", || owner.runs() == 1).await;
                step(&clock, HOUR);
                clock.advance(LEASE - Duration::from_millis(1));
                assert_eq!(other.pay("k", "1").await.code(), "in-progress", "{case}");
                clock.advance(Duration::from_millis(1));
                let retry = other.pay("k", "1").await;
                match policy {
                    OnLeaseEnd::TakeOver => assert_eq!((retry.status, retry.text()), (201, "other 1")),
                    OnLeaseEnd::Hold => assert_eq!((retry.status, &*retry.code()), (409, "outcome-unknown")),
                }
                gate.open();
                // Taken over, it answers as the other; held, its late end resolves it.
                let expected = if policy == OnLeaseEnd::Hold { "owner 1" } else { "other 1" };
                assert_eq!(first.await.unwrap().unwrap().text(), expected, "{case}");
                assert_eq!(other.pay("k", "1").await.text(), expected, "{case}");
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reply_is_replayed_until_it_expires_and_is_purged_then() {
    let clock = TestClock::new();
    for (name, store) in TestStore::each_on(&clock).await {
        let options = || ServerOptions::new(&store).clock(&clock).policy(|p| p.retention = RETENTION);
        let run = |hit: Hit| async move { reply(201, format!("run {}", hit.number)) };
        let server = options().start(|layer| layer, run).await;
        let first = server.pay("k", "1").await;
        clock.advance(RETENTION - Duration::from_millis(1));
        assert_replay_of(&server.pay("k", "1").await, &first);
        clock.advance(Duration::from_millis(1));
        // From then on the key is new, for another request too.
        let anew = server.pay("k", "another request").await;
        assert_eq!((anew.text(), anew.header("idempotency-replayed")), ("run 2", None), "{name}");
        assert_eq!(store.records().await, 1, "{name}");

        clock.advance(RETENTION);
        let purging = options().limits(|limits| limits.purge_interval = Duration::from_millis(20));
        let _purging = purging.start(|layer| layer, run).await;
        wait_for("the purge", async || (store.records().await == 0).then_some(())).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_disk_is_a_503_and_passes() {
    let store = TestStore::sqlite_with(|options| options.pages_max(40)).await;
    let options = ServerOptions::new(&store).lease(Duration::from_millis(500)).policy(|policy| {
        policy.retention = Duration::from_secs(1);
    });
    let server = options.start(|layer| layer, |_: Hit| async { reply(201, "paid") }).await;
    let mut ran = 0;
    let refused = loop {
        let answer = server.pay(&format!("key-{ran}"), "1").await;
        if answer.status != 201 {
            break answer;
        }
        ran += 1;
        assert!(ran < 5000, "the disk never fills up");
    };
    assert_problem(&refused, 503, "store-unavailable");
    assert_eq!((&refused.json()["retryable"], refused.header("retry-after")), (&true.into(), Some("1")));
    assert_eq!(server.runs(), ran, "what was refused did not run");
    assert!(ran > 50, "there was room before: {ran}");

    wait_for("the purge of what has expired", async || {
        store.admin.purge(&PurgeRequest::default()).await.unwrap();
        (store.records().await == 0).then_some(())
    })
    .await;
    let first = server.pay("room-again", "1").await;
    assert_eq!((first.status, first.header("idempotency-status")), (201, None), "{first:?}");
    assert_replay_of(&server.pay("room-again", "1").await, &first);
    let records = store.admin.list(&Default::default()).await.unwrap().records;
    assert!(records.iter().any(|record| record.state == StateName::Completed));
}
