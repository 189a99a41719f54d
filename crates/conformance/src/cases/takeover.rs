//! A lease that is over, under both policies.

use std::time::Duration;

use onlyonce_core::{ClaimOutcome, ClaimRequest, CompleteOutcome, RenewOutcome, Reply};

use crate::harness::fresh_token;
use crate::{Harness, Time};

/// A lease is live until its end, and over at its end: zero left is over.
pub async fn the_lease_ends_exactly_at_its_bound(h: &Harness) {
    let (operation, owner) = (h.operation("k"), fresh_token());
    h.acquire(&operation, owner).await;
    match h.time() {
        Time::Told => {
            h.advance(h.lease() - Duration::from_millis(1)).await;
            assert_eq!(h.lease_left(&operation).await, Duration::from_millis(1));
            h.advance(Duration::from_millis(1)).await;
        }
        // Real time cannot be stopped at the bound: a unit before it and just past it must do.
        Time::Real { unit } => {
            h.advance(unit).await;
            assert!(h.is_about(h.lease_left(&operation).await, unit * 2));
            h.advance(unit * 2).await;
        }
    }
    assert_eq!(h.acquire(&operation, fresh_token()).await.attempt, 2);
}

/// Each takeover is one attempt more; it keeps the reply of its own owner alone.
pub async fn a_takeover_grows_the_attempt(h: &Harness) {
    let operation = h.operation("k");
    let mut owner = fresh_token();
    assert_eq!(h.acquire(&operation, owner).await.attempt, 1);
    for attempt in 2..=4 {
        h.advance(h.lease()).await;
        owner = fresh_token();
        assert_eq!(h.acquire(&operation, owner).await.attempt, attempt);
        assert!(h.is_about(h.lease_left(&operation).await, h.lease()), "a takeover gets a full lease");
        // The owner of a later attempt asks again like that of the first.
        assert_eq!(h.acquire(&operation, owner).await.attempt, attempt);
    }
    h.finish(&operation, owner, Reply::ok("by the fourth")).await;
    assert_eq!(h.replay(&operation).await.reply, Reply::ok("by the fourth"));
}

/// A takeover needs the record's leave and the caller's; without one of them the outcome is unknown, and the record is
/// left as it was.
pub async fn a_takeover_needs_both_policies(h: &Harness) {
    let (held, free) = (h.operation("its owner holds"), h.operation("its owner lets go"));
    let (holder, owner) = (fresh_token(), fresh_token());
    h.acquire_as(&held, &h.hold(holder)).await;
    h.acquire(&free, owner).await;
    h.advance(h.lease()).await;
    for (operation, request) in
        [(&held, h.request(fresh_token())), (&held, h.hold(fresh_token())), (&free, h.hold(fresh_token()))]
    {
        let answer = h.claim_as(operation, &request).await;
        assert!(matches!(answer, ClaimOutcome::Unknown { .. }), "{answer:?}");
    }
    assert_eq!(h.acquire(&free, fresh_token()).await.attempt, 2, "an unknown answer to one is not kept");
    h.finish(&held, holder, Reply::ok("late")).await;
}

/// At `max_attempts` the outcome is unknown; the caller's bound counts, and a caller that allows more takes over.
pub async fn too_many_attempts_are_unknown(h: &Harness) {
    let operation = h.operation("k");
    let bounded = |max_attempts| ClaimRequest { max_attempts, ..h.request(fresh_token()) };
    h.acquire_as(&operation, &bounded(2)).await;
    h.advance(h.lease()).await;
    assert!(matches!(h.claim_as(&operation, &bounded(1)).await, ClaimOutcome::Unknown { .. }));
    assert_eq!(h.acquire_as(&operation, &bounded(2)).await.attempt, 2);
    h.advance(h.lease()).await;
    assert!(matches!(h.claim_as(&operation, &bounded(2)).await, ClaimOutcome::Unknown { .. }));
    assert_eq!(h.acquire_as(&operation, &bounded(3)).await.attempt, 3);
}

/// A caller whose contact with the store was broken does not take over: it sees work in progress with nothing left of
/// the lease, and the owner, back after the same outage, renews first.
pub async fn broken_contact_lets_the_owner_go_first(h: &Harness) {
    let (operation, owner) = (h.operation("k"), fresh_token());
    let broken = || ClaimRequest { takeover_now: false, ..h.request(fresh_token()) };
    assert_eq!(h.acquire_as(&operation, &ClaimRequest { token: owner, ..broken() }).await.attempt, 1);
    h.advance(h.lease()).await;
    match h.claim_as(&operation, &broken()).await {
        ClaimOutcome::InProgress { lease_left, .. } => assert_eq!(lease_left, Duration::ZERO),
        other => panic!("expected InProgress, got {other:?}"),
    }
    assert_eq!(h.renew(&operation, owner).await, RenewOutcome::Renewed);
    assert!(h.is_about(h.lease_left(&operation).await, h.lease()));
    h.advance(h.lease()).await;
    assert_eq!(h.acquire(&operation, fresh_token()).await.attempt, 2, "unbroken contact takes over");
}

/// While nobody took over, the owner renews and completes however late, under both policies.
pub async fn a_late_owner_goes_on_while_nobody_took_over(h: &Harness) {
    for (key, hold) in [("taken over at will", false), ("held", true)] {
        let (operation, owner) = (h.operation(key), fresh_token());
        let request = if hold { h.hold(owner) } else { h.request(owner) };
        h.acquire_as(&operation, &request).await;
        h.advance(h.lease() * 2).await;
        assert_eq!(h.renew(&operation, owner).await, RenewOutcome::Renewed);
        assert!(h.is_about(h.lease_left(&operation).await, h.lease()));
        h.advance(h.lease() * 2).await;
        let end = h.complete(&operation, owner, Reply::ok("late")).await;
        assert!(matches!(end, CompleteOutcome::Stored(_)), "{end:?}");
        assert_eq!(h.replay(&operation).await.reply, Reply::ok("late"));
    }
}
