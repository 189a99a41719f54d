//! The one case list that every store must pass, for the stores of this product and for yours.
//!
//! Say how a fresh store is made and how its clock is moved ([`Subject`]), then let the macros write one test for each
//! case, so that a failure has a name:
//!
//! ```
//! use std::sync::Arc;
//! use std::time::Duration;
//! use onlyonce_conformance::{Expiry, Subject, Time};
//! use onlyonce_core::{MemoryStore, Store, StoreAdmin, TestClock};
//!
//! struct Memory { store: std::sync::Mutex<MemoryStore>, clock: TestClock }
//!
//! impl Memory {
//!     async fn fresh() -> Self {
//!         let clock = TestClock::new();
//!         Self { store: MemoryStore::with_clock(Arc::new(clock.clone())).into(), clock }
//!     }
//!     fn handle(&self) -> Arc<MemoryStore> { Arc::new(self.store.lock().unwrap().clone()) }
//! }
//!
//! #[async_trait::async_trait]
//! impl Subject for Memory {
//!     async fn open(&self) -> Arc<dyn Store> { self.handle() }
//!     async fn open_admin(&self) -> Option<Arc<dyn StoreAdmin>> { Some(self.handle()) }
//!     async fn advance(&self, by: Duration) { self.clock.advance(by) }
//!     async fn restart(&self) {
//!         *self.store.lock().unwrap() = MemoryStore::with_clock(Arc::new(self.clock.clone()));
//!     }
//!     fn survives_restart(&self) -> bool { false }
//!     fn time(&self) -> Time { Time::Told }
//!     fn expiry(&self) -> Expiry { Expiry::ByPurge }
//! }
//!
//! onlyonce_conformance::conformance!(Memory::fresh);
//! onlyonce_conformance::admin_conformance!(Memory::fresh); // for a `StoreAdmin`
//! # fn main() {}
//! ```
//!
//! Every case runs on every store. What a store cannot do it declares in its [`Subject`], and the case then tests the
//! documented refusal instead: nothing is skipped.

pub mod cases;
mod harness;
pub mod model;
mod subject;

pub use harness::{Harness, run};
pub use subject::{Expiry, Subject, Time};

/// Writes one `#[test]` for each case that every [`Store`](onlyonce_core::Store) must pass, in one module a theme.
///
/// The argument is a function `async fn() -> impl Subject`, called once for each test (and once for each history of
/// the model test).
#[macro_export]
macro_rules! conformance {
    ($factory:expr) => {
        $crate::__tests! { $factory;
            claims {
                a_claim_is_acquired_and_others_are_in_progress
                a_claim_is_reentrant_for_its_own_token
                a_late_reentrant_claim_keeps_its_attempt
                a_lost_claim_is_released_in_the_background
                another_owner_may_claim_after_a_release
                renewal_holds_the_operation_for_many_leases
            }
            races {
                one_of_many_claims_is_acquired
                one_of_many_claims_takes_over
                one_of_many_claims_follows_a_release
                one_of_many_claims_follows_expiry
                claims_with_one_token_are_one_owner
                a_late_completion_or_a_takeover_wins
                a_completion_outlives_a_release
                completions_with_one_token_store_one_reply
                a_thousand_operations_at_once
            }
            owners {
                a_stale_owner_is_fenced_after_a_takeover
                a_stale_owner_is_fenced_after_a_release_and_a_third_claim
                a_stale_owner_is_fenced_after_expiry_and_a_new_claim
                a_stale_owner_that_claims_again_waits
                a_token_is_worth_nothing_on_another_operation
                without_a_record_there_is_nothing_to_renew_or_release
            }
            takeover {
                the_lease_ends_exactly_at_its_bound
                a_takeover_grows_the_attempt
                a_takeover_needs_both_policies
                too_many_attempts_are_unknown
                broken_contact_lets_the_owner_go_first
                a_late_owner_goes_on_while_nobody_took_over
            }
            unknown {
                a_held_operation_is_unknown_since_its_lease_ended
                a_mark_ends_the_lease_at_once_for_good
                a_completion_resolves_an_unknown_outcome
                a_renewal_resumes_an_unknown_outcome
                a_release_frees_an_unknown_outcome
                the_owner_may_claim_an_unknown_outcome_again
            }
            completion {
                a_late_completion_is_stored
                a_completion_without_a_record_is_stored_anew
                a_repeated_completion_answers_the_first_reply
                a_completed_record_never_changes
                a_completion_keeps_the_fingerprint_of_the_claim
                a_reply_lives_for_its_retention
                a_reply_may_live_for_ten_years
            }
            replay {
                every_reply_comes_back_whole
                a_large_binary_reply_comes_back_whole
                an_omitted_body_stays_omitted
            }
            keys {
                names_are_compared_byte_for_byte
                names_of_full_length_are_kept_whole
                scope_and_key_never_run_together
            }
            origins {
                every_answer_tells_the_origin_of_the_owner
                the_origin_is_that_of_the_last_owner
                a_completion_without_a_record_keeps_its_origin
            }
            fingerprints {
                a_mismatch_goes_before_every_state
                a_mismatch_changes_nothing
                fingerprints_of_two_definitions_differ
            }
            expiry {
                a_reply_expires_exactly_at_its_bound
                an_expired_record_is_absent_before_its_fingerprint_is_compared
                an_expired_record_is_absent_for_its_owner
            }
            purge {
                only_expired_replies_are_purged
                records_without_a_reply_are_kept_for_the_hold_retention
                a_live_lease_is_never_purged
                a_purge_is_bounded
                a_purge_under_load_loses_nothing
            }
            restart {
                claims_and_their_owners_outlive_a_restart
                replies_outlive_a_restart
                unknown_outcomes_outlive_a_restart
                attempts_outlive_a_restart
            }
            capabilities {
                the_store_says_what_it_is
                the_declared_way_of_expiry_is_the_real_one
            }
        }
        mod model {
            #[allow(unused_imports)]
            use super::*;
            /// Random histories against the reference model, with the invariants checked at every step.
            #[test]
            fn every_history_keeps_the_invariants() {
                $crate::model::check($factory, $crate::model::HISTORIES)
            }
        }
    };
}

/// Writes one `#[test]` for each case that every [`StoreAdmin`](onlyonce_core::StoreAdmin) must pass, in module `admin`.
///
/// The argument is that of [`conformance!`].
#[macro_export]
macro_rules! admin_conformance {
    ($factory:expr) => {
        $crate::__tests! { $factory;
            admin {
                resolving_answers_every_retry
                freeing_lets_the_next_retry_run
                a_returning_owner_is_fenced_by_a_tombstone
                a_freed_key_is_free_for_another_request
                a_live_lease_yields_to_force_alone
                a_stored_reply_yields_to_force_alone
                a_reply_alone_is_forgotten
                what_is_not_there_stays_absent
                every_change_is_on_the_audit_table
                a_record_is_shown_as_it_stands
                a_record_is_as_old_as_its_first_claim
                pages_cover_every_record_once
                lists_are_filtered
                records_are_counted_by_state
                a_tombstone_is_purged_after_the_hold_retention
                operators_changes_outlive_a_restart
            }
        }
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! __tests {
    ($factory:expr; $($module:ident { $($case:ident)* })*) => {
        $(
            mod $module {
                #[allow(unused_imports)]
                use super::*;
                $(
                    #[test]
                    fn $case() {
                        $crate::run($factory, async |h| $crate::cases::$module::$case(h).await)
                    }
                )*
            }
        )*
    };
}
