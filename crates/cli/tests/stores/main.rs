//! What clients and operators meet, line by line, on every store: the real `onlyonce serve` in front of a real upstream.
//!
//! A store is a line below and a function in `places.rs`; a behaviour is a function in one of the files of lines and its
//! name in the list of those that have it.
#![allow(clippy::unwrap_used, reason = "a test fails by it")]

#[path = "../common/mod.rs"]
mod common;
mod places;
mod requests;
mod shared;
mod unreachable;

use places::Place;
use testkit::{Redis, RedisCluster};

/// Writes a test for each line on each store of the list.
macro_rules! on_each {
    (stores $($store:ident)*; lines $file:ident $lines:tt) => {
        $( mod $store { on_each! { @ $store $file $lines } } )*
    };
    (@ $store:ident $file:ident [$($line:ident)*]) => {
        $(
            #[tokio::test(flavor = "multi_thread")]
            async fn $line() {
                Box::pin(crate::$file::$line(crate::Place::$store().await)).await;
            }
        )*
    };
}

/// On every store.
mod everywhere {
    on_each! {
        stores sqlite memory postgres mysql redis;
        lines requests [
            h1_post_and_patch_are_guarded_and_nothing_else
            h2_a_key_is_the_same_quoted_and_bare
            h3_a_missing_key_is_refused_or_runs_unguarded
            h4_a_malformed_key_is_refused
            h5_keys_of_two_callers_never_meet
            h6_path_query_and_body_make_the_request
            h7_another_request_is_refused_and_changes_nothing
            h8_a_copy_in_flight_is_told_to_wait_or_waits
            h9_a_client_that_left_finds_its_answer
            h11_the_end_of_the_call_decides
            h13_a_long_reply_is_omitted_and_never_run_again
            h14_a_body_that_is_too_large_runs_nothing
            h15_empty_replies_and_trailers_come_back
            h16_a_replay_is_the_first_answer_byte_for_byte
            h17_what_is_of_the_moment_is_not_stored
            h18_the_expiry_is_told_where_asked
            h19_a_refusal_is_a_problem_document
            h26_sigterm_finishes_what_runs
            fifty_copies_run_once
        ]
    }
}

/// On stores that several processes share, and that outlive each of them.
mod across_processes {
    on_each! {
        stores sqlite postgres mysql redis;
        lines shared [
            h8_a_copy_in_another_process_waits_for_the_answer
            h10_an_answer_that_was_seen_outlives_kill_9
            h22_a_stale_owner_is_fenced_and_answers_with_the_record
            h24_a_takeover_tells_its_attempt
            h25_held_after_kill_9_until_an_operator_resolves_it
            an_operator_frees_a_key
            a_record_expires_and_is_purged
        ]
    }
}

/// On stores behind a network.
mod behind_a_network {
    on_each! {
        stores postgres mysql redis;
        lines unreachable [
            h20_without_its_store_nothing_runs_and_afterwards_it_does
            h20_a_claim_whose_answer_was_lost_runs_once
            h21_a_reply_that_cannot_be_recorded_is_given_and_said
            h21_a_store_that_is_back_within_the_lease_gets_the_reply
            an_owner_that_was_cut_off_longer_than_its_lease_is_not_taken_over
        ]
    }
}

/// Tries lines in turn, each on an emptied cluster: six processes take seconds to come about.
macro_rules! in_turn {
    ($cluster:ident: $($file:ident $line:ident)*) => {
        $( Box::pin($file::$line(Place::cluster(&$cluster).await)).await; )*
    };
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_answers_as_other_stores_do() {
    let cluster = RedisCluster::start(&Redis::options().durable()).await;
    in_turn! {
        cluster:
        requests h2_a_key_is_the_same_quoted_and_bare
        requests h5_keys_of_two_callers_never_meet
        requests h7_another_request_is_refused_and_changes_nothing
        requests h8_a_copy_in_flight_is_told_to_wait_or_waits
        requests h11_the_end_of_the_call_decides
        requests h16_a_replay_is_the_first_answer_byte_for_byte
        requests fifty_copies_run_once
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_is_shared_and_outlives_its_gateways() {
    let cluster = RedisCluster::start(&Redis::options().durable()).await;
    in_turn! {
        cluster:
        shared h8_a_copy_in_another_process_waits_for_the_answer
        shared h10_an_answer_that_was_seen_outlives_kill_9
        shared h22_a_stale_owner_is_fenced_and_answers_with_the_record
        shared h25_held_after_kill_9_until_an_operator_resolves_it
        shared an_operator_frees_a_key
    }
}
