//! The one case list, on a private MariaDB.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use onlyonce_conformance::{Expiry, Subject, Time};
use onlyonce_core::{Store, StoreAdmin};
use onlyonce_store_mysql::{MysqlStore, Options};
use testkit::Mariadb;

/// A database of its own, and how its stores are opened.
struct Database {
    url: String,
    how: fn(Options) -> Options,
}

impl Database {
    async fn fresh(how: fn(Options) -> Options) -> Self {
        let server = Mariadb::shared().await;
        Self { url: server.url(&server.database().await), how }
    }

    // A store with connections of its own, as another process has it.
    async fn another(&self) -> MysqlStore {
        (self.how)(MysqlStore::options(&self.url).expect("a URL")).open().await.expect("the database opens")
    }
}

#[async_trait]
impl Subject for Database {
    async fn open(&self) -> Arc<dyn Store> {
        Arc::new(self.another().await)
    }

    async fn open_admin(&self) -> Option<Arc<dyn StoreAdmin>> {
        Some(Arc::new(self.another().await))
    }

    async fn advance(&self, by: Duration) {
        tokio::time::sleep(by).await;
    }

    // The records are the server's: nothing of the process that ends is needed.
    async fn restart(&self) {}

    fn survives_restart(&self) -> bool {
        true
    }

    fn time(&self) -> Time {
        Time::Real { unit: Duration::from_secs(1) }
    }

    fn expiry(&self) -> Expiry {
        Expiry::ByPurge
    }
}

mod usual {
    use super::*;

    async fn fresh() -> Database {
        Database::fresh(|options| options).await
    }

    onlyonce_conformance::conformance!(fresh);
    onlyonce_conformance::admin_conformance!(fresh);
}

/// The cases that these ways of asking touch.
macro_rules! cases {
    ($($module:ident { $($case:ident)* })*) => {
        $($(
            #[test]
            fn $case() {
                onlyonce_conformance::run(fresh, async |h| onlyonce_conformance::cases::$module::$case(h).await)
            }
        )*)*
    };
}

/// As with a server that cannot refuse to wait for a lock, MySQL among them.
mod looking_first {
    use super::*;

    async fn fresh() -> Database {
        Database::fresh(Options::look_first).await
    }

    cases! {
        claims { a_claim_is_reentrant_for_its_own_token another_owner_may_claim_after_a_release }
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
        completion {
            a_late_completion_is_stored
            a_completion_without_a_record_is_stored_anew
            a_repeated_completion_answers_the_first_reply
            a_completion_keeps_the_fingerprint_of_the_claim
        }
        unknown { a_mark_ends_the_lease_at_once_for_good a_renewal_resumes_an_unknown_outcome }
        owners { a_stale_owner_is_fenced_after_a_takeover without_a_record_there_is_nothing_to_renew_or_release }
        replay { every_reply_comes_back_whole a_large_binary_reply_comes_back_whole }
        origins { every_answer_tells_the_origin_of_the_owner }
        keys { names_are_compared_byte_for_byte names_of_full_length_are_kept_whole }
    }

    #[test]
    fn every_history_keeps_the_invariants() {
        onlyonce_conformance::model::check(fresh, onlyonce_conformance::model::HISTORIES)
    }
}

/// Behind a proxy that carries no prepared statements.
mod unprepared {
    use super::*;

    async fn fresh() -> Database {
        let mut database = Database::fresh(|options| options).await;
        database.url.push_str("?prepare=off");
        database
    }

    cases! {
        claims { a_claim_is_reentrant_for_its_own_token renewal_holds_the_operation_for_many_leases }
        races { completions_with_one_token_store_one_reply a_thousand_operations_at_once }
        completion {
            a_completion_without_a_record_is_stored_anew
            a_repeated_completion_answers_the_first_reply
            a_reply_may_live_for_ten_years
        }
        replay {
            every_reply_comes_back_whole
            a_large_binary_reply_comes_back_whole
            an_omitted_body_stays_omitted
        }
        origins { every_answer_tells_the_origin_of_the_owner }
        keys { names_are_compared_byte_for_byte names_of_full_length_are_kept_whole scope_and_key_never_run_together }
    }
}
