//! The envelope of a message: any bytes, read by any key expression.
//!
//! `cargo fuzz run --sanitizer none envelope -- -max_total_time=600 -max_len=4096`
#![no_main]

#[path = "../properties/envelope.rs"]
mod properties;

libfuzzer_sys::fuzz_target!(|data: &[u8]| properties::check(data));
