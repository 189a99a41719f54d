//! What happens in a history.

use onlyonce_core::{OnLeaseEnd, Target};
use proptest::prelude::*;

use super::driver::Traits;
use crate::Time;

/// How many operations there are.
pub(super) const KEYS: usize = 2;

/// Owners have one token for each operation. The first half lets others take over, the second half holds.
pub(super) const OWNERS: usize = 4;

/// A quarter of the subject's unit of time.
pub(super) type Ticks = u32;

/// One step of a history.
#[derive(Clone, Debug)]
pub(super) enum Step {
    Claim { key: usize, owner: usize, request: u8, lease: Ticks, takeover_now: bool, max_attempts: u32 },
    Renew { key: usize, owner: usize, lease: Ticks },
    Complete { key: usize, owner: usize, request: u8, reply: u16, retention: Ticks },
    Release { key: usize, owner: usize },
    MarkUnknown { key: usize, owner: usize },
    Advance { by: Ticks },
    Purge { hold_retention: Ticks },
    Restart,
    Resolve { key: usize, reply: u16, retention: Ticks, force: bool },
    Free { key: usize, target: Target },
}

pub(super) fn policy_of(owner: usize) -> OnLeaseEnd {
    if owner < OWNERS / 2 { OnLeaseEnd::TakeOver } else { OnLeaseEnd::Hold }
}

/// Draws a step. Where time is told, ends and moments meet exactly and often. Where it is real, moments are whole units
/// and ends never are, so that a little time that passes by itself decides nothing.
pub(super) fn steps(traits: Traits) -> BoxedStrategy<Step> {
    let (lease, retention, hold_retention, by) = match traits.time {
        Time::Told => (
            prop::sample::select(vec![4, 6, 8, 12]),
            prop::sample::select(vec![0, 8, 16, 24]),
            prop::sample::select(vec![0, 4, 8, 40]),
            prop::sample::select(vec![1, 2, 4, 6, 8, 12, 40]),
        ),
        Time::Real { .. } => (
            prop::sample::select(vec![5, 9]),
            prop::sample::select(vec![10, 18]),
            prop::sample::select(vec![6, 10, 26]),
            prop::sample::select(vec![4, 8, 12]),
        ),
    };
    let (key, owner) = (0..KEYS, 0..OWNERS);
    // Mostly one request and its retries; now and then another under the same key.
    let request = prop_oneof![6 => Just(0u8), 1 => Just(1u8)];
    let claim =
        (key.clone(), owner.clone(), request.clone(), lease.clone(), prop::bool::weighted(0.8), 1u32..5)
            .prop_map(|(key, owner, request, lease, takeover_now, max_attempts)| Step::Claim {
                key,
                owner,
                request,
                lease,
                takeover_now,
                max_attempts,
            });
    let renew =
        (key.clone(), owner.clone(), lease).prop_map(|(key, owner, lease)| Step::Renew { key, owner, lease });
    let complete = (key.clone(), owner.clone(), request, any::<u16>(), retention.clone()).prop_map(
        |(key, owner, request, reply, retention)| Step::Complete { key, owner, request, reply, retention },
    );
    let release = (key.clone(), owner.clone()).prop_map(|(key, owner)| Step::Release { key, owner });
    let mark = (key.clone(), owner).prop_map(|(key, owner)| Step::MarkUnknown { key, owner });
    let advance = by.prop_map(|by| Step::Advance { by });
    let purge = hold_retention.prop_map(|hold_retention| Step::Purge { hold_retention });
    let owners = prop_oneof![
        8 => claim,
        3 => renew,
        2 => complete,
        2 => release,
        2 => mark,
        5 => advance,
        1 => purge,
        1 => Just(Step::Restart),
    ];
    if !traits.admin {
        return owners.boxed();
    }
    let resolve = (key.clone(), any::<u16>(), retention, prop::bool::weighted(0.3))
        .prop_map(|(key, reply, retention, force)| Step::Resolve { key, reply, retention, force });
    let target =
        prop_oneof![2 => Just(Target::Undecided), 1 => Just(Target::Completed), 1 => Just(Target::Any)];
    let free = (key, target).prop_map(|(key, target)| Step::Free { key, target });
    prop_oneof![22 => owners, 1 => resolve, 2 => free].boxed()
}
