//! Canonical JSON: one text, or two.
//!
//! `cargo fuzz run --sanitizer none canonical_json -- -max_total_time=600 -max_len=4096`
#![no_main]

#[path = "../properties/canonical_json.rs"]
mod canonical_json;
#[allow(dead_code, reason = "each target uses its part")]
#[path = "../properties/json.rs"]
mod json;
libfuzzer_sys::fuzz_target!(|data: &[u8]| canonical_json::check(data));
