//! What many callers ask at once goes out together, and each is answered for himself.

mod common;

use std::collections::BTreeMap;
use std::time::Duration;

use common::*;
use onlyonce_core::{
    ClaimOutcome, CompleteOutcome, Completion, Operation, OperatorAction, OperatorOutcome, ReleaseOutcome,
    Reply, Store, StoreAdmin, StoreError, StoreErrorKind, Target,
};
use onlyonce_store_redis::{Options, RedisStore};
use testkit::{FaultProxy, Redis, wait_for};

/// All at once: each has asked before the first is answered.
async fn together<T>(calls: impl IntoIterator<Item = impl Future<Output = T>>) -> Vec<T> {
    let mut calls: Vec<_> = calls.into_iter().map(Box::pin).collect();
    let mut answers: Vec<Option<T>> = calls.iter().map(|_| None).collect();
    std::future::poll_fn(|context| {
        for (call, answer) in calls.iter_mut().zip(&mut answers) {
            if answer.is_none()
                && let std::task::Poll::Ready(told) = call.as_mut().poll(context)
            {
                *answer = Some(told);
            }
        }
        if answers.iter().all(Option::is_some) {
            std::task::Poll::Ready(())
        } else {
            std::task::Poll::Pending
        }
    })
    .await;
    answers.into_iter().flatten().collect()
}

fn operations(prefix: &str, count: usize) -> Vec<Operation> {
    (0..count).map(|n| operation(&format!("{prefix} {n}"))).collect()
}

async fn claim_all(store: &RedisStore, operations: &[Operation]) -> Vec<Result<ClaimOutcome, StoreError>> {
    let ask = request(1);
    together(operations.iter().map(|op| store.claim(op, &ask))).await
}

async fn complete_all(
    store: &RedisStore,
    operations: &[Operation],
    completion: &Completion,
) -> Vec<Result<CompleteOutcome, StoreError>> {
    together(operations.iter().map(|op| store.complete(op, completion))).await
}

fn all_acquired(answers: &[Result<ClaimOutcome, StoreError>]) {
    for answer in answers {
        assert!(matches!(answer, Ok(ClaimOutcome::Acquired(lease)) if lease.attempt == 1), "{answer:?}");
    }
}

/// How often each command was called, and how often the server read from its clients.
struct Counts {
    calls: BTreeMap<String, u64>,
    reads: u64,
}

impl Counts {
    async fn reset(server: &Redis) {
        server.cli(["config", "resetstat"]).await;
    }

    async fn of(server: &Redis) -> Self {
        let info = server.cli(["info", "everything"]).await;
        let calls = info.lines().filter_map(|line| {
            let (name, rest) = line.strip_prefix("cmdstat_")?.split_once(":calls=")?;
            Some((name.to_owned(), rest.split(',').next()?.parse().ok()?))
        });
        let reads = info.lines().find_map(|line| line.strip_prefix("total_reads_processed:"));
        let reads = reads.and_then(|reads| reads.trim().parse().ok()).expect("it counts reads");
        Self { calls: calls.collect(), reads }
    }

    fn of_command(&self, name: &str) -> u64 {
        self.calls.get(name).copied().unwrap_or(0)
    }
}

#[tokio::test]
async fn a_thousand_at_once_take_a_few_exchanges_and_a_lone_caller_one() {
    let server = Redis::private().await;
    let store = patient(&server.url()).open().await.unwrap();
    let many = operations("many", 1000);
    Counts::reset(&server).await;
    all_acquired(&claim_all(&store, &many).await);
    let claims = Counts::of(&server).await;
    assert_eq!(claims.of_command("set"), 1000, "each claim is its own command");
    assert_eq!(claims.of_command("evalsha"), 0);
    // The server reads 16 KiB at a time: these are its pieces of four batches.
    assert!(claims.reads < 100, "{} reads", claims.reads);
    Counts::reset(&server).await;
    let done = completion(1, Reply::ok("done"));
    for end in complete_all(&store, &many, &done).await {
        assert!(matches!(end, Ok(CompleteOutcome::Stored(_))), "{end:?}");
    }
    let ends = Counts::of(&server).await;
    assert!(ends.of_command("evalsha") <= 10, "{} scripts", ends.of_command("evalsha"));
    assert_eq!(ends.of_command("set"), 1000);

    Counts::reset(&server).await;
    for op in operations("alone", 10) {
        acquire(&store, &op, 1).await;
        finish(&store, &op, 1, Reply::ok("done")).await;
    }
    let alone = Counts::of(&server).await;
    assert_eq!((alone.of_command("pttl"), alone.of_command("evalsha")), (20, 10));
    // Two for each pair; an idle connection is looked after now and then, and INFO is one more.
    assert!((20..=26).contains(&alone.reads), "{} reads", alone.reads);
}

#[tokio::test]
async fn a_caller_who_stops_polling_stops_nobody_else() {
    for server in [Redis::options().durable().start().await, Redis::private().await] {
        let store = patient(&server.url()).open().await.unwrap();
        let (stuck, ask) = (operation("stuck"), request(1));
        let mut first = Box::pin(store.claim(&stuck, &ask));
        tokio::select! {
            biased;
            _ = first.as_mut() => panic!("it was answered at once"),
            () = std::future::ready(()) => {}
        }
        acquire(&store, &operation("other"), 2).await;
        assert!(matches!(first.await, Ok(ClaimOutcome::Acquired(_))));
    }
}

#[tokio::test]
async fn one_bad_key_of_a_batch_fails_no_other() {
    let server = Redis::private().await;
    let store = patient(&server.url()).open().await.unwrap();
    let all: Vec<_> = (0..40).map(|n| scoped("", &format!("k{n}"))).collect();
    all_acquired(&claim_all(&store, &all).await);
    // One of each: of another type, somebody else's, without an end, moved, taken over, released, gone, completed, marked.
    server.cli(["del", "idem:k1"]).await;
    server.cli(["lpush", "idem:k1", "x"]).await;
    server.cli(["set", "idem:k5", "somebody else's"]).await;
    server.cli(["persist", "idem:k9"]).await;
    server.cli(["rename", "idem:k3", "idem:k13"]).await;
    store.release(&all[17], token(1)).await.unwrap();
    acquire(&store, &all[17], 7).await;
    server.cli(["del", "idem:k21"]).await;
    finish(&store, &all[25], 1, Reply::ok("before")).await;
    assert_eq!(store.mark_unknown(&all[29], token(1)).await.unwrap(), ReleaseOutcome::Applied);
    let by = OperatorAction { actor: "a".into(), reason: "r".into(), target: Target::Any };
    assert!(matches!(store.free(all[33].id(), &by).await.unwrap(), OperatorOutcome::Done(_)));
    Counts::reset(&server).await;
    let ends = complete_all(&store, &all, &completion(1, Reply::ok("done"))).await;
    let scripts = Counts::of(&server).await.of_command("evalsha");
    assert!(scripts <= 15, "one for all, and one for each that is not plain: {scripts}");
    for (n, end) in ends.iter().enumerate() {
        match n {
            1 | 5 | 13 => {
                assert_eq!(end.as_ref().unwrap_err().kind(), StoreErrorKind::Unreadable, "{n}: {end:?}");
            }
            17 | 33 => assert!(matches!(end, Ok(CompleteOutcome::Fenced(_))), "{n}: {end:?}"),
            3 | 21 => assert!(matches!(end, Ok(CompleteOutcome::StoredAnew(_))), "{n}: {end:?}"),
            25 => assert!(matches!(end, Ok(CompleteOutcome::AlreadyStored(_))), "{n}: {end:?}"),
            _ => assert!(matches!(end, Ok(CompleteOutcome::Stored(_))), "{n}: {end:?}"),
        }
        if matches!(end, Ok(CompleteOutcome::Stored(_) | CompleteOutcome::StoredAnew(_))) {
            assert_eq!(replay(&store, &all[n]).await, Reply::ok("done"), "{n}");
        }
    }
    assert_eq!(replay(&store, &all[25]).await, Reply::ok("before"));
    assert_eq!(server.cli(["lrange", "idem:k1", "0", "-1"]).await, "x");
    assert_eq!(server.cli(["get", "idem:k5"]).await, "somebody else's");
    // The same for claims.
    let claims = claim_all(&store, &[all[1].clone(), all[5].clone(), scoped("", "new")]).await;
    assert!(claims[0].is_err() && claims[1].is_err() && claims[2].is_ok(), "{claims:?}");
}

#[tokio::test]
async fn replies_of_one_batch_are_each_its_own() {
    let server = Redis::private().await;
    let store = patient(&server.url()).open().await.unwrap();
    let all = operations("k", 60);
    all_acquired(&claim_all(&store, &all).await);
    let replies: Vec<_> = (0..60_u16)
        .map(|n| Reply::new(200 + n, vec![u8::try_from(n).unwrap(); usize::from(n) * 7 % 300]))
        .collect();
    let completions: Vec<_> = replies
        .iter()
        .zip(0..)
        .map(|(reply, n)| Completion {
            retention: Duration::from_secs(1000 * (1 + n % 3)),
            ..completion(1, reply.clone())
        })
        .collect();
    let ends = together(all.iter().zip(&completions).map(|(op, done)| store.complete(op, done))).await;
    for ((end, done), op) in ends.into_iter().zip(&completions).zip(&all) {
        let CompleteOutcome::Stored(stored) = end.unwrap() else { panic!("not stored") };
        let kept = stored.expires_at.duration_since(stored.completed_at).unwrap();
        assert_eq!((&stored.reply, kept), (&done.reply, done.retention));
        assert_eq!(replay(&store, op).await, done.reply);
        let name = format!("idem@8d9001d32c6a703d95921a77115050f3:{}", op.id().key.as_str());
        let left: u64 = server.cli(["ttl", &name]).await.parse().unwrap();
        assert!(left <= done.retention.as_secs() && left + 60 > done.retention.as_secs(), "{left}");
    }
}

#[tokio::test]
async fn a_batch_that_is_cut_in_the_middle_leaves_everybody_with_the_truth() {
    let server = Redis::private().await;
    let proxy = FaultProxy::start(server.addr()).await;
    let store = patient(&format!("redis://{}", proxy.addr())).open().await.unwrap();
    // More than one piece: the connection ends after some of it was carried out.
    let all = operations("k", 600);
    for round in 0..3 {
        proxy.lose_reply_to("NX");
        let ask = request(1);
        let answers = together(all.iter().map(|op| store.claim(op, &ask))).await;
        all_acquired(&answers);
        assert_eq!(proxy.lost_replies(), 1 + 2 * round, "the answers to some were lost");
        proxy.lose_reply_to("EVALSHA");
        let ends = complete_all(&store, &all, &completion(1, Reply::ok("done"))).await;
        for end in &ends {
            let stored = matches!(end, Ok(CompleteOutcome::Stored(_) | CompleteOutcome::AlreadyStored(_)));
            assert!(stored, "{end:?}");
        }
        assert_eq!(proxy.lost_replies(), 2 + 2 * round);
        assert_eq!(server.cli(["dbsize"]).await, "600");
        server.cli(["flushall"]).await;
    }
}

#[tokio::test]
async fn who_is_told_that_nothing_was_sent_can_rely_on_it() {
    let server = Redis::private().await;
    let proxy = FaultProxy::start(server.addr()).await;
    let options = Options::from_url(&format!("redis://{}?timeout_ms=400", proxy.addr())).unwrap();
    let store = options.connect_timeout(Duration::from_secs(20)).open().await.unwrap();
    let all = operations("k", 1500);
    proxy.silence(true);
    let answers = claim_all(&store, &all).await;
    let (mut unsure, mut unsent) = (0, Vec::new());
    for (op, answer) in all.iter().zip(answers) {
        let error = answer.expect_err("the network is silent");
        assert!(error.retryable(), "{error}");
        if error.may_have_applied() { unsure += 1 } else { unsent.push(op) }
    }
    assert!(unsure > 0 && !unsent.is_empty(), "some were sent, and some waited: {unsure}");
    // What was sent arrives now.
    proxy.silence(false);
    let arrived = async || server.cli(["dbsize"]).await.parse::<usize>().unwrap();
    wait_for("what was sent is there", async || (arrived().await == unsure).then_some(())).await;
    for op in unsent {
        let name = format!("idem@8d9001d32c6a703d95921a77115050f3:{}", op.id().key.as_str());
        assert_eq!(server.cli(["exists", &name]).await, "0");
    }
    // And with the same token all of them are got.
    let ask = request(1);
    for op in &all {
        let answer = wait_for("it is back", async || store.claim(op, &ask).await.ok()).await;
        assert!(matches!(answer, ClaimOutcome::Acquired(lease) if lease.attempt == 1));
    }
}

#[tokio::test]
async fn past_the_bound_claims_are_refused_and_owners_go_on() {
    let server = Redis::private().await;
    let store = patient(&server.url()).open().await.unwrap();
    let owned = operations("owned", 100);
    all_acquired(&claim_all(&store, &owned).await);
    let many = operations("many", 5000);
    let done = completion(1, Reply::ok("done"));
    let (claims, ends) = tokio::join!(claim_all(&store, &many), complete_all(&store, &owned, &done));
    let refused: Vec<_> = claims.iter().filter_map(|answer| answer.as_ref().err()).collect();
    // Those that wait, and what was sent before anybody waited.
    assert!((900..=5000 - 4096).contains(&refused.len()), "{}", refused.len());
    let taken = 5000 - refused.len() + owned.len();
    for error in refused {
        assert_eq!(error.kind(), StoreErrorKind::Overloaded, "{error}");
        assert!(error.retryable() && !error.may_have_applied());
    }
    assert!(ends.iter().all(|end| matches!(end, Ok(CompleteOutcome::Stored(_)))));
    assert_eq!(server.cli(["dbsize"]).await, taken.to_string());
}

#[tokio::test]
async fn a_claim_that_nobody_waits_for_any_more_is_not_sent() {
    let server = Redis::private().await;
    let store = patient(&server.url()).open().await.unwrap();
    let (kept, ask) = (operation("kept"), request(1));
    {
        let dropped = operations("dropped", 20);
        let calls = together(dropped.iter().map(|op| store.claim(op, &ask)));
        tokio::select! {
            biased;
            // Asked, and not yet taken up.
            _ = calls => panic!("answered at once"),
            () = std::future::ready(()) => {}
        }
    }
    store.claim(&kept, &ask).await.unwrap();
    assert_eq!(server.cli(["dbsize"]).await, "1");
}
