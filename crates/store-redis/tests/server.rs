//! One server, as it is met in the field: what it is asked, what it refuses, what breaks on the way.

mod common;

use std::time::Duration;

use common::*;
use onlyonce_core::{
    ClaimOutcome, ClaimRequest, CompleteOutcome, ListQuery, PurgeRequest, ReleaseOutcome, RenewOutcome,
    Reply, Store, StoreAdmin, StoreErrorKind,
};
use onlyonce_store_redis::{Options, RedisStore};
use testkit::{FaultProxy, Redis, wait_for};

async fn refusal(options: Options) -> String {
    let error = options.open().await.expect_err("it is refused");
    assert_eq!(error.kind(), StoreErrorKind::Unfit, "{error}");
    error.to_string()
}

#[tokio::test]
async fn a_claim_is_one_atomic_command_that_redis_cli_can_see() {
    let server = Redis::private().await;
    let store = patient(&server.url()).open().await.unwrap();
    assert_eq!(server.cli(["dbsize"]).await, "0", "the self-test leaves nothing");
    server.cli(["config", "resetstat"]).await;
    acquire(&store, &scoped("", "order-7"), 1).await;
    let calls = server.cli(["info", "commandstats"]).await;
    let names: Vec<_> =
        calls.lines().filter_map(|line| line.strip_prefix("cmdstat_")?.split(':').next()).collect();
    let mut claimed = vec!["pttl", "set"];
    claimed.retain(|name| names.contains(name));
    assert_eq!(claimed, ["pttl", "set"], "{calls}");
    assert!(!names.contains(&"get") && !names.contains(&"evalsha"), "{calls}");
    let ttl: u64 = server.cli(["ttl", "idem:order-7"]).await.parse().unwrap();
    assert!((86_000..=86_400).contains(&ttl), "{ttl}");
    acquire(&store, &operation("order-7"), 1).await;
    let keys = server.cli(["keys", "idem*"]).await;
    assert!(keys.contains("idem@8d9001d32c6a703d95921a77115050f3:order-7"), "{keys}");
    finish(&store, &scoped("", "order-7"), 1, Reply::ok("done")).await;
    let ttl: u64 = server.cli(["ttl", "idem:order-7"]).await.parse().unwrap();
    assert!((86_000..=86_400).contains(&ttl), "{ttl}");
}

#[tokio::test]
async fn what_waits_for_somebody_is_kept_for_a_week() {
    let server = Redis::private().await;
    let store = patient(&server.url()).open().await.unwrap();
    let ttl = async |key: &str| server.cli(["ttl", key]).await.parse::<u64>().unwrap();
    let week = 7 * 86_400;
    store.claim(&scoped("", "held"), &hold(1)).await.unwrap();
    assert!((week..=week + 60).contains(&ttl("idem:held").await));
    acquire(&store, &scoped("", "marked"), 1).await;
    store.mark_unknown(&scoped("", "marked"), token(1)).await.unwrap();
    assert!((week - 60..=week).contains(&ttl("idem:marked").await));
    let short = patient(&server.url()).prefix("short").hold_retention(Duration::from_secs(60));
    let short = short.open().await.unwrap();
    short.claim(&scoped("", "held"), &hold(1)).await.unwrap();
    assert!((86_000..=86_400).contains(&ttl("short:held").await), "the retention at least");
}

#[tokio::test]
async fn stores_with_different_prefixes_do_not_meet() {
    let server = Redis::private().await;
    let url = |more: &str| format!("{}?{more}", server.url());
    let one = RedisStore::open(&url("prefix=shop-a")).await.unwrap();
    let two = RedisStore::open(&url("prefix=shop-b")).await.unwrap();
    let third = RedisStore::open(&format!("{}/3?prefix=shop-a", server.url())).await.unwrap();
    for store in [&one, &two, &third] {
        assert_eq!(acquire(store, &operation("k"), 1).await, 1);
        assert_eq!(store.list(&ListQuery::default()).await.unwrap().records.len(), 1);
    }
    assert_eq!(third.capabilities().location, format!("redis://{}/3", server.addr()));
}

#[tokio::test]
async fn a_server_that_may_throw_records_away_is_refused() {
    let server = Redis::options().setting("maxmemory-policy volatile-lru").start().await;
    let why = refusal(patient(&server.url())).await;
    assert!(why.contains("volatile-lru") && why.contains("allow_eviction"), "{why}");
    let store = patient(&server.url()).allow_eviction(true).open().await.unwrap();
    let hazard = store.capabilities().hazard.unwrap();
    assert!(hazard.contains("throw records away"), "{hazard}");
    assert!(!store.capabilities().durable);
}

#[tokio::test]
async fn a_policy_that_changes_later_is_seen_at_a_reconnect_and_at_a_purge() {
    let server = Redis::private().await;
    let store = patient(&server.url()).timeout(Duration::from_secs(2)).open().await.unwrap();
    acquire(&store, &operation("k"), 1).await;
    server.cli(["config", "set", "maxmemory-policy", "allkeys-lru"]).await;
    let purged = store.purge(&PurgeRequest::default()).await.unwrap_err();
    assert_eq!(purged.kind(), StoreErrorKind::Unfit, "{purged}");
    let refused = store.claim(&operation("other"), &request(2)).await.unwrap_err();
    assert!(refused.to_string().contains("allkeys-lru"), "{refused}");
    assert!(!refused.may_have_applied() && !refused.retryable());
    server.cli(["config", "set", "maxmemory-policy", "noeviction"]).await;
    wait_for("the store is used again", async || store.claim(&operation("other"), &request(2)).await.ok())
        .await;
    // The same over a restart of the server, without a purge in between.
    server.cli(["config", "set", "maxmemory-policy", "allkeys-lru"]).await;
    server.cli(["client", "kill", "type", "normal"]).await;
    let refused = wait_for("the next connection is checked", async || {
        store.claim(&operation("third"), &request(3)).await.err()
    });
    assert!(refused.await.to_string().contains("allkeys-lru"));
}

#[tokio::test]
async fn a_claim_that_was_carried_out_in_part_may_have_happened() {
    let server = Redis::private().await;
    let store = patient(&server.url()).open().await.unwrap();
    server.cli(["acl", "setuser", "default", "-pttl"]).await;
    let error = store.claim(&operation("k"), &request(1)).await.unwrap_err();
    // Else nobody would release it, and it would be held for a week.
    assert!(error.may_have_applied(), "{error}");
    server.cli(["acl", "setuser", "default", "+pttl"]).await;
    assert_eq!(store.release(&operation("k"), token(1)).await.unwrap(), ReleaseOutcome::Applied);
    acquire(&store, &operation("k"), 2).await;
}

#[tokio::test]
async fn a_server_that_is_busy_when_one_connects_is_not_unfit() {
    let server = Redis::options().setting("busy-reply-threshold 50").start().await;
    let client = redis::Client::open(server.url()).unwrap();
    let mut busy = client.get_multiplexed_async_connection().await.unwrap();
    let slow = "local e = redis.call('TIME')[1] + 3 repeat until redis.call('TIME')[1] + 0 >= e";
    let slow = tokio::spawn(async move {
        redis::cmd("EVAL").arg(slow).arg(0).query_async::<redis::Value>(&mut busy).await
    });
    let error = wait_for("it is busy", async || {
        patient(&server.url()).timeout(Duration::from_millis(300)).open().await.err()
    })
    .await;
    assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{error}");
    assert!(error.to_string().contains("busy with a script"), "{error}");
    let _ = slow.await.unwrap();
}

#[tokio::test]
async fn a_user_with_the_rights_of_the_documentation_is_enough() {
    let server = Redis::options().durable().start().await;
    let rules = ["acl", "setuser", "onlyonce"].map(str::to_owned).into_iter().chain(documented_rights());
    assert_eq!(server.cli_with(rules.collect()).await, "OK");
    let url = format!("redis://onlyonce:secret@{}", server.addr());
    let store = patient(&url).open().await.unwrap();
    let op = operation("k");
    acquire(&store, &op, 1).await;
    assert_eq!(store.renew(&op, token(1), Duration::from_secs(60)).await.unwrap(), RenewOutcome::Renewed);
    finish(&store, &op, 1, Reply::ok("done")).await;
    assert_eq!(replay(&store, &op).await, Reply::ok("done"));
    let by = onlyonce_core::OperatorAction {
        actor: "a".into(),
        reason: "r".into(),
        target: onlyonce_core::Target::Any,
    };
    store.free(op.id(), &by).await.unwrap();
    assert_eq!(store.audit(None, 10).await.unwrap().len(), 1);
    assert_eq!(store.stats().await.unwrap().freed, 1);
    assert_eq!(store.list(&ListQuery::default()).await.unwrap().records.len(), 1);
    store.purge(&PurgeRequest::default()).await.unwrap();
    assert_eq!(store.capabilities().hazard, None);
    assert_eq!(server.cli(["acl", "setuser", "onlyonce", "-config|get"]).await, "OK");
    let store = patient(&url).open().await.unwrap();
    assert!(store.capabilities().hazard.unwrap().contains("does not say whether it syncs"));
}

#[tokio::test]
async fn a_user_without_a_right_is_refused_at_the_start_by_its_name() {
    let users = "user blind on >pw ~* +@all -info -config\nuser mute on >pw ~* +@all -evalsha\n\
                 user elsewhere on >pw ~other* +@all\nuser sealed on >pw ~* +@all -del";
    let server =
        users.lines().fold(Redis::options(), |options, user| options.setting(user.trim())).start().await;
    let as_user = |user: &str| patient(&format!("redis://{user}:pw@{}", server.addr()));
    let why = refusal(as_user("blind")).await;
    assert!(why.contains("INFO") && why.contains("allow_eviction"), "{why}");
    as_user("blind").allow_eviction(true).open().await.unwrap();
    for user in ["mute", "elsewhere", "sealed"] {
        let why = refusal(as_user(user)).await;
        assert!(why.contains("lacks a permission"), "{user}: {why}");
    }
    let wrong = patient(&format!("redis://blind:hunter2@{}", server.addr())).open().await.unwrap_err();
    let said = format!("{wrong} {:?}", std::error::Error::source(&wrong));
    assert_eq!(wrong.kind(), StoreErrorKind::Unfit, "{said}");
    assert!(!said.contains("hunter2"), "{said}");
}

#[tokio::test]
async fn what_is_not_there_or_not_a_store_is_said() {
    let nobody = patient(&format!("redis://{}", testkit::free_addr())).timeout(Duration::from_secs(1));
    let error = nobody.open().await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{error}");
    let server = Redis::private().await;
    let why = refusal(patient(&format!("redis+cluster://{}", server.addr()))).await;
    assert!(why.contains("not a node of a cluster"), "{why}");
    let replica = Redis::options().setting(&format!("replicaof 127.0.0.1 {}", server.port())).start().await;
    wait_for("it is in step", async || {
        replica.cli(["info", "replication"]).await.contains("master_link_status:up").then_some(())
    })
    .await;
    let why = refusal(patient(&replica.url())).await;
    assert!(why.contains("a replica"), "{why}");
}

#[tokio::test]
async fn a_durable_server_is_called_durable_and_others_say_what_they_lose() {
    for (settings, durable, hazard) in [
        (&["appendonly yes", "appendfsync always"][..], true, ""),
        (&["appendonly yes", "appendfsync everysec"], false, "syncs its file later"),
        (&[], false, "no append-only file"),
    ] {
        let options = settings.iter().fold(Redis::options(), |options, line| options.setting(line));
        let server = options.start().await;
        let said = patient(&server.url()).open().await.unwrap().capabilities();
        assert_eq!(said.durable, durable, "{settings:?}");
        assert!(said.hazard.unwrap_or_default().contains(hazard), "{settings:?}");
    }
}

#[tokio::test]
async fn a_full_server_takes_no_claims_and_still_records_what_ran() {
    let server = Redis::options().setting("maxmemory 3mb").start().await;
    let store = patient(&server.url()).open().await.unwrap();
    acquire(&store, &operation("let in"), 1).await;
    acquire(&store, &operation("to be released"), 1).await;
    acquire(&store, &operation("to be marked"), 1).await;
    let mut filled = 0;
    let error = loop {
        filled += 1;
        let (key, reply) = (operation(&format!("filler {filled}")), Reply::ok(vec![b'x'; 200_000]));
        match store.claim(&key, &request(2)).await {
            Ok(_) => finish(&store, &key, 2, reply).await,
            Err(error) => break error,
        }
        assert!(filled < 1000, "it never fills");
    };
    assert_eq!(error.kind(), StoreErrorKind::Full, "{error}");
    assert!(!error.may_have_applied() && error.retryable());
    assert_eq!(
        store.renew(&operation("let in"), token(1), Duration::from_secs(60)).await.unwrap(),
        RenewOutcome::Renewed
    );
    finish(&store, &operation("let in"), 1, Reply::ok("recorded all the same")).await;
    for (key, mark) in [("to be released", false), ("to be marked", true)] {
        let ended = match mark {
            true => store.mark_unknown(&operation(key), token(1)).await,
            false => store.release(&operation(key), token(1)).await,
        };
        assert_eq!(ended.unwrap(), ReleaseOutcome::Applied, "{key}");
    }
}

#[tokio::test]
async fn what_is_no_record_of_this_operation_is_an_error_and_never_absent() {
    let server = Redis::private().await;
    let store = patient(&server.url()).open().await.unwrap();
    let op = scoped("", "k");
    server.cli(["set", "idem:k", "somebody else's"]).await;
    server.cli(["lpush", "idem:list", "x"]).await;
    acquire(&store, &scoped("", "moved"), 1).await;
    server.cli(["rename", "idem:moved", "idem:another"]).await;
    acquire(&store, &scoped("", "kept"), 1).await;
    server.cli(["persist", "idem:kept"]).await;
    for (key, why) in [
        ("k", "no record of ours"),
        ("list", "no record"),
        ("another", "another operation"),
        ("kept", "PEXPIRE"),
    ] {
        let op = scoped("", key);
        let errors = [
            store.claim(&op, &request(2)).await.unwrap_err(),
            store.renew(&op, token(2), Duration::from_secs(1)).await.unwrap_err(),
            store.release(&op, token(2)).await.unwrap_err(),
            store.complete(&op, &completion(2, Reply::ok("x"))).await.unwrap_err(),
            store.show(op.id()).await.unwrap_err(),
        ];
        for error in errors {
            assert_eq!(error.kind(), StoreErrorKind::Unreadable, "{key}: {error}");
            assert!(!error.retryable());
            assert!(error.to_string().contains(why), "{key}: {error}");
        }
    }
    assert_eq!(server.cli(["get", "idem:k"]).await, "somebody else's", "and nothing is changed");
    // Foreign keys are passed by in lists, and our own that make no sense do not hide the others.
    acquire(&store, &scoped("", "good"), 1).await;
    let listed = store.list(&ListQuery::default()).await.unwrap();
    assert_eq!(listed.records.iter().map(|its| its.id.key.as_str()).collect::<Vec<_>>(), ["good"]);
    assert_eq!(store.stats().await.unwrap().in_progress, 1);
    // Asked for by their key they are not absent.
    for key in ["another", "kept"] {
        let query = ListQuery { key: Some(scoped("", key).id().key.clone()), ..ListQuery::default() };
        let found = store.list(&query).await.unwrap_err();
        assert_eq!(found.kind(), StoreErrorKind::Unreadable, "{key}: {found}");
    }
    server.cli(["del", "idem:another", "idem:kept", "idem:good"]).await;
    assert_eq!(store.list(&ListQuery::default()).await.unwrap().records.len(), 0);
    server.cli(["setrange", "idem:k", "0", "oo\u{2}"]).await;
    let newer = store.claim(&op, &request(2)).await.unwrap_err();
    assert!(newer.to_string().contains("form 2"), "{newer}");
}

#[tokio::test]
async fn a_lost_answer_is_asked_for_again_with_the_same_token() {
    let server = Redis::private().await;
    let proxy = FaultProxy::start(server.addr()).await;
    let store = patient(&format!("redis://{}", proxy.addr())).open().await.unwrap();
    let op = operation("k");
    proxy.lose_reply_to("NX");
    assert_eq!(acquire(&store, &op, 1).await, 1);
    assert_eq!(proxy.lost_replies(), 1, "it was taken by the claim whose answer was lost");
    // EVALSHA is in the request of every change by an owner.
    proxy.lose_reply_to("EVALSHA");
    assert_eq!(store.renew(&op, token(1), Duration::from_secs(60)).await.unwrap(), RenewOutcome::Renewed);
    proxy.lose_reply_to("EVALSHA");
    let end = store.complete(&op, &completion(1, Reply::ok("done"))).await.unwrap();
    assert!(matches!(end, CompleteOutcome::AlreadyStored(_)), "{end:?}");
    assert_eq!(replay(&store, &op).await, Reply::ok("done"));
    acquire(&store, &operation("r"), 1).await;
    proxy.lose_reply_to("EVALSHA");
    assert_eq!(store.release(&operation("r"), token(1)).await.unwrap(), ReleaseOutcome::Absent);
    assert_eq!(proxy.lost_replies(), 4);
    // An operator's change is not made a second time: that would be refused, though the first was done.
    acquire(&store, &operation("o"), 1).await;
    let by = onlyonce_core::OperatorAction {
        actor: "a".into(),
        reason: "r".into(),
        target: onlyonce_core::Target::Any,
    };
    proxy.lose_reply_to("!audit");
    let lost = store.free(operation("o").id(), &by).await.unwrap_err();
    assert!(lost.may_have_applied(), "{lost}");
    assert_eq!(store.audit(None, 10).await.unwrap().len(), 1);
}

/// Its answer was lost, and the server is refused when it is asked again: what was sent may have been carried out.
#[tokio::test]
async fn a_completion_that_was_lost_and_then_refused_may_have_happened() {
    let server = Redis::private().await;
    let proxy = FaultProxy::start(server.addr()).await;
    let store = patient(&format!("redis://{}", proxy.addr())).open().await.unwrap();
    let op = operation("k");
    acquire(&store, &op, 1).await;
    // So that its record is not as its claim left it, which is another script.
    store.mark_unknown(&op, token(1)).await.unwrap();
    server.cli(["config", "set", "maxmemory-policy", "allkeys-lru"]).await;
    // The end of that script's arguments.
    proxy.lose_reply_to("$1\r\n0\r\n");
    let refused = store.complete(&op, &completion(1, Reply::ok("done"))).await.unwrap_err();
    assert_eq!(proxy.lost_replies(), 1);
    assert_eq!(refused.kind(), StoreErrorKind::Unfit, "{refused}");
    assert!(refused.may_have_applied(), "{refused}");
    server.cli(["config", "set", "maxmemory-policy", "noeviction"]).await;
    let done = wait_for("it is used again", async || store.claim(&op, &request(2)).await.ok()).await;
    assert!(matches!(&done, ClaimOutcome::Completed(its) if its.reply == Reply::ok("done")), "{done:?}");
}

#[tokio::test]
async fn where_no_replica_is_waited_for_an_answer_writes_nothing() {
    let server = Redis::private().await;
    let store = patient(&server.url()).open().await.unwrap();
    let op = operation("k");
    acquire(&store, &op, 1).await;
    finish(&store, &op, 1, Reply::ok("done")).await;
    let changes = async || {
        let said = server.cli(["info", "persistence"]).await;
        said.lines().find_map(|line| line.strip_prefix("rdb_changes_since_last_save:")).map(str::to_owned)
    };
    let before = changes().await.expect("it counts changes");
    let again = store.complete(&op, &completion(1, Reply::ok("again"))).await.unwrap();
    assert!(matches!(again, CompleteOutcome::AlreadyStored(_)), "{again:?}");
    assert_eq!(replay(&store, &op).await, Reply::ok("done"));
    assert_eq!(store.renew(&op, token(1), Duration::from_secs(60)).await.unwrap(), RenewOutcome::Ended);
    assert_eq!(changes().await, Some(before));
}

#[tokio::test]
async fn a_server_that_is_away_is_told_apart_from_an_answer_that_was_lost() {
    let server = Redis::private().await;
    let proxy = FaultProxy::start(server.addr()).await;
    let options = Options::from_url(&format!("redis://{}?timeout_ms=300", proxy.addr())).unwrap();
    let store = options.open().await.unwrap();
    proxy.silence(true);
    let silent = store.claim(&operation("silent"), &request(1)).await.unwrap_err();
    assert_eq!(silent.kind(), StoreErrorKind::Timeout, "{silent}");
    assert!(silent.may_have_applied() && silent.retryable());
    proxy.refuse(true);
    proxy.cut();
    proxy.silence(false);
    let away = wait_for("it is known to be away", async || {
        let error = store.claim(&operation("away"), &request(1)).await.unwrap_err();
        (!error.may_have_applied()).then_some(error)
    })
    .await;
    assert_eq!(away.kind(), StoreErrorKind::Unavailable, "{away}");
    assert!(away.retryable());
    proxy.refuse(false);
    let back = wait_for("it is back", async || store.claim(&operation("away"), &request(1)).await.ok()).await;
    assert!(matches!(back, ClaimOutcome::Acquired(_)), "{back:?}");
}

#[tokio::test]
async fn a_break_of_the_contact_lets_the_owner_go_first() {
    let server = Redis::options().durable().start().await;
    let store = patient(&server.url()).open().await.unwrap();
    let lease = Duration::from_millis(1500);
    let owner = ClaimRequest { lease, ..request(1) };
    let retry = ClaimRequest { lease, ..request(2) };
    store.claim(&operation("k"), &owner).await.unwrap();
    server.kill_9().await;
    tokio::time::sleep(lease + Duration::from_millis(500)).await;
    server.start().await;
    // Its lease is over, but its owner could not renew either.
    match store.claim(&operation("k"), &retry).await.unwrap() {
        ClaimOutcome::InProgress { lease_left, .. } => assert_eq!(lease_left, Duration::ZERO),
        other => panic!("taken over in an outage: {other:?}"),
    }
    let taken = wait_for("a lease of contact later it is taken over", async || {
        match store.claim(&operation("k"), &retry).await.unwrap() {
            ClaimOutcome::Acquired(lease) => Some(lease),
            _ => None,
        }
    });
    assert_eq!(taken.await.attempt, 2);
}

#[tokio::test]
async fn it_reconnects_by_itself_after_a_restart_and_knows_its_scripts() {
    let server = Redis::options().durable().start().await;
    let store = patient(&server.url()).open().await.unwrap();
    let op = operation("k");
    acquire(&store, &op, 1).await;
    server.kill_9().await;
    server.start().await;
    // The new process knows no script.
    finish(&store, &op, 1, Reply::ok("done")).await;
    server.cli(["script", "flush"]).await;
    assert_eq!(store.release(&op, token(1)).await.unwrap(), ReleaseOutcome::Fenced);
    assert_eq!(replay(&store, &op).await, Reply::ok("done"));
}
