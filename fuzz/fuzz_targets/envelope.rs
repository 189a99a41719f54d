//! The envelope of a message: any bytes, read by any key expression.
//!
//! `cargo fuzz run --sanitizer none envelope -- -max_total_time=600 -max_len=4096`
#![no_main]

#[path = "../properties/envelope.rs"]
mod envelope;
#[allow(dead_code, reason = "each target uses its part")]
#[path = "../properties/json.rs"]
mod json;
libfuzzer_sys::fuzz_target!(|data: &[u8]| envelope::check(data));
