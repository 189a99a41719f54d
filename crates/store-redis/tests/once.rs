//! An effect in Redis and its record, in one script.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use common::*;
use onlyonce_core::{ClaimRequest, Fingerprint, Reply, Store, StoreAdmin, StoreErrorKind};
use onlyonce_store_redis::{Effect, OnceOptions, OnceOutcome, Plan, RedisStore};
use testkit::{FaultProxy, Redis};
use tokio::task::JoinSet;

const CHARGE: &str = r#"
    local amount = tonumber(ARGV[1])
    local balance = tonumber(redis.call('GET', KEYS[1]) or '0')
    if amount == 13 then return {transient = 'unlucky'} end
    if balance < amount then return {status = 402, body = '{"error":"insufficient balance"}'} end
    return {
        status = 200,
        body = string.format('{"charged":%d,"balance":%d}', amount, balance - amount),
        writes = {{'DECRBY', KEYS[1], ARGV[1]}},
    }
"#;

fn charge(amount: u64) -> Effect {
    Plan::new(CHARGE).effect().key("balance").arg(amount.to_string())
}

async fn with_balance(server: &Redis, balance: &str) -> RedisStore {
    server.cli(["set", "balance", balance]).await;
    patient(&server.url()).open().await.expect("the store opens")
}

fn ran(outcome: OnceOutcome) -> Reply {
    match outcome {
        OnceOutcome::Ran(stored) => stored.reply,
        other => panic!("expected Ran, got {other:?}"),
    }
}

fn replayed(outcome: OnceOutcome) -> Reply {
    match outcome {
        OnceOutcome::Replayed(stored) => stored.reply,
        other => panic!("expected Replayed, got {other:?}"),
    }
}

fn transient(outcome: OnceOutcome) -> String {
    match outcome {
        OnceOutcome::Transient(why) => why.to_string(),
        other => panic!("expected Transient, got {other:?}"),
    }
}

#[tokio::test]
async fn an_effect_happens_once_and_its_reply_is_told_for_ever() {
    let server = Redis::private().await;
    let store = with_balance(&server, "10000").await;
    let op = scoped("", "order-7");
    let json = Reply::json(200, &()).unwrap();
    let effect = charge(100).headers_of(&json);
    let first = ran(store.once(&op, &effect).await.unwrap());
    assert_eq!((first.status(), &first.body()[..]), (200, &br#"{"charged":100,"balance":9900}"#[..]));
    assert_eq!(first.headers(), json.headers());
    for _ in 0..3 {
        assert_eq!(replayed(store.once(&op, &effect).await.unwrap()), first);
    }
    assert_eq!(server.cli(["get", "balance"]).await, "9900");
    assert_eq!(replay(&store, &op).await, first, "the record is one like any other");
    let ttl: u64 = server.cli(["ttl", "idem:order-7"]).await.parse().unwrap();
    assert!((86_300..=86_400).contains(&ttl), "{ttl}");
    let other = op.with_fingerprint(Fingerprint::of("another request"));
    let answer = store.once(&other, &charge(200)).await.unwrap();
    assert!(
        matches!(&answer, OnceOutcome::Mismatch { stored, .. } if stored == op.fingerprint()),
        "{answer:?}"
    );
    assert_eq!(server.cli(["get", "balance"]).await, "9900");
}

#[tokio::test]
async fn a_definitive_failure_is_stored_and_a_transient_one_frees_the_key() {
    let server = Redis::private().await;
    let store = with_balance(&server, "50").await;
    let refused = ran(store.once(&operation("a"), &charge(100)).await.unwrap());
    assert_eq!(refused.status(), 402);
    server.cli(["set", "balance", "1000"]).await;
    assert_eq!(replayed(store.once(&operation("a"), &charge(100)).await.unwrap()), refused);
    assert_eq!(transient(store.once(&operation("b"), &charge(13)).await.unwrap()), "unlucky");
    assert_eq!(store.show(operation("b").id()).await.unwrap(), None, "nothing is recorded");
    assert_eq!(ran(store.once(&operation("b"), &charge(100)).await.unwrap()).status(), 200);
    assert_eq!(server.cli(["get", "balance"]).await, "900");
}

#[tokio::test]
async fn a_plan_that_fails_changes_nothing_and_records_nothing() {
    let server = Redis::private().await;
    let store = with_balance(&server, "1000").await;
    server.cli(["lpush", "list", "x"]).await;
    for (plan, key, why) in [
        (CHARGE, "list", "WRONGTYPE"),
        ("return redis.call('DECRBY', KEYS[1], 1)", "balance", "a plan only reads"),
        ("redis.pcall('set', KEYS[1], 1) return {status = 200}", "balance", "a plan only reads"),
        ("return nil", "balance", "no table"),
        ("return {status = 99}", "balance", "no status"),
        ("return {status = 200.5}", "balance", "no status"),
        ("return {body = 'x'}", "balance", "no status"),
        ("return {status = 200, body = string.rep('x', 2000000)}", "balance", "1 MiB"),
        ("return {status = 200, writes = {{'DECRBY', 'elsewhere', 1}}}", "balance", "not to one of the keys"),
        ("return {status = 200, writes = {'DECRBY'}}", "balance", "no command"),
        ("return {status = 200, writes = {{'SET', KEYS[1], {}}}}", "balance", "no text"),
        ("return {status = 200, writes = 7}", "balance", "no list"),
        (
            "local w = {'SADD', KEYS[1]} for i = 1, 9000 do w[i + 2] = i end return {status = 200, writes = {{'DECRBY', KEYS[1], 1}, w}}",
            "balance",
            "over 4096 parts",
        ),
        (
            "return {status = 200, writes = {{'DECRBY', KEYS[1], 1}, {'NOSUCH', KEYS[1]}}}",
            "balance",
            "no command that",
        ),
        ("error('by itself')", "balance", "by itself"),
        ("return undefined_variable.x", "balance", "undefined_variable"),
    ] {
        let effect = Plan::new(plan).effect().key(key).arg("1");
        let said = transient(store.once(&operation("k"), &effect).await.unwrap());
        assert!(said.contains(why), "{plan}: {said}");
        assert_eq!(store.show(operation("k").id()).await.unwrap(), None, "{plan}");
        assert_eq!(server.cli(["get", "balance"]).await, "1000", "{plan}");
    }
    let broken = Plan::new("return {{{").effect().key("balance");
    let error = store.once(&operation("k"), &broken).await.unwrap_err();
    assert!(!error.may_have_applied() && !error.retryable(), "{error}");
    let itself = Plan::new(CHARGE).effect().key("idem@8d9001d32c6a703d95921a77115050f3:k").arg("1");
    assert_eq!(store.once(&operation("k"), &itself).await.unwrap_err().kind(), StoreErrorKind::Unfit);
}

#[tokio::test]
async fn a_write_that_the_user_may_not_call_is_found_before_anything_happens() {
    let server = Redis::private().await;
    let store = with_balance(&server, "1000").await;
    server.cli(["acl", "setuser", "default", "-decrby"]).await;
    let said = transient(store.once(&operation("k"), &charge(100)).await.unwrap());
    assert!(said.contains("DECRBY") && said.contains("user of Redis"), "{said}");
    server.cli(["acl", "setuser", "default", "+decrby"]).await;
    assert_eq!(ran(store.once(&operation("k"), &charge(100)).await.unwrap()).status(), 200);
}

#[tokio::test]
async fn a_write_that_fails_half_way_leaves_the_outcome_unknown_never_free() {
    let server = Redis::private().await;
    let store = with_balance(&server, "1000").await;
    server.cli(["lpush", "list", "x"]).await;
    let half = "return {status = 200, writes = {{'DECRBY', KEYS[1], 100}, {'SADD', KEYS[2], 'x'}}}";
    let effect = Plan::new(half).effect().key("balance").key("list");
    for _ in 0..3 {
        let outcome = store.once(&operation("k"), &effect).await.unwrap();
        assert!(matches!(outcome, OnceOutcome::Unknown { .. }), "{outcome:?}");
    }
    assert_eq!(
        server.cli(["get", "balance"]).await,
        "900",
        "the first write stands, and it is not run again"
    );
    let view = store.show(operation("k").id()).await.unwrap().unwrap();
    assert_eq!(view.state, onlyonce_core::StateName::Unknown);
    // An operator looks and says what it was.
    let by = onlyonce_core::OperatorAction {
        actor: "a".into(),
        reason: "booked".into(),
        target: onlyonce_core::Target::Undecided,
    };
    let reply = Reply::new(200, "by hand");
    store.resolve(operation("k").id(), &reply, Duration::from_secs(60), &by).await.unwrap();
    assert_eq!(replayed(store.once(&operation("k"), &effect).await.unwrap()), reply);
}

#[tokio::test]
async fn a_freed_key_runs_again_as_the_next_attempt() {
    let server = Redis::private().await;
    let store = with_balance(&server, "1000").await;
    let op = operation("k");
    ran(store.once(&op, &charge(100)).await.unwrap());
    let by = onlyonce_core::OperatorAction {
        actor: "a".into(),
        reason: "charged back".into(),
        target: onlyonce_core::Target::Any,
    };
    store.free(op.id(), &by).await.unwrap();
    let again = ran(store.once(&op, &charge(100)).await.unwrap());
    assert_eq!(replayed(store.once(&op, &charge(100)).await.unwrap()), again);
    assert_eq!(store.show(op.id()).await.unwrap().unwrap().attempt, 2);
    assert_eq!(server.cli(["get", "balance"]).await, "800");
}

#[tokio::test]
async fn numbers_in_writes_are_written_as_whole_numbers() {
    let server = Redis::private().await;
    let store = with_balance(&server, "0").await;
    let plan = "return {status = 200, writes = {{'SET', KEYS[1], 9007199254740991}, {'INCRBY', KEYS[1], 1}}}";
    ran(store.once(&operation("k"), &Plan::new(plan).effect().key("balance")).await.unwrap());
    assert_eq!(server.cli(["get", "balance"]).await, "9007199254740992");
}

#[tokio::test]
async fn a_full_server_has_no_effects_and_still_tells_replies() {
    let server = Redis::private().await;
    let store = with_balance(&server, "1000").await;
    let first = ran(store.once(&operation("before"), &charge(100)).await.unwrap());
    server.cli(["config", "set", "maxmemory", "1mb"]).await;
    assert!(server.cli(["set", "x", "y"]).await.contains("OOM"));
    let error = store.once(&operation("after"), &charge(100)).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Full, "{error}");
    assert!(!error.may_have_applied());
    assert_eq!(replayed(store.once(&operation("before"), &charge(100)).await.unwrap()), first);
    assert_eq!(server.cli(["get", "balance"]).await, "900");
    server.cli(["config", "set", "maxmemory", "0"]).await;
    ran(store.once(&operation("after"), &charge(100)).await.unwrap());
    assert_eq!(server.cli(["get", "balance"]).await, "800");
}

#[tokio::test]
async fn of_many_copies_one_runs() {
    let server = Redis::private().await;
    let store = with_balance(&server, "10000").await;
    for round in 0..20 {
        let mut calls = JoinSet::new();
        for _ in 0..20 {
            let (store, op) = (store.clone(), operation(&format!("round {round}")));
            calls.spawn(async move { store.once(&op, &charge(100)).await.unwrap() });
        }
        let outcomes = calls.join_all().await;
        let runs = outcomes.iter().filter(|outcome| matches!(outcome, OnceOutcome::Ran(_))).count();
        assert_eq!(runs, 1);
        let bodies: std::collections::BTreeSet<_> = outcomes
            .into_iter()
            .map(|outcome| match outcome {
                OnceOutcome::Ran(stored) | OnceOutcome::Replayed(stored) => stored.reply.body().clone(),
                other => panic!("{other:?}"),
            })
            .collect();
        assert_eq!(bodies.len(), 1);
    }
    assert_eq!(server.cli(["get", "balance"]).await, "8000");
}

#[tokio::test]
async fn a_lost_answer_is_its_own_and_not_a_second_run() {
    let server = Redis::private().await;
    server.cli(["set", "balance", "1000"]).await;
    let proxy = FaultProxy::start(server.addr()).await;
    let store = patient(&format!("redis://{}", proxy.addr())).open().await.unwrap();
    ran(store.once(&operation("first"), &charge(100)).await.unwrap());
    proxy.lose_reply_to("EVALSHA");
    ran(store.once(&operation("k"), &charge(100)).await.unwrap());
    assert_eq!(proxy.lost_replies(), 1);
    assert_eq!(server.cli(["get", "balance"]).await, "800");
    // The same where a write failed: unknown, and not run again by its own token.
    server.cli(["lpush", "list", "x"]).await;
    let half = "return {status = 200, writes = {{'DECRBY', KEYS[1], 100}, {'SADD', KEYS[2], 'x'}}}";
    let effect = Plan::new(half).effect().key("balance").key("list");
    proxy.lose_reply_to("EVALSHA");
    let outcome = store.once(&operation("half"), &effect).await.unwrap();
    assert!(matches!(outcome, OnceOutcome::Unknown { .. }), "{outcome:?}");
    assert_eq!(server.cli(["get", "balance"]).await, "700");
}

#[tokio::test]
async fn leased_records_are_met_by_the_same_rules() {
    let server = Redis::private().await;
    let store = with_balance(&server, "1000").await;
    acquire(&store, &operation("live"), 1).await;
    let outcome = store.once(&operation("live"), &charge(100)).await.unwrap();
    assert!(matches!(outcome, OnceOutcome::InProgress { .. }), "{outcome:?}");
    let short = Duration::from_millis(50);
    store.claim(&operation("held"), &ClaimRequest { lease: short, ..hold(1) }).await.unwrap();
    store.claim(&operation("dead"), &ClaimRequest { lease: short, ..request(1) }).await.unwrap();
    store.claim(&operation("kept"), &ClaimRequest { lease: short, ..request(1) }).await.unwrap();
    tokio::time::sleep(short * 3).await;
    let outcome = store.once(&operation("held"), &charge(100)).await.unwrap();
    assert!(matches!(outcome, OnceOutcome::Unknown { .. }), "{outcome:?}");
    let no = OnceOptions { on_lease_end: onlyonce_core::OnLeaseEnd::Hold, ..OnceOptions::default() };
    let outcome = store.once_with(&operation("kept"), &no, &charge(100)).await.unwrap();
    assert!(matches!(outcome, OnceOutcome::Unknown { .. }), "{outcome:?}");
    ran(store.once(&operation("dead"), &charge(100)).await.unwrap());
    assert_eq!(store.show(operation("dead").id()).await.unwrap().unwrap().attempt, 2);
    assert_eq!(server.cli(["get", "balance"]).await, "900");
    // Its dead owner is fenced, and is told the reply.
    let late = store.complete(&operation("dead"), &completion(1, Reply::ok("late"))).await.unwrap();
    assert!(matches!(late, onlyonce_core::CompleteOutcome::Fenced(Some(_))), "{late:?}");
}

/// The server is killed again and again while effects go on: what callers were told is what the balance lost, and an
/// operation whose answer was lost is asked again and happens once.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn killed_again_and_again_the_balance_lost_what_callers_were_told() {
    const KILLS: usize = 12;
    let server = Redis::options().durable().start().await;
    server.cli(["set", "balance", "1000000000"]).await;
    let store = patient(&server.url()).open().await.unwrap();
    let (charged, next, over) =
        (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let mut callers = JoinSet::new();
    for _ in 0..8 {
        let (store, charged, next, over) = (store.clone(), charged.clone(), next.clone(), over.clone());
        callers.spawn(async move {
            while over.load(Ordering::Acquire) == 0 {
                let n = next.fetch_add(1, Ordering::Relaxed);
                let amount = 14 + n % 90;
                let (op, effect) = (operation(&format!("n {n}")), charge(amount));
                loop {
                    match store.once(&op, &effect).await {
                        Ok(OnceOutcome::Ran(_) | OnceOutcome::Replayed(_)) => break,
                        Ok(other) => panic!("{other:?}"),
                        Err(error) => assert!(error.retryable() || error.may_have_applied(), "{error}"),
                    }
                }
                charged.fetch_add(amount, Ordering::AcqRel);
            }
        });
    }
    for kill in 0..KILLS {
        let before = charged.load(Ordering::Acquire);
        testkit::wait_until("effects go on", || charged.load(Ordering::Acquire) > before + 10_000).await;
        tokio::time::sleep(Duration::from_millis(kill as u64 * 3)).await;
        server.kill_9().await;
        server.start().await;
    }
    over.store(1, Ordering::Release);
    callers.join_all().await;
    let balance: u64 = server.cli(["get", "balance"]).await.parse().unwrap();
    assert_eq!(1_000_000_000 - balance, charged.load(Ordering::Acquire));
    println!("{KILLS} kills, {} effects", next.load(Ordering::Relaxed));
}
