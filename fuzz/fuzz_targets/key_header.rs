//! The value of the key header: any bytes.
//!
//! `cargo fuzz run --sanitizer none key_header -- -max_total_time=600 -max_len=4096`
#![no_main]

#[path = "../properties/key_header.rs"]
mod key_header;

libfuzzer_sys::fuzz_target!(|data: &[u8]| key_header::check(data));
