//! Our own code with one fault at a time: the simulation finds each, by the rule that it breaks.

use std::process::Command;

use onlyonce_core::Mutant;
use onlyonce_prove::Rule;

use crate::VARIABLE;

/// Which rule tells of it. A mutant is a process's, so that each has one.
fn found(mutant: Mutant, rule: Rule) {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "every_seed_holds", "--nocapture", "--test-threads=1"])
        .env(Mutant::VARIABLE, mutant.name())
        .env(VARIABLE, "0..1000")
        .output()
        .unwrap();
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{} lives on", mutant.name());
    assert!(told.contains(&format!("  {rule}: ")), "{} is not found by {rule}:\n{told}", mutant.name());
}

macro_rules! each {
    ($($name:ident: $mutant:ident, $rule:ident;)*) => {
        $(
            #[test]
            fn $name() {
                found(Mutant::$mutant, Rule::$rule);
            }
        )*

        #[test]
        fn none_is_left_out() {
            assert_eq!([$(Mutant::$mutant),*], Mutant::LEASED);
        }
    };
}

each! {
    fencing_off: FencingOff, Identical;
    token_is_a_counter: TokenIsACounter, Once;
    check_then_insert: CheckThenInsert, Once;
    answer_before_record: AnswerBeforeRecord, Kept;
    release_on_disconnect: ReleaseOnDisconnect, Once;
    cache_before_fingerprint: CacheBeforeFingerprint, Mismatch;
    purge_by_age: PurgeByAge, Once;
    unique_dropped: UniqueDropped, Once;
}
