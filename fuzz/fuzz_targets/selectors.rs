//! JSON pointers, what they find, and fingerprints by them.
//!
//! `cargo fuzz run --sanitizer none selectors -- -max_total_time=600 -max_len=4096`
#![no_main]

#[allow(dead_code, reason = "each target uses its part")]
#[path = "../properties/json.rs"]
mod json;
#[path = "../properties/selectors.rs"]
mod selectors;
libfuzzer_sys::fuzz_target!(|data: &[u8]| selectors::check(data));
