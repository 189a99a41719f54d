//! A stored reply: any status, head and body.
//!
//! `cargo fuzz run --sanitizer none reply -- -max_total_time=600 -max_len=4096`
#![no_main]

#[path = "../properties/reply.rs"]
mod reply;

libfuzzer_sys::fuzz_target!(|data: &[u8]| reply::check(data));
