//! A cluster of six: slots that move, masters that die, answers that are lost, replicas that confirm.

mod common;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use common::*;
use onlyonce_core::{
    ClaimOutcome, ClaimRequest, CompleteOutcome, ListQuery, OperatorAction, OperatorOutcome, Reply, Store,
    StoreAdmin, StoreErrorKind, Target,
};
use onlyonce_store_redis::{OnceOutcome, Plan, RedisStore};
use parking_lot::Mutex;
use testkit::{FaultProxy, Redis, RedisCluster, wait_for};
use tokio::task::JoinSet;

async fn open(cluster: &RedisCluster) -> RedisStore {
    patient(&cluster.url()).open().await.expect("the store opens")
}

/// Until it is answered: a failover takes seconds, a call less.
async fn claimed(store: &RedisStore, key: &str, ask: &ClaimRequest) -> ClaimOutcome {
    wait_for("a claim is answered", async || store.claim(&scoped("", key), ask).await.ok()).await
}

async fn completed(store: &RedisStore, key: &str, n: u8, reply: &str) -> CompleteOutcome {
    wait_for("a completion is answered", async || {
        store.complete(&scoped("", key), &completion(n, Reply::ok(reply.to_owned()))).await.ok()
    })
    .await
}

#[tokio::test]
async fn any_node_of_the_url_leads_to_all_of_them() {
    let cluster = RedisCluster::private().await;
    // A replica alone, and one that does not exist.
    let url = format!("redis+cluster://{},{}", testkit::free_addr(), cluster.node(4).addr());
    let store = patient(&url).open().await.unwrap();
    for n in 0..60 {
        acquire(&store, &scoped("", &format!("k{n}")), 1).await;
    }
    let mut counts = Vec::new();
    for node in &cluster.nodes()[..3] {
        counts.push(node.cli(["dbsize"]).await.parse::<usize>().unwrap());
    }
    assert!(counts.iter().all(|count| *count > 0), "{counts:?}");
    assert_eq!(counts.iter().sum::<usize>(), 60);
    assert_eq!(store.list(&ListQuery::default()).await.unwrap().records.len(), 60);
    assert_eq!(store.stats().await.unwrap().in_progress, 60);

    // A user with the rights of the documentation is enough, replicas that confirm included.
    let rules = ["acl", "setuser", "onlyonce"].map(str::to_owned).into_iter().chain(documented_rights());
    let rules: Vec<_> = rules.collect();
    for node in cluster.nodes() {
        assert_eq!(node.cli_with(rules.clone()).await, "OK");
    }
    let url = format!("redis+cluster://onlyonce:secret@{}?min_replicas=1", cluster.node(0).addr());
    let store = patient(&url).replica_timeout(Duration::from_secs(20)).open().await.unwrap();
    for n in 0..10 {
        acquire(&store, &scoped("", &format!("rights {n}")), 1).await;
        finish(&store, &scoped("", &format!("rights {n}")), 1, Reply::ok("done")).await;
    }
}

#[tokio::test]
async fn an_operators_changes_are_in_the_slot_of_their_record() {
    let cluster = RedisCluster::private().await;
    let store = open(&cluster).await;
    let by = OperatorAction { actor: "alice".into(), reason: "r".into(), target: Target::Any };
    for key in ["a", "a}b", "{x}y", "{}", "k{"] {
        let op = scoped("", key);
        acquire(&store, &op, 1).await;
        let done = store.free(op.id(), &by).await.unwrap();
        assert!(matches!(done, OperatorOutcome::Done(_)), "{key}: {done:?}");
        assert_eq!(store.audit(Some(op.id()), 10).await.unwrap().len(), 1, "{key}");
    }
    assert_eq!(store.audit(None, 10).await.unwrap().len(), 5);
}

/// A slot is moved under the store: before, half-way (keys here and there) and after, every record is found and none is
/// claimed twice.
#[tokio::test]
async fn a_slot_that_moves_loses_nothing() {
    let cluster = RedisCluster::private().await;
    let store = open(&cluster).await.with_hash_tag("moving").unwrap();
    let (from, slot) = (cluster.master_of("{moving}").await, cluster.slot_of("{moving}").await);
    let to = (from + 1) % 3;
    let keys: Vec<_> = (0..20).map(|n| scoped("", &format!("k{n}"))).collect();
    for op in &keys {
        acquire(&store, op, 1).await;
    }
    cluster.begin_move(slot, from, to).await;
    for n in (0..20).step_by(2) {
        cluster.move_key(&format!("idem{{moving}}:k{n}"), from, to).await;
    }
    let all_are_held = async || {
        for op in &keys {
            let answer = store.claim(op, &request(2)).await.unwrap();
            assert!(matches!(answer, ClaimOutcome::InProgress { .. }), "{answer:?}");
        }
    };
    all_are_held().await;
    // New ones go where the slot is going.
    acquire(&store, &scoped("", "new"), 1).await;
    acquire(&store, &scoped("", "new"), 1).await;
    finish(&store, &keys[0], 1, Reply::ok("there")).await;
    finish(&store, &keys[1], 1, Reply::ok("here")).await;
    assert_eq!(replay(&store, &keys[0]).await, Reply::ok("there"));
    assert_eq!(replay(&store, &keys[1]).await, Reply::ok("here"));
    cluster.end_move(slot, from, to).await;
    assert_eq!(replay(&store, &keys[0]).await, Reply::ok("there"));
    assert_eq!(replay(&store, &keys[1]).await, Reply::ok("here"));
    for op in keys.iter().skip(2) {
        acquire(&store, op, 1).await;
        finish(&store, op, 1, Reply::ok("done")).await;
    }
    assert_eq!(store.list(&ListQuery::default()).await.unwrap().records.len(), 21);
}

#[tokio::test]
async fn a_slot_that_moves_is_followed_under_load() {
    let cluster = RedisCluster::private().await;
    let store = open(&cluster).await.with_hash_tag("moving").unwrap();
    let slot = cluster.slot_of("{moving}").await;
    let (over, ends) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let mut callers = JoinSet::new();
    for caller in 0..8 {
        let (store, over, ends) = (store.clone(), over.clone(), ends.clone());
        callers.spawn(async move {
            let mut n = 0;
            while !over.load(Ordering::Acquire) {
                let op = scoped("", &format!("{caller} {n}"));
                acquire(&store, &op, 1).await;
                finish(&store, &op, 1, Reply::ok("done")).await;
                assert_eq!(replay(&store, &op).await, Reply::ok("done"));
                ends.fetch_add(1, Ordering::AcqRel);
                n += 1;
                // The keys are moved one by one; they must not grow faster than that.
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        });
    }
    let mut from = cluster.master_of("{moving}").await;
    for _ in 0..4 {
        let before = ends.load(Ordering::Acquire);
        testkit::wait_until("work goes on", || ends.load(Ordering::Acquire) > before + 50).await;
        let to = (from + 1) % 3;
        cluster.begin_move(slot, from, to).await;
        // A key that is claimed between the last look and the end of the move is moved in the next round.
        cluster.end_move(slot, from, to).await;
        from = to;
    }
    over.store(true, Ordering::Release);
    callers.join_all().await;
}

#[tokio::test]
async fn an_effect_and_its_record_are_in_one_slot_or_it_is_refused_with_the_reason() {
    let cluster = RedisCluster::private().await;
    let store = open(&cluster).await;
    let plan = Plan::new("return {status = 200, body = 'paid', writes = {{'DECRBY', KEYS[1], ARGV[1]}}}");
    let effect = plan.effect().key("{acct-7}:balance").arg("100");
    let refused = store.once(&scoped("", "order"), &effect).await.unwrap_err();
    assert_eq!(refused.kind(), StoreErrorKind::Unfit);
    assert!(refused.to_string().contains("with_hash_tag"), "{refused}");
    let account = store.with_hash_tag("acct-7").unwrap();
    for _ in 0..3 {
        match account.once(&scoped("", "order"), &effect).await.unwrap() {
            OnceOutcome::Ran(stored) | OnceOutcome::Replayed(stored) => {
                assert_eq!(stored.reply, Reply::ok("paid"));
            }
            other => panic!("{other:?}"),
        }
    }
    let owner = cluster.master_of("{acct-7}:balance").await;
    assert_eq!(cluster.node(owner).cli(["get", "{acct-7}:balance"]).await, "-100");
    assert_eq!(cluster.node(owner).cli(["exists", "idem{acct-7}:order"]).await, "1");
    assert_eq!(account.list(&ListQuery::default()).await.unwrap().records.len(), 1);
    assert_eq!(store.list(&ListQuery::default()).await.unwrap().records.len(), 1, "lists have every tag");
}

/// One master has keys of many slots, and a script those of one: completions that are asked for at once are each stored, and
/// none is sent in a way that the master refuses.
#[tokio::test]
async fn completions_of_many_slots_at_once_are_each_stored() {
    let cluster = RedisCluster::private().await;
    let store = open(&cluster).await;
    let all: Vec<_> = (0..200).map(|n| scoped("", &format!("at once {n}"))).collect();
    for op in &all {
        acquire(&store, op, 1).await;
    }
    for master in &cluster.nodes()[..3] {
        master.cli(["config", "resetstat"]).await;
    }
    let mut ends = JoinSet::new();
    for op in all.clone() {
        let store = store.clone();
        ends.spawn(async move { finish(&store, &op, 1, Reply::ok("done")).await });
    }
    ends.join_all().await;
    for master in &cluster.nodes()[..3] {
        let calls = master.cli(["info", "commandstats"]).await;
        let scripts =
            calls.lines().find(|line| line.starts_with("cmdstat_evalsha:")).expect("it ran scripts");
        assert!(scripts.contains(",rejected_calls=0,"), "{scripts}");
    }
    for op in &all {
        assert_eq!(replay(&store, op).await, Reply::ok("done"));
    }
}

#[tokio::test]
async fn an_evicting_node_is_refused_even_a_replica() {
    let cluster = RedisCluster::private().await;
    cluster.node(4).cli(["config", "set", "maxmemory-policy", "allkeys-lru"]).await;
    let error = patient(&cluster.url()).open().await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unfit);
    assert!(error.to_string().contains(&cluster.node(4).addr().to_string()), "{error}");
    patient(&cluster.url()).allow_eviction(true).open().await.unwrap();
    cluster.node(4).cli(["config", "set", "maxmemory-policy", "noeviction"]).await;
    patient(&cluster.url()).open().await.unwrap();
}

/// One master is cut off without a word: the keys of the others go on as if nothing were.
#[tokio::test]
async fn a_silent_node_does_not_hold_up_the_others() {
    let cluster = RedisCluster::private().await;
    let options = onlyonce_store_redis::Options::from_url(&cluster.url()).unwrap();
    let store =
        options.timeout(Duration::from_secs(5)).connect_timeout(Duration::from_secs(5)).open().await.unwrap();
    let [silent, alive] = [cluster.key_on("idem:s", 0).await, cluster.key_on("idem:a", 1).await];
    let [silent, alive] = [&silent, &alive].map(|name| name.strip_prefix("idem:").unwrap().to_owned());
    acquire(&store, &scoped("", &silent), 1).await;
    cluster.node(0).pause();
    let mut stuck = JoinSet::new();
    for n in 0..20 {
        let (store, op) = (store.clone(), scoped("", &silent));
        stuck.spawn(async move { store.claim(&op, &request(n)).await });
    }
    for _ in 0..200 {
        acquire(&store, &scoped("", &alive), 1).await;
    }
    assert!(stuck.try_join_next().is_none_or(|answer| answer.unwrap().is_err()), "the silent one is silent");
    cluster.node(0).resume();
    stuck.join_all().await;
}

/// The claim reached the key's master, its answer was lost on the way, and the master died before the completion: the owner
/// still holds it, completes it, and nobody else runs.
#[tokio::test]
async fn the_master_dies_between_claim_and_complete_and_the_claims_answer_is_lost() {
    let cluster = RedisCluster::private().await;
    let proxy = FaultProxy::start(cluster.node(0).addr()).await;
    // The cluster tells clients to go through the proxy.
    let port = proxy.port().to_string();
    assert_eq!(cluster.node(0).cli(["config", "set", "cluster-announce-port", &port]).await, "OK");
    for node in cluster.nodes() {
        wait_for("every node tells the proxy's port", async || {
            node.cli(["cluster", "slots"]).await.lines().any(|line| line == port).then_some(())
        })
        .await;
    }
    let url = format!("redis+cluster://{}?min_replicas=1&replica_timeout_ms=5000", cluster.node(1).addr());
    let store = patient(&url).open().await.unwrap();
    let name = cluster.key_on("idem:order", 0).await;
    let key = name.strip_prefix("idem:").unwrap();
    proxy.lose_reply_to("NX");
    let claim = claimed(&store, key, &request(1)).await;
    assert!(matches!(claim, ClaimOutcome::Acquired(lease) if lease.attempt == 1), "{claim:?}");
    assert_eq!(proxy.lost_replies(), 1);
    cluster.node(0).kill_9().await;
    let new = cluster.failed_over(&name, 0).await;
    assert_eq!(new, 3);
    // Back as the replica of its successor, so that there is one to confirm.
    cluster.node(0).start().await;
    // Another one meanwhile: held, whatever it sees.
    let other = claimed(&store, key, &request(2)).await;
    assert!(matches!(other, ClaimOutcome::InProgress { .. }), "{other:?}");
    let end = completed(&store, key, 1, "done").await;
    assert!(matches!(end, CompleteOutcome::Stored(_)), "{end:?}");
    match claimed(&store, key, &request(3)).await {
        ClaimOutcome::Completed(stored) => assert_eq!(stored.reply, Reply::ok("done")),
        other => panic!("{other:?}"),
    }
}

/// What happens to each operation, as its callers see it.
#[derive(Default)]
struct Witness {
    // Acquired and, as far as its caller was told, replicated.
    runs: Mutex<BTreeMap<String, usize>>,
    acknowledged: Mutex<BTreeMap<String, String>>,
}

/// Callers run operations while masters are killed, one after the other. What was acknowledged is asked for afterwards: it is
/// answered with the reply that was acknowledged, and was never acquired a second time.
async fn kill_masters_under_load(cluster: &RedisCluster, store: &RedisStore) -> Arc<Witness> {
    let witness = Arc::new(Witness::default());
    let over = Arc::new(AtomicBool::new(false));
    let mut callers = JoinSet::new();
    for caller in 0..8 {
        let (store, witness, over) = (store.clone(), witness.clone(), over.clone());
        callers.spawn(async move {
            let mut n = 0;
            while !over.load(Ordering::Acquire) {
                let key = format!("{caller} {n}");
                n += 1;
                let op = scoped("", &key);
                match store.claim(&op, &request(caller)).await {
                    Ok(ClaimOutcome::Acquired(_)) => {
                        *witness.runs.lock().entry(key.clone()).or_default() += 1
                    }
                    Ok(other) => panic!("{key} is its own: {other:?}"),
                    Err(_) => continue,
                }
                if store.complete(&op, &completion(caller, Reply::ok(key.clone()))).await.is_ok() {
                    witness.acknowledged.lock().insert(key.clone(), key);
                }
            }
        });
    }
    for master in 0..2 {
        let before = witness.acknowledged.lock().len();
        testkit::wait_until("work goes on", || witness.acknowledged.lock().len() > before + 300).await;
        let name = cluster.key_on("idem:probe", master).await;
        cluster.node(master).kill_9().await;
        cluster.failed_over(&name, master).await;
        // Back as a replica, so that its successor has one to confirm again.
        cluster.node(master).start().await;
    }
    let before = witness.acknowledged.lock().len();
    testkit::wait_until("work goes on after the last", || witness.acknowledged.lock().len() > before + 300)
        .await;
    over.store(true, Ordering::Release);
    callers.join_all().await;
    cluster.settled().await;
    witness
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn masters_killed_under_load_with_one_replica_confirming_run_nothing_twice() {
    let cluster = RedisCluster::start(&Redis::options().setting("repl-ping-replica-period 1")).await;
    let options = onlyonce_store_redis::Options::from_url(&cluster.url()).unwrap();
    let store = options.min_replicas(1).replica_timeout(Duration::from_secs(2)).open().await.unwrap();
    let witness = kill_masters_under_load(&cluster, &store).await;
    let acknowledged = witness.acknowledged.lock().clone();
    for (key, reply) in &acknowledged {
        match claimed(&store, key, &request(0xee)).await {
            ClaimOutcome::Completed(stored) => assert_eq!(stored.reply.body(), reply.as_bytes(), "{key}"),
            other => panic!("{key} was acknowledged, and would run again: {other:?}"),
        }
    }
    assert!(witness.runs.lock().values().all(|runs| *runs == 1));
    println!("2 masters killed, {} acknowledged operations, none runs again", acknowledged.len());
}

/// The same without `min_replicas` is not promised, and this shows it: what a master acknowledged while its replica was
/// behind is gone with it, and a retry runs again. With `min_replicas` the same claim is refused and taken back.
#[tokio::test]
async fn without_confirmation_a_failover_forgets_what_the_replica_did_not_have() {
    let cluster = RedisCluster::private().await;
    let store = open(&cluster).await;
    let careful =
        patient(&format!("{}?min_replicas=1&replica_timeout_ms=200", cluster.url())).open().await.unwrap();
    let hazard = store.capabilities().hazard.unwrap();
    assert!(hazard.contains("failover") && hazard.contains("min_replicas"), "{hazard}");
    let name = cluster.key_on("idem:order", 0).await;
    let key = name.strip_prefix("idem:").unwrap();
    // The replica hears nothing any more, as over a network that is cut.
    cluster.node(3).pause();
    assert_eq!(cluster.node(0).cli(["client", "kill", "type", "replica"]).await, "1");
    assert_eq!(acquire(&store, &scoped("", key), 1).await, 1);
    finish(&store, &scoped("", key), 1, Reply::ok("charged")).await;
    let other = cluster.key_on("idem:careful", 0).await;
    let other = other.strip_prefix("idem:").unwrap();
    let refused = careful.claim(&scoped("", other), &request(1)).await.unwrap_err();
    assert_eq!(refused.kind(), StoreErrorKind::Unavailable, "{refused}");
    assert!(!refused.may_have_applied() && refused.to_string().contains("replicas"), "{refused}");
    assert_eq!(acquire(&store, &scoped("", other), 2).await, 1, "the refused claim was taken back");
    let replayed = careful.claim(&scoped("", key), &request(1)).await.unwrap_err();
    assert_eq!(
        replayed.kind(),
        StoreErrorKind::Unavailable,
        "a reply that is nowhere else is not told: {replayed}"
    );
    cluster.node(0).kill_9().await;
    cluster.node(3).resume();
    cluster.failed_over(&name, 0).await;
    let again = claimed(&store, key, &request(2)).await;
    assert!(matches!(again, ClaimOutcome::Acquired(lease) if lease.attempt == 1), "it runs again: {again:?}");
}

/// One part of a cluster is away for longer than a lease: its owner, cut off too, goes first when it is back, though the
/// contact with the rest never broke.
#[tokio::test]
async fn an_outage_of_one_master_is_not_the_death_of_its_owners() {
    let options = Redis::options().durable().setting("cluster-node-timeout 3600000");
    let cluster = RedisCluster::start(&options).await;
    let store = open(&cluster).await;
    let [away, alive] = [cluster.key_on("idem:a", 0).await, cluster.key_on("idem:b", 1).await];
    let [away, alive] = [&away, &alive].map(|name| scoped("", name.strip_prefix("idem:").unwrap()));
    let lease = Duration::from_millis(1500);
    let short = |n| ClaimRequest { lease, ..request(n) };
    store.claim(&away, &short(1)).await.unwrap();
    store.claim(&alive, &short(1)).await.unwrap();
    cluster.node(0).kill_9().await;
    tokio::time::sleep(lease + Duration::from_millis(500)).await;
    let taken = store.claim(&alive, &short(2)).await.unwrap();
    assert!(matches!(taken, ClaimOutcome::Acquired(lease) if lease.attempt == 2), "{taken:?}");
    cluster.node(0).start().await;
    match wait_for("it is back", async || store.claim(&away, &short(2)).await.ok()).await {
        ClaimOutcome::InProgress { lease_left, .. } => assert_eq!(lease_left, Duration::ZERO),
        other => panic!("taken over in an outage of its master: {other:?}"),
    }
    wait_for("a lease of contact later it is taken over", async || {
        matches!(store.claim(&away, &short(2)).await.ok()?, ClaimOutcome::Acquired(_)).then_some(())
    })
    .await;
}
