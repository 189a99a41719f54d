//! Leases: renewed while work runs, left when nobody knows, lost to others.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::*;
use onlyonce_core::{
    CompleteOutcome, Completion, MemoryStore, OperatorAction, Store, StoreAdmin, StoreErrorKind, Target,
    TestClock,
};
use onlyonce_engine::{Begin, Completed, Context, Execution, Failure, Idempotency, NotOwner, Outcome};
use tokio::sync::oneshot;

fn op() -> onlyonce_core::Operation {
    operation("a", "x")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_is_renewed_for_as_long_as_work_runs() {
    let (store, other) = two_ways();
    let (owner, rival) = (brief(&store, ms(1500)).build(), brief(&other, ms(1500)).build());
    let working = tokio::spawn({
        let owner = owner.clone();
        async move {
            let work = async |_: &Context| {
                tokio::time::sleep(secs(4)).await;
                Ok::<_, Failure>(body("done"))
            };
            owner.run(&op(), work).await.unwrap()
        }
    });
    eventually("claimed", || owner.counts().acquired == 1).await;
    while !working.is_finished() {
        match rival.begin(&op()).await.unwrap() {
            Begin::InProgress { .. } => tokio::time::sleep(ms(20)).await,
            Begin::Completed(_) => {}
            other => panic!("{other:?}"),
        }
    }
    assert!(matches!(working.await.unwrap(), Outcome::Ran(_)));
    assert!(owner.counts().renewals > 0);
    assert_eq!(rival.counts().acquired, 0);
}

/// True when the lease held; `None` when the machine stood still for so long that nothing can be said.
async fn a_shorter_lease_holds() -> Option<bool> {
    let (store, other) = two_ways();
    let (long, rival) = (engine(&store).build(), engine(&other).build());
    // Well into the long pause of a heartbeat for 30 s leases.
    tokio::time::sleep(ms(50)).await;
    let mut policy = long.policy().clone();
    policy.lease = ms(600);
    let short = long.with_policy(policy).unwrap();
    let execution = acquire(&short, &op()).await;
    while long.counts().renewals < 3 {
        let looked = tokio::time::Instant::now();
        let answer = rival.begin(&op()).await.unwrap();
        tokio::time::sleep(ms(20)).await;
        if looked.elapsed() > ms(150) {
            return None;
        }
        if !is_in_progress(&answer) {
            return Some(false);
        }
    }
    Some(matches!(execution.complete(body("x")).await, Completed::Recorded(_)))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_handle_with_a_shorter_lease_is_renewed_in_time() {
    for _ in 0..20 {
        if let Some(held) = a_shorter_lease_holds().await {
            assert!(held, "nobody takes over from an owner that lives");
            return;
        }
    }
    panic!("this machine stands still all the time");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn past_the_work_timeout_renewal_stops_and_another_takes_over() {
    let (store, other) = two_ways();
    let owner = brief(&store, ms(300)).work_timeout(ms(400)).build();
    let rival = brief(&other, ms(300)).build();
    let (late, go_on) = oneshot::channel::<()>();
    let work = move |context: Context| async move {
        go_on.await.unwrap();
        assert!(context.ensure_lease().await.is_err());
        Ok(body("late"))
    };
    let outcome = owner.run_detached(op(), work).await.unwrap();
    assert!(matches!(outcome, Outcome::Unknown { cause: Some(_), .. }), "{outcome:?}");
    let execution = attempt_after_takeover(&rival, &op()).await;
    assert_eq!((execution.attempt(), rival.counts().takeovers), (2, 1));
    assert!(matches!(execution.complete(body("second")).await, Completed::Recorded(_)));
    late.send(()).unwrap();
    all_given_back(&owner).await;
    assert_eq!((owner.counts().fenced, owner.counts().completed), (1, 0));
    assert_eq!(replayed(&owner.begin(&op()).await.unwrap()), b"second");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn past_the_work_timeout_under_hold_it_is_unknown_until_the_late_completion() {
    let (store, other) = two_ways();
    let owner = brief(&store, ms(300)).work_timeout(ms(400)).hold().build();
    let rival = brief(&other, ms(300)).build();
    let (late, go_on) = oneshot::channel::<()>();
    let work = move |_| async move {
        go_on.await.unwrap();
        Ok(body("late"))
    };
    let outcome = owner.run_detached(op(), work).await.unwrap();
    assert!(matches!(outcome, Outcome::Unknown { cause: Some(_), .. }));
    begin_until(&rival, &op(), |begin| matches!(begin, Begin::Unknown { .. })).await;
    begin_until(&owner, &op(), |begin| matches!(begin, Begin::Unknown { .. })).await;
    late.send(()).unwrap();
    for idem in [&owner, &rival] {
        let answer = begin_until(idem, &op(), |begin| matches!(begin, Begin::Completed(_))).await;
        assert_eq!(replayed(&answer), b"late");
    }
    all_given_back(&owner).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn work_that_borrows_is_dropped_at_its_timeout() {
    let idem = engine(&FaultyStore::new()).work_timeout(ms(100)).hold().build();
    let work = async |_: &Context| std::future::pending::<Result<_, Failure>>().await;
    assert!(matches!(idem.run(&op(), work).await.unwrap(), Outcome::Unknown { cause: Some(_), .. }));
    assert!(matches!(idem.begin(&op()).await.unwrap(), Begin::Unknown { .. }));
    all_given_back(&idem).await;
}

/// Ends an operation without an end, in every way there is.
async fn end_without_an_end(idem: &Idempotency, way: &str) {
    match way {
        "panic in run" => {
            let idem = idem.clone();
            let running = async move {
                let work = async |_: &Context| -> Result<_, Failure> { panic!("a bug in the work") };
                idem.run(&op(), work).await
            };
            assert!(tokio::spawn(running).await.unwrap_err().is_panic(), "it passes through");
        }
        "panic in run_detached" => {
            let work = |_| async { panic!("a bug in the work") };
            let outcome = idem.run_detached(op(), work).await.unwrap();
            assert!(matches!(outcome, Outcome::Unknown { cause: Some(_), .. }));
        }
        "panic before the future of run_detached" => {
            let work = |_: Context| -> std::future::Ready<Result<_, Failure>> { panic!("a bug") };
            let outcome = idem.run_detached(op(), work).await.unwrap();
            assert!(matches!(outcome, Outcome::Unknown { cause: Some(_), .. }));
        }
        "dropped run" => {
            let acquired = idem.counts().acquired;
            let running = tokio::spawn({
                let idem = idem.clone();
                async move {
                    let work = async |_: &Context| std::future::pending::<Result<_, Failure>>().await;
                    idem.run(&op(), work).await
                }
            });
            eventually("running", || idem.counts().acquired == acquired + 1).await;
            running.abort();
        }
        "dropped execution" => drop(acquire(idem, &op()).await),
        "said so" => acquire(idem, &op()).await.unknown().await,
        "unknown failure" => {
            let work = async |_: &Context| Err(Failure::unknown("timed out"));
            let outcome = idem.run(&op(), work).await.unwrap();
            assert!(matches!(outcome, Outcome::Unknown { cause: Some(_), .. }));
        }
        other => panic!("no such way: {other}"),
    }
    all_given_back(idem).await;
    assert_eq!(idem.counts().unknown, 1, "{way}");
    assert_eq!(idem.counts().released, 0, "{way}");
}

const WAYS: [&str; 7] = [
    "panic in run",
    "panic in run_detached",
    "panic before the future of run_detached",
    "dropped run",
    "dropped execution",
    "said so",
    "unknown failure",
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_an_end_under_hold_it_is_unknown_at_once_and_never_released() {
    for way in WAYS {
        let (store, other) = two_ways();
        let idem = engine(&store).hold().build();
        end_without_an_end(&idem, way).await;
        for asked in [&idem, &engine(&other).build()] {
            assert!(matches!(asked.begin(&op()).await.unwrap(), Begin::Unknown { .. }), "{way}");
        }
        assert_eq!((store.calls(Method::MarkUnknown), store.calls(Method::Release)), (1, 0), "{way}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_an_end_under_takeover_it_is_taken_over_after_the_lease() {
    for way in WAYS {
        let clock = TestClock::new();
        let store = FaultyStore::onto(&MemoryStore::with_clock(Arc::new(clock.clone())));
        let idem = brief(&store, secs(30)).clock(Arc::new(clock.clone())).build();
        end_without_an_end(&idem, way).await;
        clock.advance(secs(29));
        assert!(is_in_progress(&idem.begin(&op()).await.unwrap()), "{way}");
        clock.advance(secs(1));
        let execution = acquire(&idem, &op()).await;
        assert_eq!(execution.attempt(), 2, "{way}");
        execution.release().await;
        assert_eq!(store.calls(Method::MarkUnknown), 0, "{way}");
    }
}

#[tokio::test]
async fn too_many_attempts_end_in_unknown() {
    let clock = TestClock::new();
    let store = FaultyStore::onto(&MemoryStore::with_clock(Arc::new(clock.clone())));
    let idem = brief(&store, secs(30)).max_attempts(3).clock(Arc::new(clock.clone())).build();
    for attempt in 1..=3 {
        let execution = acquire(&idem, &op()).await;
        assert_eq!(execution.attempt(), attempt);
        drop(execution);
        all_given_back(&idem).await;
        clock.advance(secs(31));
    }
    assert!(matches!(idem.begin(&op()).await.unwrap(), Begin::Unknown { .. }));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn detached_work_outlives_its_caller() {
    let idem = engine(&FaultyStore::new()).build();
    let (go, gone) = oneshot::channel::<()>();
    let caller = tokio::spawn({
        let idem = idem.clone();
        async move {
            let work = |_| async move {
                gone.await.unwrap();
                Ok(body("done"))
            };
            idem.run_detached(op(), work).await
        }
    });
    eventually("running", || idem.counts().acquired == 1).await;
    caller.abort();
    assert!(caller.await.unwrap_err().is_cancelled());
    go.send(()).unwrap();
    let answer = begin_until(&idem, &op(), |begin| matches!(begin, Begin::Completed(_))).await;
    assert_eq!(replayed(&answer), b"done");
    all_given_back(&idem).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_completion_goes_on_when_its_caller_goes_away() {
    let store = FaultyStore::new();
    let idem = engine(&store).hold().build();
    // In the middle of the call.
    let execution = acquire(&idem, &op()).await;
    store.fail(Method::Complete, 1, Fault::Late(ms(600)));
    let completing = tokio::spawn(execution.complete(body("done")));
    eventually("completing", || store.calls(Method::Complete) == 1).await;
    completing.abort();
    let answer = begin_until(&idem, &op(), |begin| matches!(begin, Begin::Completed(_))).await;
    assert_eq!(replayed(&answer), b"done");
    // Before its first poll.
    let execution = acquire(&idem, &operation("b", "x")).await;
    drop(execution.complete(body("done")));
    let answer = begin_until(&idem, &operation("b", "x"), |begin| matches!(begin, Begin::Completed(_))).await;
    assert_eq!(replayed(&answer), b"done");
    all_given_back(&idem).await;
    assert_eq!((idem.counts().completed, idem.counts().unknown), (2, 0));
}

#[test]
fn a_runtime_may_go_away_in_the_middle_of_anything() {
    for threads in [1, 2] {
        let store = FaultyStore::new();
        let mut builder = match threads {
            1 => tokio::runtime::Builder::new_current_thread(),
            _ => tokio::runtime::Builder::new_multi_thread(),
        };
        let runtime = builder.enable_all().build().unwrap();
        let idem = runtime.block_on(async {
            let idem = engine(&store).hold().build();
            let executions = [
                acquire(&idem, &operation("completing", "x")).await,
                acquire(&idem, &operation("releasing", "x")).await,
                acquire(&idem, &operation("marking", "x")).await,
            ];
            let dropped = acquire(&idem, &operation("working", "x")).await;
            store.break_all(Fault::Hang);
            let [completing, releasing, marking] = executions;
            tokio::spawn(completing.complete(body("x")));
            tokio::spawn(releasing.release());
            tokio::spawn(marking.unknown());
            tokio::spawn(async move {
                let _working = dropped;
                std::future::pending::<()>().await;
            });
            tokio::spawn({
                let idem = idem.clone();
                async move { idem.begin(&operation("claiming", "x")).await.map(drop) }
            });
            eventually("all in the middle of it", || {
                let calls = |method| store.calls(method);
                calls(Method::Claim) == 5
                    && calls(Method::Complete) == 1
                    && calls(Method::Release) == 1
                    && calls(Method::MarkUnknown) == 1
            })
            .await;
            idem
        });
        drop(runtime);
        assert_eq!(idem.in_flight(), 0, "{threads} threads");
    }
}

async fn lose_the_lease(owner_store: &FaultyStore, rival: &Idempotency, fault: Fault) -> Execution {
    owner_store.break_down(Method::Renew, fault);
    attempt_after_takeover(rival, &op()).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_owner_that_lost_its_lease_is_fenced_and_answers_as_the_other() {
    for fault in [Fault::Hang, Fault::Refuse(StoreErrorKind::Unavailable)] {
        let (store, other) = two_ways();
        let (owner, rival) = (brief(&store, ms(300)).build(), brief(&other, secs(30)).build());
        let stale = acquire(&owner, &op()).await;
        let execution = lose_the_lease(&store, &rival, fault).await;
        // While the other is at work there is no reply to answer with.
        let context = stale.context().clone();
        store.heal();
        eventually("fenced by the heartbeat", || context.is_fenced()).await;
        assert_eq!(context.ensure_lease().await, Err(NotOwner));
        assert!(is_in_progress(&owner.begin(&op()).await.unwrap()), "a fenced owner speaks for nobody");
        assert!(matches!(stale.complete(body("stale")).await, Completed::Fenced(None)));
        execution.complete(body("the other's")).await;
        for idem in [&owner, &rival] {
            assert_eq!(replayed(&idem.begin(&op()).await.unwrap()), b"the other's");
        }
        assert_eq!((owner.counts().fenced, owner.counts().completed), (1, 0));
        all_given_back(&owner).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fenced_owner_answers_with_the_reply_of_the_other() {
    let (store, other) = two_ways();
    let (owner, rival) = (brief(&store, ms(300)).build(), brief(&other, secs(30)).build());
    let (go, gone) = oneshot::channel::<()>();
    let running = tokio::spawn({
        let owner = owner.clone();
        async move {
            let work = |_| async move {
                gone.await.unwrap();
                Ok(body("stale"))
            };
            owner.run_detached(op(), work).await.unwrap()
        }
    });
    eventually("running", || owner.counts().acquired == 1).await;
    let execution = lose_the_lease(&store, &rival, Fault::Hang).await;
    execution.complete(body("the other's")).await;
    go.send(()).unwrap();
    assert_eq!(recorded(&running.await.unwrap()), b"the other's");
    assert_eq!(replayed(&owner.begin(&op()).await.unwrap()), b"the other's");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn followers_of_a_fenced_owner_never_get_the_reply_of_another_request() {
    let store = FaultyStore::new();
    let (idem, other) = (engine(&store).wait(PATIENCE).build(), engine(&store).build());
    let stale = acquire(&idem, &op()).await;
    let follower = tokio::spawn({
        let idem = idem.clone();
        async move { idem.begin(&op()).await.unwrap() }
    });
    // An operator frees the key, and another request takes it.
    let action = OperatorAction { actor: "test".into(), reason: "test".into(), target: Target::Any };
    store.records().free(op().id(), &action).await.unwrap();
    acquire(&other, &operation("a", "another body")).await.complete(body("another's")).await;
    assert!(matches!(stale.complete(body("stale")).await, Completed::Fenced(_)));
    assert!(matches!(follower.await.unwrap(), Begin::Mismatch { .. }));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_outage_longer_than_the_lease_does_not_end_renewal() {
    let (store, other) = two_ways();
    let idem = brief(&store, ms(1500)).store_timeout(ms(200)).build();
    let execution = acquire(&idem, &op()).await;
    store.break_all(Fault::Refuse(StoreErrorKind::Unavailable));
    // The lease is over; duplicates ask the store, which is away, and go.
    begin_until_err(&idem).await;
    store.heal();
    let renewed = idem.counts().renewals;
    eventually("renewed after the outage", || idem.counts().renewals >= renewed + 2).await;
    // Its flight is back: duplicates ask no store.
    let claims = store.calls(Method::Claim);
    assert!(is_in_progress(&idem.begin(&op()).await.unwrap()));
    assert_eq!(store.calls(Method::Claim), claims);
    assert!(is_in_progress(&brief(&other, ms(1500)).build().begin(&op()).await.unwrap()));
    assert!(matches!(execution.complete(body("done")).await, Completed::Recorded(_)));
    assert_eq!(replayed(&idem.begin(&op()).await.unwrap()), b"done");
    all_given_back(&idem).await;
}

async fn begin_until_err(idem: &Idempotency) {
    let asking = async { while idem.begin(&op()).await.is_ok() {} };
    tokio::time::timeout(PATIENCE, asking).await.expect("an error in the end");
}

#[tokio::test]
async fn ensure_lease_renews_under_half_and_never_after_the_end() {
    let clock = TestClock::new();
    let store = FaultyStore::onto(&MemoryStore::with_clock(Arc::new(clock.clone())));
    // The heartbeat's answers are held up: only `ensure_lease` renews.
    let idem = brief(&store, secs(30)).clock(Arc::new(clock.clone())).build();
    let execution = acquire(&idem, &op()).await;
    let context = execution.context().clone();
    assert_eq!(context.ensure_lease().await, Ok(()));
    assert_eq!(store.calls(Method::Renew), 0);
    clock.advance(secs(16));
    assert_eq!(context.ensure_lease().await, Ok(()));
    assert!(idem.counts().renewals >= 1);
    clock.advance(secs(29));
    assert!(is_in_progress(
        &engine(&store).clock(Arc::new(clock.clone())).build().begin(&op()).await.unwrap()
    ));
    store.break_down(Method::Renew, Fault::Refuse(StoreErrorKind::Unavailable));
    assert_eq!(context.ensure_lease().await, Err(NotOwner));
    store.heal();
    assert_eq!(context.ensure_lease().await, Ok(()));
    execution.release().await;
    assert_eq!(context.ensure_lease().await, Err(NotOwner), "it is another's now, or nobody's");
}

#[tokio::test]
async fn a_claim_whose_answer_ate_half_of_the_lease_is_renewed_before_work() {
    let store = FaultyStore::new();
    let idem = brief(&store, secs(2)).store_timeout(secs(10)).build();
    store.fail(Method::Claim, 1, Fault::LateAnswer(ms(1200)));
    let execution = acquire(&idem, &op()).await;
    assert_eq!((store.calls(Method::Renew), store.calls(Method::Claim)), (1, 1));
    execution.complete(body("x")).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_that_is_too_late_again_and_again_runs_nothing_and_holds_nothing() {
    let store = FaultyStore::new();
    let idem = brief(&store, secs(2)).store_timeout(secs(10)).hold().build();
    store.break_down(Method::Claim, Fault::LateAnswer(ms(1200)));
    store.fail(Method::Renew, 100, Fault::Refuse(StoreErrorKind::Unavailable));
    idem.begin(&op()).await.unwrap_err();
    let tokens = store.claim_tokens();
    assert!(tokens.len() == 3 && tokens.iter().all(|token| *token == tokens[0]), "{tokens:?}");
    store.heal();
    eventually("released", || store.records().is_empty()).await;
    all_given_back(&idem).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_caller_that_leaves_while_a_late_claim_is_renewed_leaves_nothing_held() {
    let store = FaultyStore::new();
    let idem = brief(&store, secs(2)).store_timeout(secs(10)).hold().build();
    store.fail(Method::Claim, 1, Fault::LateAnswer(ms(1200)));
    store.break_down(Method::Renew, Fault::Hang);
    let caller = tokio::spawn({
        let idem = idem.clone();
        async move { idem.begin(&op()).await.map(drop) }
    });
    eventually("renewing", || store.calls(Method::Renew) == 1).await;
    caller.abort();
    eventually("released", || store.records().is_empty()).await;
    all_given_back(&idem).await;
}

#[tokio::test]
async fn an_end_is_not_undone_by_a_renewal_under_way() {
    let store = FaultyStore::new();
    let idem = brief(&store, ms(600)).hold().build();
    let execution = acquire(&idem, &op()).await;
    store.break_down(Method::Renew, Fault::LateAnswer(ms(150)));
    eventually("renewing", || store.calls(Method::Renew) >= 1).await;
    store.fail(Method::MarkUnknown, 4, Fault::Refuse(StoreErrorKind::Unavailable));
    store.fail(Method::Renew, usize::MAX, Fault::LateAnswer(ms(150)));
    let renewals = store.calls(Method::Renew);
    execution.unknown().await;
    assert!(store.calls(Method::Renew) <= renewals + 1, "renewal stopped");
    assert!(matches!(idem.begin(&op()).await.unwrap(), Begin::Unknown { .. }));
}

#[tokio::test]
async fn a_record_that_is_gone_is_written_anew() {
    let store = FaultyStore::new();
    let idem = engine(&store).build();
    let execution = acquire(&idem, &op()).await;
    let token = store.claim_tokens()[0];
    store.records().release(&op(), token).await.unwrap();
    assert!(matches!(execution.complete(body("done")).await, Completed::Recorded(_)));
    assert_eq!((idem.counts().completed, idem.counts().completed_anew), (0, 1));
    assert_eq!(replayed(&idem.begin(&op()).await.unwrap()), b"done");
}

#[tokio::test]
async fn a_completion_is_safe_to_repeat() {
    let store = FaultyStore::new();
    let idem = engine(&store).build();
    let execution = acquire(&idem, &op()).await;
    store.fail(Method::Complete, 1, Fault::LoseAnswer);
    assert!(matches!(execution.complete(body("done")).await, Completed::Recorded(_)));
    let again = Completion {
        token: store.claim_tokens()[0],
        attempt: 1,
        reply: body("other"),
        retention: Duration::from_secs(60),
    };
    let answer = store.complete(&op(), &again).await.unwrap();
    assert!(matches!(answer, CompleteOutcome::AlreadyStored(stored) if stored.reply == body("done")));
}
