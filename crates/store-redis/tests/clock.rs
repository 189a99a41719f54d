//! What the clock of the server has to do with it: to the millisecond, and when it is stepped back.

mod common;

use std::time::Duration;

use common::*;
use onlyonce_core::{ClaimOutcome, Completion, Operation, RenewOutcome, Reply, Store, StoreAdmin};
use onlyonce_store_redis::{Effect, OnceOutcome, Plan, RedisStore};
use testkit::{FaultProxy, Redis, ToldClock};

const SECOND: Duration = Duration::from_secs(1);
/// How long replies are kept here.
const RETENTION: Duration = Duration::from_secs(10);

struct Told {
    server: Redis,
    clock: ToldClock,
    proxy: FaultProxy,
    store: RedisStore,
}

impl Told {
    async fn start() -> Self {
        let clock = ToldClock::stopped();
        let server = Redis::options().clock(&clock).start().await;
        let proxy = FaultProxy::start(server.addr()).await;
        let store = patient(&format!("redis://{}", proxy.addr())).open().await.expect("the store opens");
        // The server knows the plan from here on.
        store.once(&operation("first"), &paid()).await.expect("the store answers");
        Self { server, clock, proxy, store }
    }

    async fn scripts(&self) -> u64 {
        let calls = self.server.cli(["info", "commandstats"]).await;
        let evalsha = calls.lines().find_map(|line| line.strip_prefix("cmdstat_evalsha:calls="));
        evalsha.and_then(|rest| rest.split(',').next()?.parse().ok()).expect("scripts were run")
    }

    /// What `ask` is answered when the clock is stepped back by a second after the record was looked at, and before it is
    /// written. `prepare` makes the record. On a busy machine it may be written too soon: then it is tried with another.
    async fn stepped_back_in_between<T>(
        &self,
        prepare: impl AsyncFn(&Operation),
        ask: impl AsyncFn(&Operation) -> T,
    ) -> T {
        for round in 0..100 {
            let op = operation(&format!("round {round}"));
            prepare(&op).await;
            let before = self.scripts().await;
            let step_back = async {
                while self.scripts().await == before {}
                self.clock.step_back(SECOND);
                self.scripts().await == before + 1
            };
            // The answer to the look is a while on its way.
            self.proxy.hold_replies(Duration::from_millis(200));
            let (answer, in_between) = tokio::join!(ask(&op), step_back);
            self.proxy.hold_replies(Duration::ZERO);
            if in_between {
                return answer;
            }
        }
        panic!("the record is always written before the clock is stepped back");
    }

    /// Completed, and its reply is over at this very moment.
    async fn just_expired(&self, op: &Operation) {
        acquire(&self.store, op, 1).await;
        let done = Completion { retention: RETENTION, ..completion(1, Reply::ok("done")) };
        self.store.complete(op, &done).await.expect("the store answers");
        self.clock.advance(RETENTION);
    }

    /// Claimed, and its lease is over at this very moment.
    async fn just_left(&self, op: &Operation) {
        acquire(&self.store, op, 1).await;
        self.clock.advance(request(1).lease);
    }

    async fn claim(&self, op: &Operation) -> ClaimOutcome {
        self.store.claim(op, &request(2)).await.expect("the store answers")
    }

    async fn once(&self, op: &Operation) -> OnceOutcome {
        self.store.once(op, &paid()).await.expect("the store answers")
    }
}

fn paid() -> Effect {
    let plan = Plan::new("return {status = 200, body = 'paid', writes = {{'INCR', KEYS[1]}}}");
    plan.effect().key("paid")
}

/// It was over when it was looked at, and is not when it would be written over: it is told.
#[tokio::test]
async fn a_reply_that_is_not_over_after_all_is_told() {
    let told = Told::start().await;
    let prepare = async |op: &Operation| told.just_expired(op).await;
    let claimed = told.stepped_back_in_between(prepare, async |op: &Operation| told.claim(op).await).await;
    match claimed {
        ClaimOutcome::Completed(stored) => {
            assert_eq!((stored.reply, stored.remaining), (Reply::ok("done"), SECOND));
        }
        other => panic!("claimed over a reply: {other:?}"),
    }
    let told = Told::start().await;
    let prepare = async |op: &Operation| told.just_expired(op).await;
    let ran = told.stepped_back_in_between(prepare, async |op: &Operation| told.once(op).await).await;
    match ran {
        OnceOutcome::Replayed(stored) => assert_eq!(stored.reply, Reply::ok("done")),
        other => panic!("run over a reply: {other:?}"),
    }
}

/// The same of a lease: its owner still has it.
#[tokio::test]
async fn a_lease_that_is_not_over_after_all_is_not_taken_over() {
    let told = Told::start().await;
    let prepare = async |op: &Operation| told.just_left(op).await;
    let claimed = told.stepped_back_in_between(prepare, async |op: &Operation| told.claim(op).await).await;
    assert!(matches!(claimed, ClaimOutcome::InProgress { lease_left: SECOND, .. }), "{claimed:?}");
    let told = Told::start().await;
    let prepare = async |op: &Operation| told.just_left(op).await;
    let ran = told.stepped_back_in_between(prepare, async |op: &Operation| told.once(op).await).await;
    assert!(matches!(ran, OnceOutcome::InProgress { lease_left: SECOND, .. }), "{ran:?}");
}

/// Where the clock goes on, an effect runs at the very end of a reply or a lease. Over a reply it makes a record; a record
/// that it takes over is as old as it was.
#[tokio::test]
async fn an_effect_runs_at_the_end_of_a_reply_and_of_a_lease() {
    let told = Told::start().await;
    let millisecond = Duration::from_millis(1);
    let view = async |op: &Operation| told.store.show(op.id()).await.expect("it answers").expect("a record");
    let (expired, left) = (operation("expired"), operation("left"));

    told.just_expired(&expired).await;
    told.clock.step_back(millisecond);
    assert!(matches!(told.once(&expired).await, OnceOutcome::Replayed(_)));
    told.clock.advance(millisecond);
    assert!(matches!(told.once(&expired).await, OnceOutcome::Ran(_)));
    assert_eq!(view(&expired).await.attempt, 1);

    acquire(&told.store, &left, 1).await;
    let first = view(&left).await;
    told.clock.advance(SECOND * 5);
    assert_eq!(view(&expired).await.created_at, first.created_at, "both were made at one moment");
    let lease = SECOND * 7;
    assert_eq!(told.store.renew(&left, token(1), lease).await.unwrap(), RenewOutcome::Renewed);
    told.clock.advance(lease - millisecond);
    assert!(matches!(told.once(&left).await, OnceOutcome::InProgress { .. }));
    told.clock.advance(millisecond);
    assert!(matches!(told.once(&left).await, OnceOutcome::Ran(_)));
    let taken = view(&left).await;
    assert_eq!((taken.attempt, taken.created_at), (2, first.created_at));
}
